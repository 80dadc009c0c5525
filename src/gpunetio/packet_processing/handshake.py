"""The begin and end of the HTTP server's connections, on the CPU: SYN, SYN-ACK, slots, RST.

The flow rules send to the CPU: SYN, FIN and RST of all connections, segments that belong to none, and all segments of
connections without a rule of their own. Segments of a connection are handed to the server, which alone knows the
connection's state. When a connection has sent some segments, the CPU asks for a rule for it.
"""

from __future__ import annotations

from .. import device as dev
from ..eth import headers
from ..formats.packet import IPV4, TCP, TCP_ACK, TCP_FIN, TCP_FLAGS_MASK, TCP_RST, TCP_SYN
from ..jit.compile import device_function
from ..jit.ops import ld_fixed64
from .acceptor import (
    ACCEPTOR, ANSWERED, FREE, WANTED, AcceptorState, append, bind, count_connection, find, has_share, hash_of, held_row,
    remove, unbind,
)
from .connection import (
    CONNECTION, ENDED, LAST_GENERATION, MOST_PAYLOAD, REQUEST_BYTES, SLOTS, SLOT_BITS, STATE_SHIFT, TAG_ROOM,
    Connection,
)
from .counts import TCP_COUNTS, add
from .hand_over import put_segment
from .receive_tcp import class_of
from .tcp import SEQUENCE_MASK
from .tcp_frames import NO_SHIFT, find_segment, read_options, tags_of, write_headers, write_reset, write_syn_ack

HALF_OPEN_NS = 5_000_000_000
RULE_SEGMENTS = 8  # a connection that has sent this many gets a flow rule
HANDED_OVER = -1
_LOOK_NS = 10_000_000  # between two checks of all slots
_TO_CPU = TCP_SYN | TCP_FIN | TCP_RST  # segments with these flags always go to the CPU
_TICK_NS = 4000  # of the clock of initial sequence numbers


@device_function
def _shared_row(acceptor: AcceptorState, slot: int) -> Connection:
    return Connection(ld_fixed64(acceptor + ACCEPTOR.connections) + slot * CONNECTION.size)


@device_function
def _has_ended(acceptor: AcceptorState, slot: int) -> bool:
    """Return whether the server has marked the connection of a slot as ended."""
    word = dev.ld_acquire64(ld_fixed64(acceptor + ACCEPTOR.states) + 8 * slot)
    return word == held_row(acceptor, slot).generation << STATE_SHIFT | ENDED


# --- slots -----------------------------------------------------------------------------------------------------------


@device_function
def _take_free(acceptor: AcceptorState) -> int:
    """Return the free slot that was unused for longest, or -1. The flow rule that it may have had must be gone."""
    slot = acceptor.free - 1
    if slot < 0:
        return -1
    wanted = dev.ld64(ld_fixed64(acceptor + ACCEPTOR.wanted) + 8 * slot)
    if dev.ld_acquire64(ld_fixed64(acceptor + ACCEPTOR.made) + 8 * slot) != wanted:
        return -1
    remove(acceptor, ACCEPTOR.free, slot)
    return slot


@device_function
def _waits_no_longer(acceptor: AcceptorState, slot: int) -> None:
    """Note that a connection is no longer half-open."""
    held_row(acceptor, slot).until = ANSWERED
    acceptor.half_open -= 1
    remove(acceptor, ACCEPTOR.waiting, slot)


@device_function
def _release(acceptor: AcceptorState, slot: int) -> None:
    """Free a slot. Its flow rule, if it has one, is no longer wanted."""
    h = held_row(acceptor, slot)
    if h.until != ANSWERED:
        _waits_no_longer(acceptor, slot)
    else:
        count_connection(acceptor, slot, -1)
    h.until = FREE
    unbind(acceptor, slot)
    _shared_row(acceptor, slot).generation = 0
    wanted = ld_fixed64(acceptor + ACCEPTOR.wanted) + 8 * slot
    dev.st_release64(wanted, dev.ld64(wanted) & ~WANTED)
    append(acceptor, ACCEPTOR.free, slot)


@device_function
def _give_up(acceptor: AcceptorState) -> None:
    """Forget the half-open connection that has waited longest."""
    slot = acceptor.waiting - 1
    if not _has_ended(acceptor, slot):
        acceptor.expired += 1
    _release(acceptor, slot)


@device_function
def look_at_ends(acceptor: AcceptorState, now: int) -> None:
    """If a check is due, free the slots of connections that have ended, and of clients that do not answer."""
    if now < acceptor.look_at:
        return
    acceptor.look_at = now + _LOOK_NS
    for slot in range(acceptor.number, SLOTS, acceptor.queues):
        if _has_ended(acceptor, slot) and held_row(acceptor, slot).until != FREE:
            _release(acceptor, slot)
    while acceptor.half_open > 0 and held_row(acceptor, acceptor.waiting - 1).until <= now:
        _give_up(acceptor)


# --- segments --------------------------------------------------------------------------------------------------------


