"""The software NIC against C++ that does the same job on the same memory, and against memcpy: rates and ratios."""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpunetio import verbs
from gpunetio.device.compile import engine_function
from gpunetio.device.ops import be32, clock_ns, st_release32
from gpunetio.enums import Access, CqOverrun
from gpunetio.fabric.inprocess import MAX_SEGMENTS
from gpunetio.formats import cqe, doorbell, wqe
from gpunetio.formats.commands import QpState
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP
from gpunetio.formats.layout import Entry
from gpunetio.memory import HostMemory
from gpunetio.nic import requester, tables
from gpunetio.nic.engine import run
from gpunetio.nic.step import step
from gpunetio.nic.tables import qp_row_at

PEER = Path(__file__).with_name("engine_peer.cpp")
ENTRIES = (
    tables.NIC, tables.QP_ROW, tables.CQ_ROW, tables.MKEY_ROW, tables.COUNTERS,
    wqe.CTRL_SEG, wqe.RADDR_SEG, wqe.DATA_SEG, cqe.CQE64, DEV_QP, DEV_CQ,
)  # fmt: skip
CONSTANTS = {
    "INLINE_SEG": wqe.INLINE_SEG, "SEGMENT": wqe.SEGMENT, "MAX_TRANSFER": wqe.MAX_TRANSFER,
    "WQEBB_SHIFT": wqe.WQEBB_SHIFT, "CE_SHIFT": wqe.CE_SHIFT, "CE_ALWAYS": int(wqe.CompletionMode.ALWAYS),
    "RDMA_WRITE": int(wqe.WqeOpcode.RDMA_WRITE), "CQE_SHIFT": cqe.CQE_SHIFT, "CI_MASK": cqe.CI_MASK,
    "WQE_IDX_SHIFT": doorbell.WQE_IDX_SHIFT, "PI_MASK": doorbell.PI_MASK, "PSN_MASK": requester.PSN_MASK,
    "MAX_SEGMENTS": MAX_SEGMENTS, "RTR": int(QpState.RTR), "RTS": int(QpState.RTS),
    "REMOTE_WRITE": int(Access.REMOTE_WRITE),
}  # fmt: skip


# --- the C++ peer --------------------------------------------------------------------------------------------------


def c_struct(entry: Entry) -> str:
    """`entry` as a C++ structure with the same offsets."""
    lines, end = [], 0
    for name, (dtype, offset, *_) in sorted((entry.dtype.fields or {}).items(), key=lambda field: field[1][1]):
        if offset > end:
            lines.append(f"    uint8_t pad{end}[{offset - end}];")
        kind = {"i": "int", "u": "uint"}.get(dtype.kind) if offset % dtype.itemsize == 0 else None
        lines.append(f"    {kind}{8 * dtype.itemsize}_t {name};" if kind else f"    uint8_t {name}[{dtype.itemsize}];")
        end = offset + dtype.itemsize
    if entry.size > end:
        lines.append(f"    uint8_t pad{end}[{entry.size - end}];")
    name = type(entry).__name__
    checks = [f"static_assert(offsetof({name}, {field}) == {at});" for field, at in entry.offsets.items()]
    checks.append(f"static_assert(sizeof({name}) == {entry.size});")
    return "\n".join([f"struct {name} {{", *lines, "};", *checks])


def build_peer(folder: str) -> ctypes.CDLL:
    """The C++ peer, compiled for this machine."""
    constants = [f"constexpr int64_t {name} = {value};" for name, value in CONSTANTS.items()]
    text = "\n".join(["#include <cstddef>", "#include <cstdint>", *constants, *map(c_struct, ENTRIES), ""])
    Path(folder, "layout.h").write_text(text)
    library = Path(folder, "peer.so")
    flags = ["-O3", "-march=native", "-std=c++20", "-Wall", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, "-I", folder, str(PEER), "-o", str(library)], check=True)
    peer = ctypes.CDLL(str(library))
    for name, count in (("drain", 3),):
        function = getattr(peer, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * count
    return peer


# --- the machine under test ----------------------------------------------------------------------------------------


class Bench:
    """Two connected QPs of one NIC, and the NIC's own engine stopped: whoever measures is the engine."""

    def __init__(self, depth: int, payload: int):
        self.ctx = verbs.open("soft0")
        self.nic: Any = self.ctx.provider.nic  # type: ignore[attr-defined]
        self.pd = self.ctx.create_pd()
        self.cq = self.ctx.create_cq(depth, overrun=CqOverrun.ENABLE)
        other = self.ctx.create_cq(64, overrun=CqOverrun.ENABLE)
        self.qp = self.pd.create_qp(sq_wr=depth, send_cq=self.cq)
        self.peer = self.pd.create_qp(sq_wr=64, send_cq=other)
        self.qp.connect(self.peer)
        self.depth = depth
        self.source, self.target = HostMemory(payload), HostMemory(payload)
        self.source.array[:] = np.random.default_rng(1).integers(0, 256, self.source.nbytes, np.uint8)
        self.local, self.remote = self.pd.register(self.source), self.pd.register(self.target)
        self.address = int(self.nic.record.__array_interface__["data"][0])
        self.row = self.nic.qps.row_address(self.qp.qpn)
        self.fields = self.nic.qps[self.qp.qpn]
        self.stop_engine()

    def stop_engine(self) -> None:
        """From here on nobody but us touches the queues."""
        self.nic.record["stop"] = 1
        self.nic.engine.kick()
        while self.nic.engine.running:
            time.sleep(1e-3)
        self.nic.record["stop"] = 0

    def post(self, nbytes: int) -> int:
        """Fill the ring with RDMA WRITEs of `nbytes` without ringing: the producer index to ring."""
        ring = (ctypes.c_uint8 * (self.depth * wqe.WQEBB)).from_address(self.qp.sq_address)
        wqes = np.frombuffer(ring, np.dtype([
            ("ctrl", wqe.CTRL_SEG.dtype), ("raddr", wqe.RADDR_SEG.dtype), ("data", wqe.DATA_SEG.dtype), ("pad", "V16"),
        ]))  # fmt: skip
        first = int(self.fields["sq_ci"])
        index = first + np.arange(self.depth)
        at = index % self.depth
        places = self.source.nbytes // nbytes
        where = (index % places) * nbytes
        ctrl, raddr, data = wqes["ctrl"], wqes["raddr"], wqes["data"]
        ctrl["opmod_idx_opcode"][at] = (index & doorbell.PI_MASK) << 8 | int(wqe.WqeOpcode.RDMA_WRITE)
        ctrl["qpn_ds"] = self.qp.qpn << 8 | 3
        ctrl["fm_ce_se"] = int(wqe.CtrlFlags.CQ_UPDATE)
        raddr["raddr"][at], raddr["rkey"] = self.remote.address + where, self.remote.rkey
        data["addr"][at], data["lkey"], data["byte_count"] = self.local.address + where, self.local.lkey, nbytes
        return first + self.depth


@engine_function
def drain(nic, row, target):
    """Ring the doorbell and be the engine until WQE `target` - 1 is complete: nanoseconds."""
    q = qp_row_at(row)
    start = clock_ns()
    st_release32(q.doorbell, be32((target & 0xFFFF) << 8))
    while q.sq_ci != target and q.failed == 0:
        step(nic)
    return clock_ns() - start
