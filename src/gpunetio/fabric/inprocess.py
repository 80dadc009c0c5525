"""The in-process wire: two NICs of one process, a pipe of frames in each direction."""

from __future__ import annotations

from dataclasses import dataclass

from ..memory import HostMemory
from .frames import pipe_size

CAPACITY = 1 << 20  # bytes of frames per direction


@dataclass(frozen=True)
class LinkEnd:
    """One NIC's end of a wire made of pipes: the pipe to fill, the one to empty, and what wakes the peer."""

    tx: int
    rx: int
    capacity: int
    peer_notify_fd: int


class InProcessWire:
    """A wire with two ends. `notify_fds` wake the engines at its first and second end."""

    ends: tuple[LinkEnd, LinkEnd]

    def __init__(self, notify_fds: tuple[int, int]):
        size = pipe_size(CAPACITY)
        self._memory, self._holders = HostMemory(2 * size), 2
        there, back = self._memory.address, self._memory.address + size
        self.ends = LinkEnd(there, back, CAPACITY, notify_fds[1]), LinkEnd(back, there, CAPACITY, notify_fds[0])

    def drop(self) -> None:
        """Note that one NIC no longer uses the wire. The second call frees the memory."""
        self._holders -= 1
        if self._holders == 0:
            self._memory.close()
