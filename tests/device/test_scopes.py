"""One-sided operations by threads, warps and blocks, in every sharing mode: bytes, tickets, statuses."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from device_programs import BLOCK, CTA, EXCLUSIVE, GIB, GPU, SCOPES, THREAD, WARP, Call, run
from gpunetio import Gpu, MemType, device, verbs
from gpunetio.formats.cqe import Syndrome
from gpunetio.nic.engine.port import PortConfig
from nic_rig import until
from pair import Pair, make_pair

SHARING = {EXCLUSIVE: "exclusive", CTA: "cta", GPU: "gpu"}
DEPTH = 256
PLACE = 512  # bytes of a thread, in the memory of each end
WORD = 256  # where a thread's word for atomics is, in both; the old value comes to the word behind it


@pytest.fixture(
    scope="module",
    params=[1, 4, 32, pytest.param(0, marks=pytest.mark.gpu, id="cuda")],
    ids=lambda lanes: f"host{lanes}",
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A `Pair` on a place whose warps have so many lanes; for many tests, which leave its queues connected."""
    logger = logging.getLogger("gpunetio.nic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of what fails on purpose
    with Gpu("host", warp=request.param) if request.param else Gpu() as gpu, verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, DEPTH)
        yield opened
        opened.a.close()
        opened.b.close()
    logger.setLevel(level)


def begin_anew(pair: Pair) -> None:
    """Both queues as at first, with random bytes here and others there."""
    for end in (pair.a, pair.b):
        end.qp.reset()
        end.reset()
    pair.a.connect(pair.b, ack_timeout=8, retry_cnt=2, rnr_retry=2)
    random = np.random.default_rng(11)
    for memory in (pair.here, pair.there):
        memory.array[:] = random.integers(0, 256, memory.nbytes, np.uint8)


def modes(pair: Pair) -> list[tuple[int, int, int, int]]:
    """(scope, sharing, blocks, threads of a block) that are sensible there."""
    lanes = pair.gpu.warp
    few = 3 * lanes if lanes < 32 else lanes
    found = [
        (THREAD, CTA, 1, few), (THREAD, GPU, 2, lanes),
        (WARP, EXCLUSIVE, 1, lanes), (WARP, CTA, 1, few), (WARP, GPU, 2, lanes),
        (BLOCK, EXCLUSIVE, 1, few), (BLOCK, GPU, 2, lanes),
    ]
    if lanes == 1 or pair.gpu.target == "cuda":  # a block of the host has whole warps
        found.append((THREAD, EXCLUSIVE, 1, 1))
    if lanes == 32 and pair.gpu.target == "cpu":  # a barrier of so many threads takes long
        return [mode for mode in found if mode[0] == WARP and mode[1] != CTA]
    return found


@dataclass
class Expected:
    """What the memory of both ends must hold, and which calls post how many WQEs."""

    here: np.ndarray
    there: np.ndarray
    posted: dict[int, int] = field(default_factory=dict)  # by step

    @classmethod
    def of(cls, pair: Pair) -> "Expected":
        return cls(pair.here.array.copy(), pair.there.array.copy())

    def put(self, at: int, nbytes: int) -> None:
        self.there[at : at + nbytes] = self.here[at : at + nbytes]

    def get(self, at: int, nbytes: int) -> None:
        self.here[at : at + nbytes] = self.there[at : at + nbytes]

    def value(self, at: int, value: int, nbytes: int) -> None:
        self.there[at : at + nbytes] = list(value.to_bytes(8, "little"))[:nbytes]

    def add(self, word: int, value: int) -> None:
        """A signal to the word at `word`, whose old value comes to the word behind it at this end."""
        self.here[word + 8 : word + 16] = self.there[word : word + 8]
        there = self.there[word : word + 8].view(np.int64)
        there += value


VALUE = 0x1817161514131211


