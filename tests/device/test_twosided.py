"""SENDs and receives from kernels: own and shared receive queues, RC and UC, in every scope and sharing mode."""

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from device_programs import BLOCK, CTA, EXCLUSIVE, GIB, GPU, SCOPES, THREAD, UNTOUCHED, WARP, Call, start
from gpunetio import CqOverrun, Gpu, QpType, device, verbs
from gpunetio.enums import QpState, WrOpcode
from gpunetio.errors import NotSupportedError
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.device_structs import DEV_SIDE
from nic_rig import until, view
from posts import NBYTES, SLOT, Post, opened
from structures import changed

OUT = 1 << 19  # where what kernels copy out of completions goes, in `there`
OK, EBUSY, EIO, EINVAL = device.OK, device.EBUSY, device.EIO, device.EINVAL
ENOBUFS, EOVERFLOW, ETIMEDOUT = device.ENOBUFS, device.EOVERFLOW, device.ETIMEDOUT


@pytest.fixture(
    params=[(1, 1), (4, 1), pytest.param((0, 1), marks=pytest.mark.gpu, id="cuda")], ids=lambda p: f"host{p[0]}"
)
def lanes(request: pytest.FixtureRequest) -> int:
    """Of a warp; 0 on a GPU."""
    return request.param[0]


@pytest.fixture
def wide(lanes: int) -> Iterator[Post]:
    """On warps of several widths."""
    with Gpu("host", warp=lanes) if lanes else Gpu() as gpu:
        yield from opened(gpu)


@pytest.fixture
def post(gpu: Gpu) -> Iterator[Post]:
    yield from opened(gpu)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The NIC's complaints are what was asked for."""
    caplog.set_level(logging.CRITICAL, "gpunetio")


# --- messages --------------------------------------------------------------------------------------------------------


KINDS = {
    "rc": {}, "uc": {"qp_type": QpType.UC}, "inline": {"cqe_inline": True},
    "uc inline": {"qp_type": QpType.UC, "cqe_inline": True},
}


@pytest.mark.parametrize("scope", SCOPES, ids=SCOPES.get)
@pytest.mark.parametrize("kind", KINDS)
def test_messages(wide: Post, kind, scope):
    """Each message is in the receive that its ticket says, with its length and immediate data, or in its completion."""
    post, width = wide, wide.gpu.warp
    inline = "inline" in kind
    for sharing, threads in ((EXCLUSIVE, 1 if scope == THREAD else width), (CTA, 2 * width), (GPU, 2 * width)):
        a, b = post.pair(4 * threads, **KINDS[kind])
        group = threads if scope == BLOCK else width if scope == WARP else 1
        sizes = [1 + (29 * n + 3) % (40 if inline else SLOT) for n in range(2 * threads)]
        post.there.array[:] = 0
        program: list[list[Call]] = []
        for half in (0, threads):
            first, base = len(program), SLOT * half
            mine = range(half, half + threads)
            program += [
                [post.receiving(b, n) for n in mine],
                [{"what": "barrier"}] * threads,
                [post.sending(a, n, sizes[n], what="send_imm", value=n << 24 | 0xABCDEF) for n in mine],
                [{"what": "wait", "qp": a, "ref": first + 2}] * threads,
                [{"what": "recv_wait", "qp": b, "ref": first}] * threads,
                [{"what": "recv_imm", "qp": b, "ref": first}] * threads,
                [{"what": "recv_inline", "qp": b, "ref": first}] * threads,
                [
                    {"what": "copy", "ref": first + 6, "raddr": post.there.address + OUT + base + SLOT * n,
                     "nbytes": 32} for n in range(threads)
                ],
                [{"what": "barrier"}] * threads,
            ]
        results = post.run(program, sharing=sharing, scope=scope)
        for half in (0, threads):
            tickets, _, sent, done, got, imms, at, *_ = results[9 * (half > 0) :]
            assert sorted(tickets) == sorted(sent) == list(range(half, half + threads))
            assert done == [OK] * threads
            # The message that was sent as number k is in receive k.
            by_ticket = {tickets[t]: imms[t] >> 24 for t in range(threads)}
            assert all(imm & 0xFFFFFF == 0xABCDEF for imm in imms)
            assert by_ticket == {sent[t]: half + t for t in range(threads)}
            for t in range(threads):
                number = by_ticket[tickets[t]]
                nbytes = sizes[number]
                assert got[t] == nbytes
                carried = inline and nbytes <= 32
                assert (at[t] != 0) == carried
                place = post.place(half + t)
                if carried:
                    where = OUT + SLOT * half + SLOT * t
                    assert np.array_equal(post.there.array[where : where + nbytes], post.message(number, nbytes))
                    assert not place.any()
                else:
                    assert np.array_equal(place[:nbytes], post.message(number, nbytes))
                    assert not place[nbytes:].any()
            if scope != THREAD:
                for start_of in range(0, threads, group):
                    part = tickets[start_of : start_of + group]
                    assert part == list(range(part[0], part[0] + group))
        assert b.indices()["receives_posted"] == b.indices()["receives_completed"] == 2 * threads


