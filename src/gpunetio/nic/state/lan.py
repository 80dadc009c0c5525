"""The LAN of the software NICs of a host: where a NIC has seen MACs, and the frame that it sends."""

from __future__ import annotations

from ...jit.struct_view import View, struct_view
from .record import record

LAN = record("lan", """
    port           i64      nobody     address of the ETHERNET_WIRE with the port's MAC: no GIDs, no descriptor
    macs           i64      nobody     address of MACS rows of MAC_ROW
    room           i64      nobody     address of room for a frame that does not go to one wire alone
    # the frame that is being built
    wire           i64      requester  address of the WIRE that it goes to; 0 if it goes to all
    place          i64      requester  address of its FRAME in the pipe of that wire; 0 if it is in `room`
""")
lan_at: View = struct_view(LAN)

# Free rows are zeros, so they are the oldest.
MAC_ROW = record("mac_row", """
    mac            i64      engine     the MAC, a load of its 6 bytes
    wire           i64      engine     address of the WIRE over which its last frame came. Commands set it to 0
    seen           i64      engine     when that was, in ns of the engine's clock
""", align=32)
MACS = 4096  # rows, a power of two
PROBES = 8  # rows in which a MAC may be, from the one that it selects
MAX_AGE_NS = 300 * 10**9  # as bridges forget MACs (IEEE 802.1Q 8.8.3)
mac_row_at: View = struct_view(MAC_ROW)
