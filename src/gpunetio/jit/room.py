"""SMs of GPUs that kernels must leave to NICs which make their turns there (nic/gpu/gpu_place.py).

A kernel whose blocks are on all SMs, and wait for such a NIC, would wait in vain: no block of a kernel makes room for
another one. Blocks are spread over all SMs before a second one goes to any of them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..errors import InvalidValueError


@dataclass
class Room:
    """The SMs of a GPU, and how many of them NICs need."""

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
