"""Views of the exported structures: `qp_at(address).sq_wqe_num`. See struct_view.py."""

from ..formats.device_structs import DEV_CQ, DEV_QP
from .struct_view import struct_view

qp_at = struct_view(DEV_QP)
cq_at = struct_view(DEV_CQ)
