"""Clients that come and go at random, few slots, and a model of what should become of each."""

from contextlib import ExitStack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpunetio as gn
from gpunetio.packet_processing.connection import ENDED, SLOT_BITS, SLOTS
from gpunetio.packet_processing.handshake import HALF_OPEN_NS
from handshake_bench import LOOK_NS, HandshakeBench, segment

SLOTS_LEFT, MOST_HALF_OPEN = 3, 2
PORTS = st.sampled_from([1, 2, 3, 4, 5])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["syn", "ack", "end"]), PORTS), st.just(("look", 0)), st.just(("late", 0)),
        st.just(("rules", 0)),
    ),
    max_size=40,
)


class Model:
    """What the CPU should know: a dictionary of connections, and a list of free slots."""

    def __init__(self):
        self.free = [*range(SLOTS - SLOTS_LEFT, SLOTS)]
        self.generations = dict.fromkeys(self.free, 0)
        self.slots = {}  # by port
        self.half_open = {}  # when each port's client is given up; the oldest first
        self.now = 0
        self.ended = set()

    @property
    def tags(self):
        return {self.generations[slot] << SLOT_BITS | slot for slot in self.slots.values()}

    def release(self, port):
        self.free.append(self.slots.pop(port))
        self.ended.discard(port)
        self.half_open.pop(port, None)

    def syn(self, port):
        """What it is answered."""
        if port in self.ended:
            self.release(port)
        if port in self.slots:
            return "SA" if port in self.half_open else None
        if len(self.half_open) == MOST_HALF_OPEN:
            self.release(next(iter(self.half_open)))
        if not self.free:
            return None
        self.slots[port] = self.free.pop(0)
        self.generations[self.slots[port]] += 1
        self.half_open[port] = self.now + HALF_OPEN_NS
        return "SA"

    def ack(self, port):
        if port in self.ended:
            self.release(port)
        if port not in self.slots:
            return "R"
        self.half_open.pop(port, None)
        return None

    def look(self, nanoseconds):
        """Look at all slots after so long."""
        self.now += nanoseconds
        for port in sorted(self.ended, key=self.slots.__getitem__):
            self.release(port)
        for port in [port for port, until in self.half_open.items() if until <= self.now]:
            self.release(port)


@pytest.fixture(scope="module")
def gpu():
    with gn.Gpu("host") as gpu:
        yield gpu


@given(STEPS)
@example([("syn", 1), *[("look", 0)] * 5])
def test_random_clients(gpu, steps):
    with ExitStack() as undo:
        bench, model, firsts = HandshakeBench(gpu, undo), Model(), {}
        bench.leave(SLOTS_LEFT)
        bench.acceptor.row["most"] = MOST_HALF_OPEN
        for what, port in steps:
            answers = []
            if what == "syn":
                answers, expected = bench.take(segment("S", port)), model.syn(port)
                assert [str(answer["TCP"].flags) for answer in answers] == [expected] * (expected is not None)
                if answers:
                    firsts[port] = answers[0]["TCP"].seq
            elif what == "ack":
                frame = segment("A", port, seq=1001, ack=firsts.get(port, 0) + 1)
                answers, expected = bench.take(frame), model.ack(port)
                assert [str(answer["TCP"].flags) for answer in answers] == [expected] * (expected is not None)
            elif what == "end" and port in model.slots and port not in model.half_open:
                slot = model.slots[port]
                bench.say(model.generations[slot] << SLOT_BITS | slot, ENDED)
                model.ended.add(port)
            elif what == "look":
                bench.look()
                model.look(LOOK_NS)
            elif what == "late":
                bench.now += HALF_OPEN_NS
                bench.look()
                model.look(HALF_OPEN_NS + LOOK_NS)
            bench.connection_rules.follow()
            while bench.handed() is not None:
                pass
            assert bench.tags == model.tags
            assert bench.count("half_open") == len(model.half_open)
            assert set(bench.rules) <= model.tags
