"""Commands of the connection manager about identifiers, their addresses and their options."""

from __future__ import annotations

import errno
import logging
import secrets

import numpy as np

from ..cm.address import text_of
from ..cm.ip_service import EPHEMERAL_PORTS
from ..cm.parameters import port_mtu
from ..cm.path import Path
from ..cm.ways import PATIENCE
from ..errors import DocaError, NotFoundError, TimedOutError
from ..formats.cm import PortSpace
from ..formats.commands import MTU_CODES
from ..formats.packet import DEFAULT_PKEY, IPV4_MAPPED
from . import sockaddr, ucma_abi
from .call import Refused, bytes_at
from .sockaddr import Address, of_gid
from .ucma import Channel, command
from .ucma_abi import Command, Event, Level, Option
from .ucma_devices import PORT, Device
from .ucma_ids import CmId, Pending

logger: logging.Logger = logging.getLogger("gpunetio.uverbs")

_EXACTLY = 2  # IB_SA_EQ: marks a value of a path record as exact


# --- identifiers -----------------------------------------------------------------------------------------------------


@command(Command.CREATE_ID, ucma_abi.CREATE_ID, ucma_abi.CREATE_ID_RESP.size)
def create_id(channel: Channel, request: np.ndarray) -> bytes:
    space = int(request["ps"])
    # With an identifier of port space IB, librdmacm finds out whether the kernel takes InfiniBand addresses. BIND
    # refuses those.
    if space not in list(PortSpace):
        raise Refused(errno.EOPNOTSUPP, f"port space {space:#x} is not supported: RDMA_PS_TCP and RDMA_PS_UDP are")
    made = channel.manager.new(channel.file, int(request["uid"]), PortSpace(space))
    return ucma_abi.CREATE_ID_RESP.pack(id=made.number)


@command(Command.DESTROY_ID, ucma_abi.DESTROY_ID, ucma_abi.DESTROY_ID_RESP.size)
def destroy_id(channel: Channel, request: np.ndarray) -> bytes:
    cm_id = channel.get(request)
    channel.manager.destroy(cm_id)
    return ucma_abi.DESTROY_ID_RESP.pack(events_reported=cm_id.reported)


@command(Command.MIGRATE_ID, ucma_abi.MIGRATE_ID, ucma_abi.MIGRATE_RESP.size)
def migrate_id(channel: Channel, request: np.ndarray) -> bytes:
    """Move an identifier from another descriptor's channel to this one."""
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
    bind_to(channel, cm_id, address)


def bind_to(channel: Channel, cm_id: CmId, address: Address) -> None:
    """Give an identifier an address, and the device with that address. Refused with EADDRNOTAVAIL or EADDRINUSE."""
    device = None
    if not address.wildcard:
        device = channel.manager.devices.having(address.gid)
        if device is None:
            raise Refused(errno.EADDRNOTAVAIL, f"no software NIC of this program has {text_of(address.gid)}")
    cm_id.source, cm_id.device = _with_port(channel, cm_id, address), device


def _with_port(channel: Channel, cm_id: CmId, address: Address) -> Address:
    """Return an address with its port, or a free one. Refused if another identifier has it (Linux: cma_check_port)."""
    only = cm_id.only(address)
    # A connection has its listener's port, but does not keep another listener from using that port.
    others = [
        other for other in channel.manager.ids()
        if other is not cm_id and other.space == cm_id.space and not other.passive and other.source is not None
        and address.overlaps(other.source) and len({only, other.only(other.source)} - {None}) < 2
    ]
    if not address.port:
        taken = {other.source.port for other in others if other.source is not None}
        free = [port for port in EPHEMERAL_PORTS if port not in taken]
        if not free:
            raise Refused(errno.EADDRNOTAVAIL, f"all ports of {text_of(address.gid)} are used")
        return address.with_port(secrets.choice(free))
    for other in others:
        shared = Option.REUSEADDR in cm_id.options and Option.REUSEADDR in other.options and not other.listenings
        if other.source is not None and other.source.port == address.port and not shared:
            code = errno.EADDRNOTAVAIL if address.wildcard or other.source.wildcard else errno.EADDRINUSE
            raise Refused(code, f"{other} has port {address.port}")
    return address


