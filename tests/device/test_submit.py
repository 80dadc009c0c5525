"""How posts are announced: every handler and every form of submit, collapsed CQs, and the protocol of shared queues."""

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_programs import BLOCK, CTA, EXCLUSIVE, GPU, THREAD, WARP, Call, run, start
from gpunetio import CqOverrun, ExportedQp, Gpu, MemType, NicHandler, SendDbrModeExt, device, verbs
from gpunetio.device.library import foreign_kernels
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from gpunetio.gpu import export
from nic_rig import until, view
from pair import Pair, make_pair
from structures import changed
from submit_kernels import BY_FLAME, BY_HAND, BY_SUBMIT, BY_WARP_FLAME, submit_each, submit_now, submit_together

pytestmark = pytest.mark.host_memory  # it looks at rings and records

DEPTH = 16
OK, EIO, EBUSY, ETIMEDOUT = device.OK, device.EIO, device.EBUSY, device.ETIMEDOUT
AUTO, PROXY, DB, BF, NO_DBR = NicHandler
EMULATED = {"send_dbr_mode": SendDbrModeExt.NO_DBR_SW_EMULATED}
HANDLERS = {
    "db": {"nic_handler": DB}, "bf": {"nic_handler": BF}, "proxy": {"nic_handler": PROXY},
    "no_dbr": {"send_dbr_mode": SendDbrModeExt.NO_DBR_HW}, "emulated": EMULATED,
    "proxy no_dbr": {"nic_handler": PROXY, "send_dbr_mode": SendDbrModeExt.NO_DBR_HW},
}


def record_of(queue: ExportedQp) -> int:
    """The send word of its doorbell record."""
    return int.from_bytes(bytes((ctypes.c_uint8 * 4).from_address(queue.qp.dbr_address + 4)), "big")


@pytest.fixture
def plain(gpu: Gpu) -> Iterator[Pair]:
    """A `Pair` whose first queue is to be replaced."""
    with verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu)
        yield pair
        pair.a.close()
        pair.b.close()


def made(pair: Pair, depth: int = DEPTH, **options) -> ExportedQp:
    """A queue with these options in the place of the pair's first."""
    if pair.gpu.target == "cuda" and EMULATED.items() <= options.items():  # where the CPU sees the indices
        options |= {"queue_memory": "cpu_gpu", "nic_handler": DB}
    pair.a.close()
    pair.b.qp.reset()
    pair.b.reset()
    pair.a = pair.gpu.create_qp(pair.pd, depth, **options)
    pair.a.connect(pair.b, rnr_retry=2, retry_cnt=2)
    pair.there.array[:] = 0
    return pair.a


def keys(pair: Pair) -> Call:
    return {
        "qp": pair.a, "raddr": pair.there.address, "rkey": pair.there_mr.rkey, "laddr": pair.here.address,
        "lkey": pair.here_mr.lkey,
    }


# --- handlers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collapsed", [False, True], ids=["ring", "collapsed"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_every_handler(plain: Pair, handler, collapsed):
    """The bytes arrive in every sharing mode and scope, and the record is kept by whoever is to keep it."""
    pair, nbytes, rounds = plain, 24, 40
    width = pair.gpu.warp
    for sharing, scope, threads in ((EXCLUSIVE, THREAD, 1), (CTA, BLOCK, 3), (GPU, WARP, width), (GPU, THREAD, 3)):
        queue = made(pair, max(DEPTH, width), cq_collapsed=collapsed, **HANDLERS[handler])
        program: list[list[Call]] = [
            [
                keys(pair) | {
                    "what": "put", "nbytes": nbytes, "raddr": pair.there.address + nbytes * (i * threads + t),
                    "laddr": pair.here.address + nbytes * (i * threads + t),
                } for t in range(threads)
            ] for i in range(rounds)
        ]
        program += [[{"what": "wait", "ref": rounds - 1, "qp": queue}] * threads]
        results = run(pair.gpu, program, sharing=sharing, scope=scope)
        total = rounds * threads
        assert sorted(results[:-1].ravel().tolist()) == list(range(total))
        assert not results[-1].any()
        assert np.array_equal(pair.there.array[: total * nbytes], pair.here.array[: total * nbytes])
        assert not pair.there.array[total * nbytes :].any()
        assert queue.indices()["submitted"] == queue.indices()["completed"] == total
        until(lambda queue=queue, total=total: record_of(queue) == (0 if "no_dbr" in handler else total), "the record")


