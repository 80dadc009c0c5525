"""A litmus test of the fence before a doorbell: does a CPU that sees the doorbell see everything written before it?

Each warp of a kernel has a ring in pinned memory. Each lane fills a WQE and a payload, whose words are all the same
stamp, and lane 0 fences and rings. Threads of the host, in place of the software NIC's engine, read what was announced.
A WQE or payload is torn when its words differ, and stale when all are those of the previous lap.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import device as dev
from ..device import device_function, kernel
from ..device.waiting import patience
from ..enums import MemType
from ..errors import InvalidValueError, TimedOutError
from ..formats.layout import Entry
from ..formats.wqe import WQEBB
from ..gpu import Gpu
from ..jit.code import Launch
from ..jit.compile import engine_function
from ..jit.ops import fence_release_gpu, st128, st_mmio64
from ..service import STOP_TIMEOUT, ServiceThread

FENCES = ("product", "gpu", "sys", "none")  # "product" is the fence of the device library
DEPTH = 1024  # slots of a ring
WAIT_SECONDS = 10.0  # that a warp waits for room in its ring
LAUNCH_SECONDS = 120.0  # of one launch, which may have to compile first

# At the head of a ring, in cache lines of their own: the warp's doorbell, and the reader's counts.
RING = Entry("litmus_ring", 256, """
    doorbell     0  i64
    consumed   128  i64
    torn       136  i64
    stale      144  i64
""")

_DEPTH, _PAYLOAD, _SLOT = DEPTH, 64, WQEBB + 64
_RING_BYTES = RING.size + DEPTH * _SLOT
_PRODUCT, _GPU, _SYS, _NONE = range(len(FENCES))
_RUN, _STOP, _DRAIN = 0, 1, 2  # values of the control word: warps end at _STOP, and then readers at _DRAIN
_OK, _TORN, _STALE = range(3)
_SPINS = 64  # empty looks of a reader before it yields


@device_function
def _slot(ring: int, index: int) -> int:
    return ring + RING.size + (index & (_DEPTH - 1)) * _SLOT


# --- the warps -----------------------------------------------------------------------------------------------------


@device_function
def _fence(kind: int) -> None:
    if kind == _PRODUCT:
        dev.fence_release()
    elif kind == _GPU:
        fence_release_gpu()
    elif kind == _SYS:
        dev.fence_release_sys()


@device_function
def _room(ring: int, control: int, needed: int, timeout_ns: int) -> int:
    """Wait until the reader has consumed `needed`. Return how much it has consumed, or -1 at the end."""
    polls = 0
    start = 0
    while dev.ld_relaxed64(control) == _RUN:
        consumed = dev.ld_acquire64(ring + RING.consumed)
        if consumed >= needed:
            return consumed
        start = patience(polls, start, timeout_ns)
        if start < 0:
            break
        polls += 1
    return -1


@device_function
def _stamp(slot: int, stamp: int) -> None:
    """Write a payload as a kernel writes its data, and a WQE as the device library writes one."""
    for at in range(0, _PAYLOAD, 8):
        dev.st64(slot + WQEBB + at, stamp)
    for at in range(0, WQEBB, 16):
        st128(slot + at, stamp, stamp)


@kernel
def post_stamped(rings: int, control: int, fence: int, timeout_ns: int) -> None:
    """Fill and ring until `control` says stop. Each block has one warp."""
    ring = rings + dev.block_idx() * _RING_BYTES
    lane, lanes = dev.lane_id(), dev.warp_size()
    first = dev.ld64(ring + RING.doorbell)
    consumed = dev.warp_broadcast(dev.ld64(ring + RING.consumed), 0)  # the reader may advance in the meantime
    while True:
        if first + lanes - consumed > _DEPTH:
            if lane == 0:
                consumed = _room(ring, control, first + lanes - _DEPTH, timeout_ns)
            consumed = dev.warp_broadcast(consumed, 0)
            if consumed < 0:
                break
        _stamp(_slot(ring, first + lane), first + lane + 1)
        dev.warp_sync()
        first += lanes
        if lane == 0:
            _fence(fence)
            st_mmio64(ring + RING.doorbell, first)


# --- the readers ---------------------------------------------------------------------------------------------------


@engine_function
def _judge(slot: int, stamp: int) -> int:
    """Return whether the slot holds `stamp`, or is torn or stale."""
    found = dev.ld64(slot)
    for at in range(8, _SLOT, 8):
        if dev.ld64(slot + at) != found:
            return _TORN
    if found == stamp:
        return _OK
    return _STALE if found == max(0, stamp - _DEPTH) else _TORN


@engine_function
def read_ring(ring: int) -> int:
    """Judge all announced slots. Return how many there were."""
    first = dev.ld64(ring + RING.consumed)
    end = dev.ld_acquire64(ring + RING.doorbell)
    for index in range(first, end):
        verdict = _judge(_slot(ring, index), index + 1)
        if verdict == _TORN:
            dev.st64(ring + RING.torn, dev.ld64(ring + RING.torn) + 1)
        elif verdict == _STALE:
            dev.st64(ring + RING.stale, dev.ld64(ring + RING.stale) + 1)
    if end != first:
        dev.st_release64(ring + RING.consumed, end)
    return end - first


@engine_function
def read_rings(rings: int, count: int, me: int, readers: int, control: int) -> None:
    """Read every `readers`-th ring, from ring `me` on, until `control` says drain and nothing is left."""
    empty = 0
    while True:
        ending = dev.ld_acquire64(control) == _DRAIN
        seen = 0
        for i in range(me, count, readers):
            seen += read_ring(rings + i * _RING_BYTES)
        if seen > 0:
            empty = 0
            continue
        if ending:
            return
        empty += 1
        if empty < _SPINS:
            dev.pause()
        else:
            dev.yield_thread()


# --- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one fence: `posts` WQEs, each with a payload, some of which the reader found torn or stale."""

    fence: str
    posts: int
    torn: int
    stale: int
    seconds: float

    @property
    def ordered(self) -> bool:
        """Whether everything was seen as it was written."""
        return self.torn == self.stale == 0

    @property
    def rate(self) -> float:
        """Posts per second."""
        return self.posts / self.seconds


