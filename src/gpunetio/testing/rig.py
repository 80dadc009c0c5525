"""The tools of checks: two ends with their objects, waits that end, and comparisons that say what was wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypedDict, TypeVar, Unpack

import numpy as np

from ..closing import end_block
from ..enums import Access, AsyncEventType, QpState, QpType, SendFlags, WcStatus, WrOpcode
from ..errors import DocaError
from ..memory import PAGE
from ..verbs import CQ, MR, PD, QP, SRQ, UAR, CompChannel, Completion, Context, RecvWr, SendWr, Sge
from ..verbs.qp import ConnectOptions

PATIENCE = 10.0  # seconds to wait for events that must happen
QUIET = 0.02  # seconds in which an event that must not happen would have happened
SIZE = 1 << 18  # bytes of a side's memory: two messages of 64 KiB at different places
_LOOK = 20e-6
_GUARD = 64
_NO_FLAGS = SendFlags(0)

_T = TypeVar("_T")


class Violation(Exception):
    """A provider breaks the contract; the message says how."""


class Remote(TypedDict, total=False):
    """The peer's memory, as fields of a work request; empty for a SEND."""

    remote_addr: int
    rkey: int


class Values(Remote, total=False):
    """Other fields of a work request."""

    wr_id: int
    inline: bytes
    imm: int
    compare: int
    swap: int
    add: int


class QpInit(TypedDict, total=False):
    """Arguments of `PD.create_qp`, without the CQs."""

    sq_wr: int
    rq_wr: int
    send_max_sges: int
    receive_max_sges: int
    max_inline_data: int
    sq_sig_all: bool
    qp_type: QpType
    srq: SRQ | None
    core_direct_master: bool
    memcpy: bool
    external_uar: UAR | None


class SideInit(QpInit, total=False):
    """Arguments of `Rig.side`."""

    access: Access | None
    size: int
    pd: PD | None
    send_cq: CQ | None
    receive_cq: CQ | None


def same(what: str, found: object, wanted: object) -> None:
    """Raise Violation unless two values are equal."""
    if found != wanted:
        raise Violation(f"{what}: {found!r}, and it should be {wanted!r}")


def true(what: str, holds: object) -> None:
    """Raise Violation unless something holds."""
    if not holds:
        raise Violation(f"it should be that {what}")


def refused(what: str, errors: type[DocaError] | tuple[type[DocaError], ...], call: Callable[[], object]) -> DocaError:
    """Raise Violation unless the call raises one of these errors, which is returned."""
    try:
        call()
    except errors as error:
        return error
    raise Violation(f"{what} was not refused")


class Memory:
    """Registered memory with guard bytes around it, random content, and an image of what it must hold.

    It begins at an address that atomics can use, and at the offset of `iova` in a page, which cards require.
    """

    whole: np.ndarray
    bytes: np.ndarray
    image: np.ndarray

    def __init__(self, pd: PD, nbytes: int, seed: int, access: Access | None = None, iova: int | None = None):
        multiple, offset = (8, 0) if iova is None else (PAGE, iova % PAGE)
        self.whole = np.random.default_rng(seed).integers(0, 256, nbytes + 2 * _GUARD + multiple, np.uint8)
        start = _GUARD + (offset - int(self.whole.ctypes.data + _GUARD)) % multiple
        self.nbytes = nbytes
        self.bytes = self.whole[start : start + nbytes]
        self.mr: MR = pd.register(self.bytes, access, iova=iova)
        self._image = self.whole.copy()
        self.image = self._image[start : start + nbytes]

    def sge(self, at: int = 0, nbytes: int = 8) -> Sge:
        """Return a scatter/gather entry."""
        return Sge(self.mr.iova + at, nbytes, self.mr.lkey)

    def remote(self, at: int = 0) -> Remote:
        """Return the fields with which a request of the peer names this memory."""
        return {"remote_addr": self.mr.iova + at, "rkey": self.mr.rkey}

    def word(self, at: int) -> int:
        """Return the 64-bit word at an offset."""
        return int(self.bytes[at : at + 8].view(np.uint64)[0])

    def set_word(self, at: int, value: int) -> None:
        """Set the word at an offset, both in the memory and in the image."""
        for place in (self.bytes, self.image):
            place[at : at + 8].view(np.uint64)[0] = value

    def expect_word(self, at: int, value: int) -> None:
        """Set the word at an offset in the image: the memory must come to hold it."""
        self.image[at : at + 8].view(np.uint64)[0] = value % 2**64

    def expect_copy(self, at: int, source: Memory, start: int, nbytes: int) -> None:
        """Copy bytes of another image into this one: the memory must come to hold them."""
        self.image[at : at + nbytes] = source.image[start : start + nbytes]

    def verify(self, what: str) -> None:
        """Raise Violation unless the memory, including its guards, equals the image."""
        wrong = np.flatnonzero(self.whole != self._image)
        if len(wrong):
            first = int(wrong[0]) - int(self.bytes.ctypes.data - self.whole.ctypes.data)
            raise Violation(
                f"{what}: {len(wrong)} of {self.nbytes} bytes of memory are wrong, the first at offset {first}: "
                f"{self.whole[wrong[0]]:#04x}, and it should be {self._image[wrong[0]]:#04x}"
            )


