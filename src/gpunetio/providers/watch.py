"""Who hears of the software NICs that this process opens and closes, and may change their ports: a test tool.

A process that a test starts, such as a program in C under `gpunetio run`, finds the folder for the artefacts of that
test in its environment. Its NICs leave their captures and their diagnoses there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..nic.engine.port import PortConfig

if TYPE_CHECKING:
    from ..nic.nic import SoftNic

logger: logging.Logger = logging.getLogger("gpunetio.providers")


ARTEFACTS = "GPUNETIO_ARTEFACTS"  # the variable that names the folder
DIAGNOSES = "*.diagnosis"  # what processes leave in it: a file for each


class Watcher(Protocol):
    """Hears of each software NIC of the process. The program under test opens them as always."""

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        """Return the port with which a NIC opens; `port` is what the program asked for."""
        ...

    def closing(self, nic: SoftNic) -> None:
        """Look at a NIC that is about to stop."""
        ...


def with_capture(port: PortConfig, folder: Path) -> PortConfig:
    """Return a port with a capture in a folder of a test, unless the program writes a file of its own.

    A capture in another folder, as of `gpunetio run --pcap`, goes to the folder of the test.
    """
    if port.capture is not None and not Path(port.capture).is_dir():
        return port
    folder.mkdir(parents=True, exist_ok=True)
    return replace(port, capture=folder)


class _ForParent:
    """The watcher of a process that a test has started."""

    def __init__(self, folder: Path):
        self._folder = folder

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        return with_capture(port, self._folder)

    def closing(self, nic: SoftNic) -> None:
        from ..nic.diagnosis import diagnose

        if self._folder.is_dir():  # else the test has passed already
            with (self._folder / DIAGNOSES.replace("*", str(os.getpid()))).open("a", encoding="utf-8") as file:
                file.write(diagnose(nic))


_watchers: list[Watcher] = []


def _watcher() -> Watcher | None:
    if _watchers:
        return _watchers[-1]
    folder = os.environ.get(ARTEFACTS)
    return _ForParent(Path(folder)) if folder else None


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
    watcher = _watcher()
    return watcher.opening(name, port) if watcher else port


def closing(nic: SoftNic) -> None:
    """Tell the watcher that a NIC is about to stop. What the watcher does wrong is logged, and the NIC stops."""
    if (watcher := _watcher()) is None:
        return
    try:
        watcher.closing(nic)
    except Exception:
        logger.exception("%s closes unseen", nic.name)
