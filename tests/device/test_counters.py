"""Counted operations: the NIC counts those that are complete, by threads, warps and blocks, across resets."""

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest

from counting import COUNTERS, NBYTES, OLD, PLACE, Counting, opened
from device_programs import BLOCK, CTA, EXCLUSIVE, GIB, GPU, SCOPES, THREAD, WARP, Call, run, start
from gpunetio import ExportedQp, Gpu, MemType, device, verbs
from gpunetio.formats.cqe import Syndrome
from nic_rig import until

DEPTH = 64


@pytest.fixture(
    scope="module",
    params=[(1, False), (1, True), (4, False), pytest.param((0, False), marks=pytest.mark.gpu, id="cuda")],
    ids=lambda p: f"host{p[0]}{'-collapsed' * p[1]}",
)
def counting(request: pytest.FixtureRequest) -> Iterator[Counting]:
    """On warps of so many lanes, with CQs that are rings or collapsed."""
    lanes, collapsed = request.param
    logger = logging.getLogger("gpunetio.nic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with Gpu("host", warp=lanes) if lanes else Gpu() as gpu, opened(gpu, DEPTH, collapsed) as c:
        yield c
    logger.setLevel(level)


def wait_steps(qp: ExportedQp, companion: ExportedQp, threads: int, ref: int, **modes: object) -> list[list[Call]]:
    """Wait for one's own ticket on the main queue, then for all that the companion has: before others go on."""
    return [
        [{"what": "wait", "qp": qp, "ref": ref, **modes}] * threads,
        [{"what": "wait_all", "qp": companion, **modes}] * threads,
        [{"what": "barrier"}] * threads,
    ]


FUNCTIONS = ("put_counter", "get_counter", "p_counter", "signal_counter", "put_signal_counter")
WQES = {"put_signal_counter": 2}


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES, ids=SCOPES.get)
def test_every_function_counts(counting: Counting, scope):
    """The operation is done, its counter is raised by as much as was asked, the old count comes back."""
    c, lanes = counting, counting.gpu.warp
    c.begin_anew()
    threads = lanes if scope == WARP or lanes > 1 else 3
    sharing = GPU if scope == THREAD else CTA
    program: list[list[Call]] = []
    here, there = c.here.array.copy(), c.there.array.copy()
    words, old = there[COUNTERS:].view(np.int64), here[OLD:].view(np.int64)
    for what in (*FUNCTIONS, *FUNCTIONS[::-1]):
        step = []
        for t in range(threads):
            at, nbytes = t * PLACE, 0 if what == "put_counter" and t % 2 else 1 + (13 * t + 7 * len(program)) % 8
            call = c.keys(t, counter=t, nbytes=nbytes, value=1 << t, counter_value=3 + t)
            signalled = slice(at + 128, at + 136)
            if what in ("put_counter", "put_signal_counter"):
                there[at : at + nbytes] = here[at : at + nbytes]
            elif what == "get_counter":
                here[at : at + nbytes] = there[at : at + nbytes]
            elif what == "p_counter":
                there[at : at + nbytes] = list((1 << t).to_bytes(8, "little"))[:nbytes]
            if "signal" in what:
                here[at + 136 : at + 144] = there[signalled]
                there[signalled].view(np.int64)[0] += 1 << t
            old[t] = words[t]
            words[t] += 3 + t
            step.append(call | {"what": what})
        program += [step, *wait_steps(c.group.main, c.group.companion, threads, len(program), scope=scope)]
    results = run(c.gpu, program, sharing=sharing, scope=scope)
    per_lap = 0
    for i, what in enumerate((*FUNCTIONS, *FUNCTIONS[::-1])):
        tickets, waited, counted = results[4 * i : 4 * i + 3]
        assert not waited.any()
        assert not counted.any()
        wqes = WQES.get(what, 1)
        assert per_lap <= tickets.min()
        if scope != THREAD:
            assert tickets.tolist() == [per_lap + wqes * (t + 1) - 1 for t in range(threads)]
            per_lap += wqes * threads
    assert np.array_equal(c.there.array, there)
    assert np.array_equal(c.here.array, here)
    done = 2 * len(FUNCTIONS) * threads
    assert c.group.companion.indices()["completed"] == 2 * done
    assert c.group.main.indices()["completed"] == done + 2 * threads


