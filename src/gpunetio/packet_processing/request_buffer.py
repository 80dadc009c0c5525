"""The request buffer of a connection: the client's bytes in order and, after one gap, bytes that came too early.

Functions take `row`, the address of a SERVED, and `buffer`, that of REQUEST_BYTES.
"""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from .connection import CLOSING, PEER_FIN, REQUEST_BYTES, served_at
from .tcp import SEQUENCE_MASK


@device_function
def consume(row, buffer, nbytes):
    """Remove the first bytes of the request buffer."""
    c = served_at(row)
    for i in range(nbytes, max(c.filled, c.ahead_to)):
        dev.st8(buffer + i - nbytes, dev.ld8(buffer + i))
    c.filled -= nbytes
    c.searched = 0
    if c.ahead_to != 0:
        c.ahead_from -= nbytes
        c.ahead_to -= nbytes


@device_function
def keep_ahead(row, buffer, payload, nbytes, gap):
    """Store payload that came `gap` bytes too early, as far as there is room, unless that would make a second gap.

    Segments overtake others when a connection gets its flow rule, because some still come through the CPU.
    """
    c = served_at(row)
    begin = c.filled + gap
    end = min(begin + nbytes, REQUEST_BYTES)
    apart = c.ahead_to != 0 and (begin > c.ahead_to or end < c.ahead_from)
    if begin >= end or apart or c.flags & CLOSING:
        return
    dev.copy(buffer + begin, payload, end - begin)
    c.ahead_from = min(begin, c.ahead_from) if c.ahead_to != 0 else begin
    c.ahead_to = max(end, c.ahead_to)


@device_function
def _close_gap(row):
    """Move the bytes that came too early to those in order, if the gap is closed."""
    c = served_at(row)
    more = max(c.ahead_to - c.filled, 0)
    c.filled += more
    c.rcv_nxt = c.rcv_nxt + more & SEQUENCE_MASK
    c.ahead_to = 0


@device_function
def take_payload(row, buffer, payload, nbytes, fin):
    """Store the client's next bytes, as far as there is room, and its FIN. Return whether anything was stored."""
    c = served_at(row)
    taken = nbytes
    if c.flags & CLOSING == 0:
        taken = min(nbytes, REQUEST_BYTES - c.filled)
        dev.copy(buffer + c.filled, payload, taken)
        c.filled += taken
    c.rcv_nxt = c.rcv_nxt + taken & SEQUENCE_MASK
    if c.ahead_to != 0 and c.filled >= c.ahead_from:
        _close_gap(row)
    if fin and taken == nbytes and c.flags & PEER_FIN == 0:
        c.rcv_nxt = c.rcv_nxt + 1 & SEQUENCE_MASK
        c.flags |= PEER_FIN
    return nbytes > 0 or fin
