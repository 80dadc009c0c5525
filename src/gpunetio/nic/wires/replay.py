"""A wire whose other end is a capture file: its packets go into a pipe, and the NIC's answers are counted."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import InvalidValueError, TimedOutError
from ...fabric.frames import (
    PACKET, PIPE, PIPE_END, commit, consume, frame_at, next_frame, pipe_end, pipe_size, publish, release, reserve,
)
from ...fabric.pcap_reader import Packet
from ...formats.packet import ICRC_SIZE
from ...jit.compile import engine_function
from ...jit.ops import copy
from ...memory import HostMemory
from ..engine.hardware import Engine
from ..engine.port import Port
from ..state.counters import FRAME_FATES, PACKET_FATES, STEERED_FATES
from ..state.tables import Table
from ..transport.wire_kinds import PIPES
from .wire import ANY_PEER, Wire

TIMEOUT = 600.0
_CAPACITY = 1 << 20
_LARGEST = 1 << 18  # bytes of a packet and its ICRC: what a record of a capture file can have
_TOGETHER = 32  # packets that come without a pause before the engine is told and its answers are taken
PAUSE = 50e-6  # seconds between looks at what the NIC has taken
_TAKEN = ("rx_accepted", "rx_frame_delivered")
LONGEST_SLEEP = 0.01  # seconds between looks at what the NIC has sent


@engine_function
def _put(end: int, packet: int, nbytes: int, peer_high: int, peer_low: int, with_icrc: int) -> int:
    """Put a packet into the pipe, with the ICRC behind it if that is to be checked. Return 1, or 0 if it is full."""
    frame = reserve(end, nbytes)
    if frame == 0:
        return 0
    f = frame_at(frame)
    f.nbytes, f.peer_high, f.peer_low, f.icrc = nbytes, peer_high, peer_low, with_icrc
    copy(frame + PACKET, packet, nbytes + ICRC_SIZE)
    commit(end)
    publish(end)
    return 1


@engine_function
def _take(end: int) -> int:
    """Take all frames out of the pipe. Return how many."""
    count = 0
    while next_frame(end) > 0:
        consume(end)
        count += 1
    release(end)
    return count


class Replay(Wire):
    """Two pipes between the NIC and this process. The packets say from whom they come."""

    kind: int = PIPES
    window: int = 128
    peer: Hashable = "replay"
    takes_own: bool = True  # as they were captured on a card in loopback
    gids: tuple[bytes, bytes]

    def __init__(self, port: Port):
        self._infiniband = port.infiniband
        # On InfiniBand, the peer of a path without GRH has no GID, and packets are not checked for it.
        self.gids = port.gids[0], port.gids[0] if port.infiniband else ANY_PEER

    def open(self, row: np.ndarray) -> np.ndarray:
        pipe = pipe_size(_CAPACITY)
        self._memory = HostMemory(2 * pipe + 2 * PIPE_END.size + _LARGEST)
        there, back = self._memory.address, self._memory.address + pipe
        ends = self._memory.view(PIPE_END.dtype, 2 * pipe, 2)
        ends[0], ends[1] = pipe_end(there, _CAPACITY), pipe_end(back, _CAPACITY)
        self._tx, self._rx = (self._memory.address + 2 * pipe + i * PIPE_END.size for i in range(2))
        self._scratch = self._memory.array[2 * pipe + 2 * PIPE_END.size :]
        self._pipe = self._memory.view(PIPE.dtype)[0]
        _put.compile()  # not while packets have to keep to their times
        _take.compile()
        row["rx"], row["infiniband"] = np.void(ends[0].tobytes()), self._infiniband
        return ends[1].copy()

    def close(self) -> None:
        self._memory.close()

    def put(self, packet: Packet) -> bool:
        """Put a packet on the wire. Return whether there was room."""
        data = packet.data if packet.icrc is None else packet.data + packet.icrc
        self._scratch[: len(data)] = np.frombuffer(data, np.uint8)
        high, low = np.frombuffer(packet.gid, np.int64)
        address = self._scratch.ctypes.data
        return bool(_put(self._tx, address, len(packet.data), int(high), int(low), int(packet.icrc is not None)))

    def take(self) -> int:
        """Take what the NIC has sent. Return how many packets that was."""
        return int(_take(self._rx))

    @property
    def empty(self) -> bool:
        """Whether the NIC has taken all packets."""
        return bool(self._pipe["tail"] == self._pipe["head"])


make = Replay


@dataclass(frozen=True)
class Replayed:
    """What became of packets that were replayed: `packets` in `seconds`, and how much the NIC's counters grew."""

    packets: int
    seconds: float
    counters: dict[str, int]

    @property
    def accepted(self) -> int:
        """Packets that a queue pair took, or frames that a receive queue took."""
        return sum(self.counters.get(name, 0) for name in _TAKEN)

    @property
    def answered(self) -> int:
        """Packets that the NIC sent."""
        return self.counters.get("rdma_tx_packets", 0)

    @property
    def refused(self) -> dict[str, int]:
        """Packets and frames that no queue took, by the counter that says why."""
        reasons = ("rx_icrc_encapsulated", *PACKET_FATES, *FRAME_FATES, *STEERED_FATES)
        return {name: self.counters[name] for name in reasons if name not in _TAKEN and name in self.counters}


