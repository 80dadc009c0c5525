"""verbs_dpa: a kernel on the DPA of either NIC writes into the memory of the other, with no CPU in the data path.

    1. resources    device, DPA, DPA completion, protection domain, queue pair in the DPA, two buffers of its memory
    2. exchange     over TCP: address and rkey of the buffer to be written; the queue pair's endpoint
    3. connection   `QP.connect`: RST → INIT → RTR → RTS
    4. data path    round by round, each kernel WRITEs a message into the other's buffer, waits for the completion, and
                    polls its own buffer until the message of the other's kernel is there
    5. end          the CPU validates the last message; neither end closes before the other has finished

Messages are numbered from 0. The bytes of message n count up from n + 1 at the server and from n + 129 at the client,
modulo 256. So the last byte, which the kernel waits for, differs from one message to the next. A kernel that has seen
message n of the other may be one round ahead of it, and write message n + 1 while the other still waits for n. So
messages go to two slots of the buffer in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..bench.agreement import Far, swap_ends
from ..device import device_function, kernel
from ..device.cq import timeout_of
from ..device.status import NAMES
from ..device.waiting import patience
from ..dpa import Dpa
from ..errors import DriverError, TimedOutError, UnexpectedError
from ..gpu import GpuMemory
from ..rendezvous.link import Link
from ..verbs import MR, QP, Context
from ..verbs import open as open_device
from .meeting import EndOptions, compare, meet, meet_in

FIRST_BYTE = {"server": 1, "client": 129}
SLOTS = 2  # of the buffer that is written
DEPTH = 4  # of the send queue: one message is under way at a time
WAIT_SECONDS = 10.0  # of one wait in the kernel
KERNEL_SECONDS = 120.0  # of all rounds, or to compile
LOOK_SECONDS = 0.05  # between checks of the other end while the kernel runs
STOPPED = -125  # ECANCELED: the stop word was set


@dataclass(frozen=True, kw_only=True)
class SampleOptions(EndOptions):
    """`size` is the bytes of a message, `iterations` the number of rounds."""

    size: int = 64
    iterations: int = 1


# --- the kernel ------------------------------------------------------------------------------------------------------


@device_function
def _await_byte(qp: dev.VerbsQp, address: int, value: int, stop: int) -> int:
    """Poll until the byte at `address` is `value`. Return OK or a negative status. The deadline is the queue's."""
    timeout_ns = timeout_of(qp)
    polls = 0
    start = 0
    while dev.ld_relaxed8(address) != value:
        if dev.ld_relaxed64(stop) != 0:
            return STOPPED
        start = patience(polls, start, timeout_ns)
        if start < 0:
            return dev.ETIMEDOUT
        polls += 1
    dev.fence_acquire_sys()
    return dev.OK


@device_function
def _round(
    qp: dev.VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, inbox: int, nbytes: int, n: int, own: int,
    other: int, stop: int,
) -> int:
    """Write message `n`, which counts up from `own` + n, and wait for the other end's message."""
    for i in range(nbytes):
        dev.st8(laddr + i, (own + n + i) & 0xFF)
    slot = n % SLOTS * nbytes
    status = dev.wait(qp, dev.put(qp, raddr + slot, rkey, laddr, lkey, nbytes, dev.EXCLUSIVE), dev.EXCLUSIVE)
    if status != dev.OK:
        return status
    return _await_byte(qp, inbox + slot + nbytes - 1, (other + n + nbytes - 1) & 0xFF, stop)


@kernel
def write_and_wait(
    qp: dev.VerbsQp, raddr: int, rkey: int, laddr: int, lkey: int, inbox: int, nbytes: int, rounds: int, own: int,
    other: int, stop: int, out: int,
) -> None:
    """Run the data path of one end. `out` gets the number of completed rounds, and OK or a negative status."""
    status = dev.OK
    done = 0
    while done < rounds and status == dev.OK:
        status = _round(qp, raddr, rkey, laddr, lkey, inbox, nbytes, done, own, other, stop)
        done += status == dev.OK
    dev.st64(out, done)
    dev.st64(out + 8, status)


# --- one end ---------------------------------------------------------------------------------------------------------


