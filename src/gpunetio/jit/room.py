"""SMs that kernels must leave free for NICs that run on the GPU (nic/gpu/gpu_backend.py).

If a kernel has blocks on all SMs, and they wait for such a NIC, the NIC never runs: a block does not make room for
another one. Blocks are spread over all SMs before an SM gets a second one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..errors import InvalidValueError


@dataclass
class Room:
    """The number of SMs of a GPU, and how many of them NICs need."""

    sms: int
    needed: int = 0


_rooms: dict[int, Room] = {}  # by ordinal
_changing = threading.Lock()


def need(ordinal: int, sms: int, change: int) -> None:
    """Note that NICs need `change` more of the `sms` SMs of a GPU, or fewer."""
    with _changing:
        _rooms.setdefault(ordinal, Room(sms)).needed += change


def check_room(kernel: str, grid: int, ordinal: int) -> None:
    """Raise InvalidValueError if a kernel with `grid` blocks can leave too few SMs of a GPU."""
    room = _rooms.get(ordinal)
    if room is None or room.needed == 0 or grid <= room.sms - room.needed:
        return
    raise InvalidValueError(
        f"{kernel}: {grid} blocks can take all {room.sms} SMs of GPU {ordinal}, where NICs make their turns on "
        f"{room.needed}, so their requests would never be executed: launch at most {room.sms - room.needed} blocks"
    )
