"""WRITEs, READs, SENDs and receives of kernels: bytes, immediate data, connections, and what is refused."""

import logging

import numpy as np
import pytest

from gpunetio import Access, device
from gpunetio.device import RDMA_IMM
from rdma_rig import NBYTES, Call

OK, EBUSY, EINVAL, ENOBUFS, EIO = device.OK, device.EBUSY, device.EINVAL, device.ENOBUFS, device.EIO
ETIMEDOUT = device.ETIMEDOUT
OUT = 1 << 15  # of an end's memory: what kernels leave there


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The NIC's complaints are what was asked for."""
    caplog.set_level(logging.CRITICAL, "gpunetio")


def committed(mode: str, count: int) -> Call:
    return {"what": f"commit_{mode}", "nbytes": count}


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_operations(ends, mode):
    """Each operation moves its bytes, from and to the offsets that it names."""
    made = ends()
    a, b = made.a.bytes, made.b.bytes
    rng = np.random.default_rng(5)
    a[:], b[:] = rng.integers(0, 256, NBYTES, np.uint8), rng.integers(0, 256, NBYTES, np.uint8)
    before = a.copy(), b.copy()
    assert made.alone(
        {"what": "recv_strong", "lbuf": made.b.buf, "loff": 500, "nbytes": 90}, {"what": "recv_commit_strong"},
        end=made.b,
    ) == [OK, OK]
    calls: list[Call] = [
        {"what": "write", "roff": 3, "loff": 11, "nbytes": 41},
        {"what": "inline", "roff": 100, "value": made.a.memory.device_address + 7, "nbytes": 28},
        {"what": "inline", "roff": 130, "value": made.a.memory.device_address + 9, "nbytes": 1},
        {"what": "value", "roff": 140, "value": 0x0807060504030201, "nbytes": 5},
        {"what": "read", "roff": 200, "loff": 1000, "nbytes": 77},
        {"what": "send", "loff": 2000, "nbytes": 81},
    ]
    steps: list[Call] = [
        {**call, "what": f"{call['what']}_{mode}", "position": i} for i, call in enumerate(calls)
    ]
    assert made.alone(*steps, committed(mode, len(calls)), {"what": "wait_all"}) == [OK] * 7 + [1]
    assert made.alone({"what": "recv_wait_all", "flags": 1}, end=made.b) == [1]
    wanted_a, wanted_b = before[0].copy(), before[1].copy()
    wanted_b[3:44] = before[0][11:52]
    wanted_b[100:128], wanted_b[130] = before[0][7:35], before[0][9]
    wanted_b[140:145] = [1, 2, 3, 4, 5]
    wanted_b[500:581] = before[0][2000:2081]
    wanted_a[1000:1077] = before[1][200:277]
    assert np.array_equal(b, wanted_b)
    assert np.array_equal(a, wanted_a)


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_messages_of_several_connections(ends, mode):
    """Each message tells its immediate data and its connection; those of a connection come in order."""
    connections, each = 3, 6
    made = ends(connections=connections, recv_queue_size=32)
    total = connections * each
    receives: list[Call] = [
        {"what": f"recv_{mode}", "lbuf": 0 if n % 4 == 0 else made.b.buf, "nbytes": 0 if n % 4 == 0 else 16,
         "loff": 16 * n, "position": n} for n in range(total)
    ]
    for half in (receives[: total // 2], receives[total // 2 :]):
        got = made.alone(*half, {"what": f"recv_commit_{mode}", "nbytes": len(half)}, end=made.b)
        assert got == [OK] * (len(half) + 1)
    # A receive without memory takes a WRITE with immediate data, which needs none.
    for n in range(total):
        conn, number = n % connections, n // connections
        without = n % 4 == 0
        call: Call = {
            "what": "value_strong" if without else "send_strong", "conn": conn, "roff": 8 * n + OUT, "value": n,
            "nbytes": 8, "imm": conn << 16 | number, "flags": RDMA_IMM if n % 3 or without else 0,
        }
        assert made.alone(call, {"what": "commit_strong", "conn": conn}, {"what": "wait_all"}) == [OK, OK, 1]
    at = made.b.memory.device_address + OUT + 4096
    count = made.alone({"what": "recv_wait_all", "value": at, "imm": at + 1024, "flags": 1}, end=made.b)
    assert count == [total]
    imms = made.b.bytes[OUT + 4096 :].view(np.uint32)[:total].tolist()
    conns = made.b.bytes[OUT + 4096 + 1024 :].view(np.uint32)[:total].tolist()
    for conn in range(connections):
        mine = [imm for imm, of in zip(imms, conns, strict=True) if of == conn]
        numbers = [
            conn << 16 | n // connections if n % 3 or n % 4 == 0 else 0 for n in range(total) if n % connections == conn
        ]
        assert mine == numbers
    again = made.alone({"what": "recv_wait_all", "flags": 0}, {"what": "recv_position"}, end=made.b)
    assert again == [0, total]


def test_messages_of_a_connection_that_closes(ends):
    """What nobody has taken of it is lost, with its receives, and later messages of others are taken as before."""
    made = ends(connections=2, recv_queue_size=4)
    post: list[Call] = [{"what": "recv_strong", "lbuf": made.b.buf}] * 2 + [{"what": "recv_commit_strong"}]
    take: Call = {"what": "recv_wait_all", "value": made.b.memory.device_address + OUT, "flags": 1}

    def send(conn: int, imm: int) -> None:
        call: Call = {"what": "send_strong", "conn": conn, "imm": imm, "flags": RDMA_IMM}
        assert made.alone(call, {"what": "commit_strong", "conn": conn}, {"what": "wait_all"}) == [OK, OK, 1]

    for turn in range(3):  # each with a new connection 0
        assert made.alone(*post, end=made.b) == [OK] * 3
        send(0, 1)
        for end in (made.a, made.b):
            next(each for each in end.connections if each.id == 0).close()
            end.connections = [each for each in end.connections if each.id != 0]
        send(1, 20 + turn)
        assert made.alone(take, end=made.b) == [1]
        assert made.b.bytes[OUT:].view(np.uint32)[0] == 20 + turn
        made.connect()


def test_receives_are_reused_and_never_too_many(ends):
    """ENOBUFS if all are posted; a weak hole is refused; many laps of a short queue."""
    made = ends(recv_queue_size=4)
    recv: Call = {"what": "recv_strong", "lbuf": made.b.buf, "nbytes": 8}
    posted = made.alone(*[recv] * 5, {"what": "recv_commit_strong"}, recv, end=made.b)
    assert posted == [OK] * 4 + [ENOBUFS, OK, ENOBUFS]
    for n in range(20):
        send: list[Call] = [
            {"what": "send_strong", "imm": 100 + n, "flags": RDMA_IMM}, {"what": "commit_strong"}, {"what": "wait_all"}
        ]
        assert made.alone(*send) == [OK, OK, 1]
        at = made.b.memory.device_address + OUT
        assert made.alone({"what": "recv_wait_all", "value": at, "flags": 0}, end=made.b) == [1]
        assert made.b.bytes[OUT:].view(np.uint32)[0] == 100 + n
        weak: Call = {"what": "recv_weak", "lbuf": made.b.buf, "nbytes": 8, "position": 4 + n}
        commit: Call = {"what": "recv_commit_weak", "nbytes": 1}
        assert made.alone(commit, weak, commit, end=made.b) == [EINVAL, OK, OK]


def test_ranges_and_numbers_that_do_not_exist(ends):
    """EINVAL, and nothing is enqueued."""
    made = ends()
    wrong: list[Call] = [
        {"conn": 1}, {"conn": -1}, {"roff": NBYTES - 7}, {"roff": -1}, {"nbytes": 0}, {"nbytes": NBYTES + 1},
        {"nbytes": -1}, {"nbytes": (1 << 30) + 1}, {"rbuf": EINVAL}, {"rbuf": 0}, {"roff": 1 << 62},
    ]
    local: list[Call] = [{"loff": NBYTES - 7}, {"loff": -1}, {"lbuf": EINVAL}, {"lbuf": 0}]
    calls: list[Call] = []
    for mode in ("strong", "weak"):
        calls += [{**one, "what": f"{name}_{mode}"} for name in ("write", "read") for one in wrong + local]
        calls += [{**one, "what": f"{name}_{mode}"} for name in ("inline", "value") for one in wrong]
        calls += [{"what": f"inline_{mode}", "nbytes": 29}, {"what": f"value_{mode}", "nbytes": 9}]
        calls += [{**one, "what": f"send_{mode}"} for one in local + wrong[:2]]
        calls += [{"what": f"commit_{mode}", "conn": 1}]
        calls += [{**one, "what": f"recv_{mode}"} for one in local]
    assert made.alone(*calls) == [EINVAL] * len(calls)
    assert made.alone({"what": "position"}, {"what": "commit_strong"}, {"what": "wait_all"}) == [0, OK, 0]


def test_a_connection_that_fails(ends, quiet):
    """A peer that does not allow writes: the wait says so, at once and later, and the device explains it."""
    made = ends(permissions=Access.REMOTE_READ)
    write: Call = {"what": "value_strong"}
    assert made.alone(write, write, write, {"what": "commit_strong"}, {"what": "wait_all"}) == [OK] * 4 + [EIO]
    error = made.a.connections[0].last_error()
    assert error is not None
    assert "write" in error.cause.lower()
    wait: Call = {"what": "wait_all"}
    assert made.alone(wait, write, {"what": "commit_strong"}, wait) == [EIO, OK, OK, EIO]
    assert made.b.connections[0].last_error() is not None


def test_commits_beside_a_connection_that_fails_are_counted_later(ends, quiet):
    """Once that is closed, by the next call."""
    made = ends(connections=2)
    write: Call = {"what": "value_strong"}
    made.b.connections[1].close()  # it does not answer any more
    commits: list[Call] = [write, {"what": "commit_strong"}] * 3
    commits += [{**write, "conn": 1}, {"what": "commit_strong", "conn": 1}]
    wait: Call = {"what": "wait_all"}
    assert made.alone(*commits, wait, wait) == [OK] * 8 + [EIO] * 2
    made.a.connections.pop().close()
    assert made.alone(write, {"what": "commit_strong"}, wait, wait) == [OK, OK, 4, 0]


def test_waits_end(ends, quiet):
    """A message that does not come, and receives of a peer that has gone."""
    made = ends(timeout=0.3)
    recv: list[Call] = [{"what": "recv_strong"}, {"what": "recv_commit_strong"}, {"what": "recv_wait_all", "flags": 1}]
    assert made.alone(*[{**call, "lbuf": made.b.buf} for call in recv], end=made.b) == [OK, OK, ETIMEDOUT]
