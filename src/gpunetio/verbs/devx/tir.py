"""TIRs, which direct received packets to receive queues."""

from __future__ import annotations

from collections.abc import Iterable

from ...formats.commands import Opcode
from ...formats.ethernet_queues import SelfLbBlock
from ..context import Context
from ..handle import Handle
from .objects import DevxObject


def create_tir(ctx: Context, uses: Iterable[Handle], **context: object) -> DevxObject:
    """Create a TIR that drops multicast frames sent by this context's own queues.

    A station does not receive its own frames. A program that forwards packets would otherwise forward such a frame
    forever.
    """
    domain = ctx.devx.transport_domain()
    return ctx.devx.create(
        Opcode.CREATE_TIR, uses=(domain, *uses),
        ctx={"transport_domain": domain, "self_lb_block": SelfLbBlock.MULTICAST, **context},
    )
