"""Every `timeout` of a call is kept: the call waits that long for what does not come, and not much longer."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from gpunetio import Gpu, cm, device, eth, kernel, rdma, rendezvous, verbs
from gpunetio.core import ProgressEngine
from gpunetio.errors import TimedOutError
from gpunetio.gpu.memory import RunningLaunches
from gpunetio.service import ServiceThread

TIMEOUT = 0.2  # seconds
LATE = 10.0  # seconds: a machine may be busy, but no wait falls back to the defaults, which are 30 s and more
PORT = 7191

pytestmark = pytest.mark.soft_nic


@kernel
def until_set(word):
    while device.ld_acquire64(word) == 0:
        device.nap(0)


@pytest.fixture(scope="module")
def world() -> Iterator[SimpleNamespace]:
    """Objects to wait for, of which nothing comes."""
    with ExitStack() as undo:
        ctx, far = (undo.enter_context(verbs.open(name)) for name in ("soft0", "soft1"))
        pd, there = ctx.create_pd(), far.create_pd()

        queues: list[verbs.QP] = []

        def qp(domain: verbs.PD) -> verbs.QP:
            cq = domain.ctx.create_cq(16)
            queues.append(domain.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq))
            return queues[-1]

        listener = cm.listen(far, PORT)
        asking = cm.start_connecting(qp(pd), listener.address, PORT)
        one, other = rdma.Rdma(pd), rdma.Rdma(there)
        for each in (one, other):
            each.start()
        (here, near), (_, connected) = one.export(), other.export()
        connected.connect(here)
        one.listen(PORT + 1)
        silent = socket.create_server(("127.0.0.1", 0))
        undo.callback(silent.close)
        until_set.compile_for_the_host()
        yield SimpleNamespace(
            ctx=ctx, pd=pd, qp=lambda: qp(pd), listener=listener, asking=asking, silent=silent, one=one, near=near,
            channel=ctx.create_comp_channel(), receive=rdma.Receive(other, bytearray(8)).submit(),
            connected=connected, event=rdma.SyncEvent(pd), deaf=cm.listen(ctx, PORT + 2),
            deaf_to_datagrams=cm.listen_datagrams(ctx, PORT + 2), regular=eth.RegularRxq(pd, 8, 1600),
            managed=eth.ManagedRxq(pd, 8, 1600), txq=eth.CpuTxq(pd, 8),
        )


def stop(world: SimpleNamespace, timeout: float) -> bool:
    end = threading.Event()
    thread = ServiceThread("served", lambda: bool(end.wait(LATE)))
    thread.start()
    try:
        return thread.join(timeout)
    finally:
        end.set()


def launch(world: SimpleNamespace, timeout: float) -> bool:
    with Gpu("host") as gpu, gpu.alloc(8) as word:
        running = until_set[1, 1, gpu](word)
        start = time.monotonic()
        done = running.wait(timeout)
        took = time.monotonic() - start
        word.write(b"\1")
        assert running.wait(LATE)
        assert timeout <= took < LATE
        return done


def meet(world: SimpleNamespace, rank: int, timeout: float) -> object:
    """Rank 1 asks a rank 0 that says nothing, or rank 0 waits for a rank 1 that does not come."""
    port = world.silent.getsockname()[1] if rank else 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return rendezvous.TcpRendezvous(rank, 2, port=port, timeout=timeout, listener=None if rank else listener)


RAISE: dict[str, Callable[[SimpleNamespace, float], object]] = {
    "cm.connect": lambda w, t: cm.connect(w.qp(), w.listener.address, PORT, timeout=t),
    "cm.Connection.established": lambda w, t: w.asking.established(t),
    "cm.Connection.established_async": lambda w, t: asyncio.run(w.asking.established_async(t)),
    "cm.Connection.disconnected": lambda w, t: w.asking.disconnected(t),
    "cm.Connection.get_event": lambda w, t: w.asking.get_event(t),
    "cm.Listener.accept": lambda w, t: w.deaf.accept(t),
    "cm.Listener.accept_async": lambda w, t: asyncio.run(w.deaf.accept_async(t)),
    "cm.DatagramListener.accept": lambda w, t: w.deaf_to_datagrams.accept(t),
    "core.ProgressEngine.progress_until": lambda w, t: ProgressEngine().progress_until(lambda: False, t, "it"),
    "core.Task.wait": lambda w, t: w.receive.wait(t),
    "rdma.Rdma.next_request": lambda w, t: w.one.next_request(t),
    "rdma.RdmaConnection.established": lambda w, t: w.near.established(t),
    "rdma.RdmaConnection.disconnected": lambda w, t: w.connected.disconnected(t),
    "rdma.SyncEvent.wait_gt": lambda w, t: w.event.wait_gt(5, t),
    "rendezvous.TcpRendezvous of rank 0": lambda w, t: meet(w, 0, t),
    "rendezvous.TcpRendezvous of rank 1": lambda w, t: meet(w, 1, t),
    "RunningLaunches.wait": lambda w, t: running_launches().wait(t, "it"),
}


class _Launch:
    ended = False


def running_launches() -> RunningLaunches:
    launches = RunningLaunches()
    launches.add(_Launch())  # type: ignore[arg-type]
    return launches


RETURN: dict[str, tuple[Callable[[SimpleNamespace, float], object], object]] = {
    "verbs.CompChannel.get_event": (lambda w, t: w.channel.get_event(t), None),
    "verbs.Context.get_async_event": (lambda w, t: w.ctx.get_async_event(t), None),
    "eth.RegularRxq.receive": (lambda w, t: w.regular.receive(timeout=t), []),
    "eth.ManagedRxq.receive": (lambda w, t: w.managed.receive(timeout=t), []),
    "eth.CpuTxq.completions": (lambda w, t: w.txq.completions(timeout=t), []),
    "ServiceThread.join": (stop, False),
    "Launch.wait": (launch, False),
}


@pytest.mark.parametrize("timeout", [0.0, TIMEOUT])
@pytest.mark.parametrize("name", RAISE)
def test_calls_that_raise(world, name, timeout):
    if name.startswith("rendezvous") and not timeout:
        pytest.skip("a rendezvous takes a positive timeout")
    start = time.monotonic()
    with pytest.raises(TimedOutError):
        RAISE[name](world, timeout)
    assert timeout <= time.monotonic() - start < timeout + LATE


@pytest.mark.parametrize("timeout", [0.0, TIMEOUT])
@pytest.mark.parametrize("name", RETURN)
def test_calls_that_return_nothing(world, name, timeout):
    start = time.monotonic()
    call, nothing_came = RETURN[name]
    assert call(world, timeout) == nothing_came
    assert timeout <= time.monotonic() - start < timeout + LATE