@pytest.mark.slow  # all counted functions in one kernel take 25 s to compile
def test_bad_arguments_are_not_counted(counting: Counting):
    """In a group the others' operations are counted; alone nothing is posted, on neither queue."""
    c, lanes = counting, counting.gpu.warp
    c.begin_anew()
    bads: dict[str, Call] = {
        "put_counter": {"nbytes": GIB + 1}, "get_counter": {"nbytes": -1}, "p_counter": {"nbytes": 9},
        "put_signal_counter": {"nbytes": -1},
    }
    steps: list[list[Call]] = []
    for i, (what, bad) in enumerate(bads.items()):
        calls = [c.keys(t, nbytes=4) | {"what": what} | (bad if t == i % lanes else {}) for t in range(lanes)]
        alone = {**c.keys(), "what": what, **bad, "scope": THREAD, "nbytes": -1}
        steps += [calls, *wait_steps(c.group.main, c.group.companion, lanes, 5 * i), [alone] * lanes]
    results = run(c.gpu, steps, sharing=GPU, scope=BLOCK)
    for i in range(len(bads)):
        own = np.arange(lanes) == i % lanes
        posted, waited, all_done, _, alone = results[5 * i : 5 * i + 5]
        assert (posted[own] == device.EINVAL).all()
        assert (posted[~own] >= 0).all()
        assert waited.tolist() == [device.EINVAL if mine else device.OK for mine in own]
        assert not all_done.any()
        assert (alone == device.EINVAL).all()
    assert c.counter() == len(bads) * (lanes - 1)


def test_only_what_is_complete_is_counted(counting: Counting):
    """While the main queue stands still at its peer, its counter does, too: the companion's atomic waits in the NIC."""
    c = counting
    c.begin_anew()
    # A SEND that finds no receive is repeated for ever by a patient queue, and holds up what is behind it.
    c.reset(c.group.main, c.peers[0])
    c.group.main.connect(c.peers[0], rnr_retry=7, min_rnr_timer=1)
    program: list[list[Call]] = [
        [c.keys(nbytes=8, what="put_counter")],
        [c.keys(nbytes=8, what="send")],
        [c.keys(nbytes=8, what="put_counter")],
        [c.keys(nbytes=8, what="signal_counter")],
    ]
    assert run(c.gpu, program, sharing=EXCLUSIVE).ravel().tolist() == [0, 1, 2, 3]
    until(lambda: c.counter() == 1, "the first put to be counted")
    assert not c.there.array[128:136].any()
    time.sleep(0.02)
    assert c.counter() == 1


@pytest.mark.parametrize("what", FUNCTIONS)
def test_each_operation_waits_for_its_own_completion(gpu: Gpu, what):
    """Those before it are complete, and it is not, as its peer stands still on another NIC: it is not counted."""
    with opened(gpu, DEPTH, False) as c, verbs.open("soft1") as far:
        far_pd = far.create_pd()
        peer, target = gpu.create_qp(far_pd, 8), gpu.alloc(NBYTES, MemType.CPU_GPU)
        mr = far_pd.register(target)
        c.group.main.connect(peer)
        c.group.companion.connect(c.peers[1])
        nic = far.provider.nic  # type: ignore[attr-defined]
        there = {"raddr": mr.iova, "rkey": mr.rkey, "sig_raddr": mr.iova + 128, "sig_rkey": mr.rkey}
        call = c.keys(nbytes=8, what=what, **there)
        done: list[list[Call]] = [[call], [{"what": "wait_all", "qp": c.group.companion}]]
        assert run(c.gpu, done, sharing=EXCLUSIVE)[1, 0] == device.OK
        assert c.counter() == 1
        nic.pause()
        until(lambda: nic.record["paused"], "the peer to stand still")
        try:
            run(c.gpu, [[call]], sharing=EXCLUSIVE)
            time.sleep(0.02)
            assert c.counter() == 1
        finally:
            nic.resume()
        assert run(c.gpu, done[1:], sharing=EXCLUSIVE)[0, 0] == device.OK
        assert c.counter() == 2
        peer.close()


def refuse_three(c: Counting, what: str) -> None:
    """Post operations with a wrong key: the main queue fails, the companion is flushed, and the counter stays."""
    refused = c.keys(nbytes=8, what=what) | {"rkey": 0, "sig_rkey": 0}
    waits: list[list[Call]] = [[{"what": "wait_all", "qp": qp}] for qp in (c.group.main, c.group.companion)]
    assert run(c.gpu, [[refused]] * 3 + waits, sharing=GPU).ravel().tolist()[3:] == [device.EIO] * 2
    assert c.counter() == 0
    main, companion = c.group.main.last_error(), c.group.companion.last_error()
    assert main is not None
    assert companion is not None
    assert companion.syndrome == Syndrome.WR_FLUSH
    if not c.group.main.cq.collapsed:  # where the flush errors have overwritten the first one
        assert main.syndrome == Syndrome.REMOTE_ACCESS


@pytest.mark.parametrize(  # each has a kernel of its own to compile
    "what", [pytest.param(what, marks=pytest.mark.slow if i else ()) for i, what in enumerate(FUNCTIONS)]
)
def test_failed_operations_are_not_counted(counting: Counting, what):
    """As on a ConnectX-7: an error of the main queue flushes the companion (NVIDIA/nccl#2383)."""
    counting.begin_anew()
    refuse_three(counting, what)


def test_failed_operations_of_another_nic_are_not_counted(counting: Counting):
    c = counting
    c.begin_anew()
    with verbs.open("soft1") as far, c.gpu.create_qp(far.create_pd(), 8) as peer:
        c.reset(c.group.main)
        c.group.main.connect(peer)
        refuse_three(c, "put_counter")
        c.reset(c.group.main)


