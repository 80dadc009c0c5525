"""The transport domain that the Ethernet queues of a context share."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from ..formats.commands import Opcode
from ..verbs import Context, DevxObject

_domains: WeakKeyDictionary[Context, DevxObject] = WeakKeyDictionary()
_lock = threading.Lock()


def transport_domain(ctx: Context) -> DevxObject:
    """Return the transport domain of the context's TIRs and TISs. It closes with the context."""
    with _lock:
        domain = _domains.get(ctx)
        if domain is None or domain.closed:
            domain = _domains[ctx] = ctx.devx.create(Opcode.ALLOC_TRANSPORT_DOMAIN)
        return domain
