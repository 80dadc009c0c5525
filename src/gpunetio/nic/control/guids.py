"""GUIDs (EUI-64), which identify NICs and ports to peers and programs."""

from __future__ import annotations

from hashlib import blake2b

from ..engine.port import Port

_EUI_64 = 8  # bytes
_GROUP_BIT, _LOCAL_BIT = 1 << 56, 1 << 57  # of a locally administered EUI-64


def port_guid_of(port: Port) -> int:
    """Return the port GUID, an EUI-64 of the port's MAC."""
    return int.from_bytes(port.mac[:3] + b"\xff\xfe" + port.mac[3:], "big")


def node_guid_of(port: Port) -> int:
    """Return the node GUID, which is also the system image GUID. No two NICs that may communicate have the same.

    It is the port GUID, unless the port's first address is IPv6, because a MAC contains only 4 of the address's 16
    bytes. Peers identify the NIC of a connection by this GUID (IBTA 12.7, Local CA GUID).
    """
    address = port.addresses[0]
    if address.version == 4:
        return port_guid_of(port)
    digest = blake2b(address.packed, digest_size=_EUI_64).digest()
    return int.from_bytes(digest, "big") & ~_GROUP_BIT | _LOCAL_BIT
