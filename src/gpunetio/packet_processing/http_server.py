"""The kernel that serves HTTP: it takes segments of its connections, and answers requests with pages.

Each thread is a lane. A connection belongs to one lane, which processes its segments in the order of their arrival, and
its timers. The server acknowledges what has arrived in order, answers one request at a time, and ends the connection
when both sides have sent a FIN, or when a client no longer answers. It does not wait for late segments then
(TIME-WAIT): the CPU answers these with a RST.
"""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..formats.packet import TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN
from ..jit.ops import ld_fixed32, ld_fixed64, ld_relaxed32
from .connection import (
    CLOSING, CONNECTION, ENDED, HEADER_BYTES, HTTP, LANE, OPEN, PEER_FIN, REQUEST_BYTES, RESPONDING, SEGMENT, SERVED,
    SLOTS, SLOT_BITS, STATE_SHIFT, TAG_ROOM, Connection, Http, Lane, Segment, Served,
)
from .counts import WORK, Work
from .http_request import (
    CLOSE, FOUND, HEAD_ONLY, METHOD_NOT_ALLOWED, empty_lines, is_no_request, parse_request, request_end,
)
from .pages import (
    BAD_REQUEST_ROW, KEEP_ALIVE_SECONDS, NOT_ALLOWED_ROW, TOO_LARGE_ROW, PageRow, PageTable, find_page, page_of_status,
)
from .request_buffer import consume, keep_ahead, take_payload
from .tcp import (
    SEQUENCE_MASK, acknowledge, close, distance, go_back, in_flight, is_finished, receive_window, reset,
    send_pending, take_acknowledgement,
)
from ..jit.compile import device_function

_MS = 1_000_000  # ns
FIRST_TIMEOUT_NS = 300 * _MS  # until a segment is sent again; it doubles, up to 64 times this
_MOST_DOUBLINGS = 6
CHECK_NS = 30_000 * _MS  # between two checks of how fast a client takes a response
LEAST_RATE = 240  # bytes a second: the connection of a slower client is reset. As in ASP.NET Core's server, Kestrel
_LEAST_BYTES = LEAST_RATE * CHECK_NS // (1000 * _MS)
KEEP_ALIVE_NS = KEEP_ALIVE_SECONDS * 1000 * _MS
REQUEST_NS = 15_000 * _MS  # for a request to arrive completely, and for the first one to begin
_ANSWERS_NS = 5 * _MS  # between two answers to segments that are not acceptable (RFC 5961 7)
LINGER_NS = 2_000 * _MS  # for the client's FIN after ours
_SCAN_NS = 20 * _MS  # between two checks of all deadlines
_BURST = 64  # segments between two readings of the clock
_LONGEST_NAP_NS = 10 * _MS
_SLOT_MASK = SLOTS - 1


# --- a connection ----------------------------------------------------------------------------------------------------


@device_function
def _retransmission(conn: Served) -> int:
    """Return when unacknowledged data are sent again."""
    return conn.sent + (FIRST_TIMEOUT_NS << min(conn.retries, _MOST_DOUBLINGS))


@device_function
def _set_deadline(http: Http, slot: int, conn: Served) -> None:
    """Store the time at which the connection's timer is due."""
    if conn.generation == 0:
        deadline = 0
    elif conn.flags & RESPONDING or in_flight(conn) > 0:
        deadline = min(_retransmission(conn), conn.checked + CHECK_NS)
    elif conn.flags & CLOSING:
        deadline = conn.progress + LINGER_NS
    else:
        idle = conn.filled == 0 and conn.total > 0  # after a response
        deadline = conn.progress + (KEEP_ALIVE_NS if idle else REQUEST_NS)
    dev.st64(ld_fixed64(http + HTTP.deadlines) + 8 * slot, deadline)


@device_function
def _tell(http: Http, slot: int, generation: int, state: int) -> None:
    dev.st_release64(ld_fixed64(http + HTTP.states) + 8 * slot, generation << STATE_SHIFT | state)


@device_function
def _end(http: Http, lane: Lane, slot: int, conn: Served) -> None:
    """Forget a connection. The CPU frees its slot."""
    lane.ended += 1
    _tell(http, slot, conn.generation, ENDED)
    conn.generation = 0


