"""The end of communications (IBTA 12.9.7, 12.9.8): REJ, DREQ, DREP, and TIMEWAIT."""

from __future__ import annotations

from ..errors import DocaError
from ..formats.cm import Answered, Attribute, RejectReason
from ..formats.layout import Fields
from .common import ASKING, Common, check_private, check_state, padded_info
from .communication import Communication, Listening, State
from .event import Event, EventType
from .messages import Message, pack
from .path import Path
from .times import seconds

_OPEN = State.REP_SENT, State.MRA_REP_RECEIVED, State.ESTABLISHED  # this end can use its queue pair
_ASKED = State.REQ_RECEIVED, State.MRA_REQ_SENT
_GUID_BYTES = 8


class Ending:
    """Rejects, disconnects and gives up communications, and handles the peer doing so."""

    def __init__(self, common: Common):
        self._common = common

    def reject(
        self, communication: Communication, private_data: bytes = b"", reason: int = RejectReason.CONSUMER,
        info: bytes = b"",
    ) -> None:
        """Refuse the peer's REQ or REP. This ends the communication."""
        check_private(Attribute.REJ, private_data)
        check_state(communication, "rejecting", *_ASKED, State.REP_RECEIVED)
        answered = Answered.REP if communication.state is State.REP_RECEIVED else Answered.REQ
        self._send_reject(communication, answered, reason, private_data, info)
        self._common.forget(communication)

    def _send_reject(
        self, communication: Communication, answered: Answered, reason: int, private_data: bytes = b"",
        info: bytes = b"",
    ) -> None:
        common = self._common
        mad = common.message(
            communication, Attribute.REJ, private_data, message_rejected=answered, reason=reason,
            reject_info_length=len(info), additional_reject_info=padded_info(info),
        )
        common.send(communication.path, mad)

    def disconnect(self, communication: Communication, private_data: bytes = b"") -> None:
        """Send a DREQ, even to a peer that has not confirmed yet: its RTU may be lost."""
        check_private(Attribute.DREQ, private_data)
        check_state(communication, "disconnecting", *_OPEN)
        common, peer, times = self._common, communication.peer, communication.times
        communication.state = State.DREQ_SENT
        communication.transaction_id = common.new_transaction()
        mad = common.message(communication, Attribute.DREQ, private_data, remote_qpn=peer.qpn if peer else 0)
        common.request(communication, mad, times.retries, times.resend)

    def give_up(self, communication: Communication) -> None:
        """End the communication in any state, because the program leaves it. Notify the peer."""
        state = communication.state
        if state in ASKING:
            self._send_timeout(communication, Answered.REQ)
            self._common.forget(communication)
        elif state in (*_ASKED, State.REP_RECEIVED):
            self.reject(communication)
        elif state in _OPEN:
            self.disconnect(communication)

    def end_stale(self, communication: Communication) -> None:
        """Disconnect a connection whose peer now uses its queue pair in another connection."""
        if communication.state is State.ESTABLISHED:
            self.disconnect(communication)

    def make_room(self, listener: Listening, path: Path) -> bool:
        """Drop a request of a source that has too many, without an answer. Return whether there is room now.

        The peer repeats the request, and may then be accepted.
        """
        other = listener.waiting.giving_way(path.gid)
        if other is not None:
            self._common.forget(other)
            self._common.tell(other, EventType.UNREACHABLE)
        return other is not None

    def no_way(self, communication: Communication, why: DocaError) -> None:
        """End a communication whose peer cannot be reached, unless it has been reached before."""
        if communication.state in (*ASKING, State.SIDR_REQ_SENT):
            self._common.forget(communication)
            communication.notify(communication, Event(EventType.UNREACHABLE, why=why))

    def peer_gone(self, communication: Communication) -> None:
        """End a connection whose peer will never answer again."""
        if communication.state in (*_OPEN, State.DREQ_SENT):
            self._wait(communication)
            self._common.tell(communication, EventType.DISCONNECTED)

    def expire(self, communication: Communication) -> None:
        """End a communication whose last message was not answered, or whose TIMEWAIT is over."""
        common = self._common
        if communication.state is State.TIMEWAIT:
            common.forget(communication)
            common.tell(communication, EventType.TIMEWAIT_EXIT)
        elif communication.state is State.DREQ_SENT:
            self._wait(communication)
            common.tell(communication, EventType.DISCONNECTED)
        else:
            answered = Answered.REQ if communication.state in ASKING else Answered.REP
            self._send_timeout(communication, answered)
            common.forget(communication)
            common.tell(communication, EventType.UNREACHABLE)

    def _send_timeout(self, communication: Communication, answered: Answered) -> None:
        guid = self._common.guid.to_bytes(_GUID_BYTES, "big")
        self._send_reject(communication, answered, RejectReason.TIMEOUT, info=guid)

    def _wait(self, communication: Communication) -> None:
        """Enter TIMEWAIT. The peer may already use its queue pair for another connection, with another PSN."""
        common = self._common
        communication.state = State.TIMEWAIT
        common.free_qpn(communication)
        common.timers.set(communication, common.clock() + seconds(communication.ack_timeout))

    # --- messages of the peer ----------------------------------------------------------------------------------------

    def on_rej(self, path: Path, message: Message) -> None:
        """Handle a REJ: the peer has refused or given up."""
        found = self._find_rejected(message, path)
        if found is None:
            return
        fields, common = message.fields, self._common
        if found.state in (State.REP_RECEIVED, State.ESTABLISHED, State.DREQ_SENT):
            self._wait(found)
        elif found.state is State.TIMEWAIT:
            return
        else:
            common.forget(found)
        common.tell(found, EventType.REJECTED, fields["private_data"], fields["reason"])

    def _find_rejected(self, message: Message, path: Path) -> Communication | None:
        """Return the communication that a REJ is about.

        A peer that has given up on its REQ does not know the ID here, so the REJ contains the peer's GUID.
        """
        fields = message.fields
        if fields["reason"] == RejectReason.TIMEOUT and fields["message_rejected"] == Answered.REQ:
            guid = int.from_bytes(fields["additional_reject_info"][:_GUID_BYTES], "big")
            found = self._common.by_remote.get((fields["local_comm_id"], guid))
            return found if found is not None and found.path.gid == path.gid else None
        found = self._common.find(message, path)
        if found is None or (found.state in ASKING) != (fields["message_rejected"] == Answered.REQ):
            return None
        return found

    def on_dreq(self, path: Path, message: Message) -> None:
        """Handle a DREQ: answer it, even if the connection is unknown or forgotten."""
        fields, common = message.fields, self._common
        found = common.find(message, path)
        if found is None:
            common.send(path, _drep(message))
            return
        if found.own is None or fields["remote_qpn"] != found.own.qpn:
            return
        if found.state in (*_OPEN, State.DREQ_SENT):
            common.answer(found, _drep(message))
            self._wait(found)
            common.tell(found, EventType.DISCONNECTED, fields["private_data"])
        elif found.state is State.TIMEWAIT:
            common.send(path, _drep(message))
        # In other states, the peer's REP is in flight or lost: the peer repeats its DREQ, or answers our next REQ with
        # a REJ.

    def on_drep(self, path: Path, message: Message) -> None:
        """Handle a DREP: the peer has disconnected as well."""
        found = self._common.find(message, path)
        if found is not None and found.state is State.DREQ_SENT:
            self._wait(found)
            self._common.tell(found, EventType.DISCONNECTED, message.fields["private_data"])


def _drep(dreq: Message) -> bytes:
    """Return the DREP that answers a DREQ."""
    ids: Fields = {
        "local_comm_id": dreq.fields["remote_comm_id"], "remote_comm_id": dreq.fields["local_comm_id"],
    }
    return pack(Attribute.DREP, dreq.transaction_id, **ids)
