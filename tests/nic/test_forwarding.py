"""Rings in the registers of UAR pages that are passed on to doorbell lines, while a driver goes on to ring.

The functions run in Python. What the driver and the NIC's turns do in between, at each access to memory, is made up.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpunetio.formats.doorbell import PI_MASK, UAR_NO_DBR_OFFSET, UAR_REG_HALF, UAR_REG_OFFSET
from gpunetio.nic.gpu import forwarding

QPN = 0x123
PAGE, LINE, LIST = 0x10000, 0x20000, 0x30000
ONE, OTHER = PAGE + UAR_REG_OFFSET, PAGE + UAR_REG_OFFSET + UAR_REG_HALF


def ring_of(index: int) -> int:
    """The 64 bits that announce an index, as a load finds them."""
    return swapped((index & PI_MASK) << 40 | QPN << 8)


def swapped(value: int) -> int:
    return int.from_bytes(value.to_bytes(8, "big"), "little")


def announced(ring: int) -> int:
    return ring >> 40 & PI_MASK


class Worker(int):
    """The address of a worker, and what is asked of it."""

    active = 0


class Machine:
    """Memory with a UAR page and a doorbell line, a driver that rings halves in turn, and the NIC's turns."""

    def __init__(self, first: int, rings: int, between: Iterator[tuple[int, bool]]):
        self.memory = {ONE: 0, OTHER: 0, PAGE + UAR_NO_DBR_OFFSET: 0, LINE: 0, LIST: PAGE}
        self.indices = iter(range(first + 1, first + 1 + rings))
        self.last = self.known = first
        self.queue = SimpleNamespace(seen=0)
        self.rung = 0
        self._between = between

    def pass_time(self) -> None:
        rings, turn = next(self._between, (0, False))
        for _ in range(rings):
            self.ring()
        if turn:
            self.look()

    def ring(self) -> None:
        """Ring the half whose turn it is, if it is free: real registers always are."""
        register = OTHER if self.rung & 1 else ONE
        if self.memory[register] == 0 and (index := next(self.indices, None)) is not None:
            self.memory[register], self.last = ring_of(index), index
            self.rung += 1

    def look(self) -> None:
        """Make a turn: take what the line announces, unless it is old."""
        self.queue.seen = self.memory[LINE]
        if self.queue.seen != 0:
            ahead = (announced(swapped(self.queue.seen)) - self.known) & PI_MASK
            self.known += ahead if ahead <= 64 else 0

    def load(self, address: int) -> int:
        self.pass_time()
        return self.memory[address]

    def exchange(self, address: int, value: int) -> int:
        self.pass_time()
        old, self.memory[address] = self.memory[address], value
        return old

    def store(self, address: int, value: int) -> None:
        self.pass_time()
        self.memory[address] = value


def put_in_place(monkeypatch: pytest.MonkeyPatch, machine: Machine, worker: int = 1) -> None:
    """Have the functions use a machine's memory."""
    row = SimpleNamespace(doorbell=LINE, worker=worker, work_queue=0)
    for name, stand_in in {
        "ld_relaxed64": machine.load, "exchange_gpu64": machine.exchange, "st_release64": machine.store,
        "row_of_ring": lambda nic, raw: row if swapped(raw) >> 8 & 0xFFFFFF == QPN else 0,
        "shared_worker_at": lambda shared: SimpleNamespace(uar_count=1, uars=LIST),
        "shared_queue": lambda shared, number: 0,
        "shared_work_queue_at": lambda address: machine.queue, "lane_or_0": lambda: 0, "lanes_here": lambda: 1,
        "be64": swapped, "announced": announced, "_is_newer": forwarding._is_newer.py_func,
        "_forward_register": forwarding._forward_register.py_func,
    }.items():
        monkeypatch.setattr(forwarding, name, stand_in)


@given(
    first=st.integers(0, PI_MASK), rings=st.integers(0, 8),
    between=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40),
)
@example(first=0, rings=2, between=[(0, False), (0, False), (2, False)])
def test_no_ring_is_lost_or_taken_for_a_later_one(first, rings, between):
    """Not even if the older one of two is found last, and the line has both announced and taken."""
    machine = Machine(first, rings, iter(between))
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_in_place(monkeypatch, machine)
        for _ in range(50):
            forwarding.forward_registers.py_func(Worker(1), 2)
            assert machine.known <= machine.last
    machine.look()
    assert machine.memory[ONE] == machine.memory[OTHER] == 0
    assert machine.known == machine.last


@pytest.mark.parametrize("qpn, worker, line", [(QPN, 1, True), (QPN, 7, True), (QPN + 1, 1, False)])
def test_every_ring_is_taken(monkeypatch, qpn, worker, line):
    """Of a queue of this worker, or of another one, or of none."""
    machine = Machine(0, 0, iter(()))
    put_in_place(monkeypatch, machine, worker)
    rung = swapped(5 << 40 | qpn << 8)
    for register in (ONE, OTHER, PAGE + UAR_NO_DBR_OFFSET):
        machine.memory[register] = rung
    forwarding.forward_registers.py_func(Worker(1), 2)
    assert machine.memory[ONE] == machine.memory[OTHER] == machine.memory[PAGE + UAR_NO_DBR_OFFSET] == 0
    assert machine.memory[LINE] == (rung if line else 0)