@device_function
def _begin(http: Http, lane: Lane, slot: int, conn: Served, segment: Segment, now: int) -> bool:
    """Begin a connection whose client has answered the CPU's SYN-ACK. Return whether this segment did so."""
    generation = segment.tag >> SLOT_BITS
    shared = Connection(ld_fixed64(http + HTTP.connections) + slot * CONNECTION.size)
    if ld_relaxed32(shared + CONNECTION.generation) != generation:
        return False
    dev.fence_acquire_sys()
    if dev.ld64(ld_fixed64(http + HTTP.states) + 8 * slot) == generation << STATE_SHIFT | ENDED:
        return False
    first, peer = shared.first_sequence + 1 & SEQUENCE_MASK, shared.peer_sequence + 1 & SEQUENCE_MASK
    if segment.flags & TCP_RST:
        if segment.sequence == peer:
            _tell(http, slot, generation, ENDED)
        return False
    if segment.flags & (TCP_ACK | TCP_SYN) != TCP_ACK or segment.acknowledgement != first:
        return False
    for offset in range(0, SERVED.header - 2, 8):
        dev.st64(conn + offset, 0)
    conn.generation, conn.rcv_nxt, conn.mss, conn.window_shift = generation, peer, shared.mss, shared.window_shift
    conn.snd_una, conn.snd_nxt, conn.snd_max, conn.recover, conn.base = first, first, first, first, first
    conn.progress, conn.tags = now, shared.tags
    for offset in range(0, TAG_ROOM + HEADER_BYTES, 2):
        dev.st16(conn + SERVED.header + offset, dev.ld16(shared + CONNECTION.header + offset))
    lane.opened += 1
    _tell(http, slot, generation, OPEN)
    return True


@device_function
def _respond(http: Http, lane: Lane, conn: Served, page: PageRow, flags: int, now: int) -> None:
    """Begin a response with a page, as the flags of its request demand."""
    keep = flags & CLOSE == 0
    conn.head = page.keep_head if keep else page.close_head
    conn.head_bytes = page.keep_bytes if keep else page.close_bytes
    conn.body = page.keep_body if keep else page.close_body
    conn.base, conn.total = conn.snd_una, conn.head_bytes + (0 if flags & HEAD_ONLY else page.body_bytes)
    conn.flags |= RESPONDING | (0 if keep else CLOSING)
    conn.progress, conn.sent, conn.retries = now, now, 0
    conn.checked, conn.checked_una = now, conn.snd_una
    lane.requests += 1
    if page.status == 200:
        lane.ok += 1
    elif page.status == 404:
        lane.not_found += 1
    elif page.status == 405:
        lane.not_allowed += 1
    elif page.status == 431:
        lane.too_large += 1
    else:
        lane.bad_request += 1


@device_function
def serve_next(http: Http, lane: Lane, conn: Served, buffer: int, now: int) -> None:
    """Answer the next request, if it is complete and the last response is acknowledged.

    Bytes that cannot become a request are answered at once.
    """
    pages = PageTable(ld_fixed64(http + HTTP.pages))
    if conn.flags & (RESPONDING | CLOSING):
        return
    skipped = empty_lines(buffer, conn.filled)
    if skipped > 0:
        consume(conn, buffer, skipped)
    nbytes = request_end(buffer, conn.searched, conn.filled)
    if nbytes > 0:
        what, path, length, flags = parse_request(buffer, nbytes)
        if what == FOUND:
            page = find_page(pages, path, length)
        else:
            page = page_of_status(pages, NOT_ALLOWED_ROW if what == METHOD_NOT_ALLOWED else BAD_REQUEST_ROW)
        consume(conn, buffer, nbytes)
        _respond(http, lane, conn, page, flags, now)
        return
    conn.searched = conn.filled
    hopeless = is_no_request(buffer, conn.filled)
    if hopeless or conn.filled == REQUEST_BYTES:
        conn.filled, conn.searched, conn.ahead_to = 0, 0, 0
        _respond(
            http, lane, conn, page_of_status(pages, BAD_REQUEST_ROW if hopeless else TOO_LARGE_ROW), CLOSE, now
        )
    elif conn.flags & PEER_FIN:
        close(conn, now)


@device_function
def _answer_unacceptable(http: Http, txq: dev.EthTxq, lane: Lane, conn: Served, now: int) -> None:
    """Acknowledge what was acceptable so far, at a limited rate: two ends that disagree would never stop."""
    if now - conn.answered >= _ANSWERS_NS:
        conn.answered = now
        acknowledge(http, txq, lane, conn)


@device_function
def _receive(http: Http, txq: dev.EthTxq, lane: Lane, slot: int, conn: Served, segment: Segment, now: int) -> bool:
    """Process a segment of an open connection (RFC 9293 3.10.7.4). Return whether the connection is still open."""
    nbytes, fin = segment.nbytes, segment.flags & TCP_FIN != 0
    old = distance(conn.rcv_nxt, segment.sequence)  # bytes that were received before
    if segment.flags & TCP_RST:
        if old != 0 and 0 < -old < receive_window(conn):
            _answer_unacceptable(http, txq, lane, conn, now)  # RFC 5961 3.2
        return old != 0
    if segment.flags & TCP_SYN or -old > receive_window(conn) or (old > 0 and old >= nbytes + fin):
        _answer_unacceptable(http, txq, lane, conn, now)  # RFC 5961 4.2; or there is nothing new
        return True
    if segment.flags & TCP_ACK == 0:
        return True
    bare = nbytes == 0 and not fin
    if not take_acknowledgement(lane, conn, segment.acknowledgement, segment.window << conn.window_shift, bare, now):
        _answer_unacceptable(http, txq, lane, conn, now)
        return True
    buffer = ld_fixed64(http + HTTP.buffers) + slot * REQUEST_BYTES
    owed = True
    if old < 0:
        keep_ahead(conn, buffer, segment + SEGMENT.payload, nbytes, -old)
    else:
        owed = take_payload(conn, buffer, segment + SEGMENT.payload + old, nbytes - old, fin)
    serve_next(http, lane, conn, buffer, now)
    if send_pending(http, txq, lane, conn, now, 0) == 0 and owed:
        acknowledge(http, txq, lane, conn)
    return not (is_finished(conn) and conn.flags & PEER_FIN)


