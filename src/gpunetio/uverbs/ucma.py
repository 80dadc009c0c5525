"""What librdmacm asks of the kernel's connection manager, by writing commands to /dev/infiniband/rdma_cm.

`gpunetio.cm` has the messages and their states. librdmacm moves the queue pair, which this module never touches: it
only says with which attributes. As in Linux, what takes time ends with an event.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..cm.address import text_of
from ..cm.communication import Communication, State, Terms
from ..cm.event import Event as Told
from ..cm.event import EventType
from ..cm.ip_service import EPHEMERAL_PORTS
from ..cm.listener import too_large
from ..cm.parameters import Parameters, port_mtu
from ..cm.path import Path
from ..cm.queue_pair import attributes
from ..enums import QpState
from ..errors import BadStateError, DocaError, InUseError, NotFoundError, TooBigError
from ..formats.cm import PortSpace, RejectReason
from ..formats.commands import MTU_CODES
from ..formats.layout import Entry
from ..formats.packet import DEFAULT_PKEY, IPV4_MAPPED
from . import sockaddr, ucma_abi
from .abi import AH_ATTR, QpMask
from .call import Refused, bytes_at, store_at
from .queues import STATES, values_of
from .sockaddr import Address, of_gid
from .ucma_abi import Command, Event, Level, Option
from .ucma_devices import PORT, Device
from .ucma_ids import CmFile, CmId, Manager, Pending

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_MOST_BACKLOG = 1024  # net.rdma_ucm.max_backlog of Linux
_PRIVATE_BYTES = ucma_abi.CONN_PARAM.private_data_len - ucma_abi.CONN_PARAM.private_data
_PARAM_BYTES = ucma_abi.EVENT_RESP.reserved - ucma_abi.EVENT_RESP.param
_STATUS_MASK = 0xFFFF_FFFF
_EXACTLY = 2  # IB_SA_EQ: how a path record says that a value is this one
_ERRNO = ((BadStateError, errno.EINVAL), (InUseError, errno.EADDRINUSE), (TooBigError, errno.EINVAL))


class Channel(NamedTuple):
    """Who writes a command: an open file, and the manager of all."""

    manager: Manager
    file: CmFile

    def get(self, request: np.ndarray) -> CmId:
        """Return the identifier that a command names."""
        return self.manager.get(int(request["id"]), self.file)


Answer = Callable[[Channel, np.ndarray], "bytes | None"]


class _Known(NamedTuple):
    """How to answer a command: what it brings, and the least room that its answer needs."""

    answer: Answer
    layout: Entry
    room: int


_commands: dict[int, _Known] = {}


def command(number: Command, layout: Entry, room: int = 0) -> Callable[[Answer], Answer]:
    """Have a function answer a command. With `room`, it returns at least so many bytes for the program."""

    def register(answer: Answer) -> Answer:
        _commands[number] = _Known(answer, layout, room)
        return answer

    return register


def write(manager: Manager, file: CmFile, address: int, nbytes: int) -> int:
    """Execute a command that the program has written. Return how many bytes that took: all. -EAGAIN without event."""
    if nbytes < ucma_abi.HEADER.size:
        raise Refused(errno.EINVAL, f"a command of {nbytes} bytes has no header")
    raw = bytes_at(address, nbytes)
    header = ucma_abi.HEADER.at(raw)
    number, size, room = int(header["cmd"]), int(header["in"]), int(header["out"])
    if number not in list(Command) or ucma_abi.HEADER.size + size > nbytes:
        raise Refused(errno.EINVAL, f"there is no command {number} of {size} bytes in {nbytes}")
    known = _commands.get(number)
    if known is None:
        logger.warning("the program asks the kernel for %s, which software NICs do not have", Command(number).name)
        raise Refused(errno.EOPNOTSUPP, f"{Command(number).name} is not supported")
    if room < known.room:
        raise Refused(errno.ENOSPC, f"{Command(number).name} leaves {room} bytes for an answer of {known.room}")
    # Older programs bring less of a structure: the rest is 0.
    request = known.layout.at(raw[ucma_abi.HEADER.size :][:size].ljust(known.layout.size, b"\0"))
    if known.room:
        store_at(int(request["response"]), bytes(known.room))  # so that nothing is done whose answer cannot be stored
    if number != Command.GET_EVENT:
        logger.debug("%s", Command(number).name)
    try:
        with manager.lock:
            answer = known.answer(Channel(manager, file), request)
    except tuple(kind for kind, _ in _ERRNO) as error:
        code = next(code for kind, code in _ERRNO if isinstance(error, kind))
        raise Refused(code, f"{Command(number).name}: {error}") from error
    if answer:
        store_at(int(request["response"]), answer[:room])
    return -errno.EAGAIN if number == Command.GET_EVENT and not answer else nbytes


# --- identifiers -----------------------------------------------------------------------------------------------------


@command(Command.CREATE_ID, ucma_abi.CREATE_ID, ucma_abi.CREATE_ID_RESP.size)
def create_id(channel: Channel, request: np.ndarray) -> bytes:
    space = int(request["ps"])
    # librdmacm finds out by the second one whether the kernel takes addresses of InfiniBand, which BIND refuses then.
    if space not in (PortSpace.TCP, PortSpace.IB):
        logger.warning("the program asks for port space %#x: software NICs have RDMA_PS_TCP here", space)
        raise Refused(errno.EOPNOTSUPP, f"port space {space:#x} is not supported")
    return ucma_abi.CREATE_ID_RESP.pack(id=channel.manager.new(channel.file, int(request["uid"])).number)


@command(Command.DESTROY_ID, ucma_abi.DESTROY_ID, ucma_abi.DESTROY_ID_RESP.size)
def destroy_id(channel: Channel, request: np.ndarray) -> bytes:
    cm_id = channel.get(request)
    channel.manager.destroy(cm_id)
    return ucma_abi.DESTROY_ID_RESP.pack(events_reported=cm_id.reported)


@command(Command.MIGRATE_ID, ucma_abi.MIGRATE_ID, ucma_abi.MIGRATE_RESP.size)
def migrate_id(channel: Channel, request: np.ndarray) -> bytes:
    """Move an identifier to this channel from that of another descriptor."""
    cm_id = channel.manager.get(int(request["id"]))
    if cm_id.file.descriptor != int(request["fd"]):
        raise Refused(errno.ENOENT, f"{cm_id} does not belong to the channel of descriptor {int(request['fd'])}")
    channel.manager.move(cm_id, channel.file)
    return ucma_abi.MIGRATE_RESP.pack(events_reported=cm_id.reported)


# --- addresses -------------------------------------------------------------------------------------------------------


@command(Command.BIND_IP, ucma_abi.BIND_IP)
@command(Command.BIND, ucma_abi.BIND)
def bind(channel: Channel, request: np.ndarray) -> None:
    cm_id, address = channel.get(request), sockaddr.parse(request["addr"].tobytes())
    if address is None or cm_id.source is not None:
        raise Refused(errno.EINVAL, f"{cm_id} has an address already, or is to get none")
    _bind(channel, cm_id, address)


def _bind(channel: Channel, cm_id: CmId, address: Address) -> None:
    device = None
    if not address.wildcard:
        device = channel.manager.devices.having(address.gid)
        if device is None:
            raise Refused(errno.EADDRNOTAVAIL, f"no software NIC of this program has {text_of(address.gid)}")
    cm_id.source, cm_id.device = _with_port(channel, cm_id, address), device


def _with_port(channel: Channel, cm_id: CmId, address: Address) -> Address:
    """Return an address with its port, or a free one. Refused with EADDRINUSE if another identifier has that."""
    # A connection has its listener's port, which does not keep another listener from it.
    others = [
        other for other in channel.manager.ids()
        if other is not cm_id and not other.passive and other.source is not None and address.overlaps(other.source)
    ]  # fmt: skip
    if not address.port:
        taken = {other.source.port for other in others if other.source is not None}
        free = [port for port in EPHEMERAL_PORTS if port not in taken]
        if not free:
            raise Refused(errno.EADDRNOTAVAIL, f"all ports of {text_of(address.gid)} are used")
        return address.with_port(secrets.choice(free))
    for other in others:
        shared = Option.REUSEADDR in cm_id.options and Option.REUSEADDR in other.options and not other.listenings
        if other.source is not None and other.source.port == address.port and not shared:
            raise Refused(errno.EADDRINUSE, f"{other} has port {address.port}")
    return address


@command(Command.RESOLVE_IP, ucma_abi.RESOLVE_IP)
@command(Command.RESOLVE_ADDR, ucma_abi.RESOLVE_ADDR)
def resolve_address(channel: Channel, request: np.ndarray) -> None:
    """Find the device by which a peer is reached, and the peer there."""
    cm_id = channel.get(request)
    source, peer = sockaddr.parse(request["src_addr"].tobytes()), sockaddr.parse(request["dst_addr"].tobytes())
    if peer is None or cm_id.communication is not None or cm_id.listenings or cm_id.peer is not None:
        raise Refused(errno.EINVAL, f"{cm_id} has a peer already, or is to get none")
    if cm_id.source is None and source is not None:
        _bind(channel, cm_id, source)
    if peer.wildcard:  # the kernel takes it for this machine
        peer = Address(peer.family, IPV4_MAPPED + bytes((127, 0, 0, 1)), peer.port)
    try:
        cm_id.device, gid = _way(channel, cm_id, peer)
        index = cm_id.device.gid_index(gid)
        if index is None:
            raise NotFoundError(f"{text_of(gid)} is no address of {cm_id.device.ctx.name} any more")
        path = Path(peer.gid, index, traffic_class=cm_id.options.get(Option.TOS, 0))
        cm_id.device.agent.reach(path)
    except NotFoundError as error:
        logger.info("%s: %s", cm_id, error)
        channel.manager.add(Pending(cm_id, Event.ADDR_ERROR, -errno.EHOSTUNREACH))
        return
    port = cm_id.source.port if cm_id.source is not None else 0
    cm_id.source = of_gid(gid, port) if port else _with_port(channel, cm_id, of_gid(gid, 0))
    cm_id.peer, cm_id.path = peer, path
    channel.manager.add(Pending(cm_id, Event.ADDR_RESOLVED))


def _way(channel: Channel, cm_id: CmId, peer: Address) -> tuple[Device, bytes]:
    """Return the device and the address from which to ask a peer. NotFoundError if no device has one for it."""
    if cm_id.device is not None and cm_id.source is not None:
        return cm_id.device, cm_id.source.gid
    found = channel.manager.devices.toward(peer.gid)
    if found is None:
        raise NotFoundError(f"no software NIC has an address from which {text_of(peer.gid)} is reached")
    return found


@command(Command.RESOLVE_ROUTE, ucma_abi.RESOLVE_ROUTE)
def resolve_route(channel: Channel, request: np.ndarray) -> None:
    """Say that the route is known: RoCE has none to look for."""
    cm_id = channel.get(request)
    if cm_id.path is None or cm_id.routed:
        raise Refused(errno.EINVAL, f"{cm_id} has a route already, or its address is not resolved")
    cm_id.routed = True
    channel.manager.add(Pending(cm_id, Event.ROUTE_RESOLVED))


@command(Command.QUERY_ROUTE, ucma_abi.QUERY, ucma_abi.QUERY_ROUTE_RESP.ibdev_index)
def query_route(channel: Channel, request: np.ndarray) -> bytes:
    """Tell what is known of an identifier. The number of its device is left out: only netlink knows such numbers."""
    cm_id = channel.get(request)
    known: dict[str, int | bytes] = {}
    if cm_id.source is not None:
        known["src_addr"] = cm_id.source.pack()
    if cm_id.peer is not None:
        known["dst_addr"] = cm_id.peer.pack()
    if cm_id.device is not None:
        known |= {"node_guid": cm_id.device.guid, "port_num": PORT, "num_paths": int(cm_id.routed)}
        known["ib_route"] = _path_record(cm_id, cm_id.device).ljust(2 * ucma_abi.PATH_REC.size, b"\0")
    return ucma_abi.QUERY_ROUTE_RESP.pack(**known)[: ucma_abi.QUERY_ROUTE_RESP.ibdev_index]


def _path_record(cm_id: CmId, device: Device) -> bytes:
    path, source = cm_id.path, cm_id.source
    if path is None or source is None:
        return ucma_abi.PATH_REC.pack(pkey=DEFAULT_PKEY, sgid=source.gid if source else bytes(16))
    return ucma_abi.PATH_REC.pack(
        dgid=path.gid, sgid=source.gid, reversible=1, numb_path=1, pkey=DEFAULT_PKEY, hop_limit=path.hop_limit,
        traffic_class=path.traffic_class, sl=path.sl, mtu_selector=_EXACTLY,
        mtu=MTU_CODES[port_mtu(device.ctx, PORT)],
    )  # fmt: skip


# --- listening -------------------------------------------------------------------------------------------------------


@command(Command.LISTEN, ucma_abi.LISTEN)
def listen(channel: Channel, request: np.ndarray) -> None:
    """Listen at the identifier's address: at a wildcard, on all devices."""
    cm_id, asked = channel.get(request), int(request["backlog"])
    if cm_id.source is None:
        _bind(channel, cm_id, Address(sockaddr.family_of(IPV4_MAPPED), IPV4_MAPPED + bytes(4)))
    source = cm_id.source
    if source is None or cm_id.peer is not None or cm_id.listenings:
        raise Refused(errno.EINVAL, f"{cm_id} listens already, or has a peer")
    gid = None if source.wildcard else source.gid
    devices = [cm_id.device] if cm_id.device is not None else list(channel.manager.devices)
    try:
        for device in devices:
            with device.agent.machine() as machine:
                made = machine.listen(
                    PortSpace.TCP, source.port, gid, asked if 0 < asked < _MOST_BACKLOG else _MOST_BACKLOG,
                    partial(_on_request, channel.manager, cm_id, device),
                )  # fmt: skip
            cm_id.listenings.append((device, made))
    except DocaError:
        for device, made in cm_id.listenings:
            with device.agent.machine() as machine:
                machine.stop_listening(made)
        cm_id.listenings.clear()
        raise


