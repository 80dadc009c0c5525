"""Lulls: times in which queue pairs start no packets, so that their requests soon need none (gpu/slices.py)."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.nic.gpu import slices

MS = 1_000_000
RAN, SENDS = 2, 1  # what `_near_turns` returns: twice how much was done, and 1 if something takes packets


class Worker:
    """What lulls change of a worker, and a clock."""

    def __init__(self) -> None:
        self.record = SimpleNamespace(lull=0, lull_after=0, lull_rest=0)
        self.now = 1_000 * MS

    def turn(self, moving: bool, took: int = MS) -> bool:
        """Make a turn on the rows themselves. Return whether it is in a lull."""
        lull = slices._begin_lull.py_func(self.record, moving)
        self.now += took
        assert (self.record.lull != 0) == bool(lull)
        return bool(lull)

    def borrow(self, ran: int) -> bool:
        """Borrow rows, or find that they cannot be borrowed: in vain. Return whether another lull may begin."""
        return slices._end_lull.py_func(self.record, ran)


def put_in(patch: pytest.MonkeyPatch) -> Worker:
    """Have lulls be those of a worker by hand."""
    made = Worker()
    stand_ins = {"clock_ns": lambda: made.now, "_rest": slices._rest.py_func}
    for name, stand_in in stand_ins.items():
        patch.setattr(slices, name, stand_in)
    return made


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return put_in(monkeypatch)


def test_it_begins_while_packets_are_on_their_way_and_ends_when_rows_are_borrowed(worker):
    assert not worker.turn(moving=False)
    assert worker.turn(moving=True)
    assert worker.turn(moving=False)  # acknowledgements arrive, so nobody has tried to borrow
    worker.borrow(RAN)
    assert not worker.turn(moving=False)
    assert worker.turn(moving=True)  # it was worth it: the next one need not wait


def test_one_in_vain_is_over_after_a_while(worker):
    lulls = [worker.turn(moving=True) for _ in range(70)]
    assert lulls[:50] == [True] * 50
    assert lulls[50:56] == [False] * 5 + [True]


@pytest.mark.parametrize("ran, again", [(SENDS, False), (RAN | SENDS, True), (RAN, True), (0, True)])
def test_one_that_only_lets_a_request_through_that_takes_packets_is_in_vain(worker, ran, again):
    assert worker.turn(moving=True)
    assert worker.borrow(ran) == again
    assert worker.turn(moving=True) == again


def test_rows_that_are_borrowed_without_a_lull_leave_the_rest_as_it_is(worker):
    while worker.turn(moving=True):
        pass
    worker.borrow(SENDS)
    assert not worker.turn(moving=True)
    worker.borrow(RAN)
    assert worker.turn(moving=True)


def test_lulls_in_vain_become_rare(worker):
    """Even if all of them are, for 20 s."""
    lulls = [worker.turn(moving=True) for _ in range(20_000)]
    assert sum(lulls) < 0.05 * len(lulls)
    assert sum(lulls[-3000:]) <= 100


@given(st.lists(st.tuples(st.sampled_from(["turn", "borrow"]), st.booleans(), st.integers(0, 3)), max_size=200))
def test_no_lull_is_longer_than_it_may_be(steps):
    with pytest.MonkeyPatch.context() as patch:
        made = put_in(patch)
        began = None
        for what, moving, ran in steps:
            if what == "borrow":
                made.borrow(ran)
                began = None
            elif made.turn(moving):
                began = began or made.now
                assert made.now - began <= 50 * MS
            else:
                began = None