@command(Command.RESOLVE_IP, ucma_abi.RESOLVE_IP)
@command(Command.RESOLVE_ADDR, ucma_abi.RESOLVE_ADDR)
def resolve_address(channel: Channel, request: np.ndarray) -> None:
    """Find the device that leads to a peer, and the peer. That may take a while: an event reports the result."""
    cm_id = channel.get(request)
    source, peer = sockaddr.parse(request["src_addr"].tobytes()), sockaddr.parse(request["dst_addr"].tobytes())
    asked = cm_id.communication is not None or cm_id.listenings or cm_id.peer is not None or cm_id.resolving
    if peer is None or asked:
        raise Refused(errno.EINVAL, f"{cm_id} has a peer already, or is to get none")
    if cm_id.source is None and source is not None:
        bind_to(channel, cm_id, source)
    if peer.wildcard:  # the kernel takes a wildcard as this machine
        peer = Address(peer.family, IPV4_MAPPED + bytes((127, 0, 0, 1)), peer.port)

    def failed(error: DocaError) -> None:  # a program may ask again once it has the event
        logger.info("%s: %s", cm_id, error)
        cm_id.resolving = False
        channel.manager.add(Pending(cm_id, Event.ADDR_ERROR, -errno.EHOSTUNREACH))

    def found() -> None:
        cm_id.device, cm_id.peer, cm_id.path, cm_id.resolving = device, peer, path, False
        channel.manager.add(Pending(cm_id, Event.ADDR_RESOLVED))

    try:
        device, gid = _way(channel, cm_id, peer)
        index = device.gid_index(gid)
        if index is None:
            raise NotFoundError(f"{text_of(gid)} is no address of {device.ctx.name} any more")
    except (NotFoundError, TimedOutError) as error:
        failed(error)
        return
    path = Path(peer.gid, index, traffic_class=cm_id.options.get(Option.TOS, 0))
    port = cm_id.source.port if cm_id.source is not None else 0
    cm_id.source = of_gid(gid, port) if port else _with_port(channel, cm_id, of_gid(gid, 0))
    cm_id.resolving = True
    try:
        device.agent.find(path, failed, found, min(PATIENCE, int(request["timeout_ms"]) / 1000))
    except DocaError as error:
        failed(error)


def _way(channel: Channel, cm_id: CmId, peer: Address) -> tuple[Device, bytes]:
    """Return the device and the own address for reaching a peer. NotFoundError if no device has an address for it."""
    if cm_id.device is not None and cm_id.source is not None:
        return cm_id.device, cm_id.source.gid
    found = channel.manager.devices.toward(peer.gid)
    if found is None:
        raise NotFoundError(f"no software NIC has an address from which {text_of(peer.gid)} is reached")
    return found


@command(Command.RESOLVE_ROUTE, ucma_abi.RESOLVE_ROUTE)
def resolve_route(channel: Channel, request: np.ndarray) -> None:
    """Report that the route is known: RoCE has no route to resolve."""
    cm_id = channel.get(request)
    if cm_id.path is None or cm_id.routed:
        raise Refused(errno.EINVAL, f"{cm_id} has a route already, or its address is not resolved")
    cm_id.routed = True
    channel.manager.add(Pending(cm_id, Event.ROUTE_RESOLVED))


@command(Command.QUERY_ROUTE, ucma_abi.QUERY, ucma_abi.QUERY_ROUTE_RESP.ibdev_index)
def query_route(channel: Channel, request: np.ndarray) -> bytes:
    """Return what is known of an identifier. The number of its device is left out: only netlink knows such numbers."""
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
        traffic_class=path.traffic_class, flow_label=path.flow_label, sl=path.sl, mtu_selector=_EXACTLY,
        mtu=MTU_CODES[port_mtu(device.ctx, PORT)],
    )


# --- options ---------------------------------------------------------------------------------------------------------

_OPTION_BYTES = {Option.TOS: 1, Option.REUSEADDR: 4, Option.AFONLY: 4, Option.ACK_TIMEOUT: 1}
_MOST_ACK_TIMEOUT = 31


@command(Command.SET_OPTION, ucma_abi.SET_OPTION)
def set_option(channel: Channel, request: np.ndarray) -> None:
    cm_id, level, name = channel.get(request), int(request["level"]), int(request["optname"])
    if level != Level.ID or name not in list(Option):
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
