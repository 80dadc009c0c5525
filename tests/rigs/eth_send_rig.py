"""Send queues of Ethernet packets, created through DEVX, and WQEs for them."""

import time
from typing import Any

import numpy as np
from scapy.layers.inet import IP
from scapy.layers.l2 import Ether

from eth_receive_rig import Buffer, Cq, Ring, Rq, lead
from ethernet_rig import Maker, nic_of
from gpunetio import verbs
from gpunetio.formats.commands import Opcode
from gpunetio.formats.cqe import CqeOpcode
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.formats.wqe import (
    ETH_INSERT_SVLAN,
    ETH_INSERT_VLAN,
    REAL_TIME_MASK,
    SEGMENT,
    WQEBB,
    CtrlFlags,
    EthChecksum,
    WaitOperation,
    WqeOpcode,
)
from gpunetio.verbs import DevxObject
from nic_rig import PATIENCE, until, view

CHECKSUMS = EthChecksum.L3 | EthChecksum.L4


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % SEGMENT)


def eth(inline: bytes = b"", flags: int = 0, mss: int = 0, vlan: int | None = None, service: bool = False) -> bytes:
    """An Ethernet segment, with the inline headers behind it."""
    head = bytes(4) + bytes([flags, 0]) + mss.to_bytes(2, "big") + bytes(4)
    if vlan is not None:
        insert = ETH_INSERT_VLAN | (ETH_INSERT_SVLAN if service else 0)
        return head + insert.to_bytes(2, "big") + vlan.to_bytes(2, "big")
    return padded((head + len(inline).to_bytes(2, "big") + inline).ljust(SEGMENT, b"\0"))


def pointer(address: int, lkey: int, nbytes: int) -> bytes:
    return nbytes.to_bytes(4, "big") + lkey.to_bytes(4, "big") + address.to_bytes(8, "big")


def inlined(data: bytes) -> bytes:
    return padded((1 << 31 | len(data)).to_bytes(4, "big") + data)


def wait_time(value: int, mask: int = REAL_TIME_MASK, operation: int = WaitOperation.CYCLIC_SMALLER) -> bytes:
    """The segment of a WAIT for a time."""
    return operation.to_bytes(4, "big") + bytes(12) + value.to_bytes(8, "big") + mask.to_bytes(8, "big")


def wait_cq(cqn: int, index: int) -> bytes:
    """The segment of a WAIT for the CQE `index` of a CQ."""
    return bytes(8) + index.to_bytes(4, "big") + cqn.to_bytes(4, "big")


def stamp(ns: int) -> int:
    """A time of day as a WAIT has it."""
    seconds, rest = divmod(ns, 10**9)
    return seconds << 32 | rest


