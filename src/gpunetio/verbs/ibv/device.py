"""Devices without DEVX: what libibverbs lacks, and how the objects of such a device report it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import NotSupportedError
from ...providers.plain_verbs import PlainVerbs

if TYPE_CHECKING:
    from ..context import Context
    from ..handle import Handle

_CURE = "use a ConnectX or a software NIC for that"
RECEIVED = 1 << 63  # in the wr_id that libibverbs sees: of a completion that has failed nothing else says what it is of


def plain_verbs(ctx: Context) -> PlainVerbs:
    """Return libibverbs' calls for a device without DEVX."""
    plain = ctx.provider.plain
    if plain is None:
        raise TypeError(f"{ctx} is a device with DEVX")
    return plain


def needs_devx(ctx: Context, what: str) -> NotSupportedError:
    """Return the error for something that needs DEVX."""
    return NotSupportedError(
        f"{what}: that needs DEVX, but only libibverbs drives {ctx.name}; leave it out, or {_CURE}"
    )


def ring_attributes(count: int) -> Any:
    """Return `count` attributes that raise NotSupportedError here: a queue has them where its ring is known."""
    return tuple(_RingAttribute() for _ in range(count))


class _RingAttribute:

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, handle: Handle | None, owner: type | None = None) -> Any:
        if handle is None:
            return self
        raise NotSupportedError(
            f"{handle} has no {self._name}: libibverbs keeps its queues to itself, so only the CPU can post and "
            f"poll, here; for kernels, {_CURE}"
        )
