"""Which requests of a warp batch must wait for earlier ones, in a warp whose lanes are Python threads.

Lanes meet at each exchange, as on a GPU, so a lane that skips an exchange is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

from gpunetio.formats.wqe import WqeOpcode
from gpunetio.nic.gpu import warp_batches

LANES = 32
SECONDS = 20
WRITE, READ, ADD = map(int, (WqeOpcode.RDMA_WRITE, WqeOpcode.RDMA_READ, WqeOpcode.ATOMIC_FA))


class Warp:
    """Lanes that exchange values."""

    def __init__(self) -> None:
        self._meet = threading.Barrier(LANES, timeout=SECONDS)
        self._values = [0] * LANES
        self._lane = threading.local()

    def lane(self) -> int:
        return self._lane.number

    def exchange(self, value: int) -> list[int]:
        self._values[self.lane()] = value
        self._meet.wait()
        values = list(self._values)
        self._meet.wait()
        return values

    def lanes_where(self, which: int) -> int:
        return sum(1 << lane for lane, value in enumerate(self.exchange(which)) if value)

    def run(self, function: Callable[..., object], arguments: list[tuple]) -> list:
        """Call a function on every lane, with arguments of its own."""
        results: list = [None] * LANES
        errors: list[BaseException] = []

        def be_lane(number: int) -> None:
            self._lane.number = number
            try:
                results[number] = function(*arguments[number])
            except BaseException as error:
                errors.append(error)
                self._meet.abort()

        threads = [threading.Thread(target=be_lane, args=(number,), daemon=True) for number in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        assert not errors, errors[0]
        return results


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    warp = Warp()
    stand_in = {
        "lane_or_0": warp.lane, "lanes_here": lambda: LANES, "lanes_where": warp.lanes_where,
        "from_lane": lambda value, lane: warp.exchange(value)[lane],
        "first_lane": lambda lanes: (lanes & -lanes).bit_length() - 1 if lanes else 32,
    }
    stand_in |= {name: getattr(warp_batches, name).py_func for name in ("_most_before", "_overlaps", "_is_copy")}
    for name, function in stand_in.items():
        monkeypatch.setattr(warp_batches, name, function)
    return warp


def request(opcode: int, target: int, nbytes: int, strict: int) -> SimpleNamespace:
    return SimpleNamespace(opcode=opcode, target=target, nbytes=nbytes, strict=strict)


def some_requests(random: Random) -> list[SimpleNamespace]:
    """Requests as programs post them, few places apart so that some overlap."""
    kind = random.choice(("rising", "signals", "anywhere", "one place", "reads"))
    strict = int(kind == "anywhere" and random.random() < 0.2)
    made = []
    for i in range(LANES):
        opcode, nbytes = WRITE, random.choice((1, 4, 8, 8, 8, 24, 64))
        target = {"rising": 64 * i, "signals": 64 * i, "one place": 128}.get(kind, random.randrange(0, 256))
        if (kind == "signals" and i % 2) or (kind == "anywhere" and random.random() < 0.2):
            opcode, nbytes, target = ADD, 8, 4096 if kind == "signals" else target & ~7
        elif kind == "reads" or (kind == "anywhere" and random.random() < 0.3):
            opcode = READ
        made.append(request(opcode, target, nbytes, strict if opcode != READ else 0))
    return made


def copies(one: SimpleNamespace) -> bool:
    return one.opcode in (WRITE, READ)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))]
)
def test_what_overlaps_keeps_its_order(warp: Warp, seed: int):
    random = Random(seed)
    requests = some_requests(random)
    run = random.choice((2, 3, 17, LANES))
    results = warp.run(warp_batches._barriers.py_func, [(each, run) for each in requests])
    (begins,) = {begins for begins, _ in results}
    same = [lanes for _, lanes in results]
    for j in range(1, run):
        assert begins >> j & 1 or not requests[j].strict
        for i in range(j):
            if begins >> i + 1 & (1 << j - i) - 1:
                continue  # in another section, with a fence in between
            one, other = requests[i], requests[j]
            assert (one.opcode == READ) == (other.opcode == READ)
            apart = one.target + one.nbytes <= other.target or other.target + other.nbytes <= one.target
            if apart or not copies(other):  # atomics come after the copies of a section, in their own order
                continue
            assert copies(one)
            assert (one.target, one.nbytes) == (other.target, other.nbytes)
            assert same[i] >> j & 1  # so only the last of them is made
            assert same[j] >> i & 1


def test_rising_writes_with_signals_are_one_section(warp: Warp):
    requests = [request(ADD, 4096, 8, 0) if i % 2 else request(WRITE, 64 * i, 64, 0) for i in range(LANES)]
    assert set(warp.run(warp_batches._barriers.py_func, [(each, LANES) for each in requests])) == {(0, 0)}


@pytest.mark.parametrize(
    "rung, seen, end",
    [
        pytest.param(13, 10, 13, id="more was announced"),
        pytest.param(8, 10, 12, id="less than is known"),
        pytest.param(30, 10, -1, id="more than the ring has"),
        pytest.param(9, 9, 12, id="an old one that was looked at: what a register announced is left"),
        pytest.param(0, 0, 12, id="none at all"),
    ],
)
def test_what_a_doorbell_announces(monkeypatch, rung, seen, end):
    """To a queue of 16 slots whose next WQE is 8, and in which 12 is known to follow what was announced."""
    row = SimpleNamespace(sq_ci=8, sq_pi=12, sq_log=4, db_seen=seen)
    for name, stand_in in {"shared_qp_at": lambda at: row, "be64": int, "announced": int}.items():
        monkeypatch.setattr(warp_batches, name, stand_in)
    assert warp_batches._announced.py_func(0, rung) == end