def run(options: SampleOptions, say: Callable[[str], None]) -> None:
    """Run one end of the sample. `say` gets its messages."""
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        dpa = stack.enter_context(Dpa(ctx, timeout=WAIT_SECONDS))
        link = meet(ctx, options, say)
        stack.push(lambda kind, error, trace: link.close(error))  # sends an error to the other end
        compare(link, "verbs_dpa", {"--size": options.size, "--iters": options.iterations})
        end = End(ctx, dpa, link, options)
        end.connect()
        end.run(0)  # compiles now: neither end may wait for a message while the other compiles
        meet_in(link, "ready", KERNEL_SECONDS)
        say("Launching the DPA kernel")
        end.run(options.iterations)
        end.validate()
        meet_in(link, "done", KERNEL_SECONDS)
    say(f"The DPA kernel wrote to the {end.peer}'s buffer {options.iterations} times, {options.size} bytes each")
    say(f"The {end.peer}'s DPA kernel wrote to this end's buffer as often, and all bytes are right")


class End:
    """The resources of one end. Closing the DPA closes its resources, after its kernels have ended."""

    dpa: Dpa
    link: Link
    options: SampleOptions
    first: int
    other: int
    qp: QP
    outbox: GpuMemory
    inbox: GpuMemory
    out_mr: MR
    in_mr: MR
    stop: GpuMemory
    out: GpuMemory
    far: Far

    def __init__(self, ctx: Context, dpa: Dpa, link: Link, options: SampleOptions):
        self.dpa, self.link, self.options = dpa, link, options
        role, self.peer = ("client", "server") if options.server is not None else ("server", "client")
        self.first, self.other = FIRST_BYTE[role], FIRST_BYTE[self.peer]
        pd = ctx.create_pd()
        self.qp = pd.create_qp(dpa=dpa, sq_wr=DEPTH, send_dpa_completion=dpa.create_completion(DEPTH))
        self.outbox, self.inbox = dpa.alloc(options.size), dpa.alloc(SLOTS * options.size)
        self.out_mr, self.in_mr = pd.register(self.outbox), pd.register(self.inbox)
        for n in range(SLOTS):
            self._slot(n)[:] = self._message(n) ^ 0xFF  # every byte is wrong
        self.stop, self.out = dpa.alloc(8), dpa.alloc(16)

    def connect(self) -> None:
        """Exchange addresses with the other end, and connect."""
        index, nbytes = self.options.gid_index, self.inbox.nbytes
        here = self.qp.endpoint(sgid_index=index)
        self.far = swap_ends(self.link, [here], self.in_mr.address, self.in_mr.rkey, nbytes, nbytes)
        self.qp.connect(self.far.endpoints[0], sgid_index=index)

    def run(self, rounds: int) -> None:
        """Run the kernel until it ends. It ends early when the other end is gone."""
        launch = write_and_wait[1, 1, self.dpa](
            self.qp.get_dpa_handle(self.dpa), self.far.address, self.far.rkey, self.outbox, self.out_mr.lkey,
            self.inbox, self.options.size, rounds, self.first, self.other, self.stop, self.out,
        )
        end = time.monotonic() + KERNEL_SECONDS
        try:
            while not launch.wait(LOOK_SECONDS):
                if self.link.failure is not None:
                    raise self.link.failure
                if time.monotonic() > end:
                    raise TimedOutError(f"the kernel did not end within {KERNEL_SECONDS:g} s")
        finally:
            self.stop.array.view(np.int64)[0] = not launch.done
        self._check(*self.out.array.view(np.int64).tolist())

    def _check(self, done: int, status: int) -> None:
        if status == dev.OK:
            return
        if (failure := self.link.failure_soon()) is not None:
            raise failure
        error = self.dpa.last_error(self.qp)
        what = f"the kernel ended after {done} rounds with '{NAMES.get(status, status)}'{f': {error}' if error else ''}"
        raise TimedOutError(what) if status == dev.ETIMEDOUT else DriverError(what)

    def _slot(self, n: int) -> np.ndarray:
        """Return the slot in which message `n` of the other end arrives."""
        return self.inbox.array.reshape(SLOTS, -1)[n % SLOTS]

    def _message(self, n: int) -> np.ndarray:
        """Return the expected message `n` of the other end."""
        return (np.arange(self.options.size) + self.other + n).astype(np.uint8)

    def validate(self) -> None:
        """Raise UnexpectedError unless the last message of the other end is in the buffer as it was sent."""
        last = self.options.iterations - 1
        found, wanted = self._slot(last), self._message(last)
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            at = int(wrong[0])
            raise UnexpectedError(
                f"the {self.peer}'s DPA kernel wrote byte {at} wrong: it is {found[at]:#04x}, not {wanted[at]:#04x}"
            )
