"""The passive side, which receives requests for connections (IBTA 12.9.6)."""

from __future__ import annotations

from ..formats.cm import IP_CM, Answered, Attribute, RejectReason, Transport
from ..formats.commands import MTU_OF_CODE
from .common import Common, check_private, check_state
from .communication import Communication, Listening, State, Terms
from .ending import Ending
from .event import EventType
from .ip_service import IpHeader
from .listeners import Listeners
from .messages import Message
from .path import Path
from .times import Times, seconds

_MRA_TIMEOUT = 24  # 4.096 us x 2^24 = 69 s for a program to decide, as in Linux


class Passive:
    """Handles REQs, and replies to them."""

    def __init__(self, common: Common, listeners: Listeners, ending: Ending):
        self._common, self._listeners, self._ending = common, listeners, ending

    def accept(self, communication: Communication, own: Terms, private_data: bytes) -> None:
        """Send the REP, because the queue pair is in RTS."""
        check_private(Attribute.REP, private_data)
        check_state(communication, "accepting", State.REQ_RECEIVED, State.MRA_REQ_SENT)
        if communication.listener is not None:
            communication.listener.waiting.discard(communication)
        communication.own, communication.state = own, State.REP_SENT
        times = communication.times
        mad = self._common.message(
            communication, Attribute.REP, private_data, local_qpn=own.qpn, starting_psn=own.psn,
            responder_resources=own.responder_resources, initiator_depth=own.initiator_depth,
            target_ack_delay=times.ack_delay, end_to_end_flow_control=own.flow_control,
            rnr_retry_count=own.rnr_retry, srq=own.srq, local_ca_guid=self._common.guid,
        )
        self._common.request(communication, mad, times.retries, seconds(times.response_timeout))

    def establish(self, communication: Communication) -> None:
        """Treat a message on the queue pair as the RTU, which may come later or never."""
        if communication.state in (State.REP_SENT, State.MRA_REP_RECEIVED):
            self._establish(communication)

    def on_rtu(self, path: Path, message: Message) -> None:
        """Handle an RTU: the peer's queue pair is in RTS."""
        found = self._common.find(message, path)
        if found is not None and found.state in (State.REP_SENT, State.MRA_REP_RECEIVED):
            self._establish(found)
            self._common.tell(found, EventType.ESTABLISHED, message.fields["private_data"])

    def _establish(self, communication: Communication) -> None:
        communication.state = State.ESTABLISHED
        self._common.timers.cancel(communication)

    def on_req(self, path: Path, message: Message) -> None:
        """Handle a REQ: notify the program, unless the REQ is a repetition or has no listener."""
        fields, common = message.fields, self._common
        known = common.by_remote.get((fields["local_comm_id"], fields["local_ca_guid"]))
        if known is not None:
            self._repeated(known, path, message)
            return
        stale = common.by_qpn.get((fields["local_qpn"], fields["local_ca_guid"]))
        if stale is not None:
            common.reject(path, message, RejectReason.STALE_CONNECTION)
            if stale.path.gid == path.gid:
                self._ending.end_stale(stale)
            return
        there = self._listeners.at(fields["service_id"])
        if not there or fields["transport_service_type"] != Transport.RC:
            common.reject(path, message, RejectReason.INVALID_SERVICE_ID)
        elif fields["primary_remote_gid"] not in common.own_gids():
            common.reject(path, message, RejectReason.INVALID_GID, common.gids[0])
        elif fields["path_packet_payload_mtu"] not in MTU_OF_CODE:
            common.reject(path, message, RejectReason.INVALID_MTU)
        else:
            address = IpHeader.parse(fields["private_data"])
            listener = self._listeners.find(fields["service_id"], address, common.own_gids())
            if address is None or listener is None:
                common.reject(path, message, RejectReason.CONSUMER)
            elif not listener.waiting.full or self._ending.make_room(listener, path):  # else the peer repeats it
                self._request(listener, address, path, message)

    def _repeated(self, known: Communication, path: Path, message: Message) -> None:
        """Handle a repeated REQ. If a REP was lost, its own timer resends it."""
        if known.path.gid != path.gid:
            return
        if known.state in (State.REQ_RECEIVED, State.MRA_REQ_SENT):
            known.state = State.MRA_REQ_SENT
            mad = self._common.message(
                known, Attribute.MRA, message_mraed=Answered.REQ, service_timeout=_MRA_TIMEOUT
            )
            self._common.send(path, mad)
        elif known.state in (State.DREQ_SENT, State.TIMEWAIT):
            self._common.reject(path, message, RejectReason.STALE_CONNECTION)

    def _request(self, listener: Listening, address: IpHeader, path: Path, message: Message) -> None:
        fields, common = message.fields, self._common
        times = Times(
            response_timeout=fields["local_cm_response_timeout"], packet_life=listener.times.packet_life,
            retries=fields["max_cm_retries"], ack_delay=listener.times.ack_delay,
        )
        made = common.new(State.REQ_RECEIVED, path, times, listener.notify)
        made.listener, made.transaction_id = listener, message.transaction_id
        made.service_id = fields["service_id"]
        made.address = address
        made.peer = Terms(
            qpn=fields["local_qpn"], psn=fields["starting_psn"], rnr_retry=fields["rnr_retry_count"],
            responder_resources=fields["responder_resources"], initiator_depth=fields["initiator_depth"],
            retry_count=fields["retry_count"], mtu=MTU_OF_CODE[fields["path_packet_payload_mtu"]],
            srq=bool(fields["srq"]), flow_control=bool(fields["end_to_end_flow_control"]),
            p_key=fields["partition_key"],
        )
        made.data_path = Path(
            fields["primary_local_gid"], common.gids.index(fields["primary_remote_gid"]),
            fields["primary_hop_limit"], fields["primary_traffic_class"], fields["primary_sl"],
            fields["primary_flow_label"],
        )
        made.ack_timeout = fields["primary_local_ack_timeout"]
        common.know(made, fields["local_comm_id"], fields["local_ca_guid"])
        listener.waiting.add(made)
        common.tell_when_reached(made, made.data_path, EventType.REQUEST, fields["private_data"][IP_CM.size :])