@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
@pytest.mark.parametrize("receives", [1, 4])
def test_rings_go_round(post: Post, receives, sharing):
    """Many laps of both rings, the receiver and the sender at work at the same time."""
    a, b = post.pair(receives)
    count = 150
    calls: list[Call] = [post.receiving(b, n, ref=-1) for n in range(receives)]
    for n in range(count):
        calls.append({"what": "recv_wait", "qp": b, "ticket": n, "ref": -1})
        if n + receives < count:
            calls.append(post.receiving(b, n + receives))
    receiving = post.start(*calls, sharing=sharing)
    sends = [post.sending(a, n, 1 + n % SLOT) for n in range(count)] + [{"what": "wait_all", "qp": a}]
    assert post.alone(*sends, sharing=sharing) == [*range(count), OK]
    results = receiving.end()[:, 0]
    waits = results[[i for i, call in enumerate(calls) if call["what"] == "recv_wait"]]
    assert waits.tolist() == [1 + n % SLOT for n in range(count)]
    for n in range(count):
        assert np.array_equal(post.place(n, 1 + n % SLOT), post.message(n, 1 + n % SLOT))


def test_more_receives_than_there_is_room_for(post: Post):
    """ENOBUFS, and nothing is posted; a receive that was waited for makes room."""
    a, b = post.pair(4)
    assert post.alone(*(post.receiving(b, n) for n in range(6)), sharing=EXCLUSIVE) == [0, 1, 2, 3, ENOBUFS, ENOBUFS]
    send = [post.sending(a, 0, 10), {"what": "wait_all", "qp": a}]
    assert post.alone(*send, post.receiving(b, 4)) == [0, OK, ENOBUFS]  # complete, but not waited for
    wait = {"what": "recv_wait", "qp": b, "ticket": 0}
    assert post.alone(wait, post.receiving(b, 4), post.receiving(b, 5)) == [10, 4, ENOBUFS]
    assert b.indices()["receives_posted"] == 5


@pytest.mark.parametrize("scope", [WARP, BLOCK], ids=SCOPES.get)
def test_a_group_gets_room_for_all_or_none(wide: Post, scope):
    width = wide.gpu.warp
    a, b = wide.pair(4 * width)
    steps = [[wide.receiving(b, width * i + t) for t in range(width)] for i in range(5)]
    results = wide.run(steps, scope=scope, sharing=GPU)
    assert results == [[*range(width * i, width * (i + 1))] for i in range(4)] + [[ENOBUFS] * width]
    wide.alone(wide.sending(a, 0, 9), {"what": "wait_all", "qp": a}, {"what": "recv_wait", "qp": b, "ticket": 0})
    got = wide.run([steps[4]], scope=scope, sharing=GPU)[0]
    assert got == ([4] if width == 1 else [ENOBUFS] * width)


@pytest.mark.parametrize("scope", SCOPES, ids=SCOPES.get)
def test_bad_arguments(wide: Post, scope):
    """What no WQE can express is its thread's own fault: in a group the others' messages come all the same."""
    post, width = wide, wide.gpu.warp
    (a, b), (_, c) = post.pair(4 * width), post.pair(4 * width)
    wrong = width // 2
    steps: list[list[Call]] = [
        [post.receiving(c, t, -1 if t == wrong else 16) for t in range(width)],
        [post.receiving(b, t) for t in range(width)],
        [post.receiving(b, t) for t in range(width)],
        [{"what": "barrier"}] * width,
        [post.sending(a, t, 0 if t == wrong else 5) for t in range(width)],
        [{"what": "wait", "qp": a, "ref": 4}] * width,
        [post.sending(a, t, GIB + 1 if t == wrong else 7, what="send_imm") for t in range(width)],
        [{"what": "wait", "qp": a, "ref": 6}] * width,
    ]
    results = post.run(steps, scope=scope, sharing=GPU)
    for row in (results[0], *results[4:]):
        assert [t for t in range(width) if row[t] == EINVAL] == [wrong]
        assert all(row[t] >= 0 for t in range(width) if t != wrong)
    alone = scope == THREAD
    assert c.indices()["receives_posted"] == width - alone
    assert a.indices()["reserved"] == 2 * (width - alone)


