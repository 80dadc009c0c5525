"""Two software NICs that a test runs step by step, on a virtual clock: traffic at full speed that repeats exactly.

The engines' threads are stopped meanwhile. `drive` is engine, clock and program in one loop: it posts what streams have
prepared, runs `step` of both NICs, reads completions into logs, and jumps to the next timer when there is nothing to
do.
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpunetio import verbs
from gpunetio.fabric.faults import Faults
from gpunetio.fabric.injector import FAULTS, HELD, HELD_BACK, SLOT, FaultInjector, HeldFrame
from gpunetio.formats.commands import QpState
from gpunetio.formats.doorbell import PI_MASK, WQE_IDX_SHIFT
from gpunetio.formats.layout import Entry
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import be32, copy, ld8, ld64, st_release32
from gpunetio.jit.struct_view import struct_view
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.qp import QpRow
from gpunetio.nic.state.wire import WIRE, WireState
from gpunetio.nic.state.work_queue import WorkQueue, entry
from gpunetio.nic.state.worker import WorkerState
from gpunetio.nic.turn.step import scan_records, step
from gpunetio.providers.soft import open_device
from nic_rig import Queue, view

TICK_NS = 2000  # of the virtual clock, for each turn
START_NS = 1_000_000
SURPLUS = 16  # room in a log for completions that should not be there
DONE, STUCK, TOO_LONG, FAILED = 0, 1, 2, 3  # how `drive` ended
_RTS = int(QpState.RTS)

# One direction of a pair of QPs: a program of WQEs and receives, its progress, and logs of the CQEs. Receives are
# posted as room becomes free, or `slow_batch` every `slow_ns`.
STREAM = Entry("stream", 256, """
    doorbell         0  i64
    sq_record        8  i64
    sq_addr         16  i64
    sq_entries      24  i64
    wqes            32  i64
    count           40  i64
    posted          48  i64
    done            56  i64
    send_cq         64  i64
    send_log        72  i64
    send_record     80  i64
    sent_cqes       88  i64
    rq_addr         96  i64
    rq_entries     104  i64
    rq_stride      112  i64
    rq_record      120  i64
    receives       128  i64
    expected       136  i64
    offered        144  i64
    arrived        152  i64
    recv_cq        160  i64
    recv_log       168  i64
    recv_record    176  i64
    got_cqes       184  i64
    slow_ns        192  i64
    slow_batch     200  i64
    slow_at        208  i64
    failed         216  i64
    lossy          224  i64
""")
stream_at = struct_view(STREAM)


@engine_function
def _poll(cq, log, ci, record, target, room):
    """Copy new CQEs to `target`: how many there are now."""
    while ci < room:
        cqe = cq + (ci & ((1 << log) - 1)) * 64
        op_own = ld8(cqe + 63)
        if op_own >> 4 == 15 or op_own & 1 != (ci >> log) & 1:
            break
        copy(target + 64 * ci, cqe, 64)
        ci += 1
        st_release32(record, be32(ci & 0xFFFFFF))
    return ci


@engine_function
def _pump(stream, now):
    """What the program of one stream does: how much that was."""
    s = stream_at(stream)
    did = s.done + s.arrived
    if s.count:
        s.done = _poll(s.send_cq, s.send_log, s.done, s.send_record, s.sent_cqes, s.count + SURPLUS)
    s.arrived = _poll(s.recv_cq, s.recv_log, s.arrived, s.recv_record, s.got_cqes, s.expected + SURPLUS)
    did = s.done + s.arrived - did
    if s.done and ld8(s.sent_cqes + 64 * s.done - 1) >> 4 == 13:
        s.failed = 1
    if s.arrived and ld8(s.got_cqes + 64 * s.arrived - 1) >> 4 == 14:
        s.failed = 1
    before = s.offered
    limit = min(s.expected, s.arrived + s.rq_entries)
    if s.slow_ns:
        if now < s.slow_at:
            limit = s.offered
        else:
            limit = min(limit, s.offered + s.slow_batch)
            s.slow_at = now + s.slow_ns
    while s.offered < limit:
        copy(s.rq_addr + s.offered % s.rq_entries * s.rq_stride, s.receives + s.offered * s.rq_stride, s.rq_stride)
        s.offered += 1
    if s.offered != before:
        st_release32(s.rq_record, be32(s.offered & PI_MASK))
        did += 1
    before = s.posted
    while s.posted < min(s.count, s.done + s.sq_entries):
        copy(s.sq_addr + s.posted % s.sq_entries * 64, s.wqes + s.posted * 64, 64)
        s.posted += 1
    if s.posted != before:
        st_release32(s.sq_record, be32(s.posted & PI_MASK))
        st_release32(s.doorbell, be32((s.posted & PI_MASK) << WQE_IDX_SHIFT))
        did += 1
    return did


@engine_function
def _over(streams, count):
    """Whether every stream has had its completions, as far as it must have them."""
    for i in range(count):
        s = stream_at(streams + i * STREAM.size)
        if s.done < s.count or (s.arrived < s.expected and s.lossy == 0):
            return False
    return True


@engine_function
def _earlier(a, b):
    return b if b > 0 and (a == 0 or b < a) else a


@engine_function
def next_timer(nic):
    """When something is due on a NIC, or 0."""
    n = WorkerState(nic)
    best = 0
    for i in range(n.active_count):
        q = QpRow(WorkQueue(entry(nic, i)).row)
        if q.state == _RTS and q.sq_ci != q.sq_pi:
            best = _earlier(best, q.retry_at if q.retry_at else q.timer_at)
    for i in range(n.wire_count):
        faults = WireState(ld64(n.wires + 8 * i)).faults
        if faults:
            for j in range(HELD_BACK):
                best = _earlier(best, HeldFrame(FaultInjector(faults).slots + j * (HELD.size + SLOT)).due)
    return best


@engine_function
def _let_through(nic):
    """How many frames a NIC's injectors have passed on."""
    n = WorkerState(nic)
    passed = 0
    for i in range(n.wire_count):
        w = WireState(ld64(n.wires + 8 * i))
        if w.faults:
            passed += FaultInjector(w.faults).passed
    return passed


