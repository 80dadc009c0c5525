"""Watch the software NICs that this process opens and closes, and change their ports: a tool for tests.

If a test starts a process, such as a C program under `gpunetio run`, the environment names the folder for that test's
artefacts. The process's NICs leave their captures and diagnoses there.
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


ARTEFACTS = "GPUNETIO_ARTEFACTS"  # the environment variable that names the folder
DIAGNOSES = "*.diagnosis"  # files in that folder, one per process


class Watcher(Protocol):
    """Is notified of each software NIC of the process. The program under test opens NICs as usual."""

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        """Return the port with which a NIC opens. `port` is the one that the program requested."""
        ...

    def closing(self, nic: SoftNic) -> None:
        """Inspect a NIC that is about to stop."""
        ...


def with_capture(port: PortConfig, folder: Path) -> PortConfig:
    """Return a port that captures to a test's folder, unless the program captures to a file of its own.

    A capture to another folder, as with `gpunetio run --pcap`, goes to the test's folder instead.
    """
    if port.capture is not None and not Path(port.capture).is_dir():
        return port
    folder.mkdir(parents=True, exist_ok=True)
    return replace(port, capture=folder)


class _ForParent:
    """The watcher in a process that a test has started."""

    def __init__(self, folder: Path):
        self._folder = folder

    def opening(self, name: str, port: PortConfig) -> PortConfig:
        return with_capture(port, self._folder)

    def closing(self, nic: SoftNic) -> None:
        from ..nic.diagnosis import diagnose

        if self._folder.is_dir():  # otherwise the test has already passed
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
    """Notify a watcher of NICs during the block. With several watchers, only the last one is notified.

    NICs that are already open keep their ports.
    """
    _watchers.append(by)
    try:
        yield
    finally:
        _watchers.remove(by)


def opening(name: str, port: PortConfig) -> PortConfig:
    """Return the port with which a NIC opens, as the watcher wants it."""
    watcher = _watcher()
    return watcher.opening(name, port) if watcher else port


def closing(nic: SoftNic) -> None:
    """Notify the watcher that a NIC is about to stop. An error in the watcher is logged, and the NIC still stops."""
    if (watcher := _watcher()) is None:
        return
    try:
        watcher.closing(nic)
    except Exception:
        logger.exception("%s closes unseen", nic.name)
