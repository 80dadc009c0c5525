"""What the engine does with Ethernet frames, in CPU time of one thread: steering, and the paths in and out.

The NICs' own engines are stopped: whoever measures takes their turns.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import numpy as np
from ethernet_frames import FIELDS, UDP_PORT, flows_of, frame_of, packet_of
from ethernet_results import Result, progress

from gpunetio import Gpu, MemType, PortConfig, eth, kernel
from gpunetio import device as dev
from gpunetio.fabric.ethernet_records import ARRIVED, BATCH, Arrived
from gpunetio.flow import FlowPort, match
from gpunetio.formats import flow
from gpunetio.formats.commands import Opcode
from gpunetio.formats.doorbell import PI_MASK, QP_DBREC
from gpunetio.formats.flow import FTE_MATCH_PARAM, FlowAction, MatchCriteria
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import copy
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.state.flow import Fate
from gpunetio.nic.state.qp import QpRow
from gpunetio.nic.state.worker import WorkerState
from gpunetio.nic.steering.steer import look_up_fate, look_up_frames, select_frame
from gpunetio.nic.turn.step import step
from gpunetio.packet_processing.steering import Steering
from gpunetio.verbs import open

ONE_WORKER = PortConfig(workers=1)  # whose turns are taken; it alone serves Ethernet
FLOWS, MASKS, LAPS = 10_000, 16, 10
ONES: dict[str, Any] = {name: bytes(12) + b"\xff" * 4 if "ip" in name else 0xFFFF for name in FIELDS}
ONES["ip_protocol"] = 0xFF
PIPE_FLOWS = 256
FRAMES = 1 << 10  # of a round of the paths in and out: half of a pipe has room for more, of 64 bytes
LARGE_FRAMES = 1 << 8  # the same, of 1500 bytes
WARM_UP = 8  # rounds that compile, and fill all rings
DEPTH, PACKETS = FRAMES, FRAMES  # of the queues
PATIENCE = 60.0  # seconds for a kernel that posts, and for an engine that stops


# --- the engine's work ------------------------------------------------------------------------------------------------


@engine_function
def steer_all(nic, arrived, count, rounds, fate):
    """Steer frames as if BATCH at a time had arrived. Return how many have had this fate."""
    done = 0
    for _ in range(rounds):
        for first in range(0, count, BATCH):
            some = min(BATCH, count - first)
            look_up_frames(nic, arrived + first * ARRIVED.size, some)
            for i in range(some):
                select_frame(nic, i)
                done += look_up_fate(nic, Arrived(arrived + (first + i) * ARRIVED.size).nbytes) == fate
    return done


@engine_function
def send_all(nic, row, target):
    """Be the engine until WQE `target` - 1 of a send queue is complete. Return the turns that this took."""
    turns = 0
    while QpRow(row).sq_ci != target and QpRow(row).failed == 0:
        step(nic)
        turns += 1
    return turns


@engine_function
def receive_all(nic, counter, target):
    """Be the engine until so many frames have reached their queue, or nothing is left to do. Return the turns."""
    turns = 0
    n = WorkerState(nic)
    while dev.ld64(n.counters + counter) < target and step(nic) > 0:
        turns += 1
    return turns


@engine_function
def copy_all(target, stride, source, nbytes, count):
    """Copy frames one behind another."""
    for i in range(count):
        copy(target + i * stride, source, nbytes)
    return count


@kernel
def post_packets(txq, laddr, lkey, nbytes, count, out):
    """Post packets to a send queue, whose engine does not run."""
    last = 0
    for _ in range(count):
        last = dev.txq_send(txq, laddr, lkey, nbytes, 0, dev.EXCLUSIVE)
    dev.st64(out, last)


# --- frames and rules ------------------------------------------------------------------------------------------------


class Frames:
    """Frames in memory, and the ARRIVED records that a wire would have for them."""

    def __init__(self, frames: Sequence[bytes]):
        size = len(frames[0])
        self._bytes = np.frombuffer(b"".join(frames), np.uint8)
        self.rows = np.zeros(len(frames), ARRIVED.dtype)
        self.rows["frame"], self.rows["nbytes"] = self._bytes.ctypes.data + np.arange(len(frames)) * size, size
        self.address, self.count = self.rows.ctypes.data, len(frames)


class Rules:
    """Flow tables of a NIC, made by mailboxes. One at a time is the root, and all go in the end."""

    def __init__(self, nic: SoftNic):
        self._nic = nic
        self._made: list[tuple[int, int, list[int]]] = []  # table, group, indices

    def __enter__(self) -> Rules:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def execute(self, opcode: Opcode, **fields: Any) -> bytes:
        boxes = mailboxes(opcode)
        out, words = self._nic.execute(bytes(boxes.request.pack(opcode=opcode, **fields)), boxes.answer.size)
        if out[0]:
            raise SystemExit(f"{opcode.name} was refused: {words}")
        return out

    def table(self, log: int) -> int:
        out = self.execute(Opcode.CREATE_FLOW_TABLE, flow_table_context={"log_size": log})
        return flow.CREATE_FLOW_TABLE_OUT.get(out, "table_id")

    def add(self, table: int, start: int, names: Sequence[str], values: Sequence[dict[str, Any]]) -> None:
        """Add a group of entries from index `start` on, which drop."""
        ones = {"outer_headers": {name: ONES[name] for name in names}}
        out = self.execute(
            Opcode.CREATE_FLOW_GROUP, table_id=table, start_flow_index=start, end_flow_index=start + len(values) - 1,
            match_criteria_enable=MatchCriteria.OUTER_HEADERS, match_criteria=ones,
        )
        group = flow.CREATE_FLOW_GROUP_OUT.get(out, "group_id")
        for index, value in enumerate(values, start):
            value_of = FTE_MATCH_PARAM.unpack(bytes(FTE_MATCH_PARAM.pack(outer_headers={n: value[n] for n in names})))
            context = {"group_id": group, "action": FlowAction.DROP, "match_value": value_of}
            self.execute(Opcode.SET_FLOW_TABLE_ENTRY, table_id=table, flow_index=index, flow_context=context)
        self._made.append((table, group, list(range(start, start + len(values)))))

    def root(self, table: int) -> None:
        self.execute(Opcode.SET_FLOW_TABLE_ROOT, op_mod=int(table == 0), table_id=table)

    def close(self) -> None:
        self.root(0)
        for table, group, indices in self._made:
            for index in indices:
                self.execute(Opcode.DELETE_FLOW_TABLE_ENTRY, table_id=table, flow_index=index)
            self.execute(Opcode.DESTROY_FLOW_GROUP, table_id=table, group_id=group)
        for table in {table for table, _, _ in self._made}:
            self.execute(Opcode.DESTROY_FLOW_TABLE, table_id=table)


@contextmanager
def one_core() -> Iterator[None]:
    """This thread, and kernels that it launches, stay on one core, and find in its caches what they leave there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def still(*nics: SoftNic) -> Iterator[None]:
    """The NICs' own engines are stopped."""
    for nic in nics:
        nic.record["stop"] = 1
        nic.engine.kick()
    deadline = time.monotonic() + PATIENCE
    while any(nic.engine.running for nic in nics):
        if time.monotonic() > deadline:
            raise SystemExit("an engine does not stop")
        time.sleep(1e-3)
    for nic in nics:
        nic.record["stop"] = 0
    try:
        yield
    finally:
        for nic in nics:
            nic.engine.start()