@engine_function
def drive(here, there, streams, count, turns, tick_ns):
    """Turn both NICs over until the streams are over and nothing is left to do: DONE or why not."""
    now = WorkerState(here).now
    idle = 0
    for _ in range(turns):
        now += tick_ns
        WorkerState(here).now = now
        WorkerState(there).now = now
        did = 0
        for i in range(count):
            did += _pump(streams + i * STREAM.size, now)
            if stream_at(streams + i * STREAM.size).failed:
                return FAILED
        before = _let_through(here) + _let_through(there)
        did += step(here) + step(there)
        did += _let_through(here) + _let_through(there) - before
        idle = 0 if did else idle + 1
        if idle < 2:
            continue
        scan_records(here)
        scan_records(there)
        best = _earlier(next_timer(here), next_timer(there))
        for i in range(count):
            s = stream_at(streams + i * STREAM.size)
            if s.slow_ns and s.offered < min(s.expected, s.arrived + s.rq_entries):
                best = _earlier(best, s.slow_at)
        if best:
            now = max(now, best - tick_ns)
            idle = 0
        elif idle > 3:  # turns after the last look at the records have found nothing
            return DONE if _over(streams, count) else STUCK
    return TOO_LONG


class VirtualNics:
    """Two NICs with a wire, `faults` for the frames that leave the first and the second.

    They are opened and set up as usual; `run` does the rest.
    """

    def __init__(self, faults: tuple[Faults | None, Faults | None] = (None, None), link_mtu: int = 336):
        self.providers = [
            open_device(f"soft{i}", PortConfig(mtu=link_mtu, faults=faults[i], workers=1)) for i in range(2)
        ]
        self.contexts = [verbs.Context(provider) for provider in self.providers]
        self.nics: list[SoftNic] = [provider.nic for provider in self.providers]
        self.pds = [ctx.create_pd() for ctx in self.contexts]
        self.now = START_NS

    def stop(self) -> None:
        """Stop the engines' threads and the clock."""
        for nic in self.nics:
            stop_engine(nic)
            nic.record["now"], nic.record["virtual_time"] = self.now, 1

    def go_on(self) -> None:
        """Start the engines' threads again, so that commands are served."""
        for nic in self.nics:
            nic.record["virtual_time"] = 0
            start_engine(nic)

    def run(self, streams: Iterable["Stream"], turns: int = 2_000_000) -> None:
        """Carry the streams out. A hang is a failure that shows both QPs."""
        streams = list(streams)
        rows = np.zeros(len(streams), STREAM.dtype)
        for i, stream in enumerate(streams):
            rows[i] = stream.record
        here, there = (nic.control_address for nic in self.nics)
        how = drive(here, there, rows.ctypes.data, len(rows), turns, TICK_NS)
        for stream, row in zip(streams, rows):
            stream.record[...] = row
        self.now = int(self.nics[0].record["now"])
        if how != DONE:
            raise AssertionError(self._obituary(how, streams))

    def _obituary(self, how: int, streams: list["Stream"]) -> str:
        reason = {STUCK: "nothing is left to do", TOO_LONG: "the turns are used up", FAILED: "a WQE failed"}[how]
        lines = [f"{reason} at {self.now} ns:"]
        for stream in [s for s in streams if s.record["failed"] or s.record["done"] < s.record["count"]][:2]:
            lines.append(" ".join(f"{name}={stream.record[name]}" for name in ("posted", "done", "offered", "arrived")))
            for queue in (stream.sender, stream.receiver):
                row = queue.row
                lines.append(f"  {queue.nic.name}: " + " ".join(f"{name}={row[name]}" for name in row.dtype.names))
        lines += [str(report) for nic in self.nics for report in nic.reports]
        return "\n".join(lines)

    def injector(self, side: int) -> Any:
        """The record of a NIC's fault injector, or None."""
        nic = self.nics[side]
        wire = int(view(int(nic.record["wires"]), 8, np.int64)[0])
        address = int(view(wire, WIRE.size, WIRE.dtype)[0]["faults"])
        return view(address, FAULTS.size, FAULTS.dtype)[0] if address else None

    def close(self) -> None:
        if not self.nics[0].engine.running:
            self.go_on()
        for ctx in self.contexts:
            ctx.close()

    def __enter__(self) -> "VirtualNics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stop_engine(nic: SoftNic) -> None:
    """Stop the thread of a NIC with one worker: whoever calls this turns it over from now on."""
    assert len(nic.records) == 1, f"open {nic.name} with workers=1"
    nic.record["stop"] = 1
    nic.engine.kick()
    end = time.monotonic() + 10
    while nic.engine.running:
        assert time.monotonic() < end, f"the engine of {nic.name} does not stop"
        time.sleep(1e-4)


