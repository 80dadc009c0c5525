"""The kernel that counts UDP packets: those to the port of DNS, and others."""

from __future__ import annotations

from .. import device as dev
from ..device import kernel
from ..jit.compile import device_function
from ..eth import headers
from .counts import UDP_COUNTS, WORK, Work, add, end_turn, wait_for_packets

DNS_PORT = 53  # RFC 1035 4.2


@device_function
def class_of(frame: int, nbytes: int) -> tuple[int, int]:
    """Return whether a frame counts as DNS, and how many bytes to count for it.

    These are the bytes of the IP packet and an Ethernet header; for fragments and damaged packets, those of the frame.
    """
    protocol, ip, udp, length = headers.l4_of(frame, nbytes)
    if protocol != headers.IP_PROTOCOL_UDP:
        return 0, nbytes
    counted = headers.ETHERNET.size + udp - ip + length
    return length >= headers.UDP.size and headers.udp_at(udp).destination_port == DNS_PORT, counted


@kernel
def receive_udp(
    stop: int, rxq: dev.EthRxq, semaphore: dev.DevSemaphore, attrs: int, sums: int, work: Work, burst: int,
    patience_ns: int, scope: int,
) -> None:
    """Count packets until the word at `stop` is not 0, or the queue fails. `attrs` has room for a burst."""
    thread = dev.thread_idx()
    received = 0
    while received >= 0 and dev.block_broadcast(dev.ld_relaxed64(stop), 0) == 0:
        received = wait_for_packets(work, rxq, burst, patience_ns, attrs, scope)
        first = dev.rxq_first(rxq)
        dns, dns_bytes, others, others_bytes = 0, 0, 0, 0
        for i in range(thread, received, dev.block_dim()):
            frame, nbytes = dev.rxq_packet(rxq, first + i), dev.attr_at(attrs + i * dev.ATTR_BYTES).bytes
            is_dns, counted = class_of(frame, nbytes)
            if is_dns:
                dns += 1
                dns_bytes += counted
            else:
                others += 1
                others_bytes += counted
        add(sums, UDP_COUNTS.dns, dns)
        add(sums, UDP_COUNTS.dns_bytes, dns_bytes)
        add(sums, UDP_COUNTS.others, others)
        add(sums, UDP_COUNTS.others_bytes, others_bytes)
        add(sums, UDP_COUNTS.total, dns + others)
        add(sums, UDP_COUNTS.total_bytes, dns_bytes + others_bytes)
        dev.block_sync()
        if thread == 0:
            if received > 0:
                dev.rxq_give_back(rxq, first + received)
            end_turn(work, semaphore, sums, UDP_COUNTS.size, received)
    if thread == 0:
        dev.st64(work + WORK.status, min(received, 0))
