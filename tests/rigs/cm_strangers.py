"""Strangers to the connection manager of a NIC: hand-made frames with scapy's ICRC, and their contents."""

from __future__ import annotations

import itertools
import struct
from ipaddress import IPv4Address

from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from gpunetio.cm.active import request_of
from gpunetio.cm.communication import Terms
from gpunetio.cm.ip_service import IpHeader, service_id
from gpunetio.cm.messages import pack
from gpunetio.cm.path import Path
from gpunetio.cm.times import LINUX
from gpunetio.formats.cm import Attribute, PortSpace
from gpunetio.formats.packet import IPV4_MAPPED

_UD_SEND_ONLY, _DETH = 0x64, struct.Struct(">II")
_numbers = itertools.count(1)


def gid_of(address: str) -> bytes:
    return IPV4_MAPPED + IPv4Address(address).packed


def req(source: str, destination: str, port: int) -> bytes:
    """A valid REQ, each of a connection of its own."""
    number = next(_numbers)
    path, here = Path(gid_of(destination)), gid_of(source)
    header = IpHeader(here, path.gid, 0xC000 + number % 0x4000).pack()
    fields = request_of(Terms(qpn=number, psn=number), LINUX, service_id(PortSpace.TCP, port), path, here)
    return pack(Attribute.REQ, number, header, local_comm_id=number, local_ca_guid=0xBAD, **fields)


def frame(mad: bytes, source: str, destination: str, macs: tuple[str, str]) -> bytes:
    """A frame that carries a datagram from queue pair 1 to queue pair 1. `macs` are the sender's and the receiver's."""
    ip = IP(src=source, dst=destination, flags="DF")
    bth = BTH(opcode=_UD_SEND_ONLY, dqpn=1, pkey=0xFFFF)
    datagram = _DETH.pack(0x8001_0000, 1) + mad
    return bytes(Ether(src=macs[0], dst=macs[1]) / ip / UDP(sport=0xC001, dport=4791) / bth / Raw(datagram))
