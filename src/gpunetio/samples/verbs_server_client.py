"""verbs_server_client: two processes exchange messages by SEND, RDMA WRITE or RDMA READ, from the CPU.

    1. resources    device, protection domain, memory region, completion queue, queue pair
    2. exchange     over TCP: address and rkey of the region; QP number, GID, LID and first PSN of the queue pair
    3. connection   RST → INIT → RTR → RTS, step by step, in connection.py
    4. data path    Send: the client SENDs, the server has posted receives and polls its CQ
                    Write: the client WRITEs, the server polls its memory, because it gets no completion
                    Read: the client READs, the server has nothing to do
    5. end          each end tells the other that it is done: until then the other may still need its memory

Message i, counted from 0, is the 32-bit number i + 1, repeated. Each has a place of its own in either end's buffer, so
that in a burst none overwrites another before it was checked.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..bench.agreement import Far, swap_ends
from ..enums import Access, QpType, WcStatus, WrOpcode
from ..errors import DriverError, InvalidValueError, TimedOutError, UnexpectedError
from ..rendezvous.link import Link
from ..verbs import CQ, MR, QP, Completion, Context, QpEndpoint, RecvWr, SendWr, Sge
from ..verbs import open as open_device
from .connection import connect
from .meeting import EndOptions, compare, meet, meet_in

PORT = 5000
MOST_BYTES = 1 << 30  # of all messages together
PERSON_SECONDS = 600.0  # for a user to type the size of a burst; an end that dies or hangs is noticed earlier
WAIT_SECONDS = 10.0  # for the next message or completion
POLL_SECONDS = 50e-6  # between two polls: the NIC may be a thread that needs this core

_MIN_RECEIVES = 4
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

Ask = Callable[[Link, int], int] | None  # returns the size of the next burst, given the messages left; None means all

# What the client posts, and the access rights that the server's memory needs.
OPERATIONS = {
    "Send":  (WrOpcode.SEND,       Access.LOCAL_WRITE),
    "Write": (WrOpcode.RDMA_WRITE, Access.LOCAL_WRITE | Access.REMOTE_WRITE),
    "Read":  (WrOpcode.RDMA_READ,  Access.LOCAL_WRITE | Access.REMOTE_READ),
}


@dataclass(frozen=True, kw_only=True)
class SampleOptions(EndOptions):
    """`size` is the bytes of a message, `iterations` the number of messages."""

    tcp_port: int = PORT
    operation: str = "Send"
    size: int = 64
    iterations: int = 1

    def __post_init__(self) -> None:
        if self.size * self.iterations > MOST_BYTES:
            raise InvalidValueError(
                f"{self.iterations} messages of {self.size} bytes: all together may have {MOST_BYTES} bytes; ask for "
                "fewer --iters or a smaller --buffer-size"
            )


def run(options: SampleOptions, ask: Ask = None) -> None:
    """Run one end of the sample. `ask` gets the connection, so that it can notice when the other end is gone."""
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        end = Server(ctx, options) if options.server is None else Client(ctx, options)
        link = meet(ctx, options, _log.info)
        stack.push(lambda kind, error, trace: link.close(error))  # sends an error to the other end
        terms = {"--rdma-oper-type": options.operation, "--buffer-size": options.size, "--iters": options.iterations}
        compare(link, "verbs_server_client", terms)
        end.connect(link)
        end.prepare()
        meet_in(link, "ready", PERSON_SECONDS)
        end.exchange(ask)
        meet_in(link, "done", PERSON_SECONDS)
    _log.info("Sample finished successfully")


class End:
    """The common part of client and server: their resources, the connection, and how they wait."""

    peer = ""

    link: Link  # to the other end, from `connect` on
    ctx: Context
    options: SampleOptions
    opcode: WrOpcode
    access: Access
    buffer: bytearray
    mr: MR
    cq: CQ
    qp: QP
    here: QpEndpoint
    far: Far

    def __init__(self, ctx: Context, options: SampleOptions):
        self.ctx, self.options = ctx, options
        self.opcode, self.access = OPERATIONS[options.operation]
        pd = ctx.create_pd()
        self.buffer = bytearray(b"\xff" * options.size * options.iterations)  # a value that no message has
        self.mr = pd.register(self.buffer, self.access)
        # One CQ has the completions of both queues, so it must have room for all of them.
        sq_wr, rq_wr = options.iterations, max(_MIN_RECEIVES, options.iterations)
        self.cq = ctx.create_cq(1 << (sq_wr + rq_wr - 1).bit_length())
        self.qp = pd.create_qp(sq_wr=sq_wr, rq_wr=rq_wr, send_cq=self.cq, receive_cq=self.cq, qp_type=QpType.RC)
        self.here = self.qp.endpoint(sgid_index=options.gid_index)

    def connect(self, link: Link) -> None:
        """Exchange addresses with the other end, and move the queue pair from RST to RTS."""
        self.link = link
        self.far = swap_ends(link, [self.here], self.mr.address, self.mr.rkey, self.mr.nbytes, self.mr.nbytes)
        (there,) = self.far.endpoints
        connect(self.qp, self.here, there, self.access, self.options.gid_index)

    # --- messages

    def place(self, i: int) -> slice:
        """Return the place of message `i` in the buffer."""
        return slice(i * self.options.size, (i + 1) * self.options.size)

    def sge(self, i: int) -> Sge:
        """Return the place of message `i` as a scatter/gather entry."""
        return Sge(self.mr.address + self.place(i).start, self.options.size, self.mr.lkey)

    def message(self, i: int) -> bytes:
        """Return the expected bytes of message `i`."""
        size = self.options.size
        return (struct.pack("<I", i + 1) * (size // 4 + 1))[:size]

    def fill(self) -> None:
        """Write all messages to their places."""
        for i in range(self.options.iterations):
            self.buffer[self.place(i)] = self.message(i)

    def validate(self, i: int) -> None:
        """Raise UnexpectedError unless message `i` has arrived as it was sent."""
        found, wanted = self.buffer[self.place(i)], self.message(i)
        if found != wanted:
            at = next(at for at in range(len(wanted)) if found[at] != wanted[at])
            raise UnexpectedError(
                f"message #{i + 1} from {self.peer} is wrong: its byte {at} is {found[at]:#04x}, not {wanted[at]:#04x}"
            )
        _log.info("Received a valid message #%d from %s", i + 1, self.peer)

    # --- waiting

    def wait(self, ready: Callable[[], _T], what: str) -> _T:
        """Poll until `ready()` is true and return its value.

        Raise an error if the other end is gone, or after a while.
        """
        end = time.monotonic() + WAIT_SECONDS
        while not (value := ready()):
            if self.link.failure is not None:
                raise self.link.failure
            if time.monotonic() > end:
                raise TimedOutError(f"{what} did not come within {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return value

    def completions(self, count: int) -> Iterator[Completion]:
        """Yield `count` completions as they come. DriverError for a request that has failed."""
        while count > 0:
            for completion in self.wait(partial(self.cq.poll, count), "a completion"):
                if completion.status != WcStatus.SUCCESS:
                    raise self.link.failure_soon() or DriverError(
                        f"request {completion.wr_id + 1} failed: {completion.status.name} (vendor "
                        f"{completion.vendor_err:#04x}); the NIC's log says why"
                    )
                yield completion
                count -= 1


class Client(End):
    """The end that posts the operations."""

    peer = "server"

    def prepare(self) -> None:
        """Write the messages, unless the client reads them."""
        if self.opcode != WrOpcode.RDMA_READ:
            self.fill()

    def exchange(self, ask: Ask) -> None:
        """Post a burst, tell the server, wait for the completions, and so on."""
        posted, total = 0, self.options.iterations
        while posted < total:
            count = ask(self.link, total - posted) if ask else total
            self.qp.post_send(*map(self.request, range(posted, posted + count)))
            self.link.send("burst", count=count)
            for completion in self.completions(count):
                if self.opcode == WrOpcode.RDMA_READ:
                    self.validate(completion.wr_id)
            posted += count

    def request(self, i: int) -> SendWr:
        """Return the request of message `i`.

        A SEND goes to the place that the receive names, and ignores the remote address.
        """
        return SendWr(
            opcode=self.opcode, sges=[self.sge(i)], wr_id=i,
            remote_addr=self.far.address + self.place(i).start, rkey=self.far.rkey,
        )


class Server(End):
    """The end whose memory is written or read."""

    peer = "client"

    def prepare(self) -> None:
        """Post the receives, or write the messages for the client to read."""
        if self.opcode == WrOpcode.SEND:
            self.qp.post_recv(*(RecvWr(sges=[self.sge(i)], wr_id=i) for i in range(self.options.iterations)))
        elif self.opcode == WrOpcode.RDMA_READ:
            self.fill()

    def exchange(self, ask: Ask) -> None:
        """Receive messages. The client says when it has posted a burst."""
        taken, total = 0, self.options.iterations
        while taken < total:
            burst = self.link.expect("burst", timeout=PERSON_SECONDS)
            count = burst.integer("count", 1, total - taken)
            if self.opcode == WrOpcode.SEND:
                for completion in self.completions(count):
                    self.validate(completion.wr_id)
            elif self.opcode == WrOpcode.RDMA_WRITE:
                for i in range(taken, taken + count):
                    self._poll_memory(i)
            taken += count

    def _poll_memory(self, i: int) -> None:
        """Wait until message `i` is in memory."""
        try:
            self.wait(lambda: self.buffer[self.place(i)] == self.message(i), f"message #{i + 1}")
        except TimedOutError:
            if self.link.failure is not None:
                raise
        self.validate(i)  # raises if it is not the expected message
