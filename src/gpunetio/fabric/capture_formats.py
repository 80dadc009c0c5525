"""Read the formats of capture files: libpcap's and pcapng, also compressed by gzip.

libpcap's format is that of pcap-savefile(5), with microseconds or nanoseconds, in either byte order; pcapng is
draft-ietf-opsawg-pcapng. `records` yields the records of either, with Ethernet or ERF packets. Two other link types are
converted to Ethernet: Linux cooked captures, as `tcpdump -i any` writes them, and IP without a link header.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import InvalidValueError
from ..formats.packet import ETHER_TYPE_IPV4, ETHER_TYPE_IPV6
from .pcap import LINKTYPE_ERF, LINKTYPE_ETHERNET

MAGICS = {  # the first four bytes of a pcap file → byte order, nanoseconds in a unit of the time stamps
    b"\xd4\xc3\xb2\xa1": ("<", 1000), b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1), b"\xa1\xb2\x3c\x4d": (">", 1),
}
PCAPNG = b"\x0a\x0d\x0d\x0a"
GZIP = b"\x1f\x8b"
FILE_HEADER = 24
LARGEST_RECORD = 1 << 18  # bytes: libpcap's limit (MAXIMUM_SNAPLEN)
PCAP_RECORD = 16  # bytes of a record's header
_LAYOUT = struct.Struct("<IIII")  # of a record's header: its time, bytes in the file, bytes of the packet

# The last word of a file header (draft-ietf-opsawg-pcap): the link type and, if the flag is set, the length of each
# frame's check sequence in units of 2 bytes.
_LINK_TYPE_MASK, _FCS_PRESENT, _FCS_SHIFT = 0xFFFF, 1 << 26, 28

# pcapng: types of blocks, and options of an interface.
_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _PACKET = 0x0A0D0D0A, 1, 2, 3, 6
_BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_LARGEST_BLOCK = 1 << 24  # bytes, as in Wireshark
_END_OF_OPTIONS, _TIME_RESOLUTION, _FCS_LENGTH, _TIME_OFFSET = 0, 9, 13, 14
_CHUNK = 1 << 16
_MOST_WHOLE = (1 << 32) - 1  # the largest original length that a record can state

# Link types that are not read, with their usual names (https://www.tcpdump.org/linktypes.html).
_NAMES = {
    0: "BSD loopback", 6: "token ring", 9: "PPP", 50: "PPP", 104: "Cisco HDLC", 105: "IEEE 802.11",
    119: "IEEE 802.11 with Prism headers", 127: "IEEE 802.11 with radiotap headers", 187: "Bluetooth", 189: "USB",
    192: "PPI", 195: "IEEE 802.15.4", 201: "Bluetooth", 220: "USB", 227: "SocketCAN", 239: "NFLOG", 247: "InfiniBand",
    249: "USBPcap", 253: "netlink",
}


class Record(NamedTuple):
    """A record: its time, its bytes, the packet's length, and its link type, LINKTYPE_ETHERNET or LINKTYPE_ERF."""

    time_ns: int
    data: bytes
    whole: int
    link_type: int


# --- link types ------------------------------------------------------------------------------------------------------

_ANYBODY, _BROADCAST, _A_GROUP = bytes(6), b"\xff" * 6, b"\x01\x00\x5e\x00\x00\x00"
_DESTINATIONS = {1: _BROADCAST, 2: _A_GROUP}  # by the type of a cooked packet; other types have no known destination


def _cooked(kind: int, address_bytes: int, address: bytes, protocol: bytes, packet: bytes) -> bytes:
    source = address[:6] if address_bytes == 6 else _ANYBODY
    return _DESTINATIONS.get(kind, _ANYBODY) + source + protocol + packet


def _cooked_v1(data: bytes) -> bytes:
    """Convert a packet of LINKTYPE_LINUX_SLL."""
    kind, _, address_bytes = struct.unpack_from(">HHH", data)
    return _cooked(kind, address_bytes, data[6:14], data[14:16], data[16:])


def _cooked_v2(data: bytes) -> bytes:
    """Convert a packet of LINKTYPE_LINUX_SLL2."""
    return _cooked(data[10], data[11], data[12:20], data[:2], data[20:])


