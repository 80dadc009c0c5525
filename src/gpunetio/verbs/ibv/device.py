"""Devices without DEVX: access to libibverbs' calls, and the errors for everything that needs DEVX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import NotSupportedError
from ...providers.plain_verbs import PlainVerbs

if TYPE_CHECKING:
    from ..context import Context
    from ..handle import Handle

_CURE = "use a ConnectX or a software NIC for that"
RECEIVED = 1 << 63  # set in a receive's wr_id for libibverbs: nothing else in a failed completion identifies a receive


def plain_verbs(ctx: Context) -> PlainVerbs:
    """Return the libibverbs calls of a device without DEVX."""
    plain = ctx.provider.plain
    if plain is None:
        raise TypeError(f"{ctx} is a device with DEVX")
    return plain


def needs_devx(ctx: Context, what: str) -> NotSupportedError:
    """Return the error for a feature that needs DEVX."""
    return NotSupportedError(
        f"{what}: that needs DEVX, but only libibverbs drives {ctx.name}; leave it out, or {_CURE}"
    )


def ring_attributes(count: int) -> Any:
    """Return `count` descriptors that raise NotSupportedError, for attributes of a ring that libibverbs hides."""
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