def test_queues_without_receives(post: Post, quiet):
    """A queue that only sends has none to post or to wait for."""
    a = post.gpu.create_qp(post.pd, 4)
    b = post.gpu.create_qp(post.pd, 4, timeout=1.0)
    a.connect(b, rnr_retry=1, min_rnr_timer=1)
    calls = [
        post.receiving(b, 0), {"what": "recv_wait", "qp": b, "ticket": 0}, {"what": "recv_wait_all", "qp": b},
        {"what": "recv_next", "qp": b},
    ]
    assert post.alone(*calls) == [EINVAL] * 4
    assert post.alone(post.sending(a, 0, 8), {"what": "wait", "qp": a, "ref": 0}) == [0, EIO]
    error = a.last_error()
    assert error is not None
    assert error.syndrome == Syndrome.RNR_RETRY_EXC
    a.close()
    b.close()


def test_a_collapsed_ring_is_not_for_messages(post: Post):
    """It would forget all but the last."""
    pd, ctx = post.pd, post.ctx
    cq = ctx.create_cq(4, collapsed=True, overrun=CqOverrun.ENABLE)
    qp = pd.create_qp(sq_wr=4, rq_wr=4, send_cq=ctx.create_cq(4), receive_cq=cq, external_datapath=True)
    with pytest.raises(NotSupportedError, match=r"collapsed receive CQ, .* give it a ring"):
        post.gpu.export_qp(qp)


def test_wait_for_all_receives(post: Post):
    a, b = post.pair(8)
    everything = {"what": "recv_wait_all", "qp": b}
    assert post.alone(everything) == [OK]  # none posted, none waited for
    assert post.alone(*(post.receiving(b, n) for n in range(5))) == [0, 1, 2, 3, 4]
    waiting = post.start(everything, everything)
    post.alone(*(post.sending(a, n, 100 + n) for n in range(4)), {"what": "wait_all", "qp": a})
    assert not waiting.launch.wait(0.02)
    post.alone(post.sending(a, 4, 104))
    assert waiting.end().ravel().tolist() == [OK, OK]
    again = [{"what": "recv_wait", "qp": b, "ticket": n} for n in range(5)]
    assert post.alone(*again) == [100, 101, 102, 103, 104]  # told again, while the completions are there


def test_an_empty_receive_takes_an_immediate(post: Post):
    """A WRITE with immediate data needs a receive, which brings nothing."""
    b = post.queue(4)
    cq = post.ctx.create_cq(16)
    cpu = post.pd.create_qp(sq_wr=4, send_cq=cq)
    cpu.connect(b.qp)
    assert post.alone(post.receiving(b, 0, 0), post.receiving(b, 1, 0)) == [0, 1]
    source = [verbs.Sge(post.here.address, 70, post.here_mr.lkey)]
    target = {"remote_addr": post.there.address + 5 * SLOT, "rkey": post.there_mr.rkey}
    cpu.post_send(
        verbs.SendWr(opcode=WrOpcode.RDMA_WRITE_WITH_IMM, sges=source, imm=0x80000001, **target),
        verbs.SendWr(opcode=WrOpcode.SEND_WITH_IMM, imm=7),
    )
    calls = [
        {"what": "recv_wait", "qp": b, "ticket": 1}, {"what": "recv_bytes", "qp": b, "ticket": 0},
        {"what": "recv_imm", "qp": b, "ticket": 0}, {"what": "recv_imm", "qp": b, "ticket": 1},
    ]
    assert post.alone(*calls) == [0, 70, 0x80000001, 7]
    assert np.array_equal(post.place(5, 70), post.message(0, 70))


