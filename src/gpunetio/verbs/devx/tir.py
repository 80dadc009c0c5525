"""TIRs, which lead received packets to receive queues."""

from __future__ import annotations

from collections.abc import Iterable

from ...formats.commands import Opcode
from ...formats.ethernet_queues import SelfLbBlock
from ..context import Context
from ..handle import Handle
from .objects import DevxObject


def create_tir(ctx: Context, uses: Iterable[Handle], **context: object) -> DevxObject:
    """Create a TIR that does not take frames to groups from the context's own send queues: no station hears itself, and
    who forwards packets would send such frames for ever.
    """
    domain = ctx.devx.transport_domain()
    return ctx.devx.create(
        Opcode.CREATE_TIR, uses=(domain, *uses),
        ctx={"transport_domain": domain, "self_lb_block": SelfLbBlock.MULTICAST, **context},
    )  # fmt: skip