def timed(function: Callable[..., object], *args: int) -> int:
    """Nanoseconds of this thread's CPU time: on a busy machine, other programs take their turns between."""
    start = time.thread_time_ns()
    function(*args)
    return time.thread_time_ns() - start


def need(done: int, count: int) -> None:
    """End the program unless all frames went where they were to go."""
    if done != count:
        raise SystemExit(f"{done} of {count} frames went where they were to go")


# --- steering --------------------------------------------------------------------------------------------------------


def steering(rounds: int, masks: int) -> list[Result]:
    """10,000 flows in random order, one rule for each, against one exact rule for all frames."""
    name = f"steering, 10,000 exact rules, {masks} mask{'s' if masks > 1 else ''}"
    result = Result(name, "ns", "one exact rule", "ratio ≤ 1.3" if masks == MASKS else "—")
    values = flows_of(FLOWS, 1)
    for value in values:
        value["ip_protocol"] = 17
    choices: list[tuple[str, ...]] = [names for n in range(1, 5) for names in combinations(FIELDS, n)]
    choices.append(("ip_protocol", *FIELDS))
    share = FLOWS // masks
    with open("soft0", port=ONE_WORKER) as ctx:
        nic: SoftNic = ctx.provider.nic  # type: ignore[attr-defined]
        rules = Rules(nic)
        one, many = rules.table(14), rules.table(14)
        rules.add(one, 0, choices[-1], values[:1])
        for k, names in enumerate(choices[-masks:]):
            rules.add(many, k * share, names, values[k * share : (k + 1) * share])
        progress(f"  {FLOWS} rules are in place")
        order = random.Random(2).sample(range(FLOWS), FLOWS)
        alike = Frames([frame_of(values[0], 64)] * FLOWS)
        mixed = Frames([frame_of(values[i], 64) for i in order])
        sides = ((many, mixed, result.ours), (one, alike, result.theirs))
        for _ in range(rounds):
            for root, frames, samples in sides:
                rules.root(root)
                with still(nic):
                    samples.append(_steered(nic, frames, Fate.DROP))
        rules.root(0)
    return [result]


