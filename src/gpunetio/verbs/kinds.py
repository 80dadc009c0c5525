"""The two kinds of objects that a device can have: created with DEVX commands, or by libibverbs."""

from __future__ import annotations

from typing import NamedTuple

from .channel import CompChannel
from .cq import CQ
from .devx.channel import DevxCompChannel
from .devx.cq import DevxCQ
from .devx.qp import DevxQP
from .devx.srq import DevxSRQ
from .ibv.channel import PlainCompChannel
from .ibv.cq import PlainCQ
from .ibv.qp import PlainQP
from .ibv.srq import PlainSRQ
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
