"""What the host does around CUDA, with stand-ins for CUDA."""

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, MemType, gpu_list
from gpunetio.errors import BadStateError, DriverError, InvalidValueError, NotFoundError, NotSupportedError
from gpunetio.gpu import cuda_backend
from gpunetio.gpu.cuda_backend import CudaBackend
from gpunetio.gpu.cuda_heap import cuda_heap
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.gpu.uar import RegisterTable
from gpunetio.jit import cuda_launch
from gpunetio.jit.arguments import kind_and_words
from gpunetio.jit.cuda_launch import CudaLaunch
from gpunetio.jit.kinds import ArrayType
from gpunetio.jit.launch import observers, tell_observers
from nic_rig import until

BUS_IDS = ["0000:18:00.0", "0000:8A:00.0"]


ENDED, RUNS, FAILED = 0, 600, 700  # what CUDA answers when it is asked for an event


def nothing() -> None:
    pass


class Event:
    """Of a kernel that runs until `answer` is something else than RUNS."""

    def __init__(self):
        self.answer = RUNS

    def query(self) -> int:
        return self.answer

    def record(self, stream: Any) -> None:
        pass

    def wait(self, stream: Any) -> None:
        pass


class Runtime:
    """CUDA's runtime as far as memory needs it: which device is the thread's, and whose each allocation is."""

    cudaHostAllocPortable = cudaHostAllocMapped = 1
    cudaHostRegisterPortable, cudaHostRegisterMapped, cudaHostRegisterIoMemory = 1, 2, 4
    cudaMemoryType = SimpleNamespace(cudaMemoryTypeUnregistered=0, cudaMemoryTypeHost=1)
    cudaError_t = SimpleNamespace(cudaErrorNotReady=RUNS, cudaErrorHostMemoryAlreadyRegistered=712)

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrIntegrated=18)
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2

    def __init__(self):
        self.new_event: Callable[[], Event] = Event
        self.over = False  # then no kernel runs
        self._threads = threading.local()
        self.count = len(BUS_IDS)
        self.streams: dict[int, int] = {}  # handle → device
        self._handles = count(1)
        self.owners: dict[int, int] = {}
        self.memset_error = 0
        self.io_pages: set[int] = set()  # which are no memory
        self.io_error = 0
        self.registered: dict[int, int] = {}  # page → flags
        self.pinned: set[int] = set()  # pages of cudaHostAlloc

    @property
    def device(self) -> int:
        """That of the calling thread."""
        return getattr(self._threads, "device", 0)

    @device.setter
    def device(self, ordinal: int) -> None:
        self._threads.device = ordinal

    def cudaPointerGetAttributes(self, address: int) -> tuple[int, Any]:
        host = address & -4096 in self.pinned | set(self.registered)
        return 0, SimpleNamespace(type=int(host))

    def cudaHostRegister(self, page: int, nbytes: int, flags: int) -> tuple[int]:
        assert (page % 4096, nbytes, flags & 3) == (0, 4096, 3)
        if page in self.pinned:  # as an H200's driver answers
            return (1,)
        if page in self.registered:
            return (712,)
        if (page in self.io_pages) != bool(flags & self.cudaHostRegisterIoMemory):
            return (1,)
        if page in self.io_pages and self.io_error:
            return (self.io_error,)
        self.registered[page] = flags
        return (0,)

    def cudaHostUnregister(self, page: int) -> tuple[int]:
        del self.registered[page]
        return (0,)

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return (0, address) if address & -4096 in self.pinned | set(self.registered) else (1, 0)

    def cudaGetLastError(self) -> tuple[int]:
        return (0,)

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, self.count

    def cudaDeviceGetPCIBusId(self, room: int, ordinal: int) -> tuple[int, bytes]:
        return 0, BUS_IDS[ordinal].encode().ljust(room, b"\0")

    def cudaDeviceGetByPCIBusId(self, bus_id: bytes) -> tuple[int, int]:
        name = bus_id.decode()
        return (0, BUS_IDS.index(name)) if name in BUS_IDS else (10, 0)

    def cudaDeviceGetAttribute(self, attribute: int, ordinal: int) -> tuple[int, int]:
        assert attribute == self.cudaDeviceAttr.cudaDevAttrIntegrated
        return 0, 0

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        assert flags == self.cudaStreamNonBlocking
        stream = next(self._handles)
        self.streams[stream] = self.device
        return 0, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        del self.streams[stream]
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, Event]:
        assert flags == self.cudaEventDisableTiming
        return 0, self.new_event()

    def cudaEventRecord(self, event: Event, stream: Any) -> tuple[int]:
        event.record(stream)
        return (0,)

    def cudaStreamWaitEvent(self, stream: Any, event: Event, flags: int) -> tuple[int]:
        event.wait(stream)
        return (0,)

    def cudaEventQuery(self, event: Event) -> tuple[int]:
        return (ENDED if self.over else event.query(),)

    def cudaSetDevice(self, ordinal: int) -> tuple[int]:
        self.device = ordinal
        return (0,)

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, self.device

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        address = 1 << 20 << len(self.owners)
        self.owners[address] = self.device
        return 0, address

    def cudaFree(self, address: int) -> None:
        del self.owners[address]

    def cudaMemsetAsync(self, *args: Any) -> tuple[int]:
        return (self.memset_error,)

    def cudaStreamQuery(self, stream: Any) -> tuple[int]:
        return (0,)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, b"out of luck"


