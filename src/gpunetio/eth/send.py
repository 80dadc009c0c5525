"""Send queues on the CPU data path: the program posts packets and takes their completions."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..arguments import instance, whole, within
from ..errors import BadStateError, FullError, InvalidValueError, NotSupportedError, TooBigError
from ..formats.cqe import OPCODE_SHIFT, CqeOpcode
from ..formats.doorbell import PI_MASK, QP_DBREC
from ..formats.ethernet_queues import InlineMode
from ..formats.packet import ETHER_TYPE_SERVICE_VLAN, ETHER_TYPE_VLAN, ETHERNET, VLAN_TAG
from ..formats.wqe import CE_SHIFT, ETH_SEG, SEGMENT, WQEBB, CompletionMode, EthChecksum, WqeOpcode
from ..interrupts import deferred
from ..memory import is_accessible
from ..verbs import MR, PD, CompChannel
from ..verbs.devx.ring import doorbells, internal_ring
from .failure import QueueError
from .reader import CqReader
from .sq import SendQueue

_CONTROL = struct.Struct(">IIBHBI")  # CTRL_SEG
_ETHERNET = struct.Struct(">4xBxHIH")  # ETH_SEG up to the inline headers
_DATA = struct.Struct(">IIQ")
_INLINE_AT = ETH_SEG.inline_hdr_start  # offset of the inline headers in the Ethernet segment
_INLINE = 18  # header bytes in each WQE, if the device needs some: a MAC header with one VLAN tag
_SIGNALLED = CompletionMode.ALWAYS << CE_SHIFT
_TAGS = 2 * VLAN_TAG.size  # maximum bytes of VLAN tags, which don't count towards the MTU (IEEE 802.3 3.2.7)
_TAGGED = ETHER_TYPE_VLAN, ETHER_TYPE_SERVICE_VLAN
_MOST_HEADERS = 1 << 9  # maximum header bytes of an LSO packet
_LARGEST_MSS = (1 << 14) - 1


@dataclass(frozen=True, slots=True)
class Packet:
    """`nbytes` at `offset` of a region: a frame without its check sequence, or with `headers`, a payload for LSO.

    `headers`   for LSO: the Ethernet, IP and TCP headers of every packet that the device makes from the payload
    `mss`       for LSO: maximum payload bytes per packet
    `context`   returned with the completion
    """

    region: MR
    offset: int = 0
    nbytes: int = 0
    context: object = None
    headers: bytes = b""
    mss: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A packet that was sent or has failed. `timestamp` is the device's clock at completion, or None on failure."""

    context: object
    timestamp: int | None
    error: QueueError | None


