"""A queue pair driven by hand: WQEs from bytes, stores to doorbells, CQEs read from memory. No kernel, no library."""

import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from gpunetio import verbs
from gpunetio.formats.doorbell import UAR_REG_HALF
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.state.reasons import Reason
from gpunetio.verbs import CQ, MR, PD, QP
from udp_rig import own_address

PATIENCE = 30.0  # seconds after which a NIC counts as hung: it may share its core with many

NOP, WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CS, FA = 0x00, 0x08, 0x09, 0x0A, 0x0B, 0x10, 0x11, 0x12
MASKED_CS, MASKED_FA, DUMP, MMO = 0x14, 0x15, 0x23, 0x2F
OPMOD = {4: 0x08, 8: 0x09}  # of masked atomics, by the bytes of the word
REQ, RESP_WRITE_IMM, RESP_SEND, RESP_SEND_IMM, REQ_ERR, RESP_ERR = 0, 1, 2, 3, 13, 14
ON_ERROR, ON_FIRST_ERROR, ALWAYS, WITH_EVENT = range(4)
LOCAL_LENGTH, LOCAL_QP_OP, LOCAL_PROT, FLUSHED = 0x01, 0x02, 0x04, 0x05
REMOTE_INVALID, REMOTE_ACCESS, REMOTE_OP, RETRY_EXCEEDED, RNR_EXCEEDED = 0x12, 0x13, 0x14, 0x15, 0x16
RINGS = ("record", "register", "both", "uar", "other half", "blueflame", "uar blueflame")


def view(address: int, nbytes: int, dtype: Any = np.uint8) -> np.ndarray:
    """Memory at an address, writable, while its owner lives."""
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), dtype)