class Kernel:
    """A kernel in a GPU's memory. `raised`: by a thread of it."""

    def __init__(self, runtime: Runtime):
        self.runtime, self.launched = runtime, []
        self.raised: Exception | None = None

    def launch(self, grid: int, block: int, stream: Any, words: Any, kinds: Any) -> None:
        self.launched.append((self.runtime.device, (grid, block, stream), words))

    def failure(self, stream: Any) -> Exception | None:
        assert stream in self.runtime.streams
        return self.raised


def run(kernel: Kernel, ended: Callable[[], None] = nothing, ordinal: int = 0, words: tuple[int, ...] = (),
        grid: int = 1, block: int = 1) -> CudaLaunch:
    """Launch it."""
    return CudaLaunch("k", lambda: kernel, (words, ()), grid, block, ordinal, ended)  # type: ignore[arg-type]


@pytest.fixture
def runtime(monkeypatch) -> Iterator[Runtime]:
    """It is there until nothing is watched: the watching thread would ask CUDA for the events of a stand-in."""
    runtime, watched = Runtime(), []
    watch, look = cuda_launch.Watcher.watch, cuda_launch.Watcher._look

    def counted_watch(watcher: Any, one: Any) -> None:
        watched.append(one)
        watch(watcher, one)

    def counted_look(watcher: Any, one: Any) -> bool:
        if runs := look(watcher, one):
            return runs
        watched.remove(one)
        return False

    monkeypatch.setattr(cuda_launch.Watcher, "watch", counted_watch)
    monkeypatch.setattr(cuda_launch.Watcher, "_look", counted_look)
    monkeypatch.setattr(cuda_backend, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(cuda_launch, "cuda_runtime", lambda: runtime)
    cuda_heap.follow_launches()
    monkeypatch.setattr(cuda_launch, "_idle_streams", functools.cache(lambda ordinal: []))
    yield runtime
    runtime.over = True
    until(lambda: not watched, "the watching thread")


@pytest.fixture
def event(runtime: Runtime) -> Event:
    """That of all launches."""
    event = Event()
    runtime.new_event = lambda: event
    return event


class RecordedEvent(Event):
    """Of the kernel after which it was recorded last."""

    def record(self, stream: Any) -> None:
        self.answer = RUNS


@pytest.fixture
def recorded(runtime: Runtime) -> list[RecordedEvent]:
    """One event for each stream, in the order in which they are made."""
    made: list[RecordedEvent] = []
    runtime.new_event = lambda: made.append(RecordedEvent()) or made[-1]
    return made


# --- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which, ordinal", [("auto", 0), (0, 0), (1, 1), ("1", 1), (BUS_IDS[1], 1)])
def test_a_device_is_opened(runtime: Runtime, which, ordinal):
    assert gpu_list() == [*BUS_IDS, "host"]
    with Gpu(which) as gpu:
        assert (gpu.target, gpu.ordinal, gpu.name, gpu.warp) == ("cuda", ordinal, BUS_IDS[ordinal], 32)
        assert runtime.device == ordinal
        assert list(runtime.streams.values()) == [ordinal]  # for copies
    assert not runtime.streams


@pytest.mark.parametrize("which", [2, "2", "0000:19:00.0"])
def test_a_device_that_is_not_there(runtime: Runtime, which):
    with pytest.raises(NotFoundError, match=f"no GPU .*{which}.*; there are:? .*{BUS_IDS[0]}.*{BUS_IDS[1]}"):
        Gpu(which)


def test_no_device_at_all(runtime: Runtime):
    runtime.count = 0
    with Gpu("auto") as gpu:
        assert gpu.target == "cpu"
    with pytest.raises(NotSupportedError, match="GPU 0 needs CUDA, and this machine has no CUDA device"):
        Gpu(0)


def backend(runtime: Runtime, ordinal: int) -> CudaBackend:
    """As it is when its device has been opened."""
    backend = CudaBackend.__new__(CudaBackend)
    backend._rt, backend._copies, backend.ordinal, backend.name = runtime, 0, ordinal, f"gpu {ordinal}"
    return backend


def test_memory_is_that_of_its_device(runtime: Runtime):
    backends = [backend(runtime, ordinal) for ordinal in (0, 1)]
    runtime.device = 1  # it was opened last
    kept = [backends[ordinal].alloc(100, 4096, MemType.GPU) for ordinal in (0, 1, 0)]
    assert list(runtime.owners.values()) == [0, 1, 0]
    del kept
    gc.collect()
    assert not runtime.owners


def test_memory_is_freed_when_no_kernel_runs(runtime: Runtime):
    """For then cudaFree does not wait; what is asked for meanwhile may be the same."""
    cuda = backend(runtime, 0)
    first, other = cuda.alloc(100, 64, MemType.GPU), cuda.alloc(200, 64, MemType.GPU)
    tell_observers(+1)
    try:
        addresses = [first[0], other[0]]
        del first, other
        gc.collect()
        assert set(runtime.owners) == set(addresses)
        again = [cuda.alloc(200, 64, MemType.GPU), cuda.alloc(200, 64, MemType.GPU)]
        assert again[0][0] == addresses[1]
        assert again[1][0] not in addresses
    finally:
        tell_observers(-1)
    assert set(runtime.owners) == {memory[0] for memory in again}
    del again
    gc.collect()
    assert not runtime.owners


def test_memory_that_cannot_be_zeroed_is_given_back(runtime: Runtime):
    runtime.memset_error = 2
    with suppress(DriverError):
        backend(runtime, 0).alloc(100, 4096, MemType.GPU)
        pytest.fail("it could be zeroed")
    gc.collect()
    assert not runtime.owners


def test_memory_is_an_array_for_kernels(runtime: Runtime):
    """By CUDA's interface, and it stays open while a kernel has it."""
    with Gpu(0) as gpu:
        memory = gpu.alloc(100, MemType.GPU)
        array = memory.as_array((2, 3), np.float64)
        interface = {"shape": (2, 3), "typestr": "<f8", "data": (memory.device_address, False), "version": 3}
        assert array.__cuda_array_interface__ == interface
        kind, words = kind_and_words("heat", array)
        assert (kind, words) == (ArrayType("float64", 2, True), [memory.device_address, 2, 3])
        used_by: list[Any] = []
        memory.used_by = used_by.append  # type: ignore[method-assign]
        array.used_by("a launch")
        assert used_by == ["a launch"]
        with pytest.raises(InvalidValueError, match=r"\[0, \+104\) is outside the memory's 100 bytes"):
            memory.as_array(13, np.int64)
        memory.close()
        with pytest.raises(BadStateError, match="closed"):
            _ = array.__cuda_array_interface__


def test_a_kernel_runs_on_its_device(runtime: Runtime, event: Event):
    """Whatever the thread has used last, and that is so again afterwards."""
    kernel, ended = Kernel(runtime), []
    for used in (0, 1):
        runtime.device = used
        for ordinal in (0, 1):
            run(kernel, lambda: ended.append(runtime.device), ordinal, (5,), 2, 32)
            device, (grid, block, stream), args = kernel.launched.pop()
            assert (device, grid, block, args) == (ordinal, 2, 32, (5,))
            assert runtime.streams[stream] == ordinal
            assert runtime.device == used
    event.answer = ENDED
    until(lambda: sorted(ended) == [0, 0, 1, 1], "observers to hear of it, where they may free memory of the device")


def test_a_kernel_follows_the_default_stream(runtime: Runtime, event: Event, monkeypatch):
    """Which does not wait for the kernel, as its stream is non-blocking: `Runtime` makes no other."""
    kernel, calls = Kernel(runtime), []
    monkeypatch.setattr(event, "record", lambda stream: calls.append(("record", stream, len(kernel.launched))))
    monkeypatch.setattr(event, "wait", lambda stream: calls.append(("wait", stream, len(kernel.launched))))
    run(kernel)
    (stream,) = runtime.streams
    assert calls == [("record", 0, 0), ("wait", stream, 0), ("record", stream, 1)]
    event.answer = ENDED


def test_a_kernel_that_gets_no_stream(runtime: Runtime, event: Event, monkeypatch):
    monkeypatch.setattr(runtime, "cudaStreamCreateWithFlags", lambda flags: (2, 0))
    with pytest.raises(DriverError, match=r"cudaStreamCreateWithFlags: out of luck \(CUDA error 2\)"):
        run(Kernel(runtime))


def test_kernels_run_beside_each_other(runtime: Runtime, event: Event):
    """A stream each, while they run; then others have it."""
    kernel, ended = Kernel(runtime), []
    launches = [run(kernel, lambda: ended.append(1)) for _ in range(3)]
    streams = {config[2] for _, config, _ in kernel.launched}
    assert len(streams) == 3
    event.answer = ENDED
    assert all(launch.wait(1) for launch in launches)
    until(lambda: len(ended) == 3, "the watching thread")
    for _ in range(3):
        run(kernel)
    assert {config[2] for _, config, _ in kernel.launched} == streams


def test_one_thread_watches_all_launches(runtime: Runtime, event: Event):
    """On each device, also after it has slept."""
    kernel = Kernel(runtime)
    told: list[tuple[int, str]] = []
    before = threading.active_count()

    def tell() -> None:
        told.append((runtime.device, threading.current_thread().name))

    for rounds in (1, 2):
        event.answer = RUNS
        for number in range(40):
            run(kernel, tell, number % 2)
        assert threading.active_count() <= before + 1
        event.answer = ENDED
        until(lambda rounds=rounds: len(told) == 40 * rounds, "the watching thread")
        time.sleep(0.002)  # until it sleeps
    assert set(told) == {(0, "gpunetio launches"), (1, "gpunetio launches")}


def test_a_stream_is_free_as_soon_as_anybody_sees_the_end(runtime: Runtime, recorded: list[RecordedEvent], monkeypatch):
    """Not only when the watching thread looks: CUDA has few ways to a GPU, and more streams would share them."""
    monkeypatch.setattr(cuda_launch.Watcher, "watch", lambda self, watched: None)
    kernel = Kernel(runtime)
    for _ in range(40):
        launch = run(kernel)
        assert not launch.done
        recorded[0].answer = ENDED
        assert launch.wait(0)
        assert launch.wait(0)
        assert launch.ended
    assert len(recorded) == 1
    assert len({config[2] for _, config, _ in kernel.launched}) == 1


@pytest.mark.parametrize("answer", [RUNS, FAILED], ids=["runs", "fails"])
def test_an_ended_launch_knows_nothing_of_the_next_one(
    runtime: Runtime, recorded: list[RecordedEvent], monkeypatch, answer
):
    """Not even in a thread that has begun to ask before the end was seen, and gets its answer from the next kernel."""
    monkeypatch.setattr(cuda_launch.Watcher, "watch", lambda self, watched: None)
    kernel = Kernel(runtime)
    first = run(kernel)
    (event,) = recorded

    def query_late() -> int:
        """While this thread is about to ask, another one sees the end, and launches the next kernel."""
        del event.query  # type: ignore[method-assign]
        event.answer = ENDED
        assert first.ended
        run(kernel)
        event.answer = answer
        return event.query()

    event.query = query_late  # type: ignore[method-assign]
    assert first.ended
    assert first.done
    assert [config[2] for _, config, _ in kernel.launched] == [*runtime.streams] * 2
    assert recorded == [event]


def test_an_observer_that_fails_ends_no_watch(runtime: Runtime, event: Event, monkeypatch):
    """It is reported as the end of a thread is, and the launches beside it and after it are told of."""
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append((args.exc_type, str(args.exc_value))))
    kernel, ended = Kernel(runtime), []

    def fail() -> None:
        raise ValueError("an observer's")

    run(kernel, fail)
    run(kernel, lambda: ended.append(1))
    event.answer = ENDED
    until(lambda: len(ended) == 1, "the watching thread")
    run(kernel, lambda: ended.append(1))
    until(lambda: len(ended) == 2, "the watching thread")
    assert failures == [(ValueError, "an observer's")]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads, since Python 3.12
