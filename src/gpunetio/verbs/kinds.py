"""The kind of a device's objects: created by mailboxes, or by libibverbs."""

from __future__ import annotations

from typing import NamedTuple

from .channel import CompChannel
from .cq import CQ
from .devx_channel import DevxCompChannel
from .devx_cq import DevxCQ
from .devx_qp import DevxQP
from .devx_srq import DevxSRQ
from .plain_channel import PlainCompChannel
from .plain_cq import PlainCQ
from .plain_qp import PlainQP
from .plain_srq import PlainSRQ
from .qp import QP
from .srq import SRQ


class Kinds(NamedTuple):
    """The classes of a context's objects."""

    channel: type[CompChannel]
    cq: type[CQ]
    srq: type[SRQ]
    qp: type[QP]


DEVX = Kinds(DevxCompChannel, DevxCQ, DevxSRQ, DevxQP)
PLAIN = Kinds(PlainCompChannel, PlainCQ, PlainSRQ, PlainQP)
