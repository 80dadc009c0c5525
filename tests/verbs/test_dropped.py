"""Objects that nobody holds: they are closed, and a ResourceWarning names them, as Python does with files.

What is still there is read from the NIC's tables. What has to be there is what a Python program can still reach.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ethernet_rig import nic_of
from gpunetio import Gpu, MemType, PortConfig, cm, device, kernel, verbs
from gpunetio.enums import SendFlags, SrqType, WcStatus, WrOpcode
from gpunetio.verbs import PD, QP, Context, SendWr, Sge
from nic_rig import until
from usage import allocations, opens

TABLES = ("qps", "cqs", "srqs", "mkeys", "pds", "umems", "uar_pages")
PATIENCE = 30.0
PORT = 7174


class Buffer(bytearray):
    """Can be referred to weakly."""


@pytest.fixture
def ctx() -> Iterator[Context]:
    with verbs.open("soft0") as opened:
        yield opened


def rows(ctx: Context) -> dict[str, int]:
    return {table: len(getattr(nic_of(ctx), table)) for table in TABLES}


@contextmanager
def told() -> Iterator[list[str]]:
    """The ResourceWarnings of the block."""
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield names
    names += [str(each.message) for each in caught if each.category is ResourceWarning]


def running(name: str) -> bool:
    """Whether there is a thread of such a name."""
    return any(name in thread.name for thread in threading.enumerate())


def make_qp(pd: PD) -> QP:
    cq = pd.ctx.create_cq(16)
    return pd.create_qp(sq_wr=16, rq_wr=16, send_cq=cq, receive_cq=cq)


MAKERS: dict[str, Callable[[PD], object]] = {
    "domain": lambda pd: pd.ctx.create_pd(),
    "region": lambda pd: pd.register(bytearray(64)),
    "umem": lambda pd: pd.ctx.register_umem(bytearray(4096)),
    "page": lambda pd: pd.ctx.create_uar(),
    "channel": lambda pd: pd.ctx.create_comp_channel(),
    "completion queue": lambda pd: pd.ctx.create_cq(16),
    "shared receive queue": lambda pd: pd.create_srq(16),
    "queue pair": make_qp,
}


@pytest.mark.parametrize("what", MAKERS)
@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["alone", "in a cycle"])
def test_each_kind(ctx, what, in_a_cycle):
    """One that nobody holds is closed when the next one is made. Of a cycle, only the collector knows that."""
    pd = ctx.create_pd()
    with told():
        MAKERS[what](pd)
        ctx.create_pd().close()
    before = rows(ctx)
    with told() as names:
        for _ in range(3):
            made: Any = [MAKERS[what](pd)]
            label = str(made[0])
            if in_a_cycle:
                made.append(made)
            del made
            if in_a_cycle:
                gc.collect()
        ctx.create_pd().close()
    assert rows(ctx) == before
    assert sum(name.endswith("was dropped before it was closed") for name in names) == len(names) >= 3
    assert any(f"<{label}" in name for name in names)


def test_more_than_there_is_room_for(ctx):
    """A device has 1,023 protection domains."""
    with told() as names:
        for _ in range(1100):
            ctx.create_pd()
    assert len(names) == 1099
    assert rows(ctx)["pds"] == 1


def test_cycles_that_the_collector_has_not_found(ctx):
    class Holder:
        def __init__(self) -> None:
            self.me, self.pd = self, ctx.create_pd()

    gc.disable()
    try:
        with told() as names:
            for _ in range(1100):
                Holder()
    finally:
        gc.enable()
    assert len(names) >= 1023
    gc.collect()


def test_children_keep_their_parents(ctx):
    qp = make_qp(ctx.create_pd())
    other = qp.pd.create_qp(sq_wr=4, send_cq=qp.send_cq)
    gc.collect()
    with told() as names:
        ctx.create_pd().close()
        assert rows(ctx)["pds"] == rows(ctx)["cqs"] == 1
        assert rows(ctx)["qps"] == 2
    assert names == []
    other.close()
    qp.close()


def test_an_owner_that_closes_says_nothing(ctx):
    pd = ctx.create_pd()
    with told() as names:
        pd.register(bytearray(64))
        make_qp(pd)
        pd.close()
        assert rows(ctx) == {**dict.fromkeys(TABLES, 0), "cqs": 1, "umems": 1, "uar_pages": 2}
        second = verbs.open("soft0")
        second.create_pd()
        second.close()
        gc.collect()
        until(lambda: len(opens()) == 1, "the end of the second context", PATIENCE)
    assert [name for name in names if "context" in name] == []


def test_one_that_is_used_by_what_nobody_holds_can_be_closed(ctx):
    pd = ctx.create_pd()
    cq = ctx.create_cq(16)
    with told() as names:
        pd.create_qp(sq_wr=4, send_cq=cq)
        cq.close()
    assert cq.closed
    assert [name.split()[0] for name in names] == ["<QP"]


def test_memory_is_let_go_with_its_region(ctx):
    pd, buffer = ctx.create_pd(), Buffer(64)
    known = weakref.ref(buffer)
    region = pd.register(buffer)
    del buffer
    ctx.create_pd().close()
    assert known() is not None
    rkey = region.rkey
    with told():
        del region
        ctx.create_pd().close()
    gc.collect()
    assert known() is None
    assert rkey not in nic_of(ctx).mkeys


def write(mine: verbs.MR, theirs: verbs.MR) -> SendWr:
    return SendWr(
        opcode=WrOpcode.RDMA_WRITE, sges=[Sge(mine.address, mine.nbytes, mine.lkey)], flags=SendFlags.SIGNALED,
        remote_addr=theirs.address, rkey=theirs.rkey,
    )


def test_requests_in_flight(ctx):
    """Queue pairs and regions go while their writes are under way. Others are not disturbed."""
    pd = ctx.create_pd()
    kept, peer = make_qp(pd), make_qp(pd)
    kept.connect(peer)
    source, target = pd.register(bytes(range(64))), pd.register(bytearray(64))
    with told() as names:
        for _ in range(50):
            one, other = make_qp(pd), make_qp(pd)
            one.connect(other)
            large = [pd.register(np.ones(1 << 18, np.uint8)) for _ in range(2)]
            one.post_send(*[write(*large)] * 16)
            del one, other, large
        kept.post_send(write(source, target))
        done: list[Any] = []
        until(lambda: done.extend(kept.send_cq.poll()) or done, "the write", PATIENCE)  # type: ignore[union-attr]
    assert done[0].status == WcStatus.SUCCESS
    assert bytes(target._region.owner) == bytes(range(64))  # type: ignore[union-attr]
    assert len(names) >= 4 * 49


@pytest.mark.slow
def test_several_threads(ctx):
    """Each makes and drops its own, and what it holds stays."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            pd = ctx.create_pd()
            for _ in range(100):
                make_qp(pd)
                pd.register(bytearray(64))
            assert pd.pdn in nic_of(ctx).pds
            pd.close()
        except BaseException as error:
            failed.append(error)

    with told():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        ctx.create_pd().close()
    assert not failed
    assert rows(ctx) == {**dict.fromkeys(TABLES, 0), "uar_pages": 2}


