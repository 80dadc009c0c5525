"""TCP on the server's side of a connection: what to send, and what an acknowledgement means (RFC 9293).

There is no congestion control and no selective acknowledgement: a response is sent as fast as the client's window
allows, and after a loss, again from the first byte that was not acknowledged.

Functions take `conn`, the connection, and `lane`, its lane.
"""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from ..eth.headers import ipv4_at, tcp_at
from ..formats.packet import (
    ETHERNET, IPV4, TCP, TCP_ACK, TCP_FIN, TCP_OFFSET_SHIFT, TCP_PSH, TCP_RST,
)
from ..jit.ops import ld_fixed32
from .connection import CLOSING, HEADER_BYTES, HTTP, REQUEST_BYTES, RESPONDING, SERVED, TAG_ROOM, Http, Lane, Served

SEQUENCE_MASK = (1 << 32) - 1
DUPLICATES = 3  # acknowledgements that indicate a lost segment (RFC 5681 3.2)
_HALF = 1 << 31
_AT_ONCE = 1 << 16  # bytes of a WQE
_IP = SERVED.header + TAG_ROOM + ETHERNET.size
_TCP = _IP + IPV4.size
_HEADER_WORDS = TCP.size // 4 << TCP_OFFSET_SHIFT


@device_function
def distance(later: int, earlier: int) -> int:
    """Return how far one sequence number is after another: -2^31 … 2^31 - 1 (RFC 9293 3.4)."""
    return (later - earlier + _HALF & SEQUENCE_MASK) - _HALF


@device_function
def receive_window(conn: Served) -> int:
    """Return the bytes that the client may send. Bytes after the last request are not kept."""
    return REQUEST_BYTES if conn.flags & CLOSING else REQUEST_BYTES - conn.filled


@device_function
def _transmit(
    http: Http, txq: dev.EthTxq, lane: Lane, conn: Served, sequence: int, flags: int, address: int, nbytes: int
) -> None:
    """Send a segment, or as many as the payload needs. An error of the queue becomes the status of the lane."""
    ip, tcp = ipv4_at(conn + _IP), tcp_at(conn + _TCP)
    most = min(nbytes, conn.mss)
    ip.total_length = IPV4.size + TCP.size + most
    tcp.sequence, tcp.acknowledgement = sequence, conn.rcv_nxt
    tcp.offset_flags, tcp.window = _HEADER_WORDS | flags, receive_window(conn)
    lkey = ld_fixed32(http + HTTP.pages_lkey)
    mss = conn.mss if nbytes > most else 0
    begin = conn + SERVED.header + TAG_ROOM - conn.tags
    ticket = dev.txq_send_headers(txq, begin, HEADER_BYTES + conn.tags, address, lkey, nbytes, mss)
    if ticket < 0:
        lane.status = ticket


@device_function
def acknowledge(http: Http, txq: dev.EthTxq, lane: Lane, conn: Served) -> None:
    """Send an acknowledgement without data."""
    _transmit(http, txq, lane, conn, conn.snd_nxt, TCP_ACK, 0, 0)


@device_function
def reset(http: Http, txq: dev.EthTxq, lane: Lane, conn: Served) -> None:
    """Send a RST."""
    _transmit(http, txq, lane, conn, conn.snd_nxt, TCP_RST | TCP_ACK, 0, 0)


@device_function
def in_flight(conn: Served) -> int:
    """Return how much of the sequence space was sent but not acknowledged."""
    return distance(conn.snd_max, conn.snd_una)


@device_function
def is_finished(conn: Served) -> bool:
    """Return whether the client has acknowledged our FIN."""
    return conn.flags & CLOSING != 0 and distance(conn.snd_una, conn.base) > conn.total


@device_function
def close(conn: Served, now: int) -> None:
    """Send a FIN after everything that was sent. No response may be under way."""
    conn.flags |= CLOSING
    conn.base, conn.total, conn.progress, conn.sent, conn.retries = conn.snd_una, 0, now, now, 0
    conn.checked, conn.checked_una = now, conn.snd_una