def _on_request(manager: Manager, listener: CmId, device: Device, communication: Communication, told: Told) -> None:
    """Make an identifier of a peer's request. In the agent's thread."""
    address, peer, source = communication.address, communication.peer, listener.source
    if told.type is not EventType.REQUEST or address is None or peer is None or source is None:
        return
    afonly = bool(listener.options.get(Option.AFONLY))
    reason = (
        RejectReason.INVALID_SERVICE_ID if not source.takes(address.destination, afonly)
        else RejectReason.INVALID_MTU if too_large(device.ctx, PORT, communication)
        else None
    )  # fmt: skip
    if reason is not None:
        with device.agent.machine() as machine:
            machine.reject(communication, reason=reason)
        return
    made = manager.new(listener.file, uid=0)
    made.source, made.peer = of_gid(address.destination, source.port), of_gid(address.source, address.source_port)
    made.device, made.path, made.routed, made.passive = device, communication.data_path, True, True
    made.communication = communication
    # librdmacm asks for the queue pair's attributes before it accepts: with what the peer wants, which it then changes.
    communication.own = Terms(
        qpn=0, psn=made.psn, mtu=port_mtu(device.ctx, PORT), responder_resources=peer.initiator_depth,
        initiator_depth=peer.responder_resources,
    )  # fmt: skip
    communication.notify = partial(_on_event, manager, made)
    manager.add(Pending(listener, Event.CONNECT_REQUEST, param=_param(peer, told.private_data), made=made))


