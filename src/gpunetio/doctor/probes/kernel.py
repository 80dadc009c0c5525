"""Probe the complete path: a kernel posts a write to a queue pair that is connected to itself."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from ... import device as dev
from ...device import kernel
from ...enums import MemType, NicHandler
from ...errors import DocaError
from ...gpu import ExportedQp, GpuMemory
from ...verbs import MR
from ..finding import Evidence, Finding, fail, ok, skip
from .bench import SIZE, Bench, Way, differences, pattern
from .explain import completion_failed

_DEPTH = 16
_COMPILE_SECONDS = 120.0
_GRACE_SECONDS = 5.0  # for a kernel that has stopped waiting
_UNTOUCHED = 1  # not a status: the kernel has not stored one


@kernel
def _write(qp, raddr, rkey, laddr, lkey, nbytes, status):
    if nbytes:  # 0: only compile it
        dev.st64(status, dev.wait(qp, dev.put(qp, raddr, rkey, laddr, lkey, nbytes)))


def gpu(bench: Bench) -> Iterator[Finding]:
    """Let a kernel write a WQE and poll. The CPU proxy rings first, then the kernel itself."""
    if why := bench.without_devx():
        yield skip(why)
        return
    if not _write[1, 1, bench.gpu](0, 0, 0, 0, 0, 0, 0).wait(_COMPILE_SECONDS):
        yield fail(f"an empty kernel on {_place(bench)} does not end within {_COMPILE_SECONDS:g} s")
        return
    way = bench.way()
    yield from _posted(bench, way, NicHandler.CPU_PROXY, "the CPU proxy rings")
    if bench.on_gpu and bench.gpu.backend.integrated:
        yield skip(f"GPU {bench.gpu.name} is integrated: the CPU proxy rings for it")
    elif error := bench.register_error():
        yield skip("the kernel cannot ring by itself: see probe-uar", Evidence("cudaHostRegister", str(error)))
    else:
        yield from _posted(bench, way, NicHandler.GPU_SM_DB, "the kernel rings")


def _posted(bench: Bench, way: Way, handler: NicHandler, rings: str) -> Iterator[Finding]:
    """Write once with a new queue. Yield the finding before the queue closes, because closing waits for the kernel."""
    with ExitStack() as made:
        queue = made.enter_context(bench.gpu.create_qp(bench.pd, _DEPTH, nic_handler=handler, timeout=bench.patience))
        (source, here), (target, there) = (_payload(bench, made) for _ in range(2))
        status = made.enter_context(bench.gpu.alloc(8, MemType.CPU_GPU))
        words, wanted = status.array.view(np.int64), pattern()
        words[0] = _UNTOUCHED
        source.write(wanted)
        way.connect(queue)
        launch = _write[1, 1, bench.gpu](queue, there.address, there.rkey, here.address, here.lkey, SIZE, status)
        lies = f"on {_place(bench)}; rings in {queue.ring_memory.text}, data in {_where(bench, source)}"
        read = Evidence("connected to itself", way.text), Evidence("kernel", lies)
        if not launch.wait(bench.patience + _GRACE_SECONDS):
            yield fail(f"{rings}: the kernel on {_place(bench)} does not end", *read)
        elif words[0] != dev.OK:
            yield _not_written(bench, queue, int(words[0]), rings, read)
        elif wrong := differences(wanted, target.read()):
            yield fail(f"{rings}: {bench.name} reports success, and {wrong}", *read)
        else:
            yield ok(f"a kernel on {_place(bench)} writes {SIZE >> 10} KiB by {bench.name}: {rings}", *read)


def _payload(bench: Bench, made: ExitStack) -> tuple[GpuMemory, MR]:
    """Register GPU memory, or host memory if the device does not accept GPU memory (see probe-dmabuf)."""
    memory = made.enter_context(bench.gpu.alloc(SIZE))
    try:
        return memory, made.enter_context(bench.pd.register(memory))
    except DocaError:
        memory = made.enter_context(bench.gpu.alloc(SIZE, MemType.CPU_GPU))
        return memory, made.enter_context(bench.pd.register(memory))


def _place(bench: Bench) -> str:
    return f"GPU {bench.gpu.name}" if bench.on_gpu else "CPU threads"


def _where(bench: Bench, memory: GpuMemory) -> str:
    return "GPU memory" if bench.on_gpu and memory.kind is MemType.GPU else "host memory"


def _not_written(bench: Bench, queue: ExportedQp, status: int, rings: str, read: tuple[Evidence, ...]) -> Finding:
    """Return why the kernel's `put` or `wait` failed."""
    error = queue.last_error()
    if error and error.syndrome:
        said = bench.ctx.provider.explain(queue.qpn, error.vendor_syndrome)
        return completion_failed(bench.name, rings, error.syndrome, error.vendor_syndrome, said, *read)
    name = errno.errorcode.get(-status, "no status")
    indices = ", ".join(f"{what} {count}" for what, count in queue.indices().items())
    text = f"{name} ({status}) after {bench.patience:g} s; {indices}; {error or f'the QP is in {queue.qp.state.name}'}"
    return fail(f"{rings}: no completion reaches the kernel on {_place(bench)}", *read, Evidence("kernel's wait", text))