class CpuTxq(SendQueue):
    """A send queue for CPU programs (`doca_eth_txq` on the CPU data path).

    `max_burst`        packets that can wait at a time; an LSO packet takes more room
    `checksum`         the device computes L3 and L4 checksums of every packet
    `max_lso_headers`  maximum header bytes of an LSO packet; 0 without LSO
    `channel`          reports completions after `req_notify()`
    """

    max_lso_headers: int

    def __init__(
        self, pd: PD, max_burst: int = 256, *, checksum: bool = False, max_lso_headers: int = 0,
        channel: CompChannel | None = None,
    ):
        headers = within("max_lso_headers", max_lso_headers, 0, _MOST_HEADERS)
        blocks = _blocks(headers)
        super().__init__(pd, whole("max_burst", max_burst) * blocks, checksum, InlineMode.L2)
        if headers and not self.caps.max_lso:
            raise NotSupportedError(f"max_lso_headers: {self.ctx} has no LSO")
        self.max_lso_headers = headers
        self._lock = threading.Lock()
        self._posted: list[tuple[object, int]] = [(None, 0)] * self.depth  # context and blocks, by first block
        self._producer = self._consumer = 0
        self._failure: QueueError | None = None
        with ExitStack() as undo:
            uar = self._shared_uar()
            self._reader = CqReader(self.ctx, self.depth, channel)
            undo.callback(self._reader.cq.close)
            ring = internal_ring(self.ctx, undo, self.depth * WQEBB)
            assert ring.memory
            self._ring = ring.memory.array[: self.depth * WQEBB].reshape(self.depth, WQEBB)
            self._doorbells = doorbells()
            self._create(self._reader.cq, ring, uar, undo)
            self._opened(f"send queue {self.sqn:#x} of {self.ctx.name}", undo)

    def send(self, region: MR, offset: int = 0, nbytes: int | None = None, *, context: object = None) -> None:
        """Send a frame of `nbytes`, by default the rest of the region (`doca_eth_txq_task_send`).

        Errors are as in `post`.
        """
        nbytes = instance("region", region, MR).nbytes - whole("offset", offset) if nbytes is None else nbytes
        self.post([Packet(region, offset, nbytes, context)])

    def send_lso(
        self, headers: bytes, region: MR, offset: int = 0, nbytes: int | None = None, *, mss: int,
        context: object = None,
    ) -> None:
        """Send a payload in packets of up to `mss` bytes, each after these headers (`doca_eth_txq_task_lso_send`)."""
        nbytes = instance("region", region, MR).nbytes - whole("offset", offset) if nbytes is None else nbytes
        self.post([Packet(region, offset, nbytes, context, bytes(headers), mss)])

    @deferred()
    def post(self, packets: Iterable[Packet]) -> None:
        """Send all the packets, or none, with one doorbell (`doca_eth_txq_task_batch_send`, `…_batch_lso_send`).

        Keep the regions open until the packets have completed. InvalidValueError for a range outside a region, or a
        region of another protection domain; TooBigError for a frame that exceeds the port's MTU at the time when the
        queue was created; FullError without room for all of them; BadStateError if the queue has failed.
        """
        self.check_open()
        instance("packets", packets, Iterable)
        built = [(instance("packet", packet, Packet).context, self._body(packet)) for packet in packets]
        with self._lock:
            if self._failure:
                raise BadStateError(f"{self} is in ERR: {self._failure}; reset() it")
            needed = sum(_blocks_of(body) for _, (_, body) in built)
            if self._producer - self._consumer + needed > self.depth:
                raise FullError(
                    f"{self} has no room: {self._producer - self._consumer} of {self.depth} basic blocks wait, and "
                    f"these packets take {needed}; take completions first"
                )
            for context, (opcode, body) in built:
                self._write(context, opcode, body)
            if built:
                number = self._producer & PI_MASK
                self._doorbells.ring_send(self.dbr_address + QP_DBREC.snd, number, self.doorbell_register, self.sqn)
        self.ctx.provider.doorbell_rung()

    def _body(self, packet: Packet) -> tuple[WqeOpcode, bytes]:
        """Return the opcode and the segments of a packet's WQE, without the control segment."""
        region, offset, nbytes = instance("region", packet.region, MR), packet.offset, whole("nbytes", packet.nbytes)
        region.check_open()
        if region.pd is not self.pd:
            raise InvalidValueError(f"{region} belongs to {region.pd}: register the memory in {self.pd}")
        if nbytes < 0 or not 0 <= whole("offset", offset) <= region.nbytes - nbytes:
            raise InvalidValueError(f"{nbytes} bytes at offset {offset}: {region} has {region.nbytes} bytes")
        if packet.headers:
            self._check_lso(packet)
            opcode, inline, mss = WqeOpcode.TSO, packet.headers, packet.mss
            checksums = EthChecksum.L3 | EthChecksum.L4  # only the device can compute those of the LSO segments
        else:
            if nbytes < ETHERNET.size:
                raise InvalidValueError(f"nbytes = {nbytes}: a frame has {ETHERNET.size} bytes of headers")
            self._check_length(region, offset, nbytes)
            opcode, inline, mss, checksums = WqeOpcode.SEND, b"", 0, self.cs_flags
            if self.caps.min_inline is not InlineMode.NONE:
                inline = _read(region, offset, min(_INLINE, nbytes))
                offset, nbytes = offset + len(inline), nbytes - len(inline)
        body = (_ETHERNET.pack(checksums, mss, 0, len(inline)) + inline).ljust(SEGMENT, b"\0")
        body = body.ljust(-(-len(body) // SEGMENT) * SEGMENT, b"\0")
        if nbytes:
            body += _DATA.pack(nbytes, region.lkey, region.iova + offset)
        return opcode, body

    def _check_length(self, region: MR, offset: int, nbytes: int) -> None:
        """Refuse a frame that is too long. In GPU memory, where the CPU cannot see VLAN tags, allow for two."""
        if nbytes > self.caps.max_packet:
            raise TooBigError(f"nbytes = {nbytes}: {self.ctx} sends frames of {self.caps.max_packet} bytes at most")
        most = ETHERNET.size + self.caps.mtu
        if nbytes > most:
            address = region.address + offset
            seen = is_accessible(address, ETHERNET.size + _TAGS, False)
            most += _tag_bytes(ctypes.string_at(address, ETHERNET.size + _TAGS)) if seen else _TAGS
        self._check_mtu("nbytes", nbytes, nbytes - most)

    def _check_mtu(self, name: str, value: int, over: int) -> None:
        if over > 0:
            raise TooBigError(
                f"{name} = {value} makes a frame that is {over} bytes too long: the port of {self.ctx} has an MTU of "
                f"{self.caps.mtu}, which does not count the MAC header and VLAN tags; send less, or raise the MTU"
            )

    def _check_lso(self, packet: Packet) -> None:
        if not self.max_lso_headers:
            raise BadStateError(f"{self} was created without LSO: give max_lso_headers=")
        if len(packet.headers) > self.max_lso_headers:
            raise TooBigError(f"{len(packet.headers)} bytes of headers: {self} takes {self.max_lso_headers}")
        within("mss", packet.mss, 1, _LARGEST_MSS)
        if not 0 < packet.nbytes <= self.caps.max_lso:
            raise TooBigError(f"nbytes = {packet.nbytes}: an LSO payload has 1 to {self.caps.max_lso} bytes")
        longest = len(packet.headers) - ETHERNET.size - _tag_bytes(packet.headers) + min(packet.mss, packet.nbytes)
        self._check_mtu("mss", packet.mss, longest - self.caps.mtu)

    def _write(self, context: object, opcode: WqeOpcode, body: bytes) -> None:
        index, blocks = self._producer, _blocks_of(body)
        control = _CONTROL.pack(
            (index & PI_MASK) << 8 | opcode, self.sqn << 8 | 1 + len(body) // SEGMENT, 0, 0, _SIGNALLED, 0
        )
        wqe = np.frombuffer((control + body).ljust(blocks * WQEBB, b"\0"), np.uint8).reshape(blocks, WQEBB)
        self._ring[np.arange(index, index + blocks) & self.depth - 1] = wqe
        self._posted[index & self.depth - 1] = context, blocks
        self._producer += blocks

    @property
    def in_flight(self) -> int:
        """Return how many basic blocks are posted and have not been taken as completed."""
        return self._producer - self._consumer

    def completions(self, most: int = 64, *, least: int = 1, timeout: float) -> list[Sent]:
        """Return up to `most` packets that were sent or have failed, in the order of posting.

        At least `least` of them, or as many as came in `timeout` seconds.
        """
        self.check_open()
        return self._reader.collect(self._take, most, least, timeout)

    @deferred()
    def _take(self, most: int) -> list[Sent]:
        found = []
        with self._lock:
            for cqe in self._reader.take(most):
                context, blocks = self._posted[self._consumer & self.depth - 1]
                failed = None
                if int(cqe["op_own"]) >> OPCODE_SHIFT != CqeOpcode.REQ:
                    failed = self._failed(self._consumer, cqe)
                self._consumer += blocks
                found.append(Sent(context, None if failed else int(cqe["timestamp"]), failed))
        return found

    def _failed(self, index: int, cqe: np.void) -> QueueError:
        failed = QueueError.in_cqe(self.ctx, self.sqn, cqe, index)
        self._failure = self._failure or failed
        return failed

    def last_error(self) -> QueueError | None:
        """Return the first error found among the completions taken, which moved the queue to ERR, or None."""
        return self._failure

    def req_notify(self) -> None:
        """Request one event on the channel for the next completion not taken, as `CpuRxq.req_notify` does."""
        self.check_open()
        self._reader.request_event(self)

    @deferred()
    def reset(self) -> None:
        """Move the queue from ERR back to RDY, with nothing posted. Completions that were not taken are lost."""
        self.check_open()
        with self._lock:
            self._stop()
            while len(self._reader.take(self.depth)):
                pass
            self._producer = self._consumer = 0
            self._failure = None
            self._doorbells.ring_receive(self.dbr_address + QP_DBREC.snd, 0)
            self._ready()


def _blocks(headers: int) -> int:
    """Return the basic blocks of the longest WQE with this many header bytes."""
    return -(-(3 * SEGMENT + max(0, headers - SEGMENT + _INLINE_AT) + SEGMENT - 1) // WQEBB) if headers else 1


def _blocks_of(body: bytes) -> int:
    """Return the basic blocks of a WQE with these segments after its control segment."""
    return -(-(SEGMENT + len(body)) // WQEBB)


def _tag_bytes(head: bytes) -> int:
    """Return the bytes of VLAN tags in the first bytes of a frame."""
    at = ETHERNET.ether_type
    while at < ETHERNET.ether_type + _TAGS and int.from_bytes(head[at : at + 2], "big") in _TAGGED:
        at += VLAN_TAG.size
    return at - ETHERNET.ether_type


def _read(region: MR, offset: int, nbytes: int) -> bytes:
    """Return bytes of a region. InvalidValueError if the CPU cannot access them."""
    address = region.address + offset
    if not is_accessible(address, nbytes, False):
        raise InvalidValueError(f"{region} is no memory of the CPU, and the device needs the headers in its WQEs")
    return ctypes.string_at(address, nbytes)
