"""Who hears of the software NICs that this process opens and closes, and may change their ports: a test tool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..nic.control.port import PortConfig

if TYPE_CHECKING:
    from ..nic.nic import SoftNic

logger: logging.Logger = logging.getLogger("gpunetio.providers")


class Watcher(Protocol):
    """Hears of each software NIC of the process. The program under test opens them as always."""

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        """Return the port with which a NIC opens; `port` is what the program asked for."""
        ...

    def closing(self, nic: SoftNic) -> None:
        """Look at a NIC that is about to stop."""
        ...


_watchers: list[Watcher] = []


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Tell a watcher of NICs while the block lasts. Of several watchers, the last one is told.

    NICs that are open already keep their ports.
    """
    _watchers.append(by)
    try:
        yield
    finally:
        _watchers.remove(by)


def opening(name: str, port: PortConfig) -> PortConfig:
    """Return the port with which a NIC opens."""
    return _watchers[-1].opening(name, port) if _watchers else port


def closing(nic: SoftNic) -> None:
    """Tell the watcher that a NIC is about to stop. What the watcher does wrong is logged, and the NIC stops."""
    if not _watchers:
        return
    try:
        _watchers[-1].closing(nic)
    except Exception:
        logger.exception("%s closes unseen", nic.name)
