"""The shared part of the connection manager's state machine: communications, their IDs, timers, and sending."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..errors import BadStateError, DocaError, TooBigError
from ..formats.cm import MESSAGES, Answered, Attribute, RejectReason, private_bytes
from .communication import Communication, Notify, State
from .event import Event, EventType
from .messages import Message, pack
from .path import Path
from .timers import Timers
from .times import Times

# Calls the second argument once the neighbour is known, or the third with an error; either at once or later.
Reach: TypeAlias = "Callable[[Path, Callable[[], None], Callable[[DocaError], None]], None]"

ASKING = State.REQ_SENT, State.MRA_REQ_RECEIVED  # the peer's ID is not known yet
_UNDECIDED = State.REQ_RECEIVED, State.MRA_REQ_SENT, State.REP_RECEIVED  # waiting for the program's decision
_ID_MASK = 0xFFFF_FFFF
_TRANSACTION_MASK = (1 << 64) - 1


class Common:
    """The communications of a port.

    `by_remote` maps the peer's ID and GUID to a communication, also in TIMEWAIT; `by_qpn` maps the peer's QPN and GUID
    to a connection.
    """

    guid: int
    gids: Sequence[bytes]
    clock: Callable[[], float]
    send: Callable[[Path, bytes], None]
    reach: Reach
    told: int

    def __init__(
        self, guid: int, gids: Sequence[bytes], clock: Callable[[], float], send: Callable[[Path, bytes], None],
        reach: Reach,
    ):
        self.guid, self.gids, self.clock, self.send, self.reach = guid, gids, clock, send, reach
        self.timers: Timers[Communication] = Timers()
        self.by_id: dict[int, Communication] = {}
        self.by_remote: dict[tuple[int, int], Communication] = {}
        self.by_qpn: dict[tuple[int, int], Communication] = {}
        self.told = 0  # number of events so far
        self._last_id = secrets.randbits(32)  # random, so that an earlier process with this GUID had other IDs
        self._last_transaction = secrets.randbits(64)

    def own_gids(self) -> set[bytes]:
        """Return the GIDs of this port, without empty entries of the table."""
        return {gid for gid in self.gids if any(gid)}

    # --- communications ----------------------------------------------------------------------------------------------

    def new(self, state: State, path: Path, times: Times, notify: Notify) -> Communication:
        """Create a communication. An ID is reused only after all other IDs."""
        while True:
            self._last_id = (self._last_id + 1) & _ID_MASK
            if self._last_id and self._last_id not in self.by_id:
                break
        made = Communication(self._last_id, state, path, times, notify, self.new_transaction())
        self.by_id[made.local_id] = made
        return made

    def new_transaction(self) -> int:
        """Return a transaction ID for a message that is not a reply."""
        self._last_transaction = (self._last_transaction + 1) & _TRANSACTION_MASK
        return self._last_transaction

    def find(self, message: Message, path: Path) -> Communication | None:
        """Return the communication that a peer's message names: by both IDs, or in its first message only by ours.

        Messages from any other address than the peer's are ignored.
        """
        found = self.by_id.get(message.fields["remote_comm_id"])
        if found is None or found.path.gid != path.gid:
            return None
        return found if found.state in ASKING or found.remote_id == message.fields["local_comm_id"] else None

    def know(self, communication: Communication, remote_id: int, guid: int) -> None:
        """Store the peer's ID of a communication, and make the communication known by the peer's ID and QPN."""
        communication.remote_id, communication.remote_guid = remote_id, guid
        self.by_remote[remote_id, guid] = communication
        if communication.peer is not None:
            self.by_qpn[communication.peer.qpn, guid] = communication

    def forget(self, communication: Communication) -> None:
        """Forget the communication: messages no longer find it. The program may still hold it."""
        communication.state = State.IDLE
        self.timers.cancel(communication)
        if communication.listener is not None:
            communication.listener.waiting.discard(communication)
        self.by_id.pop(communication.local_id, None)
        self.free_qpn(communication)
        key = communication.remote_id, communication.remote_guid
        if self.by_remote.get(key) is communication:
            del self.by_remote[key]

    def free_qpn(self, communication: Communication) -> None:
        """Allow the peer's queue pair another connection."""
        if communication.peer is None:
            return
        key = communication.peer.qpn, communication.remote_guid
        if self.by_qpn.get(key) is communication:
            del self.by_qpn[key]

    def tell(self, communication: Communication, kind: EventType, private_data: bytes = b"", reason: int = 0) -> None:
        """Notify the program of an event."""
        self.told += 1
        communication.notify(communication, Event(kind, private_data, reason))

    def tell_when_reached(
        self, communication: Communication, path: Path, kind: EventType, private_data: bytes
    ) -> None:
        """Notify the program once the neighbour of `path` is known, so that connecting the queue pair will not block.

        If the neighbour does not answer, the communication ends: its peer is gone.
        """

        def reached() -> None:
            if communication.state in _UNDECIDED:
                self.tell(communication, kind, private_data)

        def silent(why: DocaError) -> None:
            if communication.state in _UNDECIDED:
                self.forget(communication)
                self.told += 1
                communication.notify(communication, Event(EventType.UNREACHABLE, why=why))

        self.reach(path, reached, silent)

    # --- messages ----------------------------------------------------------------------------------------------------

    def message(self, communication: Communication, attribute: Attribute, private_data: bytes = b"",
                **fields: int | bytes) -> bytes:
        """Return a packed message of a communication."""
        ids = {"local_comm_id": communication.local_id}
        if attribute != Attribute.REQ:
            ids["remote_comm_id"] = communication.remote_id
        return pack(attribute, communication.transaction_id, private_data, **ids, **fields)

    def answer(self, communication: Communication, mad: bytes) -> None:
        """Send a reply, and keep it: if the peer repeats its message, the reply must be sent again."""
        communication.mad = mad
        self.send(communication.path, mad)

    def request(self, communication: Communication, mad: bytes, attempts: int, timeout: float) -> None:
        """Send a message. Without an answer, resend it after each `timeout` seconds, at most `attempts` times."""
        communication.mad, communication.attempts, communication.timeout = mad, attempts, timeout
        self.send(communication.path, mad)
        self.timers.set(communication, self.clock() + timeout)

    def repeat(self, communication: Communication) -> bool:
        """Resend a request. Return False if no attempt was left."""
        if not communication.attempts:
            return False
        communication.attempts -= 1
        self.send(communication.path, communication.mad)
        self.timers.set(communication, self.clock() + communication.timeout)
        return True

    def reject(self, path: Path, message: Message, reason: RejectReason, info: bytes = b"") -> None:
        """Refuse a REQ or REP that has no communication here."""
        answered = Answered.REQ if message.attribute == Attribute.REQ else Answered.REP
        mad = pack(
            Attribute.REJ, message.transaction_id, local_comm_id=message.fields.get("remote_comm_id", 0),
            remote_comm_id=message.fields["local_comm_id"], message_rejected=answered, reason=reason,
            reject_info_length=len(info), additional_reject_info=padded_info(info),
        )
        self.send(path, mad)


def padded_info(info: bytes) -> bytes:
    """Pad the additional information of a REJ to the size of its field."""
    return info.ljust(MESSAGES[Attribute.REJ].fields["additional_reject_info"].width // 8, b"\0")


def check_state(communication: Communication, doing: str, *states: State) -> None:
    """Raise BadStateError unless the communication is in one of the states."""
    if communication.state not in states:
        raise BadStateError(
            f"{communication}: {doing} takes {' or '.join(state.name for state in states)}"
        )


def check_private(attribute: Attribute, private_data: bytes, header: int = 0) -> None:
    """Raise TooBigError if a message has no room for the private data after a `header` of this many bytes."""
    most = private_bytes(MESSAGES[attribute]) - header
    if len(private_data) > most:
        raise TooBigError(f"{len(private_data)} bytes of private data: a {attribute.name} carries at most {most}")
