"""The UDP wire: RoCEv2 packets through ordinary sockets, to anything that speaks RoCEv2 (IBTA annex A17).

Each address has one socket, which is bound to it and to port 4791, and not connected. Further sockets only send, from
the UDP source ports that queue pairs ask for. Nothing here needs privileges. The engine calls `transmit`, `receive` and
`check` with the address of the wire's UDP_WIRE record.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from ipaddress import IPv4Address, IPv6Address

import numpy as np

from ..errors import InUseError, InvalidValueError, NotSupportedError, OperatingSystemError
from ..formats.layout import Entry
from ..formats.packet import IPV4_MAPPED, ROCE_UDP_PORT
from ..memory import HostMemory, round_up
from .icrc import HEADER_ROOM
from .udp_receive import check, receive
from .udp_records import (
    DATAGRAM, DATAGRAMS, EGRESSES, GID_TABLE, GRO_CONTROL, GSO_OFF, GSO_ON, MAX_SEGMENTS, MAX_SENDERS, MAX_SOCKETS,
    MMSGHDR, RX_BUFFER, RX_MESSAGES, RX_SLOT, SOCKADDR_IN6, SOL_UDP, SOURCE, SOURCES, TX_MESSAGES, TX_SLOT, UDP_GRO,
    UDP_SOCKET, UDP_WIRE,
)
from .udp_transmit import transmit

__all__ = ["UdpWire", "check", "check_own", "gid_of", "receive", "transmit"]

Address = IPv4Address | IPv6Address

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork() -> None:
    """Close all sockets in a forked child: they are the parent's, and its addresses must be free when it ends."""
    for opened in list(_sockets):
        opened.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_after_fork)

RX_SOCKET_BUFFER, TX_SOCKET_BUFFER = 32 << 20, 4 << 20
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # socket(7): beyond the limits of sysctl, with CAP_NET_ADMIN
# linux/udp.h: take IPv6 datagrams without a UDP checksum. RoCEv2 senders leave it out because the ICRC protects more
# (annex A17.4.5). Our datagrams keep it, because the kernel refuses segmentation without it.
_UDP_NO_CHECK6_RX = 102
# linux/in6.h: take the flow label from sin6_flowinfo, and do not derive one from the ports (RFC 6437 3).
_IPV6_FLOWINFO_SEND, _IPV6_AUTOFLOWLABEL = 33, 70
_MTU_DISCOVER = {4: (socket.IPPROTO_IP, 10), 6: (socket.IPPROTO_IPV6, 23)}  # ip(7), ipv6(7)
_PMTUDISC_DO = 2
_LINE = 64
# A buffer starts 4 bytes after a multiple of 16, so that what follows the first packet's BTH is aligned. Buffers do not
# start at multiples of 64 KiB, where they would all compete for the same cache lines.
_BUFFER_STRIDE, _BUFFER_START = RX_BUFFER + 2 * _LINE, 4


def gid_of(address: Address) -> tuple[int, int]:
    """Return the GID of an address as the two words that records carry: plain loads of its 16 bytes."""
    raw = address.packed if address.version == 6 else IPV4_MAPPED + address.packed
    high, low = np.frombuffer(raw, np.int64)
    return int(high), int(low)


