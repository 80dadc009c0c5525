"""librdmacm, loaded on first use: the kernel's connection manager, for queue pairs not created by librdmacm.

GPUNETIO_LIBRDMACM names a file to load instead of the system's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import socket
import struct
from ctypes import POINTER, byref, c_char_p, c_int, cast
from ctypes import c_void_p as void_p
from typing import TYPE_CHECKING, NamedTuple

from ...errors import DocaError, InUseError, NotFoundError, NotSupportedError
from ...formats.packet import IPV4_MAPPED
from . import rdmacm_structs as r
from .errors import errno_of, refused
from .libraries import Function, Library
from .structs import ibv_qp_attr

if TYPE_CHECKING:
    from .structs import Pointer

_id, _channel, _event = POINTER(r.rdma_cm_id), POINTER(r.rdma_event_channel), POINTER(r.rdma_cm_event)
_param = POINTER(r.rdma_conn_param)
_V = "RDMACM_1."
_RDMACM = {
    "rdma_create_event_channel":  Function(f"{_V}0", _channel, ()),
    "rdma_destroy_event_channel": Function(f"{_V}0", None,  (_channel,)),
    "rdma_create_id":             Function(f"{_V}0", c_int, (_channel, POINTER(_id), void_p, c_int)),
    "rdma_destroy_id":            Function(f"{_V}0", c_int, (_id,)),
    "rdma_migrate_id":            Function(f"{_V}0", c_int, (_id, _channel)),
    "rdma_bind_addr":             Function(f"{_V}0", c_int, (_id, c_char_p)),
    "rdma_listen":                Function(f"{_V}0", c_int, (_id, c_int)),
    "rdma_resolve_addr":          Function(f"{_V}0", c_int, (_id, c_char_p, c_char_p, c_int)),
    "rdma_resolve_route":         Function(f"{_V}0", c_int, (_id, c_int)),
    "rdma_init_qp_attr":          Function(f"{_V}2", c_int, (_id, POINTER(ibv_qp_attr), POINTER(c_int))),
    "rdma_connect":               Function(f"{_V}0", c_int, (_id, _param)),
    "rdma_accept":                Function(f"{_V}0", c_int, (_id, _param)),
    "rdma_establish":             Function(f"{_V}2", c_int, (_id,)),
    "rdma_reject":                Function(f"{_V}0", c_int, (_id, c_char_p, ctypes.c_uint8)),
    "rdma_disconnect":            Function(f"{_V}0", c_int, (_id,)),
    "rdma_get_cm_event":          Function(f"{_V}0", c_int, (_channel, POINTER(_event))),
    "rdma_ack_cm_event":          Function(f"{_V}0", c_int, (_event,)),
}


@functools.cache
def librdmacm() -> Library:
    """Return librdmacm."""
    return Library("librdmacm.so.1", "GPUNETIO_LIBRDMACM", "librdmacm1", _RDMACM)


class CmEvent(NamedTuple):
    """An event: a type from `rdmacm_structs`, its status, and its data.

    `number` is that of the id. For a CONNECT_REQUEST, it is a new id, and `listener` is the number of the listening id.
    """

    type: int
    status: int
    number: int
    listener: int
    private_data: bytes
    responder_resources: int
    initiator_depth: int


class CmChannel:
    """An `rdma_event_channel`. `fd` is readable while events wait."""

    fd: int

    def __init__(self) -> None:
        self._lib = librdmacm()
        self.pointer: Pointer[r.rdma_event_channel] = self._lib.rdma_create_event_channel()
        if not self.pointer:
            raise NotSupportedError(
                f"rdma_create_event_channel: {os.strerror(ctypes.get_errno())}: the kernel has no RDMA connection "
                "manager: load rdma_ucm"
            )
        self.fd = self.pointer.contents.fd
        os.set_blocking(self.fd, False)

    def close(self) -> None:
        """Destroy the channel. All its ids must be destroyed before."""
        self._lib.rdma_destroy_event_channel(self.pointer)

    def get(self) -> CmEvent | None:
        """Return the next event, already acknowledged, or None."""
        pointer = _event()
        if code := self._lib.rdma_get_cm_event(self.pointer, byref(pointer)):
            if errno_of(code) in _NOTHING:
                return None
            raise refused("rdma_get_cm_event", errno_of(code))
        event, conn = pointer.contents, pointer.contents.conn
        private_data = ctypes.string_at(conn.private_data, conn.private_data_len) if conn.private_data else b""
        found = CmEvent(
            event.event, event.status, _number(event.id), _number(event.listen_id), private_data,
            conn.responder_resources, conn.initiator_depth,
        )
        self._lib.rdma_ack_cm_event(pointer)
        return found


class CmId:
    """An `rdma_cm_id` for connections. `number` identifies it in events."""

    number: int

    def __init__(self, channel: CmChannel, number: int = 0):
        """Create an id, or take over the id `number` of a CONNECT_REQUEST."""
        self._lib = librdmacm()
        self._pointer: Pointer[r.rdma_cm_id] = cast(number, _id) if number else _id()
        if not number:
            made = self._lib.rdma_create_id(channel.pointer, byref(self._pointer), None, r.RDMA_PS_TCP)
            self._check("rdma_create_id", made)
        self.number = _number(self._pointer)

    def close(self) -> None:
        """Destroy the id. The kernel notifies the peer of an open connection or request."""
        self._lib.rdma_destroy_id(self._pointer)

    @property
    def device(self) -> str | None:
        """Return the name of the device that owns the id's address, or None before that is known."""
        verbs = self._pointer.contents.verbs
        return os.fsdecode(verbs.contents.device.contents.name) if verbs else None

    @property
    def peer(self) -> tuple[bytes, int]:
        """Return the peer's GID and port."""
        return _address_of(bytes(self._pointer.contents.route.addr.dst_storage))

    # --- calls -------------------------------------------------------------------------------------------------------

    def listen(self, gid: bytes, port: int, backlog: int) -> None:
        """Listen at an address and port."""
        self._call("rdma_bind_addr", _sockaddr(gid, port))
        self._call("rdma_listen", backlog)

    def resolve_address(self, own: bytes, peer: bytes, port: int, timeout: float) -> None:
        """Resolve the peer's address, from one of this machine's. The event ADDR_RESOLVED or ADDR_ERROR follows."""
        self._call("rdma_resolve_addr", _sockaddr(own, 0), _sockaddr(peer, port), _milliseconds(timeout))

    def resolve_route(self, timeout: float) -> None:
        """Resolve the route. The event ROUTE_RESOLVED or ROUTE_ERROR follows."""
        self._call("rdma_resolve_route", _milliseconds(timeout))

    def attributes(self, state: int) -> ibv_qp_attr:
        """Return the attributes for the queue pair's transition to an `ibv_qp_state`."""
        attr, mask = ibv_qp_attr(qp_state=state), c_int()
        self._call("rdma_init_qp_attr", byref(attr), byref(mask))
        return attr

    def connect(self, param: r.rdma_conn_param) -> None:
        """Request the connection. CONNECT_RESPONSE, REJECTED, UNREACHABLE or CONNECT_ERROR follows."""
        self._call("rdma_connect", byref(param))

    def accept(self, param: r.rdma_conn_param) -> None:
        """Accept a request. ESTABLISHED or CONNECT_ERROR follows."""
        self._call("rdma_accept", byref(param))

    def establish(self) -> None:
        """Confirm the connection after CONNECT_RESPONSE."""
        self._call("rdma_establish")

    def reject(self, private_data: bytes) -> None:
        """Refuse a request."""
        self._call("rdma_reject", private_data, len(private_data))

    def disconnect(self) -> None:
        """Disconnect. The event DISCONNECTED follows."""
        self._call("rdma_disconnect")

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._lib, name)(self._pointer, *arguments))

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code:
            raise _refused(name, errno_of(code))


