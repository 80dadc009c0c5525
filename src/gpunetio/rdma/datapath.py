"""Who drives the connections of an `Rdma`: tasks of the CPU, or kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..gpu import QpError
from ..verbs import QP


@dataclass(frozen=True)
class Sizes:
    """What the queues of an `Rdma` hold."""

    sends: int
    receives: int
    connections: int


class Channel(ABC):
    """The queue pair of a connection, and what the data path has for it."""

    qp: QP

    @abstractmethod
    def open(self) -> None:
        """Let it be used: the queue pair is connected."""

    @abstractmethod
    def last_error(self) -> QpError | None:
        """Return why the queue pair has failed, or None."""

    @abstractmethod
    def end_tasks(self) -> None:
        """End the tasks in flight with an error: the connection is about to be closed. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the queue pair."""


class DataPath(ABC):
    """Makes queue pairs for connections."""

    @abstractmethod
    def channel(self, number: int) -> Channel:
        """Return a new queue pair for connection `number`, which has none."""

    @abstractmethod
    def poll(self) -> None:
        """Report tasks that have ended."""

    @abstractmethod
    def flush(self) -> None:
        """Let all tasks end with an error."""
