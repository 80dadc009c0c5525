"""The transport domain that the Ethernet queues and the flow rules of a context share, and the TIRs in it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from ...formats.commands import Opcode
from ...formats.ethernet import SelfLbBlock
from ..context import Context
from ..handle import Handle
from .objects import DevxObject

_domains: WeakKeyDictionary[Context, DevxObject] = WeakKeyDictionary()
_lock = threading.Lock()


def transport_domain(ctx: Context) -> DevxObject:
    """Return the transport domain of the context's TIRs and TISs. It closes with the context."""
    with _lock:
        domain = _domains.get(ctx)
        if domain is None or domain.closed:
            domain = _domains[ctx] = ctx.devx.create(Opcode.ALLOC_TRANSPORT_DOMAIN)
        return domain


def create_tir(ctx: Context, uses: Iterable[Handle], **context: object) -> DevxObject:
    """Create a TIR that does not take frames to groups from the context's own send queues: no station hears itself, and
    who forwards packets would send such frames for ever.
    """
    domain = transport_domain(ctx)
    return ctx.devx.create(
        Opcode.CREATE_TIR, uses=(domain, *uses),
        ctx={"transport_domain": domain, "self_lb_block": SelfLbBlock.MULTICAST, **context},
    )  # fmt: skip
