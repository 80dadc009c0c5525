"""Indices that wrap: at 16 bits in WQEs, CQEs and doorbells, 24 in the record of a CQ, 32 in WAIT requests.

A queue is put forward: its structures, and the counts of CQEs in the NIC, begin at a multiple of 65536, which is 0 in
all that has 16 bits, and then it is used across the next one.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from churn import compile_sends, end, launch
from churn_kernels import churn, receive_many, send_many, take_many
from counting import Counting
from counting import opened as counting
from device_programs import run
from gpunetio import ExportedQp, Gpu, NicHandler, device
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP, DEV_RQ, DEV_SIDE
from nic_rig import view
from posts import Post, opened
from structures import changed, changed_srq

pytestmark = pytest.mark.host_memory  # it looks at rings and records

LAP = 1 << 16
# Where 24 bits wrap, 16 do, and where 32 wrap, all do.
STARTS = [
    pytest.param(0, id="16 bits", marks=pytest.mark.slow), pytest.param((1 << 24) - LAP, id="24 bits"),
    pytest.param((1 << 32) - LAP, id="32 bits"), pytest.param((1 << 48) - LAP, id="48 bits", marks=pytest.mark.slow),
]
EXCLUSIVE, GPU, OK = device.EXCLUSIVE, device.GPU, device.OK


@pytest.fixture
def post(gpu: Gpu) -> Iterator[Post]:
    yield from opened(gpu)


def put_forward(nic, queue: ExportedQp, start: int) -> None:
    """An unused queue begins at index `start` of all its rings."""
    with changed(queue) as (image, side_image):
        q, side = DEV_QP.at(image), DEV_SIDE.at(side_image)
        for name in ("sq_rsvd_index", "sq_ready_index", "sq_wqe_pi"):
            q[name] = start
        cqs = [(queue.cq, DEV_CQ.at(image, DEV_QP.cq_sq))]
        side["submit"], side["arrivals"], side["counting"] = start << 1, start, start
        if queue.qp.receive_cq:
            cqs.append((queue.qp.receive_cq, DEV_CQ.at(side_image, DEV_SIDE.cq_rq)))
            own_rq = DEV_RQ.at(side_image, DEV_SIDE.own_rq)
            own_rq["rsvd"] = own_rq["ready"] = start
        for cq, structure in cqs:
            structure["cqe_ci"] = start
            nic.cqs[cq.cqn]["pi"] = start
            view(cq.dbr_address, 4, ">u4")[0] = start & 0xFFFFFF
    if queue.qp.init_attr.srq:
        with changed_srq(queue) as (rq, words):
            rq["rsvd"] = rq["ready"] = start
            words[:] = start - len(words) + 1 + np.arange(len(words)) if start else 0


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("sharing", "threads"), [(EXCLUSIVE, 1), (GPU, 4)])
@pytest.mark.parametrize("options", [{}, {"cq_collapsed": True}, {"nic_handler": NicHandler.CPU_PROXY}], ids=str)
def test_sends(post: Post, start, sharing, threads, options):
    queue = post.gpu.create_qp(post.pd, 64, **options)
    queue.connect(queue)
    put_forward(post.nic, queue, start)
    rounds = (LAP + 500) // threads
    keys = (post.there.address, post.there_mr.rkey, post.here.address, post.here_mr.lkey)
    statuses = end(launch(post, churn, threads, queue, *keys, rounds, 32, sharing), threads)
    assert statuses == [OK] * threads
    posted = start + threads * (rounds + -(-rounds // 32))
    assert posted > start + LAP
    assert set(queue.indices().values()) == {posted}
    assert (post.there.array.view(np.int64)[: 8 * threads : 8] == rounds).all()
    queue.close()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["tickets", "next", "shared"])
def test_receives(post: Post, start, kind):
    """With a CQ that the NIC must not overrun, whose record has 24 bits."""
    slots, total = 8, LAP + 600
    srq = post.srq(slots) if kind == "shared" else None
    a, b = post.pair(slots, cqe=16, **({"srq": srq} if srq else {}))
    compile_sends(post, a)
    put_forward(post.nic, b, start)
    with post.gpu.alloc(4096) as seen, post.gpu.alloc(4096) as words:
        args = (b, post.there.address, post.there_mr.lkey)
        threads = 2
        if kind == "tickets":
            started = launch(post, receive_many, threads, *args, total // 2, slots // 2, seen, words, GPU)
        else:
            if start:
                words.write((start - slots + 1 + np.arange(slots)).astype("<i8").view(np.uint8))
            started = launch(post, take_many, threads, *args, slots, total, start, seen, words, GPU)
        sending = launch(post, send_many, 1, a, post.here.address, post.here_mr.lkey, total, EXCLUSIVE)
        assert end(sending, 1) == [OK]
        assert end(started, threads) == [OK] * threads
        word = int(seen.read().view(np.int64)[0])
        assert (word & 0xFFFFFF, word >> 24) == (total, total * (total + 1) // 2)
    indices = b.indices()
    assert indices["receives_posted"] == indices["receives_completed"] == start + total


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("collapsed", [False, True], ids=["ring", "collapsed"])
def test_counters(gpu: Gpu, start, collapsed):
    """A WAIT names its completion by 32 bits: operations on both sides of the wrap are counted, each once."""
    with counting(gpu, 64, collapsed) as c:
        c.begin_anew()
        for queue in (c.group.main, c.group.companion):
            put_forward(c.nic, queue, start)
        to_the_wrap(c, LAP - 70)
        step = c.keys(nbytes=8, what="put_counter")
        counts: list[int] = []
        for _ in range(14):
            program = [[step]] * 10 + [[{"what": "wait_all", "qp": c.group.companion}]]
            assert run(c.gpu, program, sharing=EXCLUSIVE)[-1, 0] == OK
            counts.append(c.counter())
        assert counts == list(range(10, 150, 10))
        assert c.group.main.indices()["submitted"] == start + LAP - 70 + 140


def to_the_wrap(c: Counting, posts: int) -> None:
    """Use up `posts` indices of the main queue."""
    burst = 32
    rounds = posts - posts // (burst + 1)
    rounds -= (rounds + -(-rounds // burst)) - posts
    keys = (c.there.address, c.there_mr.rkey, c.here.address, c.here_mr.lkey)
    with c.gpu.alloc(64) as out:
        assert churn[1, 1, c.gpu](c.group.main, *keys, rounds, burst, EXCLUSIVE, out).wait(100)
        assert out.read().view(np.int64)[0] == OK
    while (done := c.group.main.indices()["completed"] & LAP - 1) < posts:
        calls = [[c.keys(nbytes=8, what="put")]] * min(posts - done, 32)
        run(c.gpu, [*calls, [{"what": "wait_all", "qp": c.group.main}]], sharing=EXCLUSIVE)
    assert done == posts
