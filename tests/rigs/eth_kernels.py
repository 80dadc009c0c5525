"""Kernels that receive and send Ethernet packets, and that use semaphores. Modes are arguments at run time here."""

from gpunetio import device, kernel


@kernel
def receive(rxq, most, timeout_ns, attrs, scope, keep, out):
    """One receive of each thread: its result, and the index of the first packet."""
    result = device.rxq_recv(rxq, most, timeout_ns, attrs, scope, keep)
    device.st64(out + 16 * device.global_id(), result)
    device.st64(out + 16 * device.global_id() + 8, device.rxq_first(rxq))


@kernel
def receive_all(rxq, count, most, scope, attrs, target, out):
    """Receive `count` packets, and copy the first 64 bytes of each to `target`. Thread 0 stores what went wrong."""
    got = 0
    result = 0
    idle = 0
    while got < count and result >= 0 and idle < 1000:
        result = device.rxq_recv(rxq, most, 10_000_000, attrs, scope)
        first = device.rxq_first(rxq)
        for i in range(device.thread_idx(), max(result, 0), device.block_dim()):
            device.copy(target + 64 * (got + i), device.rxq_packet(rxq, first + i), 64)
        got += max(result, 0)
        idle = idle + 1 if result == 0 else 0
    if device.thread_idx() == 0:
        device.st64(out, result)
        device.st64(out + 8, got)


@kernel
def give_back(rxq, index):
    device.rxq_give_back(rxq, index)


@kernel
def send_each(txq, count, laddr, lkey, nbytes, every, sharing, scope, code_opt, out):
    """Each thread sends `count` packets from addresses of its own; one of `every` notifies. Tickets are in `out`."""
    me, threads = device.global_id(), device.grid_dim() * device.block_dim()
    for i in range(count):
        number = i * threads + me
        notify = 1 if every != 0 and i % every == every - 1 else 0
        ticket = device.txq_send(txq, laddr + 16 * number, lkey, nbytes, notify, sharing, code_opt, scope)
        device.st64(out + 8 * number, ticket)


@kernel
def send_at(txq, timestamp, laddr, lkey, nbytes, sharing, scope, out):
    me = device.global_id()
    ticket = device.txq_wait_send(txq, timestamp, laddr + 16 * me, lkey, nbytes, 1, sharing, device.DEFAULT, scope)
    device.st64(out + 8 * me, ticket)


@kernel
def send_headers(txq, count, headers, header_bytes, laddr, lkey, nbytes, mss, every, sharing, out):
    """Each thread sends `count` packets with headers in the WQE; packet i has i % 3 bytes more of them, and payload of
    its own. One of `every` notifies."""
    me, threads = device.global_id(), device.grid_dim() * device.block_dim()
    for i in range(count):
        number = i * threads + me
        notify = 1 if every != 0 and i % every == every - 1 else 0
        ticket = device.txq_send_headers(
            txq, headers + number % 7, header_bytes + i % 3, laddr + 16 * number, lkey, nbytes, mss, notify, sharing
        )
        device.st64(out + 8 * number, ticket)


@kernel
def prepare_headers(txq, index, headers, header_bytes, nbytes, mss, out):
    device.st64(out, device.txq_prepare_headers(txq, index, headers, header_bytes, 0x1000, 1, nbytes, mss))


@kernel
def poll_each(txq, count, rounds, sharing, blocking, out):
    me = device.global_id()
    for i in range(rounds):
        device.st64(out + 8 * (me * rounds + i), device.txq_poll(txq, count, sharing, blocking))


@kernel
def wait_for(txq, ticket, sharing, blocking, out):
    device.st64(out, device.txq_wait(txq, ticket, sharing, blocking))


@kernel
def send_multi(txq, packets, laddr, lkey, nbytes, notify, sharing, out):
    """A block sends `packets` packets in one WQE, of which its threads write the segments."""
    blocks = device.txq_multi_blocks(packets)
    first = 0
    if device.thread_idx() == 0:
        first = device.txq_reserve(txq, blocks, sharing)
    first = device.block_broadcast(first, 0)
    if first >= 0:
        for rank in range(device.thread_idx(), packets, device.block_dim()):
            device.txq_prepare_multi(txq, first, packets, rank, laddr + 16 * rank, lkey, nbytes, notify)
        device.block_sync()
        if device.thread_idx() == 0:
            device.post(txq, first, first + blocks - 1, sharing)
    if device.thread_idx() == 0:
        device.st64(out, first)


@kernel
def prepare(txq, index, packets, rank, laddr, out):
    device.st64(out, device.txq_prepare_multi(txq, index, packets, rank, laddr, 1, 64))


@kernel
def by_hand(txq, first, count, laddr, lkey, nbytes):
    """Packets at indices that the kernel keeps itself, of which the last notifies."""
    me = device.thread_idx()
    for i in range(me, count, device.block_dim()):
        device.txq_prepare_send(txq, first + i, laddr + 16 * i, lkey, nbytes, 1 if i == count - 1 else 0)
    device.block_sync()
    if me == 0:
        device.submit(txq, first + count, device.EXCLUSIVE)


