"""A wire whose other end is a capture file of Ethernet frames. They arrive as from a network, so flow rules get them.

The wire of replay.py takes packets of RoCE and InfiniBand out of such a file, and is for queue pairs. This one has all
frames, as they are, and is for Ethernet queues.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import InvalidValueError
from ...fabric.claims import close_after_fork
from ...fabric.ethernet_records import FRAME_ROOM, SOCKET
from ...fabric.pcap_reader import PcapFile
from .ethernet import Ethernet
from .replay import TIMEOUT, Replayed, play

if TYPE_CHECKING:
    from ..nic import SoftNic

_BUFFER = 4 << 20  # bytes, if net.core.wmem_max allows
_PATIENCE = 0.01  # seconds


class Pcap(Ethernet):
    """A cable to this process, which sends the frames of the file. What the NIC sends is counted."""

    reading: int = SOCKET

    def attach(self) -> socket.socket:
        self.file = PcapFile(self.interface)
        try:
            if self.file.infiniband:
                raise InvalidValueError(
                    f"wire {self.name}: {self.file.path} has InfiniBand packets: `gpunetio replay` is for those"
                )
            near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        except BaseException:
            self.file.close()
            raise
        for end in (near, self._far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        close_after_fork(self._far)
        near.setblocking(False)
        return near

    def close(self) -> None:
        super().close()
        self._far.close()
        self.file.close()

    def put(self, frame: bytes) -> bool:
        """Put a frame on the wire. Return False if there was no room for _PATIENCE."""
        self._far.settimeout(_PATIENCE)
        try:
            self._far.send(frame)
        except TimeoutError:
            return False
        return True

    def take(self) -> int:
        """Take what the NIC has sent. Return how many frames that was."""
        count = 0
        self._far.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._far.recv(FRAME_ROOM)
                count += 1
        return count


make = Pcap


def replay_frames(
    nic: SoftNic, fast: bool = False, timeout: float = TIMEOUT, meanwhile: Callable[[], object] = lambda: None
) -> Replayed:
    """Put the frames of a capture file on the wire of a NIC, whose port must have the wire "pcap:FILE".

    Return when the NIC has taken them. `meanwhile` is called after each frame, to receive some. Each frame comes as
    long after the first one as its time stamp says or, if `fast`, as soon as there is room. TimedOutError when that
    takes, or would take, more than `timeout` seconds; InvalidValueError for a damaged file, whose frames up to there
    have been replayed.
    """
    wire = nic.wire_to_others()
    if not isinstance(wire, Pcap):
        raise InvalidValueError(
            f'the wire of {nic.name} is {nic.port.config.wire!r}: open it with PortConfig(wire="pcap:FILE")'
        )
    before = int(nic.counters["rx_frames"])

    def arrived(count: int) -> bool:
        return int(nic.counters["rx_frames"]) >= before + count

    return play(nic, wire, "frame", wire.file.frames(), arrived, fast, timeout, meanwhile)
