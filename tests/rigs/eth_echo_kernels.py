"""Kernels at both ends of a wire: one sends packets and gets them back, the other echoes them from its receive buffer.
"""

from gpunetio import device, kernel

SLOT = 2048  # bytes from one packet to the next
PATIENCE = 30_000_000_000  # ns
SEND_FAILED, LOST, CHANGED, UNKNOWN_LENGTH = 1, 2, 3, 4


@device.device_function
def receive(rxq, burst, attrs, scope):
    """Receive a whole burst: OK, or LOST."""
    return device.OK if device.rxq_recv(rxq, burst, PATIENCE, attrs, scope) == burst else LOST


@device.device_function
def swap_macs(packet):
    """Exchange the addresses at the beginning of a frame, whose address is even."""
    for i in range(0, 6, 2):
        to = device.ld16(packet + i)
        device.st16(packet + i, device.ld16(packet + 6 + i))
        device.st16(packet + 6 + i, to)


@kernel
def there_and_back(near_tx, near_rx, far_tx, far_rx, rounds, burst, laddr, lkey, nbytes, attrs, scope, out):
    """Each round, `burst` packets go from the near queues to the far ones, which send them back with swapped MACs.

    `burst` is a multiple of the threads. Thread 0 stores the first thing that went wrong, or 0, and the round.
    """
    me, threads = device.thread_idx(), device.block_dim()
    wrong = 0
    done = 0
    while done < rounds and wrong == 0:
        for i in range(me, burst, threads):
            ticket = device.txq_send(near_tx, laddr + SLOT * i, lkey, nbytes, 0, device.CTA, device.DEFAULT, scope)
            wrong = SEND_FAILED if ticket < 0 else wrong
        wrong = max(wrong, receive(far_rx, burst, 0, scope))
        first = device.rxq_first(far_rx)
        last = 0
        for i in range(me, burst, threads):
            packet = device.rxq_packet(far_rx, first + i)
            swap_macs(packet)
            notify = 1 if i == burst - 1 else 0
            key = device.rxq_lkey(far_rx)
            last = device.txq_send(far_tx, packet, key, nbytes, notify, device.CTA, device.DEFAULT, scope)
            wrong = SEND_FAILED if last < 0 else wrong
        if me == threads - 1 and device.txq_wait(far_tx, last, device.CTA) != device.OK:
            wrong = SEND_FAILED
        wrong = max(wrong, receive(near_rx, burst, attrs, scope))
        first = device.rxq_first(near_rx)
        for i in range(me, burst, threads):
            packet = device.rxq_packet(near_rx, first + i)
            for at in range(12, nbytes):
                if device.ld8(packet + at) != device.ld8(laddr + SLOT * i + at):
                    wrong = CHANGED
            if device.attr_at(attrs + device.ATTR_BYTES * i).bytes != nbytes:
                wrong = UNKNOWN_LENGTH
        if scope == device.BLOCK:
            wrong = wrong if device.ops.block_count(wrong) == 0 else max(wrong, 1)
        done += 1
    if me == 0:
        device.st64(out, wrong)
        device.st64(out + 8, done)
