"""The interface of a data path, through which CPU tasks or kernels drive the connections of an `Rdma`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..gpu import QpError
from ..verbs import QP


@dataclass(frozen=True)
class Sizes:
    """Capacities of an `Rdma`: sends per connection, receives, and connections."""

    sends: int
    receives: int
    connections: int


class Channel(ABC):
    """The queue pair of a connection, as its data path uses it."""

    qp: QP

    @abstractmethod
    def open(self) -> None:
        """Start using the queue pair, which is now connected."""

    @abstractmethod
    def last_error(self) -> QpError | None:
        """Return why the queue pair has failed, or None."""

    @abstractmethod
    def end_tasks(self) -> None:
        """End the tasks in flight with an error, before the connection closes. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the queue pair."""


class DataPath(ABC):
    """Creates queue pairs for connections."""

    @abstractmethod
    def channel(self, number: int) -> Channel:
        """Create a queue pair for connection `number`, which has none."""

    @abstractmethod
    def poll(self) -> None:
        """Report the tasks that have ended."""

    @abstractmethod
    def flush(self) -> None:
        """Make all tasks end with an error."""