class ReplayingNic(Protocol):
    """What a replay needs of a software NIC."""

    name: str
    port: Port

    @property
    def engine(self) -> Engine: ...

    @property
    def counters(self) -> Mapping[str, int]: ...

    @property
    def rqs(self) -> Table: ...

    def wire_to_others(self) -> Wire: ...


def replay(nic: ReplayingNic, packets: Iterable[Packet], fast: bool = False, timeout: float = TIMEOUT) -> Replayed:
    """Put packets on the wire of a NIC, whose port must have the wire "replay". Return when the NIC has answered them.

    Each packet comes as long after the first one as its time stamp says or, if `fast`, as soon as there is room.
    TimedOutError when that takes, or would take, more than `timeout` seconds.
    """
    wire = nic.wire_to_others()
    if not isinstance(wire, Replay):
        raise InvalidValueError(
            f'the wire of {nic.name} is {nic.port.config.wire!r}: open it with PortConfig(wire="replay")'
        )
    before, start = dict(nic.counters), time.monotonic()
    end, first, count = start + timeout, None, 0
    for packet in packets:
        first = packet.time_ns if first is None else first
        count += 1
        if not fast:
            due = (packet.time_ns - first) / 1e9
            if due > timeout:
                raise late(f"packet {count}", due, timeout)
            _wait(wire, start + due)
        while not wire.put(packet):
            _rest(nic, wire, end, count)
        if not fast or count % _TOGETHER == 0:
            nic.engine.doorbell_rung()
            wire.take()
    while not wire.empty:
        _rest(nic, wire, end, count)
    nic.engine.settle()
    wire.take()
    return Replayed(count, time.monotonic() - start, grown(before, nic.counters))


def grown(before: Mapping[str, int], counters: Mapping[str, int]) -> dict[str, int]:
    """Return how much counters have grown, those that have."""
    after = dict(counters)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def _wait(wire: Replay, due: float) -> None:
    """Wait until a packet is due. Take what the NIC sends meanwhile."""
    while (left := due - time.monotonic()) > 0:
        time.sleep(min(left, LONGEST_SLEEP))
        wire.take()


def _rest(nic: ReplayingNic, wire: Replay, end: float, count: int) -> None:
    """Give the NIC time to take what is on the wire."""
    if time.monotonic() > end:
        raise stuck(nic, f"packet {count}")
    wire.take()
    nic.engine.doorbell_rung()
    time.sleep(PAUSE)


def late(what: str, due: float, timeout: float) -> TimedOutError:
    """Return the error for something in a capture that is due after the end."""
    return TimedOutError(
        f"{what} of the capture is due {due:g} s after the first, but the timeout is {timeout:g} s: allow more time, "
        "or replay as fast as possible"
    )


def stuck(nic: ReplayingNic, what: str) -> TimedOutError:
    """Return the error for something in a capture that is still on the wire at the end."""
    return TimedOutError(
        f"{nic.name} has not taken {what} of the capture in time: it is paused, or starved of CPU time"
    )
