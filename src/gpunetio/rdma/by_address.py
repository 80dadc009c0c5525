"""RDMA CM for an `Rdma`: listening, incoming requests, and connections to an address and port."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .. import cm
from ..arguments import whole
from ..errors import ConnectionEndedError, DocaError, FullError, InvalidValueError, NotFoundError
from ..formats.cm import RejectReason
from ..verbs import PD
from .connection import ConnectionState, Owner, RdmaConnection


class Callbacks(NamedTuple):
    """The program's callbacks for connections."""

    request: Callable[[RdmaConnection], object] | None = None
    established: Callable[[RdmaConnection], object] | None = None
    failure: Callable[[RdmaConnection, DocaError], object] | None = None
    disconnect: Callable[[RdmaConnection], object] | None = None


class Home(Owner, Protocol):
    """The interface of an `Rdma` that this module uses."""

    pd: PD

    @property
    def connections(self) -> tuple[RdmaConnection, ...]:
        """Return the connections that are not closed."""
        ...

    def new_connection(self) -> RdmaConnection:
        """Create a connection that is not connected yet."""
        ...


class ByAddress:
    """The listeners of a running `Rdma`, its incoming requests, and the progress of its connections.

    `call` schedules a callback of the program for the next `progress`.
    """

    def __init__(self, rdma: Home, callbacks: Callbacks, call: Callable[..., None]):
        self._rdma, self._callbacks, self._call = rdma, callbacks, call
        self._listeners: dict[int, cm.Listener] = {}
        self._requests: deque[RdmaConnection] = deque()

    def listen(self, port: int) -> None:
        """Accept connection requests for a port."""
        port = whole("port", port)
        if port in self._listeners:
            raise InvalidValueError(f"{self._rdma} listens at port {port} already")
        self._listeners[port] = cm.listen(
            self._rdma.pd, port, gid_index=self._rdma.gid_index, port_num=self._rdma.port
        )

    def stop_listening(self, port: int) -> None:
        """Refuse the waiting requests, and accept no more."""
        port = whole("port", port)
        if port not in self._listeners:
            raise NotFoundError(f"{self._rdma} does not listen at port {port}")
        self._drop_requests()
        self._listeners.pop(port).close()
        self._drop_requests()

    @property
    def where(self) -> str:
        """Return the addresses and ports of the listeners, as text for a message."""
        places = [f"{listener.address} port {port}" for port, listener in self._listeners.items()]
        return f"at {' or '.join(places)}" if places else f"({self._rdma} listens at no port)"

    def connect(self, address: str, port: int, private_data: bytes) -> RdmaConnection:
        """Start connecting to a peer, and return the connection."""
        rdma = self._rdma
        connection = rdma.new_connection()
        try:
            connection.follow(
                cm.start_connecting(
                    connection.qp, address, port, private_data, gid_index=rdma.gid_index, port_num=rdma.port
                )
            )
        except BaseException:
            connection.close_with_owner()
            raise
        return connection

    def take_request(self) -> RdmaConnection | None:
        """Return the oldest request that is still waiting and was passed to no callback, or None."""
        self._drop_requests()
        while self._requests:
            connection = self._requests.popleft()
            if connection.state is ConnectionState.REQUESTED:
                return connection
        return None

    def poll(self) -> None:
        """Take new requests, and update the states of connections."""
        self._drop_requests()
        for listener in list(self._listeners.values()):
            while (request := listener.take()) is not None:
                self._take_in(request)
        for connection in self._rdma.connections:
            self._follow(connection)

    def _drop_requests(self) -> None:
        """Close connections whose requests are no longer waiting, to make room for others.

        The program's failure callback is called, unless the program never saw the request.
        """
        for connection in self._rdma.connections:
            if not connection.abandoned:
                continue
            error = ConnectionEndedError(f"{connection}: {self._why_abandoned(connection)}")
            connection.close_with_owner()
            if connection in self._requests:
                self._requests.remove(connection)
            elif self._callbacks.failure:
                self._call(self._callbacks.failure, connection, error)

    def _why_abandoned(self, connection: RdmaConnection) -> str:
        if connection.port in self._listeners:
            return f"{connection.peer} has given up its request for port {connection.port}"
        return f"the request of {connection.peer} was refused, as nobody listens at port {connection.port} any more"

    def _take_in(self, request: cm.Request) -> None:
        try:
            connection = self._rdma.new_connection()
        except FullError:
            request.reject(reason=RejectReason.NO_RESOURCES)
            return
        connection.asked(request)
        if self._callbacks.request is None:
            self._requests.append(connection)
        else:
            self._call(self._callbacks.request, connection)

    def _follow(self, connection: RdmaConnection) -> None:
        state = connection.look()
        if state is ConnectionState.CONNECTED and self._callbacks.established:
            self._call(self._callbacks.established, connection)
        elif state is ConnectionState.FAILED and self._callbacks.failure:
            self._call(self._callbacks.failure, connection, connection.why_failed)
        elif state is ConnectionState.DISCONNECTED and self._callbacks.disconnect:
            self._call(self._callbacks.disconnect, connection)

    def close(self) -> None:
        """Stop listening."""
        while self._listeners:
            self._listeners.popitem()[1].close()
