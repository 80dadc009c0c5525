"""Commands of the connection manager about listening and connecting, and the events that result."""

from __future__ import annotations

import errno
import socket
from functools import partial

import numpy as np

from ..cm.communication import Communication, Service, State, Terms
from ..cm.event import Event as Told
from ..cm.event import EventType
from ..cm.listener import too_large
from ..cm.parameters import Parameters, port_mtu
from ..cm.queue_pair import ah_of, attributes
from ..enums import QpState
from ..errors import DocaError
from ..formats.cm import PortSpace, RejectReason, SidrStatus
from ..formats.packet import IPV4_MAPPED
from ..verbs import AhAttr
from . import sockaddr, ucma_abi
from .abi import AH_ATTR, QpMask
from .call import Refused
from .queues import STATES, values_of
from .sockaddr import Address, of_gid
from .ucma import Channel, command
from .ucma_abi import Command, Event, Option
from .ucma_addresses import bind_to
from .ucma_devices import PORT, Device
from .ucma_ids import CmId, Manager, Pending

_MOST_BACKLOG = 1024  # net.rdma_ucm.max_backlog of Linux
_PRIVATE_BYTES = ucma_abi.CONN_PARAM.private_data_len - ucma_abi.CONN_PARAM.private_data
_PARAM_BYTES = ucma_abi.EVENT_RESP.reserved - ucma_abi.EVENT_RESP.param
_STATUS_MASK = 0xFFFF_FFFF
_Q_KEY = 0x0123_4567  # RDMA_UDP_QKEY: the Q_Key of queue pairs for datagrams


# --- listening -------------------------------------------------------------------------------------------------------


@command(Command.LISTEN, ucma_abi.LISTEN)
def listen(channel: Channel, request: np.ndarray) -> None:
    """Listen at the identifier's address; for a wildcard, on all devices."""
    cm_id, asked = channel.get(request), int(request["backlog"])
    if cm_id.source is None:
        bind_to(channel, cm_id, Address(sockaddr.family_of(IPV4_MAPPED), IPV4_MAPPED + bytes(4)))
    source = cm_id.source
    if source is None or cm_id.peer is not None or cm_id.listenings:
        raise Refused(errno.EINVAL, f"{cm_id} listens already, or has a peer")
    gid = None if source.wildcard else source.gid
    only = cm_id.only(source)
    ipv4 = None if only is None else only == socket.AF_INET
    devices = [cm_id.device] if cm_id.device is not None else list(channel.manager.devices)
    try:
        for device in devices:
            with device.agent.machine() as machine:
                made = machine.listen(
                    cm_id.space, source.port, gid, asked if 0 < asked < _MOST_BACKLOG else _MOST_BACKLOG,
                    partial(_on_request, channel.manager, cm_id, device), ipv4=ipv4,
                )
            cm_id.listenings.append((device, made))
    except DocaError:
        for device, made in cm_id.listenings:
            with device.agent.machine() as machine:
                machine.stop_listening(made)
        cm_id.listenings.clear()
        raise


def _on_request(manager: Manager, listener: CmId, device: Device, communication: Communication, told: Told) -> None:
    """Make an identifier for a peer's request. Runs in the agent's thread."""
    address, peer, source = communication.address, communication.peer, listener.source
    if told.type is not EventType.REQUEST or address is None or source is None:
        return
    if too_large(device.ctx, PORT, communication):
        with device.agent.machine() as machine:
            machine.reject(communication, reason=RejectReason.INVALID_MTU)
        return
    made = manager.new(listener.file, 0, listener.space)
    made.source, made.peer = of_gid(address.destination, source.port), of_gid(address.source, address.source_port)
    made.device, made.routed, made.passive, made.communication = device, True, True, communication
    made.path = communication.data_path or communication.path
    if peer is not None:
        # librdmacm asks for attributes of the queue pair before it accepts, and changes what the peer wants.
        communication.own = Terms(
            qpn=0, psn=made.psn, mtu=port_mtu(device.ctx, PORT), responder_resources=peer.initiator_depth,
            initiator_depth=peer.responder_resources,
        )
    communication.notify = partial(_on_event, manager, made)
    datagrams = listener.space is PortSpace.UDP
    param = _datagram_param(communication, told.private_data) if datagrams else _param(peer, told.private_data)
    manager.add(Pending(listener, Event.CONNECT_REQUEST, param=param, made=made))


