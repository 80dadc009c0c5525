"""A wire whose other end is a capture file of Ethernet frames. They arrive as from a network, and pass the flow rules.

This wire delivers all frames unchanged, to Ethernet queues. The wire of replay.py instead extracts the RoCE and
InfiniBand packets of a file, for queue pairs.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import numpy as np

from ...errors import InvalidValueError
from ...fabric.ethernet_records import ETHERNET_WIRE, PIPE
from ...fabric.frames import PIPE_END, pipe_end, pipe_size
from ...fabric.pcap_frames import WHENEVER, PcapFrames
from ...fabric.pcap_reader import PcapFile
from ...memory import HostMemory
from ..engine.hardware import Engine
from ..turn.commands import EngineCommand
from .descriptor import Ethernet
from .replay import LONGEST_SLEEP, PAUSE, TIMEOUT, Replayed, ReplayingNic, increases, late_error, stuck_error

_CAPACITY = 1 << 20  # bytes of the pipe
_FEW = 256  # frames in a batch below which the next batch is not attempted at once
_MOST_QUEUES = 256


class Pcap(Ethernet):
    """A cable to this process, which puts the file's frames into a pipe. Frames that the NIC sends are discarded."""

    reading: int = PIPE
    file: PcapFile
    fill_end: int  # address of the PIPE_END that the file's frames are written to

    def attach(self) -> io.FileIO:
        self.file = PcapFile(self.interface)
        try:
            if self.file.infiniband:
                raise InvalidValueError(
                    f"wire {self.name}: {self.file.path} has InfiniBand packets: `gpunetio replay` is for those"
                )
            return io.FileIO(os.devnull, "r+b")
        except BaseException:
            self.file.close()
            raise

    def open(self, row: np.ndarray) -> np.ndarray:
        self._memory = HostMemory(2 * PIPE_END.size + pipe_size(_CAPACITY) + 8 * _MOST_QUEUES)
        try:
            tx = super().open(row)
        except BaseException:
            self._memory.close()
            raise
        ends = self._memory.view(PIPE_END.dtype, 0, 2)
        ends[0] = ends[1] = pipe_end(self._memory.address + 2 * PIPE_END.size, _CAPACITY)
        self._wire.record["rx"], self.fill_end = self._memory.address, self._memory.address + PIPE_END.size
        self.sockets = ()  # the descriptor is always ready
        return tx

    def hold_until_room(self, engine: Engine, rows: Sequence[int], longest: int) -> None:
        """Hold frames of up to `longest` bytes until the receive queues with these rows have room."""
        queues = self._memory.address + 2 * PIPE_END.size + pipe_size(_CAPACITY)
        engine.post(EngineCommand.WRITE_ROW, queues, np.array(rows or [0], np.int64))
        limits = np.array([queues, len(rows), longest, 0], np.int64)  # no credit: the engine checks the queues
        engine.post(EngineCommand.WRITE_ROW, self._wire.address + ETHERNET_WIRE.queues, limits)

    def close(self) -> None:
        super().close()
        self.file.close()
        self._memory.close()


make = Pcap


def replay_frames(
    nic: ReplayingNic, fast: bool = False, timeout: float = TIMEOUT, rqns: Iterable[int] = (),
    meanwhile: Callable[[], object] = lambda: None,
) -> Replayed:
    """Replay the capture file on the wire of a NIC, whose port must have the wire "pcap:FILE".

    Return when the NIC has received all frames. The frames keep the spacing of their timestamps or, if `fast`, follow
    each other as soon as there is room. `rqns` are numbers of receive queues: each frame waits until all of them have
    room. `meanwhile` is called repeatedly, to drain queues. TimedOutError if the replay takes, or would take, more than
    `timeout` seconds; InvalidValueError for a damaged file, after the frames before the damage have been replayed.
    """
    wire = nic.wire_to_others()
    if not isinstance(wire, Pcap):
        raise InvalidValueError(
            f'the wire of {nic.name} is {nic.port.config.wire!r}: open it with PortConfig(wire="pcap:FILE")'
        )
    rows = [nic.rqs.row_address(rqn) for rqn in rqns]
    if len(rows) > _MOST_QUEUES:
        raise InvalidValueError(f"rqns has {len(rows)} queues: frames can wait for {_MOST_QUEUES} at most")
    with closing(PcapFrames(wire.file, wire.fill_end)) as frames:
        return _replay(nic, wire, frames, rows, fast, timeout, meanwhile)


def _replay(
    nic: ReplayingNic, wire: Pcap, frames: PcapFrames, rows: Sequence[int], fast: bool, timeout: float,
    meanwhile: Callable[[], object],
) -> Replayed:
    before, start, longest = dict(nic.counters), time.monotonic(), 0
    while least := frames.longest():
        if least > longest:
            longest = 1 << least.bit_length()
            wire.hold_until_room(nic.engine, rows, longest)
        now = time.monotonic() - start
        count = frames.put(WHENEVER if fast else int(now * 1e9))
        nic.engine.doorbell_rung()
        meanwhile()
        due = 0.0 if fast else frames.due_ns / 1e9
        if due > timeout:
            raise late_error(f"frame {frames.count + 1}", due, timeout)
        if not count and now > timeout:
            raise stuck_error(nic, f"frame {frames.count + 1}")
        if count < _FEW:
            time.sleep(min(due - now, LONGEST_SLEEP) if due > now else PAUSE)
    while int(nic.counters["rx_frames"]) < before["rx_frames"] + frames.count:
        if time.monotonic() > start + timeout:
            raise stuck_error(nic, f"frame {frames.count}")
        nic.engine.doorbell_rung()
        meanwhile()
        time.sleep(PAUSE)
    nic.engine.synchronize()
    return Replayed(frames.count, time.monotonic() - start, increases(before, nic.counters))