def _ip(data: bytes) -> bytes:
    """Convert a packet of LINKTYPE_RAW, LINKTYPE_IPV4 or LINKTYPE_IPV6."""
    kind = ETHER_TYPE_IPV6 if data[:1] and data[0] >> 4 == 6 else ETHER_TYPE_IPV4
    return _ANYBODY + _ANYBODY + kind.to_bytes(2, "big") + data


class _Link(NamedTuple):
    """How packets of a link type become Ethernet frames, and the length of the header that this replaces."""

    name: str
    header: int
    convert: Callable[[bytes], bytes] | None


_LINKS = {
    LINKTYPE_ETHERNET: _Link("Ethernet", 0, None), LINKTYPE_ERF: _Link("ERF", 0, None),
    113: _Link("Linux cooked", 16, _cooked_v1), 276: _Link("Linux cooked v2", 20, _cooked_v2),
    101: _Link("IP", 0, _ip), 228: _Link("IPv4", 0, _ip), 229: _Link("IPv6", 0, _ip),
}


def check_link_type(path: Path, number: int) -> None:
    """Raise InvalidValueError, with a remedy, for a link type whose packets cannot be read."""
    if number not in _LINKS:
        name = f" ({_NAMES[number]})" if number in _NAMES else ""
        known = ", ".join(f"{kind} ({link.name})" for kind, link in _LINKS.items())
        raise InvalidValueError(
            f"{path} has packets of link type {number}{name}: it must be one of {known}. Capture them on an Ethernet "
            "interface, or with `tcpdump -i any`"
        )


def split_link_word(word: int) -> tuple[int, int]:
    """Split the last word of a pcap file's header into the link type and the length of each frame's FCS."""
    fcs = 2 * (word >> _FCS_SHIFT) if word & _FCS_PRESENT else 0
    return word & _LINK_TYPE_MASK, fcs


def _record(time_ns: int, data: bytes, whole: int, link_type: int, fcs: int) -> Record:
    """Return a record of Ethernet or ERF, without its frame check sequence."""
    whole -= fcs
    data = data[: max(whole, 0)]
    link = _LINKS[link_type]
    if link.convert is None:
        return Record(time_ns, data, max(whole, 0), link_type)
    if len(data) < link.header:
        return Record(time_ns, b"", max(whole, 1), LINKTYPE_ETHERNET)  # cut off before there is a packet
    frame = link.convert(data)
    longer = max(whole - len(data), 0) + len(frame)
    return Record(time_ns, frame, min(longer, _MOST_WHOLE), LINKTYPE_ETHERNET)


# --- files -----------------------------------------------------------------------------------------------------------


class _Bytes:
    """The bytes of a file, from the beginning, decompressed if it is compressed."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file, self.at = path, file, 0
        file.seek(0)
        self._held = file.read(_CHUNK)
        self._inflate = zlib.decompressobj(31) if self._held.startswith(GZIP) else None
        if self._inflate:
            self._held, self._packed = b"", self._held

    def take(self, count: int) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        parts, left = [], count
        while left:
            if not self._held and not self._more():
                break
            parts.append(self._held[:left])
            self._held = self._held[left:]
            left -= len(parts[-1])
        self.at += count - left
        return b"".join(parts)

    def _more(self) -> bool:
        if self._inflate is None:
            self._held = self._file.read(_CHUNK)
            return bool(self._held)
        while not self._held:
            if self._inflate.eof:
                self._packed = self._inflate.unused_data or self._file.read(_CHUNK)
                if not self._packed.rstrip(b"\0"):  # padding
                    return False
                self._inflate = zlib.decompressobj(31)
            elif not self._packed:
                self._packed = self._file.read(_CHUNK)
                if not self._packed:
                    raise InvalidValueError(
                        f"{self._path} ends in the middle of its compressed data: the capture was not finished, or not "
                        "copied as a whole"
                    )
            try:
                self._held = self._inflate.decompress(self._packed, _CHUNK)
            except zlib.error as error:
                raise InvalidValueError(f"{self._path} is damaged: it cannot be decompressed ({error})") from None
            self._packed = self._inflate.unconsumed_tail
        return True


def is_plain(start: bytes) -> bool:
    """Return whether a file with this beginning needs no conversion: it is libpcap's, with Ethernet or ERF."""
    if start[:4] not in MAGICS or len(start) < FILE_HEADER:
        return False
    (word,) = struct.unpack_from(f"{MAGICS[start[:4]][0]}I", start, 20)
    link_type, fcs = split_link_word(word)
    return fcs == 0 and link_type in (LINKTYPE_ETHERNET, LINKTYPE_ERF)