@dataclass
class Side:
    """One end of a connection: a queue pair, a CQ for each of its queues, and memory."""

    rig: Rig
    pd: PD
    qp: QP
    sent: CQ
    received: CQ
    memory: Memory

    @property
    def ctx(self) -> Context:
        """Return its context."""
        return self.pd.ctx

    def post(
        self, opcode: WrOpcode, *sges: Sge, signaled: bool = True, flags: SendFlags = _NO_FLAGS,
        **values: Unpack[Values],
    ) -> None:
        """Post one request. SEND_WITH_IMM, for example, takes `imm`."""
        flags |= SendFlags.SIGNALED if signaled else _NO_FLAGS
        self.qp.post_send(SendWr(opcode=opcode, sges=sges, flags=flags, **values))

    def receive(self, *sges: Sge, wr_id: int = 0) -> None:
        """Post one receive."""
        self.qp.post_recv(RecvWr(sges=sges, wr_id=wr_id))

    def sends(self, count: int = 1) -> list[Completion]:
        """Return exactly `count` completions of the send queue."""
        return self.rig.take(self.sent, count)

    def receives(self, count: int = 1) -> list[Completion]:
        """Return exactly `count` completions of the receive queue."""
        return self.rig.take(self.received, count)

    def succeed(self, *wr_ids: int) -> list[Completion]:
        """Return the send queue's next completions, which must be successes of these requests, in this order."""
        done = self.sends(len(wr_ids))
        same("completions of sends", outcomes(done), [(wr_id, WcStatus.SUCCESS) for wr_id in wr_ids])
        return done

    def arrive(self, *wr_ids: int) -> list[Completion]:
        """Return the receive queue's next completions, which must be successes of these receives, in this order."""
        done = self.receives(len(wr_ids))
        same("completions of receives", outcomes(done), [(wr_id, WcStatus.SUCCESS) for wr_id in wr_ids])
        return done

    def fail(self, status: WcStatus, *wr_ids: int) -> None:
        """Check the send queue's next completions: the first request failed with this status, the others are flushed.
        """
        same("completions of sends", outcomes(self.sends(len(wr_ids))), _failed(status, wr_ids))
        self.rig.state(self.qp, QpState.ERR)

    def fail_receiving(self, status: WcStatus, *wr_ids: int) -> None:
        """Check the receive queue's next completions in the same way."""
        same("completions of receives", outcomes(self.receives(len(wr_ids))), _failed(status, wr_ids))
        self.rig.state(self.qp, QpState.ERR)


def _failed(status: WcStatus, wr_ids: tuple[int, ...]) -> list[tuple[int, WcStatus]]:
    return [(wr_id, WcStatus.WR_FLUSH_ERR if number else status) for number, wr_id in enumerate(wr_ids)]


def outcomes(done: Iterable[Completion]) -> list[tuple[int, WcStatus]]:
    """Return the (wr_id, status) of completions."""
    return [(one.wr_id, one.status) for one in done]


