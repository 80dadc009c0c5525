"""Many queue pairs that send to one slow receiver in another process: nothing is lost, and nothing grows."""

import pytest

from crowd import LIMIT
from far import Farm, side
from neighbour import address

MESSAGES = 6  # of each queue, between two measurements
ROUNDS = 4  # at most: what is made once, such as the first warning of a NIC, may come in any of them
GROWTH = 8 << 20  # bytes: an allocator's whim, and no queue's


@pytest.fixture(scope="module")
def farm():
    with Farm() as opened:
        yield opened


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    return after["resident"] - before["resident"]


def all_to_one(farm: Farm, wire: str, count: int, **options: int) -> dict[str, int]:
    """Messages of mixed sizes on every queue, to a receiver that posts its receives late: the sender's counters."""
    with side(wire) as near:
        far = farm.spawn(address(), wire, deadline=2 * LIMIT, **options)
        here, there = near.crowd.open(count), far("crowd.open", count)
        near.crowd.connect(there)
        far("crowd.connect", here)
        used: list[tuple[dict[str, int], ...]] = []
        for first in range(0, ROUNDS * MESSAGES, MESSAGES):
            far.start("crowd.receive", first, first + MESSAGES)
            near.crowd.send(first, first + MESSAGES)
            assert far.answer() > 0
            used.append((near.resources(), far("resources")))
            if len(used) > 1 and all(grown(*pair) < GROWTH for pair in zip(*used[-2:], strict=True)):
                break
        else:
            pytest.fail(f"memory grows with each round: {used}")
        assert near.crowd.nothing_left()
        assert far("crowd.nothing_left")
        for before, after in zip(used[0], used[-1], strict=True):
            assert after["descriptors"] <= before["descriptors"]
        farm.clear()
        return {name: near.counter(name) for name in ("packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")}


@pytest.mark.parametrize("wire", ["auto", "udp"])
def test_64_queues(farm, wire):
    assert all_to_one(farm, wire, 64)["rnr_nak_retry_err"] > 0


@pytest.mark.slow
def test_sockets_that_overflow(farm):
    """What the receiver's socket has no room for is sent again."""
    counters = all_to_one(farm, "udp", 64, socket_buffer=64 << 10)
    assert counters["packet_seq_err"] + counters["local_ack_timeout_err"] > 0, counters


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wire", ["auto", "udp"])
def test_1000_queues(farm, wire):
    all_to_one(farm, wire, 1000)