def records(path: Path, file: BinaryIO) -> Iterator[Record]:
    """Yield the records of a capture file. Then raise InvalidValueError if the file is damaged; it says how."""
    source = _Bytes(path, file)
    magic = source.take(4)
    if magic == PCAPNG:
        yield from _pcapng_records(path, source)
    elif magic in MAGICS:
        yield from _pcap_records(path, source, *MAGICS[magic])
    else:
        raise no_capture(path, magic)


def no_capture(path: Path, start: bytes) -> InvalidValueError:
    """Return the error for a file that is no capture."""
    return InvalidValueError(
        f"{path} is no pcap file: it begins with {start[:4].hex(' ') or 'nothing'}, not with a1b2c3d4 or a1b23c4d in "
        "either byte order, nor as pcapng (0a0d0d0a)"
    )


def ends_early(path: Path, at: int) -> InvalidValueError:
    """Return the error for a file that ends within the record at this offset."""
    return InvalidValueError(
        f"{path} ends in the middle of the record at byte {at}: the capture was not finished, or not copied as a whole"
    )


def too_large(path: Path, at: int, captured: int) -> InvalidValueError:
    """Return the error for the record at this offset, which claims to be longer than any record can be."""
    return InvalidValueError(
        f"{path} is damaged at byte {at}: a record announces {captured} bytes, {LARGEST_RECORD} are the most"
    )


def _pcap_records(path: Path, source: _Bytes, order: str, unit: int) -> Iterator[Record]:
    header = source.take(FILE_HEADER - 4)
    if len(header) < FILE_HEADER - 4:
        raise InvalidValueError(f"{path} is no pcap file: it ends within its header of {FILE_HEADER} bytes")
    link_type, fcs = split_link_word(struct.unpack_from(f"{order}I", header, 16)[0])
    check_link_type(path, link_type)
    layout = struct.Struct(f"{order}IIII")
    while True:
        at = source.at
        head = source.take(PCAP_RECORD)
        if not head:
            return
        if len(head) < PCAP_RECORD:
            raise ends_early(path, at)
        seconds, fraction, captured, whole = layout.unpack(head)
        if captured > LARGEST_RECORD:
            raise too_large(path, at, captured)
        data = source.take(captured)
        if len(data) < captured:
            raise ends_early(path, at)
        yield _record(seconds * 1_000_000_000 + fraction * unit, data, whole, link_type, fcs)


