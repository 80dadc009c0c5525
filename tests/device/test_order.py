"""Requests of one queue take effect in their order, also where an engine executes many at once."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpunetio import Gpu, GpuMemory, MemType, device, kernel, verbs
from gpunetio.enums import Access
from pair import Pair, make_pair

COUNT, ROUNDS, PLACES = 48, 20, 3
SIZE = 4096
FLAG, WORD, OLD = 8 * PLACES, 512, 1024


@kernel
def numbers(qp, raddr, rkey, laddr, lkey, base, out):
    """Write rising numbers to some places in turn, each with a flag behind it, and wait for the last."""
    ticket = 0
    for i in range(COUNT):
        device.p(qp, raddr + 8 * (i % PLACES), rkey, base + i, 8, device.EXCLUSIVE)
        ticket = device.p(qp, raddr + FLAG, rkey, base + i, 8, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


@kernel
def sums(qp, raddr, rkey, laddr, lkey, base, out):
    """Add to one word, again and again. What each finds there comes to the same place here, `base` bytes further."""
    ticket = 0
    for i in range(COUNT):
        ticket = device.signal(qp, raddr + WORD, rkey, laddr + OLD + base, lkey, i + 1, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


@kernel
def there_and_back(qp, raddr, rkey, laddr, lkey, base, out):
    """Write a number there, and read it back, again and again."""
    ticket = 0
    for i in range(COUNT):
        device.p(qp, raddr, rkey, base + i, 8, device.EXCLUSIVE)
        ticket = device.get(qp, raddr, rkey, laddr + 8 * i, lkey, 8, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


class Ends:
    """Memory of both ends of a pair, with one kind of order."""

    def __init__(self, pair: Pair, access: Access):
        self.pair = pair
        nic = pair.a.qp.ctx.provider.nic  # type: ignore[attr-defined]
        # A NIC on a CPU changes no word in GPU memory atomically.
        kind = MemType.GPU if nic.port.config.on_gpu else MemType.CPU_GPU
        self.here, self.there = (pair.gpu.alloc(SIZE, kind) for _ in range(2))
        self.local, self.remote = (pair.pd.register(memory, access=access) for memory in (self.here, self.there))

    def run(self, body, base: int = 0) -> None:
        with self.pair.gpu.alloc(8, MemType.CPU_GPU) as out:
            keys = self.remote.address, self.remote.rkey, self.local.address, self.local.lkey
            assert body[1, 1, self.pair.gpu](self.pair.a, *keys, base, out).wait(60)
            assert int(out.array.view(np.int64)[0]) == device.OK

    @staticmethod
    def words(memory: GpuMemory, at: int, count: int = 1) -> list[int]:
        return memory.read(at, 8 * count).view(np.int64).tolist()


@pytest.fixture(params=[Access.all(), Access.all() | Access.RELAXED_ORDERING], ids=["strict", "relaxed"])
def ends(request: pytest.FixtureRequest, gpu: Gpu) -> Iterator[Ends]:
    with verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, depth=256)
        yield Ends(opened, request.param)
        opened.a.close()
        opened.b.close()


def test_the_last_write_to_an_address_stays(ends):
    for round in range(ROUNDS):
        base = 1 + round * COUNT
        ends.run(numbers, base)
        assert ends.words(ends.there, 0, PLACES) == [base + COUNT - PLACES + i for i in range(PLACES)]
        assert ends.words(ends.there, FLAG) == [base + COUNT - 1]


def test_additions_to_a_word_find_what_those_before_have_left(ends):
    total = COUNT * (COUNT + 1) // 2
    for round in range(1, ROUNDS + 1):
        ends.run(sums)
        assert ends.words(ends.there, WORD) == [round * total]
        assert ends.words(ends.here, OLD) == [round * total - COUNT]


@pytest.mark.parametrize("offset", [1, 4])
def test_what_an_addition_finds_comes_to_any_address(ends, offset):
    ends.run(sums, offset)
    assert ends.words(ends.here, OLD + offset) == [COUNT * (COUNT + 1) // 2 - COUNT]


def test_a_read_finds_what_the_write_before_it_has_left(ends):
    for round in range(ROUNDS):
        base = 1 + round * COUNT
        ends.run(there_and_back, base)
        assert ends.words(ends.here, 0, COUNT) == list(range(base, base + COUNT))
