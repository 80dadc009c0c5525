"""Many threads hammer shared queues: nothing is lost, nothing comes twice, no ticket is given twice."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from churn import compile_sends, end, launch
from churn_kernels import churn, receive_many, send_many, take_many
from device_programs import run, start
from gpunetio import ExportedQp, Gpu, NicHandler, device
from nic_rig import until
from posts import Post, opened


@pytest.fixture
def post(gpu: Gpu) -> Iterator[Post]:
    yield from opened(gpu)


def hammered(post: Post, threads: int, rounds: int, queue: ExportedQp) -> None:
    """`rounds` posts by each thread, and a READ for each 64 of them."""
    keys = (post.there.address, post.there_mr.rkey, post.here.address, post.here_mr.lkey)
    statuses = end(launch(post, churn, threads, queue, *keys, rounds, 64, device.GPU), threads)
    assert statuses == [device.OK] * threads
    posted = threads * (rounds + -(-rounds // 64))
    assert set(queue.indices().values()) == {posted}
    words = post.there.array.view(np.int64)[: 8 * threads].reshape(threads, 8)
    assert (words[:, 0] == rounds).all()
    assert not words[:, 1:].any()
    assert int(post.nic.counters["req_cqe_error"]) == 0
    until(lambda: int(post.nic.qps[queue.qpn]["sq_ci"]) & 0xFFFF == posted & 0xFFFF, "the NIC's row")


@pytest.mark.parametrize("options", [{}, {"cq_collapsed": True}, {"nic_handler": NicHandler.CPU_PROXY}], ids=str)
@pytest.mark.parametrize(("threads", "depth"), [(4, 16), pytest.param(8, 256, marks=pytest.mark.slow)])
def test_posts(post: Post, threads, depth, options):
    queue = post.gpu.create_qp(post.pd, depth, **options)
    queue.connect(queue)
    hammered(post, threads, 5000, queue)
    queue.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_posts(post: Post):
    """By 32 warps of one lane."""
    queue = post.gpu.create_qp(post.pd, 1024)
    queue.connect(queue)
    hammered(post, 32, 1_000_000 // 32, queue)
    queue.close()


def received(post: Post, senders: int, count: int, seen: Any) -> None:
    """Each message of each sender has come once."""
    words = seen.read().view(np.int64)[:senders]
    assert (words & 0xFFFFFF).tolist() == [count] * senders
    assert (words >> 24).tolist() == [count * (count + 1) // 2] * senders


def messages(post: Post, senders: int, receivers: int, count: int, ahead: int) -> None:
    """Threads that send, and as many that receive by tickets, share the two queues of a connection."""
    a, b = post.pair(receivers * ahead)
    compile_sends(post, a)
    total = senders * count
    with post.gpu.alloc(4096) as seen, post.gpu.alloc(8 * ahead * receivers) as tickets:
        receiving = launch(
            post, receive_many, receivers, b, post.there.address, post.there_mr.lkey, total // receivers, ahead, seen,
            tickets, device.GPU,
        )
        sending = launch(post, send_many, senders, a, post.here.address, post.here_mr.lkey, count, device.GPU)
        assert end(sending, senders) == [device.OK] * senders
        assert end(receiving, receivers) == [device.OK] * receivers
        received(post, senders, count, seen)
    assert b.indices()["receives_posted"] == b.indices()["receives_completed"] == total


def arrivals(post: Post, senders: int, takers: int, count: int, slots: int, shared: bool) -> None:
    """Threads that send, and others that take whatever comes next, also from a shared receive queue."""
    srq = post.srq(slots) if shared else None
    a, b = post.pair(slots, **({"srq": srq} if shared else {}))
    compile_sends(post, a)
    total = senders * count
    with post.gpu.alloc(4096) as seen, post.gpu.alloc(8 * slots + 64) as read:
        taking = launch(
            post, take_many, 1 + takers, b, post.there.address, post.there_mr.lkey, slots, total, 0, seen, read,
            device.GPU,
        )
        sending = launch(post, send_many, senders, a, post.here.address, post.here_mr.lkey, count, device.GPU)
        assert end(sending, senders) == [device.OK] * senders
        assert end(taking, 1 + takers) == [device.OK] * (1 + takers)
        received(post, senders, count, seen)
    assert b.indices()["receives_posted"] == b.indices()["receives_completed"] == total


def test_messages(post: Post):
    messages(post, senders=3, receivers=3, count=1200, ahead=4)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("slots", [4, 64])
def test_arrivals(post: Post, slots, shared):
    arrivals(post, senders=2, takers=3, count=1000, slots=slots, shared=shared)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_messages(post: Post):
    messages(post, senders=8, receivers=8, count=100_000, ahead=8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_many_arrivals(post: Post, shared):
    arrivals(post, senders=6, takers=6, count=100_000, slots=8, shared=shared)


@pytest.mark.parametrize("lanes", [4, pytest.param(0, marks=pytest.mark.gpu, id="cuda")])
def test_threads_and_groups_share_a_queue(lanes):
    """Threads that come alone, warps and a block post to one queue at the same time."""
    with Gpu("host", warp=lanes) if lanes else Gpu() as gpu:
        for post in opened(gpu):
            queue, width, rounds = post.gpu.create_qp(post.pd, 16 * gpu.warp), gpu.warp, 60
            queue.connect(queue)
            call = {
                "what": "put_signal", "qp": queue, "raddr": post.there.address, "rkey": post.there_mr.rkey,
                "laddr": post.here.address, "lkey": post.here_mr.lkey, "nbytes": 56,
                "sig_raddr": post.there.address + 4096, "sig_rkey": post.there_mr.rkey,
                "sig_laddr": post.here.address + 4096, "sig_lkey": post.here_mr.lkey, "value": 1,
            }
            running = [
                start(gpu, [[call] * width] * rounds, sharing=device.GPU, scope=scope)
                for scope in (device.THREAD, device.WARP, device.BLOCK, device.THREAD)
            ]
            tickets = np.concatenate([started.end().ravel() for started in running])
            assert sorted(tickets.tolist()) == list(range(1, 2 * len(tickets), 2))
            assert run(gpu, [[{"what": "wait_all", "qp": queue}]])[0, 0] == device.OK
            assert post.there.array[4096:4104].view(np.int64)[0] == len(tickets)
            queue.close()