def test_a_proxy_by_hand(plain: Pair):
    """Nothing reaches the NIC before `progress`, and all that was announced does then."""
    pair = plain
    queue = made(pair, nic_handler=PROXY, proxy_service=False)
    steps = [[keys(pair) | {"what": "put", "nbytes": 8}] for _ in range(5)]
    started = start(pair.gpu, [*steps, [{"what": "wait", "ref": 4, "qp": queue}]], sharing=GPU)
    until(lambda: queue.indices()["submitted"] == 5, "the kernel to announce")
    assert not started.launch.wait(0.02)
    assert int(pair.nic.qps[queue.qpn]["sq_pi"]) == 0
    assert queue.progress()
    assert started.end()[-1, 0] == OK
    assert not queue.progress()
    assert queue.indices()["forwarded"] == record_of(queue) == 5


# --- forms of submit -------------------------------------------------------------------------------------------------


def submit(pair: Pair, how: int, rounds: int, *, sharing=EXCLUSIVE, code_opt=0, sync=device.SYNC_GPU, warps=1):
    """Run `submit_each` by one-warp blocks: the statuses of the first lanes."""
    return pair.run(
        submit_each, 32, rounds, how, sharing, code_opt, sync, grid=warps, block=pair.gpu.warp
    )[:: pair.gpu.warp].tolist()


def arrived(pair: Pair, pieces: int) -> bool:
    nbytes = 32 * pieces
    return np.array_equal(pair.there.array[:nbytes], pair.here.array[:nbytes]) and not pair.there.array[nbytes:].any()


