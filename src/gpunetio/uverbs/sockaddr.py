"""Socket addresses as programs pass them: struct sockaddr_in and sockaddr_in6 (<netinet/in.h>)."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, replace

from ..formats.layout import Entry
from ..formats.packet import IPV4_MAPPED
from .call import Refused

IN6 = Entry("sockaddr_in6", 28, """
    sin6_family    0  u16
    sin6_port      2  be16
    sin6_flowinfo  4  u32
    sin6_addr      8  raw[16]
    sin6_scope_id 24  u32
""")
IN = Entry("sockaddr_in", 16, """
    sin_family 0  u16
    sin_port   2  be16
    sin_addr   4  raw[4]
""")
SIZES = {socket.AF_INET: IN.size, socket.AF_INET6: IN6.size}


@dataclass(frozen=True)
class Address:
    """An IP address, as a GID, and a port. Port 0 means none yet."""

    family: int
    gid: bytes
    port: int = 0

    @property
    def wildcard(self) -> bool:
        """Return whether it means any address of this machine."""
        return self.gid in (bytes(16), IPV4_MAPPED + bytes(4))

    def with_port(self, port: int) -> Address:
        """Return this address with another port."""
        return replace(self, port=port)

    def overlaps(self, other: Address) -> bool:
        """Return whether a peer could mean either address, given that IPv6's wildcard also takes IPv4."""
        return self.gid == other.gid or self.wildcard or other.wildcard

    def pack(self) -> bytes:
        """Return the structure, with zeros up to the size of sockaddr_in6."""
        if self.family == socket.AF_INET:
            packed = IN.pack(sin_family=self.family, sin_port=self.port, sin_addr=self.gid[-4:])
        else:
            packed = IN6.pack(sin6_family=self.family, sin6_port=self.port, sin6_addr=self.gid)
        return packed.ljust(IN6.size, b"\0")


def family_of(gid: bytes) -> int:
    """Return the family of a GID's address."""
    return socket.AF_INET if gid.startswith(IPV4_MAPPED) else socket.AF_INET6


def of_gid(gid: bytes, port: int) -> Address:
    """Return the address that a GID means."""
    return Address(family_of(gid), gid, port)


def parse(raw: bytes) -> Address | None:
    """Return an address, or None if its family is unspecified. Refused with EAFNOSUPPORT unless it is IPv4 or IPv6."""
    family = int.from_bytes(raw[:2], "little")
    if family == socket.AF_UNSPEC:
        return None
    if family == socket.AF_INET:
        found = IN.at(raw)
        return Address(family, IPV4_MAPPED + found["sin_addr"].tobytes(), int(found["sin_port"]))
    if family == socket.AF_INET6:
        found = IN6.at(raw)
        return Address(family, found["sin6_addr"].tobytes(), int(found["sin6_port"]))
    raise Refused(errno.EAFNOSUPPORT, f"addresses of family {family} are not supported: IPv4 and IPv6 are")
