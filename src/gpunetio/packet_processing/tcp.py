"""TCP on the server's side of a connection: what to send, and what an acknowledgement means (RFC 9293).

There is no congestion control and no selective acknowledgement: a response is sent as fast as the client's window
allows, and after a loss, again from the first byte that was not acknowledged.

Functions take `row`, the address of a SERVED, and `lane`, that of a LANE.
"""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from ..eth.headers import ipv4_at, tcp_at
from ..formats.packet import (
    ETHERNET, IPV4, TCP, TCP_ACK, TCP_FIN, TCP_OFFSET_SHIFT, TCP_PSH, TCP_RST,
)
from ..jit.ops import ld_fixed32
from .connection import (
    CLOSING, HEADER_BYTES, HTTP, REQUEST_BYTES, RESPONDING, SERVED, TAG_ROOM, lane_at, served_at,
)

SEQUENCE_MASK = (1 << 32) - 1
DUPLICATES = 3  # acknowledgements that indicate a lost segment (RFC 5681 3.2)
_HALF = 1 << 31
_AT_ONCE = 1 << 16  # bytes of a WQE
_IP = SERVED.header + TAG_ROOM + ETHERNET.size
_TCP = _IP + IPV4.size
_HEADER_WORDS = TCP.size // 4 << TCP_OFFSET_SHIFT



@device_function
def distance(later, earlier):
    """Return how far one sequence number is after another: -2^31 … 2^31 - 1 (RFC 9293 3.4)."""
    return (later - earlier + _HALF & SEQUENCE_MASK) - _HALF


@device_function
def receive_window(row):
    """Return the bytes that the client may send. Bytes after the last request are not kept."""
    c = served_at(row)
    return REQUEST_BYTES if c.flags & CLOSING else REQUEST_BYTES - c.filled


@device_function
def _transmit(http, txq, lane, row, sequence, flags, address, nbytes):
    """Send a segment, or as many as the payload needs. An error of the queue becomes the status of the lane."""
    c, ip, tcp = served_at(row), ipv4_at(row + _IP), tcp_at(row + _TCP)
    most = min(nbytes, c.mss)
    ip.total_length = IPV4.size + TCP.size + most
    tcp.sequence, tcp.acknowledgement = sequence, c.rcv_nxt
    tcp.offset_flags, tcp.window = _HEADER_WORDS | flags, receive_window(row)
    lkey = ld_fixed32(http + HTTP.pages_lkey)
    mss = c.mss if nbytes > most else 0
    begin = row + SERVED.header + TAG_ROOM - c.tags
    ticket = dev.txq_send_headers(txq, begin, HEADER_BYTES + c.tags, address, lkey, nbytes, mss)
    if ticket < 0:
        lane_at(lane).status = ticket


@device_function
def acknowledge(http, txq, lane, row):
    """Send an acknowledgement without data."""
    _transmit(http, txq, lane, row, served_at(row).snd_nxt, TCP_ACK, 0, 0)


@device_function
def reset(http, txq, lane, row):
    """Send a RST."""
    _transmit(http, txq, lane, row, served_at(row).snd_nxt, TCP_RST | TCP_ACK, 0, 0)


@device_function
def in_flight(row):
    """Return how much of the sequence space was sent but not acknowledged."""
    c = served_at(row)
    return distance(c.snd_max, c.snd_una)


@device_function
def is_finished(row):
    """Return whether the client has acknowledged our FIN."""
    c = served_at(row)
    return c.flags & CLOSING != 0 and distance(c.snd_una, c.base) > c.total


@device_function
def close(row, now):
    """Send a FIN after everything that was sent. No response may be under way."""
    c = served_at(row)
    c.flags |= CLOSING
    c.base, c.total, c.progress, c.sent, c.retries = c.snd_una, 0, now, now, 0
    c.checked, c.checked_una = now, c.snd_una


@device_function
def _piece(row, sent):
    """Return the address of a response after `sent` bytes, and how many bytes follow there. Its head may lie apart."""
    c = served_at(row)
    if sent >= c.head_bytes:
        return c.body + sent - c.head_bytes, c.total - sent
    together = c.head + c.head_bytes == c.body
    return c.head + sent, (c.total if together else c.head_bytes) - sent


@device_function
def send_pending(http, txq, lane, row, now, least_window):
    """Send what the client's window allows of the response, and the FIN. Return how many WQEs that took.

    For a probe, the window counts as at least `least_window` (RFC 9293 3.8.6.1).
    """
    c = served_at(row)
    posted = 0
    while c.flags & (RESPONDING | CLOSING) and lane_at(lane).status == 0:
        sent = distance(c.snd_nxt, c.base)
        if sent > c.total or (sent == c.total and c.flags & CLOSING == 0):
            break
        address, left = _piece(row, sent) if sent < c.total else (0, 0)
        ahead = distance(c.snd_nxt, c.snd_una)
        nbytes = min(left, max(c.window, least_window) - ahead, _AT_ONCE)
        if nbytes < left and nbytes > c.mss:
            nbytes -= nbytes % c.mss
        if nbytes < left and (nbytes <= 0 or (nbytes < c.mss and ahead > 0)):
            break  # small segments wait until others are acknowledged (RFC 9293 3.8.6.2.1)
        flags = TCP_ACK
        if sent + nbytes == c.total:
            flags |= TCP_PSH if nbytes > 0 else 0
            flags |= TCP_FIN if c.flags & CLOSING else 0
        if in_flight(row) == 0:
            c.sent = now
        _transmit(http, txq, lane, row, c.snd_nxt, flags, address, nbytes)
        c.snd_nxt = c.snd_nxt + nbytes + (flags & TCP_FIN) & SEQUENCE_MASK
        if distance(c.snd_nxt, c.snd_max) > 0:
            c.snd_max = c.snd_nxt
        posted += 1
    return posted


@device_function
def go_back(lane, row):
    """Send again what was not acknowledged. Further duplicate acknowledgements for it are ignored (RFC 6582)."""
    c = served_at(row)
    if c.snd_nxt != c.snd_una:
        lane_at(lane).retransmitted += 1
    c.snd_nxt, c.recover, c.duplicates = c.snd_una, c.snd_max, 0


@device_function
def take_acknowledgement(lane, row, number, window, bare, now):
    """Process the acknowledgement and the window of a segment, which is `bare` if it carries nothing else.

    Return False if the segment acknowledges something that was not sent.
    """
    c = served_at(row)
    new = distance(number, c.snd_una)
    if new > in_flight(row):
        return False
    if new < 0:
        return True  # an old acknowledgement, in a late segment
    if new > 0:
        c.snd_una, c.progress, c.sent = number, now, now
        c.retries, c.duplicates = 0, 0
        if distance(c.snd_nxt, number) < 0:
            c.snd_nxt = number
    elif bare and window == c.window and in_flight(row) > 0:
        c.duplicates += 1
        if c.duplicates == DUPLICATES and distance(c.snd_una, c.recover) >= 0:
            go_back(lane, row)
    if c.window == 0 and window > 0:
        c.snd_nxt = c.snd_una  # a probe may have been refused
    c.window = window
    if c.flags & RESPONDING and distance(c.snd_una, c.base) >= c.total:
        c.flags &= ~RESPONDING
        c.progress = now
    return True
