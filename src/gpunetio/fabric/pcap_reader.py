"""Read capture files of pcap.py or other programs: their Ethernet frames, and their RoCE v2 or InfiniBand packets.

A file in libpcap's format with Ethernet frames, or with InfiniBand records of ERF, is read as it is. Other files are
converted to that format on the fly (capture_formats.py).
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from ..errors import InvalidValueError, OperatingSystemError
from ..formats.layout import Entry
from ..formats.packet import (
    BTH, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, ETHERNET, GRH, ICRC_SIZE, IP_PROTOCOL_UDP, IPV4, IPV4_MAPPED, IPV6,
    LNH_GLOBAL, LRH, ROCE_UDP_PORT, UDP,
)
from .capture_formats import (
    FILE_HEADER, LARGEST_RECORD, MAGICS, Converted, ends_early, is_plain, split_link_word, too_large,
)
from .pcap import ERF_HEADER, ERF_INFINIBAND, LINKTYPE_ERF, infiniband_icrc

_VLAN_TAGS = (0x8100, 0x88A8)
_ERF_TYPE_MASK, _ERF_EXTENSION = 0x7F, 0x80
_VCRC_SIZE = 2
_ONES = b"\xff" * 8

# The header of a record: its time, the bytes in the file, and the bytes that the packet had.
RECORD = Entry("pcap_record", 16, """
    seconds    0  u32
    fraction   4  u32
    captured   8  u32
    whole     12  u32
""")

# Why a record holds no packet that can be replayed.
CUT_SHORT, NOT_ROCE, NOT_INFINIBAND = "cut short", "not RoCE v2", "not InfiniBand"

Address = IPv4Address | IPv6Address | int


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet of a capture file, from `source` to `destination`: IP addresses or, on InfiniBand, LIDs.

    `data` runs from the BTH, on InfiniBand from the LRH, to the padding. `bth` is where the BTH begins. `gid` is the
    sender's. `icrc` is None if the packet's ICRC is correct, and otherwise the wrong ICRC that the packet had.
    """

    time_ns: int
    source: Address
    destination: Address
    gid: bytes
    data: bytes
    bth: int
    icrc: bytes | None


def _gid_of(address: bytes) -> bytes:
    return IPV4_MAPPED + address if len(address) == 4 else address


def _roce(time_ns: int, frame: bytes) -> Packet | str:
    """Return the packet in an Ethernet frame, or why there is none."""
    kind, at = int.from_bytes(frame[ETHERNET.ether_type : ETHERNET.size], "big"), ETHERNET.size
    while kind in _VLAN_TAGS and len(frame) >= at + 4:
        kind, at = int.from_bytes(frame[at + 2 : at + 4], "big"), at + 4
    ip = frame[at:]
    if kind == ETHER_TYPE_IPV4 and len(ip) >= IPV4.size and ip[0] >> 4 == 4:
        size, whole, protocol = 4 * (ip[0] & 15), int.from_bytes(ip[2:4], "big"), ip[IPV4.protocol]
        if size < IPV4.size:  # RFC 791 3.1: the least IHL is 5
            return NOT_ROCE
        fragment = int.from_bytes(ip[IPV4.flags_fragment : IPV4.flags_fragment + 2], "big") & 0x3FFF
        ends, masked = slice(IPV4.source, IPV4.destination), bytearray(ip[:size])
        masked[IPV4.tos] = masked[IPV4.ttl] = 0xFF
        masked[IPV4.checksum : IPV4.checksum + 2] = b"\xff\xff"
    elif kind == ETHER_TYPE_IPV6 and len(ip) >= IPV6.size and ip[0] >> 4 == 6:
        size, protocol, fragment = IPV6.size, ip[IPV6.next_header], 0
        whole = size + int.from_bytes(ip[IPV6.payload_length : IPV6.payload_length + 2], "big")
        ends, masked = slice(IPV6.source, IPV6.destination), bytearray(ip[:size])
        masked[0] |= 0x0F
        masked[1:4] = b"\xff\xff\xff"
        masked[IPV6.hop_limit] = 0xFF
    else:
        return NOT_ROCE
    body = ip[size:whole]
    if protocol != IP_PROTOCOL_UDP or fragment or len(body) < UDP.size:
        return NOT_ROCE
    port = int.from_bytes(body[UDP.destination_port : UDP.length], "big")
    length = int.from_bytes(body[UDP.length : UDP.checksum], "big")
    if port != ROCE_UDP_PORT or not UDP.size + BTH.size + ICRC_SIZE <= length <= whole - size:
        return NOT_ROCE
    if len(body) < length:
        return CUT_SHORT
    data, icrc = body[UDP.size : length - ICRC_SIZE], body[length - ICRC_SIZE : length]
    # IBTA annex A17.3.3: fields that may change on the way count as ones, and eight bytes of ones stand for the LRH.
    hidden = data[:4] + b"\xff" + data[5 : BTH.size]
    covered = _ONES + bytes(masked) + body[: UDP.checksum] + b"\xff\xff" + hidden
    fits = zlib.crc32(memoryview(data)[BTH.size :], zlib.crc32(covered)) == int.from_bytes(icrc, "little")
    source, destination = ip[ends], ip[ends.stop : 2 * ends.stop - ends.start]
    make = IPv4Address if len(source) == 4 else IPv6Address
    return Packet(time_ns, make(source), make(destination), _gid_of(source), data, 0, None if fits else icrc)


