"""Services by address and port: the RDMA IP CM service (IBTA annex A11)."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.cm import IP_CM, PORT_SPACE_SHIFT, PortSpace
from ..formats.packet import IPV4_MAPPED

EPHEMERAL_PORTS = range(0xC000, 0x10000)  # RFC 6335: source ports of requests
_VERSION = 0
_ZEROS = bytes(len(IPV4_MAPPED))


@dataclass(frozen=True)
class IpHeader:
    """The header of a REQ's private data: source and destination. Addresses are GIDs."""

    source: bytes
    destination: bytes
    source_port: int

    def pack(self) -> bytes:
        """Pack the header into bytes."""
        if self.source.startswith(IPV4_MAPPED) and self.destination.startswith(IPV4_MAPPED):
            ip_version, source, destination = 4, _without_prefix(self.source), _without_prefix(self.destination)
        else:
            ip_version, source, destination = 6, self.source, self.destination
        return bytes(
            IP_CM.pack(
                version=_VERSION, ip_version=ip_version, source_port=self.source_port, source_address=source,
                destination_address=destination,
            )
        )

    @staticmethod
    def parse(private_data: bytes) -> IpHeader | None:
        """Return the header at the start of private data, or None if its version is unknown."""
        fields = IP_CM.unpack(private_data)
        if fields["version"] != _VERSION or fields["ip_version"] not in (4, 6):
            return None
        source, destination = fields["source_address"], fields["destination_address"]
        if fields["ip_version"] == 4:  # only the last four bytes are valid
            source, destination = IPV4_MAPPED + source[-4:], IPV4_MAPPED + destination[-4:]
        return IpHeader(source, destination, fields["source_port"])


def service_id(space: PortSpace, port: int) -> int:
    """Return the service ID of a port."""
    return space << PORT_SPACE_SHIFT | port


def _without_prefix(gid: bytes) -> bytes:
    return _ZEROS + gid[len(IPV4_MAPPED) :]
