"""Capture files for Wireshark and tcpdump: the packets that cross a NIC's port, in the pcap format with nanoseconds.

On wires that carry Ethernet, the file has whole frames. On other wires, RoCE packets get the headers that they have, or
would have, on Ethernet: IPv4 (id 0, no fragments) or IPv6, and UDP. InfiniBand packets already have their headers, and
get ICRC and VCRC. They are written as records of Endace's format (ERF, whose type 21 is InfiniBand), because Wireshark
does not know link type 247.

The ICRC is always computed for the headers that are written. The original IPv4 id and source port of a received packet
are not known here, and packets between NICs of one host have no ICRC. A damaged packet gets a wrong ICRC.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..trusted import open_output
from ..errors import InUseError, NotPermittedError, OperatingSystemError, TimedOutError
from ..formats.packet import (
    BTH, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, GRH, ICRC_SIZE, IP_PROTOCOL_UDP, IPV4, IPV4_DONT_FRAGMENT, IPV4_MAPPED,
    IPV6, LNH_GLOBAL, LRH, ROCE_UDP_PORT, UDP,
)
from ..jit.compile import engine_function
from ..jit.ops import ld8
from ..memory import HostMemory
from ..service import ServiceThread
from .capture import CAPTURE, CAPTURED, WHOLE_FRAME
from .ip_headers import internet_checksum
from .frames import (
    PACKET, PIPE_END, class_of, consume, egress_of, hop_limit_of, label_of, next_frame, pipe_end, pipe_size, release,
    traffic_of,
)

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

ROOM = 1 << 25  # bytes of packets that wait to be written
LINKTYPE_ETHERNET, LINKTYPE_ERF = 1, 197
ERF_INFINIBAND, _ERF_VARYING_LENGTH, _ERF_RX_ERROR = 21, 0x04, 0x10
ERF_HEADER = 16
_MAGIC_NANOSECONDS, _SNAP_LENGTH = 0xA1B23C4D, 1 << 16
_PERIOD = 0.005  # seconds between looks into the pipe
_BATCH = 1024  # packets in one write
_ONES = b"\xff" * LRH.size

Gid = bytes


# --- one packet ----------------------------------------------------------------------------------------------------


class RoceFrames:
    """Makes Ethernet frames from RoCE packets. `mac_of(gid)` returns a GID's MAC."""

    def __init__(self, mac_of: Callable[[Gid], bytes]):
        self._mac_of = mac_of
        self._headers: dict[tuple[Gid, Gid, int, int], tuple[bytes, bytes, int, int]] = {}

    def __call__(self, source: Gid, destination: Gid, packet: bytes, damaged: bool, traffic: int = 0) -> bytes:
        """Return the frame around a packet, which runs from its BTH to its padding. `traffic`: see `traffic_of`."""
        key = source, destination, len(packet), traffic
        if key not in self._headers:
            if len(self._headers) > 4096:
                self._headers.clear()
            self._headers[key] = self._make(*key)
        link, udp, crc, pseudo = self._headers[key]
        hidden = packet[:4] + b"\xff" + packet[5 : BTH.size]  # congestion marks change on the way
        crc = zlib.crc32(memoryview(packet)[BTH.size :], zlib.crc32(hidden, crc))
        tail = (crc ^ (0xFFFF_FFFF if damaged else 0)).to_bytes(ICRC_SIZE, "little")
        body = packet + tail
        odd = bytes(len(body) & 1)
        checksum = internet_checksum(pseudo.to_bytes(4, "big") + udp[: UDP.checksum] + body + odd)
        return link + udp[: UDP.checksum] + (checksum or 0xFFFF).to_bytes(2, "big") + body

    def _make(self, source: Gid, destination: Gid, nbytes: int, traffic: int) -> tuple[bytes, bytes, int, int]:
        """Return the Ethernet and IP headers, the UDP header, their part of the CRC, and the pseudo header's sum."""
        length = UDP.size + nbytes + ICRC_SIZE
        traffic_class, hops = class_of.py_func(traffic), hop_limit_of.py_func(traffic)
        udp = struct.pack(">HHHH", ROCE_UDP_PORT, ROCE_UDP_PORT, length, 0)
        macs = self._mac_of(destination) + self._mac_of(source)
        if source.startswith(IPV4_MAPPED) and destination.startswith(IPV4_MAPPED):
            ends = source[12:] + destination[12:]
            plain = struct.pack(
                ">BBHHHBBH", 0x45, traffic_class, IPV4.size + length, 0, IPV4_DONT_FRAGMENT, hops, IP_PROTOCOL_UDP, 0
            )
            checksum = internet_checksum(plain + ends)
            ip = plain[: IPV4.checksum] + checksum.to_bytes(2, "big") + ends
            # As in icrc.py: type of service, time to live and checksum count as ones.
            covered = plain[:1] + b"\xff" + plain[2 : IPV4.ttl] + b"\xff" + plain[IPV4.protocol : IPV4.checksum]
            covered += b"\xff\xff" + ends
            kind = ETHER_TYPE_IPV4
        else:
            ends = source + destination
            first = 6 << 28 | traffic_class << 20 | label_of.py_func(traffic)
            ip = struct.pack(">IHBB", first, length, IP_PROTOCOL_UDP, hops) + ends
            covered = b"\x6f\xff\xff\xff" + ip[IPV6.payload_length : IPV6.hop_limit] + b"\xff" + ends
            kind = ETHER_TYPE_IPV6
        link = macs + kind.to_bytes(2, "big") + ip
        pseudo = ends + struct.pack(">HH", IP_PROTOCOL_UDP, length)  # RFC 768, RFC 8200 8.1
        crc = zlib.crc32(_ONES + covered + udp[: UDP.checksum] + b"\xff\xff")
        return link, udp, crc, int.from_bytes(pseudo, "big") % 0xFFFF


