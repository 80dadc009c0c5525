"""The engine's interface to the control path, and the hardware of a NIC: its port, engine and record."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import NotSupportedError
from ...memory import HostMemory
from ..state.tables import Row
from ..turn.commands import EngineCommand
from .port import Port


CUDA = "cuda"  # a value of `Engine.sharing`


class SharedMapping(Protocol):
    """Memory of another process, mapped into this process until `close`."""

    address: int
    nbytes: int

    def close(self) -> None: ...


class Engine(ABC):
    """Executes WQEs and moves packets from `start` to `stop`, on threads of the host (host/engine.py).

    The engine works on the NIC's record and tables. While the engine runs, nothing else writes them.
    """

    @abstractmethod
    def start(self) -> None:
        """Serve the NIC until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the engine, which then touches no more memory.

        TimedOutError if the engine does not stop. Then free none of its memory; `stop` can be called again.
        """

    @property
    @abstractmethod
    def running(self) -> bool:
        """Return whether the engine runs. While it runs, it may touch any memory that its tables name."""

    @abstractmethod
    def post(
        self, op: int, row: int, prepared: Row | None = None, state: int = 0, timeout: float = 10.0,
        worker: int = 0,
    ) -> None:
        """Execute `op` (turn/commands.py) on `row` between two WQEs, in the worker that serves the row.

        `prepared` is the row's new content. Return once the command has completed; then the engine no longer touches
        memory that the old row named. BadStateError if the row has left `state` meanwhile; FullError if a ring is too
        small; TimedOutError if the engine does not answer within `timeout` seconds.
        """

    @abstractmethod
    def post_alone(self, *commands: tuple[int, int, Row], timeout: float = 10.0) -> None:
        """Execute commands (op, row, prepared) in the first worker while all other workers are held.

        Use this for rows that several workers read, and to move queues between workers. Errors as for `post`.
        """

    def reaches(self, address: int, nbytes: int) -> bool:
        """Return whether the engine can use a range that the CPU cannot access, for queues and payload."""
        return False

    @property
    def sharing(self) -> str:
        """Return how engines of two processes share memory that `reaches` accepts; "" if they cannot share it."""
        return ""

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        """Return the address and size of the allocation that contains a range, its handle, and a new descriptor.

        Another process passes the handle and the descriptor to `open_shared`. None if the memory cannot be shared.
        """
        raise NotSupportedError("this engine shares no memory with those of other processes")

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> SharedMapping:
        """Map memory that the engine of another process shares (`share`). InvalidValueError if that fails."""
        raise NotSupportedError("this engine shares no memory with those of other processes")

    def is_near(self, address: int, nbytes: int) -> bool:
        """Return whether a range is memory of the GPU that makes the turns, where a fence of that GPU orders stores."""
        return False

    def doorbell_lines(self, lines: HostMemory) -> int:
        """Return the address of the doorbell lines that the engine polls, given the lines in host memory.

        The two differ if kernels ring lines in memory nearer to the engine than host memory.
        """
        return lines.address

    def map(self, address: int, nbytes: int) -> None:
        """Make host memory of a region or a UMEM accessible to the engine, until `unmap`."""
        return

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map`. The engine must no longer touch the memory."""
        return

    def write_back(self) -> None:
        """Write the engine's copies of rows back to the tables. A slice may work on copies (gpu/row_cache.py)."""
        return

    def read(self, address: int, nbytes: int) -> bytes:
        """Read memory of a queue, which the CPU may be unable to access. Up to a cache line if read through `post`."""
        return ctypes.string_at(address, nbytes)

    @property
    @abstractmethod
    def workers(self) -> list[int]:
        """Return the addresses of the workers' records. Each worker serves some queues; the first serves all wires."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the engine has ended its current turn and sent the notifications that follow a turn."""

    @property
    @abstractmethod
    def kick_fd(self) -> int:
        """Return the descriptor with which NICs that have a wire to this NIC wake the engine."""

    @abstractmethod
    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        """Set the descriptors that wake the engine when they are readable: `events` of notifiers, and `sockets`."""

    @abstractmethod
    def kick(self) -> None:
        """Wake the engine if it sleeps."""

    @abstractmethod
    def doorbell_rung(self) -> None:
        """Wake the engine if it sleeps, after a thread of this process has rung a doorbell."""

    @abstractmethod
    def count_kernels(self, change: int) -> None:
        """Count kernels that were launched (+1) or have ended (-1). While any runs, the engine does not sleep."""


@dataclass(frozen=True)
class Hardware:
    """The port and the engine of the NIC `name`, and the engine's first WORKER record, which lies at `address`."""

    name: str
    port: Port
    record: np.void
    address: int
    engine: Engine

    def write(self, address: int, *words: int) -> None:
        """Write 64-bit words at an address; the engine does so between two WQEs."""
        self.engine.post(EngineCommand.WRITE_ROW, address, np.array(words, np.int64))