@dataclass
class _Interface:
    """An interface of a pcapng section. A unit of its time stamps is `numerator / denominator` ns."""

    link_type: int
    snap_length: int
    fcs: int = 0
    numerator: int = 1000
    denominator: int = 1
    offset_ns: int = 0

    def time_ns(self, high: int, low: int) -> int:
        return max((high << 32 | low) * self.numerator // self.denominator + self.offset_ns, 0)


@dataclass
class _Section:
    """A section of a pcapng file: its byte order, and its interfaces so far."""

    order: str
    interfaces: list[_Interface] = field(default_factory=list)


def _pcapng_records(path: Path, source: _Bytes) -> Iterator[Record]:
    section, head = _Section("<"), PCAPNG
    while True:
        at = source.at - len(head)
        head += source.take(8 - len(head))
        if not head:
            return
        if len(head) < 8:
            raise ends_early(path, at)
        body = b""
        if head[:4] == PCAPNG:
            body = source.take(4)
            if body not in _BYTE_ORDERS:
                raise ends_early(path, at) if len(body) < 4 else _bad_block(path, at, "its byte order is unknown")
            section = _Section(_BYTE_ORDERS[body])
        kind, length = struct.unpack(f"{section.order}II", head)
        if length % 4 or not 12 + len(body) <= length <= _LARGEST_BLOCK:
            raise _bad_block(path, at, f"it announces {length} bytes")
        body += source.take(length - 8 - len(body))
        if len(body) < length - 8:
            raise ends_early(path, at)
        try:
            found = _of_block(path, section, kind, body[:-4])
        except (struct.error, IndexError):
            raise _bad_block(path, at, "it is too short for what it has") from None
        if found:
            yield found
        head = b""


def _bad_block(path: Path, at: int, why: str) -> InvalidValueError:
    return InvalidValueError(f"{path} is damaged at byte {at}: the block there cannot be read, as {why}")


def _of_block(path: Path, section: _Section, kind: int, body: bytes) -> Record | None:
    """Process a block. Return its record, or None if it has none. struct.error or IndexError if it is malformed."""
    order = section.order
    if kind == _INTERFACE:
        section.interfaces.append(_interface(order, body))
        return None
    if kind == _PACKET:
        number, high, low, captured, whole = struct.unpack_from(f"{order}IIIII", body)
        start = 20
    elif kind == _OLD_PACKET:
        number, _, high, low, captured, whole = struct.unpack_from(f"{order}HHIIII", body)
        start = 20
    elif kind == _SIMPLE_PACKET:
        (whole,) = struct.unpack_from(f"{order}I", body)
        number, high, low, start = 0, 0, 0, 4
        limit = section.interfaces[0].snap_length
        captured = min(whole, limit) if limit else whole
    else:
        return None
    interface = section.interfaces[number]
    check_link_type(path, interface.link_type)
    data = body[start : start + captured]
    if len(data) < captured or captured > LARGEST_RECORD:
        raise IndexError
    return _record(interface.time_ns(high, low), data, whole, interface.link_type, interface.fcs)


def _interface(order: str, body: bytes) -> _Interface:
    link_type, _, snap_length = struct.unpack_from(f"{order}HHI", body)
    found, at = _Interface(link_type, snap_length), 8
    while at + 4 <= len(body):
        code, length = struct.unpack_from(f"{order}HH", body, at)
        value = body[at + 4 : at + 4 + length]
        if code == _END_OF_OPTIONS:
            break
        if code == _TIME_RESOLUTION:
            power = value[0] & 0x7F
            units = 2**power if value[0] & 0x80 else 10**power
            found.numerator, found.denominator = 1_000_000_000, units
        elif code == _FCS_LENGTH:
            found.fcs = value[0]
        elif code == _TIME_OFFSET:
            found.offset_ns = struct.unpack(f"{order}q", value)[0] * 1_000_000_000
        at += 4 + (length + 3 & -4)
    return found


# --- as libpcap's ----------------------------------------------------------------------------------------------------


class Converted:
    """The records of any capture file as bytes of libpcap's format, little-endian with nanoseconds, without a header.

    All records have the link type of the first, ERF or not. An error in the file is raised after the records before it.
    """

    link_type: int

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        first = next(records(path, file), None)
        self.link_type = first.link_type if first else LINKTYPE_ETHERNET
        self.rewind()

    def rewind(self) -> None:
        """Go back to the first record."""
        self._records, self._held, self._error = records(self._path, self._file), bytearray(), ""

    def readinto(self, room: memoryview) -> int:
        """Fill `room` with the next bytes. Return how many there were; 0 means the end."""
        data = self.read(len(room))
        room[: len(data)] = data
        return len(data)

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer before an error and at the end."""
        while len(self._held) < count and not self._error:
            try:
                record = next(self._records, None)
                if record is None:
                    break
                self._held += self._packed(record)
            except InvalidValueError as error:
                self._error = str(error)
        if self._error and not self._held:
            raise InvalidValueError(self._error)
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    def _packed(self, record: Record) -> bytes:
        if record.link_type != self.link_type:
            raise InvalidValueError(
                f"{self._path} has packets of Ethernet and of ERF: split it by interface first, with `tshark -r FILE "
                "-Y frame.interface_id==0 -w ONE`"
            )
        seconds, fraction = divmod(record.time_ns, 1_000_000_000)
        return _LAYOUT.pack(seconds & 0xFFFF_FFFF, fraction, len(record.data), record.whole) + record.data
