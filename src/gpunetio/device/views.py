"""Views of the exported structures: `qp_at(address).sq_wqe_num`. See struct_view.py."""

from typing import Any

from ..formats.device_structs import DEV_CQ, DEV_QP
from ..jit.struct_view import struct_view

qp_at: Any = struct_view(DEV_QP)
cq_at: Any = struct_view(DEV_CQ)