# --- connecting ------------------------------------------------------------------------------------------------------


def _terms(cm_id: CmId, device: Device, raw: np.ndarray) -> tuple[Terms, bytes]:
    """Return what the program says about its queue pair, and its private data."""
    param = ucma_abi.CONN_PARAM.at(raw.tobytes())
    terms = Terms(
        qpn=int(param["qp_num"]), psn=cm_id.psn, responder_resources=int(param["responder_resources"]),
        initiator_depth=int(param["initiator_depth"]), rnr_retry=min(7, int(param["rnr_retry_count"])),
        retry_count=min(7, int(param["retry_count"])), mtu=port_mtu(device.ctx, PORT), srq=bool(param["srq"]),
        flow_control=bool(param["flow_control"]),
    )
    return terms, param["private_data"].tobytes()[: int(param["private_data_len"])]


@command(Command.CONNECT, ucma_abi.CONNECT)
def connect(channel: Channel, request: np.ndarray) -> None:
    cm_id = channel.get(request)
    if cm_id.path is None or cm_id.peer is None or not cm_id.routed or cm_id.communication is not None:
        raise Refused(errno.EINVAL, f"{cm_id} has no route yet, or is connected already")
    device = cm_id.the_device()
    own, private_data = _terms(cm_id, device, request["conn_param"])
    notify = partial(_on_event, channel.manager, cm_id)
    with device.agent.machine() as machine:
        if cm_id.space is PortSpace.UDP:
            made = machine.resolve(cm_id.path, cm_id.peer.port, notify, private_data=private_data)
        else:
            made = machine.connect(cm_id.path, cm_id.peer.port, own, notify, private_data=private_data)
    cm_id.communication = made
    channel.manager.watch(made)
    if made.address is not None and cm_id.source is not None:
        cm_id.source = cm_id.source.with_port(made.address.source_port)


@command(Command.ACCEPT, ucma_abi.ACCEPT)
def accept(channel: Channel, request: np.ndarray) -> None:
    """Answer a peer's request, or confirm its answer: the queue pair is connected."""
    cm_id = channel.get(request)
    communication, device = cm_id.the_communication(), cm_id.the_device()
    if not cm_id.passive:
        with device.agent.machine() as machine:
            machine.confirm(communication)
        return
    own, private_data = _terms(cm_id, device, request["conn_param"])
    if cm_id.space is PortSpace.UDP:
        with device.agent.machine() as machine:
            machine.answer(communication, Service(own.qpn, _Q_KEY), private_data)
        cm_id.uid = int(request["uid"])
        return
    channel.manager.watch(communication)
    before, cm_id.uid = cm_id.uid, int(request["uid"])  # events may come at once
    try:
        with device.agent.machine() as machine:
            machine.accept(communication, own, private_data)
    except DocaError:
        cm_id.uid = before
        raise


@command(Command.REJECT, ucma_abi.REJECT)
def reject(channel: Channel, request: np.ndarray) -> None:
    cm_id = channel.get(request)
    private_data = request["private_data"].tobytes()[: int(request["private_data_len"])]
    reason = int(request["reason"]) or RejectReason.CONSUMER
    if reason not in (RejectReason.CONSUMER, RejectReason.VENDOR):
        raise Refused(errno.EINVAL, f"programs cannot reject with the reason {reason}")
    with cm_id.the_device().agent.machine() as machine:
        machine.reject(
            cm_id.the_communication(), private_data, SidrStatus.REJECTED if cm_id.space is PortSpace.UDP else reason
        )


