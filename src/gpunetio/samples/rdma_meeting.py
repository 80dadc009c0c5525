"""Connect the two ends of a rdma_… sample and exchange descriptions of memory: by files, or by address."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from ..core import RemoteMemory
from ..errors import ConnectionEndedError, DocaError, InvalidValueError, TimedOutError
from ..formats.core_device import MEMORY_EXPORT
from ..rdma import ConnectionState, Rdma, RdmaConnection
from ..rendezvous import PeerError
from .descriptor_files import LOOK_SECONDS, PERSON_SECONDS, Exchange, named

CONNECT_SECONDS = 10.0  # for an end that was asked to answer
_log = logging.getLogger(__name__)


class Meeting(ABC):
    """The connections of one end to the other one, which is the `peer`."""

    peer: str
    connections: list[RdmaConnection]

    @abstractmethod
    def share(self, description: bytes) -> None:
        """Tell the other end about memory, before `connect`."""

    @abstractmethod
    def connect(self, rdma: Rdma) -> None:
        """Make all connections, and wait until both ends are connected."""

    @abstractmethod
    def find(self) -> RemoteMemory:
        """Return what the other end has shared."""

    @abstractmethod
    def gone(self) -> DocaError | None:
        """Return why the other end does nothing more, or None. It may have done its part before."""

    @abstractmethod
    def finish(self, rdma: Rdma) -> None:
        """Tell the other end that this end is done, or wait until the other end is."""


class ByFiles(Meeting):
    """Both ends exchange descriptions through files.

    The end that `acts`, which accesses or sends, is told when it may begin, and reports when it is done.
    """

    def __init__(self, files: Exchange, resource: Path, peer: str, acts: bool):
        self.peer, self.connections = peer, []
        self._files, self._resource, self._acts = files, resource, acts

    def share(self, description: bytes) -> None:
        self._files.publish(self._resource, description)

    def connect(self, rdma: Rdma) -> None:
        files = self._files
        for path in files.mine:
            description, connection = rdma.export()
            self.connections.append(connection)
            files.publish(path, description)
        _log.info("Wrote %s, waiting for the %s's %s", files.mine[0], self.peer, files.theirs[0])
        for path, connection in zip(files.theirs, self.connections, strict=True):
            description = files.read(path)
            with named(path):
                connection.connect(description)
            if not self._acts:
                files.take(path)  # the other end may begin
        if self._acts:
            self._wait_until_taken()

    def find(self) -> RemoteMemory:
        description = self._files.read(self._resource)
        with named(self._resource):
            return RemoteMemory.from_export(description)

    def gone(self) -> DocaError | None:
        return self._files.gone()

    def finish(self, rdma: Rdma) -> None:
        if not self._acts:
            self._wait_until_taken()
            return
        for path in self._files.theirs:
            self._files.take(path)

    def _wait_until_taken(self) -> None:
        for path in self._files.mine:
            self._files.wait_until_taken(path)


class ByAddress(Meeting):
    """The connection manager connects both ends: the end with a `server` connects to it, the other end listens.

    What an end shares is part of its request or its answer.
    """

    def __init__(self, server: str | None, port: int, count: int, peer: str, acts: bool):
        self.peer, self.connections = peer, []
        self._server, self._port, self._count, self._acts = server, port, count, acts
        self._shared = b""

    def share(self, description: bytes) -> None:
        self._shared = description

    def connect(self, rdma: Rdma) -> None:
        if self._server is None:
            rdma.listen(self._port)
            _log.info("Waiting for the %s at port %d", self.peer, self._port)
        else:
            _log.info("Connecting to the %s at %s port %d", self.peer, self._server, self._port)
        for _ in range(self._count):
            if self._server is None:
                connection = self._next_request(rdma)
                connection.accept(self._shared)
            else:
                connection = rdma.connect_to(self._server, self._port, self._shared)
            connection.established(CONNECT_SECONDS)
            self.connections.append(connection)

    def _next_request(self, rdma: Rdma) -> RdmaConnection:
        end = time.monotonic() + PERSON_SECONDS
        while time.monotonic() < end:
            with suppress(TimedOutError):
                return rdma.next_request(LOOK_SECONDS)
            if (gone := self.gone()) is not None:
                raise gone
        raise TimedOutError(
            f"after {PERSON_SECONDS:g} s the {self.peer} has not connected to port {self._port}: start it"
        )

    def find(self) -> RemoteMemory:
        connection = self.connections[0]
        try:
            return RemoteMemory.from_export(connection.private_data[: MEMORY_EXPORT.size])
        except InvalidValueError as error:
            raise PeerError(f"the other end at {connection.peer} is not a {self.peer}: {error}") from error

    def gone(self) -> DocaError | None:
        for connection in self.connections:
            if connection.state is not ConnectionState.CONNECTED:
                return ConnectionEndedError(f"the {self.peer} has disconnected")
        return None

    def finish(self, rdma: Rdma) -> None:
        for connection in () if self._acts else self.connections:
            connection.disconnected(PERSON_SECONDS)  # until the other end closes it