# --- connecting ------------------------------------------------------------------------------------------------------


def _terms(cm_id: CmId, device: Device, raw: np.ndarray) -> tuple[Terms, bytes]:
    """Return what the program says of its queue pair, and its private data."""
    param = ucma_abi.CONN_PARAM.at(raw.tobytes())
    terms = Terms(
        qpn=int(param["qp_num"]), psn=cm_id.psn, responder_resources=int(param["responder_resources"]),
        initiator_depth=int(param["initiator_depth"]), rnr_retry=min(7, int(param["rnr_retry_count"])),
        retry_count=min(7, int(param["retry_count"])), mtu=port_mtu(device.ctx, PORT), srq=bool(param["srq"]),
        flow_control=bool(param["flow_control"]),
    )  # fmt: skip
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
    channel.manager.watch(communication)
    own, private_data = _terms(cm_id, device, request["conn_param"])
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
        machine.reject(cm_id.the_communication(), private_data, reason)


@command(Command.DISCONNECT, ucma_abi.DISCONNECT)
def disconnect(channel: Channel, request: np.ndarray) -> None:
    """End a connection. Nothing happens to one that has ended, or whose end the peer knows."""
    cm_id = channel.get(request)
    communication = cm_id.the_communication()
    with cm_id.the_device().agent.machine() as machine:
        if communication.state not in (State.DREQ_SENT, State.TIMEWAIT, State.IDLE):
            machine.disconnect(communication)