class Sq(Ring):
    """A send queue in RDY. `context` are fields beside the usual ones."""

    def __init__(self, make: Maker, cq: Cq, log: int = 6, wq: dict[str, Any] | None = None, **context: Any):
        super().__init__(make, WQEBB << log)
        self.make, self.ctx, self.cq, self.log, self.pi = make, make.ctx, cq, log, 0
        self.domain = make.domain()
        self.tis = make.tis(self.domain.number)
        umem = self.umem.umem_id
        ring = {"log_wq_sz": log, "wq_umem_id": umem, "dbr_umem_id": umem, "dbr_addr": self.record_at, **(wq or {})}
        self.made: DevxObject = make.sq(cq.made.number, self.tis.number, ring, **context)
        self.register = view(make.devx.doorbell_register(make.uar, self.made), 64, ">u8")
        self.uar = view(make.uar.reg_addr, 64, ">u8")
        self.modify(QueueState.RST, QueueState.RDY)

    def modify(self, now: QueueState, then: QueueState) -> None:
        self.made.modify(Opcode.MODIFY_SQ, sq_state=now, ctx={"state": then})

    @property
    def state(self) -> QueueState:
        return QueueState(self.made.query()["ctx"]["state"])

    @property
    def number(self) -> int:
        return self.made.number

    @property
    def row(self) -> Any:
        return nic_of(self.ctx).sqs[self.number]

    def write(
        self, *segments: bytes, opcode: int = WqeOpcode.SEND, ask: int = CtrlFlags.CQ_UPDATE, opmod: int = 0,
        ds: int | None = None, sqn: int | None = None,
    ) -> int:
        """Write a WQE behind the last one. Return its index."""
        body = b"".join(segments)
        assert len(body) % SEGMENT == 0
        index = self.pi
        words = (
            opmod << 24 | (index & 0xFFFF) << 8 | opcode,
            (self.number if sqn is None else sqn) << 8 | (1 + len(body) // SEGMENT if ds is None else ds),
        )
        wqe = b"".join(word.to_bytes(4, "big") for word in words) + bytes([0, 0, 0, ask]) + bytes(4) + body
        for at in range(0, len(wqe), WQEBB):
            slot = (self.pi & ((1 << self.log) - 1)) * WQEBB
            block = wqe[at : at + WQEBB]
            self.memory.array[slot : slot + len(block)] = np.frombuffer(block, np.uint8)
            self.pi += 1
        return index

    def ring(self, how: str = "register", index: int | None = None) -> None:
        """Announce the WQEs up to `index` (default: all) by the own register, the UAR page's, or the record alone."""
        pi = (self.pi if index is None else index) & 0xFFFF
        self.record[1] = pi
        value = pi << 40 | self.number << 8
        if how == "register":
            self.register[0] = value
        elif how == "uar":
            self.uar[0] = value
        self.ctx.provider.doorbell_rung()

    def post(self, *segments: bytes, how: str = "register", **control: Any) -> int:
        index = self.write(*segments, **control)
        self.ring(how)
        return index

    def done(self, count: int = 1) -> list[np.void]:
        """The next CQEs of the CQ."""
        new: list[np.void] = []
        end = time.monotonic() + PATIENCE
        while len(new) < count:
            new += self.cq.take()
            assert time.monotonic() < end, f"{len(new)} of {count} completions"
        return new


# --- TSO -------------------------------------------------------------------------------------------------------------


def segments(l2: Any, l3: Any, tcp: Any, payload: bytes, mss: int) -> list[bytes]:
    """What a TSO is cut into, made by scapy."""
    count = max(-(-len(payload) // mss), 1)
    frames = []
    for n in range(count):
        head = l3.copy()
        if isinstance(l3, IP):
            head.id = (l3.id + n) & 0xFFFF
        one = tcp.copy()
        one.seq = (tcp.seq + n * mss) & 0xFFFF_FFFF
        one.flags = "".join(
            flag for flag in str(tcp.flags) if not (flag in "FP" and n < count - 1) and not (flag == "C" and n > 0)
        )
        frames.append(bytes(l2 / head / one / payload[n * mss : (n + 1) * mss]))
    return frames


def headers(l2: Any, l3: Any, tcp: Any) -> bytes:
    """Headers with wrong checksums and lengths: the NIC computes them."""
    spoiled = bytearray(bytes(l2 / l3 / tcp))
    at = len(l2) + (2 if isinstance(l3, IP) else 4)
    spoiled[at : at + 2] = b"\x12\x34"
    return bytes(spoiled)


# --- completions -----------------------------------------------------------------------------------------------------


def opcode_of(cqe: Any) -> CqeOpcode:
    return CqeOpcode(int(cqe["op_own"]) >> 4)


def error_of(cqe: Any) -> tuple[int, int]:
    """Syndrome and vendor syndrome of an error CQE."""
    assert opcode_of(cqe) == CqeOpcode.REQ_ERR
    word = int(cqe["timestamp"]) & 0xFFFF_FFFF
    return word & 0xFF, word >> 8


class Port:
    """A send queue, and a receive queue that gets all frames that come back."""

    def __init__(self, ctx: verbs.Context, receives: int = 64, room: int = 2048, **queue: Any):
        self.ctx, self.make, self.nic = ctx, Maker(ctx), nic_of(ctx)
        self.sq = Sq(self.make, Cq(self.make), **queue)
        self.out = Buffer(self.make, 1 << 16)
        self.inbox = Buffer(self.make, receives * room)
        self.arrived, self.room, self.receives, self.taken = Cq(self.make), room, receives, 0
        self.rq = Rq(self.make, self.arrived, log=(receives - 1).bit_length())
        for n in range(receives):
            self.rq.post(self.inbox.at(n * room, room))
        self.domain = self.make.domain()
        self.tir = self.make.direct(self.domain.number, self.rq.made.number)
        lead(ctx, self.tir.number)
        self.mac = self.nic.mac.hex(":")
        self.l2 = Ether(src="02:00:00:00:00:05", dst=self.mac)

    def put(self, offset: int, data: bytes) -> bytes:
        """Put bytes into the buffer. Return the data segment that points to them."""
        self.out.memory.array[offset : offset + len(data)] = list(data)
        return pointer(*self.out.at(offset, len(data)))

    def frames(self, count: int) -> list[bytes]:
        """The frames that have come back since the last call."""
        new: list[Any] = []
        until(lambda: new.extend(self.arrived.take()) or len(new) >= count, f"{count} frames")
        assert len(new) == count
        places = ((self.taken + i) % self.receives * self.room for i in range(count))
        frames = [self.inbox.bytes(place, int(cqe["byte_cnt"])) for place, cqe in zip(places, new, strict=True)]
        self.taken += count
        return frames

    def send(self, *segments: bytes, **control: Any) -> bytes:
        """Send a packet, and return it as it arrives."""
        index = self.sq.post(*segments, **control)
        (cqe,) = self.sq.done()
        assert (opcode_of(cqe), int(cqe["wqe_counter"])) == (CqeOpcode.REQ, index & 0xFFFF), error_of(cqe)
        return self.frames(1)[0]


def recover(port: Port) -> None:
    """ERR, RST, RDY: the NIC forgets its positions, and so does the owner."""
    port.sq.modify(QueueState.ERR, QueueState.RST)
    port.sq.record[1] = port.sq.pi = 0
    port.sq.modify(QueueState.RST, QueueState.RDY)
