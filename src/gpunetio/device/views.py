"""Views of the exported structures: `qp_at(address).sq_wqe_num`. See struct_view.py."""


from ..formats.device_structs import DEV_CQ, DEV_QP
from ..formats.eth_device import PACKET_ATTR
from ..jit.struct_view import View, struct_view

qp_at: View = struct_view(DEV_QP)
cq_at: View = struct_view(DEV_CQ)
attr_at: View = struct_view(PACKET_ATTR)
ATTR_BYTES = PACKET_ATTR.size  # from one packet's attributes to the next one's