def _infiniband(time_ns: int, record: bytes) -> Packet | str:
    """Return the packet in an ERF record, or why there is none."""
    if len(record) < ERF_HEADER or record[8] & _ERF_TYPE_MASK != ERF_INFINIBAND:
        return NOT_INFINIBAND
    at, more = ERF_HEADER, record[8] & _ERF_EXTENSION
    while more and at + 8 <= len(record):
        more, at = record[at] & _ERF_EXTENSION, at + 8
    packet = record[at:]
    if len(packet) < LRH.size + BTH.size + ICRC_SIZE + _VCRC_SIZE:
        return CUT_SHORT
    end = 4 * (int.from_bytes(packet[LRH.length : LRH.slid], "big") & 0x7FF)  # in words, with the ICRC
    if len(packet) < end:
        return CUT_SHORT
    data, icrc = packet[: end - ICRC_SIZE], packet[end - ICRC_SIZE : end]
    has_grh = packet[LRH.sl_lnh] & 3 == LNH_GLOBAL
    bth = LRH.size + (GRH.size if has_grh else 0)
    if len(data) < bth + BTH.size:
        return CUT_SHORT
    gid = data[LRH.size + GRH.sgid : LRH.size + GRH.dgid] if has_grh else bytes(16)
    fits = infiniband_icrc(data) == int.from_bytes(icrc, "little")
    slid, dlid = (int.from_bytes(data[start : start + 2], "big") for start in (LRH.slid, LRH.dlid))
    return Packet(time_ns, slid, dlid, gid, data, bth, None if fits else icrc)


class PcapFile:
    """A capture file, which can be read more than once.

    `infiniband` is set if it has InfiniBand's packets, not RoCE's, and `big_endian` if its numbers are big-endian.
    `unit` is the number of nanoseconds in one unit of a time stamp's fraction.

    `records` and `skipped` count what the last pass found: all records, and those without a packet, by reason.
    InvalidValueError says what is wrong with a file that is no such capture.
    """

    path: Path
    infiniband: bool
    big_endian: bool
    unit: int
    records: int
    skipped: Counter[str]

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            raise OperatingSystemError(error.errno, f"cannot read the capture file {path}: {error.strerror}") from None
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise InvalidValueError(f"{self.path} is no regular file: a capture is read twice, so save it to a file")
        header = self._file.read(FILE_HEADER)
        self._converted = None if is_plain(header) else Converted(self.path, self._file)
        if self._converted:
            order, self.unit, link_type = "<", 1, self._converted.link_type
        else:
            order, self.unit = MAGICS[header[:4]]
            link_type, _ = split_link_word(struct.unpack_from(f"{order}I", header, 20)[0])
        self.big_endian = order == ">"
        self._record = struct.Struct(f"{order}IIII")
        self.infiniband = link_type == LINKTYPE_ERF
        self.records, self.skipped = 0, Counter()

    def __iter__(self) -> Iterator[Packet]:
        """Read the packets from the beginning."""
        take = _infiniband if self.infiniband else _roce
        for time_ns, data, whole in self.raw_records():
            self.records += 1
            found = CUT_SHORT if len(data) < whole else take(time_ns, data)
            if isinstance(found, str):
                self.skipped[found] += 1
            else:
                yield found

    def raw_records(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield the time, the bytes, and the original length of each record."""
        at, source = self.rewind(), self._converted or self._file
        while header := source.read(RECORD.size):
            captured = self._record.unpack(header)[2] if len(header) == RECORD.size else 0
            data = source.read(captured) if captured <= LARGEST_RECORD else b""
            if len(header) < RECORD.size or len(data) < captured:
                raise self.damaged(at, header)
            seconds, fraction, _, whole = self._record.unpack(header)
            yield seconds * 1_000_000_000 + fraction * self.unit, data, whole
            at += RECORD.size + captured

    def rewind(self) -> int:
        """Go back to the first record and reset the counts. Return its offset in the file."""
        self.records, self.skipped = 0, Counter()
        if self._converted:
            self._converted.rewind()
            return 0
        return self._file.seek(FILE_HEADER)

    def read_into(self, room: np.ndarray) -> int:
        """Fill `room` with the next bytes of the file. Return how many there were; 0 means the end."""
        return (self._converted or self._file).readinto(memoryview(room))  # type: ignore[attr-defined]

    def damaged(self, at: int, header: bytes) -> InvalidValueError:
        """Return the error for the record at offset `at`, which is too long, or longer than the rest of the file."""
        if len(header) == RECORD.size and (captured := self._record.unpack(header)[2]) > LARGEST_RECORD:
            return too_large(self.path, at, captured)
        return ends_early(self.path, at)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
