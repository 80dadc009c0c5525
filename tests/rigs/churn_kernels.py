"""Kernels that post very many requests and check the results, in a separate file to be compiled seldom."""

from gpunetio import device, kernel

TORN, BACKWARDS, WRONG_BYTES = -1000, -1001, -1002  # findings of a thread, in place of a status
PLACES = 8  # messages that a sender may have under way


@kernel
def churn(qp, raddr, rkey, laddr, lkey, rounds, burst, sharing, out):
    """Each thread writes a number of its own, counting up to `rounds`, to a word of its own, and waits after `burst`.

    Its tickets go up, and what has come back by a READ at the end of a burst is the number of that burst.
    """
    me = device.global_id()
    mine, theirs, back = laddr + 64 * me, raddr + 64 * me, laddr + 64 * me + 8
    last, status = -1, 0
    for i in range(1, rounds + 1):
        device.st64(mine, i)
        ticket = device.p(qp, theirs, rkey, i, 8, sharing)
        if ticket < 0:
            status = ticket
            break
        if ticket <= last:
            status = BACKWARDS
            break
        last = ticket
        if i % burst == 0 or i == rounds:
            status = device.wait(qp, device.get(qp, theirs, rkey, back, lkey, 8, sharing), sharing)
            if status != 0:
                break
            if device.ld_acquire64(back) != i:
                status = TORN
                break
    device.st64(out + 8 * me, status)


@kernel
def send_many(qp, laddr, lkey, count, sharing, out):
    """Each thread sends `count` messages of 16 to 64 bytes: its own number, then the message's, again and again."""
    me, status = device.global_id(), 0
    ticket = -1
    for i in range(count):
        at = laddr + 64 * (PLACES * me + i % PLACES)
        if i % PLACES == 0 and i > 0:
            status = device.wait(qp, ticket, sharing)  # before the memory is written again
            if status != 0:
                break
        device.st64(at, me)
        for word in range(1, 8):
            device.st64(at + 8 * word, i)
        ticket = device.send_imm(qp, at, lkey, 16 + 8 * (i % 7), i, sharing)
        if ticket < 0:
            status = ticket
            break
    if status == 0 and ticket >= 0:
        status = device.wait(qp, ticket, sharing)
    device.st64(out + 8 * me, status)


@device.device_function
def check(at, nbytes, seen):
    """OK for a message that is whole: it is noted in `seen`."""
    sender, number = device.ld_acquire64(at), device.ld_acquire64(at + 8)
    if nbytes == device.EOVERFLOW:  # another thread is a lap ahead of this one: the message is there nonetheless
        nbytes = 16 + 8 * (number % 7)
    if nbytes != 16 + 8 * (number % 7):
        return WRONG_BYTES
    for word in range(1, nbytes // 8):
        if device.ld64(at + 8 * word) != number:
            return TORN
    device.fetch_add_gpu64(seen + 8 * sender, 1 + ((number + 1) << 24))
    return 0


@kernel
def receive_many(qp, laddr, lkey, count, ahead, seen, tickets, sharing, out):
    """Each thread posts `ahead` receives, and takes `count` messages by the tickets of its own receives.

    Of each sender there is a word in `seen`: how many messages, and from bit 24 on the sum of their numbers, from 1.
    """
    me, status = device.global_id(), 0
    places, tickets = laddr + 64 * ahead * me, tickets + 8 * ahead * me
    for i in range(min(ahead, count)):
        device.st64(tickets + 8 * i, device.recv(qp, places + 64 * i, lkey, 64, sharing))
    for i in range(count):
        at = i % ahead
        nbytes = device.recv_wait(qp, device.ld64(tickets + 8 * at), sharing)
        if nbytes < 0 and nbytes != device.EOVERFLOW:
            status = nbytes
            break
        status = check(places + 64 * at, nbytes, seen)
        if status != 0:
            break
        if i + ahead < count:
            device.st64(tickets + 8 * at, device.recv(qp, places + 64 * at, lkey, 64, sharing))
    device.st64(out + 8 * me, status)


@kernel
def take_many(qp, laddr, lkey, slots, count, start, seen, read, sharing, out):
    """Thread 0 posts `count` receives, from ticket `start` on; the others take as many messages by their numbers.

    The place of receive i is i % `slots`, and the word there in `read` becomes i + 1 when its message was looked at;
    behind these words there is one that counts what is being taken.
    """
    me, status = device.global_id(), 0
    if me == 0:
        for i in range(start, start + count):
            word = read + 8 * (i % slots)
            while i >= start + slots and device.ld_acquire64(word) != i - slots + 1:
                device.yield_thread()
            ticket = device.recv(qp, laddr + 64 * (i % slots), lkey, 64, sharing)
            if ticket != i:
                status = ticket if ticket < 0 else BACKWARDS
                break
    else:
        while device.fetch_add_gpu64(read + 8 * slots, 1) < count:
            arrival = device.recv_next(qp, sharing)
            if arrival < 0:
                status = arrival
                break
            nbytes, imm = device.recv_bytes(qp, arrival), device.recv_imm(qp, arrival)
            index = device.recv_slot(qp, arrival)
            at = laddr + 64 * (index % slots)
            status = check(at, nbytes, seen)
            if device.ld64(at + 8) != imm:
                status = WRONG_BYTES
            if status != 0:
                break
            device.st_release64(read + 8 * (index % slots), index + 1)
    device.st64(out + 8 * me, status)
