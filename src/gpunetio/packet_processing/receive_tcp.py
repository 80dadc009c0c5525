"""The kernel that counts TCP packets: by their flags, and requests and answers of HTTP."""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..jit.compile import device_function
from ..eth import headers
from .connection import Http
from .counts import TCP_COUNTS, WORK, Work, add, end_turn, wait_for_packets
from .hand_over import hand_over

# Beginnings of a payload as loads of 8 bytes in the byte order of the machine, and masks of the bits that count.
_GET, _GET_BITS = int.from_bytes(b"GET /", "little"), (1 << 40) - 1
_HEAD, _POST, _SIX_BYTES = (*(int.from_bytes(text, "little") for text in (b"HEAD /", b"POST /")), (1 << 48) - 1)
_ANSWER = int.from_bytes(b"HTTP/1.1", "little")


@device_function
def _first_bytes(payload: int, nbytes: int) -> int:
    """Return the first 8 bytes of a payload. Missing bytes are 0."""
    word = 0
    for i in range(min(nbytes, 8)):
        word |= dev.ld8(payload + i) << 8 * i
    return word


@device_function
def class_of(frame: int, nbytes: int) -> int:
    """Return the offset in TCP_COUNTS of the first class that applies to a frame."""
    protocol, _, tcp, length = headers.l4_of(frame, nbytes)
    if protocol != headers.IP_PROTOCOL_TCP:
        return TCP_COUNTS.others
    payload, left = headers.tcp_payload(tcp, length)
    if left < 0:
        return TCP_COUNTS.others
    text, flags = _first_bytes(payload, left), headers.tcp_at(tcp).offset_flags
    if text & _GET_BITS == _GET:
        return TCP_COUNTS.http_get
    if text & _SIX_BYTES == _HEAD:
        return TCP_COUNTS.http_head
    if text & _SIX_BYTES == _POST:
        return TCP_COUNTS.http_post
    if text == _ANSWER:
        return TCP_COUNTS.http
    if flags & headers.TCP_FIN:
        return TCP_COUNTS.tcp_fin
    if flags & headers.TCP_SYN:
        return TCP_COUNTS.tcp_syn
    return TCP_COUNTS.tcp_ack if flags & headers.TCP_ACK else TCP_COUNTS.others


@kernel
def receive_tcp(
    stop: int, rxq: dev.EthRxq, semaphore: dev.DevSemaphore, attrs: int, sums: int, work: Work, burst: int,
    patience_ns: int, scope: int, http: Http, number: int,
) -> None:
    """Count packets until the word at `stop` is not 0, or the queue fails. `attrs` has room for a burst.

    Segments of HTTP connections go to the server, whose tables are at `http`, which is 0 without a server. `number` is
    the number of the queue.
    """
    thread = dev.thread_idx()
    received = 0
    while received >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        received = wait_for_packets(work, rxq, burst, patience_ns, attrs, scope)
        first = dev.rxq_first(rxq)
        own = 0
        for i in range(thread, received, dev.block_dim()):
            frame, nbytes = dev.rxq_packet(rxq, first + i), dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            add(sums, class_of(frame, nbytes), 1)
            own += 1
        add(sums, TCP_COUNTS.total, own)
        if http != 0:
            hand_over(http, number, rxq, first, received, attrs, thread, dev.block_dim())
        dev.block_sync()
        if thread == 0:
            if received > 0:
                dev.rxq_give_back(rxq, first + received)
            end_turn(work, semaphore, sums, TCP_COUNTS.size, received)
    if thread == 0:
        dev.st64(work + WORK.status, min(received, 0))