@kernel
def fill_items(semaphore, items, rounds, out):
    """The producer: fill each item in turn, when it is free, with packets and a number for the consumer."""
    status = 0
    for i in range(items * rounds):
        if status == 0:
            status = device.sem_wait(semaphore, i % items, device.SEM_FREE, 20_000_000_000)
        if status == 0:
            device.st64(device.sem_info(semaphore, i % items), 3 * i)
            status = device.sem_set_packets(semaphore, i % items, device.SEM_READY, 1000 * i, i % 7)
    device.st64(out, status)


@kernel
def empty_items(semaphore, items, rounds, sums, out):
    """The consumer."""
    status = 0
    total = 0
    for i in range(items * rounds):
        if status == 0:
            status = device.sem_wait(semaphore, i % items, device.SEM_READY, 20_000_000_000)
        if status == 0:
            total += device.ld64(device.sem_info(semaphore, i % items))
            total += device.sem_first(semaphore, i % items) + device.sem_packets(semaphore, i % items)
            status = device.sem_set_status(semaphore, i % items, device.SEM_FREE)
    device.st64(sums, total)
    device.st64(out, status)


@kernel
def look(semaphore, index, out):
    device.st64(out, device.sem_status(semaphore, index))
    device.st64(out + 8, device.sem_set_status(semaphore, index, 7))
    device.st64(out + 16, device.sem_wait(semaphore, index, 7, 0))
    device.st64(out + 24, device.sem_wait(semaphore, index, 8, 1000))
    device.st64(out + 32, device.sem_info(semaphore, index))
    device.st64(out + 40, device.sem_set_packets(semaphore, index, 9, 1, 2))
    device.st64(out + 48, device.sem_packets(semaphore, index))
    device.st64(out + 56, device.sem_first(semaphore, index))


@kernel
def take_and_fill(semaphore, rings, count, began, out):
    """One of several producers: `count` times, take an item of the own ring and leave a number of its own there.

    They begin together, when all have added to the word at `began`.
    """
    me = device.block_idx()
    done = 0
    start = device.clock_ns()
    device.fetch_add_gpu64(began, 1)
    while device.ld_relaxed64(began) < device.grid_dim() and device.clock_ns() - start < 30_000_000_000:
        device.yield_thread()
    while done < count and device.clock_ns() - start < 30_000_000_000:
        index = device.sem_take(semaphore, me % rings)
        if index < 0:
            device.yield_thread()
            continue
        device.st64(device.sem_info(semaphore, index), me << 32 | done)
        device.sem_set_packets(semaphore, index, device.SEM_READY, index, 1)
        done += 1
    device.st64(out + 8 * me, done)


@kernel
def free_items(semaphore, count, seen, out):
    """The consumers, one for each ring: store the numbers in the order in which they come."""
    ring = device.block_idx()
    done = 0
    start = device.clock_ns()
    while done < count and device.clock_ns() - start < 30_000_000_000:
        index = device.sem_next(semaphore, ring)
        if index < 0:
            device.yield_thread()
            continue
        device.st64(seen + 8 * (ring * count + done), device.ld64(device.sem_info(semaphore, index)))
        if device.sem_first(semaphore, index) != index or device.sem_free(semaphore, ring) != device.OK:
            break
        done += 1
    device.st64(out + 8 * ring, done)


@kernel
def one_step(semaphore, what, ring, out):
    """Take an item of a ring, look at its next one, or free that."""
    if what == 0:
        device.st64(out, device.sem_take(semaphore, ring))
    elif what == 1:
        device.st64(out, device.sem_next(semaphore, ring))
    else:
        device.st64(out, device.sem_free(semaphore, ring))


@kernel
def collect(rxq, most, timeout_ns, at, allowed, numbers, stop, out):
    """Store the word at offset `at` of each packet, in order, but of no more packets than the word at `allowed` says.

    It ends when the word at `stop` is set and nothing more arrives within the time-out. In `out`: how many packets, how
    many receives ended without any, and the last status.
    """
    got = 0
    idle = 0
    result = 1
    while result > 0 or device.ld_relaxed64(stop) == 0:
        room = min(most, device.ld_relaxed64(allowed) - got)
        if room == 0:
            device.pause()
            continue
        stopped = device.ld_relaxed64(stop)
        result = device.rxq_recv(rxq, room, timeout_ns, 0, device.THREAD, 1)
        if result < 0 or (stopped != 0 and result == 0):
            break
        first = device.rxq_first(rxq)
        for i in range(result):
            device.st32(numbers + 4 * (got + i), device.ld32(device.rxq_packet(rxq, first + i) + at))
        if result > 0:
            device.rxq_give_back(rxq, first + result)
        idle += result == 0
        got += result
    device.st64(out, got)
    device.st64(out + 8, idle)
    device.st64(out + 16, result)
