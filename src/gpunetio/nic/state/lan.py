"""The LAN of a host's software NICs: the MACs that a port has learned, and the frame that it is sending."""

from __future__ import annotations

from ...formats.layout import I64
from .record import State, engine, nobody, requester


class LanState(State):
    """A port on a LAN, and what it knows about the other ports."""

    port: I64 = nobody("address of the ETHERNET_WIRE with the port's MAC: no GIDs, no descriptor")
    macs: I64 = nobody("address of MACS rows of MAC_ROW")
    room: I64 = nobody("address of room for a frame that does not go to one wire alone")
    # the frame that is being built
    wire: I64 = requester("address of the WIRE that it goes to; 0 if it goes to all", line=True)
    place: I64 = requester("address of its FRAME in the pipe of that wire; 0 if it is in `room`")


LAN = LanState.entry


class MacRow(State, align=32):
    """A MAC that a port has learned. Free rows are zeros, so they are the oldest."""

    mac: I64 = engine("the MAC, a load of its 6 bytes")
    wire: I64 = engine("address of the WIRE over which its last frame came. Commands set it to 0")
    seen: I64 = engine("when that was, in ns of the engine's clock")


MAC_ROW = MacRow.entry
MACS = 4096  # rows, a power of two
PROBES = 8  # rows in which a MAC may be, from the one that it selects
MAX_AGE_NS = 300 * 10**9  # as bridges forget MACs (IEEE 802.1Q 8.8.3)