class Litmus:
    """Rings for `warps` warps of `gpu`, and the threads that read them."""

    gpu: Gpu
    warps: int
    readers: int

    def __init__(self, gpu: Gpu, warps: int):
        if warps < 1:
            raise InvalidValueError(f"{warps} warps cannot post: give at least 1")
        self.gpu, self.warps = gpu, warps
        self.readers = max(1, min(warps, len(os.sched_getaffinity(0)) // 2))
        word = np.array([_DRAIN])
        read_rings(0, 0, 0, 1, int(word.ctypes.data))  # compiles before any thread needs it

    def run(self, fence: str, seconds: float) -> Outcome:
        """Post for `seconds` with `fence`, one of FENCES. TimedOutError when the kernel does not end."""
        if fence not in FENCES:
            raise InvalidValueError(f"no fence {fence!r}: the fences are {', '.join(FENCES)}")
        with (
            self.gpu.alloc(self.warps * _RING_BYTES, MemType.CPU_GPU) as memory,
            self.gpu.alloc(8, MemType.CPU_GPU) as word,
        ):
            control = word.array.view(np.int64)
            with self._reading(memory.address, control, word.address):
                took = self._post(memory.device_address, control, word.device_address, fence, seconds)
            rings = [RING.at(memory.array, i * _RING_BYTES) for i in range(self.warps)]
            posts, torn, stale = (sum(int(r[name]) for r in rings) for name in ("consumed", "torn", "stale"))
        return Outcome(fence, posts, torn, stale, took)

    def _post(self, rings: int, control: np.ndarray, word: int, fence: str, seconds: float) -> float:
        lanes = self.gpu.warp
        arguments = (rings, word, FENCES.index(fence), int(WAIT_SECONDS * 1e9))
        control[0] = _STOP
        self._end(post_stamped[1, lanes, self.gpu](*arguments))  # compiles, and ends when its ring is full
        control[0] = _RUN
        start = time.monotonic()
        launch = post_stamped[self.warps, lanes, self.gpu](*arguments)
        try:
            time.sleep(seconds)
        finally:
            control[0] = _STOP
            self._end(launch)
        return time.monotonic() - start

    @staticmethod
    def _end(launch: Launch) -> None:
        if not launch.wait(LAUNCH_SECONDS):
            raise TimedOutError(f"the litmus kernel did not end within {LAUNCH_SECONDS:g} s")

    @contextlib.contextmanager
    def _reading(self, rings: int, control: np.ndarray, word: int) -> Iterator[None]:
        threads = [
            ServiceThread("litmus", functools.partial(read_rings, rings, self.warps, me, self.readers, word))
            for me in range(self.readers)
        ]
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            control[0] = _DRAIN
            if [thread for thread in threads if thread.running and not thread.join()]:
                raise TimedOutError(f"a thread that reads the rings did not end within {STOP_TIMEOUT:g} s")
