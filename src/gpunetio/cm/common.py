"""What the parts of the connection manager's state machine share: communications, their names, timers, and the wire."""

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

# Calls the second argument when a neighbour is known, or the third with the reason why not: at once, or later.
Reach: TypeAlias = "Callable[[Path, Callable[[], None], Callable[[DocaError], None]], None]"

ASKING = State.REQ_SENT, State.MRA_REQ_RECEIVED  # the peer's ID is not known yet
_UNDECIDED = State.REQ_RECEIVED, State.MRA_REQ_SENT, State.REP_RECEIVED  # the program has to say something
_ID_MASK = 0xFFFF_FFFF
_TRANSACTION_MASK = (1 << 64) - 1


class Common:
    """The communications of a port.

    `by_remote` finds one by the peer's name of it and the peer's GUID, also in TIMEWAIT; `by_qpn` finds a connection by
    the peer's queue pair and GUID.
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
    ):  # fmt: skip
        self.guid, self.gids, self.clock, self.send, self.reach = guid, gids, clock, send, reach
        self.timers: Timers[Communication] = Timers()
        self.by_id: dict[int, Communication] = {}
        self.by_remote: dict[tuple[int, int], Communication] = {}
        self.by_qpn: dict[tuple[int, int], Communication] = {}
        self.told = 0  # events so far
        self._last_id = secrets.randbits(32)  # another process that had this GUID began elsewhere
        self._last_transaction = secrets.randbits(64)

    def own_gids(self) -> set[bytes]:
        """Return the addresses of this port, without empty entries of the table."""
        return {gid for gid in self.gids if any(gid)}

    # --- communications ----------------------------------------------------------------------------------------------

    def new(self, state: State, path: Path, times: Times, notify: Notify) -> Communication:
        """Return a new communication. Its ID is used again after all others were."""
        while True:
            self._last_id = (self._last_id + 1) & _ID_MASK
            if self._last_id and self._last_id not in self.by_id:
                break
        made = Communication(self._last_id, state, path, times, notify, self.new_transaction())
        self.by_id[made.local_id] = made
        return made

    def new_transaction(self) -> int:
        """Return a transaction ID for a message that answers none."""
        self._last_transaction = (self._last_transaction + 1) & _TRANSACTION_MASK
        return self._last_transaction

    def find(self, message: Message, path: Path) -> Communication | None:
        """Return the communication that a message from the peer names: by both IDs, or by ours if it is the first.

        Messages from elsewhere than the peer are not heard.
        """
        found = self.by_id.get(message.fields["remote_comm_id"])
        if found is None or found.path.gid != path.gid:
            return None
        return found if found.state in ASKING or found.remote_id == message.fields["local_comm_id"] else None

    def know(self, communication: Communication, remote_id: int, guid: int) -> None:
        """Note the peer's ID of a communication, and what is found by the peer's names from now on."""
        communication.remote_id, communication.remote_guid = remote_id, guid
        self.by_remote[remote_id, guid] = communication
        if communication.peer is not None:
            self.by_qpn[communication.peer.qpn, guid] = communication

    def forget(self, communication: Communication) -> None:
        """Leave the communication to the program: no message finds it any more."""
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
        """Let the peer's queue pair have another connection."""
        if communication.peer is None:
            return
        key = communication.peer.qpn, communication.remote_guid
        if self.by_qpn.get(key) is communication:
            del self.by_qpn[key]

    def tell(self, communication: Communication, kind: EventType, private_data: bytes = b"", reason: int = 0) -> None:
        """Tell the program."""
        self.told += 1
        communication.notify(communication, Event(kind, private_data, reason))

    def tell_when_reached(
        self, communication: Communication, path: Path, kind: EventType, private_data: bytes
    ) -> None:
        """Tell the program when there is a way for its queue pair: connecting that does not wait for a neighbour then.

        A communication whose neighbour does not answer is over: its peer is not there.
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
                **fields: int | bytes) -> bytes:  # fmt: skip
        """Return a message of a communication."""
        ids = {"local_comm_id": communication.local_id}
        if attribute != Attribute.REQ:
            ids["remote_comm_id"] = communication.remote_id
        return pack(attribute, communication.transaction_id, private_data, **ids, **fields)

    def answer(self, communication: Communication, mad: bytes) -> None:
        """Send a message that the peer makes us send again, if it has to."""
        communication.mad = mad
        self.send(communication.path, mad)

    def request(self, communication: Communication, mad: bytes, attempts: int, timeout: float) -> None:
        """Send a message, and again after each `timeout` seconds without an answer, as often as `attempts` says."""
        communication.mad, communication.attempts, communication.timeout = mad, attempts, timeout
        self.send(communication.path, mad)
        self.timers.set(communication, self.clock() + timeout)

    def repeat(self, communication: Communication) -> bool:
        """Send a request again. Return whether there was an attempt left."""
        if not communication.attempts:
            return False
        communication.attempts -= 1
        self.send(communication.path, communication.mad)
        self.timers.set(communication, self.clock() + communication.timeout)
        return True

    def reject(self, path: Path, message: Message, reason: RejectReason, info: bytes = b"") -> None:
        """Refuse a REQ or REP for which there is no communication here."""
        answered = Answered.REQ if message.attribute == Attribute.REQ else Answered.REP
        mad = pack(
            Attribute.REJ, message.transaction_id, local_comm_id=message.fields.get("remote_comm_id", 0),
            remote_comm_id=message.fields["local_comm_id"], message_rejected=answered, reason=reason,
            reject_info_length=len(info), additional_reject_info=padded_info(info),
        )  # fmt: skip
        self.send(path, mad)


def padded_info(info: bytes) -> bytes:
    """Return additional information of a REJ as its field has it."""
    return info.ljust(MESSAGES[Attribute.REJ].fields["additional_reject_info"].width // 8, b"\0")


def check_state(communication: Communication, doing: str, *states: State) -> None:
    """Raise BadStateError unless the communication is in one of the states."""
    if communication.state not in states:
        raise BadStateError(
            f"{communication}: {doing} takes {' or '.join(state.name for state in states)}"
        )


def check_private(attribute: Attribute, private_data: bytes, header: int = 0) -> None:
    """Raise TooBigError if a message has no room for private data after a `header` of so many bytes."""
    most = private_bytes(MESSAGES[attribute]) - header
    if len(private_data) > most:
        raise TooBigError(f"{len(private_data)} bytes of private data: a {attribute.name} carries at most {most}")
