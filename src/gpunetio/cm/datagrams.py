"""Service ID resolution, which finds the queue pair of a datagram service (IBTA 12.11)."""

from __future__ import annotations

from ..formats.cm import IP_CM, Attribute, PortSpace, SidrStatus
from ..formats.packet import DEFAULT_PKEY
from .common import Common, check_private, check_state
from .communication import Communication, Listening, Notify, Service, State
from .event import EventType
from .ip_service import EPHEMERAL_PORTS, IpHeader, service_id
from .listeners import Listeners
from .messages import Message, pack
from .path import Path
from .times import Times


class Datagrams:
    """Asks peers for the queue pairs of their services, and answers such requests from peers."""

    def __init__(self, common: Common, listeners: Listeners):
        self._common, self._listeners = common, listeners
        self._asked: dict[tuple[int, bytes], Communication] = {}  # by the peer's request ID and GID

    def __len__(self) -> int:
        return len(self._asked)

    def resolve(
        self, path: Path, port: int, private_data: bytes, times: Times, notify: Notify
    ) -> Communication:
        """Send a SIDR_REQ for a port of the peer, and return the new communication."""
        check_private(Attribute.SIDR_REQ, private_data, header=IP_CM.size)
        made = self._common.new(State.SIDR_REQ_SENT, path, times, notify)
        made.service_id = service_id(PortSpace.UDP, port)
        made.address = IpHeader(
            self._common.gids[path.sgid_index], path.gid, EPHEMERAL_PORTS[made.local_id % len(EPHEMERAL_PORTS)]
        )
        mad = pack(
            Attribute.SIDR_REQ, made.transaction_id, made.address.pack() + private_data, request_id=made.local_id,
            partition_key=DEFAULT_PKEY, service_id=made.service_id,
        )
        self._common.request(made, mad, times.retries, times.resend)
        return made

    def answer(
        self, communication: Communication, service: Service | None, private_data: bytes = b"",
        status: int = SidrStatus.VALID,
    ) -> None:
        """Send the SIDR_REP. If it is lost, the peer repeats its request, and the program gets it again."""
        check_private(Attribute.SIDR_REP, private_data)
        check_state(communication, "answering", State.SIDR_REQ_RECEIVED)
        self._reply(
            communication.path, communication.transaction_id, communication.remote_id, communication.service_id, status,
            service, private_data,
        )
        del self._asked[communication.remote_id, communication.path.gid]
        self._common.forget(communication)

    def _reply(
        self, path: Path, transaction_id: int, request_id: int, service: int, status: int, found: Service | None = None,
        private_data: bytes = b"",
    ) -> None:
        mad = pack(
            Attribute.SIDR_REP, transaction_id, private_data, request_id=request_id, status=status,
            service_id=service, qpn=found.qpn if found else 0, q_key=found.q_key if found else 0,
        )
        self._common.send(path, mad)

    def on_sidr_req(self, path: Path, message: Message) -> None:
        """Handle a SIDR_REQ: notify the program, unless it already has this request or there is no listener."""
        fields, common = message.fields, self._common
        if (fields["request_id"], path.gid) in self._asked:
            return
        address = IpHeader.parse(fields["private_data"])
        listener = self._listeners.find(fields["service_id"], address, common.own_gids())
        if address is None or listener is None:
            there = self._listeners.at(fields["service_id"])
            status = SidrStatus.REJECTED if there else SidrStatus.SERVICE_NOT_SUPPORTED
            self._reply(path, message.transaction_id, fields["request_id"], fields["service_id"], status)
        elif not listener.waiting.full or self._make_room(listener, path):  # otherwise drop it: the peer repeats it
            self._request(listener, address, path, message)

    def _request(self, listener: Listening, address: IpHeader, path: Path, message: Message) -> None:
        fields = message.fields
        made = self._common.new(State.SIDR_REQ_RECEIVED, path, listener.times, listener.notify)
        made.listener, made.address, made.service_id = listener, address, fields["service_id"]
        made.remote_id, made.transaction_id = fields["request_id"], message.transaction_id
        self._asked[made.remote_id, path.gid] = made
        listener.waiting.add(made)
        self._common.tell(made, EventType.REQUEST, fields["private_data"][IP_CM.size :])

    def on_sidr_rep(self, path: Path, message: Message) -> None:
        """Handle a SIDR_REP: report the peer's answer to the program."""
        fields, common = message.fields, self._common
        found = common.by_id.get(fields["request_id"])
        if found is None or found.state is not State.SIDR_REQ_SENT or found.path.gid != path.gid:
            return
        common.forget(found)
        if fields["status"] == SidrStatus.VALID:
            found.service = Service(fields["qpn"], fields["q_key"])
            common.tell(found, EventType.RESPONSE, fields["private_data"])
        else:
            common.tell(found, EventType.REJECTED, fields["private_data"], fields["status"])

    def _make_room(self, listener: Listening, path: Path) -> bool:
        """Drop a request of a source that has too many, without an answer. Return whether there is room now."""
        other = listener.waiting.giving_way(path.gid)
        if other is not None:
            del self._asked[other.remote_id, other.path.gid]
            self.expire(other)
        return other is not None

    def give_up(self, communication: Communication) -> None:
        """End a request that the program leaves."""
        if communication.state is State.SIDR_REQ_RECEIVED:
            self.answer(communication, None, status=SidrStatus.REJECTED)
        else:
            self._common.forget(communication)

    def expire(self, communication: Communication) -> None:
        """End a request that was not answered in time."""
        self._common.forget(communication)
        self._common.tell(communication, EventType.UNREACHABLE)