def until(done: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
    """Wait until `done()` is true and return it; fail after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := done()):
        assert time.monotonic() < end, f"waited {timeout:g} s for {what}"
        time.sleep(20e-6)
    return value


# --- WQEs ----------------------------------------------------------------------------------------------------------


def raddr(address: int, rkey: int, junk: int = 0) -> bytes:
    return struct.pack(">QII", address & (1 << 64) - 1, rkey, junk)


def data(address: int, lkey: int, nbytes: int) -> bytes:
    return struct.pack(">IIQ", nbytes, lkey, address & (1 << 64) - 1)


def inline(payload: bytes) -> bytes:
    segment = struct.pack(">I", len(payload) | 1 << 31) + payload
    return segment + bytes(-len(segment) % 16)


def atomic(swap_add: int, compare: int = 0) -> bytes:
    return struct.pack(">QQ", swap_add & (1 << 64) - 1, compare & (1 << 64) - 1)


def masked_cs(swap: int, compare: int, swap_mask: int, compare_mask: int, nbytes: int) -> bytes:
    """The operands of a masked compare and swap."""
    return b"".join(word.to_bytes(nbytes, "big") for word in (swap, compare, swap_mask, compare_mask))


def masked_fa(add: int, boundary: int, nbytes: int) -> bytes:
    """The operands of a masked fetch and add; what is reserved holds anything."""
    return (add.to_bytes(nbytes, "big") + boundary.to_bytes(nbytes, "big")).ljust(16, b"\xa5")


def control(
    opcode: int, index: int, qpn: int, ds: int, ce: int = ALWAYS, imm: int = 0, junk: int = 0, opmod: int = 0
) -> bytes:
    """A control segment; `junk` goes where the device must not look (signature, DCI stream, fence mode)."""
    first, flags = opmod << 24 | (index & 0xFFFF) << 8 | opcode, ce << 2 | (junk & 7) << 5
    return struct.pack(">IIBHBI", first, qpn << 8 | ds, junk & 0xFF, junk & 0xFFFF, flags, imm)


class Cqe(NamedTuple):
    """A CQE's fields; `syndrome` and `vendor` are 0 unless the opcode says error. `payload` is what it carries."""

    opcode: int
    owner: int
    counter: int
    qpn: int
    wqe_opcode: int
    user_index: int
    byte_cnt: int
    imm: int
    syndrome: int
    vendor: int
    payload: bytes = b""


def parse_cqe(raw: bytes, before: bytes = b"") -> Cqe:
    """Parse a CQE. `before` are the 64 bytes before it, in an entry of 128 bytes."""
    user_index, imm, byte_cnt = struct.unpack_from(">I I 4x I", raw, 32)
    opcode_qpn, counter, _, op_own = struct.unpack_from(">IHBB", raw, 56)
    opcode = op_own >> 4
    vendor, syndrome = (raw[54], raw[55]) if opcode in (REQ_ERR, RESP_ERR) else (0, 0)
    qpn, wqe_opcode = opcode_qpn & 0xFFFFFF, opcode_qpn >> 24
    assert op_own >> 2 & 3 < (3 if before else 2), "a format that an entry of this size cannot have"
    payload = (b"", raw[:byte_cnt], before[:byte_cnt])[op_own >> 2 & 3]
    return Cqe(opcode, op_own & 1, counter, qpn, wqe_opcode, user_index, byte_cnt, imm, syndrome, vendor, payload)


class Completions:
    """Reads a CQ from its memory, as a program would."""

    def __init__(self, cq: CQ):
        self.cq, self.ci = cq, 0
        self.ring = view(cq.ring_address, cq.entries * cq.cqe_size).reshape(-1, cq.cqe_size)
        self.record = view(cq.dbr_address, 4, ">u4")

    def poll(self) -> Cqe | None:
        """The next CQE, if it is there; the consumer record follows."""
        slot, lap = self.ci & (self.cq.entries - 1), self.ci // self.cq.entries & 1
        op_own = int(self.ring[slot, -1])
        if op_own >> 4 == 15 or op_own & 1 != lap:
            return None
        entry = self.ring[slot].tobytes()
        cqe = parse_cqe(entry[-64:], entry[:-64])
        self.ci += 1
        self.record[0] = self.ci & 0xFFFFFF
        return cqe

    def next(self, timeout: float = PATIENCE) -> Cqe:
        return until(self.poll, f"CQE {self.ci} of {self.cq}", timeout)

    def take(self, count: int, timeout: float = PATIENCE) -> list[Cqe]:
        return [self.next(timeout) for _ in range(count)]

    def none_for(self, seconds: float = 0.02) -> bool:
        """Whether nothing completes for a while."""
        time.sleep(seconds)
        return self.poll() is None


class Queue:
    """One end: a QP with its CQs. `index` is the next send WQE's, `received` the next receive's."""

    def __init__(
        self, pd: PD, sq: int = 64, rq: int = 16, rq_sges: int = 4, send_cq: CQ | None = None,
        recv_cq: CQ | None = None, **init: Any,
    ):
        self.send_cq = send_cq or pd.ctx.create_cq(256)
        self.recv_cq = recv_cq or pd.ctx.create_cq(256)
        self.qp: QP = pd.create_qp(
            sq_wr=sq, rq_wr=rq, send_cq=self.send_cq, receive_cq=self.recv_cq, receive_max_sges=rq_sges, **init
        )
        self.done, self.arrived = Completions(self.send_cq), Completions(self.recv_cq)
        self.sq = view(self.qp.sq_address, self.qp.sq_entries * 64)
        self.rq = view(self.qp.rq_address, self.qp.rq_entries * self.qp.rq_stride) if rq else self.sq[:0]
        self.record = view(self.qp.dbr_address, 8, ">u4")  # receives, sends
        self.register = view(self.qp.doorbell_register, 64, ">u8")
        self.uar = view(self.qp.uar.reg_addr, 64, ">u8")
        self.index = self.received = self.last = 0  # `last` is the index of the latest send WQE

    @property
    def nic(self) -> Any:
        return self.qp.ctx.provider.nic  # type: ignore[attr-defined]

    @property
    def row(self) -> Any:
        """The NIC's row of this QP."""
        return self.nic.qps[self.qp.qpn]

    # --- sends

    def write_wqe(self, wqe: bytes) -> int:
        """Put a WQE's bytes at `index`, around the ring's end if need be, and move on; returns its index."""
        index = self.last = self.index
        whole = np.frombuffer(wqe, np.uint8)
        at = (index % self.qp.sq_entries) * 64
        self.sq[(at + np.arange(len(whole))) % len(self.sq)] = whole
        self.index += max(1, -(-len(wqe) // 64))
        return index

    def put(self, opcode: int, *segments: bytes, **fields: int) -> int:
        """Write a well-formed WQE: its index. Nothing is rung."""
        body = b"".join(segments)
        return self.write_wqe(control(opcode, self.index, self.qp.qpn, 1 + len(body) // 16, **fields) + body)

    def doorbell(self, index: int | None = None) -> int:
        """The 64 bits that ring for a producer index."""
        return ((self.index if index is None else index) & 0xFFFF) << 40 | self.qp.qpn << 8

    def ring(self, how: str = "both", index: int | None = None) -> None:
        """Announce the WQEs up to `index` (default: all) by the record, a register, or both, or by BlueFlame."""
        if how.endswith("blueflame"):
            assert index is None
            register = self.uar if how.startswith("uar") else self.register
            register[:] = self.sq.view(">u8").reshape(-1, 8)[self.last % self.qp.sq_entries]
            return
        value = self.doorbell(index)
        if how in ("both", "register"):
            self.register[0] = value
        if how == "uar":
            self.uar[0] = value
        if how == "other half":
            view(self.qp.uar.reg_addr + UAR_REG_HALF, 8, ">u8")[0] = value
        if how in ("both", "record"):
            self.record[1] = value >> 40
        if how == "both":  # as the device library does: the second ring covers a record that came late
            self.register[0] = value

    def post(self, opcode: int, *segments: bytes, how: str = "both", **fields: Any) -> int:
        index = self.put(opcode, *segments, **fields)
        self.ring(how)
        return index

    # --- receives

    def write_receive(self, *segments: bytes) -> int:
        """Put a receive WQE; a list shorter than the slot ends with lkey 0x100. The record is left alone."""
        index, stride = self.received, self.qp.rq_stride
        wqe = b"".join(segments)
        if len(wqe) < stride:
            wqe = (wqe + data(0, 0x100, 0)).ljust(stride, b"\xa5")
        at = index % self.qp.rq_entries * stride
        self.rq[at : at + stride] = np.frombuffer(wqe[:stride], np.uint8)
        self.received += 1
        return index

    def receive(self, *segments: bytes) -> int:
        """Post a receive."""
        index = self.write_receive(*segments)
        self.record[0] = self.received & 0xFFFF
        return index

    # --- states

    def reset(self) -> None:
        """The QP to RST, and the counts to 0."""
        self.qp.reset()
        self.index = self.received = self.last = 0

    def idle(self) -> bool:
        """Whether the NIC has dealt with all that was rung."""
        return int(self.row["sq_ci"]) == self.index


def connect(a: Queue, b: Queue, **attributes: Any) -> None:
    """To RTS, with timeouts in microseconds."""
    quick: dict[str, Any] = {"ack_timeout": 16, "retry_cnt": 1, "rnr_retry": 1, "min_rnr_timer": 1}
    a.qp.connect(b.qp, **{**quick, **attributes})


class Buffer:
    """Registered memory with guard bytes on both sides."""

    GUARD = 256

    def __init__(self, pd: PD, nbytes: int, fill: int | None = None, **registration: Any):
        self.whole = np.zeros(nbytes + 2 * self.GUARD + 8, np.uint8)
        start = self.GUARD + -int(self.whole.ctypes.data) % 8
        self.bytes = self.whole[start : start + nbytes]
        if fill is not None:
            self.bytes[:] = np.arange(nbytes) * 7 + fill
        self.start = start
        self.mr: MR = pd.register(self.bytes, **registration)
        self.address, self.key = self.mr.iova, self.mr.lkey
        self.nbytes = nbytes

    def at(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A data segment."""
        return data(self.address + offset, self.key, self.nbytes - offset if nbytes is None else nbytes)

    def remote(self, offset: int = 0) -> bytes:
        """A remote address segment."""
        return raddr(self.address + offset, self.key)

    def word(self, offset: int = 0) -> int:
        """The 64-bit host word at `offset`."""
        return int.from_bytes(self.bytes[offset : offset + 8].tobytes(), "little")

    def set_word(self, offset: int, value: int) -> None:
        self.bytes[offset : offset + 8] = np.frombuffer((value & (1 << 64) - 1).to_bytes(8, "little"), np.uint8)


def reports_of(nic: Any, qpn: int) -> Iterator[Any]:
    """What the NIC has refused on one QP."""
    return (report for report in nic.reports if report.qpn == qpn)


# --- two ends --------------------------------------------------------------------------------------------------------

SIZE = 1 << 13  # bytes of the ends' memory
NAKS = {
    REMOTE_INVALID: Reason.NAK_INVALID_REQUEST, REMOTE_ACCESS: Reason.NAK_REMOTE_ACCESS,
    REMOTE_OP: Reason.NAK_REMOTE_OPERATION,
}


@dataclass
class Ends:
    """Two connected QPs, on one NIC or on two, with memory: `here` is a's and holds a pattern, `there` is b's."""

    a: Queue
    b: Queue
    here: Buffer
    there: Buffer

    @classmethod
    def open(cls, *names: str, **near: Any) -> Self:
        """Open NICs of these names. The queue `a` is created with the arguments `near`."""
        pds = [verbs.open(name).create_pd() for name in names]
        ends = cls(Queue(pds[0], **near), Queue(pds[-1]), Buffer(pds[0], SIZE, fill=1), Buffer(pds[-1], SIZE))
        connect(ends.a, ends.b)
        return ends

    @classmethod
    def apart(cls, **port: Any) -> Self:
        """Two NICs with these fields of PortConfig, at addresses that nobody else uses; the QPs are in RST."""
        ports = [PortConfig(addresses=(own_address(),), **port) for _ in range(2)]
        pds = [verbs.open(f"soft{i}", port=ports[i]).create_pd() for i in range(2)]
        return cls(Queue(pds[0]), Queue(pds[1]), Buffer(pds[0], SIZE, fill=1), Buffer(pds[1], SIZE))

    def write(self, **fields: Any) -> int:
        """Put an RDMA WRITE of everything."""
        return self.a.put(WRITE, self.there.remote(), self.here.at(), **fields)

    def written(self) -> bool:
        return np.array_equal(self.here.bytes, self.there.bytes)

    def again(self, **attributes: Any) -> None:
        """Reset and connect anew."""
        self.a.reset()
        self.b.reset()
        connect(self.a, self.b, **attributes)

    @property
    def wired(self) -> bool:
        """Whether the ends are on two NICs."""
        return self.a.nic is not self.b.nic

    def refused(self, cqe: Cqe, syndrome: int, reason: Reason) -> None:
        """Assert that a CQE of a's says that b refused its request for `reason`.

        Across a wire a requester hears only the code of a NAK; that b's NIC reports the reason holds everywhere.
        """
        assert error_of(cqe) == (syndrome, NAKS[syndrome] if self.wired else reason)
        assert reason in [report.reason for report in reports_of(self.b.nic, self.b.qp.qpn) if report.responder]

    def close(self) -> None:
        for ctx in (self.a.qp.ctx, self.b.qp.ctx):
            ctx.close()


def error_of(cqe: Cqe) -> tuple[int, int]:
    assert cqe.opcode in (REQ_ERR, RESP_ERR), cqe
    return cqe.syndrome, cqe.vendor


def pause(queue: Queue) -> None:
    """Pause the NIC of a queue, and wait until it stands still."""
    queue.nic.pause()
    until(lambda: queue.nic.record["paused"], "the NIC to stand still")