def conn_param(
    private_data: bytes, responder_resources: int, initiator_depth: int, qpn: int, srq: bool, retry_count: int,
    rnr_retry_count: int,
) -> r.rdma_conn_param:
    """Return the parameters for `connect` and `accept`. The structure keeps the private data alive."""
    data = ctypes.create_string_buffer(private_data, len(private_data))
    param = r.rdma_conn_param(
        private_data=ctypes.addressof(data), private_data_len=len(private_data),
        responder_resources=responder_resources, initiator_depth=initiator_depth, retry_count=retry_count,
        rnr_retry_count=rnr_retry_count, srq=srq, qp_num=qpn,
    )
    param.kept = data
    return param


def _number(pointer: Pointer[r.rdma_cm_id]) -> int:
    return cast(pointer, void_p).value or 0


_NOTHING = (errno.EAGAIN, errno.EINTR)
_LONGEST_MS = 3_600_000
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct(">H")


def _refused(name: str, code: int) -> DocaError:
    if code == errno.EADDRINUSE:
        return InUseError(f"{name}: another program listens at this address and port: choose another port")
    if code in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return NotFoundError(
            f"{name}: no RDMA device of this machine has that address, or another program listens at this port of all "
            f"addresses ({os.strerror(code)})"
        )
    if code in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return NotFoundError(f"{name}: there is no way to the peer ({os.strerror(code)}): check with a ping")
    return refused(name, code)


def _sockaddr(gid: bytes, port: int) -> bytes:
    """Pack a GID and port as a `sockaddr_in` or `sockaddr_in6`."""
    if gid.startswith(IPV4_MAPPED):
        return _FAMILY.pack(socket.AF_INET) + _PORT.pack(port) + gid[len(IPV4_MAPPED) :] + bytes(8)
    return _FAMILY.pack(socket.AF_INET6) + _PORT.pack(port) + bytes(4) + gid + bytes(4)


def _address_of(storage: bytes) -> tuple[bytes, int]:
    """Return the GID and port of a `sockaddr_storage`."""
    (family,), (port,) = _FAMILY.unpack_from(storage), _PORT.unpack_from(storage, 2)
    return (IPV4_MAPPED + storage[4:8] if family == socket.AF_INET else storage[8:24]), port


def _milliseconds(timeout: float) -> int:
    return max(1, min(round(1000 * timeout), _LONGEST_MS))