def test_a_completion_queue_shorter_than_the_wait(post: Post):
    """A wait for many receives consumes in parts, and tells the NIC, which would not write over them."""
    a, b = post.pair(16, cqe=4)
    post.alone(*(post.receiving(b, n) for n in range(16)))
    waiting = post.start({"what": "recv_wait", "qp": b, "ticket": 13})
    for batch in range(4):
        numbers = range(4 * batch, min(14, 4 * batch + 4))
        post.alone(*(post.sending(a, n, 5 + n) for n in numbers), {"what": "wait_all", "qp": a})
        if batch < 3:
            until(lambda: b.indices()["receives_completed"] == 4 * batch + 4, "the batch")  # noqa: B023
    assert waiting.end().ravel().tolist() == [5 + 13]
    assert b.qp.state is QpState.RTS
    for n in range(14):
        assert np.array_equal(post.place(n, 5 + n), post.message(n, 5 + n))


@pytest.mark.parametrize("shared", [False, True])
def test_mcst_behind_a_receive(post: Post, shared):
    """`recv_wait` with an address also waits for a read of that byte, on the send queue."""
    srq = post.srq(4) if shared else None
    a, b = post.pair(4, **({"srq": srq} if shared else {}))
    calls = [
        post.receiving(b, 0), post.sending(a, 0, 40),
        {"what": "recv_wait", "qp": b, "ref": 0, "daddr": post.there.address, "dlkey": post.there_mr.lkey},
    ]
    assert post.alone(*calls, sharing=EXCLUSIVE) == [0, 0, 40]
    assert b.indices()["completed"] == 1


def test_unreliable_messages_without_a_receive_are_lost(post: Post):
    """The sender does not learn of it, and the next receive gets the next message."""
    a, b = post.pair(4, qp_type=QpType.UC)
    sends = [post.sending(a, n, 50) for n in range(3)]
    assert post.alone(*sends, {"what": "wait_all", "qp": a}) == [0, 1, 2, OK]
    calls = [post.receiving(b, 0), post.sending(a, 7, 60), {"what": "recv_wait", "qp": b, "ref": 0}]
    assert post.alone(*calls) == [0, 3, 60]
    assert np.array_equal(post.place(0, 60), post.message(7, 60))


# --- arrivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("sharing", "threads"), [(EXCLUSIVE, 1), (GPU, 4)])
def test_next_messages(post: Post, sharing, threads, shared):
    """Threads take the messages that come, each once; the slot says where it is."""
    count, entries = 40 * threads, 8
    srq = post.srq(entries) if shared else None
    a, b = post.pair(entries, **({"srq": srq} if shared else {}))
    # Places are those of the slot; who takes a message copies it out, and posts the slot again.
    per = count // threads
    posting = post.alone(*(post.receiving(b, n, 64) for n in range(entries)), sharing=sharing)
    assert posting == list(range(entries))
    steps: list[list[Call]] = []
    for _ in range(per):
        base = len(steps)
        steps += [
            [{"what": "recv_next", "qp": b}] * threads,
            [{"what": "recv_bytes", "qp": b, "ref": base}] * threads,
            [{"what": "recv_slot", "qp": b, "ref": base}] * threads,
            [{"what": "recv_imm", "qp": b, "ref": base}] * threads,
        ]
    if entries < count:
        # Receives are posted by the sender's program, one for each message beyond the first ones.
        calls: list[Call] = []
        for n in range(count):
            calls.append(post.sending(a, n % 64, 1 + n % 64, what="send_imm", value=n))
        started = start(post.gpu, steps, sharing=sharing)
        posted, sent = entries, 0
        while sent < count:
            batch = min(entries, count - sent)
            post.alone(*calls[sent : sent + batch], {"what": "wait_all", "qp": a})
            sent += batch
            until(lambda: b.indices()["receives_completed"] >= sent, "the messages")  # noqa: B023
            more = [post.receiving(b, n % entries, 64) for n in range(posted, min(count, posted + batch))]
            if more:
                got = post.alone(*more, sharing=GPU)
                assert got == list(range(posted, posted + len(more)))
            posted += len(more)
    results = started.end()
    arrivals, lengths, slots, imms = (results[i::4].ravel() for i in range(4))
    order = np.argsort(arrivals)
    assert arrivals[order].tolist() == list(range(count))
    assert imms[order].tolist() == list(range(count))
    assert lengths[order].tolist() == [1 + n % 64 for n in range(count)]
    assert slots[order].tolist() == list(range(count))


