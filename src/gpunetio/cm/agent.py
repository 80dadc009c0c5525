"""The connection manager of a port at work: its queue pair 1, a thread, and the clock."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import BadStateError, DocaError, DriverError, TimedOutError
from ..interrupts import deferred
from ..service import ServiceThread
from ..verbs.handle import Handle
from .gsi import GeneralServices
from .machine import Machine
from .path import Path
from .rdmacm import KernelMachine

if TYPE_CHECKING:
    from ..verbs.context import Context

logger: logging.Logger = logging.getLogger("gpunetio.cm")

_LONGEST_WAIT = 3600.0  # seconds, of which the lock takes only so many

T = TypeVar("T")

_LAST_WORDS = 1.0  # seconds

_agents: dict[tuple[Context, int], Agent] = {}
_opening = threading.Lock()  # of agents


class _Side(Protocol):
    """Where the messages of a port are: what happens there, and the machine that knows."""

    machine: Machine

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has work."""
        ...

    def take(self) -> None:
        """Let the machine take in what has happened since the last call. An error ends the agent."""
        ...

    def reach(self, path: Path) -> None:
        """Find the address of a path. NotFoundError if it does not answer."""
        ...


class _Own:
    """Queue pair 1 is ours, as on the software NIC."""

    def __init__(self, ctx: Context, port: int, undo: ExitStack):
        self._services = GeneralServices(ctx, port, undo)
        device = ctx.query_device()
        gids = [ctx.query_gid(port, index) for index in range(device.gid_table_size)]
        self.machine = Machine(device.node_guid, gids, time.monotonic, self._services.send)
        self.fileno = self._services.fileno

    def take(self) -> None:
        for path, mad in self._services.take():
            self.machine.receive(path, mad)

    def reach(self, path: Path) -> None:
        self._services.reach(path)


class _Kernels:
    """Queue pair 1 is the kernel's, which looks for addresses when it connects."""

    def __init__(self, ctx: Context, port: int, undo: ExitStack):
        self.machine = KernelMachine(ctx, port)
        undo.callback(self.machine.close)
        self.fileno, self.take = self.machine.fileno, self.machine.take

    def reach(self, path: Path) -> None:
        pass


class Agent(Handle):
    """The connection manager of a port: messages come and go, and are resent in time.

    Its users, listeners and connections, are closed with it. All of them hold `machine` in turn.
    """

    _rank = -1  # the context closes it before any queue
    _closes_users = True
    port: int

    def __init__(self, ctx: Context, port: int):
        super().__init__(ctx)
        self._use(ctx)
        self.port = port
        self._changed = threading.Condition(threading.RLock())
        self._told: set[Callable[[], None]] = set()  # what else is called after a change
        self._failure: DocaError | None = None
        self._stopping = False
        with ExitStack() as undo:
            self._side = _Own(ctx, port, undo) if ctx.provider.software else _Kernels(ctx, port, undo)
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
        """Return the agent of a port, which the first user makes, and which is closed with the context.

        So a DREQ is sent again, and nothing is forgotten too early, when a program has closed its connections.

        InUseError if another program or context has the port's queue pair 1.
        """
        with _opening:
            ctx.check_open()
            return _agents.get((ctx, port)) or cls(ctx, port)

    # --- for the users -----------------------------------------------------------------------------------------------

    def reach(self, path: Path) -> None:
        """Find the address of a path. NotFoundError if it does not answer, which may take a while."""
        with self._changed:
            self._check()
            self._side.reach(path)

    @contextmanager
    def machine(self) -> Iterator[Machine]:
        """Lend the machine to the caller alone. Raise the error by which the agent has ended."""
        with self._changed:
            self._check()
            yield self._machine
            self._tell()
        os.eventfd_write(self._wake, 1)  # its next deadline may be another one

    def wait(self, ready: Callable[[], T | None], timeout: float, what: str) -> T:
        """Return what `ready` returns when that is not None. `ready` is called while nobody has the machine.

        TimedOutError, which says `what` did not come, after `timeout` seconds. The error by which the agent has ended.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while (found := ready()) is None:
                self._check()
                if (left := end - time.monotonic()) <= 0:
                    raise TimedOutError(f"{what} did not come within {timeout:g} s")
                self._changed.wait(min(left, _LONGEST_WAIT))
            return found

    def quiet(self, timeout: float) -> None:
        """Wait until no peer has to answer. TimedOutError after `timeout` seconds."""
        self.wait(lambda: True if self._machine.quiet else None, timeout, "the answers to disconnecting")

    async def wait_async(self, ready: Callable[[], T | None], timeout: float, what: str) -> T:
        """Return what `wait` returns, without blocking asyncio's event loop."""
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
            raise self._failure

    def _tell(self) -> None:
        """Tell those who wait that something may have changed."""
        self._changed.notify_all()
        for tell in self._told:
            tell()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._side.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while (due := self._turn()) is not None:
                sleep = due - time.monotonic()
                poll.poll(None if sleep == math.inf else max(0, math.ceil(1000 * sleep)))
        except Exception as error:
            logger.error("%s ends: %s", self, error)
            self._end(error if isinstance(error, DocaError) else DriverError(f"{self} has failed: {error!r}"))

    def _turn(self) -> float | None:
        """Handle what has arrived and what is due. Return when the next is due; None when the agent is closed."""
        with self._changed:
            if self._stopping:
                return None
            _drain(self._wake)
            self._side.take()
            due = self._machine.tick()
            self._tell()
            return math.inf if due is None else due

    def _stop(self) -> None:
        """End the thread, after peers have heard that connections end, unless they take too long to answer."""
        with suppress(DocaError):
            self.quiet(_LAST_WORDS)
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._end(BadStateError(f"{self} is closed"))

    def _end(self, error: DocaError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._tell()


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