def test_a_failure_after_a_success(counting: Counting):
    """What was complete before the failure is counted, and so is what follows the reset of both queues."""
    c = counting
    c.begin_anew()
    good = c.keys(nbytes=8, what="put_counter")
    steps = [[good], *wait_steps(c.group.main, c.group.companion, 1, 0), [good | {"rkey": 0}]]
    steps.append([{"what": "wait_all", "qp": c.group.companion}])
    assert run(c.gpu, steps, sharing=GPU).ravel().tolist()[-1] == device.EIO
    assert c.counter() == 1
    c.reset(c.group.main, c.group.companion, *c.peers)
    for end, peer in zip((c.group.main, c.group.companion), c.peers, strict=True):
        end.connect(peer)
    again = run(c.gpu, [[good], *wait_steps(c.group.main, c.group.companion, 1, 0)], sharing=GPU).ravel()
    assert not again.any()
    assert c.counter() == 2


def test_errors_of_the_companion_are_its_own(counting: Counting):
    """A counter that cannot be reached fails the companion; the operation itself is done."""
    c = counting
    c.begin_anew()
    program: list[list[Call]] = [
        [c.keys(nbytes=8, what="put_counter", counter_rkey=0)],
        [{"what": "wait", "qp": c.group.main, "ref": 0}],
        [{"what": "wait_all", "qp": c.group.companion}],
    ]
    assert run(c.gpu, program, sharing=GPU).ravel().tolist() == [0, device.OK, device.EIO]
    error = c.group.companion.last_error()
    assert error is not None
    if not c.group.companion.cq.collapsed:
        assert error.index == 1
    assert error.syndrome == Syndrome.REMOTE_ACCESS
    assert np.array_equal(c.there.array[:8], c.here.array[:8])
    assert c.group.main.last_error() is None
    # Once the companion's ring is full of what has failed, nothing is posted on the main queue without being counted.
    steps = [[c.keys(nbytes=8, what="put_counter")] for _ in range(DEPTH)]
    results = run(c.gpu, steps, sharing=GPU).ravel()
    assert results[-1] == device.EIO
    posted = int((results >= 0).sum())
    assert c.group.main.indices()["reserved"] == 1 + posted
    assert c.group.companion.indices()["reserved"] == 2 + 2 * posted


def test_a_reset_keeps_the_count_right(counting: Counting):
    """WAIT names the completion that the operation will have, whatever each queue has done in lives before."""
    c = counting
    c.begin_anew()
    total = 0
    lives = ((1, ()), (DEPTH + 5, (0,)), (3, (1,)), (2 * DEPTH, (0, 1)), (DEPTH // 2, (0,)), (7, ()))
    for count, again in lives:
        step = c.keys(nbytes=8, what="put_counter")
        program: list[list[Call]] = [[step] for _ in range(count)]
        program += wait_steps(c.group.main, c.group.companion, 1, count - 1)
        results = run(c.gpu, program, sharing=EXCLUSIVE)[:, 0]
        assert (results[:-3] >= 0).all()
        assert results[-3:-1].tolist() == [device.OK, device.OK]
        total += count
        assert c.counter() == total
        for i in again:
            end, peer = (c.group.main, c.group.companion)[i], c.peers[i]
            c.reset(end, peer)
            end.connect(peer)


@pytest.mark.parametrize("depth", [2, 8])
def test_threads_share_a_small_companion(gpu: Gpu, depth):
    """However their reservations on the two queues interleave, nobody waits for room behind who waits for him."""
    with opened(gpu, depth, False) as c:
        c.begin_anew()
        threads, rounds = 6, 60
        calls = [c.keys(t, nbytes=8, what="put_counter") for t in range(threads)]
        program = [calls] * rounds + [[{"what": "wait_all", "qp": c.group.companion}] * threads]
        results = run(gpu, program, sharing=GPU)
        assert sorted(results[:-1].ravel().tolist()) == list(range(threads * rounds))
        assert not results[-1].any()
        assert c.counter() == threads * rounds


def test_a_stalled_engine_counts_nothing(counting: Counting, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio")
    c = counting
    c.begin_anew()
    with c.gpu.create_qp_group(c.pd, 8, timeout=0.1) as group:
        c.reset(*c.peers)
        group.main.connect(c.peers[0])
        group.companion.connect(c.peers[1])
        c.nic.pause()
        until(lambda: c.nic.record["paused"], "the NIC to stand still")
        try:
            keys = {"qp": group.main, "companion": group.companion}
            steps = [[c.keys(nbytes=8, what="put_counter") | keys] for _ in range(5)]
            started = start(c.gpu, steps, sharing=EXCLUSIVE)
            assert started.end().ravel().tolist() == [0, 1, 2, 3, device.ETIMEDOUT]
            assert c.counter() == 0
        finally:
            c.nic.resume()
        until(lambda: c.counter() == 4, "what was posted to be counted")
        c.reset(*c.peers)
