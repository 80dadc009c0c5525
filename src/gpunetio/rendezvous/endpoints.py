"""Descriptions of queue pairs and memory, which processes send each other."""

from __future__ import annotations

from ..verbs import QpEndpoint
from .link import Message

_ADDRESS = (0, (1 << 63) - 1)


def endpoint_values(endpoint: QpEndpoint) -> dict[str, object]:
    """Return an endpoint as JSON values."""
    return {
        "qpn": endpoint.qpn, "gid": endpoint.gid.hex(), "lid": endpoint.lid, "mtu": endpoint.mtu, "psn": endpoint.psn,
    }


def endpoint_of(values: Message) -> QpEndpoint:
    """Return the endpoint that a peer's values describe."""
    gid = values.raw("gid", 16)
    if len(gid) != 16:
        raise values.wrong("gid", "16 bytes")
    return QpEndpoint(
        values.integer("qpn", 1, 0xFF_FFFF), gid, values.integer("lid", 0, 0xFFFF), values.integer("mtu", 256, 4096),
        values.integer("psn", 0, 0xFF_FFFF),
    )


def memory_of(values: Message) -> tuple[int, int, int]:
    """Return address, rkey and bytes of the peer's memory."""
    return (
        values.integer("address", *_ADDRESS), values.integer("rkey", 0, 0xFFFF_FFFF),
        values.integer("nbytes", 0, 1 << 62),
    )
