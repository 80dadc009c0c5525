"""The frames that samples send."""

from __future__ import annotations

from ipaddress import IPv4Address

from ..errors import InvalidValueError
from ..formats.packet import ETHER_TYPE_IPV4, ETHERNET, IP_PROTOCOL_UDP, IPV4, UDP

DESTINATION, SOURCE = bytes(range(0x10, 0x16)), bytes(range(0x20, 0x26))  # the original's MACs
# From the block for documentation (RFC 5737), to the discard port (RFC 863).
_ADDRESSES = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
_SOURCE_PORT, _DISCARD = 49152, 9
_VERSION_IHL, _TTL = 0x45, 64
HEADERS = ETHERNET.size + IPV4.size + UDP.size


def frame(nbytes: int, payload: bytes = b"", original: bool = False) -> bytes:
    """Return an Ethernet frame of `nbytes` bytes without its check sequence: an IPv4 header, UDP, `payload`, zeros.

    The checksums are 0, because the NIC computes them. With `original`, zeros follow the EtherType, as in DOCA's
    sample. InvalidValueError if `nbytes` is too small.
    """
    least = (ETHERNET.size if original else HEADERS) + len(payload)
    if nbytes < least:
        cure = "" if original else ", or --original-frame"
        raise InvalidValueError(f"a frame of {nbytes} bytes is too short for its headers: give {least} or more{cure}")
    made = ETHERNET.pack(destination=DESTINATION, source=SOURCE, ether_type=ETHER_TYPE_IPV4)
    if not original:
        made += IPV4.pack(
            version_ihl=_VERSION_IHL, total_length=nbytes - ETHERNET.size, ttl=_TTL, protocol=IP_PROTOCOL_UDP,
            source=_ADDRESSES[0].packed, destination=_ADDRESSES[1].packed,
        )
        made += UDP.pack(
            source_port=_SOURCE_PORT, destination_port=_DISCARD, length=nbytes - ETHERNET.size - IPV4.size
        )
    return (made + payload).ljust(nbytes, b"\0")