def program_of(pair: Pair, threads: int, expected: Expected) -> list[list[Call]]:
    """A step for each function, and one that waits for it; threads have places and sizes of their own."""
    steps: list[list[Call]] = []

    def step(what: str, wqes: int, wait: str = "wait", **each: object) -> None:
        expected.posted[len(steps)] = wqes
        calls = [
            {
                "what": what, "raddr": pair.there.address + t * PLACE, "laddr": pair.here.address + t * PLACE,
                "sig_raddr": pair.there.address + t * PLACE + WORD,
                "sig_laddr": pair.here.address + t * PLACE + WORD + 8,
                **{name: value(t) if callable(value) else value for name, value in each.items()},
            }
            for t in range(threads)
        ]
        steps.append(calls)
        if wait:
            steps.append([{"what": wait, "ref": len(steps) - 1} for _ in range(threads)])

    def size(t: int, most: int) -> int:
        return (37 * t + 5) % (most + 1)

    every = range(threads)
    step("put", 1, nbytes=lambda t: size(t, 200))
    for t in every:
        expected.put(t * PLACE, size(t, 200))
    step("put", 1, nbytes=0)
    step("get", 1, nbytes=lambda t: size(t + 3, 240))
    for t in every:
        expected.get(t * PLACE, size(t + 3, 240))
    step("get", 1, nbytes=0, blocking=1, wait="")
    step("get", 2, nbytes=lambda t: size(t + 1, 250), daddr=pair.here.address, dlkey=pair.here_mr.lkey, blocking=1,
         wait="")
    for t in every:
        expected.get(t * PLACE, size(t + 1, 250))
    step("p", 1, value=lambda t: VALUE + t, nbytes=lambda t: 1 + t % 8)
    for t in every:
        expected.value(t * PLACE, VALUE + t, 1 + t % 8)
    step("signal", 1, value=lambda t: 1000 + t)
    for t in every:
        expected.add(t * PLACE + WORD, 1000 + t)
    step("put_signal", 2, nbytes=lambda t: size(t, 100), value=lambda t: -t)
    for t in every:
        expected.put(t * PLACE, size(t, 100))
        expected.add(t * PLACE + WORD, -t)
    step("p_signal", 2, laddr=lambda t: ~VALUE ^ t, nbytes=lambda t: 1 + (t + 3) % 8, value=7)  # laddr is the number
    for t in every:
        expected.value(t * PLACE, (~VALUE ^ t) & (1 << 64) - 1, 1 + (t + 3) % 8)
        expected.add(t * PLACE + WORD, 7)
    step("mcst", 1, daddr=pair.here.address + 5, dlkey=pair.here_mr.lkey)
    step("fence", 1)
    step("get", 1, nbytes=64, wait="get_wait")
    for t in every:
        expected.get(t * PLACE, 64)
    return steps


def test_every_function(pair: Pair):
    """Each thread's own bytes are moved, and its tickets are those of its own WQEs."""
    keys = {
        "qp": pair.a, "rkey": pair.there_mr.rkey, "lkey": pair.here_mr.lkey,
        "sig_rkey": pair.there_mr.rkey, "sig_lkey": pair.here_mr.lkey,
    }
    for scope, sharing, grid, block in modes(pair):
        mode = f"{SCOPES[scope]} scope, {SHARING[sharing]} sharing, {grid} × {block} threads"
        begin_anew(pair)
        threads = grid * block
        expected = Expected.of(pair)
        program = program_of(pair, threads, expected)
        results = run(pair.gpu, program, grid, **keys, scope=scope, sharing=sharing)
        own: list[tuple[int, int]] = []
        for i, row in enumerate(results):
            if i not in expected.posted:
                assert not row.any(), f"{mode}: step {i} returned {row}"
                continue
            wqes = expected.posted[i]
            own += [(int(ticket) - wqes + 1, int(ticket) + 1) for ticket in row]
            group = {THREAD: 1, WARP: pair.gpu.warp, BLOCK: block}[scope]
            apart = np.diff(row.reshape(-1, group), axis=1)
            assert (apart == wqes).all(), f"{mode}: the tickets of step {i} are {row}"
        own.sort()
        total = threads * sum(expected.posted.values())
        ends = [0, *(end for _, end in own)]
        assert [first for first, _ in own] == ends[:-1], f"{mode}: tickets overlap or leave gaps"
        assert set(pair.a.indices().values()) == {ends[-1]} == {total}, mode
        for name, memory in (("here", pair.here), ("there", pair.there)):
            wrong = np.flatnonzero(memory.array != getattr(expected, name))
            assert not len(wrong), f"{mode}: {len(wrong)} wrong bytes {name} from {wrong[0]} on"


