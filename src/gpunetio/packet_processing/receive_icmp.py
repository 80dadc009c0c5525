"""The kernel that answers ICMP echo requests in the memory where they were received. It reassembles fragments first."""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..jit.compile import device_function
from ..eth import headers
from .counts import ICMP_COUNTS, WORK, Work, add, end_turn, wait_for_packets
from .reassembly import (
    REFUSED, WAITS, ReassemblyState, data_of, fragment_of, frame_of, release, send_fragments, take_fragment,
)
from .station import is_station

_TTL = 128


@device_function
def _is_for_us(frame: int, ip: int, mac: int, address: int) -> bool:
    """Return whether a packet is for `mac` and `address`, and its sender can be answered."""
    eth, v4 = headers.ethernet_at(frame), headers.ipv4_at(ip)
    return eth.destination == mac and v4.destination == address and is_station(eth.source, v4.source)


@device_function
def _make_reply(frame: int, ip: int, icmp: int, length: int) -> int:
    """Turn an ICMP message into the reply to it. Return the offset in ICMP_COUNTS that counts it.

    Unless the message is an echo request with a correct checksum, it is not changed.
    """
    message = headers.icmp_at(icmp)
    if length < headers.ICMP.size or not headers.is_l4_intact(ip, headers.IP_PROTOCOL_ICMP, icmp, length):
        return ICMP_COUNTS.refused
    if message.type != headers.ICMP_ECHO or message.code != 0:
        return ICMP_COUNTS.others
    headers.swap_macs(frame)
    headers.swap_addresses(ip)
    headers.ipv4_at(ip).ttl = _TTL
    headers.write_ipv4_checksum(ip)
    message.type = headers.ICMP_ECHO_REPLY
    headers.write_l4_checksum(ip, headers.IP_PROTOCOL_ICMP, icmp, length)
    return ICMP_COUNTS.answered


@device_function
def answer(frame: int, nbytes: int, mac: int, address: int) -> int:
    """Turn an echo request into the reply to it. Return the offset in ICMP_COUNTS that counts the frame.

    Only unfragmented requests to `mac` and `address`, with correct checksums, are answered.
    """
    protocol, ip, icmp, length = headers.l4_of(frame, nbytes)
    if protocol != headers.IP_PROTOCOL_ICMP or not _is_for_us(frame, ip, mac, address):
        return ICMP_COUNTS.refused
    return _make_reply(frame, ip, icmp, length) if headers.is_ipv4_intact(ip) else ICMP_COUNTS.refused


@device_function
def answer_fragment(
    reassembly: ReassemblyState, txq: dev.EthTxq, frame: int, ip: int, mac: int, address: int, now: int
) -> tuple[int, int]:
    """Store a fragment, and answer the request if this fragment completes it.

    Return the offset in ICMP_COUNTS that counts the frame, and a negative status if the answer could not be sent.
    """
    if not _is_for_us(frame, ip, mac, address):
        return ICMP_COUNTS.refused, dev.OK
    number = take_fragment(reassembly, frame, ip, now)
    if number == WAITS:
        return ICMP_COUNTS.others, dev.OK
    if number == REFUSED:
        return ICMP_COUNTS.refused, dev.OK
    data, total, whole_ip = data_of(reassembly, number)
    kind = _make_reply(frame_of(reassembly, number), whole_ip, data, total)
    status = dev.OK
    if kind == ICMP_COUNTS.answered:
        status = send_fragments(reassembly, number, txq)
        if status >= 0:
            status = dev.txq_wait(txq, status)
    release(reassembly, number)
    return kind, min(status, dev.OK)


@kernel
def receive_icmp(
    stop: int, rxq: dev.EthRxq, semaphore: dev.DevSemaphore, attrs: int, sums: int, work: Work, burst: int,
    patience_ns: int, scope: int, txq: dev.EthTxq, mac: int, address: int, reassembly: ReassemblyState,
) -> None:
    """Answer echo requests until the word at `stop` is not 0, or a queue fails. `attrs` has room for a burst.

    `mac` and `address` are the port's, as integers. The first thread serves fragments, in the memory at `reassembly`.
    """
    thread = dev.thread_idx()
    lkey = dev.rxq_lkey(rxq)
    status = dev.OK
    while status >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        received = wait_for_packets(work, rxq, burst, patience_ns, attrs, scope)
        first = dev.rxq_first(rxq)
        own = 0
        answered = 0
        ticket = dev.OK
        for i in range(thread, received, dev.block_dim()):
            frame, nbytes = dev.rxq_packet(rxq, first + i), dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            own += 1
            if fragment_of(frame, nbytes) != 0:
                continue
            kind = answer(frame, nbytes, mac, address)
            if kind == ICMP_COUNTS.answered and ticket >= 0:
                ticket = dev.txq_send(txq, frame, lkey, nbytes, 1)
                answered += ticket >= 0
            elif kind != ICMP_COUNTS.answered:
                add(sums, kind, 1)
        add(sums, ICMP_COUNTS.answered, answered)
        add(sums, ICMP_COUNTS.total, own)
        if answered > 0:
            ticket = dev.txq_wait(txq, ticket)  # the packets of this thread have been sent, so their places are free
        if thread == 0 and ticket >= 0:
            now = dev.clock_ns()
            for i in range(received):
                frame, nbytes = dev.rxq_packet(rxq, first + i), dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
                ip = fragment_of(frame, nbytes)
                if ip != 0:
                    kind, status_of_answer = answer_fragment(reassembly, txq, frame, ip, mac, address, now)
                    add(sums, kind, 1)
                    ticket = min(ticket, status_of_answer)
        if ticket < 0:
            dev.st64(work + WORK.status, ticket)
        dev.block_sync()
        if thread == 0:
            if received > 0:
                dev.rxq_give_back(rxq, first + received)
            end_turn(work, semaphore, sums, ICMP_COUNTS.size, received)
            status = min(received, dev.ld64(work + WORK.status))
        status = dev.block_broadcast(status, 0)
    if thread == 0:
        dev.st64(work + WORK.status, min(status, 0))