@command(Command.NOTIFY, ucma_abi.NOTIFY)
def notify(channel: Channel, request: np.ndarray) -> None:
    """Take a message on the queue pair for the peer's confirmation."""
    cm_id = channel.get(request)
    if int(request["event"]) != ucma_abi.COMMUNICATION_ESTABLISHED:
        raise Refused(errno.EINVAL, f"event {int(request['event'])} says nothing of connections")
    communication = cm_id.the_communication()
    with cm_id.the_device().agent.machine() as machine:
        before = communication.state
        machine.establish(communication)
        if communication.state is not before:
            channel.manager.add(Pending(cm_id, Event.ESTABLISHED))


_RIGHTS_MASK = QpMask.STATE | QpMask.ACCESS_FLAGS | QpMask.PKEY_INDEX | QpMask.PORT
_PATH_MASK = (
    QpMask.STATE | QpMask.AV | QpMask.PATH_MTU | QpMask.DEST_QPN | QpMask.RQ_PSN | QpMask.MAX_DEST_RD_ATOMIC
    | QpMask.MIN_RNR_TIMER
)  # fmt: skip
_SEND_MASK = (
    QpMask.STATE | QpMask.SQ_PSN | QpMask.TIMEOUT | QpMask.RETRY_CNT | QpMask.RNR_RETRY | QpMask.MAX_QP_RD_ATOMIC
)
_MASKS = {QpState.RTR: _PATH_MASK, QpState.RTS: _SEND_MASK}