def _steered(nic: SoftNic, frames: Frames, fate: Fate) -> float:
    """Return the nanoseconds for each frame, all of which have this fate."""
    arguments = nic.control_address, frames.address, frames.count
    need(steer_all(*arguments, 1, fate), frames.count)
    return timed(steer_all, *arguments, LAPS, fate) / (LAPS * frames.count)


def pipes(rounds: int) -> list[Result]:
    """Frames of a few hundred flows in turn, through the pipes of packet_processing, against one rule to a queue."""
    results = []
    frames = Frames([frame_of(flow, 64) for flow in flows_of(PIPE_FLOWS, 3)] * 16)
    with ExitStack() as undo:
        ctx, gpu = undo.enter_context(open("soft0", port=ONE_WORKER)), undo.enter_context(Gpu("host"))
        nic: SoftNic = ctx.provider.nic  # type: ignore[attr-defined]
        pd = ctx.create_pd()
        queues = [undo.enter_context(eth.CyclicRxq(gpu, pd, 64, 2048, queue_id=number)) for number in range(9)]
        for count in (1, 4):
            result = Result(f"steering, pipes of packet_processing, {count} queues", "ns", "one rule to a queue", "—")
            for _ in range(rounds):
                with ExitStack() as made:
                    Steering(ctx, queues[:count], queues[4 : 4 + count], queues[8], (), made)
                    with still(nic):
                        result.ours.append(_steered(nic, frames, Fate.TIR))
                with FlowPort(ctx) as port:
                    port.steer(match.udp(), to=queues[0], count=False)
                    with still(nic):
                        result.theirs.append(_steered(nic, frames, Fate.TIR))
            results.append(result)
    return results


# --- in and out ------------------------------------------------------------------------------------------------------


