"""The devices of the connection manager: which one has an address, and which one leads to a peer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath

from ..cm.address import gid_of, text_of
from ..cm.agent import Agent
from ..errors import DocaError
from ..formats.packet import LINK_LOCAL
from ..verbs import Context
from .environment import FOLDER
from .sockaddr import family_of

PORT = 1  # of each device
_DISCARD = 9  # a port, used only to look up a route


@dataclass(eq=False)
class Device:
    """An open device: its agent of queue pair 1, and the GUID by which librdmacm identifies it."""

    ctx: Context
    agent: Agent
    guid: bytes

    def gid_index(self, gid: bytes) -> int | None:
        """Return the index of a GID in the GID table."""
        return next((index for index, found in self.gids() if found == gid), None)

    def gids(self) -> Iterator[tuple[int, bytes]]:
        """Yield the GIDs with their indices in the table."""
        for index in range(self.ctx.query_port(PORT).gid_tbl_len):
            gid = bytes(self.ctx.query_gid(PORT, index))
            if any(gid):
                yield index, gid


class Devices:
    """The devices of this program, each opened when the connection manager first needs it, and closed with it.

    `opener` opens a device by its number. When the program opens the device as well, it gets the same NIC.
    """

    def __init__(self, names: list[str], opener: Callable[[int], Context]):
        self._names, self._opener = names, opener
        self._opened: dict[int, Device] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Device]:
        return map(self._device, range(len(self._names)))

    def _device(self, number: int) -> Device:
        with self._lock:
            if number not in self._opened:
                guid = FilePath(os.environ[FOLDER], "sys/class/infiniband", self._names[number], "node_guid")
                ctx = self._opener(number)
                try:
                    self._opened[number] = Device(ctx, Agent.of(ctx, PORT), _guid(guid.read_text()))
                except BaseException:
                    ctx.close()
                    raise
            return self._opened[number]

    @property
    def opened(self) -> list[Device]:
        """Return the devices that are open already."""
        return list(self._opened.values())

    def having(self, gid: bytes) -> Device | None:
        """Return the device that has an address, or None."""
        return next((device for device in self if device.gid_index(gid) is not None), None)

    def toward(self, gid: bytes) -> tuple[Device, bytes] | None:
        """Return the device that leads to a peer, and its own address to use.

        The kernel's route determines that address. If no device has it, as on loopback, any address of the same IP
        version will do, except a link-local GID: it stands for the device's first address, of whichever version that
        is.
        """
        source = _source(gid)
        if source is not None and (device := self.having(source)) is not None:
            return device, source
        family = family_of(gid)
        return next(
            (
                (device, own) for device in self for _, own in device.gids()
                if family_of(own) == family and not own.startswith(LINK_LOCAL)
            ), None,
        )

    def close(self) -> None:
        """Close the devices. Their agents give peers a second to answer."""
        while self._opened:
            _, device = self._opened.popitem()
            with suppress(DocaError):
                device.ctx.close()


def _guid(text: str) -> bytes:
    """Return a GUID from its text in sysfs: four numbers of 16 bits."""
    return bytes.fromhex(text.strip().replace(":", ""))


def _source(gid: bytes) -> bytes | None:
    """Return the address from which the kernel would send to a peer, or None if there is no route."""
    with suppress(OSError), socket.socket(family_of(gid), socket.SOCK_DGRAM) as probe:
        probe.connect((text_of(gid), _DISCARD))
        return gid_of(probe.getsockname()[0])
    return None
