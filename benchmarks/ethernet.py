"""Ethernet frames in the software NIC: what steering and receiving cost, each beside its limit in the same run."""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gpunetio import Gpu, eth, open
from gpunetio.fabric.ethernet_records import ARRIVED, BATCH, arrived_at
from gpunetio.fabric.ip_headers import internet_checksum
from gpunetio.formats import flow
from gpunetio.formats.commands import Opcode
from gpunetio.formats.doorbell import PI_MASK, QP_DBREC
from gpunetio.formats.flow import DEST_FORMAT, FTE_MATCH_PARAM, DestinationType, FlowAction, MatchCriteria
from gpunetio.formats.mailboxes import mailboxes
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import copy
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.state.flow import Fate
from gpunetio.nic.steering.steer import read_frames, steer, turn_to
from gpunetio.nic.transport.ethernet import steer_frame

FLOWS, MASKS = 10_000, 16
FIELDS = ("src_ipv4_src_ipv6", "dst_ipv4_dst_ipv6", "udp_sport", "udp_dport")
ONES: dict[str, Any] = {name: bytes(12) + b"\xff" * 4 if "ip" in name else 0xFFFF for name in FIELDS}
RECEIVED = 1 << 14  # frames of a round of the receive path, which the ring has room for


# --- the engine's work, without an engine ---------------------------------------------------------------------------


@engine_function
def steer_all(nic, arrived, count, rounds):
    """Steer frames as if BATCH at a time had arrived. Return how many a rule has dropped."""
    dropped = 0
    for _ in range(rounds):
        for first in range(0, count, BATCH):
            some = min(BATCH, count - first)
            read_frames(nic, arrived + first * ARRIVED.size, some)
            for i in range(some):
                turn_to(nic, i)
                dropped += steer(nic, arrived_at(arrived + (first + i) * ARRIVED.size).nbytes) == Fate.DROP
    return dropped


@engine_function
def receive_all(nic, arrived, count):
    """Give frames to the queues that rules lead to, as a wire does. Return how many were placed."""
    placed = 0
    for first in range(0, count, BATCH):
        some = min(BATCH, count - first)
        read_frames(nic, arrived + first * ARRIVED.size, some)
        for i in range(some):
            turn_to(nic, i)
            a = arrived_at(arrived + (first + i) * ARRIVED.size)
            placed += steer_frame(nic, a.frame, a.nbytes) == COUNTERS.rx_frame_delivered
    return placed


@engine_function
def copy_all(target, stride, arrived, count):
    """Copy frames one behind another."""
    for i in range(count):
        a = arrived_at(arrived + i * ARRIVED.size)
        copy(target + i * stride, a.frame, a.nbytes)
    return count


# --- frames and rules ------------------------------------------------------------------------------------------------


def flows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Different addresses and ports."""
    draw = random.Random(seed)
    return [
        {
            name: bytes(12) + b"\x0a" + draw.randbytes(3) if "ip" in name else draw.randrange(1024, 1 << 16)
            for name in FIELDS
        }
        for _ in range(count)
    ]


def frame_of(values: dict[str, Any], nbytes: int) -> bytes:
    """A frame of UDP over IPv4; what it carries has no checksum."""
    source, destination, *ports = (values[name] for name in FIELDS)
    head = bytes.fromhex("4500") + (nbytes - 14).to_bytes(2, "big") + bytes.fromhex("0000400040110000")
    head += source[12:] + destination[12:]
    head = head[:10] + internet_checksum(head).to_bytes(2, "big") + head[12:]
    udp = b"".join(port.to_bytes(2, "big") for port in ports) + (nbytes - 34).to_bytes(2, "big") + bytes(2)
    return (bytes.fromhex("0200000000020200000000010800") + head + udp).ljust(nbytes, b"x")


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

    def execute(self, opcode: Opcode, tail: bytes = b"", **fields: Any) -> bytes:
        boxes = mailboxes(opcode)
        out, words = self._nic.execute(bytes(boxes.request.pack(opcode=opcode, **fields)) + tail, boxes.answer.size)
        if out[0]:
            raise SystemExit(f"{opcode.name} was refused: {words}")
        return out

    def table(self, log: int) -> int:
        out = self.execute(Opcode.CREATE_FLOW_TABLE, flow_table_context={"log_size": log})
        return flow.CREATE_FLOW_TABLE_OUT.get(out, "table_id")

    def add(
        self, table: int, start: int, names: Sequence[str], values: Sequence[dict[str, Any]], tirn: int = 0
    ) -> None:
        """Add a group of entries from index `start` on, which drop, or lead to a TIR."""
        ones = {"outer_headers": {name: ONES[name] for name in names}}
        out = self.execute(
            Opcode.CREATE_FLOW_GROUP, table_id=table, start_flow_index=start, end_flow_index=start + len(values) - 1,
            match_criteria_enable=MatchCriteria.OUTER_HEADERS if names else 0, match_criteria=ones,
        )  # fmt: skip
        group = flow.CREATE_FLOW_GROUP_OUT.get(out, "group_id")
        to = bytes(DEST_FORMAT.pack(destination_type=DestinationType.TIR, destination_id=tirn)) if tirn else b""
        for index, value in enumerate(values, start):
            match = FTE_MATCH_PARAM.unpack(bytes(FTE_MATCH_PARAM.pack(outer_headers={n: value[n] for n in names})))
            context = {
                "group_id": group, "action": FlowAction.FWD_DEST if tirn else FlowAction.DROP,
                "destination_list_size": int(tirn != 0), "match_value": match,
            }  # fmt: skip
            self.execute(Opcode.SET_FLOW_TABLE_ENTRY, to, table_id=table, flow_index=index, flow_context=context)
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
def still(nic: SoftNic) -> Iterator[None]:
    """The NIC's own engine is stopped: whoever measures does its work."""
    nic.record["stop"] = 1
    nic.engine.kick()
    while nic.engine.running:
        time.sleep(1e-3)
    nic.record["stop"] = 0
    try:
        yield
    finally:
        nic.engine.start()


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Nanoseconds per frame of one job, and of its limit; the two took turns."""

    name: str
    limit: str
    goal: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return {
            "name": self.name, "limit": self.limit, "goal": self.goal, "ours_ns": ours, "limit_ns": theirs,
            "mpps": 1e3 / ours, "ratio": ours / theirs, "ratio_of_bests": min(self.ours) / min(self.theirs),
        }  # fmt: skip


def timed(function: Callable[..., int], *args: int, count: int) -> float:
    """Nanoseconds of this thread's CPU time per frame: on a busy machine, other programs take their turns between."""
    start = time.thread_time_ns()
    done = function(*args)
    passed = time.thread_time_ns() - start
    if done != count:
        raise SystemExit(f"{done} of {count} frames went where they were to go")
    return passed / count


