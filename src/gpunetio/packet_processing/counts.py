"""The counts of the receive kernels, which semaphore items carry to the CPU.

A kernel adds to sums of its queue. From time to time it moves the sums to the next semaphore item, if the CPU has freed
that item; otherwise the sums stay, and go with a later item. So all counts arrive, however slow the CPU is. When the
kernel has ended, the CPU takes what is left in the sums.
"""

from __future__ import annotations

from .. import device as dev
from ..jit.compile import device_function
from ..formats.layout import I64, Entry, Record

ITEMS = 1024  # of a semaphore
PUBLISH_NS = 10_000_000  # between two items of a queue

# Counts are of packets. Bytes are those of IP packets with their Ethernet header.
UDP_COUNTS = Entry("udp_counts", 48, """
    dns             0  i64
    dns_bytes       8  i64
    others         16  i64
    others_bytes   24  i64
    total          32  i64
    total_bytes    40  i64
""")

# A packet counts in the first class that applies, from http_get on; `http` begins with "HTTP/1.1".
TCP_COUNTS = Entry("tcp_counts", 72, """
    http            0  i64
    http_head       8  i64
    http_get       16  i64
    http_post      24  i64
    tcp_syn        32  i64
    tcp_fin        40  i64
    tcp_ack        48  i64
    others         56  i64
    total          64  i64
""")

# `answered` are echo requests. `refused` are those for other addresses, with wrong checksums, in fragments or cut off.
ICMP_COUNTS = Entry("icmp_counts", 32, """
    answered        0  i64
    refused         8  i64
    others         16  i64
    total          24  i64
""")


class Work(Record, size=64):
    """The state of a kernel, which can be read at any time.

    Only the kernel's first thread writes it. Times are in ns of the kernel's clock.

        status     0, or the negative status with which the kernel has ended
        turns      of the kernel's loop
        packets    how many it has received
        busy_ns    how long it had packets to receive and to work on
        began      when it began to receive those of this turn
        item       the semaphore item that it fills next
        published  when it filled the last one
    """

    status: I64 = 0
    turns: I64 = 8
    packets: I64 = 16
    busy_ns: I64 = 24
    began: I64 = 32
    item: I64 = 40
    published: I64 = 48


WORK = Work.entry


@device_function
def wait_for_packets(work: Work, rxq: dev.EthRxq, most: int, patience_ns: int, attrs: int, scope: int) -> int:
    """Receive the packets that have arrived, at most `most`, or wait for one. The NIC does not get their places back.

    A packet never waits for others, as it would in `rxq_recv` with `most` and a timeout.
    """
    began = dev.clock_ns()
    received = dev.rxq_recv(rxq, most, 0, attrs, scope, 1)
    if received == 0:
        received = dev.rxq_recv(rxq, 1, patience_ns, attrs, scope, 1)
        began = dev.clock_ns()
    if dev.thread_idx() == 0:
        dev.st64(work + WORK.began, began)
    return received


@device_function
def add(sums: int, offset: int, count: int) -> None:
    """Add a thread's count to a sum of its queue."""
    if count != 0:
        dev.fetch_add_gpu64(sums + offset, count)


@device_function
def note_turn(work: Work, received: int, now: int) -> None:
    """Record a turn of a kernel that ends now."""
    dev.st64(work + WORK.turns, dev.ld64(work + WORK.turns) + 1)
    if received > 0:
        dev.st64(work + WORK.packets, dev.ld64(work + WORK.packets) + received)
        dev.st64(work + WORK.busy_ns, dev.ld64(work + WORK.busy_ns) + now - dev.ld64(work + WORK.began))


@device_function
def end_turn(work: Work, semaphore: dev.DevSemaphore, sums: int, nbytes: int, received: int) -> None:
    """Record a turn, and publish the sums, `nbytes` in all, if that is due and there is a free item.

    The first thread of a queue calls this when all have added.
    """
    now = dev.clock_ns()
    note_turn(work, received, now)
    if dev.ld64(sums + nbytes - 8) == 0:  # the total
        return
    item = dev.ld64(work + WORK.item)
    if now - dev.ld64(work + WORK.published) < PUBLISH_NS or dev.sem_status(semaphore, item) != dev.SEM_FREE:
        return
    info = dev.sem_info(semaphore, item)
    for offset in range(0, nbytes, 8):
        dev.st64(info + offset, dev.ld64(sums + offset))
        dev.st64(sums + offset, 0)
    dev.sem_set_status(semaphore, item, dev.SEM_READY)
    dev.st64(work + WORK.item, (item + 1) % ITEMS)
    dev.st64(work + WORK.published, now)