@engine_function
def _vcrc(address: int, nbytes: int) -> int:
    """Return the variant CRC (IBTA 7.8.2): polynomial 0x100B, least significant bit first, from ones, complemented."""
    register = 0xFFFF
    for i in range(nbytes):
        register ^= ld8(address + i)
        for _ in range(8):
            register = register >> 1 ^ (0xD008 & -(register & 1))
    return register ^ 0xFFFF


class InfinibandFrames:
    """Makes ERF records from InfiniBand packets."""

    def __init__(self) -> None:
        self._scratch = HostMemory(_SNAP_LENGTH)
        _vcrc(self._scratch.address, 0)  # compiles it

    def __call__(self, packet: bytes, damaged: bool, seconds: int, nanoseconds: int) -> bytes:
        """Return the record of a packet, which runs from its LRH to its padding."""
        crc = infiniband_icrc(packet) ^ (0xFFFF_FFFF if damaged else 0)
        whole = packet + crc.to_bytes(ICRC_SIZE, "little")
        self._scratch.array[: len(whole)] = memoryview(whole)
        whole += int(_vcrc(self._scratch.address, len(whole))).to_bytes(2, "little")
        # The time is little-endian: units of 2^-32 s, then seconds. The rest is big-endian.
        stamp = struct.pack("<II", (nanoseconds << 32) // 1_000_000_000, seconds)
        flags = _ERF_VARYING_LENGTH | (_ERF_RX_ERROR if damaged else 0)
        return stamp + struct.pack(">BBHHH", ERF_INFINIBAND, flags, ERF_HEADER + len(whole), 0, len(whole)) + whole

    def close(self) -> None:
        """Release the memory."""
        self._scratch.close()


def infiniband_icrc(packet: bytes) -> int:
    """Return the ICRC of a packet from its LRH on (IBTA 7.8.1). Fields that may change on the way count as ones."""
    head = bytearray(packet[: LRH.size + GRH.size + BTH.size])
    bth = LRH.size
    if len(packet) >= LRH.size + GRH.size + BTH.size and packet[LRH.sl_lnh] & 3 == LNH_GLOBAL:
        head[: LRH.size] = _ONES
        head[bth] |= 0x0F  # traffic class and flow label
        head[bth + 1 : bth + 4] = b"\xff\xff\xff"
        head[bth + GRH.hop_limit] = 0xFF
        bth += GRH.size
    elif head:
        head[LRH.vl_lver] |= 0xF0
    if len(head) > bth + BTH.resv_dest_qp:
        head[bth + BTH.resv_dest_qp] = 0xFF
    return zlib.crc32(memoryview(packet)[len(head) :], zlib.crc32(head))


# --- the file ------------------------------------------------------------------------------------------------------


def capture_file(path: str | Path, name: str) -> Path:
    """Return the path of a new NIC's capture file: `path`, or a new file in it if it is a folder.

    A file in a folder is named after the NIC and the process. If the process opens the NIC again, a number follows.
    """
    folder = Path(path)
    if not folder.is_dir():
        return folder
    names = (f"{name}-{os.getpid()}{f'-{n}' if n > 1 else ''}.pcap" for n in itertools.count(1))
    return next(folder / each for each in names if not (folder / each).exists())


def _open(path: str | Path) -> int:
    """Open the file and lock it against other writers. Return its descriptor."""
    try:
        fd = open_output(path)
    except NotPermittedError:
        raise
    except OSError as error:
        raise OperatingSystemError(error.errno, f"cannot write the capture file {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
    except BlockingIOError:
        os.close(fd)
        raise InUseError(f"the capture file {path} is being written already: give each NIC a file of its own") from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # a FIFO or a terminal has no length
            os.close(fd)
            raise OperatingSystemError(error.errno, f"cannot write the capture file {path}: {error.strerror}") from None
    return fd


class Pcap:
    """A capture file and the thread that writes it, from `start` until `close`.

    `address` is the CAPTURE record that the engine fills. `written` counts the packets in the file, `lost` those that
    the engine dropped because the pipe was full. A file without packets is deleted unless `keeps_empty` is set.
    """

    address: int
    written: int

    def __init__(self, path: str | Path, infiniband: bool, room: int = ROOM, keeps_empty: bool = True):
        self._path, self._infiniband, self._keeps_empty = path, infiniband, keeps_empty
        fd = _open(path)
        try:
            self._file = os.fdopen(fd, "wb")
        except BaseException:
            os.close(fd)
            raise
        self._memory = HostMemory(CAPTURE.size + PIPE_END.size + pipe_size(room))
        self.address = self._memory.address
        self._record = self._memory.view(CAPTURE.dtype)[0]
        self._consumer = self.address + CAPTURE.size
        end = pipe_end(self._consumer + PIPE_END.size, room)
        self._record["end"] = np.void(end.tobytes())
        self._memory.view(PIPE_END.dtype, CAPTURE.size)[0] = end
        self._wall = time.time_ns() - time.monotonic_ns()
        self._stop = threading.Event()
        self._thread: ServiceThread | None = None
        self._failed = False
        self.written = 0

    @property
    def lost(self) -> int:
        """Packets that are not in the file, because the pipe to its writer was full."""
        return int(self._record["lost"])

    def start(self, name: str, gids: Sequence[Gid], mac_of: Callable[[Gid], bytes]) -> None:
        """Start writing. `gids` is the port's GID table."""
        self._name, self._gids = name, gids
        self._roce, self._ib = RoceFrames(mac_of), InfinibandFrames()
        link_type = LINKTYPE_ERF if self._infiniband else LINKTYPE_ETHERNET
        self._write(struct.pack("<IHHiIII", _MAGIC_NANOSECONDS, 2, 4, 0, 0, _SNAP_LENGTH, link_type))
        next_frame(self._consumer)  # compiles it; the pipe is empty
        self._thread = ServiceThread(f"gpunetio {name} capture", self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._drain()

    def _drain(self) -> None:
        """Write the packets that have been captured."""
        while batch := self._batch():
            self._write(b"".join(batch))

    def _batch(self) -> list[bytes]:
        records: list[bytes] = []
        while len(records) < 2 * _BATCH and (slot := next_frame(self._consumer)) > 0:
            at = slot - self.address
            c = self._memory.view(CAPTURED.dtype, at)[0]
            packet = self._memory.array[at + PACKET : at + PACKET + int(c["nbytes"])].tobytes()
            if not self._failed:
                when = divmod(int(c["time_ns"]) + self._wall, 1_000_000_000)
                frame = self._ib(packet, bool(c["damaged"]), *when) if self._infiniband else self._frame(c, packet)
                records += struct.pack("<IIII", *when, len(frame), len(frame)), frame
                self.written += 1
            consume(self._consumer)
        release(self._consumer)
        return records

    def _frame(self, c: np.void, packet: bytes) -> bytes:
        if c["source"] == WHOLE_FRAME:
            return packet
        damaged = bool(c["damaged"])
        source = int(c["source"])
        sender, target = self._gids[egress_of.py_func(source)], c["peer_high"].tobytes() + c["peer_low"].tobytes()
        if not c["outgoing"]:
            sender, target = target, sender
        return self._roce(sender, target, packet, damaged, traffic_of.py_func(source))

    def _write(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._failed = True
            logger.error("%s: the capture file %s ends here: %s", self._name, self._path, error.strerror)

    def close(self) -> None:
        """Write the remaining packets and close the file. The engine must have stopped, or never had the address."""
        if self._thread is not None:
            self._stop.set()
            if not self._thread.join():
                raise TimedOutError(f"{self._path}: the capture thread does not stop, because the disk hangs")
            self._drain()
            self._ib.close()
            if self.lost:
                logger.warning(
                    "%s: %d packets are missing in the capture file %s, which has %d: they came faster than it could "
                    "be written", self._name, self.lost, self._path, self.written,
                )
        try:
            self._file.close()
        except OSError as error:  # what could not be written before still cannot be
            logger.debug("%s: %s", self._path, error)
        if not self.written and not self._keeps_empty:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._memory.close()
