"""The GPU handle, its memory, and what an exported queue looks like."""

import logging
import pickle
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpunetio import DocaError, Gpu, MemType, NicHandler, device, gpu_list, kernel, verbs
from gpunetio.device import status
from gpunetio.errors import (
    BadStateError,
    InUseError,
    InvalidValueError,
    NotFoundError,
    NotSupportedError,
    TimedOutError,
)
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP
from gpunetio.gpu import export as export_module
from gpunetio.gpu import memory as memory_module
from gpunetio.gpu.device import engine_of
from gpunetio.gpu.memory import RunningLaunches
from gpunetio.jit import host_threads
from gpunetio.jit.launch import observers, running
from gpunetio.jit.values import CompileError
from pair import Pair, make_pair


@kernel
def meet(arrived, number, deadline_ns, out):
    """Wait until `number` kernels are there, and say whether they were."""
    device.fetch_add_gpu64(arrived, 1)
    begin = device.clock_ns()
    while device.ld_acquire64(arrived) < number and device.clock_ns() - begin < deadline_ns:
        device.yield_thread()
    device.st64(out, device.ld_acquire64(arrived) == number)


def test_kernels_run_beside_each_other(gpu):
    """More of them than CUDA has connections by default: each waits for the last one."""
    number = 12
    with gpu.alloc(4096) as arrived, gpu.alloc(4096) as out:
        places = [out.device_address + 8 * i for i in range(number)]
        launches = [meet[1, 1, gpu](arrived, number, 20 * 10**9, place) for place in places]
        assert all(launch.wait(60) for launch in launches)
        assert out.read().view(np.int64)[:number].tolist() == [1] * number


@pytest.mark.parametrize("kind", list(MemType))
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_memory_is_zeroed_aligned_and_keeps_what_is_written(gpu, kind, nbytes):
    with gpu.alloc(nbytes, kind, alignment=65536) as memory:
        assert memory.nbytes == nbytes
        assert memory.device_address % 65536 == 0
        assert not memory.read().any()
        data = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
        memory.write(data)
        assert np.array_equal(memory.read(), data)
        memory.write(b"\x07", nbytes - 1)
        assert memory.read(nbytes - 1).tolist() == [7]


@pytest.mark.host_memory
def test_memory_kinds_on_a_gpu_without_gdrcopy(gpu, caplog):
    with caplog.at_level(logging.WARNING, "gpunetio.gpu"):
        memory = gpu.alloc(64, MemType.GPU_CPU)
        gpu.alloc(64, MemType.GPU_CPU).close()
    if gpu.target == "cuda":
        assert memory.kind is MemType.CPU_GPU
        assert caplog.text.count("GDRCopy") == 1
        with pytest.raises(BadStateError, match="no CPU mapping"):
            _ = gpu.alloc(64, MemType.GPU).array
    else:
        assert memory.kind is MemType.GPU_CPU
    assert memory.array.nbytes == 64


@pytest.mark.parametrize(("nbytes", "kind", "alignment"), [
    (0, 2, 64), (-1, 2, 64), (64, 2, 48), (64, 2, -8), (64, 3, 64), (1.5, 2, 64), (64, "GPU", 64), (64, 2, None),
])
def test_impossible_allocations(gpu, nbytes, kind, alignment):
    with pytest.raises(InvalidValueError):
        gpu.alloc(nbytes, kind, alignment)


def test_alignments_that_are_not_asked_for(gpu):
    """0 is a page, and GPU_CPU memory begins where GDRCopy could map it."""
    for kind, alignment, multiple in ((MemType.CPU_GPU, 0, 4096), (MemType.GPU_CPU, 64, 65536)):
        memories = [gpu.alloc(100, kind, alignment) for _ in range(3)]
        assert [memory.device_address % multiple for memory in memories] == [0] * 3


def test_reads_and_writes_stay_inside(gpu):
    memory = gpu.alloc(100)
    for offset, count in ((0, 101), (100, 1), (-1, 1), (50, 51)):
        with pytest.raises(InvalidValueError, match="outside the memory's 100 bytes"):
            memory.read(offset, count)
        with pytest.raises(InvalidValueError):
            memory.write(bytes(max(count, 1)), offset)


