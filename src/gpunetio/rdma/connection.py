"""A connection to a peer (`doca_rdma_connection`)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import IntEnum
from typing import Protocol

from .. import cm
from ..core.task import TaskOwner
from ..enums import AddrType, LinkLayer
from ..errors import BadStateError, DocaError
from ..formats.cqe import Syndrome
from ..gpu import QpError
from ..interrupts import deferred
from ..memory import BytesLike
from ..verbs import QP, Context
from .datapath import Channel, DataPath
from .description import describe, endpoint_of

_DEADLINE = 30.0  # seconds, the default timeout of a wait


class ConnectionState(IntEnum):
    """The state of a connection. The numbers are gpunetio's."""

    NEW          = 0  # exported, but not connected
    REQUESTED    = 1  # a peer has requested it, and waits for `accept` or `reject`
    CONNECTING   = 2  # by address: waiting for the peer
    CONNECTED    = 3
    FAILED       = 4  # connecting failed
    DISCONNECTED = 5  # one end has disconnected: requests in flight end with an error
    CLOSED       = 6


class Owner(TaskOwner, Protocol):
    """The interface of an `Rdma` that a connection and its tasks use."""

    ctx: Context
    port: int
    gid_index: int
    grh: bool

    @property
    def datapath(self) -> DataPath:
        """Return the data path, which creates queue pairs. BadStateError unless the `Rdma` is running."""
        ...

    def forget(self, connection: RdmaConnection) -> None:
        """Forget a connection that is closed."""
        ...

    def check_no_kernel(self, what: str) -> None:
        """Raise BadStateError while a kernel uses the connections."""
        ...


