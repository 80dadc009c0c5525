"""GPUs made of host memory, to test DMA streams: the CPU cannot access this memory at its addresses.

A region is a file of memory that is mapped twice: at its address without any permission, so that loads and stores there
kill the process, and elsewhere for the copies. A stream carries out its copies in order, as late as it may: when a
later event is found to have occurred, after `delay` questions; or with `eager` at once, on which nobody may rely
either. Copies may access regions and memory that is known as pinned, nothing else.
"""

import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import binding, ir

from gpunetio import verbs
from gpunetio.formats.layout import Entry
from gpunetio.jit.c_function import c_function
from gpunetio.jit.compile import DeviceFunction, engine_function
from gpunetio.jit.ops import copy, ld32, ld64, st32, st64
from gpunetio.jit.ops.lowering import INT, op
from gpunetio.jit.struct_view import struct_view
from gpunetio.memory import PAGE, HostMemory, round_up
from gpunetio.nic.memory.cuda_driver import Calls
from gpunetio.nic.nic import SoftNic
from nic_rig import Buffer, Queue, connect

OUT_OF_REACH, LAUNCH_FAILURE, DEINITIALIZED = 1, 719, 4  # CUresult
MAX_RANGES, MAX_OPS = 256, 1 << 14

# The state of all devices: regions (address, bytes, where copies find them) and pinned ranges (address, bytes); with
# `one_thread`, whose context is `current`.
WORLD = Entry("fake_world", 64, """
    regions          0  i64
    region_count     8  i64
    pinned          16  i64
    pinned_count    24  i64
    asked           32  i64
    current         40  i64
    one_thread      48  i64
""")
# A device and its only stream. `ops` are copies (target, source, bytes), of which `done` have been carried out.
# `copy_error` is the result of the copy after `copies_left` others, `query_error` that of all questions.
STREAM = Entry("fake_stream", 128, """
    world            0  i64
    ops              8  i64
    given           16  i64
    done            24  i64
    delay           32  i64
    eager           40  i64
    copy_error      48  i64
    copies_left     56  i64
    query_error     64  i64
    hangs           72  i64
    refused         80  i64
    copied          88  i64
    recorded        96  i64
    entered        104  i64
""")
EVENT = Entry("fake_event", 32, """
    stream           0  i64
    position         8  i64
    patience        16  i64
""")
world_at, stream_at, event_at = struct_view(WORLD), struct_view(STREAM), struct_view(EVENT)


@engine_function
def _reach(world, address, nbytes, in_region):
    """Where a copy finds a range, or 0 if it is not in a region, or not pinned, as it should be."""
    w = world_at(world)
    for i in range(w.region_count if in_region else 0):
        at = w.regions + 24 * i
        if ld64(at) <= address and address + nbytes <= ld64(at) + ld64(at + 8):
            return ld64(at + 16) + address - ld64(at)
    for i in range(0 if in_region else w.pinned_count):
        at = w.pinned + 16 * i
        if ld64(at) <= address and address + nbytes <= ld64(at) + ld64(at + 8):
            return address
    return 0


@engine_function
def _carry_out(stream, position):
    s = stream_at(stream)
    while s.done < position:
        at = s.ops + 24 * (s.done & (MAX_OPS - 1))
        copy(ld64(at), ld64(at + 8), ld64(at + 16))
        s.done += 1


@engine_function
def _copy(target, source, nbytes, stream, into, out_of):
    s = stream_at(stream)
    if s.copy_error != 0:
        s.copies_left -= 1
        if s.copies_left < 0:
            return s.copy_error
    if s.entered == 0 or (world_at(s.world).one_thread and world_at(s.world).current != stream):
        return DEINITIALIZED  # the thread's context is that of another device
    there, here = _reach(s.world, target, nbytes, into), _reach(s.world, source, nbytes, out_of)
    if there == 0 or here == 0 or s.given - s.done == MAX_OPS:
        s.refused += 1
        return OUT_OF_REACH
    at = s.ops + 24 * (s.given & (MAX_OPS - 1))
    st64(at, there)
    st64(at + 8, here)
    st64(at + 16, nbytes)
    s.given += 1
    s.copied += nbytes
    if s.eager:
        _carry_out(stream, s.given)
    return 0


@engine_function
def _record(event, stream):
    e = event_at(event)
    e.stream, e.position, e.patience = stream, stream_at(stream).given, stream_at(stream).delay
    stream_at(stream).recorded += 1
    return 0


@engine_function
def _query(event):
    e = event_at(event)
    s = stream_at(e.stream)
    if s.query_error != 0:
        return s.query_error
    e.patience -= 1
    if s.hangs or e.patience >= 0:
        return 600
    _carry_out(e.stream, e.position)
    return 0


