"""Quiescing: queue pairs start no packets for a time, so that their requests soon need none (gpu/slices.py)."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.nic.gpu import slices

MS = 1_000_000
RAN, SENDS = 2, 1  # what `_cached_turns` returns: twice how much was done, and 1 if something takes packets


class Worker:
    """The fields of a worker that quiescing changes, and a clock."""

    def __init__(self) -> None:
        self.record = SimpleNamespace(quiesce_until=0, next_quiesce_at=0, quiesce_backoff=0)
        self.now = 1_000 * MS

    def turn(self, moving: bool, took: int = MS) -> bool:
        """Make a turn on the rows themselves. Return whether the worker quiesces."""
        quiesces = slices._quiesce.py_func(self.record, moving)
        self.now += took
        assert (self.record.quiesce_until != 0) == bool(quiesces)
        return bool(quiesces)

    def cache(self, ran: int) -> bool:
        """Cache rows, or find that they cannot be cached. Return whether the worker may quiesce again."""
        return slices._end_quiesce.py_func(self.record, ran)


def put_in(patch: pytest.MonkeyPatch) -> Worker:
    """Make the functions use a worker by hand."""
    made = Worker()
    stand_ins = {"clock_ns": lambda: made.now, "_back_off": slices._back_off.py_func}
    for name, stand_in in stand_ins.items():
        patch.setattr(slices, name, stand_in)
    return made


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return put_in(monkeypatch)


def test_it_begins_while_packets_are_on_their_way_and_ends_when_rows_are_cached(worker):
    assert not worker.turn(moving=False)
    assert worker.turn(moving=True)
    assert worker.turn(moving=False)  # acknowledgements arrive, so no one has tried to cache rows
    worker.cache(RAN)
    assert not worker.turn(moving=False)
    assert worker.turn(moving=True)  # it was worth it: the next one need not wait


def test_one_in_vain_is_over_after_a_while(worker):
    quiesces = [worker.turn(moving=True) for _ in range(70)]
    assert quiesces[:50] == [True] * 50
    assert quiesces[50:56] == [False] * 5 + [True]


@pytest.mark.parametrize("ran, again", [(SENDS, False), (RAN | SENDS, True), (RAN, True), (0, True)])
def test_one_that_only_lets_a_request_through_that_takes_packets_is_in_vain(worker, ran, again):
    assert worker.turn(moving=True)
    assert worker.cache(ran) == again
    assert worker.turn(moving=True) == again


def test_rows_that_are_cached_without_quiescing_leave_the_backoff_as_it_is(worker):
    while worker.turn(moving=True):
        pass
    worker.cache(SENDS)
    assert not worker.turn(moving=True)
    worker.cache(RAN)
    assert worker.turn(moving=True)


def test_quiescing_in_vain_becomes_rare(worker):
    """Even if all of them are, for 20 s."""
    quiesces = [worker.turn(moving=True) for _ in range(20_000)]
    assert sum(quiesces) < 0.05 * len(quiesces)
    assert sum(quiesces[-3000:]) <= 100


@given(st.lists(st.tuples(st.sampled_from(["turn", "cache"]), st.booleans(), st.integers(0, 3)), max_size=200))
def test_it_never_quiesces_longer_than_it_may(steps):
    with pytest.MonkeyPatch.context() as patch:
        made = put_in(patch)
        began = None
        for what, moving, ran in steps:
            if what == "cache":
                made.cache(ran)
                began = None
            elif made.turn(moving):
                began = began or made.now
                assert made.now - began <= 50 * MS
            else:
                began = None
