"""Network interfaces of this machine, in the network namespace of the calling thread (netdevice(7))."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCGIFMTU, _SIOCSIFMTU = 0x8913, 0x8914, 0x8921, 0x8922
_IFF_UP = 1
_REQUEST = "16sh22x"  # struct ifreq with 16 bits of flags
_REQUEST_MTU = "16si20x"

# How to get the rights without being root.
RECIPE = "`unshare -Urn` opens a shell in a network namespace of its own, where every user has them"


def exists(name: str) -> bool:
    """Return whether there is an interface of this name."""
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def mtu_of(name: str) -> int:
    """Return the MTU of an interface in bytes. OSError if there is no such interface."""
    return struct.unpack(_REQUEST_MTU, _ask(_SIOCGIFMTU, struct.pack(_REQUEST_MTU, name.encode(), 0)))[1]


def set_mtu(name: str, nbytes: int) -> None:
    """Set the MTU of an interface. OSError if that is not possible."""
    _ask(_SIOCSIFMTU, struct.pack(_REQUEST_MTU, name.encode(), nbytes))


def is_up(name: str) -> bool:
    """Return whether an interface is up. OSError if there is no such interface."""
    return bool(_flags(name) & _IFF_UP)


def set_up(name: str) -> None:
    """Set an interface up. OSError if that is not possible."""
    _ask(_SIOCSIFFLAGS, struct.pack(_REQUEST, name.encode(), _flags(name) | _IFF_UP))


def _flags(name: str) -> int:
    return struct.unpack(_REQUEST, _ask(_SIOCGIFFLAGS, struct.pack(_REQUEST, name.encode(), 0)))[1]


def _ask(call: int, request: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, call, request)
