"""Messages that wait for their turn: no sender keeps others waiting, and none fills the memory."""

from gpunetio.cm.arrivals import MOST, Arrivals
from gpunetio.cm.path import Path

FLOOD, HONEST, PEER = Path(bytes(15) + b"\1"), Path(bytes(15) + b"\2"), Path(bytes(15) + b"\3")


def taken(arrivals: Arrivals, count: int) -> list[tuple[Path, bytes]]:
    return [arrivals.take() for _ in range(count)]


def test_messages_of_one_sender_stay_in_order():
    arrivals = Arrivals()
    for number in range(5):
        arrivals.add(HONEST, bytes([number]), known=False)
    assert [mad for _, mad in taken(arrivals, 5)] == [bytes([number]) for number in range(5)]
    assert len(arrivals) == 0


def test_senders_take_turns():
    arrivals = Arrivals()
    for _ in range(1000):
        arrivals.add(FLOOD, b"flood", known=False)
    arrivals.add(HONEST, b"first", known=False)
    arrivals.add(HONEST, b"second", known=False)
    assert [path for path, _ in taken(arrivals, 4)] == [FLOOD, HONEST, FLOOD, HONEST]
    assert len(arrivals) == 998


def test_known_peers_come_first():
    arrivals = Arrivals()
    for _ in range(1000):
        arrivals.add(FLOOD, b"flood", known=False)
    arrivals.add(PEER, b"first", known=True)
    arrivals.add(PEER, b"second", known=True)
    assert taken(arrivals, 2) == [(PEER, b"first"), (PEER, b"second")]


def test_a_flood_leaves_room():
    arrivals = Arrivals()
    for number in range(10 * MOST):
        arrivals.add(FLOOD, b"flood", known=False)
        arrivals.add(Path(number.to_bytes(16, "little")), b"forged", known=False)
    assert len(arrivals) <= MOST
    arrivals = Arrivals()
    for _ in range(10 * MOST):
        arrivals.add(FLOOD, b"flood", known=False)
    arrivals.add(HONEST, b"here", known=False)
    assert taken(arrivals, 2)[1] == (HONEST, b"here")
