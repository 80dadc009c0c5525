"""A NIC that makes its turns on the twin of a GPU: queues and payload are in memory that the CPU must not touch."""

import ctypes
import gc
import re
import secrets
import signal
import subprocess
import sys
import threading
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from garbage import garbage
from gpunetio import ExportedQp, Gpu, GpuMemory, PortConfig, device, testing, verbs
from gpunetio.enums import MemRegType, MemType, QpState
from gpunetio.errors import DriverError, InvalidValueError, NoMemoryError, NotFoundError, NotSupportedError
from gpunetio.formats.cqe import Syndrome
from gpunetio.jit import twin
from gpunetio.memory import PAGE, is_accessible
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.state.qp import QP_ROW
from gpunetio.nic.state.slice_shared import CQ_COPY, KEYS, QP_COPY, SLICE_SHARED, queues_in
from gpunetio.verbs import PD, Context, QpEndpoint
from nic_rig import until
from queue_kernels import puts
from repository import ROOT, environment

pytestmark = pytest.mark.soft_nic

TWIN = PortConfig(engine="twin")
NBYTES = 1 << 16
ROOM = 256 * PAGE


def connected(gpu: Gpu, *pds: PD, **options: int) -> list[ExportedQp]:
    """Queues of these PDs, of which the first is connected to the last."""
    queues = [gpu.create_qp(pd, 64, **options) for pd in pds]
    queues[0].connect(queues[-1])
    return queues


def filled(gpu: Gpu) -> tuple[GpuMemory, np.ndarray]:
    """GPU memory, and what is in it."""
    memory, data = gpu.alloc(NBYTES), np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
    memory.write(data)
    return memory, data


def put_all(gpu: Gpu, queue: ExportedQp, source: verbs.MR, target: verbs.MR, waits: bool, count: int = 16) -> int:
    """Have a kernel put all of a region into another: its status."""
    with gpu.alloc(8, MemType.CPU_GPU) as out:
        arguments = target.address, target.rkey, source.address, source.lkey, NBYTES // count, count, waits, out
        assert puts[1, 1, gpu](queue, *arguments).wait(20)
        return int(out.array.view(np.int64)[0])


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("touches, status", [("gpu.alloc(64).read()", 0), ("ctypes.string_at(gpu.alloc(64).address)",
                                             -signal.SIGSEGV)])
def test_who_touches_the_memory_dies(touches: str, status: int) -> None:
    program = f"import ctypes\nfrom gpunetio import Gpu\nwith Gpu('twin') as gpu:\n    {touches}\n"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == status


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40))
@settings(max_examples=30)
def test_pages_are_given_out_once(steps: list[tuple[bool, int]]) -> None:
    """Against a list of what is in use: no overlap, zeros, and in the end all is one piece again."""
    memory, used = twin.TwinMemory(ROOM), []
    try:
        for takes, nbytes in steps:
            if takes or not used:
                address = memory.alloc(nbytes)
                assert address % PAGE == 0
                assert memory.contains(address, nbytes)
                assert all(address + nbytes <= at or at + size <= address for at, size in used)
                with memory.open():
                    page = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
                    assert not page.any()
                    page[:] = 0xFF
                used.append((address, nbytes))
            else:
                memory.free(*used.pop(nbytes % len(used)))
        for piece in used:
            memory.free(*piece)
        memory.free(memory.alloc(ROOM), ROOM)
        with pytest.raises(NoMemoryError, match=r"no .* bytes left in one piece"):
            memory.alloc(ROOM + 1)
    finally:
        memory.close()


def test_garbage_may_be_collected_in_the_middle_of_an_allocation() -> None:
    """Pages of the garbage are given back by a finalizer, in the thread that allocates."""
    memory = twin.TwinMemory(ROOM)
    address = memory.alloc(PAGE)

    class Collects(dict[int, int]):
        def items(self):
            gc.collect()
            return super().items()

    memory._free = Collects(memory._free)
    with garbage(memory.free, address, PAGE):
        allocating = threading.Thread(target=memory.alloc, args=(PAGE,), daemon=True)
        allocating.start()
        allocating.join(20)
    assert not allocating.is_alive()
    assert memory.alloc(PAGE) == address
    memory.close()


def test_the_cpu_reaches_it_at_no_time() -> None:
    """Not even while a kernel runs, or a slice, so that nothing is decided by chance."""
    with Gpu("twin") as gpu, gpu.alloc(64) as memory:
        with twin.twin_memory().open():
            assert not is_accessible(memory.address, 64, False)
        assert memory.is_cuda
        with gpu.alloc(64, MemType.GPU_CPU) as both:
            assert both.kind is MemType.CPU_GPU
        with gpu.alloc(PAGE) as page, pytest.raises(NotSupportedError, match="no dmabuf"):
            gpu.dmabuf_fd(page)