class UdpWire:
    """Sockets, buffers and the record that compiled code uses, at `address`; `record` is a view of it.

    `tx_end` is the address of the PIPE_END that `transmit` consumes. `gid_indices` are the addresses' indices in the
    GID table, by default 0, 1, … `gso=False` and `gro=False` turn the kernel's batching off.
    """

    addresses: tuple[Address, ...]
    record: np.void
    rows: np.ndarray
    datagrams: np.ndarray
    address: int

    def __init__(
        self,
        addresses: Sequence[Address],
        tx_end: int = 0,
        gid_indices: Sequence[int] | None = None,
        *,
        gso: bool = True,
        gro: bool = True,
    ):
        indices = list(range(len(addresses))) if gid_indices is None else list(gid_indices)
        _check(addresses, indices)
        self.addresses = tuple(addresses)
        self._sockets: list[socket.socket] = []
        self._ports: dict[int, tuple[int, int, socket.socket]] = {}  # by egress: index, port, its socket
        self._gso = gso
        try:
            for address in addresses:
                self._sockets.append(_open(address, ROCE_UDP_PORT, gro))
        except BaseException:
            self._close_sockets()
            raise
        self._lay_out(tx_end)
        for row, opened, address, index in zip(self.rows, self._sockets, addresses, indices, strict=True):
            self._describe(row, opened, address, index)
            self._socket_of[index] = row.__array_interface__["data"][0]
            # The kernel accepts one datagram more than fits.
            self.record["capacity"] += opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) + RX_BUFFER

    def _describe(self, row: np.void, opened: socket.socket, address: Address, index: int) -> None:
        """Fill a UDP_SOCKET."""
        row["fd"], row["version"], row["source"] = opened.fileno(), address.version, index
        row["gid_high"], row["gid_low"] = gid_of(address)
        row["scope"] = opened.getsockname()[3] if address.version == 6 else 0
        row["segments"], row["gso"] = (MAX_SEGMENTS, GSO_ON) if self._gso else (1, GSO_OFF)
        row["port"] = opened.getsockname()[1]

    def egress(self, index: int, port: int, used: Container[int], synchronize: Callable[[], None]) -> int:
        """Return the source for frames from the address of GID `index` and this UDP port.

        Each such pair has a socket of its own. If all sources are taken, one that is not in `used` is replaced.
        `synchronize` must return only once no thread is in `transmit`. InUseError if all sources or the port are used.
        """
        if port == ROCE_UDP_PORT:
            return index
        for egress, (has_index, has_port, _) in self._ports.items():
            if (has_index, has_port) == (index, port):
                return egress
        free = [egress for egress in range(GID_TABLE, EGRESSES) if egress not in self._ports]
        unused = free or [egress for egress in self._ports if egress not in used]
        if not unused:
            raise InUseError(f"all {MAX_SENDERS} UDP source ports are in use by queue pairs: choose one of theirs")
        at = next(i for i, row in enumerate(self.rows) if int(row["source"]) == index)
        opened = _open(self.addresses[at], port, False)
        egress, row = unused[0], self._senders[unused[0] - GID_TABLE]
        self._socket_of[egress] = 0
        synchronize()
        if egress in self._ports:
            self._ports[egress][2].close()
        self._describe(row, opened, self.addresses[at], index)
        self._ports[egress] = index, port, opened
        self._socket_of[egress] = row.__array_interface__["data"][0]
        return egress

    def _lay_out(self, tx_end: int) -> None:
        """Reserve all memory and point the records at it."""
        self._used = 0
        sizes = (
            UDP_WIRE.size, 8 * EGRESSES, (MAX_SOCKETS + MAX_SENDERS) * UDP_SOCKET.size, SOURCES * SOURCE.size,
            2 * HEADER_ROOM + _LINE,
            TX_MESSAGES * (MMSGHDR.size + TX_SLOT.size), RX_MESSAGES * (MMSGHDR.size + RX_SLOT.size + _BUFFER_STRIDE),
            DATAGRAMS * DATAGRAM.size,
        )
        self._memory = HostMemory(sum(sizes) + 16 * _LINE)
        self.record = self._take(UDP_WIRE, 1)[0]
        self.rows = self._take(UDP_SOCKET, MAX_SOCKETS)[: len(self.addresses)]
        self.datagrams = self._take(DATAGRAM, DATAGRAMS)
        self._senders = self._take(UDP_SOCKET, MAX_SENDERS)
        self._socket_of = self._memory.view(np.int64, self._reserve(8 * EGRESSES), EGRESSES)
        self.address = self._memory.address
        record = self.record
        record["tx"] = tx_end
        record["sockets"], record["socket_count"] = _at(self.rows), len(self.rows)
        record["socket_of"], record["datagrams"] = _at(self._socket_of), _at(self.datagrams)
        record["sources"] = _at(self._take(SOURCE, SOURCES))
        record["tx_scratch"] = self.address + self._reserve(HEADER_ROOM)
        record["rx_scratch"] = self.address + self._reserve(HEADER_ROOM)

        vector, slots = self._take(MMSGHDR, TX_MESSAGES), self._take(TX_SLOT, TX_MESSAGES)
        record["tx_vector"], record["tx_slots"] = _at(vector), _at(slots)
        _point(vector, slots, TX_SLOT)

        vector, slots = self._take(MMSGHDR, RX_MESSAGES), self._take(RX_SLOT, RX_MESSAGES)
        record["rx_vector"], record["rx_share"] = _at(vector), RX_MESSAGES // len(self.rows)
        _point(vector, slots, RX_SLOT)
        vector["name_length"], vector["control_length"], vector["iov_length"] = SOCKADDR_IN6.size, GRO_CONTROL, 1
        buffers = self.address + self._reserve(RX_MESSAGES * _BUFFER_STRIDE) + _BUFFER_START
        slots["iov"][:, 0] = buffers + _BUFFER_STRIDE * np.arange(RX_MESSAGES)
        slots["iov"][:, 1] = RX_BUFFER

    def _reserve(self, nbytes: int) -> int:
        offset = self._used
        self._used += round_up(nbytes, _LINE)
        return offset

    def _take(self, entry: Entry, count: int) -> np.ndarray:
        return self._memory.view(entry.dtype, self._reserve(entry.size * count), count)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of the sockets, to wait on, in the order of the addresses."""
        return tuple(opened.fileno() for opened in self._sockets)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._memory.closed

    def close(self) -> None:
        """Close the sockets and free the memory. No thread may be in `transmit` or `receive`."""
        self._close_sockets()
        self._memory.close()

    def _close_sockets(self) -> None:
        for opened in (*self._sockets, *(opened for _, _, opened in self._ports.values())):
            opened.close()
        self._sockets, self._ports = [], {}

    def __enter__(self) -> UdpWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _point(vector: np.ndarray, slots: np.ndarray, slot: Entry) -> None:
    """Make each message header point to its slot."""
    starts = _at(slots) + slot.size * np.arange(len(slots))
    vector["name"], vector["control"], vector["iov"] = starts + slot.name, starts + slot.control, starts + slot.iov


def _check(addresses: Sequence[Address], indices: Sequence[int]) -> None:
    if sys.platform != "linux" or sys.byteorder != "little":
        raise NotSupportedError("the UDP wire needs Linux on a little-endian machine")
    if not 1 <= len(addresses) <= MAX_SOCKETS:
        raise InvalidValueError(f"a UDP wire has 1 to {MAX_SOCKETS} addresses, not {len(addresses)}")
    if len(indices) != len(addresses) or len(set(indices)) != len(indices):
        raise InvalidValueError(f"{len(addresses)} addresses need as many different GID indices, not {list(indices)}")
    for index in indices:
        if not 0 <= index < GID_TABLE:
            raise InvalidValueError(f"GID index {index} is not in 0 … {GID_TABLE - 1}")
    for address in addresses:
        if address.is_unspecified or address.is_multicast:
            raise InvalidValueError(
                f"{address} cannot be a GID: give one of this machine's own unicast addresses (`ip address` lists them)"
            )
        if address.version == 6 and address.ipv4_mapped is not None:
            raise InvalidValueError(f"{address} is an IPv4 address: give it as IPv4Address('{address.ipv4_mapped}')")


def check_own(address: Address) -> None:
    """Raise InvalidValueError unless the address is one of this machine's, so that a UDP wire can have it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(str(address), 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError as error:
        raise _explained(error, address, ROCE_UDP_PORT) from error