def test_closed_things_say_so():
    gpu = Gpu("host")
    memory = gpu.alloc(64)
    memory.close()
    memory.close()
    with pytest.raises(BadStateError, match="closed"):
        memory.read()
    gpu.close()
    gpu.close()
    with pytest.raises(BadStateError, match="closed"):
        gpu.alloc(64)


def test_handles_refuse_pickling(pair: Pair):
    for handle in (pair.gpu, pair.a, pair.here):
        with pytest.raises(BadStateError, match="pickled"):
            pickle.dumps(handle)


@pytest.mark.host_memory
def test_unknown_gpus():
    assert gpu_list()[-1] == "host"
    for which in ("ffff:ff:1f.7", "999", 999):
        with pytest.raises((NotFoundError, NotSupportedError)) as caught:
            Gpu(which)
        assert "\n" not in str(caught.value)


@pytest.mark.host_memory
def test_how_arguments_of_a_gpu_are_given():
    with Gpu(which="host", warp=4) as gpu:
        assert (gpu.name, gpu.warp) == ("host", 4)
    with pytest.raises(TypeError, match="positional argument"):
        Gpu("host", 4)  # type: ignore[misc]


@pytest.mark.gpu
def test_pinned_memory_as_payload():
    with Gpu("auto") as gpu, verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        pinned = gpu.alloc(4096, MemType.CPU_GPU)
        with pd.register(pinned) as region:
            assert region.address == pinned.address

        class Array:
            __cuda_array_interface__ = pinned.__cuda_array_interface__

        assert pd.register(Array()).nbytes == 4096


@pytest.mark.gpu
def test_a_gpu_has_a_pci_address_by_which_it_opens():
    address = gpu_list()[0]
    with Gpu(address) as gpu:
        assert gpu.target == "cuda"
        assert gpu.name == address


def test_the_exported_structure(pair: Pair):
    """Field by field what GPUNetIO's C kernels expect (struct doca_gpu_dev_verbs_qp)."""
    image = pair.a._place.read()
    q, cq = DEV_QP.at(image), DEV_CQ.at(image, DEV_QP.cq_sq)
    qpn = pair.a.qpn
    assert q["sq_num"] == qpn
    assert q["sq_num_shift8"] == qpn << 8
    assert image[32:36].tobytes() == (qpn << 8).to_bytes(4, "big")
    for ds in range(1, 6):
        assert image[32 + 4 * ds : 36 + 4 * ds].tobytes() == (qpn << 8 | ds).to_bytes(4, "big")
    assert (q["sq_wqe_num"], q["sq_wqe_mask"], q["sq_lock"]) == (64, 63, 0)
    assert (cq["cq_num"], cq["cqe_num"], cq["cqe_mask"], cq["cqe_size"]) == (pair.a.cq.cqn, 64, 63, 64)
    assert q["nic_handler"] == NicHandler.GPU_SM_DB
    assert q["side"] == pair.a.device_address + 320
    if pair.gpu.target == "cpu":  # there every address is everyone's
        assert q["sq_wqe_daddr"] == pair.a.qp.sq_address
        assert q["sq_dbrec"] == pair.a.qp.dbr_address + 4
        register = pair.a.qp.doorbell_register
        assert q["sq_db"] == (pair.ctx.provider.near_register(register, pair.gpu.backend.engine) or register)
        assert cq["cqe_daddr"] == pair.a.cq.ring_address
    assert image[96:160].tobytes() == bytes(64)  # reserved by the C structure
    assert image[224:288].tobytes() == bytes(64)


def test_export_needs_a_send_queue_and_a_deadline(pair: Pair):
    cq = pair.ctx.create_cq(16)
    with pair.pd.create_qp(rq_wr=4, receive_cq=cq) as qp, pytest.raises(InvalidValueError, match="no send queue"):
        pair.gpu.export_qp(qp)
    for timeout in (0, -1.0):
        with pytest.raises(InvalidValueError, match="deadline"):
            pair.gpu.create_qp(pair.pd, 4, timeout=timeout)
    with pytest.raises(InvalidValueError):
        pair.gpu.create_qp(pair.pd, 0)