@command(Command.INIT_QP_ATTR, ucma_abi.INIT_QP_ATTR, ucma_abi.QP_ATTR.size)
def init_qp_attr(channel: Channel, request: np.ndarray) -> bytes:
    """Say how to move the queue pair to a state."""
    cm_id, code = channel.get(request), int(request["qp_state"])
    cm_id.the_device()
    state, communication = STATES.get(code), cm_id.communication
    parameters = Parameters(ack_timeout=cm_id.options.get(Option.ACK_TIMEOUT))
    if state is QpState.INIT:
        own = communication.own if communication is not None else None
        rights = parameters.rights(own) if own is not None else 0
        return ucma_abi.QP_ATTR.pack(
            qp_attr_mask=_RIGHTS_MASK, qp_state=code, qp_access_flags=int(rights), port_num=PORT
        )  # fmt: skip
    if state is None or state not in _MASKS:
        raise Refused(errno.EINVAL, f"the connection manager does not move queue pairs to state {code}")
    attr = attributes(cm_id.the_communication(), parameters)
    path = attr.ah_attr
    if path is None:
        raise Refused(errno.EINVAL, f"{cm_id} has no path")
    ah_attr = AH_ATTR.pack(
        dgid=bytes(path.gid), is_global=1, sgid_index=path.sgid_index, hop_limit=path.hop_limit,
        traffic_class=path.traffic_class, sl=path.sl, port_num=PORT,
    )  # fmt: skip
    values = {name: value for name, value in values_of(attr).items() if name in ucma_abi.QP_ATTR.offsets}
    values |= {"qp_attr_mask": int(_MASKS[state]), "qp_state": code, "ah_attr": ah_attr}
    return ucma_abi.QP_ATTR.pack(**values)