class Rig:
    """Both ends of one check. Contexts are opened on first use, and closed with everything that was made from them.

    `near` is the device that is checked, `far` the one at the other end, which may be the same device in a context of
    its own.
    """

    patience: float

    def __init__(self, factory: Callable[[], Context], peer: Callable[[], Context], patience: float):
        self._factory, self._peer, self.patience = factory, peer, patience
        self._stack = ExitStack()
        self._seed = 0
        self._made: list[Memory | Side] = []  # kept alive, whatever a check does with them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_block(error, self._stack.close)

    @cached_property
    def near(self) -> Context:
        """Return the context that is checked."""
        return self._stack.enter_context(self._factory())

    @cached_property
    def far(self) -> Context:
        """Return the context of the other end."""
        return self._stack.enter_context(self._peer())

    def another(self) -> Context:
        """Return one more context of the near device."""
        return self._stack.enter_context(self._factory())

    # --- objects

    def memory(
        self, pd: PD, nbytes: int = SIZE, access: Access | None = None, *, iova: int | None = None
    ) -> Memory:
        """Return memory with unique content."""
        self._seed += 1
        self._made.append(made := Memory(pd, nbytes, self._seed, access, iova))
        return made

    def side(
        self, ctx: Context, *, access: Access | None = None, size: int = SIZE, pd: PD | None = None,
        send_cq: CQ | None = None, receive_cq: CQ | None = None, **init: Unpack[QpInit],
    ) -> Side:
        """Return a queue pair with a PD, CQs and memory of its own, unless they are given."""
        pd = pd or ctx.create_pd()
        sent, received = send_cq or ctx.create_cq(64), receive_cq or ctx.create_cq(64)
        options: QpInit = {"sq_wr": 16, "rq_wr": 16, "send_max_sges": 3, "receive_max_sges": 3, **init}
        qp = pd.create_qp(send_cq=sent, receive_cq=received, **options)
        self._made.append(made := Side(self, pd, qp, sent, received, self.memory(pd, size, access)))
        return made

    def sides(self, near: SideInit | None = None, far: SideInit | None = None) -> tuple[Side, Side]:
        """Return a side on each end, not connected."""
        return self.side(self.near, **near or SideInit()), self.side(self.far, **far or SideInit())

    def pair(
        self, near: SideInit | None = None, far: SideInit | None = None, **connection: Unpack[ConnectOptions]
    ) -> tuple[Side, Side]:
        """Return a connected side on each end. The dictionaries are arguments of `side`, the rest of `QP.connect`."""
        a, b = self.sides(near, far)
        self.connect(a, b, **connection)
        return a, b

    @staticmethod
    def connect(a: Side, b: Side, **connection: Unpack[ConnectOptions]) -> None:
        """Connect two queue pairs. Timeouts are a second, so that a busy device is not taken for dead.

        A receiver that is not ready is tried again soon.
        """
        a.qp.connect(b.qp, **{"ack_timeout": 18, "min_rnr_timer": 1, **connection})

    # --- waiting

    def until(self, what: str, call: Callable[[], _T | None]) -> _T:
        """Wait until a call returns a true value, and return it."""
        end = time.monotonic() + self.patience
        while not (found := call()):
            if time.monotonic() > end:
                raise Violation(f"waited {self.patience:g} s in vain for {what}")
            time.sleep(_LOOK)
        return found

    def quiet(self, what: str, call: Callable[[], object]) -> None:
        """Raise Violation if a call returns a true value within a short time."""
        time.sleep(QUIET)
        if found := call():
            raise Violation(f"{what}: {found!r}, and there should be none")

    def take(self, cq: CQ, count: int) -> list[Completion]:
        """Return exactly `count` completions."""
        found: list[Completion] = []

        def poll() -> bool:
            found.extend(cq.poll(count + 1))
            return len(found) >= count

        try:
            self.until(f"{count} completions of {cq}", poll)
        except Violation as violation:
            raise Violation(f"{violation}; there came {outcomes(found)}") from None
        found += cq.poll()
        if len(found) > count:
            raise Violation(f"{len(found)} completions of {cq}, and there should be {count}: {outcomes(found)}")
        return found

    def state(self, qp: QP, wanted: QpState) -> None:
        """Wait until a queue pair is in a state."""
        end = time.monotonic() + self.patience
        while (found := qp.state) != wanted:
            if time.monotonic() > end:
                raise Violation(f"{qp} is in {found.name}, and it should be in {wanted.name}")
            time.sleep(_LOOK)

    def event(self, ctx: Context, wanted: AsyncEventType, element: object) -> None:
        """Take the next asynchronous event, which must be of this type and about this object, and acknowledge it."""
        event = ctx.get_async_event(self.patience)
        if event is None:
            raise Violation(f"waited {self.patience:g} s in vain for {wanted.name} of {element}")
        event.ack()
        same("asynchronous event", (event.type.name, str(event.element)), (wanted.name, str(element)))

    def no_event(self, ctx: Context) -> None:
        """Check that no asynchronous event waits or comes within a short time."""
        if event := ctx.get_async_event(QUIET):
            event.ack()
            raise Violation(f"asynchronous event {event.type.name} of {event.element}, and there should be none")

    def told(self, channel: CompChannel, cq: CQ) -> None:
        """Take the channel's next event, which must be about this CQ, and acknowledge it."""
        found = channel.get_event(self.patience)
        if found is None:
            raise Violation(f"waited {self.patience:g} s in vain for an event of {cq}")
        found.ack_events()
        same("completion event", str(found), str(cq))

    def not_told(self, channel: CompChannel) -> None:
        """Check that no event comes within a short time."""
        if found := channel.get_event(QUIET):
            found.ack_events()
            raise Violation(f"a completion event of {found}, and there should be none")
