"""Buffers, chains and inventories: random programs against lists of numbers."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Access
from gpunetio.core import BufInventory, MemoryMap, RemoteMemory
from gpunetio.errors import BadStateError, FullError, InvalidValueError

COUNT, NBYTES = 6, 10
STEPS = st.lists(st.tuples(st.sampled_from(["chain", "unchain", "release", "fill"]), *[st.integers(0, COUNT - 1)] * 2))


@pytest.fixture(scope="module")
def memory(pd):
    with MemoryMap(pd, np.arange(256, dtype=np.uint8)) as made:
        yield made


@given(STEPS)
def test_chains(memory, steps):
    inventory = BufInventory(COUNT)
    bufs = [inventory.buf(memory, n * NBYTES, NBYTES) for n in range(COUNT)]
    number = {buf: n for n, buf in enumerate(bufs)}
    lists, data = [[n] for n in range(COUNT)], dict.fromkeys(range(COUNT), NBYTES)
    for what, i, j in steps:
        mine = next((each for each in lists if i in each), None)
        other = next((each for each in lists if j in each), None)
        if mine is None:
            with pytest.raises(BadStateError, match="released"):
                bufs[i].release()
        elif what == "chain" and other and other is not mine and (mine[0], other[0]) == (i, j):
            bufs[i].chain(bufs[j])
            lists.remove(other)
            mine += other
        elif what == "unchain" and i != j and mine[0] == i and j in mine:
            bufs[i].unchain(bufs[j])
            at = mine.index(j)
            lists.append(mine[at:])
            del mine[at:]
        elif what == "release" and mine[0] == i:
            bufs[i].release()
            lists.remove(mine)
        elif what == "fill" and mine[0] == i:
            bufs[i].fill(7 * j)
            for place, n in enumerate(mine):
                data[n] = min(max(7 * j - place * NBYTES, 0), NBYTES)
        elif what in ("chain", "unchain") or mine[0] != i:
            with pytest.raises((InvalidValueError, BadStateError)):
                getattr(bufs[i], what)(*[bufs[j]] if "chain" in what else []) if what != "fill" else bufs[i].sources()
    assert inventory.num_free == COUNT - sum(map(len, lists))
    for each in lists:
        head = bufs[each[0]]
        assert [number[buf] for buf in head] == each
        assert [(e.address - memory.iova, e.length) for e in head.sources()] == [(n * NBYTES, data[n]) for n in each]
        assert [(e.address - memory.iova, e.length) for e in head.destinations()] == [(n * NBYTES, 10) for n in each]
        assert {e.lkey for e in head.sources()} == {memory.lkey}


def test_data_is_a_view(memory):
    with BufInventory(1).buf(memory, 100, 20) as buf:
        buf.set_data(5, 3)
        assert buf.data.tolist() == [105, 106, 107]
        assert (buf.data_address, buf.data_nbytes) == (memory.iova + 105, 3)
        with pytest.raises(InvalidValueError, match="has 20 bytes"):
            buf.set_data(18, 3)
        buf.retain()
        buf.release()
        assert buf.refcount == 1
    assert buf.refcount == 0
    with pytest.raises(BadStateError, match="released"):
        _ = buf.data


def test_what_an_inventory_refuses(memory, pd):
    inventory = BufInventory(1)
    for offset, nbytes in ((-1, 1), (250, 7), (0, -1), (257, None)):
        with pytest.raises(InvalidValueError, match="outside"):
            inventory.buf(memory, offset, nbytes)
    kept = inventory.buf(memory)
    with pytest.raises(FullError, match="all 1 buffers"):
        inventory.buf(memory)
    kept.release()
    with MemoryMap(pd, bytearray(8)) as short:
        buf = inventory.buf(short)
    with pytest.raises(BadStateError, match="closed"):
        buf.sources()


def test_memory_of_a_peer_is_no_operand(memory):
    inventory = BufInventory(2)
    remote = inventory.buf(RemoteMemory(4096, 64, 7))
    with pytest.raises(InvalidValueError, match="memory of a peer"):
        remote.sources()
    with pytest.raises(BadStateError, match="memory of a peer"):
        _ = remote.data
    with pytest.raises(InvalidValueError, match="one range of a peer"):
        remote.chain(inventory.buf(memory))


def test_views_keep_the_memory(pd):
    memory = MemoryMap(pd, np.full(1 << 20, 7, np.uint8))
    view = memory.array(1, 1000)
    view[:3] = 1, 2, 3
    memory.close()
    gc.collect()
    assert view[:4].tolist() == [1, 2, 3, 7]
    with MemoryMap(pd, b"only to read", Access.LOCAL_READ) as fixed:
        assert fixed.array().tobytes() == b"only to read"
        assert not fixed.array().flags.writeable
        with pytest.raises(InvalidValueError, match="outside the 12 bytes"):
            fixed.array(10, 3)