def test_an_event_that_nobody_can_acknowledge(ctx):
    """It keeps its queue from being closed by those who hold that, and nobody does."""
    with told() as names:
        pd, channel = ctx.create_pd(), ctx.create_comp_channel()
        cq = ctx.create_cq(16, channel=channel)
        qp = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq)
        qp.connect(qp)
        cq.req_notify()
        region = pd.register(bytearray(8))
        qp.post_send(write(region, region))
        assert channel.get_event(PATIENCE) is cq
        before = rows(ctx)["cqs"]
        del qp, cq
        ctx.create_pd().close()
        assert rows(ctx)["cqs"] == before - 1
    assert [name.split()[0] for name in names] == ["<QP", "<CQ"]


def test_a_listener(ctx):
    """Its port is free again, and a connection that it has made stays."""
    pd = ctx.create_pd()
    with told() as names:
        cm.listen(ctx, PORT)
        listener = cm.listen(ctx, PORT)
        asking, theirs = cm.start_connecting(make_qp(pd), listener.address, PORT), make_qp(pd)
        connection = listener.accept(PATIENCE).accept(theirs)
        asking.established(PATIENCE)
        connection.established(PATIENCE)
        del listener
        cm.listen(ctx, PORT).close()
        assert connection.state is cm.ConnectionState.ESTABLISHED
    assert [name for name in names if name.startswith("<listener")] == [
        f"<listener at 127.0.0.1 port {PORT}> was dropped before it was closed"
    ] * 2
    assert len(names) == 2


# --- contexts ---


def test_a_context_goes_with_its_last_object():
    """A handle that nobody has does not keep the device: another port can be opened under its name."""
    with told() as names:
        region = verbs.open("soft3").create_pd().register(bytearray(64))
        gc.collect()
        time.sleep(0.01)
        assert "soft3" in opens()
        del region
        with verbs.open("soft3", port=PortConfig(addresses=("127.0.0.77",))) as ctx:
            assert nic_of(ctx).port.config.addresses == ("127.0.0.77",)
    assert sum("<context soft3" in name for name in names) == 1
    assert "soft3" not in opens()