@pytest.mark.host_memory
def test_an_engine_on_the_cpu_does_not_take_it() -> None:
    with verbs.open() as ctx, Gpu("twin") as gpu:
        pd, memory = ctx.create_pd(), gpu.alloc(PAGE)
        with pytest.raises(NotSupportedError, match="is neither memory of this process's CPU"):
            pd.register(memory)
        with pytest.raises(InvalidValueError, match="is not readable and writable memory"):
            ctx.register_umem(memory)
        assert not gpu.create_qp(pd, 16).ring_memory.in_gpu
    with pytest.raises(InvalidValueError, match=r"engine = 'tpu': it must be one of cpu, twin"):
        PortConfig(engine="tpu")


# --- a NIC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["rkey", "lkey"])
def test_key_0_is_no_key(monkeypatch: pytest.MonkeyPatch, zero: str) -> None:
    """Not even where a slice before has kept the row of a key at the place of key 0."""
    monkeypatch.setattr(secrets, "randbelow", lambda most: min(most, KEYS) - 1)
    with verbs.open(port=TWIN) as ctx, Gpu("twin") as gpu:
        pd = ctx.create_pd()
        a, _peer = connected(gpu, pd, pd)
        source, target = filled(gpu)[0], gpu.alloc(NBYTES)
        regions = {memory: pd.register(memory) for memory in ((target, source) if zero == "rkey" else (source, target))}
        assert next(iter(regions.values())).rkey >> 8 == KEYS
        here, there = regions[source], regions[target]
        assert put_all(gpu, a, here, there, waits=True) == device.OK
        ctx.provider.nic.pause()  # the rows go back
        ctx.provider.nic.resume()
        target.write(np.zeros(NBYTES, np.uint8))
        monkeypatch.setattr(there if zero == "rkey" else here, zero, 0)
        assert put_all(gpu, a, here, there, waits=True) == device.EIO
        error = a.last_error()
        assert error is not None
        assert error.syndrome == (Syndrome.REMOTE_ACCESS if zero == "rkey" else Syndrome.LOCAL_PROT)
        assert not target.read().any()