def test_a_shared_queue_serves_several(post: Post):
    """Each message gets the next receive, whichever queue pair it comes to, and a wait is for a queue's own."""
    srq = post.srq(8)
    receivers = [post.queue(srq=srq) for _ in range(3)]
    senders = [post.queue(1) for _ in range(3)]
    for a, b in zip(senders, receivers):
        post.connect(a, b)
    assert post.alone(*(post.receiving(receivers[n % 3], n, 64) for n in range(8))) == list(range(8))
    assert post.alone(post.receiving(receivers[0], 8, 64)) == [ENOBUFS]
    order = [2, 0, 0, 1, 2, 2, 0, 1]
    for n, who in enumerate(order):
        post.alone(post.sending(senders[who], n, 10 + n), {"what": "wait_all", "qp": senders[who]})
    for who, b in enumerate(receivers):
        mine = [n for n, whose in enumerate(order) if whose == who]
        calls: list[Call] = []
        for _ in mine:
            calls += [
                {"what": "recv_next", "qp": b}, {"what": "recv_slot", "qp": b, "ref": len(calls)},
                {"what": "recv_bytes", "qp": b, "ref": len(calls)},
            ]
        results = post.alone(*calls)
        assert results[0::3] == list(range(len(mine)))
        assert results[1::3] == mine
        assert results[2::3] == [10 + n for n in mine]
        assert post.alone({"what": "recv_wait_all", "qp": b}) == [EINVAL]
    for n in range(8):
        assert np.array_equal(post.place(n, 10 + n), post.message(n, 10 + n))
    assert post.alone(*(post.receiving(receivers[n % 3], n, 64) for n in range(9))) == [*range(8, 16), ENOBUFS]


def test_slots_of_a_shared_queue_are_used_again_in_their_order(post: Post):
    """The ring goes round: a slot whose message nobody has taken holds up those behind it, though they are free."""
    srq = post.srq(4)
    receivers = [post.queue(srq=srq) for _ in range(2)]
    senders = [post.queue(1) for _ in range(2)]
    for a, b in zip(senders, receivers):
        post.connect(a, b)
    slow, quick = receivers
    assert post.alone(*(post.receiving(slow, n, 64) for n in range(4))) == [0, 1, 2, 3]
    for who in (0, 1, 1, 1):
        post.alone(post.sending(senders[who], 0, 8), {"what": "wait_all", "qp": senders[who]})
    take = {"what": "recv_next", "qp": quick}
    assert post.alone(take, take, take, post.receiving(quick, 0, 64)) == [0, 1, 2, ENOBUFS]
    assert post.alone({"what": "recv_next", "qp": slow}) == [0]
    assert post.alone(*(post.receiving(quick, n, 64) for n in range(5))) == [4, 5, 6, 7, ENOBUFS]
    # Receives of a group are posted together or not at all.
    for _ in range(3):
        post.alone(post.sending(senders[1], 0, 8), {"what": "wait_all", "qp": senders[1]})
    assert post.alone(take, take) == [3, 4]
    together = [[post.receiving(quick, t, 64) for t in range(3)]]
    assert post.run(together, scope=BLOCK, sharing=GPU) == [[ENOBUFS] * 3]
    assert post.alone(take) == [5]
    assert post.run(together, scope=BLOCK, sharing=GPU) == [[8, 9, 10]]


def test_a_reset_frees_what_nobody_has_taken(post: Post):
    """Messages of a queue pair that is reset are gone, and their receives are free for the others."""
    srq = post.srq(4)
    a, b = post.pair(srq=srq)
    for life in range(3):
        base = 4 * life
        assert post.alone(*(post.receiving(b, n, 64) for n in range(5))) == [*range(base, base + 4), ENOBUFS]
        post.alone(*(post.sending(a, n, 8) for n in range(4)), {"what": "wait_all", "qp": a})
        assert post.alone({"what": "recv_next", "qp": b}, {"what": "recv_slot", "qp": b, "ref": 0}) == [0, base]
        for end in (a, b):
            end.qp.reset()
            end.reset()
        post.connect(a, b)


def test_a_message_that_does_not_come_leaves_no_gap(post: Post):
    """Waits that end without a message, of one thread or of several, take no message away from later ones."""
    a, b = post.pair(8, timeout=1.0)
    post.alone(*(post.receiving(b, n) for n in range(8)))
    for sharing, threads in ((EXCLUSIVE, 1), (GPU, 1), (GPU, 3), (CTA, 2)):
        assert post.run([[{"what": "recv_next", "qp": b}] * threads], sharing=sharing) == [[ETIMEDOUT] * threads]
    post.alone(*(post.sending(a, n, 20 + n) for n in range(6)), {"what": "wait_all", "qp": a})
    take = {"what": "recv_next", "qp": b}
    assert post.alone(*[take] * 3, sharing=GPU) == [0, 1, 2]
    assert sorted(post.run([[take] * 4], sharing=GPU)[0]) == [ETIMEDOUT, 3, 4, 5]
    post.alone(post.sending(a, 0, 8), {"what": "wait_all", "qp": a})
    assert post.alone(take, sharing=EXCLUSIVE) == [6]