def test_a_launch_in_a_forked_child_is_watched(runtime: Runtime, event: Event):
    """By a thread of the child: that of the parent is not there."""
    kernel, ended = Kernel(runtime), []
    run(kernel, lambda: ended.append(0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(kernel, lambda: ended.append(1))
            event.answer = ENDED
            until(lambda: ended == [1], "the child's watching thread")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ended == []
    event.answer = ENDED
    until(lambda: ended == [0], "the parent's watching thread")


def test_what_cuda_is_told_before_it_begins(monkeypatch):
    """But for what the environment says already."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    cuda_launch.set_up_cuda()
    assert (os.environ["CUDA_MODULE_LOADING"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("LAZY", "32")


# --- doorbell registers of a card ------------------------------------------------------------------------------------

UAR = 0x7F00_0000_0000  # where a page of registers is mapped


def test_a_register_of_a_card_is_mapped_as_io_memory(runtime: Runtime):
    """Anywhere in its page, which is registered once for all registers and queues."""
    runtime.io_pages.add(UAR)
    registers = RegisterTable(backend(runtime, 0))
    ordinary, without_record = registers.export(UAR + 0x800), registers.export(UAR + 0x600)
    assert (ordinary, without_record) == (UAR + 0x800, UAR + 0x600)
    assert registers.export(UAR + 0x800) == ordinary
    assert runtime.registered == {UAR: 7}
    for register in (ordinary, ordinary):
        registers.unexport(register)
    assert runtime.registered == {UAR: 7}
    registers.unexport(without_record)
    assert runtime.registered == {}


def test_a_register_in_memory_is_mapped_as_that(runtime: Runtime):
    registers = RegisterTable(backend(runtime, 0))
    registers.unexport(registers.export(UAR + 0x800))
    assert registers.can_map(UAR + 0x800)
    assert runtime.registered == {}


def test_a_register_that_cuda_refuses(runtime: Runtime):
    """As without the right to map I/O memory into the GPU."""
    runtime.io_pages.add(UAR)
    runtime.io_error = 800
    registers = RegisterTable(backend(runtime, 0))
    with pytest.raises(DriverError, match=r"cudaHostRegister: out of luck \(CUDA error 800\)"):
        registers.export(UAR + 0x800)
    assert not registers.can_map(UAR + 0x800)
    assert runtime.registered == {}


def test_pinned_memory_is_mapped_as_it_is(runtime: Runtime):
    """A ring in CPU_GPU memory."""
    runtime.pinned |= {UAR, UAR + 4096}
    cuda = backend(runtime, 0)
    assert cuda.map(UAR + 64, 4096 + 64) == UAR + 64
    cuda.unmap(UAR + 64, 4096 + 64)
    assert runtime.registered == {}


def test_a_page_that_another_library_has_registered_stays_registered(runtime: Runtime):
    runtime.io_pages.add(UAR)
    runtime.registered[UAR] = 7
    registers = RegisterTable(backend(runtime, 0))
    registers.unexport(registers.export(UAR + 0x800))
    assert runtime.registered == {UAR: 7}


# --- a kernel that fails ---------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_has_ended(event: Event, runtime: Runtime, caplog):
    changes: list[int] = []
    tell_observers(+1)  # as a launch does
    observers.append(changes.append)
    try:
        with Gpu("host") as gpu:
            memory, running = gpu.alloc(64), run(Kernel(runtime), lambda: tell_observers(-1))
            memory.used_by(running)
            assert not running.done
            assert not running.wait(0.01)
            event.answer = FAILED
            until(lambda: changes == [-1], "the watching thread")
            assert running.ended
            assert "a kernel has failed, and with it the CUDA context: cudaEventQuery: out of luck" in caplog.text
            said = r"a kernel has failed, .* out of luck \(CUDA error 700\); look"
            for ask in (lambda: running.done, lambda: running.wait(1)):
                with pytest.raises(DriverError, match=said):
                    ask()
            memory.close()
            assert memory.closed
    finally:
        observers.remove(changes.append)


def test_what_a_thread_of_a_kernel_raises_is_raised_here(event: Event, runtime: Runtime, caplog):
    """It ends, and others go on: the context is whole, and the next kernel has its stream."""
    kernel, ended = Kernel(runtime), []
    launch = run(kernel, lambda: ended.append(1))
    kernel.raised = ValueError("too long (f, a.py:7)")
    event.answer = ENDED
    until(lambda: ended == [1], "the watching thread")
    assert "a thread has raised ValueError: too long (f, a.py:7)" in caplog.text
    for ask in (lambda: launch.done, lambda: launch.wait(1)):
        with pytest.raises(ValueError, match=r"too long \(f, a.py:7\)"):
            ask()
    assert launch.ended
    kernel.raised = None
    assert run(kernel).wait(1)
    assert len({config[2] for _, config, _ in kernel.launched}) == 1


def test_closing_goes_on_when_a_part_fails(monkeypatch):
    """As each call of CUDA does after a kernel has failed."""
    def fails(*args: object) -> None:
        raise DriverError("illegal address")

    closed: list[int] = []
    gpu = Gpu("host")
    memory = [gpu.alloc(64) for _ in range(2)]
    service = gpu.create_service()
    monkeypatch.setattr(memory[1], "close", fails)
    monkeypatch.setattr(HostBackend, "close", lambda self: closed.append(1))
    with pytest.raises(DriverError, match="illegal address"):
        gpu.close()
    assert memory[0].closed
    assert service.closed
    assert closed == [1]
    gpu.close()


def test_the_watchdog_goes_on_when_a_queue_cannot_be_looked_at(caplog):
    class Broken:
        def indices(self) -> dict[str, int]:
            raise RuntimeError("no such address")

        def __str__(self) -> str:
            return "the export of QP 0x5"

    looked = threading.Event()
    whole = SimpleNamespace(indices=lambda: looked.set() or {"completed": 0})
    with Gpu("host") as gpu:
        gpu.watchdog._exports = lambda: [Broken(), whole]  # type: ignore[list-item]
        gpu.watchdog.look()
    assert looked.is_set()
    assert "the export of QP 0x5 cannot be looked at" in caplog.text
    assert "no such address" in caplog.text