@pytest.fixture(params=[1, 4, 32, pytest.param(0, marks=pytest.mark.gpu, id="cuda")], ids=lambda n: f"host{n}")
def warped(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A `Pair` whose first queue has a BlueFlame register, on warps of so many lanes."""
    with Gpu("host", warp=request.param) if request.param else Gpu() as gpu, verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu)
        made(pair, nic_handler=BF)
        yield pair
        pair.a.close()
        pair.b.close()


@pytest.mark.soft_nic
@pytest.mark.parametrize("how", [BY_FLAME, BY_WARP_FLAME], ids=["thread", "warp"])
def test_blueflame(warped: Pair, how):
    """The WQE itself is in the register, but for what the doorbell behind it has overwritten."""
    pair, warps = warped, 1 if warped.gpu.warp == 32 else 3
    assert submit(pair, how, 1) == [OK]
    assert arrived(pair, 1)
    wqe, register = view(pair.a.qp.sq_address, 64), view(pair.a.qp.doorbell_register, 64)
    assert np.array_equal(register[8:], wqe[8:])
    assert register[:8].tolist() == [0, 0, 1, 0, *(pair.a.qpn << 8).to_bytes(4, "big")]
    assert record_of(pair.a) == 1
    rounds = 5 if warps == 1 else 30
    made(pair, nic_handler=BF)
    assert submit(pair, how, rounds, sharing=GPU, warps=warps) == [OK] * warps
    assert arrived(pair, rounds * warps)
    assert pair.a.indices()["submitted"] == record_of(pair.a) == rounds * warps


@pytest.mark.parametrize("handler", ["db", "proxy", "no_dbr"])
@pytest.mark.parametrize("how", [BY_FLAME, BY_WARP_FLAME], ids=["thread", "warp"])
def test_blueflame_without_its_register_is_a_doorbell(plain: Pair, how, handler):
    queue = made(plain, **HANDLERS[handler])
    assert submit(plain, how, 20, sharing=GPU) == [OK]
    assert arrived(plain, 20)
    if handler != "proxy":
        assert not view(queue.qp.doorbell_register, 64)[8:].any()


@pytest.mark.parametrize("sync", [device.SYNC_SYS, device.SYNC_GPU, device.SYNC_CTA, device.SYNC_THREAD])
@pytest.mark.parametrize("code_opt", [device.DEFAULT, device.ASYNC_STORE_RELEASE], ids=["fence", "async"])
@pytest.mark.parametrize("how", [BY_SUBMIT, BY_HAND], ids=["submit", "ring_db"])
def test_fences_before_the_doorbell(plain: Pair, how, code_opt, sync):
    """Whatever orders the WQE before the doorbell. (On a GPU the weaker ones are for who has fenced already.)"""
    made(plain)
    assert submit(plain, how, DEPTH, code_opt=code_opt, sync=sync) == [OK]
    until(lambda: arrived(plain, DEPTH), "the bytes")
    assert record_of(plain.a) == DEPTH


@pytest.mark.parametrize("how", [BY_SUBMIT, BY_FLAME, BY_WARP_FLAME], ids=["submit", "thread", "warp"])
@pytest.mark.parametrize("sharing", [EXCLUSIVE, CTA, GPU])
@pytest.mark.parametrize("handler", ["db", "bf", "proxy", "no_dbr"])
def test_posts_that_are_not_announced(plain: Pair, handler, sharing, how):
    """SKIP_DB_RINGING leaves them to the next who rings, but not to one that announces nothing."""
    pair = plain
    queue = made(pair, **HANDLERS[handler])
    assert pair.run(submit_now, 0, sharing)[0] == OK
    assert submit(pair, how, 7, sharing=sharing, code_opt=device.SKIP_DB_RINGING) == [OK]
    indices = queue.indices()
    assert (indices["ready"], indices["submitted"], record_of(queue)) == (7, 0, 0)
    time.sleep(2e-3)
    assert int(pair.nic.qps[queue.qpn]["sq_pi"]) == 0
    assert not pair.there.array.any()
    assert pair.run(submit_now, 7, sharing)[0] == OK
    assert arrived(pair, 7)
    assert pair.run(submit_now, 7, sharing)[0] == OK  # again, which does no harm
    for less in (3, 0, -1):
        assert pair.run(submit_now, less, sharing)[0] == OK
    assert queue.indices()["submitted"] == 7
    assert submit(pair, how, 1, sharing=sharing) == [OK]  # and later ones are announced as ever
    assert queue.indices()["submitted"] == 8


def test_operations_that_are_not_announced(plain: Pair):
    """So do the one-sided functions; the one that rings announces them all."""
    pair = plain
    queue = made(pair)
    for sharing in (EXCLUSIVE, GPU):
        quiet = {"what": "signal", "sig_raddr": pair.there.address, "sig_rkey": pair.there_mr.rkey, "value": 1,
                 "sig_laddr": pair.here.address, "sig_lkey": pair.here_mr.lkey}
        program: list[list[Call]] = [
            [quiet | {"code_opt": device.SKIP_DB_RINGING}], [quiet | {"code_opt": device.SKIP_DB_RINGING}],
            [{"what": "poll_one", "ticket": queue.indices()["reserved"]}], [quiet], [{"what": "wait", "ref": 3}],
        ]
        results = run(pair.gpu, program, qp=queue, sharing=sharing).ravel().tolist()
        assert results[2:] == [EBUSY, results[1] + 1, OK]
    assert pair.there.array[:8].view(np.int64)[0] == 6


@pytest.mark.parametrize("collapsed", [False, True], ids=["ring", "collapsed"])
def test_posts_that_do_not_ask_for_room(plain: Pair, collapsed):
    """SKIP_AVAILABILITY_CHECK is for who knows better: a ring's worth between waits."""
    pair = plain
    queue = made(pair, cq_collapsed=collapsed)
    program: list[list[Call]] = []
    for lap in range(5):
        for i in range(DEPTH):
            at = 8 * (DEPTH * lap + i)
            program.append([keys(pair) | {
                "what": "put", "nbytes": 8, "raddr": pair.there.address + at, "laddr": pair.here.address + at,
                "code_opt": device.SKIP_AVAILABILITY_CHECK,
            }])
        program.append([{"what": "wait", "ref": len(program) - 1}])
    results = run(pair.gpu, program, qp=queue, sharing=EXCLUSIVE).ravel()
    assert not results[DEPTH :: DEPTH + 1].any()
    assert np.array_equal(pair.there.array[: 8 * 5 * DEPTH], pair.here.array[: 8 * 5 * DEPTH])


@pytest.mark.parametrize("handler", ["db", "no_dbr", "proxy", "bf"])
@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
def test_several_queues_at_once(plain: Pair, sharing, handler):
    pair, count, nbytes = plain, 3, 100
    queues = [pair.gpu.create_qp(pair.pd, DEPTH, **HANDLERS[handler]) for _ in range(count)]
    for queue in queues:
        queue.connect(queue)
    with pair.gpu.alloc(64, MemType.CPU_GPU) as table, pair.gpu.alloc(64, MemType.CPU_GPU) as producers:
        table.array[: 8 * count].view(np.int64)[:] = [queue.device_address for queue in queues]
        for lap in range(3):
            pair.there.array[:] = 0
            with pair.gpu.alloc(8, MemType.CPU_GPU) as out:
                launch = submit_together[1, 1, pair.gpu](
                    table, producers, count, pair.there.address, pair.there_mr.rkey, pair.here.address,
                    pair.here_mr.lkey, nbytes, sharing, device.SYNC_GPU, 0, out,
                )
                assert launch.wait(60)
                assert out.array.view(np.int64)[0] == OK
            assert np.array_equal(pair.there.array[: nbytes * count], pair.here.array[: nbytes * count])
            assert [queue.indices()["submitted"] for queue in queues] == [lap + 1] * count
    for queue in queues:
        queue.close()


# --- completions -----------------------------------------------------------------------------------------------------


def test_what_is_a_completion(plain: Pair):
    """An entry is new when its owner bit is the lap's and it names the WQE; an invalid one never is."""
    queue = made(plain)
    ring = view(queue.cq.ring_address, DEPTH * 64).reshape(DEPTH, 64)
    cases = [  # index, what the entry names, its last byte, whether it is complete
        (0, 0, 0x00, OK), (0, 0, 0x01, EBUSY), (0, 1, 0x00, EBUSY), (0, 1 << 8, 0x00, EBUSY), (0, 0, 0xF0, EBUSY),
        (0, 0, 0xF1, EBUSY), (5, 5, 0x00, OK), (5, 5 + DEPTH, 0x00, EBUSY), (DEPTH - 1, DEPTH - 1, 0x00, OK),
        (5, 5, 0xD0, EIO), (5, 5, 0xE0, EIO), (5, 4, 0xD0, EBUSY), (DEPTH, DEPTH, 0x01, EBUSY),
    ]
    for index, named, op_own, status in cases:
        ring[:] = 0
        ring[:, 63] = 0xF1
        entry = ring[index % DEPTH]
        entry[60:62], entry[63] = list(named.to_bytes(2, "big")), op_own
        for sharing in (EXCLUSIVE, GPU):
            queue.qp.reset()
            queue.reset()
            with changed(queue) as (image, _):
                DEV_CQ.at(image, DEV_QP.cq_sq)["cqe_rsvd"] = 0
            got = run(plain.gpu, [[{"what": "poll_one", "ticket": index, "qp": queue}]], sharing=sharing)[0, 0]
            assert got == status, (index, named, hex(op_own))
            assert queue.indices()["completed"] == (index + 1 if status == OK else 0)


# --- collapsed completion queues -------------------------------------------------------------------------------------


def test_polling_a_collapsed_queue(plain: Pair):
    """One entry tells of all: what is before it is complete, what is behind it is not, what is not posted is not."""
    queue = made(plain, cq_collapsed=True)
    post = keys(plain) | {"what": "put", "nbytes": 8}
    calls: list[Call] = [
        {"what": "wait_all"}, {"what": "poll_one", "ticket": 0}, post, post, post, {"what": "wait", "ref": 3},
        {"what": "poll_one", "ticket": 0}, {"what": "poll_one", "ticket": 1}, {"what": "wait", "ref": 4},
        {"what": "poll_one", "ticket": 3}, {"what": "poll_one", "ticket": 1 << 16}, {"what": "poll", "ticket": 0},
        post, post, {"what": "poll", "ticket": 2}, {"what": "wait_all"},
    ]
    for sharing in (EXCLUSIVE, GPU):
        base = queue.indices()["completed"]
        shifted = [
            call | ({"ticket": call["ticket"] + base} if call["what"] == "poll_one" else {}) for call in calls
        ]
        if base:
            shifted = shifted[1:]
            shifted = [call | ({"ref": call["ref"] - 1} if "ref" in call else {}) for call in shifted]
        results = run(plain.gpu, [[call] for call in shifted], qp=queue, sharing=sharing).ravel().tolist()
        expected = [EBUSY, base, base + 1, base + 2, OK, OK, OK, OK, EBUSY, EBUSY, OK, base + 3, base + 4, OK, OK]
        assert results == ([] if base else [OK]) + expected
    assert queue.indices()["completed"] == 10


def test_a_collapsed_queue_of_one_entry(plain: Pair):
    """Its one entry tells of as many WQEs as the send queue holds."""
    depth, pd = 64, plain.pd
    cq = pd.ctx.create_cq(1, collapsed=True, overrun=CqOverrun.ENABLE, external_datapath=True)
    qp = pd.create_qp(sq_wr=depth, send_cq=cq, external_datapath=True)
    with plain.gpu.export_qp(qp) as queue:
        queue.connect(queue)
        put = keys(plain) | {"what": "put", "nbytes": 8, "qp": queue}
        calls: list[Call] = [put] * (2 * depth) + [{"what": "wait_all"}, {"what": "poll_one", "ticket": depth}]
        results = run(plain.gpu, [[call] for call in calls], qp=queue, sharing=GPU).ravel().tolist()
        assert results == [*range(2 * depth), OK, OK]
        calls = [put] * depth + [{"what": "sleep", "value": 50_000_000}, {"what": "wait", "ref": 0}]
        assert run(plain.gpu, [[call] for call in calls], qp=queue, sharing=GPU)[-1, 0] == OK


@pytest.mark.parametrize("sharing", [EXCLUSIVE, GPU])
def test_errors_of_a_collapsed_queue(plain: Pair, caplog, sharing):
    """They reach who waits for them or for what is behind them; of the NIC's entry only the last error is left."""
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    queue = made(plain, cq_collapsed=True)
    good = keys(plain) | {"what": "put", "nbytes": 8}
    bad = good | {"rkey": 0}
    program: list[list[Call]] = [[good], [{"what": "wait", "ref": 0}], [bad], [{"what": "wait", "ref": 2}]]
    assert run(plain.gpu, program, sharing=sharing, qp=queue).ravel().tolist() == [0, OK, 1, EIO]
    error = queue.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (1, Syndrome.REMOTE_ACCESS)
    program = [[good], [{"what": "wait", "ref": 0}], [{"what": "wait_all"}], [{"what": "wait", "ticket": 0}]]
    assert run(plain.gpu, program, sharing=sharing, qp=queue).ravel().tolist() == [2, EIO, EIO, OK]
    error = queue.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (1, Syndrome.REMOTE_ACCESS)


def test_deadline_of_a_collapsed_queue(plain: Pair, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio")
    queue = made(plain, cq_collapsed=True, timeout=1.0)
    plain.nic.pause()
    until(lambda: plain.nic.record["paused"], "the NIC to stand still")
    try:
        posts: list[list[Call]] = [[keys(plain) | {"what": "put", "nbytes": 8}] for _ in range(DEPTH + 1)]
        waits: list[list[Call]] = [[{"what": "wait", "ticket": 0}], [{"what": "wait_all"}]]
        results = run(plain.gpu, posts + waits, sharing=GPU, qp=queue).ravel().tolist()
        assert results == [*range(DEPTH), ETIMEDOUT, ETIMEDOUT, ETIMEDOUT]
    finally:
        plain.nic.resume()
    assert run(plain.gpu, [[{"what": "wait_all"}]], sharing=GPU, qp=queue)[0, 0] == OK
    assert set(queue.indices().values()) == {DEPTH}


# --- the protocol of shared queues -----------------------------------------------------------------------------------
#
# A model of device/qp.py and device/submit.py, in which every load, store and atomic is a step of its own, explored
# through all interleavings.


@dataclass(frozen=True, order=True)
class Thread:
    """Where a thread is. `first` is its batch's first slot, `target` what it announces, `fits` what its looks found.

    Threads that post `by_hand` mark their slots ready and submit them, as SKIP_DB_RINGING or code of one's own does.
    """

    left: int
    by_hand: bool = False
    step: str = "reserve"
    first: int = 0
    target: int = 0
    then: str = ""
    fits: bool = True


@dataclass(frozen=True)
class Queue:
    """The words that threads share, and what the NIC sees."""

    threads: tuple[Thread, ...]
    reserved: int = 0
    filled: int = 0  # a bit for each slot
    ready: int = 0
    word: int = 0
    pi: int = 0
    register: int = 0
    record: int = 0

    def moves(self, batch: int) -> Iterator["Queue"]:
        for number, thread in enumerate(self.threads):
            for after, changes in self.step(thread, batch):
                threads = (*self.threads[:number], after, *self.threads[number + 1 :])
                yield replace(self, threads=tuple(sorted(threads)), **changes)  # who is who makes no difference

    def step(self, t: Thread, batch: int) -> Iterator[tuple[Thread, dict[str, int]]]:
        """What thread `t` may do next, and what changes by it."""
        end = t.first + batch

        def go(step: str, **changes: int | str | bool) -> Thread:
            return replace(t, step=step, **changes)

        done = replace(t, step="reserve", left=t.left - 1, fits=True, first=0, target=0, then="")
        match t.step:
            case "reserve" if t.left:
                yield go("fill", first=self.reserved), {"reserved": self.reserved + batch}
            case "fill":
                filled = self.filled | (1 << end) - (1 << t.first)
                yield go("turn" if t.by_hand else "look at ready"), {"filled": filled}
            case "look at ready":
                yield go("look at word", fits=self.ready == t.first), {}
            case "look at word":
                yield go("look at reserved", fits=t.fits and self.word == 2 * t.first), {}
            case "look at reserved":
                fits = t.fits and self.reserved == end
                yield go("ring" if fits else "turn", target=end, then="note and hand on", fits=fits), {}
            case "turn" if self.ready == t.first:
                yield go("begin"), {"ready": end}
            case "begin":
                wanted = 2 * end - 1
                covered = self.word & 1 or self.word >= wanted
                yield done if covered else go("ring", target=end, then="note"), {"word": max(self.word, wanted)}
            case "ring":
                yield go("record"), {"register": t.target}
            case "record":
                yield go("again"), {"record": t.target}
            case "again":
                yield go(t.then), {"register": t.target}
            case "note":
                yield go("end"), {"pi": t.target}
            case "end":
                if self.word == 2 * t.target - 1:
                    yield done, {"word": 2 * t.target}
                else:
                    yield go("ring", target=(self.word + 1) >> 1), {}
            case "note and hand on":
                yield go("leave"), {"pi": t.target}
            case "leave":
                yield go("hand on"), {"word": 2 * t.target}
            case "hand on":
                yield done, {"ready": end}


RINGING = ("ring", "record", "again", "note", "end", "note and hand on", "leave")


@pytest.mark.parametrize(("kinds", "posts", "batch"), [
    ((False, False), 4, 1), ((False, True), 4, 1), ((True, True), 3, 1), ((False, False), 2, 2),
    ((False, False, False), 2, 1), ((False, False, True), 2, 1),
])
def test_every_interleaving_of_posts(kinds, posts, batch):
    """Nothing is announced before it is filled, records and indices never go back, and in the end all is announced."""
    total = len(kinds) * posts * batch
    begin = Queue(tuple(sorted(Thread(posts, by_hand) for by_hand in kinds)))
    reached, todo = {begin}, [begin]
    ends = 0
    while todo:
        state = todo.pop()
        following = list(state.moves(batch))
        for after in following:
            assert after.record >= state.record
            assert after.pi >= state.pi
            announced = (1 << max(after.register, after.record)) - 1
            assert after.filled & announced == announced
            assert sum(t.step in RINGING for t in after.threads) <= 1, "one thread rings at a time"
            if after not in reached:
                reached.add(after)
                todo.append(after)
        if not following:
            ends += 1
            assert all(t.left == 0 for t in state.threads), "a thread waits for ever"
            assert (state.register, state.record, state.pi, state.word) == (total, total, total, 2 * total)
    assert ends
    assert len(reached) > 200


WORDS = {"qp": 1 << 20, "side": 2 << 20, "record": 3 << 20, "register": 4 << 20}


@dataclass
class Queued:
    """The submit path as Python: `post`, with every access to the queue's memory in a list."""

    words: dict[int, int]
    stores: list[tuple[str, int]]

    def post(self, first: int, last: int) -> int:
        names = {
            WORDS["qp"] + DEV_QP.sq_ready_index: "ready", WORDS["side"] + DEV_SIDE.submit: "word",
            WORDS["qp"] + DEV_QP.sq_wqe_pi: "submitted", WORDS["record"]: "record", WORDS["register"]: "ring",
        }

        def load(address: int, *_: int) -> int:
            return self.words.get(address, 0)

        def store(address: int, value: int) -> None:
            self.words[address] = value
            self.stores.append((names[address], value))

        def fetch_max(address: int, value: int) -> int:
            found = load(address)
            store(address, max(found, value))
            return found

        def swap(address: int, old: int, new: int) -> int:
            found = load(address)
            if found == old:
                store(address, new)
            return found

        fakes = {
            "load_index": load, "ld64": load, "ld_fixed32": load, "ld_fixed64": load, "st64": store, "st_mmio64": store,
            "st_relaxed32": store, "st_relaxed64": store, "st_relaxed_gpu64": store, "fetch_max_gpu64": fetch_max,
            "cas_acq_rel_gpu64": swap, "be32": int, "pack64": lambda low, _: low,
            **dict.fromkeys(("fence_sys", "fence_release_cta", "fence_release_gpu", "fence_release_sys",
                             "fence_acquire_gpu", "fence_acquire_cta"), lambda: None),
        }
        module = vars(import_module("gpunetio.device.submit"))
        python: dict[str, Any] = dict(module)
        for name, value in module.items():
            if hasattr(value, "py_func"):
                python[name] = FunctionType(value.py_func.__code__, python, name, value.py_func.__defaults__)
        python.update(fakes)
        return python["post"](WORDS["qp"], first, last)


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_thread_with_others_behind_it_hands_on_before_it_rings(behind):
    """So nobody waits for a doorbell of somebody else's; alone, it rings at once, with no atomics."""
    first = 3
    queue = Queued({
        WORDS["qp"] + DEV_QP.side: WORDS["side"], WORDS["qp"] + DEV_QP.sq_dbrec: WORDS["record"],
        WORDS["qp"] + DEV_QP.sq_db: WORDS["register"], WORDS["qp"] + DEV_QP.nic_handler: int(DB),
        WORDS["qp"] + DEV_QP.sq_ready_index: first, WORDS["side"] + DEV_SIDE.submit: 2 * first,
        WORDS["qp"] + DEV_QP.sq_rsvd_index: first + 1 + behind,
    }, [])
    assert queue.post(first, first) == first
    end = first + 1
    rung = [("ring", end << 8), ("record", end), ("ring", end << 8)]
    if behind:
        assert queue.stores == [
            ("ready", end), ("word", 2 * end - 1), *rung, ("submitted", end), ("word", 2 * end)
        ]
    else:
        assert queue.stores == [*rung, ("submitted", end), ("word", 2 * end), ("ready", end)]


# --- a register that is memory, and no record -------------------------------------------------------------------------


@dataclass(frozen=True)
class Mailbox:
    """A queue without a record whose threads ring with plain stores, the NIC, and the watchdog beside them.

    `threads`: for each its step and the index that it announces. Each has filled its slot, and those before it theirs,
    as `mark_ready` sees to; the last one leaves its slot unannounced. `looked` is what the watchdog found submitted and
    owed by the NIC, when it looked the last time; `rings` is what it is about to ring for.
    """

    threads: tuple[tuple[str, int], ...]
    submitted: int = 0
    register: int = 0
    nic: int = 0
    looked: int = 0
    rings: int = 0

    def moves(self, watched: bool) -> Iterator["Mailbox"]:
        for number, (step, index) in enumerate(self.threads):
            after, changes = "done", {}
            if step == "submit":
                after = "ring" if self.submitted < index else "done"
                changes = {"submitted": max(self.submitted, index)}
            elif step == "ring":
                changes = {"register": index}
            else:
                continue
            threads = (*self.threads[:number], (after, index), *self.threads[number + 1 :])
            yield replace(self, threads=threads, **changes)
        yield replace(self, nic=max(self.nic, self.register))  # an index behind is an old ring
        if not watched:
            return
        if self.rings:
            yield replace(self, register=self.rings, rings=0, looked=0)
        elif self.submitted == self.nic:
            yield replace(self, looked=0)
        else:
            yield replace(self, looked=self.submitted, rings=self.submitted if self.looked == self.submitted else 0)


def explored(begin: Mailbox, watched: bool) -> dict[Mailbox, set[Mailbox]]:
    """Each state that can be reached, and those that may follow it."""
    following: dict[Mailbox, set[Mailbox]] = {}
    todo = [begin]
    while todo:
        state = todo.pop()
        if state not in following:
            following[state] = set(state.moves(watched)) - {state}
            todo += following[state]
    return following


@pytest.mark.parametrize("ringers", [2, 3, 4])
def test_every_interleaving_of_rings_without_a_record(ringers):
    """The register loses rings, the submitted index does not: from every state the NIC gets to hear of all."""
    threads = (*(("submit", index) for index in range(1, ringers + 1)), ("unannounced", ringers + 1))
    alone = explored(Mailbox(threads), watched=False)
    assert any(not after and state.nic < ringers for state, after in alone.items()), "so a ring can be lost"
    states = explored(Mailbox(threads), watched=True)
    assert all(state.nic <= state.submitted <= ringers for state in states), "nothing else is executed"
    ends = {state for state, after in states.items() if not after}
    assert ends
    assert all(state.nic == ringers for state in ends)
    leads: dict[Mailbox, list[Mailbox]] = {}
    for state, after in states.items():
        for one in after:
            leads.setdefault(one, []).append(state)
    good, todo = set(ends), list(ends)
    while todo:
        new = [state for state in leads.get(todo.pop(), ()) if state not in good]
        good.update(new)
        todo += new
    assert good == states.keys()


@pytest.mark.soft_nic
def test_a_ring_that_a_late_one_has_overwritten(plain: Pair):
    """Without a record it is repeated for what is submitted, and for nothing else that lies in the ring."""
    pair = plain
    queue = made(pair, send_dbr_mode=SendDbrModeExt.NO_DBR_HW)
    assert submit(pair, BY_SUBMIT, 3, code_opt=device.SKIP_DB_RINGING) == [OK]
    with foreign_kernels():
        with changed(queue) as (image, _):
            DEV_QP.at(image)["sq_wqe_pi"] = 2
            queue.ring_again(1)
        until(lambda: arrived(pair, 2), "the second")
        until(lambda: int(pair.nic.qps[queue.qpn]["sq_ci"]) == 2, "its completion")
        assert pair.gpu.watchdog.rung_again >= 1
        time.sleep(0.05)
    assert int(pair.nic.qps[queue.qpn]["sq_pi"]) == 2
    assert arrived(pair, 2)


@pytest.mark.soft_nic
@pytest.mark.parametrize(("producer", "rung"), [
    (0xFFFE, 0xFFFE), (0xFFFF, 0xFFFF), (0x10000, 0), (0x10001, 1), (0x1FFFF, 0xFFFF),
])
def test_a_ring_is_repeated_with_16_bits(plain: Pair, monkeypatch, producer, rung):
    """As in the first word of a control segment, which has the WQE index in 16 bits (PRM, Doorbell)."""
    queue, calls = made(plain, send_dbr_mode=SendDbrModeExt.NO_DBR_HW), []
    register = SimpleNamespace(ring_register=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(export, "doorbells", lambda: register)
    queue.ring_again(producer)
    assert calls == [(queue.qp.doorbell_register, rung, queue.qpn)]


@pytest.mark.soft_nic
@pytest.mark.parametrize("handler", HANDLERS)
def test_who_may_lose_rings(plain: Pair, handler):
    """Only a register that kernels ring, with nothing beside it."""
    assert made(plain, **HANDLERS[handler]).may_lose_rings == (handler == "no_dbr")


@pytest.mark.parametrize(("threads", "rounds"), [(2, 3), (3, 2)])
def test_every_interleaving_of_a_cq_record(threads, rounds):
    """`update_cq_record`: however late a store is, the record says in the end what was consumed."""
    # A thread: (rounds left, step, index loaded). The index is raised, loaded, stored, and loaded again.
    begin = (0, 0, ((rounds, "raise", 0),) * threads)
    reached, todo, ends = {begin}, [begin], 0
    while todo:
        ci, record, crowd = todo.pop()
        moved = False
        for number, (left, step, told) in enumerate(crowd):
            raised, stored = ci, record
            if step == "raise":
                if left == 0:
                    continue
                raised, after = ci + 1, (left - 1, "load", 0)
            elif step == "load":
                after = (left, "store", ci)
            elif step == "store":
                stored, after = told, (left, "look", told)
            else:
                after = (left, "raise", 0) if told == ci else (left, "store", ci)
            moved = True
            state = (raised, stored, (*crowd[:number], after, *crowd[number + 1 :]))
            if state not in reached:
                reached.add(state)
                todo.append(state)
        if not moved:
            ends += 1
            assert record == ci == threads * rounds
    assert ends == 1


def test_posts_of_many_threads_while_others_look(plain: Pair):
    """On the real thing: record and submitted index never go back while threads post, and end at the last one."""
    pair = plain
    queue = made(pair, 64)
    threads, rounds = 4, 400
    program: list[list[Call]] = [[keys(pair) | {"what": "put", "nbytes": 1}] * threads] * rounds
    seen: list[tuple[int, int]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append((record_of(queue), queue.indices()["submitted"]))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        results = run(pair.gpu, [*program, [{"what": "wait_all"}] * threads], qp=queue, sharing=GPU)
    finally:
        stop.set()
        looking.join()
    assert sorted(results[:-1].ravel().tolist()) == list(range(threads * rounds))
    assert all(a <= b for before, after in pairwise(seen) for a, b in zip(before, after))
    assert record_of(queue) == queue.indices()["submitted"] == threads * rounds