# What no WQE can express, in a thread of its own or among others: function → a bad argument.
BAD = {
    "put": {"nbytes": -1}, "get": {"nbytes": -5}, "p": {"nbytes": 0}, "p_signal": {"nbytes": 9},
    "put_signal": {"nbytes": -1},
}
TOO_LONG = {"nbytes": GIB + 1}  # in warp and block scope


@pytest.mark.parametrize("what", BAD)
def test_a_bad_argument_is_its_threads_own(pair: Pair, what):
    """It gets EINVAL; what the others have asked for is done, and the queue goes on."""
    begin_anew(pair)
    expected = Expected.of(pair)
    lanes = pair.gpu.warp
    wqes = 2 if what.endswith("signal") else 1
    bads = [BAD[what]] + [TOO_LONG] * (what in ("put", "get", "put_signal"))
    steps: list[list[Call]] = []
    for i, (scope, bad) in enumerate((s, b) for s in (WARP, BLOCK) for b in bads):
        wrong = i % lanes
        calls = []
        for t in range(lanes):
            at = t * PLACE
            call: Call = {
                "what": what, "raddr": pair.there.address + at, "laddr": pair.here.address + at, "nbytes": 1 + t % 8,
                "sig_raddr": pair.there.address + at + WORD, "sig_laddr": pair.here.address + at + WORD + 8,
                "value": 5, "scope": scope,
            }
            if t == wrong:
                call |= bad
            else:
                if what == "p":
                    expected.value(at, 5, call["nbytes"])
                elif what == "p_signal":
                    call["laddr"] = VALUE
                    expected.value(at, VALUE, call["nbytes"])
                else:
                    getattr(expected, "get" if what == "get" else "put")(at, call["nbytes"])
                if wqes == 2:
                    expected.add(at + WORD, 5)
            calls.append(call)
        steps += [calls, [{"what": "wait", "ref": 2 * i, "scope": scope}] * lanes]
    steps.append([{"what": "wait_all"}] * lanes)
    # Alone, a thread with a bad argument posts nothing.
    steps.append([{"what": what, **BAD[what], "scope": THREAD}] * lanes)
    keys = {
        "qp": pair.a, "rkey": pair.there_mr.rkey, "lkey": pair.here_mr.lkey,
        "sig_rkey": pair.there_mr.rkey, "sig_lkey": pair.here_mr.lkey,
    }
    results = run(pair.gpu, steps, **keys, sharing=GPU)
    posts = len(steps) // 2 - 1
    for i in range(posts):
        base = i * lanes * wqes
        for t in range(lanes):
            right = t != i % lanes
            assert results[2 * i, t] == (base + wqes * (t + 1) - 1 if right else device.EINVAL)
            assert results[2 * i + 1, t] == (device.OK if right else device.EINVAL)
    assert not results[-2].any()
    assert (results[-1] == device.EINVAL).all()
    assert pair.a.indices()["completed"] == posts * lanes * wqes
    assert np.array_equal(pair.here.array, expected.here)
    assert np.array_equal(pair.there.array, expected.there)


def test_one_of_many_rings(pair: Pair):
    """Threads that come together and do not all ask for the doorbell: it rings."""
    begin_anew(pair)
    lanes = pair.gpu.warp
    call = {
        "what": "put", "raddr": pair.there.address, "rkey": pair.there_mr.rkey, "laddr": pair.here.address,
        "lkey": pair.here_mr.lkey, "nbytes": 8, "qp": pair.a,
    }
    flags = [device.SKIP_DB_RINGING] * (lanes - 1) + [device.DEFAULT]
    skip: list[Call] = [{"what": "skip"}] * (lanes - 1)
    steps: list[list[Call]] = []
    for i in range(4):
        steps += [[call | {"code_opt": flag} for flag in flags], [*skip, {"what": "wait", "ref": 2 * i, "qp": pair.a}]]
    results = run(pair.gpu, steps, sharing=GPU)
    assert sorted(results[::2].ravel().tolist()) == list(range(4 * lanes))
    assert results[1::2, -1].tolist() == [device.OK] * 4


