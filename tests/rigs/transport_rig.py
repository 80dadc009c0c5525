"""A hand-made peer: plain Python at the other end of a wire of pipes that speaks RoCE with a software NIC.

Packets are parsed and built here, from the InfiniBand specification (chapter 9), so that this shares nothing with the
NIC except the pipe's frames. The NIC's clock stands still unless a test moves it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.fabric import frames
from gpunetio.fabric.inprocess import InProcessWire
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.state.wire import WIRE
from gpunetio.nic.turn.commands import EngineCommand
from gpunetio.verbs import QpEndpoint
from nic_rig import Buffer, Queue, until, view

# BTH operations (table 38, lower five bits); writes are the sends + 6
SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_LAST_IMM, SEND_ONLY, SEND_ONLY_IMM = range(6)
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM = range(6, 12)
READ_REQUEST, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_LAST, RESPONSE_ONLY = range(12, 17)
ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE, COMPARE_SWAP, FETCH_ADD = range(17, 21)
UC, UD = 0x20, 0x60  # added to the operation
MASKED_SWAP, MASKED_ADD = 0xDE, 0xDF  # whole opcodes, in the range for manufacturers (docs/soft-nic/differences.md)

# syndromes of an AETH (tables 47 to 49)
ACK = 0x1F  # with a credit count that is invalid
RNR_NAK = 0x20  # + the timer's code
NAK_SEQUENCE, NAK_INVALID, NAK_ACCESS, NAK_OPERATION = 0x60, 0x61, 0x62, 0x63

WITH_RETH = {WRITE_FIRST, WRITE_ONLY, WRITE_ONLY_IMM, READ_REQUEST}
WITH_IMM = {SEND_LAST_IMM, SEND_ONLY_IMM, WRITE_LAST_IMM, WRITE_ONLY_IMM}
WITH_AETH = {RESPONSE_FIRST, RESPONSE_LAST, RESPONSE_ONLY, ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE}
PSNS = 1 << 24


@dataclass(frozen=True)
class Packet:
    """A packet from its BTH to its padding. What a header that is not there would say is None."""

    opcode: int
    psn: int
    qpn: int = 0
    ack: int = 0
    solicited: int = 0
    pad: int | None = None  # when built: as many bytes as needed
    migrated: int = 1
    version: int = 0
    pkey: int = 0xFFFF
    congestion: int = 0  # FECN and BECN
    reth: tuple[int, int, int] | None = None  # va, rkey, length
    atomic: tuple[int, int, int, int] | None = None  # va, rkey, swap or add, compare
    masked: tuple[int, ...] | None = None  # va, rkey, bytes, swap or add, compare, swap mask, compare mask
    aeth: tuple[int, int] | None = None  # syndrome, MSN
    deth: tuple[int, int] | None = None  # Q_Key, source QP
    original: int | None = None
    imm: int | None = None
    payload: bytes = b""

    def build(self) -> bytes:
        """The bytes."""
        pad = -len(self.payload) % 4 if self.pad is None else self.pad
        flags = self.solicited << 7 | self.migrated << 6 | pad << 4 | self.version
        raw = struct.pack(
            ">BBHII", self.opcode, flags, self.pkey, self.congestion << 30 | self.qpn, self.ack << 31 | self.psn % PSNS
        )
        if self.deth:
            raw += struct.pack(">II", *self.deth)
        if self.reth:
            raw += struct.pack(">QII", *self.reth)
        if self.atomic:
            raw += struct.pack(">QIQQ", *self.atomic)
        if self.masked:
            raw += struct.pack(">QIIQQQQ", *self.masked)
        if self.aeth:
            raw += struct.pack(">I", self.aeth[0] << 24 | self.aeth[1])
        if self.original is not None:
            raw += struct.pack(">Q", self.original)
        if self.imm is not None:
            raw += struct.pack(">I", self.imm)
        return raw + self.payload + bytes(pad)

    @classmethod
    def parse(cls, raw: bytes) -> Packet:
        """From the bytes; whatever must be zero is."""
        assert len(raw) % 4 == 0
        opcode, flags, pkey, qp, word = struct.unpack_from(">BBHII", raw)
        operation, at = opcode & 0x1F, 12
        masked = opcode in (MASKED_SWAP, MASKED_ADD)
        assert masked or (opcode >> 5 in (0, 1, 3) and operation <= FETCH_ADD)
        assert qp >> 24 == 0
        assert word >> 24 & 0x7F == 0
        fields: dict[str, Any] = {}

        def take(layout: str) -> tuple[int, ...]:
            nonlocal at
            values = struct.unpack_from(layout, raw, at)
            at += struct.calcsize(layout)
            return values

        if opcode >> 5 == 3:
            fields["deth"] = take(">II")
        if operation in WITH_RETH:
            fields["reth"] = take(">QII")
        if operation in (COMPARE_SWAP, FETCH_ADD):
            fields["atomic"] = take(">QIQQ")
        if masked:
            fields["masked"] = take(">QIIQQQQ")
        if operation in WITH_AETH:
            (value,) = take(">I")
            fields["aeth"] = value >> 24, value & 0xFFFFFF
        if operation == ATOMIC_ACKNOWLEDGE:
            (fields["original"],) = take(">Q")
        if operation in WITH_IMM:
            (fields["imm"],) = take(">I")
        pad = flags >> 4 & 3
        end = len(raw) - pad
        assert end >= at
        assert not any(raw[end:])
        return cls(
            opcode, word & 0xFFFFFF, qp & 0xFFFFFF, word >> 31, flags >> 7, pad, flags >> 6 & 1, flags & 15, pkey,
            payload=raw[at:end], **fields,
        )


def segments(payload: bytes, mtu: int) -> list[bytes]:
    """A message's packets' payloads (9.2.5): full ones, and a last one, which only a message of no bytes has empty."""
    return [payload[i : i + mtu] for i in range(0, len(payload), mtu)] or [b""]


def operation_of(i: int, count: int, imm: bool = False) -> int:
    """The operation of packet `i` of a SEND."""
    if count == 1:
        return SEND_ONLY_IMM if imm else SEND_ONLY
    if i == 0:
        return SEND_FIRST
    return SEND_MIDDLE if i < count - 1 else SEND_LAST_IMM if imm else SEND_LAST


def send_packets(payload: bytes, mtu: int, psn: int, imm: int | None = None, service: int = 0) -> list[Packet]:
    """A SEND cut into packets, the last one asking for an acknowledgement."""
    parts = segments(payload, mtu)
    return [
        Packet(
            service | operation_of(i, len(parts), imm is not None), (psn + i) % PSNS, payload=part,
            ack=int(i == len(parts) - 1 and not service), imm=imm if i == len(parts) - 1 else None,
        )
        for i, part in enumerate(parts)
    ]


def write_packets(
    payload: bytes, mtu: int, psn: int, va: int, rkey: int, imm: int | None = None, service: int = 0
) -> list[Packet]:
    """An RDMA WRITE cut into packets."""
    packets = [replace(p, opcode=p.opcode + 6) for p in send_packets(payload, mtu, psn, imm, service)]
    return [replace(packets[0], reth=(va, rkey, len(payload))), *packets[1:]]


def response_packets(payload: bytes, mtu: int, psn: int, msn: int = 0) -> list[Packet]:
    """A READ's response."""
    parts = segments(payload, mtu)
    packets = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        operation = RESPONSE_MIDDLE
        if i == 0:
            operation = RESPONSE_ONLY if last else RESPONSE_FIRST
        elif last:
            operation = RESPONSE_LAST
        aeth = None if operation == RESPONSE_MIDDLE else (ACK, msn)
        packets.append(Packet(operation, (psn + i) % PSNS, aeth=aeth, payload=part))
    return packets


