"""Paths of datagrams: where the engine finds the destination that an address vector names."""

from __future__ import annotations

from ...formats.layout import I64
from ...jit.compile import device_function, engine_function
from .record import State, command
from .worker import WorkerState


class Path(State):
    """A destination of datagrams, and the wire that leads there.

    On Ethernet, a destination is a GID and the index of the own GID; on InfiniBand it is a LID, as (0, LID, 0).
    """

    used: I64 = command("not 0: an address handle leads here")
    high: I64 = command("first half of the destination's GID; 0 on InfiniBand")
    low: I64 = command("second half; on InfiniBand the LID")
    own: I64 = command("index of the own GID; 0 on InfiniBand")
    wire: I64 = command("address of the WIRE that leads there; 0 if that is gone")
    peer_high: I64 = command("first half of the GID that the wire knows")
    peer_low: I64 = command("second half")
    source: I64 = command("index of the own GID that the wire knows")
    egress: I64 = command("what packets leave by (fabric/udp.py)")


PATH = Path.entry
MAX_PATHS = 4096  # a power of two
PROBES = 64  # rows in which a path may be, from the one that its destination selects


@device_function
def path_slot(high: int, low: int, own: int) -> int:
    """Return the number of the first row in which the path to a destination may be."""
    bits = high ^ low ^ own
    bits ^= bits >> 32
    bits ^= bits >> 12
    return (bits ^ bits >> 24) & (MAX_PATHS - 1)


@engine_function
def find_path(worker: WorkerState, high: int, low: int, own: int) -> int:
    """Return the address of the path to a destination, or 0 if no address handle has asked for it."""
    first = path_slot(high, low, own)
    for i in range(PROBES):
        path = Path(worker.paths + ((first + i) & (MAX_PATHS - 1)) * PATH.size)
        if path.low == low and path.high == high and path.own == own and path.used:
            return path
    return 0
