"""The common parts of the benchmarks' kernels. All kernels take the same arguments:

`ends`, `queues`    rows of `End`, and the number of queues
`scope`             which threads post together
`size`, `total`     bytes of a message, and of all messages
`slots`             slots of the buffers, each of which holds one message
`first`, `count`    the first message, and the number of messages
`trace`             where timestamps go, or 0
`stop`              a word that ends a kernel early when it is not 0
`out`               one RECORD per thread

Message k carries the bytes [k·size, (k+1)·size) of `total`, and lies in slot k % slots of the buffers at both ends. The
RECORD of a thread says when it began, when everything that it sent was complete, and OK or a negative status.
"""

from __future__ import annotations

from ... import device as dev
from ...device.cq import timeout_of
from ...device.qp import RSVD
from ...device.scope import ALONE, from_last, size_of
from ...device.waiting import patience
from ...jit.compile import device_function

RECORD_WORDS = 3
MOST_THREADS = 2048  # of a launch; each has a flag
STOPPED = -125  # ECANCELED: the stop word was set
WRONG_LENGTH = -74  # EBADMSG: a receive got more or fewer bytes than were sent
NOT_INLINE = -42  # ENOMSG: a completion without the data that it should carry

RECORD, START, END, STATUS = 8 * RECORD_WORDS, 0, 8, 16
LOOK_EVERY = 64  # messages between checks of the stop word, which is in host memory, far from a GPU
_LOOK_EVERY_POLLS = 256


@device_function
def record(out: int, thread: int, start: int, status: int) -> None:
    """Write a thread's record."""
    dev.st64(out + thread * RECORD + START, start)
    dev.st64(out + thread * RECORD + END, dev.clock_ns())
    dev.st64(out + thread * RECORD + STATUS, status)


@device_function
def wait_together(qp: dev.VerbsQp, ticket: int, scope: int, daddr: int = 0, dlkey: int = 0) -> int:
    """Wait for tickets. All threads of a warp or block get the same status, so either all of them continue or none.

    `daddr` and `dlkey` are those of `dev.get_wait`.
    """
    status = dev.get_wait(qp, ticket, dev.GPU, scope, daddr, dlkey)
    return status if scope == dev.THREAD else from_last(status, scope)


@device_function
def wake(qp: dev.VerbsQp, scope: int) -> int:
    """Post a NOP and wait for it, so that the NIC is awake when the clock starts: it may sleep when a kernel begins."""
    return wait_together(qp, dev.put(qp, 0, 0, 0, 0, 0, dev.GPU, dev.DEFAULT, scope), scope)


@device_function
def place(queues: int, scope: int) -> tuple[int, int]:
    """Return a thread's queue, and its number among all threads: consecutive numbers have consecutive queues.

    Threads that post together share a queue.
    """
    thread, size = dev.global_id(), size_of(scope, ALONE)
    group = thread // size
    queue = group % queues
    return queue, queue + queues * (group // queues * size + thread % size)


@device_function
def _has(wide: int, address: int, value: int) -> bool:
    if wide:
        return dev.ld_relaxed64(address) >= value
    return dev.ld_relaxed8(address) == value


@device_function
def wait_for(
    wide: int, qp: dev.VerbsQp, ticket: int, companion: dev.VerbsQp, address: int, value: int, stop: int
) -> int:
    """Wait until the word at `address` has reached `value` (`wide`), or until the byte there is `value`.

    Return OK or a negative status. The deadline is that of waits on `qp`. An error of `ticket`, the last of this end,
    or of the companion, if there is one, ends the wait early.
    """
    timeout_ns = timeout_of(qp)
    polls = 0
    start = 0
    while not _has(wide, address, value):
        start = patience(polls, start, timeout_ns)
        if start < 0:
            return dev.ETIMEDOUT
        polls += 1
        if polls & (_LOOK_EVERY_POLLS - 1) == 0:
            stopped = dev.ld_relaxed64(stop)
            if dev.poll_one(qp, ticket, dev.GPU) == dev.EIO:  # may be the reason why the other end has stopped this one
                return dev.EIO
            if companion != 0:
                last = dev.ld_relaxed64(companion + RSVD) - 1
                if last >= 0 and dev.poll_one(companion, last, dev.GPU) == dev.EIO:
                    return dev.EIO
            if stopped != 0:
                return STOPPED
    return dev.OK
