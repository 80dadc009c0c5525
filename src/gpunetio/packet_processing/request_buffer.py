"""The request buffer of a connection: the client's bytes in order and, after one gap, bytes that came too early.

Functions take `conn`, the connection, and `buffer`, the address of its REQUEST_BYTES.
"""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from .connection import CLOSING, PEER_FIN, REQUEST_BYTES, Served
from .tcp import SEQUENCE_MASK


@device_function
def consume(conn: Served, buffer: int, nbytes: int) -> None:
    """Remove the first bytes of the request buffer."""
    for i in range(nbytes, max(conn.filled, conn.ahead_to)):
        dev.st8(buffer + i - nbytes, dev.ld8(buffer + i))
    conn.filled -= nbytes
    conn.searched = 0
    if conn.ahead_to != 0:
        conn.ahead_from -= nbytes
        conn.ahead_to -= nbytes


@device_function
def keep_ahead(conn: Served, buffer: int, payload: int, nbytes: int, gap: int) -> None:
    """Store payload that came `gap` bytes too early, as far as there is room, unless that would make a second gap.

    Segments overtake others when a connection gets its flow rule, because some still come through the CPU.
    """
    begin = conn.filled + gap
    end = min(begin + nbytes, REQUEST_BYTES)
    apart = conn.ahead_to != 0 and (begin > conn.ahead_to or end < conn.ahead_from)
    if begin >= end or apart or conn.flags & CLOSING:
        return
    dev.copy(buffer + begin, payload, end - begin)
    conn.ahead_from = min(begin, conn.ahead_from) if conn.ahead_to != 0 else begin
    conn.ahead_to = max(end, conn.ahead_to)


@device_function
def _close_gap(conn: Served) -> None:
    """Move the bytes that came too early to those in order, if the gap is closed."""
    more = max(conn.ahead_to - conn.filled, 0)
    conn.filled += more
    conn.rcv_nxt = conn.rcv_nxt + more & SEQUENCE_MASK
    conn.ahead_to = 0


@device_function
def take_payload(conn: Served, buffer: int, payload: int, nbytes: int, fin: bool) -> bool:
    """Store the client's next bytes, as far as there is room, and its FIN. Return whether anything was stored."""
    taken = nbytes
    if conn.flags & CLOSING == 0:
        taken = min(nbytes, REQUEST_BYTES - conn.filled)
        dev.copy(buffer + conn.filled, payload, taken)
        conn.filled += taken
    conn.rcv_nxt = conn.rcv_nxt + taken & SEQUENCE_MASK
    if conn.ahead_to != 0 and conn.filled >= conn.ahead_from:
        _close_gap(conn)
    if fin and taken == nbytes and conn.flags & PEER_FIN == 0:
        conn.rcv_nxt = conn.rcv_nxt + 1 & SEQUENCE_MASK
        conn.flags |= PEER_FIN
    return nbytes > 0 or fin