@engine_function
def _attributes(world, count, names, answers, address):
    """cuPointerGetAttributes: memory type, start and size of what an address lies in; zeros for the unknown."""
    w = world_at(world)
    w.asked += 1
    kind, start, size = 0, 0, 0
    for i in range(w.region_count):
        at = w.regions + 24 * i
        if ld64(at) <= address < ld64(at) + ld64(at + 8):
            kind, start, size = 2, ld64(at), ld64(at + 8)
    for i in range(w.pinned_count):
        at = w.pinned + 16 * i
        if ld64(at) <= address < ld64(at) + ld64(at + 8):
            kind, start, size = 1, ld64(at), ld64(at + 8)
    for i in range(count):
        name, answer = ld32(names + 4 * i), ld64(answers + 8 * i)
        if name == 2:
            st32(answer, kind)
        elif name == 11:
            st64(answer, start)
        elif name == 12:
            st64(answer, size)
        else:
            return 1
    return 0


@engine_function
def _enter(stream):
    """A context is its stream's address."""
    stream_at(stream).entered = 1
    world_at(stream_at(stream).world).current = stream
    return 0


# The world's address, in a place where compiled code finds it even if another process has compiled that code.
_address = ctypes.c_int64()
_SYMBOL = "gpunetio_fake_world"
binding.add_symbol(_SYMBOL, ctypes.addressof(_address))


@op(ret=64, cpu=lambda b: b.load(ir.GlobalVariable(b.module, INT[64], _SYMBOL)), cuda=lambda b: INT[64](0))
def _world_of_this_process():
    """Return the address."""
    return 0


# The functions of Calls, with the additional arguments of the functions above.


@engine_function
def _copy_in(target, source, nbytes, stream):
    return _copy(target, source, nbytes, stream, 1, 0)


@engine_function
def _copy_out(target, source, nbytes, stream):
    return _copy(target, source, nbytes, stream, 0, 1)


@engine_function
def _copy_within(target, source, nbytes, stream):
    return _copy(target, source, nbytes, stream, 1, 1)


@engine_function
def _record_in(event, stream, _c, _d):
    return _record(event, stream)


@engine_function
def _query_it(event, _b, _c, _d):
    return _query(event)


@engine_function
def _attributes_here(count, names, answers, address):
    return _attributes(_world_of_this_process(), count, names, answers, address)


@engine_function
def _enter_it(context, _b, _c, _d):
    return _enter(context)


@functools.cache
def _world() -> tuple[HostMemory, Calls]:
    """What all devices of this process know, and their functions, which are compiled once."""
    memory = HostMemory(WORLD.size + 40 * MAX_RANGES)
    _address.value = memory.address

    def compiled(function: DeviceFunction) -> int:
        return c_function(function, 64, 64, 64, 64)

    return memory, Calls(
        compiled(_copy_in), compiled(_copy_out), within := compiled(_copy_within), within, compiled(_record_in),
        compiled(_query_it), compiled(_attributes_here), compiled(_enter_it),
    )


class FakeStream:
    """A `CopyDevice`. Its fields are those of STREAM, by name."""

    def __init__(self, gpus: "FakeGpus"):
        self._memory = HostMemory(STREAM.size + 24 * MAX_OPS)
        self._events: list[HostMemory] = []
        self._pinned: list[HostMemory] = []
        self._gpus = gpus
        self.row: Any = self._memory.view(STREAM.dtype)[0]
        self.row["world"], self.row["ops"] = gpus.world_address, self._memory.address + STREAM.size
        self.row["delay"], self.row["eager"] = gpus.delay, gpus.eager
        self.context = self.stream = self._memory.address
        self.calls = gpus.calls
        self.closed = False

    def create_event(self) -> int:
        self._events.append(HostMemory(EVENT.size))
        return self._events[-1].address

    def alloc_pinned(self, nbytes: int) -> int:
        self._pinned.append(HostMemory(nbytes))
        self._gpus.pin(self._pinned[-1].address, nbytes)
        return self._pinned[-1].address

    def close(self) -> None:
        self.closed = True
        for memory in (*self._events, *self._pinned):
            memory.close()