def test_kernels_need_a_contiguous_srq(pair: Pair):
    srq = pair.pd.create_srq(4)
    with pytest.raises(NotSupportedError, match=r"linked list .* kernels need a CONTIGUOUS one"):
        pair.gpu.export_srq(srq)
    srq.close()


def test_completion_queues_have_one_exported_queue(pair: Pair):
    """Kernels find a CQE by the index of its request alone."""
    cqs = [pair.ctx.create_cq(4) for _ in range(3)]
    one = pair.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cqs[0], receive_cq=cqs[0], external_datapath=True)
    with pytest.raises(InvalidValueError, match=f"{one} uses {cqs[0]} for both sends and receives: create it with a"):
        pair.gpu.export_qp(one)
    qp = pair.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cqs[0], receive_cq=cqs[1], external_datapath=True)
    exported = pair.gpu.export_qp(qp)
    for send, receive, shared in ((0, 2, 0), (1, 2, 1), (2, 0, 0), (2, 1, 1)):
        ring: Any = {"send_cq": cqs[send], "receive_cq": cqs[receive]}
        other = pair.pd.create_qp(sq_wr=4, rq_wr=4, external_datapath=True, **ring)
        with pytest.raises(InvalidValueError, match=f"{cqs[shared]} of {other} is also used by {qp}, which is exp"):
            pair.gpu.export_qp(other)
        other.close()
    exported.close()
    other = pair.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cqs[1], receive_cq=cqs[0], external_datapath=True)
    pair.gpu.export_qp(other).close()


def test_closing_an_export_closes_what_it_owns(pair: Pair):
    exported = pair.gpu.create_qp(pair.pd, 5)
    assert exported.qp.sq_entries == 8
    exported.close()
    exported.close()
    assert exported.qp.closed
    assert exported.cq.closed
    with pytest.raises(BadStateError, match="closed"):
        _ = exported.device_address


def test_a_queue_pair_stays_while_it_is_exported(pair: Pair):
    cq = pair.ctx.create_cq(4)
    qp = pair.pd.create_qp(sq_wr=4, send_cq=cq, external_datapath=True)
    exported = pair.gpu.export_qp(qp)
    for handle, user in ((qp, exported), (cq, qp), (pair.a.qp, pair.a)):
        with pytest.raises(InUseError, match=f"is still used by {user}: close that first"):
            handle.close()
    assert exported.indices()["completed"] == 0
    exported.close()
    qp.close()
    cq.close()


class Running:
    """A kernel that ends when it is told."""

    ended = False