def test_a_context_that_nobody_opens_again():
    with told() as names:
        verbs.open("soft3").create_cq(16)
        gc.collect()
        until(lambda: "soft3" not in opens() and not running("soft3"), "the end of the NIC", PATIENCE)
    assert sum("<context soft3" in name for name in names) == 1


def test_all_of_it_in_one_cycle():
    """The collector finalizes all objects of a cycle, in any order. Memory stays until its region is closed."""

    class Program:
        def __init__(self) -> None:
            self.me, self.ctx = self, verbs.open("soft3")
            self.pd = self.ctx.create_pd()
            self.region = self.pd.register(Buffer(1 << 16))
            self.qp, self.peer = make_qp(self.pd), make_qp(self.pd)
            self.qp.connect(self.peer)
            self.qp.post_send(*[write(self.region, self.region)] * 16)

    with told() as names:
        for _ in range(5):
            Program()
            gc.collect()
            until(lambda: "soft3" not in opens(), "the end of the NIC", PATIENCE)
    assert sum("<context soft3" in name for name in names) == 5


# --- GPUs ---


def test_memory_queues_and_services_of_a_gpu(ctx):
    pd = ctx.create_pd()
    with Gpu("host") as gpu, told() as names:
        gpu.alloc(4096)
        gpu.create_qp(pd, 16)
        gpu.create_qp_group(pd, 16)
        gpu.create_semaphore(4)
        gpu.create_service()
        gpu.alloc(64).close()
        gpu.create_qp(pd, 16).close()
        until(lambda: not running("gpunetio proxy"), "the end of the service", PATIENCE)
        assert not gpu._exports
        assert rows(ctx)["qps"] == 0
    kinds = [name.split()[0] + " " + name.split()[-1] for name in names]
    assert len(kinds) >= 7
    said = " ".join(names)
    assert all(part in said for part in ("4096 bytes of GPU memory", "the export of QP", "proxy service"))


def test_a_gpu():
    with told() as names:
        memory = Gpu("host").alloc(64)
        assert not memory.closed
        del memory
        gc.collect()
        until(lambda: not running("watchdog"), "the end of the GPU", PATIENCE)
    assert len([name for name in names if name.startswith("Gpu('host'")]) == 1


