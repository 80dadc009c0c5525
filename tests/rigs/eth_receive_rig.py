"""Receive queues of Ethernet frames, created through DEVX: rings, completions, and rules that lead to them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ethernet_rig import Maker, nic_of
from flow_rig import TIR, Refused, Steering
from gpunetio import verbs
from gpunetio.enums import Access
from gpunetio.formats.commands import Opcode, WqType
from gpunetio.formats.cqe import CQE64
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.formats.wqe import DATA_SEG, INVALID_LKEY, SEGMENT, SRQ_NEXT_SEG
from gpunetio.jit.compile import engine_function
from gpunetio.memory import HostMemory
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.steering.steer import look_up_frame
from gpunetio.nic.transport.frame_sorting import UNDECIDED, steer_frame
from gpunetio.verbs import DevxObject
from steering_kernels import FRAME, Frames, frame_at

FATES = {offset: name for name, offset in COUNTERS.offsets.items()} | {UNDECIDED: ""}
RECORD = 64  # bytes reserved for a doorbell record after a ring


@engine_function
def _take_each(nic, frames, count):
    for i in range(count):
        f = frame_at(frames + i * FRAME.size)
        look_up_frame(nic, f.address, f.nbytes)
        f.fate = steer_frame(nic, f.address, f.nbytes)


def take(ctx: verbs.Context, frames: Iterable[bytes]) -> list[str]:
    """Give frames to an idle NIC as its wire would. Return the counters that say what became of each."""
    given = Frames([bytes(frame) for frame in frames])
    _take_each(nic_of(ctx).control_address, given.address, len(given))
    return [FATES[fate] for fate in given.rows["fate"].tolist()]


class Ring:
    """Memory with a ring and a doorbell record behind it."""

    def __init__(self, make: Maker, nbytes: int):
        self.memory = HostMemory(nbytes + RECORD)
        self.umem = make.devx.register_umem(self.memory)
        self.record_at = nbytes
        self.record = self.memory.view(np.dtype(">u4"), nbytes, 2)


class Cq(Ring):
    """A completion queue, and how far it was read."""

    def __init__(self, make: Maker, log: int = 8):
        super().__init__(make, 64 << log)
        self.log, self.ci = log, 0
        self.cqes = self.memory.view(CQE64.dtype, 0, 1 << log)
        self.cqes["op_own"] = 0xF1
        umem = self.umem.umem_id
        self.made = make.create(
            Opcode.CREATE_CQ, cq_umem_valid=1, cq_umem_id=umem,
            cq_context={
                "uar_page": make.uar.page_id, "c_eqn": make.devx.query_eqn(), "dbr_umem_valid": 1,
                "dbr_umem_id": umem, "dbr_addr": self.record_at, "log_cq_size": log,
            },
        )

    def take(self) -> list[np.void]:
        """Return the CQEs that are new, and give their places back."""
        new = []
        while True:
            cqe = self.cqes[self.ci & ((1 << self.log) - 1)]
            op_own = int(cqe["op_own"])  # the NIC writes it last
            if op_own >> 4 == 0xF or op_own & 1 != self.ci >> self.log & 1:
                self.record[0] = self.ci & 0xFF_FFFF
                return new
            new.append(cqe.copy())
            self.ci += 1


class Rq(Ring):
    """A receive queue in RDY. `wq` and `context` are fields beside the usual ones."""

    def __init__(
        self, make: Maker, cq: Cq, log: int = 4, wqe: int = SEGMENT, wq: dict[str, Any] | None = None, **context: Any
    ):
        super().__init__(make, wqe << log)
        self.make, self.log, self.wqe, self.posted = make, log, wqe, 0
        self.kind = (wq or {}).get("wq_type", WqType.CYCLIC)
        umem = self.umem.umem_id
        ring = {
            "log_wq_sz": log, "log_wq_stride": wqe.bit_length() - 1, "wq_umem_id": umem, "dbr_umem_id": umem,
            "dbr_addr": self.record_at, **(wq or {}),
        }
        self.made: DevxObject = make.rq(cq.made.number, ring, **context)
        self.modify(QueueState.RST, QueueState.RDY)

    def modify(self, now: QueueState, then: QueueState, **fields: Any) -> None:
        self.made.modify(Opcode.MODIFY_RQ, rq_state=now, ctx={"state": then} | fields)

    @property
    def state(self) -> QueueState:
        return QueueState(self.made.query()["ctx"]["state"])

    def write(self, *segments: tuple[int, int, int], at: int | None = None, following: int = 0) -> None:
        """Write a WQE of data segments (address, lkey, bytes) into the next slot, or another."""
        slot = (self.posted if at is None else at) & ((1 << self.log) - 1)
        place, end = slot * self.wqe, (slot + 1) * self.wqe
        self.memory.array[place:end] = 0
        if self.kind != WqType.CYCLIC:
            self.memory.view(SRQ_NEXT_SEG.dtype, place)[0]["next_wqe_index"] = following
            place += SEGMENT
        for address, lkey, nbytes in (*segments, (0, INVALID_LKEY, 0)):
            if place < end:
                row = self.memory.view(DATA_SEG.dtype, place)[0]
                row["byte_count"], row["lkey"], row["addr"] = nbytes, lkey, address
                place += SEGMENT

    def announce(self, count: int = 1) -> None:
        self.posted += count
        self.record[0] = self.posted & 0xFFFF

    def post(self, *segments: tuple[int, int, int]) -> None:
        self.write(*segments)
        self.announce()


class Buffer:
    """Memory that receives, of the byte 0xEE."""

    def __init__(self, make: Maker, nbytes: int, access: Access = Access.LOCAL_WRITE):
        self.memory = HostMemory(nbytes)
        self.memory.array[:] = 0xEE
        self.region = make.pd.register(self.memory, access=access)

    def at(self, offset: int, nbytes: int) -> tuple[int, int, int]:
        return self.memory.address + offset, self.region.lkey, nbytes

    def bytes(self, offset: int, nbytes: int) -> bytes:
        return self.memory.array[offset : offset + nbytes].tobytes()


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[verbs.Context]:
    """Open a software NIC. Rules made past the context would keep it from closing: they go first."""
    with verbs.open("soft0", **options) as ctx:
        try:
            yield ctx
        finally:
            remove_rules(ctx)


def remove_rules(ctx: verbs.Context) -> None:
    """Remove the root, and the first entry of each table."""
    steering = Steering(nic_of(ctx))
    steering.root(0)
    for table in steering.nic.control.flow_tables.known:
        with contextlib.suppress(Refused):
            steering.delete(table, 0)


def lead(ctx: verbs.Context, tirn: int, tag: int = 0) -> Steering:
    """Lead all frames to a TIR: a root table with one entry."""
    steering = Steering(nic_of(ctx))
    table = steering.table(log=2)
    steering.set(table, steering.group(table, 0, 0, enable=0), 0, to=(TIR, tirn), tag=tag)
    steering.root(table)
    return steering