def test_a_group_learns_of_an_error(pair: Pair):
    """Threads whose own WQEs are complete hear OK, those behind the failed one hear EIO; the ring stays usable."""
    for scope in (WARP, BLOCK):
        for bad in {0, pair.gpu.warp // 2, pair.gpu.warp - 1}:
            begin_anew(pair)
            before = pair.there.array.copy()
            lanes = pair.gpu.warp
            calls = [
                {
                    "what": "put", "raddr": pair.there.address + t * PLACE, "laddr": pair.here.address + t * PLACE,
                    "rkey": 0 if t == bad else pair.there_mr.rkey, "nbytes": 100,
                }
                for t in range(lanes)
            ]
            steps: list[list[Call]] = [calls, [{"what": "wait", "ref": 0}] * lanes, [{"what": "wait_all"}] * lanes]
            results = run(pair.gpu, steps, qp=pair.a, lkey=pair.here_mr.lkey, scope=scope, sharing=GPU)
            assert results[0].tolist() == list(range(lanes))
            assert results[1].tolist() == [device.OK] * bad + [device.EIO] * (lanes - bad)
            assert (results[2] == device.EIO).all()
            error = pair.a.last_error()
            assert error is not None
            assert (error.index, error.syndrome) == (bad, Syndrome.REMOTE_ACCESS)
            for t in range(bad):
                at = slice(t * PLACE, t * PLACE + 100)
                assert np.array_equal(pair.there.array[at], pair.here.array[at])
            assert np.array_equal(pair.there.array[bad * PLACE :], before[bad * PLACE :])


@pytest.mark.parametrize("scope", SCOPES, ids=SCOPES.get)
def test_a_full_queue_that_fails_tells_all(pair: Pair, scope):
    """Once posts are refused for an error, nobody waits in vain for a slot that was never posted."""
    begin_anew(pair)
    lanes = pair.gpu.warp
    per_round = lanes
    rounds = DEPTH // per_round + 3
    call = {"what": "put", "raddr": pair.there.address, "laddr": pair.here.address, "nbytes": 8}
    steps = [[call] * lanes for _ in range(rounds)] + [[{"what": "wait_all"}] * lanes]
    results = run(pair.gpu, steps, qp=pair.a, lkey=pair.here_mr.lkey, scope=scope, sharing=GPU)  # no rkey
    assert (results[-1] == device.EIO).all()
    posted, refused = results[:-1] >= 0, results[:-1] == device.EIO
    assert (posted | refused).all()
    assert refused.any()
    assert sorted(results[:-1][posted].tolist()) == list(range(posted.sum()))
    error = pair.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, Syndrome.REMOTE_ACCESS)
    indices = pair.a.indices()
    assert indices["ready"] == indices["submitted"] == posted.sum()
    if scope != THREAD or lanes == 1:  # of threads that give back at the same time the first cannot
        assert indices["reserved"] == posted.sum()


def test_blocks_wait_for_their_last(pair: Pair):
    """In group scope one thread waits for all, also when it has nothing to wait for itself."""
    begin_anew(pair)
    lanes = pair.gpu.warp
    put = {"what": "put", "raddr": pair.there.address, "laddr": pair.here.address, "nbytes": 64}
    steps: list[list[Call]] = [
        [put if t != lanes - 1 else put | {"nbytes": -1} for t in range(lanes)],
        [{"what": "wait", "ref": 0}] * lanes,
    ]
    keys = {"qp": pair.a, "rkey": pair.there_mr.rkey, "lkey": pair.here_mr.lkey}
    results = run(pair.gpu, steps, **keys, scope=BLOCK, sharing=EXCLUSIVE)
    assert results[1].tolist() == [device.OK] * (lanes - 1) + [device.EINVAL]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [4, pytest.param(0, marks=pytest.mark.gpu, id="cuda")], indirect=True)
