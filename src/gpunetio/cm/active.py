"""The active side, which requests a connection (IBTA 12.9.5)."""

from __future__ import annotations

from ..formats.cm import IP_CM, Answered, Attribute, PortSpace, RejectReason, Transport
from ..formats.commands import MTU_CODES
from ..formats.layout import Fields
from .common import ASKING, Common, check_private, check_state
from .communication import Communication, Notify, State, Terms
from .ending import Ending
from .event import EventType
from .ip_service import EPHEMERAL_PORTS, IpHeader, service_id
from .messages import Message
from .path import Path
from .times import Times, ack_timeout, seconds

_ANY_LID = 0xFFFF  # the path may lead through routers, as always with RoCE


class Active:
    """Requests connections: sends REQ and RTU, and handles the peer's replies."""

    def __init__(self, common: Common, ending: Ending):
        self._common, self._ending = common, ending

    def connect(
        self, path: Path, port: int, own: Terms, private_data: bytes, times: Times, notify: Notify
    ) -> Communication:
        """Send a REQ for a port of the peer, and return the new communication."""
        check_private(Attribute.REQ, private_data, header=IP_CM.size)
        made = self._common.new(State.REQ_SENT, path, times, notify)
        made.own, made.data_path = own, path
        made.service_id = service_id(PortSpace.TCP, port)
        source = self._common.gids[path.sgid_index]
        made.address = IpHeader(source, path.gid, EPHEMERAL_PORTS[made.local_id % len(EPHEMERAL_PORTS)])
        mad = self._common.message(
            made, Attribute.REQ, made.address.pack() + private_data, local_ca_guid=self._common.guid,
            **request_of(own, times, made.service_id, path, source),
        )
        self._common.request(made, mad, times.retries, times.resend)
        return made

    def confirm(self, communication: Communication, private_data: bytes) -> None:
        """Send the RTU, because the queue pair is in RTS."""
        check_private(Attribute.RTU, private_data)
        check_state(communication, "confirming", State.REP_RECEIVED)
        communication.state = State.ESTABLISHED
        self._common.answer(communication, self._common.message(communication, Attribute.RTU, private_data))

    def on_mra(self, path: Path, message: Message) -> None:
        """Handle an MRA: wait longer, because the peer needs more time."""
        found = self._common.find(message, path)
        if found is None:
            return
        longer = {
            (State.REQ_SENT, Answered.REQ): State.MRA_REQ_RECEIVED,
            (State.MRA_REQ_RECEIVED, Answered.REQ): State.MRA_REQ_RECEIVED,
            (State.REP_SENT, Answered.REP): State.MRA_REP_RECEIVED,
            (State.MRA_REP_RECEIVED, Answered.REP): State.MRA_REP_RECEIVED,
        }.get((found.state, message.fields["message_mraed"]))
        if longer is not None:
            found.state = longer
            wait = seconds(message.fields["service_timeout"]) + found.timeout
            self._common.timers.set(found, self._common.clock() + wait)

    def on_rep(self, path: Path, message: Message) -> None:
        """Handle a REP: store the peer's terms, and let the program connect its queue pair."""
        found = self._common.find(message, path)
        if found is None:
            return
        if found.state is State.ESTABLISHED and found.listener is None:  # the RTU was lost
            self._common.send(found.path, found.mad)
        if found.state not in ASKING or found.own is None:
            return
        fields, common = message.fields, self._common
        remote_id, guid = fields["local_comm_id"], fields["local_ca_guid"]
        if (remote_id, guid) in common.by_remote:
            return
        stale = common.by_qpn.get((fields["local_qpn"], guid))
        if stale is not None:
            common.reject(path, message, RejectReason.STALE_CONNECTION)
            self._ending.end_stale(stale)
            return
        common.timers.cancel(found)
        found.state = State.REP_RECEIVED
        found.peer = Terms(
            qpn=fields["local_qpn"], psn=fields["starting_psn"], rnr_retry=fields["rnr_retry_count"],
            responder_resources=fields["responder_resources"], initiator_depth=fields["initiator_depth"],
            retry_count=found.own.retry_count, mtu=found.own.mtu, srq=bool(fields["srq"]),
            flow_control=bool(fields["end_to_end_flow_control"]),
        )
        found.ack_timeout = ack_timeout(fields["target_ack_delay"], found.times.packet_life)
        common.know(found, remote_id, guid)
        common.tell_when_reached(found, found.data_path or path, EventType.RESPONSE, fields["private_data"])


def request_of(own: Terms, times: Times, service: int, path: Path, source: bytes) -> Fields:
    """Return the fields of a REQ for a connection from the GID `source`, except this end's ID and GUID."""
    return {
        "service_id": service,
        "local_qpn": own.qpn,
        "starting_psn": own.psn,
        "responder_resources": own.responder_resources,
        "initiator_depth": own.initiator_depth,
        "remote_cm_response_timeout": times.response_timeout,
        "local_cm_response_timeout": times.response_timeout,
        "transport_service_type": Transport.RC,
        "end_to_end_flow_control": own.flow_control,
        "retry_count": own.retry_count,
        "rnr_retry_count": own.rnr_retry,
        "partition_key": own.p_key,
        "path_packet_payload_mtu": MTU_CODES[own.mtu],
        "max_cm_retries": times.retries,
        "srq": own.srq,
        "primary_local_lid": _ANY_LID,
        "primary_remote_lid": _ANY_LID,
        "primary_local_gid": source,
        "primary_remote_gid": path.gid,
        "primary_flow_label": path.flow_label,
        "primary_traffic_class": path.traffic_class,
        "primary_hop_limit": path.hop_limit,
        "primary_sl": path.sl,
        "primary_local_ack_timeout": ack_timeout(times.ack_delay, times.packet_life),
    }
