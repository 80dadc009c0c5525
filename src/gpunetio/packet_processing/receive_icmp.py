"""The kernel that answers ICMP echo requests, from where they were received."""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..jit.compile import device_function
from ..eth import headers
from .counts import ICMP_COUNTS, WORK, add, end_turn, wait_for_packets
from .station import is_station

_TTL = 128


@device_function
def answer(frame, nbytes, mac, address):
    """Make an echo request the reply to it. Return the offset in ICMP_COUNTS that counts the frame.

    Only requests to `mac` and `address` are answered, with right checksums and not in fragments.
    """
    protocol, ip, icmp, length = headers.l4_of(frame, nbytes)
    if protocol != headers.IP_PROTOCOL_ICMP or length < headers.ICMP.size:
        return ICMP_COUNTS.refused
    eth, v4, message = headers.ethernet_at(frame), headers.ipv4_at(ip), headers.icmp_at(icmp)
    if eth.destination != mac or v4.destination != address or not is_station(eth.source, v4.source):
        return ICMP_COUNTS.refused
    if not headers.is_ipv4_intact(ip) or not headers.is_l4_intact(ip, protocol, icmp, length):
        return ICMP_COUNTS.refused
    if message.type != headers.ICMP_ECHO or message.code != 0:
        return ICMP_COUNTS.others
    headers.swap_macs(frame)
    headers.swap_addresses(ip)
    v4.ttl = _TTL
    headers.write_ipv4_checksum(ip)
    message.type = headers.ICMP_ECHO_REPLY
    headers.write_l4_checksum(ip, protocol, icmp, length)
    return ICMP_COUNTS.answered


@kernel
def receive_icmp(stop, rxq, semaphore, attrs, sums, work, burst, patience_ns, scope, txq, mac, address):
    """Answer echo requests until the word at `stop` is not 0, or a queue fails. `attrs` has room for a burst.

    `mac` and `address` are the port's, as integers.
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
            kind = answer(frame, nbytes, mac, address)
            if kind == ICMP_COUNTS.answered and ticket >= 0:
                ticket = dev.txq_send(txq, frame, lkey, nbytes, 1)
                answered += ticket >= 0
            elif kind != ICMP_COUNTS.answered:
                add(sums, kind, 1)
            own += 1
        add(sums, ICMP_COUNTS.answered, answered)
        add(sums, ICMP_COUNTS.total, own)
        if answered > 0:
            ticket = dev.txq_wait(txq, ticket)  # the packets of this thread have left, so their places are free
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