@device_function
def take_segment(http: Http, txq: dev.EthTxq, lane: Lane, segment: Segment, now: int) -> None:
    """Process a segment that was handed over to a lane."""
    slot = segment.tag & _SLOT_MASK
    conn = Served(ld_fixed64(http + HTTP.served) + slot * SERVED.size)
    if conn.generation != segment.tag >> SLOT_BITS and not _begin(http, lane, slot, conn, segment, now):
        return
    if not _receive(http, txq, lane, slot, conn, segment, now):
        _end(http, lane, slot, conn)
    _set_deadline(http, slot, conn)


@device_function
def _takes_too_little(conn: Served, now: int) -> bool:
    """Return whether a check of the client's rate is due, and the client has taken too little since the last check."""
    if now - conn.checked < CHECK_NS:
        return False
    taken = distance(conn.snd_una, conn.checked_una)
    conn.checked, conn.checked_una = now, conn.snd_una
    return taken < _LEAST_BYTES


@device_function
def _on_time(http: Http, txq: dev.EthTxq, lane: Lane, slot: int, conn: Served, now: int) -> None:
    """Handle a timer that is due: send again, close after a pause, or give the client up."""
    if conn.flags & RESPONDING or in_flight(conn) > 0:
        if _takes_too_little(conn, now):
            reset(http, txq, lane, conn)
            _end(http, lane, slot, conn)
        elif _retransmission(conn) <= now:
            go_back(lane, conn)
            conn.retries += 1
            conn.sent = now
            send_pending(http, txq, lane, conn, now, 1)
    elif conn.flags & CLOSING:
        _end(http, lane, slot, conn)
    else:
        close(conn, now)
        send_pending(http, txq, lane, conn, now, 0)
    _set_deadline(http, slot, conn)


# --- a lane ----------------------------------------------------------------------------------------------------------


@device_function
def look_at_deadlines(http: Http, txq: dev.EthTxq, number: int, lane: Lane, now: int) -> None:
    """Handle the timers of a lane's connections."""
    deadlines, served = ld_fixed64(http + HTTP.deadlines), ld_fixed64(http + HTTP.served)
    for slot in range(number, SLOTS, ld_fixed32(http + HTTP.lanes_num)):
        if 0 < dev.ld64(deadlines + 8 * slot) <= now:
            _on_time(http, txq, lane, slot, Served(served + slot * SERVED.size), now)


@device_function
def take_segments(http: Http, txq: dev.EthTxq, number: int, lane: Lane, ring: dev.DevSemaphore, now: int) -> int:
    """Process segments of a lane's ring, up to a burst. Return how many."""
    for taken in range(_BURST):
        item = dev.sem_next(ring, number)
        if item < 0:
            return taken
        take_segment(http, txq, lane, Segment(dev.sem_info(ring, item)), now)
        dev.sem_free(ring, number)
    return _BURST


@kernel
def serve_http(stop: int, http: Http, txq: dev.EthTxq, work: Work) -> None:
    """Serve HTTP until the word at `stop` is not 0, or the send queue fails. One thread for each lane.

    Warp w serves the connections of queue w.
    """
    thread, queues = dev.thread_idx(), ld_fixed32(http + HTTP.queues_num)
    width = ld_fixed32(http + HTTP.lanes_num) // queues
    number = thread % width * queues + thread // width
    lane = Lane(ld_fixed64(http + HTTP.lanes) + number * LANE.size)
    from_kernels, from_cpu = ld_fixed64(http + HTTP.from_kernels), ld_fixed64(http + HTTP.from_cpu)
    look_at = 0
    polls = 0
    segments, busy_ns = 0, 0
    while dev.ld64(lane + LANE.status) == 0 and dev.ld_relaxed64(stop) == 0:
        now = dev.clock_ns()
        taken = take_segments(http, txq, number, lane, from_kernels, now)
        taken += take_segments(http, txq, number, lane, from_cpu, now)
        if now >= look_at:
            look_at = now + _SCAN_NS
            look_at_deadlines(http, txq, number, lane, now)
            if dev.txq_poll(txq, 1, dev.GPU, 0) < 0:  # otherwise an error would show only when the ring is full
                dev.st64(lane + LANE.status, dev.EIO)
        if taken > 0:
            polls = 0
            segments += taken
            busy_ns += dev.clock_ns() - now
            dev.st64(lane + LANE.segments, segments)
            dev.st64(lane + LANE.busy_ns, busy_ns)
        else:
            dev.nap(polls, lane + LANE.nap, _LONGEST_NAP_NS)
            polls += 1
    if dev.ld64(lane + LANE.status) < 0:
        dev.st64(work + WORK.status, dev.ld64(lane + LANE.status))
