"""A wire through a network interface of this machine, with a packet socket (packet(7)).

The port has its own MAC and addresses, so the interface is promiscuous while the wire is open. The NIC and the kernel
share the interface, but frames from one do not reach the other.
"""

from __future__ import annotations

import socket
import struct

from ...errors import InvalidValueError, NotFoundError, NotPermittedError
from ...fabric import interface
from ...fabric.ethernet_records import PACKET_AUXDATA, SOCKET, SOL_PACKET
from .descriptor import Ethernet

_ETH_P_ALL, _ARPHRD_ETHER = 0x0003, 1
_ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING, _MR_PROMISC = 1, 15, 23, 1
_BUFFER = 4 << 20  # bytes, if net.core.rmem_max allows


class PacketSocket(Ethernet):
    """The Ethernet that a network interface is attached to."""

    reading: int = SOCKET
    offloads: bool = True

    def attach(self) -> socket.socket:
        name = self.interface
        if not interface.exists(name):
            raise NotFoundError(f"wire {self.name}: there is no interface {name}: `ip link` lists them")
        try:
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except PermissionError:
            raise NotPermittedError(
                f"wire {self.name}: a packet socket takes CAP_NET_RAW. Run the program as root, or where you are: "
                f"{interface.RECIPE}"
            ) from None
        except OSError as error:
            raise self.os_error(error, "open a packet socket") from None
        try:
            self.check_interface()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            sock.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
            sock.setsockopt(SOL_PACKET, _VNET_HDR, 1)
            sock.setsockopt(SOL_PACKET, _IGNORE_OUTGOING, 1)
            sock.bind((name, _ETH_P_ALL))
            if sock.getsockname()[3] != _ARPHRD_ETHER:
                raise InvalidValueError(
                    f"wire {self.name}: {name} is no Ethernet, as a veth, a bridge or a card's interface is"
                )
            membership = struct.pack("iHH8x", socket.if_nametoindex(name), _MR_PROMISC, 0)
            sock.setsockopt(SOL_PACKET, _ADD_MEMBERSHIP, membership)
        except OSError as error:
            sock.close()
            raise self.os_error(error, f"use the interface {name}") from None
        except BaseException:
            sock.close()
            raise
        return sock


make = PacketSocket
