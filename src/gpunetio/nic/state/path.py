"""Paths of datagrams: where the engine finds the destination that an address vector names."""

from __future__ import annotations


from ...jit.compile import device_function, engine_function
from ...jit.struct_view import View, struct_view
from .nic import nic_at
from .record import record

# On Ethernet a destination is a GID and the index of the own GID, on InfiniBand a LID, as (0, LID, 0).
PATH = record("path", """
    used           i64      command    not 0: an address handle leads here
    high           i64      command    first half of the destination's GID; 0 on InfiniBand
    low            i64      command    second half; on InfiniBand the LID
    own            i64      command    index of the own GID; 0 on InfiniBand
    wire           i64      command    address of the WIRE that leads there; 0 if that is gone
    peer_high      i64      command    first half of the GID that the wire knows
    peer_low       i64      command    second half
    source         i64      command    index of the own GID that the wire knows
    egress         i64      command    what packets leave by (fabric/udp.py)
""")
MAX_PATHS = 4096  # a power of two
PROBES = 64  # rows in which a path may be, from the one that its destination selects
path_at: View = struct_view(PATH)


@device_function
def path_slot(high, low, own):
    """Return the number of the first row in which the path to a destination may be."""
    bits = high ^ low ^ own
    bits ^= bits >> 32
    bits ^= bits >> 12
    return (bits ^ bits >> 24) & (MAX_PATHS - 1)


@engine_function
def find_path(nic, high, low, own):
    """Return the address of the path to a destination, or 0 if no address handle has asked for it."""
    first = path_slot(high, low, own)
    for i in range(PROBES):
        path = nic_at(nic).paths + ((first + i) & (MAX_PATHS - 1)) * PATH.size
        p = path_at(path)
        if p.low == low and p.high == high and p.own == own and p.used:
            return path
    return 0