def _open(address: Address, port: int, gro: bool) -> socket.socket:
    """Return a socket that is bound to an address and a port."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        opened = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise NotSupportedError(f"this system has no IPv{address.version} sockets: {error}") from error
    _sockets.add(opened)
    try:
        opened.setsockopt(*_MTU_DISCOVER[address.version], _PMTUDISC_DO)
        if address.version == 6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.setsockopt(SOL_UDP, _UDP_NO_CHECK6_RX, 1)
            opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_FLOWINFO_SEND, 1)
            opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_AUTOFLOWLABEL, 0)
        _set_buffer(opened, _SO_RCVBUFFORCE, socket.SO_RCVBUF, RX_SOCKET_BUFFER)
        _set_buffer(opened, _SO_SNDBUFFORCE, socket.SO_SNDBUF, TX_SOCKET_BUFFER)
        if gro:
            _try_gro(opened)
        opened.bind(socket.getaddrinfo(str(address), port, family, socket.SOCK_DGRAM)[0][4])
    except OSError as error:
        opened.close()
        raise _explained(error, address, port) from error
    return opened


def _set_buffer(opened: socket.socket, force: int, plain: int, nbytes: int) -> None:
    try:
        opened.setsockopt(socket.SOL_SOCKET, force, nbytes)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, plain, nbytes)  # at most net.core.rmem_max or wmem_max


def _try_gro(opened: socket.socket) -> None:
    try:
        opened.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # Linux before 5.0
            raise


def _explained(error: OSError, address: Address, port: int) -> Exception:
    where = f"{address} port {port}"
    if error.errno == errno.EADDRINUSE:
        return InUseError(
            f"UDP {where} is taken by another RoCEv2 program or by the kernel's rdma_rxe. Close that "
            f"(`ss -lunp 'sport = :{port}'` names it, `rdma link` shows rxe), or use another address of this "
            "machine"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENODEV, socket.EAI_NONAME):
        scope = " (a link-local address needs its interface: fe80::1%eth0)" if address.is_link_local else ""
        return InvalidValueError(
            f"cannot bind to UDP {where}: {address} is not an address of this machine{scope}. `ip address` lists its "
            "addresses; one that was just added to an interface without carrier is not ready yet"
        )
    return OperatingSystemError(error.errno, f"cannot open a UDP socket on {where}: {error.strerror}")
