"""The kernel's connection manager through librdmacm, for devices whose queue pair 1 belongs to the kernel.

These are cards and Soft-RoCE.
"""

from __future__ import annotations

import itertools
from contextlib import suppress

from ..enums import LinkLayer
from ..errors import DocaError, NotFoundError, NotSupportedError
from ..formats.cm import PortSpace, RejectReason
from ..providers.mlx5 import rdmacm_structs as r
from ..providers.mlx5.rdmacm import CmChannel, CmEvent, CmId, conn_param
from ..verbs.context import Context
from .communication import Communication, Listening, Notify, Service, State, Terms
from .event import Event, EventType
from .ip_service import service_id
from .machine import Machine
from .path import Path
from .times import LINUX, Times

_RESOLVING = 5.0  # seconds to resolve an address or a route
_RTR, _RTS = 2, 3  # ibv_qp_state
_UNKNOWN = (
    r.RDMA_CM_EVENT_ADDR_ERROR, r.RDMA_CM_EVENT_ROUTE_ERROR, r.RDMA_CM_EVENT_CONNECT_ERROR,
    r.RDMA_CM_EVENT_UNREACHABLE,
)


class KernelMachine(Machine):
    """A machine whose states, messages and timers are in the kernel, which knows queue pairs only by number.

    The `rdma_cm_id`s have no queue pair of librdmacm, so that programs can use their own: the kernel provides the
    attributes (`rdma_init_qp_attr`), and is notified when the queue pair is connected (`rdma_establish`).
    """

    def __init__(self, ctx: Context, port_num: int):
        if ctx.query_device().link_layer == LinkLayer.INFINIBAND:
            raise NotSupportedError(
                f"{ctx.name} has an InfiniBand port: on cards, connections by address are for RoCE; exchange "
                "QP.endpoint() by other means, and QP.connect()"
            )
        self._ctx, self._port_num = ctx, port_num
        self._channel = CmChannel()
        self._ids: dict[Communication | Listening, CmId] = {}
        self._by_number: dict[int, Communication | Listening] = {}
        self._asked: dict[Communication, bytes] = {}  # private data for peers whose address is being resolved
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return sum(isinstance(one, Communication) for one in self._ids)

    @property
    def quiet(self) -> bool:
        """Return True: the kernel keeps sending after the program has ended."""
        return True

    def close(self) -> None:
        """Destroy all objects in the kernel."""
        for one in list(self._ids):
            self._forget(one)
        self._channel.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take` has work."""
        return self._channel.fd

    def tick(self) -> None:
        """Do nothing: the timers are in the kernel."""

    # --- called by programs ------------------------------------------------------------------------------------------

    def connect(
        self, path: Path, port: int, own: Terms, notify: Notify, *, private_data: bytes = b"", times: Times = LINUX
    ) -> Communication:
        source = self._ctx.query_gid(self._port_num, path.sgid_index)
        made = self._new(State.REQ_SENT, path, times, notify)
        made.own, made.service_id = own, service_id(PortSpace.TCP, port)
        cm_id = self._keep(made, CmId(self._channel))
        try:
            cm_id.resolve_address(source, path.gid, port, _RESOLVING)
        except DocaError:
            self._forget(made)
            raise
        self._asked[made] = private_data
        return made

    def confirm(self, communication: Communication, private_data: bytes = b"") -> None:
        self._ids[communication].establish()
        communication.state = State.ESTABLISHED

    def listen(
        self, space: PortSpace, port: int, gid: bytes | None, backlog: int, notify: Notify, *,
        times: Times = LINUX, ipv4: bool | None = None,
    ) -> Listening:
        if space != PortSpace.TCP:
            raise _no_datagrams(self._ctx)
        if ipv4 is not None:
            raise NotSupportedError(f"{self._ctx} listens at one address, or at any of both kinds: leave out ipv4")
        made = Listening(service_id(space, port), gid, backlog, times, notify)
        cm_id = self._keep(made, CmId(self._channel))
        try:
            cm_id.listen(gid or bytes(16), port, backlog)
        except DocaError:
            self._forget(made)
            raise
        return made

    def stop_listening(self, listener: Listening) -> None:
        for communication in list(listener.waiting):
            self.give_up(communication)
        self._forget(listener)

    def accept(self, communication: Communication, own: Terms, private_data: bytes = b"") -> None:
        self._ids[communication].accept(_parameters(own, private_data))
        self._answered(communication)
        communication.own, communication.state = own, State.REP_SENT

    def establish(self, communication: Communication) -> None:
        """Do nothing: the kernel waits for the peer's confirmation."""

    def reject(
        self, communication: Communication, private_data: bytes = b"", reason: int = RejectReason.CONSUMER
    ) -> None:
        """Refuse. The kernel always sends the reason CONSUMER."""
        self._ids[communication].reject(private_data)
        self.give_up(communication)

    def disconnect(self, communication: Communication, private_data: bytes = b"") -> None:
        """Disconnect. The kernel does not send the private data."""
        self._ids[communication].disconnect()
        communication.state = State.DREQ_SENT

    def give_up(self, communication: Communication) -> None:
        self._answered(communication)
        communication.state = State.IDLE
        self._forget(communication)

    def peer_gone(self, communication: Communication) -> None:
        """Do nothing: the peer's kernel notifies us."""

    def resolve(
        self, path: Path, port: int, notify: Notify, *, private_data: bytes = b"", times: Times = LINUX
    ) -> Communication:
        raise _no_datagrams(self._ctx)

    def answer(self, communication: Communication, service: Service, private_data: bytes = b"") -> None:
        raise _no_datagrams(self._ctx)

    # --- events of the kernel ----------------------------------------------------------------------------------------

    def take(self) -> None:
        """Handle the events since the last call."""
        while (event := self._channel.get()) is not None:
            if event.type == r.RDMA_CM_EVENT_CONNECT_REQUEST:
                self._on_request(event)
                continue
            found = self._by_number.get(event.number)
            if isinstance(found, Communication):
                try:
                    self._on_event(found, event)
                except DocaError:
                    self._end(found, EventType.UNREACHABLE)

    def _on_request(self, event: CmEvent) -> None:
        listener = self._by_number.get(event.listener)
        cm_id = CmId(self._channel, event.number)
        if not isinstance(listener, Listening) or cm_id.device != self._ctx.name:
            cm_id.close()
            return
        gid, _ = cm_id.peer
        made = self._new(State.REQ_RECEIVED, Path(gid), listener.times, listener.notify)
        made.listener, made.service_id = listener, listener.service_id
        self._keep(made, cm_id)
        try:
            self._learn(made, event)
        except DocaError:
            self._forget(made)
            return
        listener.waiting.add(made)
        made.notify(made, Event(EventType.REQUEST, event.private_data))

    def _on_event(self, communication: Communication, event: CmEvent) -> None:
        cm_id = self._ids[communication]
        if event.type == r.RDMA_CM_EVENT_ADDR_RESOLVED:
            if cm_id.device != self._ctx.name:
                raise NotFoundError(f"the address of {self._ctx.name} leads to {cm_id.device}")
            cm_id.resolve_route(_RESOLVING)
        elif event.type == r.RDMA_CM_EVENT_ROUTE_RESOLVED and communication.own is not None:
            cm_id.connect(_parameters(communication.own, self._asked.pop(communication)))
        elif event.type == r.RDMA_CM_EVENT_CONNECT_RESPONSE:
            self._learn(communication, event)
            communication.state = State.REP_RECEIVED
            communication.notify(communication, Event(EventType.RESPONSE, event.private_data))
        elif event.type == r.RDMA_CM_EVENT_ESTABLISHED:
            communication.state = State.ESTABLISHED
            communication.notify(communication, Event(EventType.ESTABLISHED, event.private_data))
        elif event.type == r.RDMA_CM_EVENT_REJECTED:
            self._end(communication, EventType.REJECTED, event.private_data, event.status)
        elif event.type == r.RDMA_CM_EVENT_DISCONNECTED:
            if communication.state is not State.DREQ_SENT:
                with suppress(DocaError):
                    cm_id.disconnect()  # sends the DREP
            communication.state = State.TIMEWAIT
            communication.notify(communication, Event(EventType.DISCONNECTED, event.private_data))
        elif event.type == r.RDMA_CM_EVENT_TIMEWAIT_EXIT:
            self._end(communication, EventType.TIMEWAIT_EXIT)
        elif event.type in _UNKNOWN:
            self._end(communication, EventType.UNREACHABLE)

    def _learn(self, communication: Communication, event: CmEvent) -> None:
        """Store the terms of both ends, which the kernels have exchanged."""
        cm_id = self._ids[communication]
        rtr, rts = cm_id.attributes(_RTR), cm_id.attributes(_RTS)
        route = rtr.ah_attr.grh
        communication.peer = Terms(
            qpn=rtr.dest_qp_num, psn=rts.sq_psn, mtu=128 << rtr.path_mtu,
            # The kernel reports these two from this end's point of view.
            responder_resources=event.initiator_depth, initiator_depth=event.responder_resources,
            rnr_retry=rts.rnr_retry, retry_count=rts.retry_cnt,
        )
        communication.psn, communication.ack_timeout = rtr.rq_psn, rts.timeout
        # Without the flow label, which Linux derives from the ports (cma_get_roce_udp_flow_label): the SDK has no
        # field.
        communication.data_path = Path(
            bytes(route.dgid.raw), route.sgid_index, route.hop_limit, route.traffic_class, rtr.ah_attr.sl
        )

    def _end(self, communication: Communication, what: EventType, private_data: bytes = b"", reason: int = 0) -> None:
        self.give_up(communication)
        communication.notify(communication, Event(what, private_data, reason))

    # --- the ids -----------------------------------------------------------------------------------------------------

    def _new(self, state: State, path: Path, times: Times, notify: Notify) -> Communication:
        return Communication(next(self._numbers), state, path, times, notify, 0)

    def _keep(self, one: Communication | Listening, cm_id: CmId) -> CmId:
        self._ids[one], self._by_number[cm_id.number] = cm_id, one
        return cm_id

    def _answered(self, communication: Communication) -> None:
        self._asked.pop(communication, None)
        if communication.listener is not None:
            communication.listener.waiting.discard(communication)

    def _forget(self, one: Communication | Listening) -> None:
        cm_id = self._ids.pop(one, None)
        if cm_id is not None:
            del self._by_number[cm_id.number]
            cm_id.close()


def _parameters(own: Terms, private_data: bytes) -> r.rdma_conn_param:
    return conn_param(
        private_data, own.responder_resources, own.initiator_depth, own.qpn, own.srq, own.retry_count, own.rnr_retry
    )


def _no_datagrams(ctx: Context) -> NotSupportedError:
    return NotSupportedError(f"{ctx.name}: asking for services of datagrams (SIDR) is for software NICs")
