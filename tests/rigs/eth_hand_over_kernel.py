"""One block receives packets and hands them over through the items of a semaphore; another reads and releases them."""

from gpunetio import device, kernel

PATIENCE = 30_000_000_000  # ns
ITEM_FAILED, LOST = -1, -2


@device.device_function
def produce(rxq, semaphore, items, total):
    """Receive packets one by one. Return how many were handed over, or what went wrong."""
    for i in range(total):
        if device.sem_wait(semaphore, i % items, device.SEM_FREE, PATIENCE) != device.OK:
            return ITEM_FAILED
        if device.rxq_recv(rxq, 1, PATIENCE, 0, device.THREAD, 1) != 1:
            return LOST
        index = device.rxq_first(rxq)
        device.st64(device.sem_info(semaphore, i % items), index ^ i)
        device.sem_set_packets(semaphore, i % items, device.SEM_READY, index, 1)
    return total


@device.device_function
def consume(rxq, semaphore, items, total, at, out):
    """Store the two bytes at an offset of each packet. Return how many packets were there, or what went wrong."""
    for i in range(total):
        item = i % items
        if device.sem_wait(semaphore, item, device.SEM_READY, PATIENCE) != device.OK:
            return ITEM_FAILED
        index = device.sem_first(semaphore, item)
        if device.sem_packets(semaphore, item) != 1 or device.ld64(device.sem_info(semaphore, item)) != index ^ i:
            return ITEM_FAILED
        device.st16(out + 2 * i, device.ld16(device.rxq_packet(rxq, index) + at))
        device.rxq_give_back(rxq, index + 1)
        device.sem_set_status(semaphore, item, device.SEM_FREE)
    return total


@kernel
def send_slots(txq, laddr, lkey, nbytes, slot, total, out):
    """Send a packet from each slot, and wait until all have left."""
    ticket = 0
    for i in range(total):
        ticket = device.txq_send(txq, laddr + slot * i, lkey, nbytes, i == total - 1)
    device.st64(out, device.txq_wait(txq, ticket))


@kernel
def hand_over(rxq, semaphore, items, total, at, seen, out):
    if device.block_idx() == 0:
        count = produce(rxq, semaphore, items, total)
    else:
        count = consume(rxq, semaphore, items, total, at, seen)
    device.st64(out + 8 * device.block_idx(), count)
