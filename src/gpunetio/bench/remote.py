"""A benchmark over two processes: the client runs the kernel and measures, the server holds the other end of the data.

    both      hello (what to do), ends (queue pairs, memory), ready
    client    size            server
              prepare         ready       for each launch; in a latency test the server's kernel runs then
              collect         collected
              check           checked     after the last launch of the size
              result
              end             end
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any

import numpy as np

from ..errors import DocaError
from ..gpu import GpuMemory
from ..jit.launch import Kernel
from ..rendezvous import link as talk
from ..rendezvous.link import Link, Message, PeerError, accept, dial, listen, own_address
from .agreement import Far, File, agree, swap_ends, swap_words
from .data import Arrival, Data, Ends, Pattern, Payload
from .kernels.parts import MOST_THREADS
from .launches import GRACE_SECONDS, LAUNCH_SECONDS
from .options import Options
from .results import BwResult, Check, LatResult, Result
from .run import PART_MESSAGES, Run
from .side import Shown
from .words import Order, Words

# 0.27 s, and 2 s with all retries. On a busy machine an engine may be off its core for longer than usual, and the TCP
# connection shows whether the peer is gone.
ACK_TIMEOUT = 16
_TEXT = 1000  # characters of a problem that are sent

_NO_MARKS = np.zeros(0, np.uint8)


class Remote(Run):
    """The common part of client and server: one end each, in `near`; `far` describes the other end."""

    link: Link | None = None
    is_client = False
    options: Options
    payload_bytes: int | None
    near: GpuMemory
    back: GpuMemory
    far: Far

    def _open(self) -> None:
        link = self.link = self._meet()
        own = None if self._file is None else _describe(self._file)
        self.options, file = agree(link, self.options, own, self.is_client)
        self.payload_bytes = None if file is None else file.nbytes
        self.options.check()
        options, benchmark = self.options, self.options.benchmark
        self._sends = self.is_client != benchmark.reads
        side = self._open_side(self.is_client)
        self.near, self.back = side.data, side.back
        self.far = swap_ends(
            link, [qp.qp.endpoint(sgid_index=options.gid_index) for qp in side.queues],
            side.shown.address, side.shown.rkey, side.back.nbytes, self.room, self.queue.qp.rq_entries,
        )
        if benchmark.two_sided and self.is_client:
            options.check_receives(self.gpu.target, self.far.receives)
        far = Shown(self.far.address, self.far.rkey)
        if benchmark.counts or benchmark.two_sided:
            words = swap_words(link, side.shown.words_address, side.shown.words_rkey)
            far = Shown(far.address, far.rkey, *words)
        for qp, endpoint in zip(side.queues, self.far.endpoints):
            qp.connect(endpoint, sgid_index=options.gid_index, ack_timeout=ACK_TIMEOUT)
        self._open_memory()
        self._list_ends(side.rows(far, self.marks if self.payload_bytes is not None else None, self.notes))
        self.counts: list[Words | Order] = side.counts(self.notes.array.view(np.int64))
        # A launch without messages compiles the kernel, so that neither end compiles while the other waits for data.
        if self.is_client or benchmark.answers:
            self.launch_for(1, 1, 1, 0, 0)
        link.send("ready")
        self._await("ready")

    @abstractmethod
    def _meet(self) -> Link:
        """Connect to the other end, and set `role`."""

    def _await(self, *kinds: str) -> Message:
        """Return a message that may have to wait for a launch at the other end."""
        assert self.link is not None
        return self.link.expect(*kinds, timeout=LAUNCH_SECONDS + GRACE_SECONDS)

    def _leave(self, error: BaseException | None) -> None:
        if self.link is not None:
            self.link.close(error)

    def _look(self) -> None:
        """Stop a kernel whose peer has ended."""
        if self.link is not None and self.link.failure is not None:
            self._tell_to_stop()

    def launch(
        self, kernel: Kernel, grid: int, block: int, *args: object, launched: Callable[[], None] = lambda: None,
        seconds: float = LAUNCH_SECONDS,
    ) -> np.ndarray:
        """Launch a kernel. If the connection has ended, raise its error, which is the reason why the kernel failed."""
        try:
            return super().launch(kernel, grid, block, *args, launched=launched, seconds=seconds)
        except DocaError:
            if self.link is not None and (failure := self.link.failure_soon()) is not None:
                raise failure from None
            raise

    def data(self, size: int, value: int) -> Data:
        benchmark = self.options.benchmark
        messages, slots = self.messages(size), self.slots(size)
        sinks = [self.back] if benchmark.latency else [] if self._sends else [self.near]
        ends = Ends(self.near if self._sends else None, sinks, self.marks.array, self.order)
        if self.payload_bytes is None:
            return Pattern(ends, size, messages, slots, value, benchmark.marked)
        total = min(self.payload_bytes, messages * size)
        if self._sends and self._file is not None:
            return Payload(ends, size, messages, slots, self._file, total)
        if not benchmark.marked:
            ends = dataclasses.replace(ends, marks=_NO_MARKS)
        return Arrival(ends, size, messages, slots, total)

    @property
    def outcome(self) -> str:
        """Return the text for correct data."""
        way, peer = "by" if self._sends else "from", "server" if self.is_client else "client"
        return f"Data received correctly {way} {peer}."


class Client(Remote):
    """The end that measures."""

    is_client = True
    role: str

    def _meet(self) -> Link:
        host = self.options.server or ""
        self.role = f"client of {host}"
        return Link(dial(host, self.options.tcp_port), f"the server {host}", talk.STEP_SECONDS)

    def data(self, size: int, value: int) -> Data:
        self._tell("size", size=size, value=value)
        return super().data(size, value)

    def lay_out(self, data: Data, first: int, count: int) -> None:
        super().lay_out(data, first, count)
        marked = isinstance(data, Payload) and self.options.benchmark.marked
        marks = self.marks.array[:count] if marked else _NO_MARKS
        self._tell("prepare", first=first, count=count, marks=marks.tobytes().hex(), counters=self.counters)
        self._await("ready")

    def collect(self, data: Data, first: int, count: int) -> None:
        super().collect(data, first, count)
        self._tell("collect", sha256=data.digest() or "")
        answer = self._await("collected")
        if isinstance(data, Arrival):
            data.compare(answer.raw("sha256", 32).hex())

    def check(self, data: Data) -> Check:
        self._tell("check")
        own, theirs = super().check(data), _check_of(self._await("checked").part("check"))
        if theirs.sha256 is None:
            theirs = dataclasses.replace(theirs, payload_bytes=own.payload_bytes, sha256=own.sha256)
        return dataclasses.replace(theirs, problem=theirs.problem or own.problem)

    def tell(self, result: Result) -> None:
        """Send a result to the server, which shows it."""
        fields = {name: getattr(result, name) for name in _numbers(type(result))}
        self._tell("result", **fields, check=dataclasses.asdict(result.check))

    def finish(self) -> None:
        """Tell the server that all sizes are measured."""
        self._tell("end")
        self._await("end")

    def _tell(self, kind: str, **body: object) -> None:
        assert self.link is not None
        self.link.send(kind, **body)


class Server(Remote):
    """The end that serves one client. `waiting` is called with address and port once a client can connect."""

    role: str

    def __init__(self, options: Options, waiting: Callable[[str, int], None] = lambda address, port: None):
        self._waiting, self._counters = waiting, 1
        super().__init__(options)

    def _meet(self) -> Link:
        address = own_address(self.ctx, self.options.gid_index)
        listener = listen(address, self.options.tcp_port)
        try:
            self._waiting(address, listener.getsockname()[1])
        except BaseException:
            listener.close()
            raise
        sock, caller = accept(listener)
        self.role = f"server of {caller}"
        return Link(sock, f"the client {caller}", talk.STEP_SECONDS)

    def results(self) -> Iterator[Result]:
        """Serve the client. Yield the result of each size that the client reports."""
        assert self.link is not None
        for size in self.options.sizes:
            message = self._await("size")
            if message.integer("size", 1, 1 << 30) != size:
                raise message.wrong("size", f"{size}, the next size")
            yield self._serve(self.link, size, super().data(size, message.integer("value", 0, 255)))
        self._await("end")
        self.link.send("end")

    def _serve(self, link: Link, size: int, data: Data) -> Result:
        prepared: tuple[int, int] | None = None
        while True:
            message = self._await("prepare", "collect", "check", "result")
            if message.kind == "prepare":
                prepared = self._prepare(link, message, data)
            elif message.kind == "collect":
                if prepared is None:
                    raise PeerError(f"{link.peer} asked to collect messages that it has not sent")
                self.collect(data, *prepared)
                if isinstance(data, Arrival):
                    data.compare(message.raw("sha256", 32).hex())
                link.send("collected", sha256=data.digest() or "")
                prepared = None
            elif message.kind == "check":
                link.send("checked", check=dataclasses.asdict(self.check(data)))
            else:
                return _result_of(message, size, self.options.benchmark.latency)

    @property
    def counters(self) -> int:
        """Return the number of counting words, which the client sends."""
        return self._counters

    def _prepare(self, link: Link, message: Message, data: Data) -> tuple[int, int]:
        """Prepare for a launch of the client. Return its first message and the number of messages."""
        first = message.integer("first", 0, max(0, data.messages - 1))
        count = message.integer("count", 1, min(self.most(data), data.messages - first))
        self._counters = message.integer("counters", 1, MOST_THREADS)
        benchmark = self.options.benchmark
        if benchmark.marked and self.payload_bytes is not None:
            marks = message.raw("marks", PART_MESSAGES)
            if len(marks) != count:
                raise message.wrong("marks", f"the last bytes of {count} messages")
            self.marks.array[:count] = np.frombuffer(marks, np.uint8)
        self.lay_out(data, first, count)
        if benchmark.answers:
            self.launch_for(
                data.size, data.total, data.slots, first, count, launched=lambda: link.send("ready")
            )
        else:
            link.send("ready")
        return first, count


def _describe(file: BufferedReader) -> File:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(file.tell(), digest)


def _numbers(kind: type[Result]) -> list[str]:
    """Return the names of a result's numeric fields, which are sent."""
    return [field.name for field in dataclasses.fields(kind) if field.type in ("int", "float")]


def _result_of(message: Message, size: int, latency: bool) -> Result:
    kind = LatResult if latency else BwResult
    values: dict[str, Any] = {name: message.number(name, 0, 1e18) for name in _numbers(kind)}
    values |= {"size": message.integer("size", size, size), "iterations": int(values["iterations"])}
    return kind(**values, check=_check_of(message.part("check")))


def _check_of(message: Message) -> Check:
    problem = None if message.get("problem") is None else message.text("problem")[:_TEXT]
    flag = None if message.get("flag") is None else message.integer("flag", -(1 << 63), (1 << 63) - 1)
    if message.get("sha256") is None:
        return Check(problem, flag=flag)
    return Check(problem, message.integer("payload_bytes", 0, 1 << 62), message.raw("sha256", 32).hex(), flag)
