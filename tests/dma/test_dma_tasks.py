"""Copies as tasks of the CPU, against plain Python."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_device import FakeProvider
from fake_gpu import DeviceBuffer, FakeGpus
from gpunetio import verbs
from gpunetio.core import Buf, BufInventory, ContextState, MemoryMap, ProgressEngine, RemoteMemory
from gpunetio.dma import Dma, DmaCaps, MemcpyTask, query_caps
from gpunetio.errors import DocaError, DocaErrorCode, FullError, InvalidValueError, NotSupportedError
from gpunetio.gpu import Gpu
from gpunetio.verbs import PD, Context

SIZE = 4096
PATIENCE = 30.0


@pytest.fixture
def pd() -> Iterator[PD]:
    with verbs.open("soft0") as ctx:
        yield ctx.create_pd()


@pytest.fixture
def copies(pd: PD) -> Iterator[Dma]:
    with Dma(pd) as dma:
        yield dma


def nic_of(pd: PD) -> Any:
    return pd.ctx.provider.nic  # type: ignore[attr-defined]


# --- bytes -----------------------------------------------------------------------------------------------------------

RANGES = st.lists(st.tuples(st.integers(0, SIZE // 2), st.integers(0, 700)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_lists_against_plain_python(data):
    """Lists of any cuts: the bytes of the source are put into the buffers of the destination, one after another."""
    made = world()
    read = data.draw(RANGES)
    room, at = [], 0
    for gap, nbytes in data.draw(RANGES):  # they must not overlap
        at = min(at + gap % 300, SIZE)
        room.append((at, min(nbytes, SIZE - at)))
        at += room[-1][1]
    total, fits = sum(n for _, n in read), sum(n for _, n in room)
    expected = bytearray(SIZE)
    made.target[:] = 0
    source, destination = made.chain(made.here, read), made.chain(made.there, room)
    task = made.dma.memcpy(source, destination)
    if not 0 < total <= fits:
        with pytest.raises(InvalidValueError, match="nothing to copy" if not total else "do not fit"):
            task.submit()
    else:
        payload = b"".join(made.source[at : at + n].tobytes() for at, n in read)
        task.submit().wait(PATIENCE)
        left = payload
        for (at, n), buf in zip(room, destination):
            expected[at : at + min(n, len(left))] = left[:n]
            assert buf.data_nbytes == min(n, len(left))
            left = left[n:]
    assert made.target.tobytes() == bytes(expected)
    task.free()
    source.release()
    destination.release()


class World:
    """Two memory maps and a Dma, for many examples."""

    def __init__(self) -> None:
        self.pd = verbs.open("soft0").create_pd()
        self.source, self.target = (np.arange(SIZE) * 7).astype(np.uint8), np.zeros(SIZE, np.uint8)
        self.here, self.there = MemoryMap(self.pd, self.source), MemoryMap(self.pd, self.target)
        self.bufs, self.dma = BufInventory(32), Dma(self.pd)
        self.dma.start()

    def chain(self, memory: MemoryMap, ranges: list[tuple[int, int]]) -> Buf:
        head, *others = (self.bufs.buf(memory, at, nbytes) for at, nbytes in ranges)
        for other in others:
            head.chain(other)
        return head


_worlds: list[World] = []


def world() -> World:
    if not _worlds or _worlds[0].pd.closed:
        _worlds[:] = [World()]
    return _worlds[0]


@pytest.fixture(scope="module", autouse=True)
def end_of_the_world() -> Iterator[None]:
    yield
    for each in _worlds:
        each.pd.ctx.close()


def test_arrays_regions_and_memory_maps(pd, copies):
    """What can be registered is taken. An array is registered while the task is in flight."""
    array, other = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    task = copies.memcpy(array, other)
    for _ in range(2):
        users = len(pd.users)
        task.submit().wait(PATIENCE)
        assert len(pd.users) == users
        assert np.array_equal(array, other)
        other[:] = 0
    target = bytearray(4000)
    with pd.register(array) as region, MemoryMap(pd, target) as memory:
        copies.memcpy(region, memory).submit().wait(PATIENCE)
    assert bytes(target) == array.tobytes()
    copies.memcpy(b"read-only source", target).submit().wait(PATIENCE)
    assert bytes(target[:16]) == b"read-only source"
    with pytest.raises(InvalidValueError, match="read-only"):
        copies.memcpy(target, b"read-only target" * 1000).submit()


def test_tensors(copies):
    torch = pytest.importorskip("torch")
    source, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    copies.memcpy(source, target).submit().wait(PATIENCE)
    assert torch.equal(source, target)


def test_memory_of_a_gpu(pd, copies):
    """Between host memory and that of GPUs, in all directions. The GPUs are fake: nobody can touch their memory."""
    gpus = FakeGpus(2)
    gpus.serve(pd.ctx)
    first, second = DeviceBuffer(gpus, pd, SIZE), DeviceBuffer(gpus, pd, SIZE, ordinal=1)
    source, back = np.arange(SIZE).astype(np.uint8), np.zeros(SIZE, np.uint8)
    for here, there in ((source, first.mr), (first.mr, second.mr), (second.mr, back)):
        copies.memcpy(here, there).submit().wait(PATIENCE)
    assert np.array_equal(first.bytes, source)
    assert np.array_equal(second.bytes, source)
    assert np.array_equal(back, source)


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_callbacks_and_one_engine_for_several(pd):
    engine, ended = ProgressEngine(), []
    one, two = Dma(pd), Dma(pd)
    for context in (one, two):
        engine.connect(context)
        context.configure(MemcpyTask, lambda task: ended.append(task.user_data), most=20)
        context.start()
    target = np.zeros(20, np.uint8)
    for i in range(20):
        (one if i % 2 else two).memcpy(bytes([i + 1]), target[i : i + 1], user_data=i).submit()
    engine.progress_until(lambda: len(ended) == 20, PATIENCE, "the end of 20 tasks")
    assert sorted(ended) == list(range(20))
    assert [i for i in ended if i % 2] == list(range(1, 20, 2))  # those of one context in order
    assert target.tolist() == list(range(1, 21))
    one.close()
    two.close()


def test_await(copies):
    source, targets = np.arange(100), np.zeros((8, 100), np.int64)

    async def all_of_them() -> None:
        await asyncio.gather(*(copies.memcpy(source, target) for target in targets))

    asyncio.run(all_of_them())
    assert (targets == source).all()


def test_a_task_that_fails_fails_those_behind_it(pd, copies):
    """They end with their errors, and the context then goes on."""
    source, target = np.ones(100, np.uint8), np.zeros(300, np.uint8)
    locked = BufInventory(1).buf(MemoryMap(pd, bytes(100)))  # the NIC may not write to it
    failed = []
    tasks = [copies.memcpy(source, to) for to in (target[:100], locked, target[100:200])]
    nic_of(pd).pause()
    for task in tasks:
        task.submit()
    nic_of(pd).resume()
    tasks[0].wait(PATIENCE)
    for task in tasks[1:]:
        with pytest.raises(DocaError) as caught:
            task.wait(PATIENCE)
        assert caught.value.code is DocaErrorCode.IO_FAILED
        failed.append(str(caught.value))
    assert "LOC_PROT_ERR" in failed[0]
    assert "LKEY_RIGHTS" in failed[0]  # the NIC says why
    assert "earlier copy has failed" in failed[1]
    assert target.tolist() == [1] * 100 + [0] * 200
    copies.memcpy(source, target[200:]).submit().wait(PATIENCE)
    assert target.tolist() == [1] * 100 + [0] * 100 + [1] * 100


def test_a_stop_ends_tasks_in_flight(pd):
    copies = Dma(pd, depth=4)
    ended: list[MemcpyTask] = []
    copies.configure(MemcpyTask, ended.append, ended.append)
    copies.start()
    nic_of(pd).pause()
    tasks = [copies.memcpy(b"bytes", bytearray(5)).submit() for _ in range(4)]
    with pytest.raises(FullError, match="1 copies, and 4 of 4 are in flight"):
        copies.memcpy(b"bytes", bytearray(5)).submit()
    assert copies.num_inflight == 4
    nic_of(pd).resume()
    if copies.stop() is ContextState.STOPPING:
        copies.engine.progress_until(lambda: copies.state is ContextState.IDLE, PATIENCE, "IDLE")
    assert ended == tasks
    copies.start()
    copies.memcpy(b"again", target := bytearray(5)).submit().wait(PATIENCE)
    assert target == b"again"
    copies.close()


def test_closing_in_any_order():
    for first in ("dma", "pd", "ctx"):
        ctx = verbs.open("soft0")
        pd = ctx.create_pd()
        made = {"dma": Dma(pd), "pd": pd, "ctx": ctx}
        made["dma"].start()
        made["dma"].memcpy(bytes(1 << 20), bytearray(1 << 20)).submit()
        for each in (made[first], *made.values()):
            each.close()
        assert not pd.users


# --- limits ----------------------------------------------------------------------------------------------------------


def test_limits(pd, copies):
    caps = query_caps(pd.ctx)
    assert copies.caps == caps == DmaCaps(max_buf_size=1 << 31, max_buf_list_len=64)
    memory, bufs = MemoryMap(pd, bytearray(SIZE)), BufInventory(200)
    head, *others = (bufs.buf(memory, i, 1) for i in range(65))
    for other in others:
        head.chain(other)
    with pytest.raises(InvalidValueError, match="the source is a list of 65 buffers: 64 are possible"):
        copies.memcpy(head, bytearray(65)).submit()
    with pytest.raises(InvalidValueError, match="the destination is a list of 65 buffers"):
        copies.memcpy(b"1", head).submit()
    with pytest.raises(InvalidValueError, match="memory of a peer"):
        copies.memcpy(RemoteMemory(0x1000, 8, 7), bytearray(8)).submit()
    copies.caps = replace(caps, max_buf_size=100)  # as of another device
    with pytest.raises(InvalidValueError, match="a buffer of the source has 101 bytes, and 100 are possible"):
        copies.memcpy(bytes(101), bytearray(200)).submit()
    copies.memcpy(bytes(100), bytearray(100)).submit().wait(PATIENCE)
    assert copies.num_inflight == 0


def test_a_queue_without_a_depth_takes_128(pd):
    """As docs/dma.md says."""
    with Dma(pd) as copies:
        nic_of(pd).pause()
        tasks = [copies.memcpy(b"bytes", bytearray(5)).submit() for _ in range(128)]
        with pytest.raises(FullError, match="1 copies, and 128 of 128 are in flight"):
            copies.memcpy(b"bytes", bytearray(5)).submit()
        nic_of(pd).resume()
        for task in tasks:
            task.wait(PATIENCE)


def test_more_pieces_than_the_queue_holds(pd):
    """Nothing of it is copied."""
    memory, bufs, target = MemoryMap(pd, bytes(range(9))), BufInventory(9), bytearray(9)
    head, *others = (bufs.buf(memory, i, 1) for i in range(9))
    for other in others:
        head.chain(other)
    with Dma(pd, depth=8) as copies:
        with pytest.raises(FullError, match="9 copies, and 0 of 8 are in flight"):
            copies.memcpy(head, target).submit()
        assert not any(target)
        head.unchain(others[-1])
        copies.memcpy(head, target).submit().wait(PATIENCE)
    assert bytes(target) == bytes([*range(8), 0])


def test_devices_without_dma(fake_context):
    with pytest.raises(NotSupportedError, match=r"has no DMA: its queue pairs do not copy memory \(dma_mmo_qp\)"):
        Dma(fake_context.create_pd())
    assert not fake_context.users or all("DMA" not in str(user) for user in fake_context.users)


@pytest.fixture
def fake_context() -> Iterator[Context]:
    with Context(FakeProvider()) as ctx:
        yield ctx


def test_what_a_kernel_drives_has_no_tasks(pd):
    with (
        Gpu("host") as gpu, Dma(pd, gpu=gpu) as copies,
        pytest.raises(NotSupportedError, match=r"kernels of GPU .* drive DMA on soft0: it has no tasks"),
    ):
        copies.memcpy(b"1", bytearray(1)).submit()