@pytest.mark.parametrize("seed", range(2))
def test_keys_that_share_a_place(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Regions whose keys are kept at one place come, go and are used, in an order made up, against a model."""
    random, place = Random(seed), SimpleNamespace(next=0)
    monkeypatch.setattr(secrets, "randbelow", lambda most: place.next - 1 if most > 255 else 4)
    with verbs.open(port=TWIN) as ctx, Gpu("twin") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        pd = ctx.create_pd()
        a, b = connected(gpu, pd, pd)
        memories = [gpu.alloc(PAGE) for _ in range(4)]
        data = [np.random.default_rng(i).integers(0, 256, PAGE, np.uint8) for i in range(4)]

        def register(number: int) -> verbs.MR:
            place.next = KEYS * (number + 1)
            return pd.register(memories[number])

        for memory, content in zip(memories, data, strict=True):
            memory.write(content)
        regions: list[verbs.MR | None] = [register(i) for i in range(4)]
        keys = [region.rkey for region in regions if region]
        assert {key >> 8 & KEYS - 1 for key in keys} == {0}
        for _ in range(60):
            i, j = random.sample(range(4), 2)
            region = regions[i]
            if random.random() < 0.3:
                regions[i] = register(i) if region is None else region.close()
                continue
            arguments = memories[j].address, keys[j], memories[i].address, keys[i], 64, 4, True, out
            assert puts[1, 1, gpu](a, *arguments).wait(20)
            if region and regions[j]:
                assert out.array.view(np.int64)[0] == device.OK
                data[j][:256] = data[i][:256]
            else:
                assert out.array.view(np.int64)[0] == device.EIO
                for end in (a, b):
                    end.qp.reset()
                    end.reset()
                a.connect(b)
        for memory, content in zip(memories, data, strict=True):
            assert np.array_equal(memory.read(), content)


def test_everything_is_in_gpu_memory() -> None:
    """The kernel has ended when the NIC executes its requests: only slices may touch rings, records and payload."""
    with verbs.open(port=TWIN) as ctx, Gpu("twin") as gpu:
        pd = ctx.create_pd()
        a, _ = connected(gpu, pd, pd)
        assert a.ring_memory.in_gpu
        assert a.qp.ring.dbr_lies_in.in_gpu
        (source, data), target = filled(gpu), gpu.alloc(NBYTES)
        here, there = pd.register(source), pd.register(target)
        ctx.provider.nic.pause()
        assert put_all(gpu, a, here, there, waits=False) == device.OK
        assert not target.read().any()
        ctx.provider.nic.resume()
        until(lambda: ctx.provider.nic.qps[a.qpn]["sq_ci"] == 16, "the puts")
        assert np.array_equal(target.read(), data)
        assert put_all(gpu, a, here, there, waits=True) == device.OK
        assert a.last_error() is None
        with pytest.raises(DriverError, match="cannot be mapped with dmabuf mode"):
            gpu.create_qp(pd, 16, mem_reg_type=MemRegType.CUDA_DMABUF)


def test_an_error_is_explained() -> None:
    with verbs.open(port=TWIN) as ctx, Gpu("twin") as gpu:
        pd = ctx.create_pd()
        a, _ = connected(gpu, pd, pd)
        source, target = filled(gpu)[0], gpu.alloc(NBYTES)
        here, there = pd.register(source), pd.register(target)
        there.close()
        assert put_all(gpu, a, here, there, waits=True) < 0
        assert f"{there.rkey:#x}" in str(a.last_error())
        assert a.qp.state is QpState.ERR


def test_a_record_of_receives_is_read_by_the_engine() -> None:
    """QUERY_QP tells what the record says, and the record is out of the command path's reach."""
    with verbs.open(port=TWIN) as ctx, Gpu("twin") as gpu:
        queues = connected(gpu, *[ctx.create_pd()] * 2, receives=8)
        assert [queue.qp.state for queue in queues] == [QpState.RTS] * 2
        nic = ctx.provider.nic
        memory, data = filled(gpu)
        assert nic.engine.read(memory.address + 40, 24) == data[40:64].tobytes()
        assert nic.engine.read(nic.control_address, 8) == nic.record["qps"].tobytes()


def copies_of(nic: SoftNic, field: str, count: int) -> set[int]:
    """A field of the copies of the first rows that slices have cached, which only slices access."""
    qps = int(np.frombuffer(nic.engine.read(int(nic.record["shared"]) + SLICE_SHARED.qps, 8), np.int64)[0])
    first = qps + QP_ROW.offsets[field]
    return {int(np.frombuffer(nic.engine.read(first + i * QP_COPY, 8), np.int64)[0]) for i in range(count)}


def test_turns_are_made_on_copies_of_the_rows() -> None:
    """Of queues whose peers are here. When they have ended, the rows are as if they had been made on them."""
    with verbs.open("soft0", port=PortConfig(engine="twin", workers=1)) as ctx, Gpu("twin") as gpu:
        nic, pd = ctx.provider.nic, ctx.create_pd()
        a, b = connected(gpu, pd, pd)
        (source, data), target = filled(gpu), gpu.alloc(NBYTES)
        here, there = pd.register(source), pd.register(target)
        assert put_all(gpu, a, here, there, waits=True) == device.OK
        assert np.array_equal(target.read(), data)
        for queue, count in ((a, 16), (b, 0)):
            until(lambda qpn=queue.qpn, count=count: nic.qps[qpn]["sq_ci"] == count, "the end of a slice")
        assert copies_of(nic, "qpn", 2) == {a.qpn, b.qpn}
        assert copies_of(nic, "sq_ci", 2) == {0, 16}
        assert nic.counters["rx_write_requests"] == 16
        assert nic.counters["cqes"] == 16
        # Beside a queue over a wire, whose peer is in this process, turns are made on the rows themselves.
        with verbs.open("soft1", port=TWIN) as far:
            c, _ = connected(gpu, pd, far.create_pd())
            assert put_all(gpu, a, here, there, waits=True) == device.OK
            until(lambda: nic.qps[a.qpn]["sq_ci"] == 32, "the end of a slice")
            assert nic.qps[c.qpn]["wire"]


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "cached"), [(66, True), (88, False)])
def test_many_queues(pairs: int, cached: bool) -> None:
    """Rows are cached if all have room in shared memory; otherwise turns are made on the rows themselves."""
    with verbs.open("soft0", port=PortConfig(engine="twin", workers=1)) as ctx, Gpu("twin") as gpu:
        nic, pd = ctx.provider.nic, ctx.create_pd()
        assert (2 * pairs <= queues_in.py_func(int(nic.record["shared_bytes"]))) == cached
        queues = [connected(gpu, pd, pd) for _ in range(pairs)]
        (source, data), target = filled(gpu), gpu.alloc(NBYTES)
        here, there = pd.register(source), pd.register(target)
        for a, b in (queues[0], queues[16], queues[-1], queues[0]):
            target.write(bytes(NBYTES))
            assert put_all(gpu, a, here, there, waits=True) == device.OK
            assert np.array_equal(target.read(), data)
            assert put_all(gpu, b, there, here, waits=True) == device.OK
        if cached:
            known = {queue.qpn for pair in queues for queue in pair}
            assert copies_of(nic, "qpn", 2 * pairs) == known
        assert nic.counters["rx_write_requests"] == 8 * 16