@command(Command.DISCONNECT, ucma_abi.DISCONNECT)
def disconnect(channel: Channel, request: np.ndarray) -> None:
    """End a connection. Do nothing if it has ended, or the peer already knows of its end."""
    cm_id = channel.get(request)
    communication = cm_id.the_communication()
    with cm_id.the_device().agent.machine() as machine:
        if communication.state not in (State.DREQ_SENT, State.TIMEWAIT, State.IDLE):
            machine.disconnect(communication)


@command(Command.NOTIFY, ucma_abi.NOTIFY)
def notify(channel: Channel, request: np.ndarray) -> None:
    """Take a message on the queue pair as the peer's confirmation."""
    cm_id = channel.get(request)
    if int(request["event"]) != ucma_abi.COMMUNICATION_ESTABLISHED:
        raise Refused(errno.EINVAL, f"event {int(request['event'])} says nothing of connections")
    communication = cm_id.the_communication()
    with cm_id.the_device().agent.machine() as machine:
        before = communication.state
        machine.establish(communication)
        if communication.state is not before:
            channel.manager.add(Pending(cm_id, Event.ESTABLISHED))


_DATAGRAMS_MASK = QpMask.STATE | QpMask.PKEY_INDEX | QpMask.PORT | QpMask.QKEY
_RIGHTS_MASK = QpMask.STATE | QpMask.ACCESS_FLAGS | QpMask.PKEY_INDEX | QpMask.PORT
_PATH_MASK = (
    QpMask.STATE | QpMask.AV | QpMask.PATH_MTU | QpMask.DEST_QPN | QpMask.RQ_PSN | QpMask.MAX_DEST_RD_ATOMIC
    | QpMask.MIN_RNR_TIMER
)
_SEND_MASK = (
    QpMask.STATE | QpMask.SQ_PSN | QpMask.TIMEOUT | QpMask.RETRY_CNT | QpMask.RNR_RETRY | QpMask.MAX_QP_RD_ATOMIC
)
_MASKS = {QpState.RTR: _PATH_MASK, QpState.RTS: _SEND_MASK}


@command(Command.INIT_QP_ATTR, ucma_abi.INIT_QP_ATTR, ucma_abi.QP_ATTR.size)
def init_qp_attr(channel: Channel, request: np.ndarray) -> bytes:
    """Return the attributes that move the queue pair to a state."""
    cm_id, code = channel.get(request), int(request["qp_state"])
    cm_id.the_device()
    state, communication = STATES.get(code), cm_id.communication
    parameters = Parameters(ack_timeout=cm_id.options.get(Option.ACK_TIMEOUT))
    if cm_id.space is PortSpace.UDP:
        return ucma_abi.QP_ATTR.pack(qp_attr_mask=_DATAGRAMS_MASK, qp_state=code, qkey=_Q_KEY, port_num=PORT)
    if state is QpState.INIT:
        own = communication.own if communication is not None else None
        rights = parameters.rights(own) if own is not None else 0
        return ucma_abi.QP_ATTR.pack(
            qp_attr_mask=_RIGHTS_MASK, qp_state=code, qp_access_flags=int(rights), port_num=PORT
        )
    if state is None or state not in _MASKS:
        raise Refused(errno.EINVAL, f"the connection manager does not move queue pairs to state {code}")
    attr = attributes(cm_id.the_communication(), parameters)
    path = attr.ah_attr
    if path is None:
        raise Refused(errno.EINVAL, f"{cm_id} has no path")
    values = {name: value for name, value in values_of(attr).items() if name in ucma_abi.QP_ATTR.offsets}
    values |= {"qp_attr_mask": int(_MASKS[state]), "qp_state": code, "ah_attr": _pack_path(path)}
    return ucma_abi.QP_ATTR.pack(**values)


