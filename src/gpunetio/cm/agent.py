"""The connection manager of a port: its state machine, driven by a thread, the clock and queue pair 1."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..arguments import deadline, number, whole
from ..errors import BadStateError, DocaError, DriverError, TimedOutError, again
from ..interrupts import deferred
from ..service import ServiceThread
from ..verbs.ah import AddressHandle
from ..verbs.handle import Handle
from .arrivals import Arrivals
from .gsi import GeneralServices
from .machine import Machine
from .path import Path
from .rdmacm import KernelMachine
from .ways import PATIENCE, Tell, Ways

if TYPE_CHECKING:
    from ..verbs.context import Context

logger: logging.Logger = logging.getLogger("gpunetio.cm")

_LONGEST_WAIT = 3600.0  # seconds; a longer wait could exceed what a lock accepts

T = TypeVar("T")

_LAST_WORDS = 1.0  # seconds that closing waits for peers' answers

_AT_ONCE = 32  # messages that the machine handles before it releases the lock
_RESTART = 1.0  # seconds between two attempts to restart

_agents: dict[tuple[Context, int], Agent] = {}
_opening = threading.Lock()  # held while an agent is created


def _after_fork() -> None:
    """In a forked child, forget the parent's agents, and any lock held while one was being created."""
    global _opening
    _opening = threading.Lock()
    _agents.clear()


os.register_at_fork(after_in_child=_after_fork)


class _Side(Protocol):
    """The source of a port's messages, with the machine that handles them."""

    machine: Machine

    @property
    def changes(self) -> tuple[int, ...]:
        """Return a value that differs after any change that a caller may be waiting for."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is work."""
        ...

    def listen(self) -> None:
        """Take what has arrived. The agent's thread calls this without the lock."""
        ...

    def handle(self) -> bool:
        """Let the machine handle part of what has arrived. Return whether more is left."""
        ...

    def find(self, path: Path, patience: float, tell: Tell) -> None:
        """Find the way to a path's peer (`Ways.find`)."""
        ...

    def restart(self) -> None:
        """Restart after an error. Raise an error if that is not possible."""
        ...


class _Own:
    """The side of a port whose queue pair 1 belongs to this process, as on the software NIC."""

    def __init__(self, ctx: Context, port: int, lock: threading.RLock, told: Callable[[], None], undo: ExitStack):
        self._services = GeneralServices(ctx, port, undo)
        self._arrivals = Arrivals()
        self._ways = Ways(ctx.name, self._services, lock, told, lambda mad: self.machine.refuses(mad), undo)
        device = ctx.query_device()
        gids = [ctx.query_gid(port, index) for index in range(device.gid_table_size)]
        self.machine = Machine(device.node_guid, gids, time.monotonic, self._ways.send, self._ways.reach)
        self.fileno, self.find = self._services.fileno, self._ways.find

    @property
    def changes(self) -> tuple[int, ...]:
        return *self.machine.changes, self._services.reaped

    def listen(self) -> None:
        for path, mad in self._services.take():
            self._arrivals.add(path, mad, self.machine.knows(path, mad))

    def handle(self) -> bool:
        self._ways.sweep()
        for _ in range(min(_AT_ONCE, len(self._arrivals))):
            self.machine.receive(*self._arrivals.take())
        return len(self._arrivals) > 0

    def restart(self) -> None:
        self._services.restart()


class _Kernels:
    """The side of a port whose queue pair 1 belongs to the kernel, which resolves addresses when it connects."""

    def __init__(self, ctx: Context, port: int, undo: ExitStack):
        self.machine = KernelMachine(ctx, port)
        undo.callback(self.machine.close)
        self.fileno = self.machine.fileno
        self._looks = itertools.count()

    @property
    def changes(self) -> tuple[int, ...]:
        return (next(self._looks),)  # the kernel reports no changes, so assume one

    def listen(self) -> None:
        pass

    def handle(self) -> bool:
        self.machine.take()
        return False

    def find(self, path: Path, patience: float, tell: Tell) -> None:
        pass

    def restart(self) -> None:
        pass


def _nothing() -> None: ...


