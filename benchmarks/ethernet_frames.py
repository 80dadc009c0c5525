"""Frames of UDP over IPv4 for benchmarks: of many flows, or of one."""

from __future__ import annotations

import random
from typing import Any

from gpunetio.fabric.ip_headers import internet_checksum

FIELDS = ("src_ipv4_src_ipv6", "dst_ipv4_dst_ipv6", "udp_sport", "udp_dport")
UDP_PORT = 4000


def flows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Different addresses and ports."""
    draw = random.Random(seed)
    return [
        {
            name: bytes(12) + b"\x0a" + draw.randbytes(3) if "ip" in name else draw.randrange(1024, 1 << 16)
            for name in FIELDS
        }
        for _ in range(count)
    ]


def frame_of(values: dict[str, Any], nbytes: int) -> bytes:
    """A frame of UDP over IPv4; what it carries has no checksum."""
    source, destination, *ports = (values[name] for name in FIELDS)
    head = bytes.fromhex("4500") + (nbytes - 14).to_bytes(2, "big") + bytes.fromhex("0000400040110000")
    head += source[12:] + destination[12:]
    head = head[:10] + internet_checksum(head).to_bytes(2, "big") + head[12:]
    udp = b"".join(port.to_bytes(2, "big") for port in ports) + (nbytes - 34).to_bytes(2, "big") + bytes(2)
    return (bytes.fromhex("0200000000020200000000010800") + head + udp).ljust(nbytes, b"x")


def packet_of(to: bytes, source: bytes, nbytes: int) -> bytes:
    """A frame from one MAC to another, to UDP_PORT."""
    value = {name: bytes(12) + b"\x0a\0\0\1" if "ip" in name else UDP_PORT for name in FIELDS}
    return to + source + frame_of(value, nbytes)[12:]
