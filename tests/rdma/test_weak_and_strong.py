"""Batches: which slots threads fill, what a commit accepts, and who may fill a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import device
from rdma_rig import Call, Ends

OK, EBUSY, EINVAL, ENOBUFS = device.OK, device.EBUSY, device.EINVAL, device.ENOBUFS
SLOTS = 8
CELLS = 5  # places that writes go to: the last one counts


class Model:
    """What one thread may do with a queue of SLOTS slots, in plain words: a list of slots, counted from 0."""

    def __init__(self) -> None:
        self.next = 0  # the first slot that was not committed
        self.strong: list[Call] = []
        self.weak: dict[int, list[Call]] = {}
        self.memory = [0] * CELLS
        self.commits = 0

    def enqueue_strong(self, call: Call) -> int:
        if len(self.strong) == SLOTS:
            return ENOBUFS
        self.weak[self.next + len(self.strong)] = [call]
        self.strong.append(call)
        return OK

    def enqueue_weak(self, call: Call) -> int:
        if self.strong:
            return EBUSY
        slot = next(slot for slot in range(self.next, self.next + SLOTS) if (slot - call["position"]) % SLOTS == 0)
        self.weak.setdefault(slot, []).append(call)
        return OK

    def commit_strong(self, call: Call) -> int:
        if self.strong:
            self._execute(len(self.strong))
            self.strong = []
        return OK

    def commit_weak(self, call: Call) -> int:
        count = call["nbytes"]
        if self.strong:
            return EBUSY
        batch = range(self.next, self.next + count)
        if not 1 <= count <= SLOTS or any(len(self.weak.get(slot, ())) != 1 for slot in batch):
            self.weak.clear()
            return EINVAL
        self._execute(count)
        return OK

    def _execute(self, count: int) -> None:
        for slot in range(self.next, self.next + count):
            (call,) = self.weak.pop(slot)
            self.memory[call["roff"] // 8] = call["value"]
        self.next += count
        self.commits += 1

    def wait_all(self, call: Call) -> int:
        commits, self.commits = self.commits, 0
        return commits

    def position(self, call: Call) -> int:
        return self.next + len(self.strong)


cells = st.integers(0, CELLS - 1).map(lambda cell: 8 * cell)
words = st.integers(1, 1 << 60)
CALLS = st.one_of(
    st.fixed_dictionaries({"what": st.just("value_strong"), "roff": cells, "value": words}),
    st.fixed_dictionaries(
        {"what": st.just("value_weak"), "roff": cells, "value": words, "position": st.integers(-9, 40)}
    ),
    st.fixed_dictionaries({"what": st.just("commit_strong")}),
    st.fixed_dictionaries({"what": st.just("commit_weak"), "nbytes": st.integers(-1, SLOTS + 1)}),
    st.sampled_from([{"what": "wait_all"}, {"what": "position"}]),
)
MODEL = {
    "value_strong": Model.enqueue_strong, "value_weak": Model.enqueue_weak, "commit_strong": Model.commit_strong,
    "commit_weak": Model.commit_weak, "wait_all": Model.wait_all, "position": Model.position,
}


@st.composite
def programs(draw: st.DrawFn) -> list[Call]:
    """Calls as they come, and in between whole batches, most of which are right."""
    calls: list[Call] = []
    model = Model()
    for _ in range(draw(st.integers(1, 14))):
        if draw(st.booleans()):
            found = [draw(CALLS)]
        elif draw(st.booleans()):
            count = draw(st.integers(1, SLOTS))
            found = [{"what": "value_strong", "roff": draw(cells), "value": draw(words)} for _ in range(count)]
            found.append({"what": "commit_strong"})
        else:
            count = draw(st.integers(1, SLOTS))
            places = draw(st.permutations(range(count)))
            first = model.next + draw(st.sampled_from([0, 0, 0, 1, -1]))
            found = [
                {"what": "value_weak", "roff": draw(cells), "value": draw(words), "position": first + place}
                for place in places
            ]
            found.append({"what": "commit_weak", "nbytes": count})
        for call in found:
            MODEL[call["what"]](model, call)
        calls += found
    return calls


@pytest.fixture(scope="module")
def new_ends(gpu, pd):
    return lambda: Ends(gpu, pd, send_queue_size=SLOTS)


@given(program=programs())
def test_a_thread_against_a_model(new_ends, program):
    """Statuses, counts of commits, positions, and memory: strong and weak batches in any mix, right and wrong."""
    model = Model()
    with new_ends() as ends:
        calls = [*program, {"what": "wait_all"}, {"what": "commit_strong"}, {"what": "wait_all"}]
        wanted = [MODEL[call["what"]](model, call) for call in calls]
        assert ends.alone(*calls) == wanted
        assert ends.b.bytes.view(np.int64)[:CELLS].tolist() == model.memory


def written(ends: Ends, count: int) -> list[int]:
    return ends.b.bytes.view(np.int64)[:count].tolist()


@pytest.mark.parametrize("committing", ["one", "all"])
def test_threads_of_a_block_fill_strong_batches(ends, committing):
    """Every write arrives, the ring has no gaps, and each batch completes once, on many laps of a short ring."""
    threads, rounds = 12, 15
    made = ends(send_queue_size=16)
    steps: list[list[Call]] = []
    for i in range(rounds):
        steps.append(
            [{"what": "value_strong_until", "roff": 8 * (i * threads + t), "value": i << 8 | t} for t in range(threads)]
        )
        if committing == "one":
            commit = [{"what": "commit_strong" if t == i % threads else "skip"} for t in range(threads)]
            steps += [[{"what": "barrier"}] * threads, commit, [{"what": "barrier"}] * threads]
        else:
            steps.append([{"what": "commit_strong"}] * threads)
    steps.append([{"what": "barrier"}] * threads)
    steps.append([{"what": "wait_all" if t == 0 else "skip"} for t in range(threads)])
    results = made.run(steps)
    assert all(result == OK for step in results[:-1] for result in step)
    assert written(made, threads * rounds) == [i << 8 | t for i in range(rounds) for t in range(threads)]
    assert made.alone({"what": "position"}) == [threads * rounds]
    commits = results[-1][0]
    assert commits == rounds if committing == "one" else rounds <= commits <= threads * rounds


def test_threads_of_a_block_fill_weak_batches(ends):
    """Each thread has its own positions, which wrap, in the order of the threads or against it."""
    threads, rounds = 8, 12
    made = ends(send_queue_size=16)
    steps: list[list[Call]] = []
    for i in range(rounds):
        order = range(threads) if i % 2 else range(threads)[::-1]
        steps += [
            [
                {"what": "value_weak", "roff": 8 * (i * threads + n), "value": i << 8 | n,
                 "position": i * threads + n & (15 if i % 3 else -1)} for n in order
            ],
            [{"what": "barrier"}] * threads,
            [{"what": "commit_weak" if t == 0 else "skip", "nbytes": threads} for t in range(threads)],
            [{"what": "barrier"}] * threads,
        ]
    steps.append([{"what": "wait_all" if t == 0 else "skip"} for t in range(threads)])
    results = made.run(steps)
    assert all(result == OK for step in results[:-1] for result in step)
    assert results[-1][0] == rounds
    assert written(made, threads * rounds) == [i << 8 | n for i in range(rounds) for n in range(threads)]


def test_another_block_is_refused_until_the_commit(ends):
    made = ends()
    flags = made.a.memory.device_address + 4096
    first: list[Call] = [
        {"what": "value_strong", "roff": 0, "value": 7},
        {"what": "store", "position": flags, "value": 1},
        {"what": "await", "position": flags + 8, "value": 1},
        {"what": "commit_strong"},
        {"what": "store", "position": flags, "value": 2},
        {"what": "skip"},
        {"what": "skip"},
    ]
    second: list[Call] = [
        {"what": "await", "position": flags, "value": 1},
        {"what": "value_strong", "roff": 8, "value": 8},
        {"what": "commit_strong"},
        {"what": "store", "position": flags + 8, "value": 1},
        {"what": "await", "position": flags, "value": 2},
        {"what": "value_strong", "roff": 8, "value": 9},
        {"what": "commit_strong"},
    ]
    results = made.run([[a, b] for a, b in zip(first, second, strict=True)], grid=2)
    assert [b for _, b in results] == [OK, EBUSY, EBUSY, OK, OK, OK, OK]
    assert [a for a, _ in results] == [OK] * 7
    assert made.alone({"what": "wait_all"}) == [2]
    assert written(made, 2) == [7, 9]


def test_blocks_at_once_corrupt_nothing(ends):
    """Blocks that try until it is their turn: every write of each arrives."""
    blocks, threads, rounds = 3, 2, 200
    made = ends(send_queue_size=8)
    steps: list[list[Call]] = []
    for i in range(rounds):
        all_threads = range(blocks * threads)
        steps.append(
            [{"what": "value_strong_until", "roff": 8 * (i * len(all_threads) + t), "value": i << 8 | t}
             for t in all_threads]
        )
        steps.append([{"what": "barrier"}] * len(all_threads))
        steps.append([{"what": "commit_strong" if t % threads == 0 else "skip"} for t in all_threads])
        steps.append([{"what": "barrier"}] * len(all_threads))
    results = made.run(steps, grid=blocks)
    assert all(result == OK for step in results for result in step)
    assert made.alone({"what": "wait_all"}) == [blocks * rounds]
    count = blocks * threads * rounds
    assert written(made, count) == [i << 8 | t for i in range(rounds) for t in range(blocks * threads)]