SIZE = 1 << 16  # bytes of memory at the NIC
ADDRESS = "127.0.9.1"  # no software NIC has this address by default
PEER_GID = bytes(10) + b"\xff\xff" + IPv4Address("127.0.9.2").packed
PEER_QPN = 0xABCDE


class Lab:
    """A software NIC with its clock stopped, and the far end of a wire."""

    def __init__(self) -> None:
        self.ctx = verbs.open("soft6", port=PortConfig(addresses=(ADDRESS,), workers=1))
        self.nic: Any = self.ctx.provider.nic  # type: ignore[attr-defined]
        self.pd = self.ctx.create_pd()
        self.here = Buffer(self.pd, SIZE, fill=1)  # what the NIC sends
        self.there = Buffer(self.pd, SIZE)  # what the NIC receives into
        wire = InProcessWire((self.nic.engine.kick_fd, 0))
        self._drop = wire.drop
        self.wire = self.nic.links.add_pipes(wire.ends[0], self, (self.nic.port.gids[0], PEER_GID), wire.drop)
        self.nic.control_socket.connect = lambda *_, **__: self  # answers the control socket in the peer's place
        end = wire.ends[1]
        self._ends = np.zeros(2, frames.PIPE_END.dtype)
        for i, pipe in enumerate((end.tx, end.rx)):
            self._ends[i] = frames.pipe_end(pipe, end.capacity)
        self._tx, self._rx = (self._ends.ctypes.data + i * frames.PIPE_END.size for i in range(2))
        self._pipes = [view(pipe, 192, np.int64) for pipe in (end.tx, end.rx)]
        self.nic.record["now"], self.nic.record["virtual_time"] = 1_000_000_000, 1

    def close(self) -> None:
        self.ctx.close()
        self._drop()

    def pass_time(self, nanoseconds: int) -> None:
        """Move the NIC's clock once it has dealt with everything, and let it act on that."""
        self.settle()
        self.nic.record["now"] += nanoseconds
        self.settle()

    def settle(self) -> None:
        """Wait until the NIC has taken all packets and has had several turns to answer.

        It takes packets behind the commands of a turn, and sends what it owes at the turn's end.
        """
        head, tail = self._pipes[0][0:1], self._pipes[0][8:9]
        until(lambda: tail[0] == head[0], "the NIC to take its packets")
        for _ in range(4):
            self.nic.engine.post(EngineCommand.WRITE_ROW, self.nic.control_address)  # writes no bytes

    def send_raw(self, *packets: bytes) -> None:
        """Put packets on the wire, so that the NIC sees them all at once."""
        for raw in packets:
            frame = frames.reserve(self._tx, len(raw))
            assert frame != 0
            view(frame, frames.FRAME.size, frames.FRAME.dtype)[0]["nbytes"] = len(raw)
            view(frame + frames.PACKET, max(len(raw), 1))[: len(raw)] = np.frombuffer(raw, np.uint8)
            frames.commit(self._tx)
        frames.publish(self._tx)
        self.nic.engine.kick()

    def receive_raw(self) -> bytes | None:
        """The next packet that the NIC has sent."""
        frame = frames.next_frame(self._rx)
        assert frame >= 0
        if frame == 0:
            return None
        header = view(frame, frames.FRAME.size, frames.FRAME.dtype)[0]
        assert header["icrc"] == 0
        raw = view(frame + frames.PACKET, int(header["nbytes"])).tobytes()
        assert (int(header["peer_high"]), int(header["peer_low"])) == tuple(np.frombuffer(PEER_GID, np.int64).tolist())
        frames.consume(self._rx)
        frames.release(self._rx)
        return raw

    @property
    def fill(self) -> int:
        """Bytes of frames that the NIC has sent and this end has not taken."""
        return int(self._pipes[1][0] - self._pipes[1][8])

    @property
    def window(self) -> int:
        """Packets that the NIC keeps in flight for a QP."""
        return int(view(self.wire, WIRE.size, WIRE.dtype)[0]["window"])

    def counters(self) -> dict[str, int]:
        """The NIC's counters."""
        return dict(self.nic.counters)