@device_function
def _piece(conn: Served, sent: int) -> tuple[int, int]:
    """Return the address of a response after `sent` bytes, and how many bytes follow there. Its head may lie apart."""
    if sent >= conn.head_bytes:
        return conn.body + sent - conn.head_bytes, conn.total - sent
    together = conn.head + conn.head_bytes == conn.body
    return conn.head + sent, (conn.total if together else conn.head_bytes) - sent


@device_function
def send_pending(http: Http, txq: dev.EthTxq, lane: Lane, conn: Served, now: int, least_window: int) -> int:
    """Send what the client's window allows of the response, and the FIN. Return how many WQEs that took.

    For a probe, the window counts as at least `least_window` (RFC 9293 3.8.6.1).
    """
    posted = 0
    while conn.flags & (RESPONDING | CLOSING) and lane.status == 0:
        sent = distance(conn.snd_nxt, conn.base)
        if sent > conn.total or (sent == conn.total and conn.flags & CLOSING == 0):
            break
        address, left = _piece(conn, sent) if sent < conn.total else (0, 0)
        ahead = distance(conn.snd_nxt, conn.snd_una)
        nbytes = min(left, max(conn.window, least_window) - ahead, _AT_ONCE)
        if nbytes < left and nbytes > conn.mss:
            nbytes -= nbytes % conn.mss
        if nbytes < left and (nbytes <= 0 or (nbytes < conn.mss and ahead > 0)):
            break  # small segments wait until others are acknowledged (RFC 9293 3.8.6.2.1)
        flags = TCP_ACK
        if sent + nbytes == conn.total:
            flags |= TCP_PSH if nbytes > 0 else 0
            flags |= TCP_FIN if conn.flags & CLOSING else 0
        if in_flight(conn) == 0:
            conn.sent = now
        _transmit(http, txq, lane, conn, conn.snd_nxt, flags, address, nbytes)
        conn.snd_nxt = conn.snd_nxt + nbytes + (flags & TCP_FIN) & SEQUENCE_MASK
        if distance(conn.snd_nxt, conn.snd_max) > 0:
            conn.snd_max = conn.snd_nxt
        posted += 1
    return posted


@device_function
def go_back(lane: Lane, conn: Served) -> None:
    """Send again what was not acknowledged. Further duplicate acknowledgements for it are ignored (RFC 6582)."""
    if conn.snd_nxt != conn.snd_una:
        lane.retransmitted += 1
    conn.snd_nxt, conn.recover, conn.duplicates = conn.snd_una, conn.snd_max, 0


@device_function
def take_acknowledgement(lane: Lane, conn: Served, number: int, window: int, bare: bool, now: int) -> bool:
    """Process the acknowledgement and the window of a segment, which is `bare` if it carries nothing else.

    Return False if the segment acknowledges something that was not sent.
    """
    new = distance(number, conn.snd_una)
    if new > in_flight(conn):
        return False
    if new < 0:
        return True  # an old acknowledgement, in a late segment
    if new > 0:
        conn.snd_una, conn.progress, conn.sent = number, now, now
        conn.retries, conn.duplicates = 0, 0
        if distance(conn.snd_nxt, number) < 0:
            conn.snd_nxt = number
    elif bare and window == conn.window and in_flight(conn) > 0:
        conn.duplicates += 1
        if conn.duplicates == DUPLICATES and distance(conn.snd_una, conn.recover) >= 0:
            go_back(lane, conn)
    if conn.window == 0 and window > 0:
        conn.snd_nxt = conn.snd_una  # a probe may have been refused
    conn.window = window
    if conn.flags & RESPONDING and distance(conn.snd_una, conn.base) >= conn.total:
        conn.flags &= ~RESPONDING
        conn.progress = now
    return True