class RdmaConnection:
    """A connection to a peer. `Rdma.export` creates it, and `connect` connects it.

    Alternatively, `Rdma.connect_to` or a peer's request creates it, and the engine's progress connects it.

    `id`           its number, which device functions take (`doca_rdma_connection_get_id`)
    `user_data`    an arbitrary object (`doca_rdma_connection_set_user_data`)
    """

    rdma: Owner
    id: int
    user_data: object

    def __init__(self, rdma: Owner, number: int, channel: Channel):
        self.rdma, self.id, self.user_data = rdma, number, None
        self._channel = channel
        self._state = ConnectionState.NEW
        self._request: cm.Request | None = None
        self._manager: cm.Connection | None = None
        self._left = False  # whether this end has disconnected

    @property
    def qp(self) -> QP:
        """Return the queue pair."""
        return self._channel.qp

    @property
    def state(self) -> ConnectionState:
        """Return the state of the connection."""
        return self._state

    def describe(self) -> bytes:
        """Return the bytes that the peer's `connect` needs, as `Rdma.export` does. Send them by any means."""
        self._check(ConnectionState.NEW, "described")
        return describe(self.qp.endpoint(port=self.rdma.port, sgid_index=self.rdma.gid_index))

    @deferred()
    def connect(self, description: BytesLike) -> None:
        """Connect to the peer whose `export` returned `description` (`doca_rdma_connect`). The peer must do the same.

        InvalidValueError if the bytes are damaged or are not such a description; the connection is then still NEW. If
        the device refuses, the connection is FAILED and its description is invalid: export another one.
        """
        self._check(ConnectionState.NEW, "connected")
        remote = endpoint_of(description)
        rdma = self.rdma
        infiniband = rdma.ctx.query_device().link_layer == LinkLayer.INFINIBAND
        try:
            self.qp.connect(
                remote, sgid_index=rdma.gid_index, addr_type=AddrType.IB_GRH if infiniband and rdma.grh else None
            )
        except BaseException:
            self._state = ConnectionState.FAILED
            raise
        self._channel.open()
        self._state = ConnectionState.CONNECTED

    # --- by address --------------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str | None:
        """Return the address of the peer, or None unless connected by address."""
        known = self._manager or self._request
        return known.peer if known else None

    @property
    def port(self) -> int | None:
        """Return the port that this end or the peer requested, or None unless connected by address."""
        known = self._manager or self._request
        return known.port if known else None

    @property
    def private_data(self) -> bytes:
        """Return what the peer sent with its request or reply, padded with zeros."""
        known = self._manager or self._request
        return known.private_data if known else b""

    def asked(self, request: cm.Request) -> None:
        """Take a peer's request for this connection."""
        self._request, self._state = request, ConnectionState.REQUESTED

    @property
    def abandoned(self) -> bool:
        """Return whether the peer no longer waits for `accept` or `reject`."""
        return self._state is ConnectionState.REQUESTED and self._request is not None and not self._request.waits

    def follow(self, manager: cm.Connection) -> None:
        """Follow a connection of the connection manager that is waiting for the peer."""
        self._manager, self._state = manager, ConnectionState.CONNECTING

    @deferred()
    def accept(self, private_data: bytes = b"") -> None:
        """Accept the request (`doca_rdma_connection_accept`). `private_data` is at most 196 bytes.

        Afterwards the callback `established` or `failure` is called; or wait with `established`. BadStateError if the
        peer has given up.
        """
        self._check(ConnectionState.REQUESTED, "accepted")
        assert self._request is not None
        try:
            self.follow(self._request.accept(self.qp, private_data))
        except BaseException:
            self._state = ConnectionState.FAILED
            raise

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse the request (`doca_rdma_connection_reject`), and close. `private_data` is at most 148 bytes."""
        self._check(ConnectionState.REQUESTED, "rejected")
        assert self._request is not None
        with suppress(BadStateError):  # the peer has already given up
            self._request.reject(private_data)
        self.close_with_owner()

    def look(self) -> ConnectionState | None:
        """Update the state from the connection manager. Return the state if it changed, else None."""
        before, manager = self._state, self._manager
        if manager is None:
            return None
        if before is ConnectionState.CONNECTING:
            if manager.state is cm.ConnectionState.FAILED:
                self._state = ConnectionState.FAILED
            elif manager.state in (cm.ConnectionState.ESTABLISHED, cm.ConnectionState.DISCONNECTED):
                self._channel.open()
                self._state = ConnectionState.CONNECTED
        elif before is ConnectionState.CONNECTED and manager.state is cm.ConnectionState.DISCONNECTED:
            self._state = ConnectionState.DISCONNECTED
        return self._state if self._state is not before else None

    @property
    def why_failed(self) -> DocaError | None:
        """Return why connecting by address failed: the peer refused or did not answer."""
        if self._manager is None or self._state is not ConnectionState.FAILED:
            return None
        try:
            self._manager.established(timeout=0)
        except DocaError as error:
            return error
        return None

    def established(self, timeout: float = _DEADLINE) -> None:
        """Make progress until connected.

        ConnectionRejectedError if the peer refuses, TimedOutError if it does not answer.
        """
        self.rdma.engine.progress_until(self._is_established, timeout, self._what_establishes)

    async def established_async(self) -> None:
        """Wait as `established` does, in asyncio's event loop. Set a deadline with `asyncio.timeout`."""
        await self.rdma.engine.progress_until_async(self._is_established)

    @property
    def _what_establishes(self) -> str:
        """Return what `established` waits for, as text for a message."""
        if self._request is not None:
            return f"the confirmation of {self.peer}, which has asked for port {self.port},"
        if self._manager is not None:
            return f"an answer of {self.peer} port {self.port}"
        return f"connect() of {self}"

    def _is_established(self) -> bool:
        if self._state in (ConnectionState.NEW, ConnectionState.CONNECTING):
            return False
        if error := self.why_failed:
            raise error
        self._check(ConnectionState.CONNECTED, "waited for")
        return True

    def disconnect(self, private_data: bytes = b"") -> None:
        """Disconnect, without waiting for the peer (`doca_rdma_connection_disconnect`).

        Requests in flight end with an error. If connected by address, the peer is notified, and the callback
        `disconnect` is called at both ends.
        """
        self._check(ConnectionState.CONNECTED, "disconnected")
        if self._manager is not None:
            self._manager.start_disconnecting(private_data)
        else:
            self.qp.to_error()
            self._state = ConnectionState.DISCONNECTED
        self._left = True

    def disconnected(self, timeout: float = _DEADLINE) -> None:
        """Make progress until either end has disconnected."""
        peer = f" with {self.peer} port {self.port}" if self.peer else ""
        self.rdma.engine.progress_until(self._is_disconnected, timeout, f"the end of {self}{peer}")

    async def disconnected_async(self) -> None:
        """Wait as `disconnected` does, in asyncio's event loop."""
        await self.rdma.engine.progress_until_async(self._is_disconnected)

    def _is_disconnected(self) -> bool:
        return self._state in (ConnectionState.DISCONNECTED, ConnectionState.FAILED, ConnectionState.CLOSED)

    @property
    def who_left(self) -> str | None:
        """Return which end has disconnected, as text, or None. Known even before progress updates the state."""
        if self._left:
            return "this end has disconnected"
        if self._manager is not None and self._manager.state is cm.ConnectionState.DISCONNECTED:
            return "the peer has disconnected"
        return None

    # --- the end -----------------------------------------------------------------------------------------------------

    def _check(self, state: ConnectionState, what: str) -> None:
        if self._state is not state:
            raise BadStateError(f"{self} is {self._state.name}: only a {state.name} one can be {what}")

    def last_error(self) -> QpError | None:
        """Return why the connection failed or ended, or None while it works.

        The index is that of the last request of a batch. Requests after a failed one are flushed; for those, the result
        gives the cause of the failure if the device knows it, or else which end has disconnected.
        """
        if self._state is ConnectionState.CLOSED:
            raise BadStateError(f"{self} is closed")
        error, qp = self._channel.last_error(), self.qp
        if error is None or (error.index is not None and error.syndrome != Syndrome.WR_FLUSH):
            return error
        return replace(error, cause=qp.ctx.provider.explain(qp.qpn, None) or self.who_left or error.cause)

    def close(self) -> None:
        """Close the connection and its queue pair. Idempotent. BadStateError while a kernel uses the `Rdma`."""
        if self._state is not ConnectionState.CLOSED:
            self.rdma.check_no_kernel(f"{self} cannot be closed")
            self.close_with_owner()

    @deferred()
    def close_with_owner(self) -> None:
        """Close the connection without checks. No kernel uses it."""
        if self._state is ConnectionState.CLOSED:
            return
        self._state = ConnectionState.CLOSED
        with ExitStack() as steps:
            steps.callback(self.rdma.forget, self)
            steps.callback(self._channel.close)
            if self._manager is not None:
                steps.callback(self._manager.close)
            elif self._request is not None and self._request.waits:
                steps.callback(self._request.reject)
            steps.callback(self._channel.end_tasks)

    def __str__(self) -> str:
        return f"connection {self.id} of {self.rdma}"

    def __repr__(self) -> str:
        return f"<{self}, {self._state.name}>"