@pytest.mark.parametrize("parent", [verbs.PD, verbs.Context])
def test_parents_close_exports_when_their_kernels_have_ended(gpu: Gpu, parent):
    """As in `with Gpu() as gpu, verbs.open() as ctx:`."""
    with verbs.open("soft0") as ctx:
        pd, launch = ctx.create_pd(), Running()
        owned, cq = gpu.create_qp(pd, 4), ctx.create_cq(4)
        exported = gpu.export_qp(pd.create_qp(sq_wr=4, send_cq=cq, external_datapath=True))
        exported.used_by(launch)
        closing = threading.Thread(target=(ctx if parent is verbs.Context else pd).close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert not any(handle.closed for handle in (owned, owned.qp, exported, exported.qp, cq, pd))
        launch.ended = True
        closing.join(30)
        assert all(handle.closed for handle in (owned, owned.qp, owned.cq, exported, exported.qp, pd))
        assert cq.closed == (parent is verbs.Context)
        assert not gpu._memory


def test_a_kernel_that_does_not_end_keeps_all(pair: Pair, monkeypatch):
    monkeypatch.setattr(export_module, "LAUNCH_TIMEOUT", 0.01)
    queue, launch = pair.gpu.create_qp(pair.pd, 4, timeout=0.01), Running()
    queue.used_by(launch)
    again = ", and an earlier wait for it has failed"
    for handle, why in ((queue, " after 0.02 s"), (pair.pd, again), (pair.ctx, again)):
        with pytest.raises(TimedOutError, match=re.escape(f"{queue.qp} cannot be closed: {launch} still uses it{why}")):
            handle.close()
    assert not any(handle.closed for handle in (queue, queue.qp, queue.cq, pair.a, pair.pd, pair.ctx))
    launch.ended = True
    queue.close()


def test_an_event_that_nobody_acknowledged_does_not_keep_a_parent(gpu: Gpu):
    ctx = verbs.open("soft0")
    pair = make_pair(ctx, gpu)
    pair.a.qp.hold_for_event()
    ctx.close()
    assert pair.a.qp.closed


def test_last_error_is_none_at_first_and_reads_well(pair: Pair):
    assert pair.a.last_error() is None
    assert set(status.NAMES) >= {status.OK, status.EIO, status.ETIMEDOUT, status.ENOTRECOVERABLE}
    assert Syndrome(0x13).name == "REMOTE_ACCESS"


# --- launches ------------------------------------------------------------------------------------------------------


@kernel
def nothing(out):
    pass


@kernel
def divide(n, out):
    out[n] = 1


HOST: Any = SimpleNamespace(target="cpu", warp=1, ordinal=0)


@kernel
def refuse(number):
    if number > 40:
        raise ValueError("more than 40")


def test_what_a_kernel_raises_is_not_lost(caplog):
    launch: Any = refuse[2, 4, HOST](41)
    end = time.monotonic() + 30
    while not launch.ended and time.monotonic() < end:
        time.sleep(1e-3)
    said = [record.getMessage() for record in caplog.records if record.name == "gpunetio.kernel"]
    assert said == ["kernel refuse: a thread has raised ValueError: more than 40"]
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 40"):
            assert launch.done
        with pytest.raises(ValueError, match="more than 40"):
            launch.wait(1)
    assert refuse[2, 4, HOST](40).wait(30)
    assert len(caplog.records) == len(said)


def test_a_kernel_is_compiled_when_it_is_launched(monkeypatch):
    """And not by its threads, for which somebody waits with a deadline."""
    before, events = running(), []
    root = host_threads.root

    def compile_it(*args: Any) -> Any:
        events.append("compiled")
        return root(*args)

    def start(body: Any, args: Any, grid: int, block: int, warp: int, ended: Any, shared_bytes: int) -> None:
        events.append("started")
        ended()

    monkeypatch.setattr(host_threads, "root", compile_it)
    monkeypatch.setattr(host_threads, "HostLaunch", start)
    refuse[1, 1, HOST](40)
    assert (events[0], events[-1], events.count("started")) == ("compiled", "started", 1)
    with pytest.raises(CompileError, match="only elements of arrays can be changed, not those of an integer"):
        divide[1, 1, HOST](0, 5)
    assert (events.count("started"), running()) == (1, before)


def test_a_place_with_an_unknown_target():
    place = SimpleNamespace(target="fpga", warp=1, ordinal=0)
    with pytest.raises(InvalidValueError, match="nothing cannot run on target 'fpga': use cpu or cuda"):
        nothing[1, 1, place](0)


@pytest.mark.parametrize("config", [(0, 1), (1, 0), (1, -1), (1, 1025), (1 << 31, 1), ((2, 3), 1), (1, (1, 1, 2))])
def test_impossible_launches(config):
    with Gpu("host") as host, pytest.raises(InvalidValueError, match=r"cannot launch nothing with (grid|block)"):
        nothing[(*config, host)](0)


def test_a_grid_may_be_a_tuple():
    with Gpu("host") as host, host.alloc(64, MemType.CPU_GPU) as out:
        assert number[(2,), (3, 1, 1), host](out).wait(30)
        assert out.array.view("i8").tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_the_place_comes_last():
    with Gpu("host") as host, verbs.open("soft0") as nic:
        with pytest.raises(InvalidValueError, match=r"as nothing\[grid, block\].* where grid is a whole number,"):
            nothing[host, 1, 4]
        with pytest.raises(InvalidValueError, match="a Context is no place where kernels run: pass a Gpu or a Dpa"):
            nothing[1, 4, nic]
        with pytest.raises(InvalidValueError, match=r"where block is a whole number, not 1\.5"):
            nothing[1, 1.5, host]


@kernel
def number(out):
    device.st64(out + 8 * device.global_id(), device.global_id() + 1)


@kernel
def answers(out):
    return device.ld64(out)


def test_a_kernel_returns_nothing():
    message = "answers returns a value: a kernel returns nothing; store the result in memory whose address"
    with Gpu("host") as host, pytest.raises(InvalidValueError, match=re.escape(message)):
        answers[1, 1, host](0)


@pytest.mark.host_memory  # --twin has another name for the host
def test_the_host_by_its_other_name():
    with Gpu("cpu") as gpu:
        assert (gpu.name, gpu.target) == ("host", "cpu")
    assert engine_of("cpu", "auto") == engine_of("host", "auto")


def test_closing_says_for_which_kernel_it_waits(gpu, monkeypatch, caplog):
    """Once, for all objects that the kernel uses."""
    monkeypatch.setattr(memory_module, "PATIENCE", 0.01)
    monkeypatch.setattr(memory_module, "LAUNCH_TIMEOUT", 0.3)
    flag, other = gpu.alloc(8, MemType.CPU_GPU), gpu.alloc(8, MemType.CPU_GPU)
    launch = until_set[1, 2, gpu](flag, other)
    try:
        for memory in (flag, other):
            with pytest.raises(TimedOutError, match=r"cannot be closed: kernel until_set\[1, 2\] on .+ still"):
                memory.close()
        (said,) = [record.getMessage() for record in caplog.records if record.name == "gpunetio.kernel"]
        assert " is being closed, and waits for kernel until_set[1, 2] on " in said
        assert said.endswith("; Ctrl+C ends the wait")
    finally:
        flag.array[0] = 1
    assert launch.wait(30)
    flag.close()
    other.close()


@kernel
def until_set(flag, other):
    while device.ld_relaxed8(flag) == 0:
        device.yield_thread()


NEVER_ENDS = """
import os, signal, threading, time
import gpunetio as gn
from gpunetio import device

@gn.kernel
def never(flag):
    while device.ld_relaxed64(flag) == 0:
        device.yield_thread()

with gn.Gpu("host") as gpu, gpu.alloc(8, gn.MemType.CPU_GPU) as flag, gpu.alloc(8, gn.MemType.CPU_GPU):
    never[1, 1, gpu](flag)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


def test_one_interrupt_ends_a_program_whose_kernel_does_not(tmp_path):
    """It would wait for more than a minute for each object otherwise."""
    (tmp_path / "never_ends.py").write_text(NEVER_ENDS)
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, tmp_path / "never_ends.py"], capture_output=True, text=True, timeout=50, check=False
    )
    assert time.monotonic() - begin < 40
    assert "KeyboardInterrupt" in ran.stderr
    assert "kernel never[1, 1] on the host still uses it, and an earlier wait for it has failed" in ran.stderr


def test_a_block_must_be_whole_warps():
    with Gpu("host", warp=4) as host, pytest.raises(InvalidValueError, match="divide the block"):
        nothing[1, 6, host](0)


@pytest.mark.parametrize("config", [1, (1,), (1, 1, None, None)])
def test_a_launch_needs_grid_and_block(config):
    with pytest.raises(InvalidValueError, match="launch as nothing"):
        nothing[config]


def test_a_kernel_is_not_called():
    with pytest.raises(InvalidValueError, match="is a kernel"):
        nothing(0)


def test_launches_of_many_threads_are_all_known():
    running, other = RunningLaunches(), Running()

    class Interrupted:
        """Another thread launches while this one is asked whether it has ended."""

        @property
        def ended(self) -> bool:
            if not threads:
                threads.append(threading.Thread(target=running.add, args=(other,)))
                threads[0].start()
                threads[0].join(0.1)
            return True

    threads: list[threading.Thread] = []
    running.add(Interrupted())
    running.add(Running())
    threads[0].join()
    assert other in running._launches
    with pytest.raises(TimedOutError):
        running.wait(0.01, "this")


def test_launches_tell_the_observers(gpu):
    changes: list[int] = []
    observers.append(changes.append)
    try:
        assert nothing[1, 3, gpu](0).wait(20)
        end = time.monotonic() + 5
        while len(changes) < 2 and time.monotonic() < end:
            time.sleep(0.001)
    finally:
        observers.remove(changes.append)
    assert changes == [1, -1]


def test_errors_are_one_tree():
    for error in (BadStateError, InvalidValueError, NotFoundError, NotSupportedError):
        assert issubclass(error, DocaError)
        assert int(error.code) > 0
