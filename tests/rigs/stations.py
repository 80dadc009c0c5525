"""NICs on the LAN of this host: each has a receive queue that gets all frames, and sends frames without a queue.

Their engines' threads are stopped. `turn` runs the engines, one after another.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from eth_receive_rig import Buffer, Cq, Rq, lead, remove_rules
from ethernet_rig import Maker, nic_of
from gpunetio import PortConfig, verbs
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import copy, ld64
from gpunetio.nic.transport.lan import frame_room, load_mac, send_frame
from gpunetio.nic.transport.wire_kinds import flush_wires
from gpunetio.nic.turn.step import step
from steering_kernels import FRAME, Frames, frame_at
from virtual_nics import start_engine, stop_engine

ROOM = 2048  # bytes of a receive
BROADCAST = b"\xff" * 6
TYPE = b"\x88\xb5"  # EtherType for local experiments (IEEE 802)


@engine_function
def _send_each(nic, frames, count):
    """Send frames, as a send queue would in its turn."""
    for i in range(count):
        f = frame_at(frames + i * FRAME.size)
        copy(frame_room(nic, 0, f.nbytes, load_mac(f.address)), f.address, f.nbytes)
        send_frame(nic, 0, f.nbytes)


@engine_function
def _turn(nics, count, turns):
    done = 0
    for _ in range(turns):
        for i in range(count):
            done += step(ld64(nics + 8 * i))
    return done


@engine_function
def _publish(nic):
    flush_wires(nic)


def frame(to: bytes, source: bytes, payload: bytes = b"", nbytes: int = 60) -> bytes:
    """A frame of at least so many bytes."""
    return (to + source + TYPE + payload).ljust(nbytes, b"\0")


class Station:
    """A NIC on the LAN. `mac` is its port's, but it may send from others."""

    def __init__(self, ctx: verbs.Context, log: int = 6):
        self.ctx, self.nic, self.log = ctx, nic_of(ctx), log
        self.mac = self.nic.mac
        make = Maker(ctx)
        self.cq = Cq(make, log + 1)
        self.buffer = Buffer(make, ROOM << log)
        self.rq = Rq(make, self.cq, log)
        self.domain = make.domain()
        self.tir = make.direct(self.domain.number, self.rq.made.number)
        lead(ctx, self.tir.number)
        self.post(1 << log)

    def post(self, count: int = 1) -> None:
        """Post receives. Each has the same memory whenever it comes round."""
        for i in range(self.rq.posted, self.rq.posted + count):
            self.rq.write(self.buffer.at((i & ((1 << self.log) - 1)) * ROOM, ROOM), at=i)
        self.rq.announce(count)

    def send(self, *frames: bytes) -> None:
        """Send frames, which their receivers see from now on."""
        given = Frames(list(frames))
        _send_each(self.nic.control_address, given.address, len(given))
        _publish(self.nic.control_address)

    def got(self) -> list[bytes]:
        """The frames that have arrived since the last call. Their receives are posted again."""
        frames = []
        for cqe in self.cq.take():
            at = (int(cqe["wqe_counter"]) & ((1 << self.log) - 1)) * ROOM
            frames.append(self.buffer.bytes(at, int(cqe["byte_cnt"])))
        self.post(len(frames))
        return frames

    def forget(self) -> None:
        """Forget where MACs are. The engine stands still."""
        assert self.nic.links.lan is not None
        self.nic.links.lan._rows[:] = 0

    def unsteer(self) -> None:
        """Let no rule take frames. The engine runs."""
        remove_rules(self.ctx)

    def count(self, name: str) -> int:
        return self.nic.counters[name]

    def stop(self) -> None:
        stop_engine(self.nic)

    def go_on(self) -> None:
        start_engine(self.nic)


def turn(stations: Iterable[Station], turns: int = 4) -> int:
    """Have the NICs take what has arrived. Return how much was done."""
    nics = np.array([station.nic.control_address for station in stations], np.int64)
    return _turn(int(nics.ctypes.data), len(nics), turns)


@contextlib.contextmanager
def lan(ports: Sequence[dict[str, Any]]) -> Iterator[list[Station]]:
    """NICs of this process with these ports, which stand still."""
    with contextlib.ExitStack() as undo:
        stations = []
        for i, port in enumerate(ports):
            ctx = undo.enter_context(verbs.open(f"soft{i}", port=PortConfig(workers=1, **port)))
            undo.callback(remove_rules, ctx)
            stations.append(Station(ctx))
        for station in stations:
            undo.callback(station.go_on)
            station.stop()
        yield stations