def test_a_gpu_closes_what_nobody_holds(ctx):
    """Queues before the memory that they need, also those that the collector has found."""
    pd = ctx.create_pd()
    with told() as names:
        gpu = Gpu("host")
        holder: list[Any] = [gpu.create_qp(pd, 16, receives=16), gpu.alloc(64)]
        holder += [pd.register(holder[1]), gpu.create_service(), holder]
        srq = pd.create_srq(16, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
        kept = gpu.create_qp(pd, 16, srq=srq)  # whose end looks at its structure
        del holder
        gc.collect()
        gpu.close()
        assert kept.closed
        assert rows(ctx)["qps"] == 0
        assert not allocations(gpu)
        until(lambda: not running("gpunetio proxy"), "the end of the service", PATIENCE)
    assert [name for name in names if "proxy service" not in name] == []


def test_the_watchdog_looks_while_queues_come_and_go(ctx):
    """A dictionary that knows its values weakly must not be walked through while another thread adds to it."""
    pd, failed, over = ctx.create_pd(), [], threading.Event()
    interval = sys.getswitchinterval()
    with Gpu("host") as gpu:

        def look() -> None:
            while not over.is_set():
                try:
                    gpu.watchdog._pause()
                except BaseException as error:
                    failed.append(error)
                    return

        looking = threading.Thread(target=look)
        held = [gpu.create_qp(pd, 16) for _ in range(20)]
        sys.setswitchinterval(1e-6)
        try:
            looking.start()
            for _ in range(100):
                held.append(gpu.create_qp(pd, 16))
                held.pop(0).close()
        finally:
            sys.setswitchinterval(interval)
            over.set()
            looking.join(PATIENCE)
    assert failed == []


@kernel
def _wait_and_put(qp, word, source, lkey, target, rkey, result):
    while device.ld_acquire64(word) == 0:
        pass
    ticket = device.put(qp, target, rkey, source, lkey, 8)
    device.st64(result, device.wait(qp, ticket))


def test_a_kernel_holds_what_it_was_given(ctx):
    """The queue and the memory stay until it has ended."""
    gpu, pd = Gpu("host"), ctx.create_pd()
    word, result = gpu.alloc(8, MemType.CPU_GPU), gpu.alloc(8, MemType.CPU_GPU)
    source, target = gpu.alloc(8, MemType.CPU_GPU), gpu.alloc(8, MemType.CPU_GPU)
    source.array[:] = 7
    result.array[:] = 255
    mine, theirs = pd.register(source), pd.register(target)
    qp, peer = gpu.create_qp(pd, 16), gpu.create_qp(pd, 16)
    qp.connect(peer)
    go, ended, arrived = word.array, result.array, target.array
    launch = _wait_and_put[1, 1, gpu](qp, word, source, mine.lkey, target, theirs.rkey, result)
    with told() as names:
        del qp, word, source, target, result, gpu
        gc.collect()
        for _ in range(3):
            ctx.create_pd().close()
        assert names == []
        go[0] = 1
        assert launch.wait(PATIENCE)
        assert not ended.any()
        assert (arrived == 7).all()
        peer.gpu.close()


def test_the_memory_of_a_region_in_a_cycle_is_given_away_after_the_region():
    """Memory of a GPU that is given back could be somebody else's while the NIC still writes to it."""
    with verbs.open("soft3", port=PortConfig(engine="twin")) as ctx, Gpu("twin") as gpu:
        pd = ctx.create_pd()
        holder: list[Any] = [gpu.alloc(1 << 16)]
        holder += [pd.register(holder[0]), holder]
        address, rkey = holder[0].device_address, holder[1].rkey
        with told():
            del holder
            gc.collect()
            assert rkey in nic_of(ctx).mkeys
            others = [gpu.backend.alloc(1 << 16, 0, MemType.GPU) for _ in range(4)]
            assert address not in [other[0] for other in others]
            ctx.create_pd().close()
            assert rkey not in nic_of(ctx).mkeys


# --- programs ---


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_end_of_python():
    """What is still open is named, and the process ends as any other."""
    ended = run(
        "import gpunetio as gn\n"
        "ctx = gn.open('soft3')\n"
        "mr = ctx.create_pd().register(bytearray(64))\n"
        "gpu = gn.Gpu('host')\n"
        "memory = gpu.alloc(64)\n",
        "-X", "dev",
    )
    assert ended.returncode == 0
    assert "ResourceWarning: <context soft3, software NIC> is still open when Python ends" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_forked_child():
    """What its parent has opened is its parent's, dropped or not."""
    ended = run(
        "import gpunetio as gn, gc, os, sys\n"
        "with gn.open('soft3') as ctx:\n"
        "    ctx.create_pd()\n"
        "    gpu = gn.Gpu('host')\n"
        "    memory = gpu.alloc(64)\n"
        "    if (child := os.fork()) == 0:\n"
        "        ctx.dropped.close_all()\n"
        "        gpu = memory = None\n"
        "        gc.collect()\n"
        "        sys.exit(3)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(ctx.provider.nic.pds), flush=True)\n"
        "    gpu.close()\n",
        "-W", "always::ResourceWarning",
    )
    assert (ended.returncode, ended.stdout) == (0, "3 1\n")
    assert "Warning" not in ended.stderr.replace("DeprecationWarning", "")


def test_warnings_that_are_errors():
    """As in a finalizer, the error is told and raised to nobody: what comes next works."""
    ended = run(
        "import gpunetio as gn\n"
        "with gn.open('soft3') as ctx:\n"
        "    ctx.create_pd()\n"
        "    print(ctx.create_pd().pdn)\n",
        "-W", "error",
    )
    assert ended.returncode == 0
    assert ended.stdout.strip() == "2"
    assert "ResourceWarning: <PD 0x1 of soft3> was dropped before it was closed" in ended.stderr


INTERRUPTED = """
import random, signal, threading, time
import gpunetio as gn

COUNT = 1200
main, went, ready = threading.main_thread().ident, 0, False

def interrupt():
    global ready
    chance = random.Random(1)
    for n in range(COUNT):
        while not ready:
            time.sleep(0.0001)
        ready = False
        time.sleep(chance.uniform(0, 0.001))
        while went <= n:  # one may come in a finalizer, where Python prints it and goes on
            signal.pthread_kill(main, signal.SIGINT)
            until = time.monotonic() + 5
            while went <= n and time.monotonic() < until:
                time.sleep(0.0001)

with gn.open("soft3") as ctx:
    threading.Thread(target=interrupt, daemon=True).start()
    while went < COUNT:
        try:
            ready = True
            while True:
                pd = ctx.create_pd()
                cq = ctx.create_cq(4)
                cq.close()
                pd.close()
        except KeyboardInterrupt:
            went += 1
    pd = cq = None
    ctx.create_pd().close()
    print(len(ctx.provider.nic.pds), len(ctx.provider.nic.cqs))
"""


@pytest.mark.slow
def test_interrupts_between_making_and_naming():
    """Each may lose an object, of which a NIC has 1,023. Some are lost for good: an interrupt ends a finalizer."""
    ended = run(INTERRUPTED, "-W", "ignore")
    assert ended.returncode == 0, ended.stderr[-2000:]
    domains, queues = map(int, ended.stdout.split())
    assert domains + queues < 20