class FakeGpus:
    """A `DeviceDriver` of `count` devices; a new one forgets what others knew."""

    def __init__(self, count: int = 1, delay: int = 3, eager: bool = False):
        self.delay, self.eager = delay, eager
        self._world, self.calls = _world()
        self.world_address = world = self._world.address
        self.world: Any = self._world.view(WORLD.dtype)[0]
        self.world["region_count"] = self.world["pinned_count"] = self.world["one_thread"] = 0
        self.world["regions"], self.world["pinned"] = world + WORLD.size, world + WORLD.size + 24 * MAX_RANGES
        self._regions = self._world.view(np.int64, WORLD.size, 3 * MAX_RANGES).reshape(-1, 3)
        self._pins = self._world.view(np.int64, WORLD.size + 24 * MAX_RANGES, 2 * MAX_RANGES).reshape(-1, 2)
        self._owners: list[int] = []
        self.count, self.streams = count, list[FakeStream]()

    def alloc(self, nbytes: int, ordinal: int = 0) -> "FakeMemory":
        """Memory of a device."""
        memory = FakeMemory(nbytes)
        at = int(self.world["region_count"])
        self._regions[at] = memory.address, memory.nbytes, memory.visible
        self._owners.append(ordinal)
        self.world["region_count"] = at + 1
        return memory

    def free(self, memory: "FakeMemory") -> None:
        """The devices do not reach it any more."""
        at = int(np.flatnonzero(self._regions[:, 0] == memory.address)[0])
        self._regions[at] = 0

    def pin(self, address: int, nbytes: int) -> None:
        """Host memory that copies may touch."""
        at = int(self.world["pinned_count"])
        self._pins[at] = address, nbytes
        self.world["pinned_count"] = at + 1

    def locate(self, address: int, nbytes: int) -> int | None:
        for (start, size, _), ordinal in zip(self._regions, self._owners):
            if start <= address and address + nbytes <= start + size:
                return ordinal
        return None

    def open(self, ordinal: int) -> FakeStream:
        assert ordinal < self.count
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def error_name(self, code: int) -> str:
        return {OUT_OF_REACH: "CUDA_ERROR_INVALID_VALUE", LAUNCH_FAILURE: "CUDA_ERROR_LAUNCH_FAILED"}[code]

    def serve(self, ctx: verbs.Context) -> SoftNic:
        """Be the driver of the software NIC behind a context."""
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        nic.device_memory.driver = self
        return nic


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype, _libc.mmap.argtypes = ctypes.c_ssize_t, (
    ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)


class FakeMemory:
    """`nbytes` at `address`, where nobody can touch them; `array` is what is there. Never unmapped."""

    is_cuda = True

    def __init__(self, nbytes: int):
        self.nbytes = round_up(nbytes, PAGE)
        fd = os.memfd_create("fake gpu")
        os.ftruncate(fd, self.nbytes)
        mapping = mmap.mmap(fd, self.nbytes)
        self.array = np.frombuffer(mapping, np.uint8)
        self.visible = int(self.array.ctypes.data)
        self.address = int(_libc.mmap(0, self.nbytes, 0, mmap.MAP_SHARED, fd, 0))
        assert self.address > 0
        os.close(fd)


class DeviceBuffer(Buffer):
    """A `Buffer` in the memory of a device; `bytes` is a view of what is there."""

    def __init__(
        self, gpus: FakeGpus, pd: verbs.PD, nbytes: int, fill: int | None = None, ordinal: int = 0, **registration: Any
    ):
        self.memory = gpus.alloc(nbytes + 2 * self.GUARD, ordinal)
        self.whole = self.memory.array
        self.bytes = self.whole[self.GUARD : self.GUARD + nbytes]
        if fill is not None:
            self.bytes[:] = np.arange(nbytes) * 7 + fill
        self.start = self.GUARD
        self.mr = pd.register(_Part(self.memory.address + self.GUARD, nbytes), **registration)
        self.address, self.key, self.nbytes = self.mr.iova, self.mr.lkey, nbytes


class _Part:
    is_cuda = True

    def __init__(self, address: int, nbytes: int):
        self.address, self.nbytes = address, nbytes


class DeviceEnds:
    """Two connected QPs on one NIC or two, all with the same fake GPUs. They hold the buffers that they make."""

    def __init__(self, *names: str, gpus: FakeGpus | None = None, port: Any = None, **queue: Any):
        self.gpus = gpus or FakeGpus()
        contexts = [verbs.open(name, port=port) if port else verbs.open(name) for name in names]
        for ctx in contexts:
            self.gpus.serve(ctx)
        self.contexts = contexts
        self.pds = [ctx.create_pd() for ctx in contexts]
        self.a, self.b = Queue(self.pds[0], **queue), Queue(self.pds[-1], **queue)
        self.buffers: list[Buffer | DeviceBuffer] = []
        connect(self.a, self.b)

    def reconnect(self) -> None:
        """Reset both queues, and connect them again."""
        self.a.reset()
        self.b.reset()
        connect(self.a, self.b)

    def device(
        self, side: int, nbytes: int, fill: int | None = None, ordinal: int = 0, **registration: Any
    ) -> DeviceBuffer:
        buffer = DeviceBuffer(self.gpus, self.pds[-side], nbytes, fill, ordinal, **registration)
        self.buffers.append(buffer)
        return buffer

    def host(self, side: int, nbytes: int, fill: int | None = None, pinned: bool = False) -> Buffer:
        buffer = Buffer(self.pds[-side], nbytes, fill)
        if pinned:
            self.gpus.pin(int(buffer.whole.ctypes.data), buffer.whole.nbytes)
        self.buffers.append(buffer)
        return buffer

    def close(self) -> None:
        for ctx in self.contexts:
            ctx.close()


@contextmanager
def device_ends(*names: str, **options: Any) -> Iterator[DeviceEnds]:
    ends = DeviceEnds(*names, **options)
    try:
        yield ends
    finally:
        ends.close()
