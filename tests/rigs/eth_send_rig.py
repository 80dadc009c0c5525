"""Send queues of Ethernet packets, made by DEVX, and WQEs for them."""

import time
from typing import Any

import numpy as np

from eth_receive_rig import Cq, Ring
from ethernet_rig import Maker, nic_of
from gpunetio.formats.commands import Opcode
from gpunetio.formats.cqe import CqeOpcode
from gpunetio.formats.ethernet import QueueState
from gpunetio.formats.wqe import ETH_INSERT_SVLAN, ETH_INSERT_VLAN, SEGMENT, WQEBB, CtrlFlags, EthChecksum, WqeOpcode
from gpunetio.verbs import DevxObject
from nic_rig import PATIENCE, view

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
    ) -> int:  # fmt: skip
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


def opcode_of(cqe: Any) -> CqeOpcode:
    return CqeOpcode(int(cqe["op_own"]) >> 4)


def error_of(cqe: Any) -> tuple[int, int]:
    """Syndrome and vendor syndrome of an error CQE."""
    assert opcode_of(cqe) == CqeOpcode.REQ_ERR
    word = int(cqe["timestamp"]) & 0xFFFF_FFFF
    return word & 0xFF, word >> 8
