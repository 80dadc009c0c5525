"""The in-process wire: two NICs of one process, a pipe of frames in each direction."""

from __future__ import annotations

from dataclasses import dataclass

from ..memory import HostMemory
from .frames import pipe_size

CAPACITY = 1 << 20  # bytes of frames per direction


@dataclass(frozen=True)
class LinkEnd:
    """What a NIC must know of a wire made of pipes: the pipes that it fills and empties, and whom to wake."""

    tx: int
    rx: int
    capacity: int
    peer_rope: int


class InProcessWire:
    """A wire with two ends. `ropes` ring the bells of the engines at its first and second end."""

    ends: tuple[LinkEnd, LinkEnd]

    def __init__(self, ropes: tuple[int, int]):
        size = pipe_size(CAPACITY)
        self._memory, self._holders = HostMemory(2 * size), 2
        there, back = self._memory.address, self._memory.address + size
        self.ends = LinkEnd(there, back, CAPACITY, ropes[1]), LinkEnd(back, there, CAPACITY, ropes[0])

    def drop(self) -> None:
        """Note that one NIC no longer uses the wire. The second call frees the memory."""
        self._holders -= 1
        if self._holders == 0:
            self._memory.close()
