"""DOCA Verbs: the control path of a device, with its objects, their attributes and their states.

Open a device, create a PD, register memory, create completion queues and queue pairs, and connect them:

    with verbs.open() as ctx:
        pd = ctx.create_pd()
        cq = ctx.create_cq(256)
        a, b = (pd.create_qp(sq_wr=256, send_cq=cq) for _ in range(2))
        a.connect(b)
"""

from ..providers import DeviceInfo, device_list
from .ah import AddressHandle
from .ah_attr import AhAttr
from .channel import CompChannel
from .context import Context, import_context, open
from .cq import CQ, CqAttr
from .device_attr import DeviceAttributes
from .devx.objects import Devx, DevxObject, RingLayout
from .events import AsyncEvent
from .handle import Handle
from .mr import MR
from .opening import open_async
from .pd import PD
from .qp import QP, QpEndpoint
from .qp_init import QpInitAttr
from .qp_state import QpAttr
from .srq import SRQ, SrqAttr
from .uar import UAR
from .umem import UMEM
from .work import BadWrError, Completion, RecvWr, Sender, SendWr, Sge, memcpy, wait_cq_pi

__all__ = [
    "device_list", "DeviceInfo", "open", "open_async", "import_context",
    "Context", "DeviceAttributes", "PD", "MR", "UMEM", "UAR", "CQ", "CqAttr",
    "CompChannel", "AsyncEvent", "SRQ", "SrqAttr",
    "QP", "QpInitAttr", "QpAttr", "AhAttr", "AddressHandle", "QpEndpoint", "Handle",
    "Devx", "DevxObject", "RingLayout",
    "Sge", "SendWr", "RecvWr", "Completion", "Sender", "BadWrError", "memcpy", "wait_cq_pi",
]
