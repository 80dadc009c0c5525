"""A connection, as programs see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from enum import Enum, auto

from ..errors import BadStateError, ConnectionRejectedError, DocaError, TimedOutError, again
from ..formats.cm import RejectReason
from ..verbs.handle import Handle
from ..verbs.qp import QP
from .agent import Agent
from .communication import Communication, Notify, State
from .event import Event, EventType
from .parameters import Parameters
from .queue_pair import to_rts

DEADLINE = 30.0  # seconds, the default timeout of every wait


class ConnectionState(Enum):
    """The state of a `Connection`."""

    CONNECTING   = auto()  # the request was sent
    ACCEPTED     = auto()  # the reply was sent, but the peer has not confirmed; the queue pair can be used
    ESTABLISHED  = auto()
    DISCONNECTED = auto()  # one end has disconnected: the queue pair is in ERR
    FAILED       = auto()  # the peer has refused or not answered


class Connection(Handle):
    """A connection of a queue pair to a peer (`rdma_cm_id`), created by `connect` or `Request.accept`.

    `qp`            the queue pair, which cannot be closed before the connection
    `peer`, `port`  the peer's address, and the port of the service
    `private_data`  what the peer sent with its REQ or REP, padded with zeros; b"" before that

    When the peer disconnects, the queue pair moves to ERR. `close` disconnects without waiting for an answer. It leaves
    the queue pair in ERR if it was connected, otherwise in RST.
    """

    _rank = -2
    qp: QP
    peer: str
    port: int
    private_data: bytes
    state: ConnectionState

    def __init__(
        self, agent: Agent, qp: QP, parameters: Parameters, peer: str, port: int, state: ConnectionState,
        begin: Callable[[Notify], Communication], private_data: bytes = b"",
    ):
        super().__init__(qp.ctx)
        self._use(agent, qp)
        self.qp, self.peer, self.port, self.state, self.private_data = qp, peer, port, state, private_data
        self._agent, self._parameters = agent, parameters
        self._events: deque[Event] = deque()
        self._error: DocaError | None = None
        self._came_about = False  # whether it is or was established
        self._communication: Communication | None = None
        with ExitStack() as undo:
            undo.callback(self._end)
            self._communication = begin(self._notify)
            self._opened(f"connection of QP {qp.qpn:#x} with {peer} port {port}", undo)

    def _details(self) -> Iterable[str]:
        yield self.state.name

    # --- waiting -----------------------------------------------------------------------------------------------------

    def established(self, timeout: float = DEADLINE) -> None:
        """Wait until both ends have connected their queue pairs.

        ConnectionRejectedError if the peer refuses, TimedOutError if it does not answer, BadStateError if the
        connection ended before it was established. If it was established and has ended, return normally.
        """
        self._agent.wait(self._is_established, timeout, f"an answer of {self.peer} port {self.port}")

    async def established_async(self, timeout: float = DEADLINE) -> None:
        """Wait as `established` does, in asyncio's event loop."""
        await self._agent.wait_async(self._is_established, timeout, f"an answer of {self.peer} port {self.port}")

    def _is_established(self) -> bool | None:
        if self._came_about:  # even if it has ended since
            return True
        if self._error is not None:
            raise again(self._error)
        if self.state is ConnectionState.DISCONNECTED or self.closed:
            raise BadStateError(f"{self} has ended before the peer has confirmed")
        return None

    def disconnected(self, timeout: float = DEADLINE) -> None:
        """Wait until the connection has ended."""
        self._agent.wait(self._has_ended, timeout, f"the end of {self}")

    async def disconnected_async(self, timeout: float = DEADLINE) -> None:
        """Wait as `disconnected` does, in asyncio's event loop."""
        await self._agent.wait_async(self._has_ended, timeout, f"the end of {self}")

    def _has_ended(self) -> bool | None:
        """Return True if the connection has ended, and the peer knows or will never know; otherwise None."""
        ended = self.state in (ConnectionState.DISCONNECTED, ConnectionState.FAILED) or self.closed
        return True if ended and (self._at in (State.TIMEWAIT, State.IDLE)) else None

    @property
    def _at(self) -> State:
        return self._communication.state if self._communication is not None else State.IDLE

    def take_event(self) -> Event | None:
        """Return the oldest event that was not taken yet, or None."""
        try:
            return self._events.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def get_event(self, timeout: float = DEADLINE) -> Event:
        """Wait for an event: ESTABLISHED, REJECTED, UNREACHABLE, DISCONNECTED or TIMEWAIT_EXIT. Return it."""
        return self._agent.wait(self.take_event, timeout, f"an event of {self}")

    async def get_event_async(self, timeout: float = DEADLINE) -> Event:
        """Wait as `get_event` does, in asyncio's event loop."""
        return await self._agent.wait_async(self.take_event, timeout, f"an event of {self}")

    # --- called by the program ---------------------------------------------------------------------------------------

    def message_received(self) -> None:
        """Report that a message arrived before the peer's confirmation, which may be lost (`rdma_notify`)."""
        self.check_open()
        with self._agent.machine() as machine:
            if self._communication is not None and self.state is ConnectionState.ACCEPTED:
                machine.establish(self._communication)
                self._establish()

    def start_disconnecting(self, private_data: bytes = b"") -> None:
        """Disconnect as `disconnect` does, without waiting. The event DISCONNECTED follows."""
        self.check_open()
        with self._agent.machine() as machine:
            if self._communication is None or self.state in (ConnectionState.DISCONNECTED, ConnectionState.FAILED):
                return
            if self.state is ConnectionState.CONNECTING:
                machine.give_up(self._communication)
                self.state, self._error = ConnectionState.FAILED, BadStateError(f"{self} was given up")
                return
            machine.disconnect(self._communication, bytes(private_data))
            self._leave_rts()

    def disconnect(self, private_data: bytes = b"", timeout: float = DEADLINE) -> None:
        """Disconnect (`rdma_disconnect`): requests in flight fail, and the peer is notified.

        Wait for the peer's answer: TimedOutError if there is none. The queue pair is in ERR in any case. Do nothing if
        the connection has already ended. `private_data` is at most 220 bytes.
        """
        self.start_disconnecting(private_data)
        self.disconnected(timeout)

    async def disconnect_async(self, private_data: bytes = b"", timeout: float = DEADLINE) -> None:
        """Disconnect as `disconnect` does, in asyncio's event loop."""
        self.start_disconnecting(private_data)
        await self.disconnected_async(timeout)

    def _end(self) -> None:
        """Leave the communication, and notify the peer. A queue pair that was never connected goes back to RST."""
        communication, self._communication = self._communication, None
        with suppress(DocaError), self._agent.machine() as machine:
            if communication is not None:
                communication.notify = _ignore
                machine.give_up(communication)
        with suppress(DocaError):
            if self.state in (ConnectionState.ACCEPTED, ConnectionState.ESTABLISHED) and communication is not None:
                self._leave_rts()
            elif self.state is not ConnectionState.DISCONNECTED:
                self.qp.reset()

    # --- called in the agent's thread --------------------------------------------------------------------------------

    def _notify(self, communication: Communication, event: Event) -> None:
        if event.type is EventType.RESPONSE:
            self._respond(communication, event)
            return
        if event.type is EventType.ESTABLISHED:
            self._establish()
        elif event.type is EventType.DISCONNECTED or self.state is ConnectionState.ESTABLISHED:
            self._leave_rts()
        elif event.type is EventType.REJECTED:
            why = f"{self.peer} refuses a connection to port {self.port}: {reason_text(event.reason)}"
            self._fail(ConnectionRejectedError(why, event.reason, event.private_data))
        elif event.type is EventType.UNREACHABLE:
            self._fail(event.why or TimedOutError(f"{self.peer} does not answer at port {self.port}"))
        self._events.append(event)

    def _respond(self, communication: Communication, event: Event) -> None:
        """Connect the queue pair, now that the peer has connected its own, and confirm."""
        self.private_data = event.private_data
        with self._agent.machine() as machine:
            try:
                to_rts(self.qp, communication, self._parameters)
            except DocaError as error:
                machine.reject(communication)
                self._fail(error)
                return
            machine.confirm(communication)
        self._establish()
        self._events.append(Event(EventType.ESTABLISHED, event.private_data))

    def _establish(self) -> None:
        self.state, self._came_about = ConnectionState.ESTABLISHED, True

    def _fail(self, error: DocaError) -> None:
        if self.state is ConnectionState.ACCEPTED:
            self._to_error()
        self.state, self._error = ConnectionState.FAILED, error

    def _leave_rts(self) -> None:
        if self.state is not ConnectionState.DISCONNECTED:  # else the program may be using the queue pair again
            self.state = ConnectionState.DISCONNECTED
            self._to_error()

    def _to_error(self) -> None:
        with suppress(DocaError):  # the queue pair may be closing at this moment
            self.qp.to_error()


def _ignore(communication: Communication, event: Event) -> None:
    """Ignore events of a communication that the program has left."""


def reason_text(reason: int) -> str:
    """Return the name and number of a REJ's reason."""
    name = RejectReason(reason).name if reason in list(RejectReason) else "unknown"
    return f"{name} ({reason})"
