"""Compiled loops that steer frames as an engine would, and frames in memory for them."""

from collections.abc import Sequence

import numpy as np

from gpunetio.fabric.ethernet_records import ARRIVED, BATCH
from gpunetio.formats.layout import Entry
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import ld_relaxed64
from gpunetio.jit.struct_view import struct_view
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.ethernet_queues import TirRow
from gpunetio.nic.state.flow import PACKET, Fate, FlowTableRow, Packet
from gpunetio.nic.state.nic import NicState
from gpunetio.nic.state.worker import WorkerState
from gpunetio.nic.steering.lookups import search
from gpunetio.nic.steering.parse import parse
from gpunetio.nic.steering.rss import rss_hash
from gpunetio.nic.steering.steer import look_up_fate, look_up_frame, look_up_frames, select_frame
from gpunetio.nic.turn.step import serve_command

FRAME = Entry("frame", 56, """
    address         0  i64
    nbytes          8  i64
    fate           16  i64
    tir            24  i64
    tag            32  i64
    expected       40  i64
    hash           48  i64
""")
frame_at = struct_view(FRAME)
SPARE = 128  # unused bytes after a frame


@engine_function
def _steer_each(nic, frames, count):
    for i in range(count):
        f = frame_at(frames + i * FRAME.size)
        look_up_frame(nic, f.address, f.nbytes)
        f.fate = look_up_fate(nic, f.nbytes)
        p = Packet(WorkerState(nic).packet)
        f.tir, f.tag, f.hash = TirRow(p.tir).tirn if p.tir else 0, p.tag, p.hash


@engine_function
def _steer_together(nic, frames, arrived, count):
    n = WorkerState(nic)
    for first in range(0, count, BATCH):
        some = min(BATCH, count - first)
        look_up_frames(nic, arrived + first * ARRIVED.size, some)
        for i in range(some):
            f = frame_at(frames + (first + i) * FRAME.size)
            select_frame(nic, i)
            f.fate = look_up_fate(nic, f.nbytes)
            p = Packet(n.packet)
            f.tir, f.tag, f.hash = TirRow(p.tir).tirn if p.tir else 0, p.tag, p.hash


@engine_function
def _count_differences(nic, frames, count):
    """Return how many frames find another entry of the root table than a search does."""
    root = FlowTableRow(NicState(nic).flow_tables).miss
    wrong = 0
    for i in range(count):
        f = frame_at(frames + i * FRAME.size)
        look_up_frame(nic, f.address, f.nbytes)
        packet = WorkerState(nic).packet
        wrong += Packet(packet).root_entry != search(root, packet)
    return wrong


@engine_function
def _parse_each(frames, count, packets):
    for i in range(count):
        f = frame_at(frames + i * FRAME.size)
        parse(packets + i * PACKET.size, f.address, f.nbytes)


@engine_function
def _hash_each(tir, packets, count, frames):
    for i in range(count):
        frame_at(frames + i * FRAME.size).hash = rss_hash(tir, packets + i * PACKET.size)


@engine_function
def steer_and_serve(nic, frames, count, stop):
    """Steer frames and take commands in turn, as an engine does, until the word at `stop` is set.

    Return how often the verdict on a frame was made of two entries, or of another frame's: TIR and tag must be the same
    number, which ends in what the frame expects.
    """
    wrong = 0
    while ld_relaxed64(stop) == 0:
        serve_command(nic)
        _steer_each(nic, frames, count)
        for i in range(count):
            f = frame_at(frames + i * FRAME.size)
            missed = f.fate == Fate.MISS and f.tir == 0 and f.tag == 0
            if not missed and (f.fate != Fate.TIR or f.tir != f.tag or f.tir & 0xFFFF != f.expected):
                wrong += 1
    return wrong


class Frames:
    """Frames in memory, and what becomes of them: `frames` and `verdicts` are in the same order."""

    def __init__(self, frames: Sequence[bytes], behind: int = 0):
        self.frames = frames
        lengths = np.array([len(frame) for frame in frames], np.int64)
        spare = bytes([behind]) * SPARE
        self._bytes = np.frombuffer(b"".join(frame + spare for frame in frames), np.uint8)
        self.rows = np.zeros(len(frames), FRAME.dtype)
        starts = np.concatenate(([0], np.cumsum(lengths + SPARE)[:-1]))
        self.rows["address"], self.rows["nbytes"] = self._bytes.ctypes.data + starts, lengths

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def address(self) -> int:
        return self.rows.ctypes.data

    def steer(self, nic: SoftNic, together: bool = False) -> list[tuple[Fate, int, int]]:
        """Return (fate, TIR, tag) of each. They arrive one by one, or `together`, if there is a root table."""
        if together:
            arrived = np.zeros(len(self), ARRIVED.dtype)
            arrived["frame"], arrived["nbytes"] = self.rows["address"], self.rows["nbytes"]
            _steer_together(nic.control_address, self.address, arrived.ctypes.data, len(self))
        else:
            _steer_each(nic.control_address, self.address, len(self))
        return self.verdicts

    def differences(self, nic: SoftNic) -> int:
        """Return for how many frames the root table does not remember what a search finds."""
        return _count_differences(nic.control_address, self.address, len(self))

    @property
    def verdicts(self) -> list[tuple[Fate, int, int]]:
        rows = zip(self.rows["fate"].tolist(), self.rows["tir"].tolist(), self.rows["tag"].tolist(), strict=True)
        return [(Fate(fate), tir, tag) for fate, tir, tag in rows]

    def parse(self) -> np.ndarray:
        """Return a PACKET for each."""
        packets = np.zeros(len(self), PACKET.dtype)
        _parse_each(self.address, len(self), packets.ctypes.data)
        return packets

    def hashes(self, tir: np.ndarray) -> list[int]:
        """Return the hash of each for a TIR_ROW."""
        packets = self.parse()
        _hash_each(tir.ctypes.data, packets.ctypes.data, len(self), self.address)
        return self.rows["hash"].tolist()
