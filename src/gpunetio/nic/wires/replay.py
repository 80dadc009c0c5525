"""A wire whose other end is a capture file: a pipe carries its packets to the NIC, and packets back are counted."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import InvalidValueError, TimedOutError
from ...fabric.frames import (
    PACKET, PIPE, PIPE_END, Frame, PipeEnd, commit, consume, next_frame, pipe_end, pipe_size, publish, release,
    reserve,
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
_LARGEST = 1 << 18  # bytes of a packet with its ICRC, the largest in a capture file
_BURST = 32  # packets sent without a pause before the engine is woken and its answers are received
PAUSE = 50e-6  # seconds between checks for what the NIC has received
_TAKEN = ("rx_accepted", "rx_frame_delivered")
LONGEST_SLEEP = 0.01  # seconds between checks for what the NIC has sent


@engine_function
def _write_packet(end: PipeEnd, packet: int, nbytes: int, peer_high: int, peer_low: int, with_icrc: int) -> int:
    """Write a packet into the pipe, followed by its ICRC if that is to be checked. Return 0 if it is full, else 1."""
    frame = Frame(reserve(end, nbytes))
    if frame == 0:
        return 0
    frame.nbytes, frame.peer_high, frame.peer_low, frame.icrc = nbytes, peer_high, peer_low, with_icrc
    copy(frame + PACKET, packet, nbytes + ICRC_SIZE)
    commit(end)
    publish(end)
    return 1


@engine_function
def _discard_all(end: PipeEnd) -> int:
    """Discard all frames in the pipe. Return their number."""
    count = 0
    while next_frame(end) > 0:
        consume(end)
        count += 1
    release(end)
    return count


class Replay(Wire):
    """Two pipes between the NIC and this process. Each packet contains the GID of its sender."""

    kind: int = PIPES
    window: int = 128
    peer: Hashable = "replay"
    takes_own: bool = True  # for captures of a card in loopback
    gids: tuple[bytes, bytes]

    def __init__(self, port: Port):
        self._infiniband = port.infiniband
        # On InfiniBand, a path without GRH has no peer GID, and the sender's GID is not checked.
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
        _write_packet.compile()  # now, so that compilation does not delay packets
        _discard_all.compile()
        row["rx"], row["infiniband"] = np.void(ends[0].tobytes()), self._infiniband
        return ends[1].copy()

    def close(self) -> None:
        self._memory.close()

    def write(self, packet: Packet) -> bool:
        """Write a packet to the wire. Return False if there is no room."""
        data = packet.data if packet.icrc is None else packet.data + packet.icrc
        self._scratch[: len(data)] = np.frombuffer(data, np.uint8)
        high, low = np.frombuffer(packet.gid, np.int64)
        address = self._scratch.ctypes.data
        with_icrc = int(packet.icrc is not None)
        return bool(_write_packet(self._tx, address, len(packet.data), int(high), int(low), with_icrc))

    def discard_received(self) -> int:
        """Discard the packets that the NIC has sent. Return their number."""
        return int(_discard_all(self._rx))

    @property
    def empty(self) -> bool:
        """Whether the NIC has received all packets."""
        return bool(self._pipe["tail"] == self._pipe["head"])


make = Replay


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: number of `packets`, `seconds`, and the increases of the NIC's `counters`."""

    packets: int
    seconds: float
    counters: dict[str, int]

    @property
    def accepted(self) -> int:
        """Packets that queue pairs accepted, or frames that receive queues accepted."""
        return sum(self.counters.get(name, 0) for name in _TAKEN)

    @property
    def answered(self) -> int:
        """Packets that the NIC sent."""
        return self.counters.get("rdma_tx_packets", 0)

    @property
    def refused(self) -> dict[str, int]:
        """Packets and frames that no queue accepted, by the counter of the cause."""
        reasons = ("rx_icrc_encapsulated", *PACKET_FATES, *FRAME_FATES, *STEERED_FATES)
        return {name: self.counters[name] for name in reasons if name not in _TAKEN and name in self.counters}


class ReplayingNic(Protocol):
    """The part of a software NIC that a replay uses."""

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
    """Replay packets on the wire of a NIC, whose port must have the wire "replay". Return when it has answered them.

    The packets keep the spacing of their timestamps or, if `fast`, follow each other as soon as there is room.
    TimedOutError if the replay takes, or would take, more than `timeout` seconds.
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
                raise late_error(f"packet {count}", due, timeout)
            _wait(wire, start + due)
        while not wire.write(packet):
            _wake_and_pause(nic, wire, end, count)
        if not fast or count % _BURST == 0:
            nic.engine.doorbell_rung()
            wire.discard_received()
    while not wire.empty:
        _wake_and_pause(nic, wire, end, count)
    nic.engine.synchronize()
    wire.discard_received()
    return Replayed(count, time.monotonic() - start, increases(before, nic.counters))


def increases(before: Mapping[str, int], counters: Mapping[str, int]) -> dict[str, int]:
    """Return the increases of the counters that have changed, by name."""
    after = dict(counters)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def _wait(wire: Replay, due: float) -> None:
    """Wait until a packet is due, and discard the packets that the NIC sends meanwhile."""
    while (left := due - time.monotonic()) > 0:
        time.sleep(min(left, LONGEST_SLEEP))
        wire.discard_received()


def _wake_and_pause(nic: ReplayingNic, wire: Replay, end: float, count: int) -> None:
    """Wake the NIC and pause, so that it receives packets from the wire. TimedOutError after `end`."""
    if time.monotonic() > end:
        raise stuck_error(nic, f"packet {count}")
    wire.discard_received()
    nic.engine.doorbell_rung()
    time.sleep(PAUSE)


def late_error(what: str, due: float, timeout: float) -> TimedOutError:
    """Return the error for a packet or frame of a capture that is due after the timeout."""
    return TimedOutError(
        f"{what} of the capture is due {due:g} s after the first, but the timeout is {timeout:g} s: allow more time, "
        "or replay as fast as possible"
    )


def stuck_error(nic: ReplayingNic, what: str) -> TimedOutError:
    """Return the error for a packet or frame of a capture that the NIC has not received in time."""
    return TimedOutError(
        f"{nic.name} has not taken {what} of the capture in time: it is paused, or starved of CPU time"
    )