# --- options ---------------------------------------------------------------------------------------------------------

_OPTION_BYTES = {Option.TOS: 1, Option.REUSEADDR: 4, Option.AFONLY: 4, Option.ACK_TIMEOUT: 1}
_MOST_ACK_TIMEOUT = 31


@command(Command.SET_OPTION, ucma_abi.SET_OPTION)
def set_option(channel: Channel, request: np.ndarray) -> None:
    cm_id, level, name = channel.get(request), int(request["level"]), int(request["optname"])
    if level != Level.ID or name not in list(Option):
        logger.warning("the program sets option %d of level %d, which software NICs do not have", name, level)
        raise Refused(errno.ENOSYS, f"option {name} of level {level} is not supported")
    option, nbytes = Option(name), int(request["optlen"])
    if nbytes != _OPTION_BYTES[option]:
        raise Refused(errno.EINVAL, f"{option.name} has {_OPTION_BYTES[option]} bytes, not {nbytes}")
    value = int.from_bytes(bytes_at(int(request["optval"]), nbytes), "little")
    if option is Option.ACK_TIMEOUT and value > _MOST_ACK_TIMEOUT:
        raise Refused(errno.EINVAL, f"an acknowledge timeout of {value}: it must be 0 to {_MOST_ACK_TIMEOUT}")
    cm_id.options.pop(option, None)
    if value or option is Option.ACK_TIMEOUT:
        cm_id.options[option] = value


# --- events ----------------------------------------------------------------------------------------------------------

_EVENTS = {
    EventType.RESPONSE: Event.CONNECT_RESPONSE, EventType.ESTABLISHED: Event.ESTABLISHED,
    EventType.REJECTED: Event.REJECTED, EventType.UNREACHABLE: Event.UNREACHABLE,
    EventType.DISCONNECTED: Event.DISCONNECTED, EventType.TIMEWAIT_EXIT: Event.TIMEWAIT_EXIT,
}  # fmt: skip
_WITH_DATA = EventType.RESPONSE, EventType.REJECTED  # as in Linux, others bring no private data


def _on_event(manager: Manager, cm_id: CmId, communication: Communication, told: Told) -> None:
    """Tell the program what has become of its connection. In the agent's thread."""
    status = -errno.ETIMEDOUT if told.type is EventType.UNREACHABLE else told.reason
    terms = communication.peer if told.type is EventType.RESPONSE else None
    private_data = told.private_data if told.type in _WITH_DATA else b""
    manager.add(Pending(cm_id, _EVENTS[told.type], status, _param(terms, private_data)))


def _param(peer: Terms | None, private_data: bytes) -> bytes:
    """Return what an event says of the peer's queue pair, from the side of who is told."""
    said: dict[str, int | bytes] = {
        "private_data": private_data.ljust(_PRIVATE_BYTES, b"\0"), "private_data_len": len(private_data),
    }  # fmt: skip
    if peer is not None:
        said |= {
            "qp_num": peer.qpn, "srq": int(peer.srq), "responder_resources": peer.initiator_depth,
            "initiator_depth": peer.responder_resources, "flow_control": int(peer.flow_control),
            "retry_count": peer.retry_count, "rnr_retry_count": peer.rnr_retry,
        }  # fmt: skip
    return ucma_abi.CONN_PARAM.pack(**said)


@command(Command.GET_EVENT, ucma_abi.GET_EVENT, ucma_abi.EVENT_RESP.reserved)
def get_event(channel: Channel, request: np.ndarray) -> bytes | None:
    """Give the program its oldest event. If there is none, preload.c waits, unless the program does not want that."""
    pending = channel.file.take()
    if pending is None:
        return None
    pending.about.reported += 1
    return ucma_abi.EVENT_RESP.pack(
        uid=pending.about.uid, id=(pending.made or pending.about).number, event=int(pending.event),
        status=pending.status & _STATUS_MASK, param=pending.param.ljust(_PARAM_BYTES, b"\0"),
    )  # fmt: skip