@device_function
def _open(acceptor: AcceptorState, slot: int, frame: int, tcp: int, key: int, now: int) -> None:
    """Put a half-open connection into a slot."""
    h, c = held_row(acceptor, slot), _shared_row(acceptor, slot)
    sequence = headers.tcp_at(tcp).sequence
    mss, shift = read_options(tcp + TCP.size, headers.tcp_bytes(tcp) - TCP.size)
    first = hash_of(acceptor, key) + now // _TICK_NS & SEQUENCE_MASK  # RFC 6528 3
    h.generation = h.generation % LAST_GENERATION + 1
    h.until, h.segments, h.scales = now + HALF_OPEN_NS, 0, shift != NO_SHIFT
    c.first_sequence, c.peer_sequence = first, sequence
    c.mss, c.window_shift = min(mss, acceptor.mtu - IPV4.size - TCP.size), max(shift, 0)
    c.tags = tags_of(frame)
    header = c + CONNECTION.header + TAG_ROOM - c.tags
    write_headers(header, frame, tcp, first, sequence + 1, TCP_ACK, REQUEST_BYTES, 0)
    c.generation = h.generation
    bind(acceptor, slot, key)
    append(acceptor, ACCEPTOR.waiting, slot)
    acceptor.half_open += 1


@device_function
def _begin(acceptor: AcceptorState, slot: int, frame: int, tcp: int, key: int, answer: int, now: int) -> int:
    """Answer a SYN. `slot` is that of a half-open connection of the same client, or -1."""
    if slot >= 0 and _shared_row(acceptor, slot).peer_sequence != headers.tcp_at(tcp).sequence:
        _release(acceptor, slot)
        slot = -1
    if slot < 0:
        acceptor.syns += 1
        if has_share(acceptor, key):
            acceptor.refused += 1
            return 0
        if acceptor.half_open >= acceptor.most:
            _give_up(acceptor)
        slot = _take_free(acceptor)
        if slot < 0:
            acceptor.refused += 1
            return 0
        _open(acceptor, slot, frame, tcp, key, now)
    first, scales = _shared_row(acceptor, slot).first_sequence, held_row(acceptor, slot).scales
    return write_syn_ack(answer, frame, tcp, first, REQUEST_BYTES, acceptor.mss, scales)


@device_function
def _count(acceptor: AcceptorState, frame: int, nbytes: int) -> None:
    """Count a segment as receive kernels do."""
    sums = acceptor + ACCEPTOR.sums
    add(sums, class_of(frame, nbytes), 1)
    add(sums, TCP_COUNTS.total, 1)


@device_function
def _opens(acceptor: AcceptorState, slot: int, tcp: int, flags: int) -> bool:
    """Return whether a segment answers the SYN-ACK of a half-open connection. The server will see the same."""
    if held_row(acceptor, slot).until == ANSWERED or flags & (TCP_ACK | TCP_SYN | TCP_RST) != TCP_ACK:
        return False
    following = _shared_row(acceptor, slot).first_sequence + 1 & SEQUENCE_MASK
    return headers.tcp_at(tcp).acknowledgement == following


@device_function
def _hand_over(acceptor: AcceptorState, slot: int, tcp: int, flags: int, payload: int, left: int) -> bool:
    """Hand a segment to the server. Return whether it had room."""
    h = held_row(acceptor, slot)
    tag = h.generation << SLOT_BITS | slot
    ring, lane = ld_fixed64(acceptor + ACCEPTOR.ring), slot % ld_fixed64(acceptor + ACCEPTOR.lanes_num)
    if left > MOST_PAYLOAD or not put_segment(ring, lane, tag, tcp, payload, left):
        return False
    if _opens(acceptor, slot, tcp, flags):
        _waits_no_longer(acceptor, slot)
        count_connection(acceptor, slot, 1)
    if h.until == ANSWERED and flags & _TO_CPU == 0:
        h.segments += 1
        if h.segments == RULE_SEGMENTS:
            dev.st_release64(ld_fixed64(acceptor + ACCEPTOR.wanted) + 8 * slot, tag << 1 | WANTED)
    return True


@device_function
def take_frame(acceptor: AcceptorState, frame: int, nbytes: int, answer: int, now: int) -> int:
    """Process a frame. Return the length of the answer, which is at `answer`, 0 if there is none, or HANDED_OVER.

    `answer` is an even address of MOST_ANSWER bytes.
    """
    ip, tcp, payload, left = find_segment(frame, nbytes, acceptor.mac, acceptor.address)
    if tcp == 0:
        return 0
    t, flags = headers.tcp_at(tcp), headers.tcp_at(tcp).offset_flags & TCP_FLAGS_MASK
    key = headers.ipv4_at(ip).source << 32 | t.source_port << 16 | t.destination_port
    slot = find(acceptor, key)
    if slot >= 0 and _has_ended(acceptor, slot):
        _release(acceptor, slot)
        slot = -1
    if slot >= 0 and _opens(acceptor, slot, tcp, flags) and has_share(acceptor, key):
        acceptor.refused += 1
        _release(acceptor, slot)
        slot = -1
    is_syn = flags & (TCP_SYN | TCP_ACK | TCP_RST) == TCP_SYN
    if slot >= 0 and not (is_syn and held_row(acceptor, slot).until != ANSWERED):
        if flags & _TO_CPU == 0:
            _count(acceptor, frame, nbytes)
        if _hand_over(acceptor, slot, tcp, flags, payload, left):
            return HANDED_OVER
        acceptor.dropped += 1
        return 0
    if is_syn:
        return _begin(acceptor, slot, frame, tcp, key, answer, now)
    if flags & TCP_RST:
        return 0
    acceptor.resets += 1
    return write_reset(answer, frame, tcp, left)