@pytest.mark.parametrize("what", ["put", "get"])
@pytest.mark.parametrize("scope", [WARP, BLOCK])
def test_the_longest_transfer_of_a_group_member(pair: Pair, what, scope):
    """Exactly 1 GiB of one thread, and nothing of the others: a WQE each."""
    lanes = pair.gpu.warp
    with pair.gpu.alloc(GIB, MemType.CPU_GPU) as here, pair.gpu.alloc(GIB, MemType.CPU_GPU) as there:
        source, target = (here, there) if what == "put" else (there, here)
        source.array[[0, -1]] = 0xA5, 0x5A
        local, remote = pair.pd.register(here), pair.pd.register(there)
        begin_anew(pair)
        move: Call = {
            "what": what, "raddr": remote.address, "rkey": remote.rkey, "laddr": local.address, "lkey": local.lkey,
        }
        steps: list[list[Call]] = [
            [{**move, "nbytes": GIB if lane == 0 else 0} for lane in range(lanes)],
            [{"what": "wait", "ref": 0}] * lanes,
        ]
        results = run(pair.gpu, steps, qp=pair.a, scope=scope, sharing=EXCLUSIVE)
        assert results[0].tolist() == list(range(lanes))
        assert not results[1].any()
        assert target.array[[0, -1]].tolist() == [0xA5, 0x5A]
        local.close()
        remote.close()


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[Pair]:
    """A `Pair` whose ends are on two NICs, so that packets are under way; on host threads."""
    with (
        Gpu("host") as gpu,
        verbs.open("soft0", port=PortConfig()) as ctx,
        verbs.open("soft1", port=PortConfig()) as other,
    ):
        pd, peer_pd = ctx.create_pd(), other.create_pd()
        a, b = gpu.create_qp(pd, 64), gpu.create_qp(peer_pd, 64)
        a.connect(b)
        here, there = gpu.alloc(1 << 20, MemType.CPU_GPU), gpu.alloc(1 << 20, MemType.CPU_GPU)
        yield Pair(ctx, gpu, pd, a, b, here, there, pd.register(here), peer_pd.register(there))
        a.close()
        b.close()


def test_a_fence_holds_up_what_is_behind_it(far: Pair):
    """What a READ brings is what a WRITE behind the fence sends on, though the READ's answer takes its time."""
    nbytes = 100_000
    half = 1 << 19
    far.there.array[:nbytes] = 0xAB
    keys = {"qp": far.a, "rkey": far.there_mr.rkey, "lkey": far.here_mr.lkey, "laddr": far.here.address}
    for fenced in (True, False):
        far.there.array[half:] = 0
        far.here.array[:] = 0
        program: list[list[Call]] = [
            [{"what": "get", "raddr": far.there.address, "nbytes": nbytes}],
            [{"what": "fence"} if fenced else {"what": "skip"}],
            [{"what": "put", "raddr": far.there.address + half, "nbytes": nbytes}],
            [{"what": "wait", "ref": 2}],
        ]
        assert run(far.gpu, program, **keys)[-1, 0] == device.OK
        sent_on = bool((far.there.array[half : half + nbytes] == 0xAB).all())
        assert sent_on == fenced, "without the fence the WRITE should have overtaken the READ's answer, and with it not"


@pytest.mark.slow
def test_a_stalled_engine_ends_the_waits_of_groups(pair: Pair, caplog):
    """Every thread of a group comes back from a wait that has timed out."""
    caplog.set_level(logging.CRITICAL, "gpunetio")
    lanes = pair.gpu.warp
    a, b = (pair.gpu.create_qp(pair.pd, DEPTH, timeout=1.0) for _ in range(2))
    a.connect(b)
    put = {
        "what": "put", "nbytes": 8, "raddr": pair.there.address, "rkey": pair.there_mr.rkey,
        "laddr": pair.here.address, "lkey": pair.here_mr.lkey,
    }
    try:
        for scope in (WARP, BLOCK):
            pair.nic.pause()
            until(lambda: pair.nic.record["paused"], "the NIC to stand still")
            steps: list[list[Call]] = [
                [put] * lanes, [{"what": "wait", "ref": 0}] * lanes, [{"what": "wait_all"}] * lanes
            ]
            results = run(pair.gpu, steps, qp=a, scope=scope, sharing=GPU)
            pair.nic.resume()
            assert (results[1:] == device.ETIMEDOUT).all()
            results = run(pair.gpu, steps, qp=a, scope=scope, sharing=GPU)
            assert not results[1:].any()
    finally:
        pair.nic.resume()
        a.close()
        b.close()
