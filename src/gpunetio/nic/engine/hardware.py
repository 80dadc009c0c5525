"""What the control path of a NIC acts on."""

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


CUDA = "cuda"  # of `Engine.sharing`


class Opened(Protocol):
    """Memory of another process that is mapped here until `close`."""

    address: int
    nbytes: int

    def close(self) -> None: ...


class Engine(ABC):
    """What executes WQEs and moves packets, from `start` to `stop`: threads of the host (host/engine.py).

    It works on the NIC's record and tables, which only it writes while it runs.
    """

    @abstractmethod
    def start(self) -> None:
        """Serve the NIC until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """Stop. Afterwards the engine touches no memory.

        TimedOutError if it does not stop. Then nothing may be freed, and `stop` can be called again.
        """

    @property
    @abstractmethod
    def running(self) -> bool:
        """Return whether the engine serves the NIC, and may touch any memory that its tables name."""

    @abstractmethod
    def post(
        self, op: int, row: int, prepared: Row | None = None, state: int = 0, timeout: float = 10.0,
        worker: int = 0,
    ) -> None:
        """Have the worker that serves a row execute `op` (turn/commands.py) on `row` between two WQEs.

        `prepared` is the row's new content. This returns once the command is done. From then on, the engine touches
        nothing that the old row named. BadStateError if the row has left `state` meanwhile; FullError if a ring is too
        small; TimedOutError if the engine does not answer within `timeout` seconds.
        """

    @abstractmethod
    def post_alone(self, *commands: tuple[int, int, Row], timeout: float = 10.0) -> None:
        """Have the first worker execute commands (op, row, prepared) while no other worker looks at any table.

        For what several workers read, and for what goes from one worker to another. Errors as for `post`.
        """

    def reaches(self, address: int, nbytes: int) -> bool:
        """Return whether queues and payload may lie in a range that the CPU does not reach."""
        return False

    @property
    def sharing(self) -> str:
        """Return how engines of two processes share memory that `reaches` names; "" if they do not."""
        return ""

    def share(self, address: int, nbytes: int) -> tuple[int, int, str, int | None] | None:
        """Return address and size of the allocation that contains a range, its handle, and a new descriptor.

        `open_shared` takes both in another process. None if that memory cannot be shared.
        """
        raise NotSupportedError("this engine shares no memory with those of other processes")

    def open_shared(self, nbytes: int, handle: object, fds: list[int]) -> Opened:
        """Map memory that the engine of another process shares in the same way. InvalidValueError if that fails."""
        raise NotSupportedError("this engine shares no memory with those of other processes")

    def is_near(self, address: int, nbytes: int) -> bool:
        """Return whether a range is memory of the GPU that makes the turns: a fence of that GPU orders stores there."""
        return False

    def lines(self, lines: HostMemory) -> int:
        """Return the address of the doorbell lines that the engine looks at, for lines in host memory.

        They are others if kernels ring nearer to the engine than the CPU does.
        """
        return lines.address

    def map(self, address: int, nbytes: int) -> None:
        """Let the engine reach host memory, for a region or a UMEM. `unmap` undoes it."""
        return

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a `map`. The engine touches the memory no more."""
        return

    def recall(self) -> None:
        """Have all rows be as turns have left them. A slice may work on copies (gpu/borrowed.py)."""
        return

    def read(self, address: int, nbytes: int) -> bytes:
        """Return what a queue's memory contains, which may be out of the CPU's reach. At most a line, by `post`."""
        return ctypes.string_at(address, nbytes)

    @property
    @abstractmethod
    def workers(self) -> list[int]:
        """Return the addresses of the workers' records. Each worker serves some of the queues; the first, all wires."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the engine's current turn is over, and until it has sent what it sends after a turn."""

    @property
    @abstractmethod
    def kick_fd(self) -> int:
        """Return the descriptor by which NICs with a wire to this NIC wake the engine."""

    @abstractmethod
    def watch(self, events: Sequence[int], sockets: Sequence[int]) -> None:
        """Let these descriptors wake the engine as well: `events` of notifiers, and sockets when they are readable."""

    @abstractmethod
    def kick(self) -> None:
        """Wake the engine if it sleeps."""

    @abstractmethod
    def doorbell_rung(self) -> None:
        """Wake the engine if it sleeps: a thread of this process has rung a doorbell."""

    @abstractmethod
    def busy(self, change: int) -> None:
        """Count kernels that were launched (+1) or have ended (-1). The engine does not sleep while any runs."""


@dataclass(frozen=True)
class Hardware:
    """The port and the engine of the NIC `name`, and the engine's record, which lies at `address`."""

    name: str
    port: Port
    record: np.void
    address: int
    engine: Engine

    def write(self, address: int, *words: int) -> None:
        """Have the engine write words of 64 bits between two WQEs."""
        self.engine.post(EngineCommand.WRITE_ROW, address, np.array(words, np.int64))