@pytest.mark.parametrize("sharing", [EXCLUSIVE, CTA, GPU])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_one_look(post: Post, shared, sharing):
    """`recv_poll` does not wait, and counts what is there, so that a shared queue has room again."""
    a, b = post.pair(4, **({"srq": post.srq(4)} if shared else {}))
    look = [{"what": "recv_poll", "qp": b, "ticket": n} for n in range(3)]
    posted = post.alone(*look[:1], *(post.receiving(b, n) for n in range(4)), look[0], sharing=sharing)
    assert posted == [EBUSY, 0, 1, 2, 3, EBUSY]
    post.alone(*(post.sending(a, n, 20 + n) for n in range(2)), {"what": "wait_all", "qp": a}, sharing=sharing)
    assert b.indices()["receives_completed"] == 0
    calls = [look[2], look[1], look[0], {"what": "recv_bytes", "qp": b, "ticket": 1}, post.receiving(b, 4)]
    assert post.alone(*calls, {"what": "recv_poll", "qp": b, "ticket": EINVAL}, sharing=sharing) == [
        EBUSY, OK, OK, 21, 4, EINVAL,
    ]
    assert b.indices()["receives_completed"] == 2


@pytest.mark.parametrize("sharing", [CTA, GPU])
def test_one_thread_counts_a_message(post: Post, sharing):
    """Another one, that is held up while it does, is waited for: the slot may have its next receive by then."""
    a, b = post.pair(4, srq=post.srq(4), timeout=1.0)
    post.alone(post.receiving(b, 0), post.sending(a, 0, 8), {"what": "wait_all", "qp": a})
    with changed(b) as (_, side):
        DEV_SIDE.at(side)["counting"] = 1  # somebody has begun, and is held up
    calls: list[Call] = [{"what": "recv_poll", "qp": b, "ticket": 0}, {"what": "recv_next", "qp": b}]
    assert post.alone(*calls, sharing=sharing) == [EBUSY, ETIMEDOUT]
    assert b.indices()["receives_completed"] == 0
    assert post.alone({"what": "recv_slot", "qp": b, "ticket": 0}) == [-1]  # nothing of it is marked


def test_a_completion_that_is_being_overwritten(post: Post):
    """Its length may be another message's already: the NIC says so before it writes the rest."""
    a, b = post.pair(4)
    post.alone(post.receiving(b, 0), post.sending(a, 0, 20), {"what": "wait_all", "qp": a})
    assert post.alone({"what": "recv_wait", "qp": b, "ticket": 0}) == [20]
    assert b.qp.receive_cq is not None
    view(b.qp.receive_cq.ring_address, 64)[63] = 0xF0
    assert post.alone({"what": "recv_wait", "qp": b, "ticket": 0}) == [EOVERFLOW]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
def test_receives_of_a_queue_that_has_failed(post: Post, quiet, sharing):
    """Those of a shared queue stay there for others, so that no completion ends the wait of a queue pair in error."""
    _, b = post.pair(4, srq=post.srq(4), timeout=20)
    bad = post.sending(b, 0, 8, lkey=0)
    calls: list[Call] = [post.receiving(b, 0), bad, {"what": "wait_all", "qp": b}, {"what": "recv_next", "qp": b}]
    started = time.monotonic()
    assert post.alone(*calls, sharing=sharing) == [0, 0, EIO, EIO]
    assert time.monotonic() - started < 15