class End:
    """The queues of one NIC, whose engine stands still while frames are measured."""

    def __init__(self, name: str, gpu: Gpu, stride: int, undo: ExitStack):
        self.ctx = undo.enter_context(open(name, port=ONE_WORKER))
        self.nic: SoftNic = self.ctx.provider.nic  # type: ignore[attr-defined]
        self.gpu, self.pd = gpu, self.ctx.create_pd()
        self.rxq = undo.enter_context(eth.CyclicRxq(gpu, self.pd, PACKETS, stride))
        self.txq = undo.enter_context(eth.EthTxq(gpu, self.pd, DEPTH))
        port = undo.enter_context(FlowPort(self.ctx))
        port.steer(match.udp(dst=UDP_PORT), to=self.rxq, count=False)
        self.memory = undo.enter_context(gpu.alloc(2048, MemType.CPU_GPU))
        self.region = undo.enter_context(self.pd.register(self.memory))
        self._out = undo.enter_context(gpu.alloc(8, MemType.CPU_GPU))

    def post(self, to: bytes, nbytes: int, count: int) -> int:
        """Post copies of a packet to a MAC. Return how many have been posted in all."""
        self.memory.array[:nbytes] = np.frombuffer(packet_of(to, self.nic.mac, nbytes), np.uint8)
        arguments = (self.txq, self.memory, self.region.lkey, nbytes, count, self._out)
        if not post_packets[1, 1, self.gpu](*arguments).wait(PATIENCE):
            raise SystemExit("the kernel that posts has not ended")
        last = int(self._out.array.view(np.int64)[0])
        if last < 0:
            raise SystemExit(f"a packet was not posted: status {last}")
        return last + 1

    def send(self, target: int) -> int:
        """Send what was posted. Return nanoseconds."""
        return timed(send_all, self.nic.control_address, self.nic.sqs.row_address(self.txq.sqn), target)

    @property
    def received(self) -> int:
        """How many frames have reached the queue."""
        return int(self.nic.counters["rx_frame_delivered"])

    def receive(self, target: int) -> int:
        """Take what has arrived. Return nanoseconds."""
        return timed(receive_all, self.nic.control_address, COUNTERS.rx_frame_delivered, target)

    def give_back(self) -> None:
        """Post all that the receive queue has consumed, as a kernel does that has seen its packets."""
        row = self.nic.rqs[self.rxq.rqn]
        record = ctypes.c_uint32.from_address(int(row["dbrec"]) + QP_DBREC.rcv)
        posted = (int(row["consumed"]) + (1 << int(row["log"]))) & PI_MASK
        record.value = int.from_bytes(posted.to_bytes(4, "big"), sys.byteorder)


def paths(rounds: int, nbytes: int) -> list[Result]:
    """Packets from a send queue to a receive queue of the same NIC; and by a pipe to another NIC: both halves."""
    goal = "≥ 15 Mpps" if nbytes == 64 else "—"
    count, stride = (FRAMES, 128) if nbytes == 64 else (LARGE_FRAMES, 2048)
    names = ("engine alone, SQ to receive queue", "send path alone, SQ to pipe", "receive path alone, pipe to queue")
    inside, out, into = results = [
        Result(f"{name}, {nbytes} B", "ns", "memcpy", goal if i != 1 else "—") for i, name in enumerate(names)
    ]
    target = np.zeros(PACKETS * stride, np.uint8)
    with ExitStack() as undo:
        gpu = undo.enter_context(Gpu("host"))
        near, far = End("soft0", gpu, stride, undo), End("soft1", gpu, stride, undo)
        undo.enter_context(still(near.nic, far.nic))
        undo.enter_context(one_core())

        def cross(of: End, to: End) -> tuple[int, int]:
            posted, before = of.post(to.nic.mac, nbytes, count), to.received
            to.give_back()
            sent = of.send(posted)
            came = to.receive(before + count) if to is not of else 0
            need(to.received - before, count)
            return sent, came

        cross(far, near)  # now near knows where far is
        for i in range(WARM_UP + rounds):
            samples = cross(near, near)[0], *cross(near, far)
            copied = timed(copy_all, target.ctypes.data, stride, near.memory.address, nbytes, count)
            if i >= WARM_UP:
                for result, ns in zip((inside, out, into), samples, strict=True):
                    result.ours.append(ns / count)
                    result.theirs.append(copied / count)
    return results