@pytest.mark.slow
def test_more_completion_queues_than_have_room() -> None:
    """Then no rows are cached, and everything still works."""
    with verbs.open("soft0", port=PortConfig(engine="twin", workers=1)) as ctx, Gpu("twin") as gpu:
        nic, pd = ctx.provider.nic, ctx.create_pd()
        queues = [connected(gpu, pd, pd, receives=8) for _ in range(85)]
        used = {int(row[name]) for row in nic.qps.given for name in ("send_cq", "recv_cq")}
        assert len(used) * CQ_COPY + 170 * QP_COPY > int(nic.record["shared_bytes"]) > 170 * QP_COPY
        (source, data), target = filled(gpu), gpu.alloc(NBYTES)
        assert put_all(gpu, queues[-1][0], pd.register(source), pd.register(target), waits=True) == device.OK
        assert np.array_equal(target.read(), data)


def test_a_key_means_what_it_means_now() -> None:
    """Keys are kept near the turns. After one has been registered again, the same WQE goes to the new place."""
    with verbs.open("soft0", port=PortConfig(engine="twin", workers=1)) as ctx, Gpu("twin") as gpu:
        pd = ctx.create_pd()
        a, _ = connected(gpu, pd, pd)
        (source, data), first, second = filled(gpu), gpu.alloc(NBYTES), gpu.alloc(NBYTES)
        here, there = pd.register(source), pd.register(first)
        assert put_all(gpu, a, here, there, waits=True) == device.OK
        there.reregister(second)
        assert put_all(gpu, a, here, there, waits=True) == device.OK
        assert np.array_equal(second.read(), data)


@pytest.mark.parametrize("other", [TWIN, PortConfig()], ids=["twin", "cpu"])
def test_over_a_wire(other: PortConfig) -> None:
    """GPU memory is written and read by a peer, also by one whose engine is on the CPU."""
    with verbs.open("soft0", port=TWIN) as ctx, verbs.open("soft1", port=other) as far, Gpu("twin") as gpu:
        near_pd, far_pd = ctx.create_pd(), far.create_pd()
        a, b = connected(gpu, near_pd, far_pd)
        (memory, data), host = filled(gpu), gpu.alloc(NBYTES, MemType.CPU_GPU)
        device_region, host_region = near_pd.register(memory), far_pd.register(host)
        assert put_all(gpu, a, device_region, host_region, waits=True) == device.OK
        assert np.array_equal(host.array, data)
        host.array[:] = data[::-1]
        assert put_all(gpu, b, host_region, device_region, waits=True) == device.OK
        assert np.array_equal(memory.read(), data[::-1])


@pytest.mark.slow
@pytest.mark.parametrize(("names", "workers"), [(("soft0",), 3), (("soft0", "soft1"), 1)], ids=["loopback", "wire"])
def test_it_conforms(names: tuple[str, ...], workers: int) -> None:
    def opened(name: str) -> Context:
        return verbs.open(name, port=PortConfig(engine="twin", workers=workers))

    report = testing.run(*[lambda name=name: opened(name) for name in names])
    assert report.passed, report


@pytest.mark.host_memory
def test_no_packet_goes_by_way_of_the_cpu() -> None:
    """What sockets and other descriptors bring, the CPU would have to place."""
    for wire in ("udp", "unix:somewhere", "replay"):
        with pytest.raises(InvalidValueError, match=f"wire = '{wire}' with engine 'twin': .* has the wire 'auto'"):
            PortConfig(engine="twin", wire=wire)
    with verbs.open("soft0", port=TWIN) as ctx:
        cq = ctx.create_cq(1)
        qp = ctx.create_pd().create_qp(sq_wr=1, rq_wr=1, send_cq=cq, receive_cq=cq)
        with pytest.raises(NotFoundError, match=r"reaches no NIC at 127\.0\.0\.77: its engine is on a GPU"):
            qp.connect(QpEndpoint(gid=bytes(10) + b"\xff\xff\x7f\x00\x00\x4d", qpn=5, lid=0, mtu=1024))


@pytest.mark.slow
@pytest.mark.host_memory
@pytest.mark.timeout(600)
def test_kernels_do_all_they_do_on_the_twin() -> None:
    """The quick tests of the device library and of exported queues."""
    command = [sys.executable, "-m", "pytest", "--twin", "-q", "-p", "no:cacheprovider", "tests/device", "tests/gpu"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 500