class Peer:
    """One QP of the lab's NIC, and the other end by hand. `psn` numbers the NIC's packets, `own` the peer's.

    The QP has `sq` and `rq` WQEs and a receive CQ of `recv_cq` entries; the rest is for `QP.connect`. `beside` has what
    a test makes for it, and is closed with it.
    """

    def __init__(
        self, lab: Lab, mtu: int = 1024, psn: int = 100, own: int = 500, service: int = 0, sq: int = 64, rq: int = 16,
        recv_cq: int = 256, core_direct: bool = False, **connect: Any,
    ):
        self.lab, self.mtu, self.psn, self.own, self.service = lab, mtu, psn, own, service
        self.beside = ExitStack()
        init = {"qp_type": int(service != 0), "core_direct_master": core_direct}
        self.queue = Queue(lab.pd, sq, rq, recv_cq=lab.ctx.create_cq(recv_cq), **init)
        self.qpn = self.queue.qp.qpn
        options = {"ack_timeout": 14, "retry_cnt": 3, "rnr_retry": 3, "min_rnr_timer": 12, **connect}
        self.queue.qp.connect(QpEndpoint(PEER_QPN, PEER_GID, 0, mtu, own), psn=psn, **options)
        assert self.row["wire"] == lab.wire
        self.before = lab.counters()

    @property
    def row(self) -> Any:
        return self.queue.row

    def close(self) -> None:
        self.beside.close()
        self.queue.qp.close()
        self.queue.send_cq.close()
        self.queue.recv_cq.close()

    # --- packets

    def send(self, *packets: Packet | Iterable[Packet]) -> None:
        """Packets for the QP, all at once; their QPN is filled in unless one is given."""
        flat: list[Packet] = []
        for packet in packets:
            flat += [packet] if isinstance(packet, Packet) else packet
        self.lab.send_raw(*(replace(packet, qpn=packet.qpn or self.qpn).build() for packet in flat))

    def receive(self) -> Packet:
        """The next packet of the NIC, whose BTH is what all of them have (9.2)."""
        raw = until(self.lab.receive_raw, "a packet")
        packet = Packet.parse(raw)
        assert (packet.qpn, packet.migrated, packet.version, packet.pkey) == (PEER_QPN, 1, 0, 0xFFFF)
        assert packet.opcode in (MASKED_SWAP, MASKED_ADD) or packet.opcode >> 5 == self.service >> 5
        return packet

    def take(self, count: int) -> list[Packet]:
        return [self.receive() for _ in range(count)]

    def drain(self) -> list[Packet]:
        """All that the NIC sends without anything else happening."""
        self.lab.settle()
        packets = []
        while (raw := self.lab.receive_raw()) is not None:
            packets.append(Packet.parse(raw))
            if not self.lab.fill:
                self.lab.settle()
        return packets

    def silent(self) -> bool:
        """Whether the NIC sends nothing."""
        return not self.drain()

    def ack(self, psn: int, syndrome: int = ACK, msn: int = 0) -> None:
        self.send(Packet(ACKNOWLEDGE, psn % PSNS, aeth=(syndrome, msn)))

    def expect_ack(self, psn: int, syndrome: int = ACK, msn: int | None = None) -> Packet:
        """The only packet that comes is this acknowledgement."""
        (packet,) = self.drain()
        assert (packet.opcode, packet.psn) == (ACKNOWLEDGE, psn % PSNS)
        assert packet.aeth is not None
        assert packet.aeth[0] == syndrome, hex(packet.aeth[0])
        if msn is not None:
            assert packet.aeth[1] == msn
        assert (packet.ack, packet.solicited, packet.payload) == (0, 0, b"")
        return packet

    # --- what it has done

    def counted(self, *names: str) -> Any:
        """How much these counters have grown since the QP was made."""
        now = self.lab.counters()
        values = tuple(now[name] - self.before[name] for name in names)
        return values[0] if len(values) == 1 else values


PeerMaker = Callable[..., Peer]


@pytest.fixture(scope="module")
def lab():
    opened = Lab()
    yield opened
    opened.close()


class _Closable(Protocol):
    def close(self) -> None: ...


Player = TypeVar("Player", bound=_Closable)


def players(lab: Lab, kind: Callable[..., Player]) -> Iterator[Callable[..., Player]]:
    """Yield a function that makes players of this kind. What they leave behind does not disturb the next test."""
    made: list[Player] = []

    def make(**options: Any) -> Player:
        lab.here.bytes[:] = np.arange(SIZE) * 7 + 1
        lab.there.bytes[:] = 0
        made.append(kind(lab, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    lab.settle()
    while lab.receive_raw() is not None:
        pass


@pytest.fixture
def peer(lab):
    """Makes peers."""
    yield from players(lab, Peer)