def start_engine(nic: SoftNic) -> None:
    """Undo `stop_engine`."""
    nic.engine.start()


class Stream:
    """WQEs from one queue to another, with the receives that they take; `sent` and `got` are the CQEs afterwards.

    `wqes` are 64 bytes each, `receives` as many bytes as the receive queue's stride. Of a `lossy` stream not all
    receives are used up.
    """

    def __init__(
        self, sender: Queue, receiver: Queue, wqes: np.ndarray, receives: np.ndarray, slow_ns: int = 0,
        slow_batch: int = 4, lossy: bool = False,
    ):
        self.sender, self.receiver = sender, receiver
        self._wqes, self._receives = np.ascontiguousarray(wqes), np.ascontiguousarray(receives)
        self._sent, self._got = (np.zeros((len(part) + SURPLUS, 64), np.uint8) for part in (wqes, receives))
        self.record = np.zeros((), STREAM.dtype)
        a, b = sender.qp, receiver.qp
        values = {
            "doorbell": a.doorbell_register, "sq_record": a.dbr_address + 4, "sq_addr": a.sq_address,
            "sq_entries": a.sq_entries, "wqes": self._wqes.ctypes.data, "count": len(wqes),
            "rq_addr": b.rq_address, "rq_entries": b.rq_entries, "rq_stride": b.rq_stride, "rq_record": b.dbr_address,
            "receives": self._receives.ctypes.data, "expected": len(receives),
            "sent_cqes": self._sent.ctypes.data, "got_cqes": self._got.ctypes.data,
            "slow_ns": slow_ns, "slow_batch": slow_batch, "lossy": lossy,
        }
        for side, cq in (("send", sender.send_cq), ("recv", receiver.recv_cq)):
            values |= {
                f"{side}_cq": cq.ring_address, f"{side}_log": cq.entries.bit_length() - 1,
                f"{side}_record": cq.dbr_address,
            }
        for name, value in values.items():
            self.record[name] = value

    @property
    def sent(self) -> np.ndarray:
        """The send queue's CQEs so far."""
        return self._sent[: int(self.record["done"])]

    @property
    def got(self) -> np.ndarray:
        """The receive queue's CQEs so far."""
        return self._got[: int(self.record["arrived"])]