def _pack_path(path: AhAttr) -> bytes:
    return AH_ATTR.pack(
        dgid=bytes(path.gid), is_global=1, sgid_index=path.sgid_index, hop_limit=path.hop_limit,
        traffic_class=path.traffic_class, flow_label=path.flow_label, sl=path.sl, port_num=PORT,
    )


# --- events ----------------------------------------------------------------------------------------------------------

_EVENTS = {
    EventType.RESPONSE: Event.CONNECT_RESPONSE, EventType.ESTABLISHED: Event.ESTABLISHED,
    EventType.REJECTED: Event.REJECTED, EventType.UNREACHABLE: Event.UNREACHABLE,
    EventType.DISCONNECTED: Event.DISCONNECTED, EventType.TIMEWAIT_EXIT: Event.TIMEWAIT_EXIT,
}
_OF_DATAGRAMS = {
    EventType.RESPONSE: Event.ESTABLISHED, EventType.REJECTED: Event.UNREACHABLE,
    EventType.UNREACHABLE: Event.UNREACHABLE,
}
_WITH_DATA = EventType.RESPONSE, EventType.REJECTED  # as in Linux, other events have no private data


def _on_event(manager: Manager, cm_id: CmId, communication: Communication, told: Told) -> None:
    """Tell the program what has become of its connection or its lookup. Runs in the agent's thread."""
    if cm_id.passive and told.type in (EventType.REJECTED, EventType.UNREACHABLE) and manager.withdraw(cm_id):
        return
    status = -errno.ETIMEDOUT if told.type is EventType.UNREACHABLE else told.reason
    terms = communication.peer if told.type is EventType.RESPONSE else None
    private_data = told.private_data if told.type in _WITH_DATA else b""
    if cm_id.space is PortSpace.UDP:
        param = _datagram_param(communication, told.private_data)
        manager.add(Pending(cm_id, _OF_DATAGRAMS[told.type], status, param))
    else:
        manager.add(Pending(cm_id, _EVENTS[told.type], status, _param(terms, private_data)))


def _param(peer: Terms | None, private_data: bytes) -> bytes:
    """Return an event's description of the peer's queue pair, from the receiver's point of view."""
    said: dict[str, int | bytes] = {
        "private_data": private_data.ljust(_PRIVATE_BYTES, b"\0"), "private_data_len": len(private_data),
    }
    if peer is not None:
        said |= {
            "qp_num": peer.qpn, "srq": int(peer.srq), "responder_resources": peer.initiator_depth,
            "initiator_depth": peer.responder_resources, "flow_control": int(peer.flow_control),
            "retry_count": peer.retry_count, "rnr_retry_count": peer.rnr_retry,
        }
    return ucma_abi.CONN_PARAM.pack(**said)


def _datagram_param(communication: Communication, private_data: bytes) -> bytes:
    """Return an event's description of where to send datagrams."""
    service = communication.service or Service(0, 0)
    return ucma_abi.UD_PARAM.pack(
        qp_num=service.qpn, qkey=service.q_key, ah_attr=_pack_path(ah_of(communication.path)),
        private_data=private_data.ljust(_PRIVATE_BYTES, b"\0"), private_data_len=len(private_data),
    )


@command(Command.GET_EVENT, ucma_abi.GET_EVENT, ucma_abi.EVENT_RESP.reserved)
def get_event(channel: Channel, request: np.ndarray) -> bytes | None:
    """Return the program's oldest event. If there is none, preload.c waits, unless the file is non-blocking."""
    pending = channel.file.take()
    if pending is None:
        return None
    pending.about.reported += 1
    return ucma_abi.EVENT_RESP.pack(
        uid=pending.about.uid, id=(pending.made or pending.about).number, event=int(pending.event),
        status=pending.status & _STATUS_MASK, param=pending.param.ljust(_PARAM_BYTES, b"\0"),
    )