def steering(nic: SoftNic, rounds: int) -> list[Result]:
    """10,000 flows in random order, one rule for each, against one exact rule for all frames."""
    values, laps = flows_of(FLOWS, 1), 10
    rules = Rules(nic)
    one, many, single = rules.table(14), rules.table(14), rules.table(14)
    choices = [names for n in range(1, 5) for names in combinations(FIELDS, n)]
    choices.append(("ip_protocol", *FIELDS))
    ONES["ip_protocol"] = 0xFF
    for value in values:
        value["ip_protocol"] = 17
    rules.add(one, 0, choices[-1], values[:1])
    share = FLOWS // MASKS
    for k, names in enumerate(choices):
        rules.add(many, k * share, names, values[k * share : (k + 1) * share])
    rules.add(single, 0, FIELDS, values)
    order = random.Random(2).sample(range(FLOWS), FLOWS)
    alike = Frames([frame_of(values[0], 64)] * FLOWS)
    mixed = Frames([frame_of(values[i], 64) for i in order])
    jobs = [
        (Result("steering, 10,000 exact rules, 16 masks", "one exact rule", "ratio ≤ 1.3"), many),
        (Result("steering, 10,000 exact rules, one mask", "one exact rule", "—"), single),
    ]  # fmt: skip
    for result, table in jobs:
        for _ in range(rounds):
            for root, frames, samples in ((table, mixed, result.ours), (one, alike, result.theirs)):
                rules.root(root)
                with still(nic):
                    steer_all(nic.control_address, frames.address, frames.count, 1)
                    ns = timed(steer_all, nic.control_address, frames.address, frames.count, laps, count=laps * FLOWS)
                    samples.append(ns)
    rules.close()
    return [result for result, _ in jobs]


def give_back(nic: SoftNic, rqn: int) -> None:
    """Post all that a receive queue has consumed, as a kernel does that has seen its packets."""
    row = nic.rqs[rqn]
    record = ctypes.c_uint32.from_address(int(row["dbrec"]) + QP_DBREC.rcv)
    posted = (int(row["consumed"]) + (1 << int(row["log"]))) & PI_MASK
    record.value = int.from_bytes(posted.to_bytes(4, "big"), sys.byteorder)


def receiving(ctx: Any, nic: SoftNic, gpu: Gpu, nbytes: int, rounds: int) -> Result:
    """Frames through one rule into a cyclic receive queue, with checksums and completions, against memcpy."""
    result = Result(f"receive path alone, {nbytes} B", "memcpy", "≥ 15 Mpps" if nbytes == 64 else "—")
    frames = Frames([frame_of(value, nbytes) for value in flows_of(1024, 3)] * (RECEIVED // 1024))
    with ctx.create_pd() as pd, eth.CyclicRxq(gpu, pd, RECEIVED, 2048) as rxq, Rules(nic) as rules:
        table = rules.table(1)
        rules.add(table, 0, (), [{}], rxq.tirn)
        rules.root(table)
        target = np.zeros(RECEIVED * 2048, np.uint8)
        with still(nic):
            for _ in range(rounds):
                give_back(nic, rxq.rqn)
                ns = timed(receive_all, nic.control_address, frames.address, frames.count, count=RECEIVED)
                result.ours.append(ns)
                ns = timed(copy_all, target.ctypes.data, 2048, frames.address, frames.count, count=RECEIVED)
                result.theirs.append(ns)
    return result


def show(results: Sequence[Result]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("job", "limit", "goal", "ns", "Mpps", "limit ns", "ratio", "ratio of bests"):
        table.add_column(column, justify="left" if column in ("job", "limit", "goal") else "right")
    for row in (result.summary() for result in results):
        table.add_row(
            row["name"], row["limit"], row["goal"], f"{row['ours_ns']:.1f}", f"{row['mpps']:.1f}",
            f"{row['limit_ns']:.1f}", f"{row['ratio']:.2f}", f"{row['ratio_of_bests']:.2f}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with open("soft0") as ctx, Gpu("host") as gpu:
        nic: SoftNic = ctx.provider.nic  # type: ignore[attr-defined]
        results = steering(nic, args.rounds)
        results += [receiving(ctx, nic, gpu, nbytes, args.rounds) for nbytes in (64, 1500)]
    if args.json:
        print(json.dumps([result.summary() for result in results], indent=2, ensure_ascii=False))
    else:
        show(results)


if __name__ == "__main__":
    main()
