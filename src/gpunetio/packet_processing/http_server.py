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
    SLOT_BITS, SLOTS, STATE_SHIFT, TAG_ROOM, connection_at, lane_at, segment_at, served_at,
)
from .counts import WORK
from .http_request import (
    CLOSE, FOUND, HEAD_ONLY, METHOD_NOT_ALLOWED, empty_lines, is_no_request, parse_request, request_end,
)
from .pages import (
    BAD_REQUEST_ROW, KEEP_ALIVE_SECONDS, NOT_ALLOWED_ROW, TOO_LARGE_ROW, find_page, page_at, page_of_status,
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
def _retransmission(row):
    """Return when unacknowledged data are sent again."""
    c = served_at(row)
    return c.sent + (FIRST_TIMEOUT_NS << min(c.retries, _MOST_DOUBLINGS))


@device_function
def _set_deadline(http, slot, row):
    """Store the time at which the connection's timer is due."""
    c = served_at(row)
    if c.generation == 0:
        deadline = 0
    elif c.flags & RESPONDING or in_flight(row) > 0:
        deadline = min(_retransmission(row), c.checked + CHECK_NS)
    elif c.flags & CLOSING:
        deadline = c.progress + LINGER_NS
    else:
        idle = c.filled == 0 and c.total > 0  # after a response
        deadline = c.progress + (KEEP_ALIVE_NS if idle else REQUEST_NS)
    dev.st64(ld_fixed64(http + HTTP.deadlines) + 8 * slot, deadline)


@device_function
def _tell(http, slot, generation, state):
    dev.st_release64(ld_fixed64(http + HTTP.states) + 8 * slot, generation << STATE_SHIFT | state)


@device_function
def _end(http, lane, slot, row):
    """Forget a connection. The CPU frees its slot."""
    c = served_at(row)
    lane_at(lane).ended += 1
    _tell(http, slot, c.generation, ENDED)
    c.generation = 0


@device_function
def _begin(http, lane, slot, row, segment, now):
    """Begin a connection whose client has answered the CPU's SYN-ACK. Return whether this segment did so."""
    s, generation = segment_at(segment), segment_at(segment).tag >> SLOT_BITS
    shared = ld_fixed64(http + HTTP.connections) + slot * CONNECTION.size
    if ld_relaxed32(shared + CONNECTION.generation) != generation:
        return False
    dev.fence_acquire_sys()
    a, c = connection_at(shared), served_at(row)
    if dev.ld64(ld_fixed64(http + HTTP.states) + 8 * slot) == generation << STATE_SHIFT | ENDED:
        return False
    first, peer = a.first_sequence + 1 & SEQUENCE_MASK, a.peer_sequence + 1 & SEQUENCE_MASK
    if s.flags & TCP_RST:
        if s.sequence == peer:
            _tell(http, slot, generation, ENDED)
        return False
    if s.flags & (TCP_ACK | TCP_SYN) != TCP_ACK or s.acknowledgement != first:
        return False
    for offset in range(0, SERVED.header - 2, 8):
        dev.st64(row + offset, 0)
    c.generation, c.rcv_nxt, c.mss, c.window_shift = generation, peer, a.mss, a.window_shift
    c.snd_una, c.snd_nxt, c.snd_max, c.recover, c.base = first, first, first, first, first
    c.progress, c.tags = now, a.tags
    for offset in range(0, TAG_ROOM + HEADER_BYTES, 2):
        dev.st16(row + SERVED.header + offset, dev.ld16(shared + CONNECTION.header + offset))
    lane_at(lane).opened += 1
    _tell(http, slot, generation, OPEN)
    return True


@device_function
def _respond(http, lane, row, page, flags, now):
    """Begin a response with a page, as the flags of its request demand."""
    c, p, n = served_at(row), page_at(page), lane_at(lane)
    keep = flags & CLOSE == 0
    c.head, c.head_bytes = p.keep_head if keep else p.close_head, p.keep_bytes if keep else p.close_bytes
    c.body = p.keep_body if keep else p.close_body
    c.base, c.total = c.snd_una, c.head_bytes + (0 if flags & HEAD_ONLY else p.body_bytes)
    c.flags |= RESPONDING | (0 if keep else CLOSING)
    c.progress, c.sent, c.retries = now, now, 0
    c.checked, c.checked_una = now, c.snd_una
    n.requests += 1
    if p.status == 200:
        n.ok += 1
    elif p.status == 404:
        n.not_found += 1
    elif p.status == 405:
        n.not_allowed += 1
    elif p.status == 431:
        n.too_large += 1
    else:
        n.bad_request += 1


@device_function
def serve_next(http, lane, row, buffer, now):
    """Answer the next request, if it is complete and the last response is acknowledged.

    Bytes that cannot become a request are answered at once.
    """
    c, pages = served_at(row), ld_fixed64(http + HTTP.pages)
    if c.flags & (RESPONDING | CLOSING):
        return
    skipped = empty_lines(buffer, c.filled)
    if skipped > 0:
        consume(row, buffer, skipped)
    nbytes = request_end(buffer, c.searched, c.filled)
    if nbytes > 0:
        what, path, length, flags = parse_request(buffer, nbytes)
        if what == FOUND:
            page = find_page(pages, path, length)
        else:
            page = page_of_status(pages, NOT_ALLOWED_ROW if what == METHOD_NOT_ALLOWED else BAD_REQUEST_ROW)
        consume(row, buffer, nbytes)
        _respond(http, lane, row, page, flags, now)
        return
    c.searched = c.filled
    hopeless = is_no_request(buffer, c.filled)
    if hopeless or c.filled == REQUEST_BYTES:
        c.filled, c.searched, c.ahead_to = 0, 0, 0
        _respond(
            http, lane, row, page_of_status(pages, BAD_REQUEST_ROW if hopeless else TOO_LARGE_ROW), CLOSE, now
        )
    elif c.flags & PEER_FIN:
        close(row, now)


@device_function
def _answer_unacceptable(http, txq, lane, row, now):
    """Acknowledge what was acceptable so far, at a limited rate: two ends that disagree would never stop."""
    c = served_at(row)
    if now - c.answered >= _ANSWERS_NS:
        c.answered = now
        acknowledge(http, txq, lane, row)


@device_function
def _receive(http, txq, lane, slot, row, segment, now):
    """Process a segment of an open connection (RFC 9293 3.10.7.4). Return whether the connection is still open."""
    c, s = served_at(row), segment_at(segment)
    nbytes, fin = s.nbytes, s.flags & TCP_FIN != 0
    old = distance(c.rcv_nxt, s.sequence)  # bytes that were received before
    if s.flags & TCP_RST:
        if old != 0 and 0 < -old < receive_window(row):
            _answer_unacceptable(http, txq, lane, row, now)  # RFC 5961 3.2
        return old != 0
    if s.flags & TCP_SYN or -old > receive_window(row) or (old > 0 and old >= nbytes + fin):
        _answer_unacceptable(http, txq, lane, row, now)  # RFC 5961 4.2; or there is nothing new
        return True
    if s.flags & TCP_ACK == 0:
        return True
    bare = nbytes == 0 and not fin
    if not take_acknowledgement(lane, row, s.acknowledgement, s.window << c.window_shift, bare, now):
        _answer_unacceptable(http, txq, lane, row, now)
        return True
    buffer = ld_fixed64(http + HTTP.buffers) + slot * REQUEST_BYTES
    owed = True
    if old < 0:
        keep_ahead(row, buffer, segment + SEGMENT.payload, nbytes, -old)
    else:
        owed = take_payload(row, buffer, segment + SEGMENT.payload + old, nbytes - old, fin)
    serve_next(http, lane, row, buffer, now)
    if send_pending(http, txq, lane, row, now, 0) == 0 and owed:
        acknowledge(http, txq, lane, row)
    return not (is_finished(row) and c.flags & PEER_FIN)


@device_function
def take_segment(http, txq, lane, segment, now):
    """Process a segment that was handed over to a lane."""
    s = segment_at(segment)
    slot = s.tag & _SLOT_MASK
    row = ld_fixed64(http + HTTP.served) + slot * SERVED.size
    if served_at(row).generation != s.tag >> SLOT_BITS and not _begin(http, lane, slot, row, segment, now):
        return
    if not _receive(http, txq, lane, slot, row, segment, now):
        _end(http, lane, slot, row)
    _set_deadline(http, slot, row)


@device_function
def _takes_too_little(row, now):
    """Return whether a check of the client's rate is due, and the client has taken too little since the last check."""
    c = served_at(row)
    if now - c.checked < CHECK_NS:
        return False
    taken = distance(c.snd_una, c.checked_una)
    c.checked, c.checked_una = now, c.snd_una
    return taken < _LEAST_BYTES


@device_function
def _on_time(http, txq, lane, slot, row, now):
    """Handle a timer that is due: send again, close after a pause, or give the client up."""
    c = served_at(row)
    if c.flags & RESPONDING or in_flight(row) > 0:
        if _takes_too_little(row, now):
            reset(http, txq, lane, row)
            _end(http, lane, slot, row)
        elif _retransmission(row) <= now:
            go_back(lane, row)
            c.retries += 1
            c.sent = now
            send_pending(http, txq, lane, row, now, 1)
    elif c.flags & CLOSING:
        _end(http, lane, slot, row)
    else:
        close(row, now)
        send_pending(http, txq, lane, row, now, 0)
    _set_deadline(http, slot, row)


# --- a lane ----------------------------------------------------------------------------------------------------------


@device_function
def look_at_deadlines(http, txq, number, lane, now):
    """Handle the timers of a lane's connections."""
    deadlines, served = ld_fixed64(http + HTTP.deadlines), ld_fixed64(http + HTTP.served)
    for slot in range(number, SLOTS, ld_fixed32(http + HTTP.lanes_num)):
        if 0 < dev.ld64(deadlines + 8 * slot) <= now:
            _on_time(http, txq, lane, slot, served + slot * SERVED.size, now)


@device_function
def take_segments(http, txq, number, lane, ring, now):
    """Process segments of a lane's ring, up to a burst. Return how many."""
    for taken in range(_BURST):
        item = dev.sem_next(ring, number)
        if item < 0:
            return taken
        take_segment(http, txq, lane, dev.sem_info(ring, item), now)
        dev.sem_free(ring, number)
    return _BURST


@kernel
def serve_http(stop, http, txq, work):
    """Serve HTTP until the word at `stop` is not 0, or the send queue fails. One thread for each lane.

    Warp w serves the connections of queue w.
    """
    thread, queues = dev.thread_idx(), ld_fixed32(http + HTTP.queues_num)
    width = ld_fixed32(http + HTTP.lanes_num) // queues
    number = thread % width * queues + thread // width
    lane = ld_fixed64(http + HTTP.lanes) + number * LANE.size
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
