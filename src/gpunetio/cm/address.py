"""Conversion between GIDs and addresses as programs write them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from ..arguments import instance, within
from ..errors import InvalidValueError, NotFoundError
from ..formats.packet import IPV4_MAPPED
from ..verbs.context import Context
from ..verbs.pd import PD

_LAST_PORT = 0xFFFF


def gid_of(address: str | IPv4Address | IPv6Address) -> bytes:
    """Convert an address to a GID. IPv4 becomes ::ffff:a.b.c.d; a GID can be written as an IPv6 address."""
    try:
        found = ip_address(address)
    except ValueError:
        raise InvalidValueError(f"address = {address!r} is not an IPv4 or IPv6 address") from None
    return IPV4_MAPPED + found.packed if isinstance(found, IPv4Address) else found.packed


def text_of(gid: bytes) -> str:
    """Convert a GID to an address, as text."""
    return str(IPv4Address(gid[len(IPV4_MAPPED) :]) if gid.startswith(IPV4_MAPPED) else IPv6Address(gid))


def own_gid(ctx: Context, port_num: int, gid_index: int) -> bytes:
    """Return the GID at an index of this end's GID table. NotFoundError if the entry is empty."""
    gid = ctx.query_gid(port_num, gid_index)
    if not any(gid):
        raise NotFoundError(
            f"port {port_num} of {ctx.name} has no GID at index {gid_index}: choose one that `gpunetio devices -v` "
            "shows, or give the port's interface an address"
        )
    return bytes(gid)


def context_of(where: Context | PD) -> Context:
    """Return the context given to `listen` or `resolve`, or the context of the given PD."""
    return instance("where", where, Context, PD).ctx


def check_port(port: int) -> int:
    """Return the port of a service. InvalidValueError unless it is from 1 to 65535."""
    return within("port", port, 1, _LAST_PORT)
