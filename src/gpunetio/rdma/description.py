"""The description of one end of a connection, as opaque bytes for the other end."""

from __future__ import annotations

import zlib

from ..enums import QpType
from ..errors import InvalidValueError, NotSupportedError
from ..formats.rdma_device import CONNECTION_EXPORT, CONNECTION_EXPORT_MAGIC, CONNECTION_EXPORT_VERSION
from ..memory import BytesLike
from ..verbs import QpEndpoint

_LIMITS = {"qpn": (1, 0xFF_FFFF), "lid": (0, 0xFFFF), "mtu": (256, 4096), "psn": (0, 0xFF_FFFF)}


def describe(endpoint: QpEndpoint) -> bytes:
    """Return the description of an endpoint."""
    row = CONNECTION_EXPORT.pack(
        magic=CONNECTION_EXPORT_MAGIC, version=CONNECTION_EXPORT_VERSION, transport=int(QpType.RC), qpn=endpoint.qpn,
        gid=endpoint.gid, lid=endpoint.lid, mtu=endpoint.mtu, psn=endpoint.psn,
    )
    return row[: CONNECTION_EXPORT.checksum] + _checksum(row)


def endpoint_of(description: BytesLike) -> QpEndpoint:
    """Return the endpoint that a peer's bytes describe. InvalidValueError unless they are a complete description."""
    raw = bytes(description)
    if len(raw) != CONNECTION_EXPORT.size:
        raise InvalidValueError(f"{len(raw)} bytes describe no connection: export() returns {CONNECTION_EXPORT.size}")
    row = CONNECTION_EXPORT.at(raw)
    if row["magic"] != CONNECTION_EXPORT_MAGIC:
        raise InvalidValueError(f"these bytes describe no connection: they begin with {raw[:4].hex()}")
    if row["version"] != CONNECTION_EXPORT_VERSION:
        raise InvalidValueError(
            f"a connection of version {row['version']}: this gpunetio reads version {CONNECTION_EXPORT_VERSION}; use "
            "the same gpunetio at both ends"
        )
    if raw[CONNECTION_EXPORT.checksum :] != _checksum(raw):
        raise InvalidValueError("the description of the connection was damaged on its way: its checksum is wrong")
    if row["transport"] != QpType.RC:
        raise NotSupportedError(f"the peer's transport has number {row['transport']}: both ends must use RC")
    for name, (least, most) in _LIMITS.items():
        if not least <= int(row[name]) <= most:
            raise InvalidValueError(f"a connection with {name} {row[name]}: it must be {least} to {most}")
    return QpEndpoint(
        int(row["qpn"]), row["gid"].tobytes(), int(row["lid"]), int(row["mtu"]), int(row["psn"])
    )


def _checksum(raw: bytes) -> bytes:
    return zlib.crc32(raw[: CONNECTION_EXPORT.checksum]).to_bytes(4, "big")