FAULTY: dict[str, tuple[Callable[[Post], Call], Syndrome, Syndrome]] = {
    "too short": (lambda post: {"nbytes": 10}, Syndrome.LOCAL_LENGTH, Syndrome.REMOTE_INVAL_REQ),
    "no key": (lambda post: {"lkey": 0}, Syndrome.LOCAL_PROT, Syndrome.REMOTE_OP),
    "out of bounds": (lambda post: {"laddr": post.there.address + NBYTES - 5}, Syndrome.LOCAL_PROT, Syndrome.REMOTE_OP),
}


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("fault", FAULTY)
def test_receives_that_fail(post: Post, quiet, fault, shared):
    """EIO for that receive and those behind it, the cause in `last_error`; those before it are as they were."""
    change, syndrome, told = FAULTY[fault]
    srq = post.srq(4) if shared else None
    a, b = post.pair(4, **({"srq": srq} if shared else {}))
    receives = [post.receiving(b, n) for n in range(4)]
    receives[2] |= change(post)
    post.alone(*receives)
    sends = [post.sending(a, n, 30) for n in range(4)]
    results = post.alone(*sends, *({"what": "wait", "qp": a, "ref": n} for n in range(4)))
    assert results[4:] == [OK, OK, EIO, EIO]
    wait = "recv_next" if shared else "recv_wait"
    waits = [{"what": wait, "qp": b, "ticket": n} for n in range(4)]
    expected = [0, 1, EIO, EIO] if shared else [30, 30, EIO, EIO]
    assert post.alone(*waits, sharing=GPU) == expected
    assert post.alone(waits[2], sharing=EXCLUSIVE) == [EIO]  # and again
    ours, theirs = b.last_error(), a.last_error()
    assert ours is not None
    assert theirs is not None
    assert (ours.index, ours.syndrome, ours.state) == (2, syndrome, QpState.ERR)
    assert (theirs.index, theirs.syndrome) == (2, told)
    for n in range(2):
        assert np.array_equal(post.place(n, 30), post.message(n, 30))


def test_what_is_flushed(post: Post, quiet):
    """A queue that goes to ERR flushes its receives, also those that are posted then."""
    a, b = post.pair(4)
    post.alone(post.receiving(b, 0), post.receiving(b, 1))
    waiting = post.start({"what": "recv_wait", "qp": b, "ticket": 1}, {"what": "recv_next", "qp": b})
    b.qp.to_error()
    assert waiting.end().ravel().tolist() == [EIO, EIO]
    error = b.last_error()
    assert error is not None
    assert (error.index, error.syndrome, error.state) == (0, Syndrome.WR_FLUSH, QpState.ERR)
    waits = [{"what": "recv_wait", "qp": b, "ref": 0}, {"what": "recv_wait_all", "qp": b}]
    assert post.alone(post.receiving(b, 2), *waits) == [2, EIO, EIO]
    for end in (a, b):
        end.qp.reset()
        end.reset()
    assert b.last_error() is None
    post.connect(a, b)
    calls = [post.receiving(b, 0), post.sending(a, 0, 12), {"what": "recv_wait", "qp": b, "ref": 0}]
    assert post.alone(*calls) == [0, 0, 12]


def test_the_first_error_is_kept_when_receives_are_flushed(post: Post, quiet):
    """The cause is a send, whose CQE is in another queue than those of the receives."""
    a, _ = post.pair(4)
    send = post.sending(a, 0, 8, lkey=0)
    assert post.alone(post.receiving(a, 0), send, {"what": "wait", "qp": a, "ref": 1}) == [0, 0, EIO]
    look = {"what": "recv_poll", "qp": a, "ticket": 0}  # EIO by a CQE only
    until(lambda: post.alone(look, sharing=GPU) == [EIO], "the flush")
    error = a.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, Syndrome.LOCAL_PROT)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("sharing", [EXCLUSIVE, CTA, GPU])
def test_deadlines(post: Post, sharing, shared):
    """No message comes: each kind of wait ends by the queue's deadline."""
    srq = post.srq(4) if shared else None
    _, b = post.pair(4, timeout=0.1, **({"srq": srq} if shared else {}))
    waits: list[Call] = [
        {"what": "recv_wait", "qp": b, "ticket": 0}, {"what": "recv_next", "qp": b}, {"what": "recv_wait_all", "qp": b},
    ]
    started = time.monotonic()
    results = post.alone(post.receiving(b, 0), *waits, sharing=sharing)
    assert results == [0, ETIMEDOUT, ETIMEDOUT, EINVAL if shared else ETIMEDOUT]
    assert 0.2 < time.monotonic() - started < 10
    negative = post.alone(*({"what": "recv_wait", "qp": b, "ticket": t} for t in (ENOBUFS, EINVAL, UNTOUCHED)))
    assert negative == [ENOBUFS, EINVAL, UNTOUCHED]  # handed back
