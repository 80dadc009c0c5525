"""The state machine of the connection manager (IBTA 12.9), without I/O or threads. The caller provides the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import DocaError
from ..formats.cm import Attribute, PortSpace, RejectReason
from .active import Active
from .common import Common, Reach
from .communication import Communication, Listening, Notify, Service, State, Terms
from .datagrams import Datagrams
from .ending import Ending
from .ip_service import service_id
from .listeners import Listeners
from .messages import attribute_of, named_by, own_name_in, parse
from .passive import Passive
from .path import Path
from .times import LINUX, Times

_OF_DATAGRAMS = State.SIDR_REQ_SENT, State.SIDR_REQ_RECEIVED
_REPEATED = frozenset({
    State.REQ_SENT, State.MRA_REQ_RECEIVED, State.REP_SENT, State.MRA_REP_RECEIVED, State.DREQ_SENT,
    State.SIDR_REQ_SENT,
})


class Machine:
    """All communications of one port.

    `guid` identifies the device to peers. `gids` is the port's GID table, which may change; empty entries are zeros.
    `clock` returns seconds. `send(path, mad)` sends one 256-byte MAD to queue pair 1 of the peer; it never raises,
    because a MAD may get lost anyway. `reach` reports when a neighbour is known (`common.Reach`); by default, all are.

    The machine reports events through the `notify` of a communication or listener. Only `receive`, `tick` and
    `peer_gone` call it, never a method that a program calls itself. `notify` may call the machine.

    The machine has no lock. Its owner calls one method at a time. It must call `tick` after each call, which may have
    started a timer, and at the time that the last `tick` returned.
    """

    def __init__(
        self, guid: int, gids: Sequence[bytes], clock: Callable[[], float], send: Callable[[Path, bytes], None],
        reach: Reach = lambda path, reached, silent: reached(),
    ):
        self._common = Common(guid, gids, clock, send, reach)
        self._listeners = Listeners()
        self._ending = Ending(self._common)
        self._active = Active(self._common, self._ending)
        self._passive = Passive(self._common, self._listeners, self._ending)
        self._datagrams = Datagrams(self._common, self._listeners)
        self._handlers = {
            Attribute.REQ: self._passive.on_req,
            Attribute.MRA: self._active.on_mra,
            Attribute.REJ: self._ending.on_rej,
            Attribute.REP: self._active.on_rep,
            Attribute.RTU: self._passive.on_rtu,
            Attribute.DREQ: self._ending.on_dreq,
            Attribute.DREP: self._ending.on_drep,
            Attribute.SIDR_REQ: self._datagrams.on_sidr_req,
            Attribute.SIDR_REP: self._datagrams.on_sidr_rep,
        }

    def __len__(self) -> int:
        """Return the number of communications, including those in TIMEWAIT."""
        return len(self._common.by_id)

    def communications(self) -> list[Communication]:
        """Return all communications, including those in TIMEWAIT."""
        return list(self._common.by_id.values())

    @property
    def quiet(self) -> bool:
        """Return whether no peer owes an answer."""
        return not any(communication.state in _REPEATED for communication in self._common.by_id.values())

    @property
    def changes(self) -> tuple[int, int]:
        """Return a value that differs after any change that a program may be waiting for."""
        return self._common.told, len(self._common.by_id)

    def knows(self, path: Path, mad: bytes) -> bool:
        """Return whether a message is about a communication with its sender. Cheap, and needs no lock."""
        found = self._common.by_id.get(named_by(mad))
        return found is not None and found.path.gid == path.gid

    def refuses(self, mad: bytes) -> bool:
        """Return whether a message of ours is one that strangers can provoke and that no connection needs."""
        attribute = attribute_of(mad)
        if attribute == Attribute.DREP:
            return own_name_in(mad) not in self._common.by_id
        return attribute in (Attribute.REJ, Attribute.MRA)

    # --- the wire and the clock --------------------------------------------------------------------------------------

    def receive(self, path: Path, mad: bytes) -> None:
        """Handle a MAD that arrived on `path`. Its sender is not trusted: malformed MADs are ignored, as in Linux."""
        message = parse(mad)
        if message is not None:
            self._handlers[message.attribute](path, message)

    def tick(self) -> float | None:
        """Resend and expire what is due. Return the clock's time of the next deadline, or None."""
        common = self._common
        for communication in common.timers.expired(common.clock()):
            if communication.state in _REPEATED and common.repeat(communication):
                continue
            self._ender(communication).expire(communication)
        return common.timers.next()

    def _ender(self, communication: Communication) -> Ending | Datagrams:
        return self._datagrams if communication.state in _OF_DATAGRAMS else self._ending

    # --- active side -------------------------------------------------------------------------------------------------

    def connect(
        self, path: Path, port: int, own: Terms, notify: Notify, *, private_data: bytes = b"",
        times: Times = LINUX,
    ) -> Communication:
        """Request a connection to a port of the peer. The event RESPONSE, REJECTED or UNREACHABLE follows."""
        return self._active.connect(path, port, own, private_data, times, notify)

    def confirm(self, communication: Communication, private_data: bytes = b"") -> None:
        """Confirm after RESPONSE, once the queue pair is in RTS."""
        self._active.confirm(communication, private_data)

    def resolve(
        self, path: Path, port: int, notify: Notify, *, private_data: bytes = b"",
        times: Times = LINUX,
    ) -> Communication:
        """Ask for the datagram service at a port of the peer. The event RESPONSE, REJECTED or UNREACHABLE follows."""
        return self._datagrams.resolve(path, port, private_data, times, notify)

    # --- passive side ------------------------------------------------------------------------------------------------

    def listen(
        self, space: PortSpace, port: int, gid: bytes | None, backlog: int, notify: Notify, *,
        times: Times = LINUX, ipv4: bool | None = None,
    ) -> Listening:
        """Listen at a port, at address `gid` or at any address of a kind. InUseError if another listener overlaps."""
        listener = Listening(service_id(space, port), gid, backlog, times, notify, ipv4)
        self._listeners.add(listener)
        return listener

    def stop_listening(self, listener: Listening) -> None:
        """Stop listening, and refuse the waiting requests."""
        self._listeners.remove(listener)
        for communication in list(listener.waiting):
            self.give_up(communication)

    def accept(self, communication: Communication, own: Terms, private_data: bytes = b"") -> None:
        """Accept after REQUEST, once the queue pair is in RTS.

        The event ESTABLISHED, REJECTED, UNREACHABLE or DISCONNECTED follows.
        """
        self._passive.accept(communication, own, private_data)

    def establish(self, communication: Communication) -> None:
        """Establish the connection on the peer's first message: its RTU may be late or lost (IBTA 12.9.6)."""
        self._passive.establish(communication)

    def answer(self, communication: Communication, service: Service, private_data: bytes = b"") -> None:
        """Answer a REQUEST for a datagram service with its queue pair."""
        self._datagrams.answer(communication, service, private_data)

    # --- both --------------------------------------------------------------------------------------------------------

    def reject(
        self, communication: Communication, private_data: bytes = b"", reason: int = RejectReason.CONSUMER
    ) -> None:
        """Refuse after REQUEST or RESPONSE. For datagrams, the reason is a `SidrStatus`."""
        if communication.state in _OF_DATAGRAMS:
            self._datagrams.answer(communication, None, private_data, reason)
        else:
            self._ending.reject(communication, private_data, reason)

    def disconnect(self, communication: Communication, private_data: bytes = b"") -> None:
        """Disconnect. The event DISCONNECTED follows."""
        self._ending.disconnect(communication, private_data)

    def give_up(self, communication: Communication) -> None:
        """End a communication in any state, because the program leaves it. Notify the peer."""
        self._ender(communication).give_up(communication)

    def no_way(self, communication: Communication, why: DocaError) -> None:
        """Record that messages cannot reach the peer. The event UNREACHABLE follows if this end sent a request."""
        self._ending.no_way(communication, why)

    def peer_gone(self, communication: Communication) -> None:
        """Record that the peer has vanished without a message. The event DISCONNECTED follows if it was connected."""
        self._ending.peer_gone(communication)