class Agent(Handle):
    """The connection manager of a port: sends, receives and resends messages.

    Closing it closes its users, the listeners and connections. They use `machine` one at a time.
    """

    _rank = -1  # the context closes it before any queue
    _closes_users = True
    port: int

    def __init__(self, ctx: Context, port: int):
        super().__init__(ctx)
        self._use(ctx)
        self.port = port
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._told: set[Callable[[], None]] = set()  # also called after a change
        self._failure: DocaError | None = None
        self._stopping = False
        with ExitStack() as undo:
            self._side = _Own(ctx, port, lock, self._tell, undo) if ctx.provider.software else _Kernels(ctx, port, undo)
            self._machine = self._side.machine
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wake)
            self._thread = ServiceThread(f"gpunetio {ctx.name} CM", self._serve)
            self._thread.start()
            undo.callback(self._stop)
            _agents[ctx, port] = self
            undo.callback(_agents.pop, (ctx, port))
            self._opened(f"connection manager of {ctx.name}", undo)

    @classmethod
    @deferred()
    def of(cls, ctx: Context, port: int = 1) -> Agent:
        """Return the agent of a port. The first call creates it; it closes with the context.

        It lives on after a program has closed its connections, to resend DREQs and to keep connections in TIMEWAIT.

        InUseError if another program or context has the port's queue pair 1.
        """
        port = whole("port_num", port)
        with _opening:
            ctx.check_open()
            return _agents.get((ctx, port)) or cls(ctx, port)

    # --- for the users -----------------------------------------------------------------------------------------------

    def find(self, path: Path, failed: Callable[[DocaError], None], found: Callable[[], None] = _nothing,
             patience: float = PATIENCE) -> None:
        """Find the way to a path's peer without waiting. Call `found` or `failed`, now or in a thread of the agent.

        `failed` gets NotFoundError if nothing answers within `patience` seconds. On a card, neither is called: the
        kernel owns queue pair 1 and resolves addresses itself.
        """

        def tell(what: AddressHandle | DocaError) -> None:
            if isinstance(what, DocaError):
                failed(what)
            else:
                found()

        with self._changed:
            self._check()
            self._side.find(path, patience, tell)

    @contextmanager
    def machine(self) -> Iterator[Machine]:
        """Lend the machine to the caller exclusively. Raise the error of an agent that is closed or has failed."""
        with self._changed:
            self._check()
            yield self._machine
            self._tell()
            os.eventfd_write(self._wake, 1)  # the machine's next deadline may have changed

    def wait(self, ready: Callable[[], T | None], timeout: float, what: str) -> T:
        """Wait until `ready()` returns something other than None, and return that. `ready` is called under the lock.

        TimedOutError after `timeout` seconds; its message says that `what` did not come. Other errors are as in
        `machine`.
        """
        end = deadline(timeout)
        with self._changed:
            while (found := ready()) is None:
                self._check()
                if (left := end - time.monotonic()) <= 0:
                    raise TimedOutError(f"{what} did not come within {timeout:g} s")
                self._changed.wait(min(left, _LONGEST_WAIT))
            return found

    def quiet(self, timeout: float) -> None:
        """Wait until no peer owes an answer. TimedOutError after `timeout` seconds."""
        self.wait(lambda: True if self._machine.quiet else None, timeout, "the answers to disconnecting")

    async def wait_async(self, ready: Callable[[], T | None], timeout: float, what: str) -> T:
        """Wait as `wait` does, without blocking asyncio's event loop."""
        timeout = number("timeout", timeout)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._told.add(tell)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                while True:
                    changed.clear()
                    with self._changed:
                        if (found := ready()) is not None:
                            return found
                        self._check()
                    await changed.wait()
        except TimeoutError:
            raise TimedOutError(f"{what} did not come within {timeout:g} s") from None
        finally:
            with self._changed:
                self._told.discard(tell)

    def _check(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def _tell(self) -> None:
        """Wake everything that waits, because something may have changed."""
        self._changed.notify_all()
        for tell in self._told:
            tell()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._side.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        due: float | None = 0.0
        while due is not None:
            sleep = due - time.monotonic()
            poll.poll(None if sleep == math.inf else max(0, math.ceil(1000 * sleep)))
            try:
                due = self._turn()
            except Exception as error:
                due = self._recover(error)

    def _turn(self) -> float | None:
        """Handle what has arrived and what is due. Return the time of the next deadline, or None once closed.

        The lock is free while datagrams are taken from the queue pair, and after each batch that is handled.
        """
        _drain(self._wake)
        if self._failure is None:
            self._side.listen()
        with self._changed:
            if self._stopping:
                return None
            if self._failure is not None:
                self._side.restart()
                self._failure = None
                logger.warning("%s works again", self)
                self._tell()
            before = self._side.changes
            more = self._side.handle()
            due = self._machine.tick()
            if self._side.changes != before:
                self._tell()
            return 0.0 if more else math.inf if due is None else due

    def _recover(self, error: Exception) -> float | None:
        """Prepare a restart after an error. Return when to try again, or None if the agent is closed.

        Until the queue pair works again, calls raise this error. Messages in flight are lost, as on a bad network.
        """
        with self._changed:
            if self._stopping:
                return None
            first = self._failure is None
            self._failure = error if isinstance(error, DocaError) else DriverError(f"{self} has failed: {error!r}")
            if first:
                defect = not isinstance(error, DocaError)
                logger.error("%s begins anew after an error: %s", self, error, exc_info=defect)
            self._tell()
            return time.monotonic() + (0.0 if first else _RESTART)

    def _stop(self) -> None:
        """End the thread. First wait, for a limited time, until peers have answered that connections end."""
        with suppress(DocaError):
            self.quiet(_LAST_WORDS)
        with self._changed:
            self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._changed:
            self._failure = BadStateError(f"{self} is closed")
            self._tell()


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
