"""Ranks that meet: values exchanged over TCP, MPI and a store, and meshes of queue pairs."""

import contextlib
import gc
import json
import socket
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.errors import (
    BadStateError,
    InvalidValueError,
    NotFoundError,
    NotSupportedError,
    OperatingSystemError,
    TimedOutError,
)
from gpunetio.rendezvous import (
    Mesh,
    MpiRendezvous,
    PeerError,
    Rendezvous,
    StoreRendezvous,
    TcpRendezvous,
    from_environment,
    link,
)
from gpunetio.rendezvous.tcp import MOST_BYTES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
VALUES = JSON | st.binary(max_size=100)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at_once(*calls):
    """What each call returns, or the error that it raises; they run in threads of their own."""

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def by_tcp(size, **options):
    port = free_port()
    return at_once(*(lambda rank=rank: TcpRendezvous(rank, size, port=port, **options) for rank in range(size)))


class Store:
    """What `StoreRendezvous` uses of torch.distributed's stores, for threads."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self.values[key] = bytes(value)
            self._changed.notify_all()

    def wait(self, keys, timeout):
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def get(self, key):
        with self._changed:
            return self.values[key]

    def delete_key(self, key):
        with self._changed:
            return self.values.pop(key, None) is not None


class Communicator:
    """What `MpiRendezvous` uses of mpi4py's communicators, for threads: collective calls that are not blocking."""

    class Request:
        def __init__(self, parts, size, finish):
            self._parts, self._size, self._finish = parts, size, finish

        def Test(self):
            if len(self._parts) < self._size:
                return False
            self._finish()
            return True

    def __init__(self, rank, size, calls):
        self._rank, self._size, self._calls, self._turn = rank, size, calls, 0

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._size

    def Iallgather(self, sent, received):
        return self._request(sent, lambda parts: np.copyto(received, np.concatenate(parts)))

    def Iallgatherv(self, sent, layout):
        received, lengths, starts, kind = layout
        assert kind == "BYTE"

        def finish(parts):
            for part, length, start in zip(parts, lengths, starts, strict=True):
                assert part.dtype == np.uint8
                received[start : start + length] = part

        return self._request(sent, finish)

    def _request(self, sent, finish):
        parts = self._calls.setdefault(self._turn, {})
        parts[self._rank] = sent.copy()
        self._turn += 1
        return self.Request(parts, self._size, lambda: finish([parts[rank] for rank in range(self._size)]))


@pytest.fixture
def mpi4py(monkeypatch):
    """A stand-in for the package."""
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(BYTE="BYTE", COMM_WORLD=Communicator(0, 1, {}))
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return module


@pytest.fixture(params=["tcp", "mpi", "store"])
def ranks(request, mpi4py):
    """Three ranks of each kind, which meet in one process."""
    if request.param == "tcp":
        found = by_tcp(3, timeout=20)
    elif request.param == "mpi":
        calls = {}
        found = [MpiRendezvous(Communicator(rank, 3, calls), timeout=20) for rank in range(3)]
    else:
        store = Store()
        found = [StoreRendezvous(store, rank, 3, timeout=20) for rank in range(3)]
    assert all(isinstance(each, Rendezvous) for each in found), found
    yield found
    at_once(*(each.close for each in found))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three():
    found = by_tcp(3, timeout=20)
    yield found
    at_once(*(each.close for each in found))


@given(values=st.lists(VALUES, min_size=3, max_size=3))
@settings(max_examples=50)
def test_every_value_arrives_as_it_was(three, values):
    gathered = at_once(*(lambda each=each, value=value: each.allgather(value) for each, value in zip(three, values)))
    assert gathered == [values] * 3
    assert [type(value) for value in gathered[0]] == [type(value) for value in values]


def test_all_calls_of_every_kind_of_rendezvous(ranks):
    for turn in range(3):
        gathered = at_once(*(lambda each=each, turn=turn: each.allgather([each.rank, turn]) for each in ranks))
        assert gathered == [[[rank, turn] for rank in range(3)]] * 3
    told = at_once(*(lambda each=each: each.broadcast({"from": each.rank}, root=2) for each in ranks))
    assert told == [{"from": 2}] * 3
    unequal = at_once(*(lambda each=each: each.allgather(b"x" * 1000 * each.rank) for each in ranks))
    assert unequal == [[b"", b"x" * 1000, b"x" * 2000]] * 3


def test_nobody_leaves_a_barrier_before_all_have_come(ranks):
    came = []

    def come(each):
        time.sleep(0.05 * each.rank)
        came.append(each.rank)
        each.barrier()
        return sorted(came)

    assert at_once(*(lambda each=each: come(each) for each in ranks)) == [[0, 1, 2]] * 3


def test_ranks_in_different_calls_are_told(ranks):
    first, *others = at_once(ranks[0].barrier, *(lambda each=each: each.allgather(1) for each in ranks[1:]))
    assert first is None
    for error in others:
        assert isinstance(error, PeerError)
        assert "rank 0 is in another call" in str(error)


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object(), {"x": np.int64(3)}])
def test_values_that_cannot_be_sent(ranks, value):
    with pytest.raises(InvalidValueError, match="Send bytes, or what JSON can express"):
        ranks[0].allgather(value)


def test_a_rank_that_does_not_come(mpi4py):
    store, ranks = Store(), by_tcp(3, timeout=20)
    late = [
        ranks[1],
        MpiRendezvous(Communicator(1, 3, {}), timeout=0.2),
        StoreRendezvous(store, 1, 3, timeout=0.2),
    ]
    late[0].timeout = 0.2
    for each in late:
        with pytest.raises(TimedOutError, match=r"within 0\.2 s"):
            each.barrier()
    at_once(*(each.close for each in ranks))


def test_closed_is_closed(ranks):
    ranks[1].close()
    ranks[1].close()
    with pytest.raises(BadStateError, match="rank 1 has left this rendezvous"):
        ranks[1].barrier()
    assert "closed" in repr(ranks[1])


def test_a_store_does_not_fill():
    store = Store()
    ranks = [StoreRendezvous(store, rank, 2, timeout=20) for rank in range(2)]
    for _ in range(20):
        at_once(*(each.barrier for each in ranks))
    assert len(store.values) <= 4


def test_alone():
    with TcpRendezvous(0, 1) as alone:
        assert alone.allgather({"a": (1, 2)}) == [{"a": [1, 2]}]
        assert alone.broadcast(b"x") == b"x"
        alone.barrier()


@pytest.mark.parametrize("arguments, words", [
    ((0, 0), "size 0"), ((2, 2), "rank 2: the ranks of 2 processes are 0 to 1"), ((-1, 2), "rank -1"),
    ((0, "2"), "size '2'"), ((True, 2), "rank True"), ((1.0, 2), r"rank 1\.0"),
])
def test_ranks_and_sizes_that_are_none(arguments, words):
    with pytest.raises(InvalidValueError, match=words):
        TcpRendezvous(*arguments)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_deadlines_that_are_none(timeout):
    with pytest.raises(InvalidValueError, match="give a positive number of seconds"):
        TcpRendezvous(0, 2, timeout=timeout)


# --- TCP -------------------------------------------------------------------------------------------------------------


def test_rank_0_may_come_last():
    port = free_port()

    def start(rank):
        time.sleep(0 if rank else 0.5)
        return TcpRendezvous(rank, 3, port=port, timeout=20)

    ranks = at_once(*(lambda rank=rank: start(rank) for rank in range(3)))
    assert at_once(*(lambda each=each: each.allgather(each.rank) for each in ranks)) == [[0, 1, 2]] * 3
    at_once(*(each.close for each in ranks))


# JSON may have halves of surrogate pairs, as escapes (RFC 8259 8.2). The bytes of one are no UTF-8 (RFC 3629 3).
HALVES = [
    link.encode("join", rank=1, size=2, key="\ud800"),
    link.encode("join", rank=1, size=2, key="xyz").replace(b"xyz", b"\xed\xa0\x80"),
    link.encode("\udfff", rank=1, size=2, key=""),
    link.encode("error", text="\ud800"),
]


def test_strangers_do_not_keep_ranks_waiting():
    """Those who send halves of characters, a web client, one who says nothing, and one who goes at once; then the rank
    that is expected."""
    port, opened = free_port(), []

    def strangers_then_rank():
        for greeting in (*HALVES, b"GET / HTTP/1.0\r\n\r\n", b"", None):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    sock = socket.create_connection(("127.0.0.1", port), 5)
                    break
            if greeting is None:
                sock.close()
            else:
                sock.sendall(greeting)
                opened.append(sock)
        return TcpRendezvous(1, 2, port=port, timeout=20)

    ranks = at_once(lambda: TcpRendezvous(0, 2, port=port, timeout=20), strangers_then_rank)
    assert at_once(*(lambda each=each: each.allgather(each.rank) for each in ranks)) == [[0, 1]] * 2
    at_once(*(each.close for each in ranks), *(sock.close for sock in opened))


def test_callers_that_are_wrong_are_told_and_the_others_go_on():
    port = free_port()

    def wrong_then_right():
        wrong = []
        for rank, size in ((1, 5), (2, 3)):
            with pytest.raises(PeerError) as caught:
                TcpRendezvous(rank, size, port=port, timeout=20)
            wrong.append(str(caught.value))
        return wrong, TcpRendezvous(1, 3, port=port, timeout=20)

    first, (wrong, last), second = at_once(
        lambda: TcpRendezvous(0, 3, port=port, timeout=20),
        lambda: (time.sleep(0.5), wrong_then_right())[1],
        lambda: TcpRendezvous(2, 3, port=port, timeout=20),
    )
    assert "takes part in a rendezvous of 5 ranks, but this one has 3" in wrong[0]
    assert "wants to be rank 2, which has joined already" in wrong[1]
    at_once(first.close, last.close, second.close)


@pytest.mark.parametrize("size", [4, 1000])
def test_who_is_missing_is_named(size):
    port = free_port()
    first, _ = at_once(
        lambda: TcpRendezvous(0, size, port=port, timeout=3), lambda: TcpRendezvous(2, size, port=port, timeout=3)
    )
    missing = ", ".join(str(rank) for rank in range(1, size) if rank != 2)
    assert isinstance(first, TimedOutError)
    assert f"ranks {missing} of {size} did not connect to 127.0.0.1 port {port} within 3 s" in str(first)


def test_a_rank_0_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(TimedOutError, match="rank 0 did not answer"):
        TcpRendezvous(1, 2, port=port, timeout=0.3)
    with pytest.raises(OperatingSystemError, match="cannot connect to rank 0 at 'no such host'"):
        TcpRendezvous(1, 2, "no such host", port, timeout=5)


def test_a_rank_that_ends_is_noticed_by_all():
    ranks = by_tcp(3, timeout=60)
    threading.Timer(0.2, ranks[2].close, [ValueError("out of cheese")]).start()
    errors = at_once(ranks[0].barrier, ranks[1].barrier)
    for error in errors:
        assert isinstance(error, PeerError)
        assert "rank 2 (127.0.0.1) ended with an error: out of cheese" in str(error)
    at_once(ranks[0].close, ranks[1].close)


def test_a_rank_that_ends_between_two_looks(monkeypatch):
    """Its end is the reason, also if it comes just after rank 0 has looked for its value in vain."""
    ranks = by_tcp(2, timeout=20)
    expect = link.Link.expect

    def expect_then_lose(self, *kinds, timeout=None):
        try:
            return expect(self, *kinds, timeout=timeout)
        except TimedOutError:
            ranks[1].close()
            assert self.failure_soon()
            raise

    monkeypatch.setattr(link.Link, "expect", expect_then_lose)
    with ranks[0], pytest.raises(PeerError, match=r"rank 1 .*closed the connection"):
        ranks[0].barrier()


def test_a_value_of_the_largest_size_and_one_beyond():
    ranks = by_tcp(2, timeout=60)
    most = bytes(MOST_BYTES // 2 - 1)  # and a byte that says what it is
    assert at_once(*(lambda each=each: each.allgather(most) for each in ranks)) == [[most, most]] * 2
    with pytest.raises(InvalidValueError, match=f"a value of {len(most) + 2} bytes: with 2 ranks, {len(most) + 1} is"):
        ranks[0].allgather(most + b"x")
    at_once(*(each.close for each in ranks))


@given(answer=st.one_of(
    st.just({"values": "x"}), st.just({"values": [{}]}), st.just({"values": [{"data": "zz"}, {"data": ""}]}),
    st.dictionaries(st.text(max_size=5), JSON, max_size=2),
    st.lists(st.fixed_dictionaries({"data": st.binary(max_size=4).map(bytes.hex)}), min_size=2, max_size=2)
    .map(lambda values: {"values": values}),
))
@settings(max_examples=15)
def test_nonsense_of_rank_0_is_an_error_of_the_peer(answer):
    """A rank 0 that says anything: what comes back is a value, or a PeerError."""
    with link.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        def rank_0():
            sock, caller = link.accept(listener, timeout=20)
            talk = link.Link(sock, caller)
            talk.expect("join")
            talk.send("welcome")
            talk.expect("value")
            talk.send("values", **{key: value for key, value in answer.items() if key != "kind"})
            talk.close()

        def rank_1():
            with TcpRendezvous(1, 2, port=port, timeout=20) as each:
                return each.allgather(1)

        _, outcome = at_once(rank_0, rank_1)
    if not isinstance(outcome, PeerError):
        parts = [bytes.fromhex(value["data"]) for value in answer["values"]]
        assert outcome == [part[1:] if part[:1] == b"b" else json.loads(part[1:]) for part in parts]


# --- who has started the ranks ---------------------------------------------------------------------------------------


@pytest.fixture
def nobody(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_of_mpirun(nobody, mpi4py, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with from_environment(timeout=7) as ranks:
        assert isinstance(ranks, MpiRendezvous)
        assert (ranks.rank, ranks.size, ranks.timeout) == (0, 1, 7)


def test_ranks_of_torchrun(nobody, monkeypatch):
    store = Store()
    torch = types.ModuleType("torch")
    torch.distributed = types.SimpleNamespace(
        rendezvous=lambda url: iter([(store, 1, 2)]) if url == "env://" else None,
        PrefixStore=lambda prefix, inner: inner if prefix == "gpunetio" else None,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    ranks = from_environment()
    assert isinstance(ranks, StoreRendezvous)
    other = StoreRendezvous(store, 0, 2)
    assert at_once(lambda: ranks.allgather("b"), lambda: other.allgather("a")) == [["a", "b"]] * 2


def test_real_torch():
    distributed = pytest.importorskip("torch.distributed", reason="needs PyTorch (extra 'torch')")
    store = distributed.HashStore()
    ranks = [StoreRendezvous(store, rank, 2, timeout=20) for rank in range(2)]
    for turn in range(3):
        assert at_once(*(lambda each=each, turn=turn: each.allgather(turn) for each in ranks)) == [[turn] * 2] * 2
    with pytest.raises(TimedOutError):
        StoreRendezvous(distributed.HashStore(), 0, 2, timeout=0.2).barrier()


def test_nobody_has_started_them(nobody):
    with pytest.raises(NotFoundError, match="neither mpirun nor torchrun"):
        from_environment()


def test_a_package_that_is_missing_is_named(nobody, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(NotSupportedError, match=r"gpunetio\[mpi\]"):
        MpiRendezvous()
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(NotSupportedError, match=r"gpunetio\[torch\]"):
        from_environment()


# --- meshes ----------------------------------------------------------------------------------------------------------


@gn.kernel
def put_everywhere(mesh, rank, size, laddr, lkey, statuses):
    """Each thread writes this rank's number + 1 into a byte of its peer's memory."""
    peer = dev.global_id()
    status = dev.OK
    if peer != rank:
        row = mesh + 32 * peer
        qp, raddr, rkey = dev.ld64(row), dev.ld64(row + 8), dev.ld64(row + 16)
        status = dev.wait(qp, dev.put(qp, raddr + rank, rkey, laddr, lkey, 1))
    dev.st64(statuses + 8 * peer, status)


def in_mesh(nic, rank, size, port, work, **options):
    with gn.Gpu("host") as gpu:
        pd = nic.create_pd()
        memory = np.zeros(size + rank, np.uint8)
        with gn.mesh(rank, size, pd=pd, gpu=gpu, memory=memory, port=port, **options) as mesh:
            return work(mesh, gpu, pd, memory)


def test_every_rank_reaches_every_other():
    size, port = 3, free_port()

    def work(mesh, gpu, pd, memory):
        assert [peer.rank for peer in mesh.peers] == [0, 1, 2]
        assert [peer.nbytes for peer in mesh.peers] == [3, 4, 5]
        assert mesh.peers[mesh.rank].qp is None
        own, statuses = np.full(1, mesh.rank + 1, np.uint8), gpu.alloc(8 * size)
        source = pd.register(own)
        launch = put_everywhere[1, size, gpu](mesh, mesh.rank, size, source.address, source.lkey, statuses)
        assert launch.wait(timeout=100)
        assert not statuses.array.view(np.int64).any()
        mesh.barrier()
        return [int(value) for value in memory[:size]]

    with gn.open("soft0") as nic:
        found = at_once(*(
            lambda rank=rank: in_mesh(nic, rank, size, port, work, depth=16, timeout=20) for rank in range(size)
        ))
        assert found == [[0, 2, 3], [1, 0, 3], [1, 2, 0]]


def test_a_mesh_that_fails_leaves_nothing_open():
    """One rank cannot make its queues; the others are told, and close theirs."""
    port = free_port()
    with gn.open("soft0") as nic:
        outcomes = at_once(*(
            lambda rank=rank: in_mesh(nic, rank, 3, port, lambda *_: None, depth=0 if rank == 1 else 16)
            for rank in range(3)
        ))
        assert isinstance(outcomes[1], InvalidValueError)
        assert isinstance(outcomes[0], PeerError)
        assert "rank 1" in str(outcomes[0])
        assert isinstance(outcomes[2], PeerError)


def test_a_rank_whose_work_fails_does_not_wait_for_the_others():
    port = free_port()

    def work(mesh, *_):
        if mesh.rank == 0:
            raise ZeroDivisionError("no work")
        mesh.barrier()

    with gn.open("soft0") as nic:
        first, second = at_once(*(lambda rank=rank: in_mesh(nic, rank, 2, port, work) for rank in range(2)))
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, PeerError)
    assert "no work" in str(second)


def test_what_a_mesh_is_not_told_twice_or_by_half():
    with TcpRendezvous(0, 1) as alone, gn.open("soft0") as nic, gn.Gpu("host") as gpu:
        pd = nic.create_pd()
        with pytest.raises(InvalidValueError, match="rank 0 and size None go together"):
            gn.mesh(0, pd=pd, gpu=gpu)
        with pytest.raises(InvalidValueError, match="or the rendezvous"):
            gn.mesh(0, 1, pd=pd, gpu=gpu, via=alone)
        with gn.mesh(pd=pd, gpu=gpu, via=alone) as mesh:
            assert isinstance(mesh, Mesh)
            assert mesh.memory is None
            assert "rank 0 of 1" in repr(mesh)
        mesh.close()
        with pytest.raises(BadStateError, match="put_everywhere: argument mesh is closed"):
            put_everywhere[1, 1, gpu](mesh, 0, 1, 0, 0, 0)
        alone.barrier()  # a rendezvous that was given stays open


# --- a key, a socket of the caller's, and leaving -------------------------------------------------------------------


def test_memory_that_mpi_may_still_write_to_is_kept(monkeypatch, mpi4py):
    """A collective call cannot be cancelled: it may complete after this rank has given up."""
    given = []
    gather = Communicator.Iallgather

    def noted(self, sent, received):
        given.extend([weakref.ref(sent), weakref.ref(received)])
        return gather(self, sent.copy(), received)

    monkeypatch.setattr(Communicator, "Iallgather", noted)
    monkeypatch.setattr(Communicator.Request, "__init__", lambda self, *_: None)  # it holds none of it
    monkeypatch.setattr(Communicator.Request, "Test", lambda self: False)
    with pytest.raises(TimedOutError, match=r"within 0\.1 s"):
        MpiRendezvous(Communicator(1, 3, {}), timeout=0.1).barrier()
    gc.collect()
    assert len(given) == 2
    assert all(memory() is not None for memory in given)


def test_all_ranks_hear_that_one_cannot_be_answered(monkeypatch):
    """It has handed in its value, and is gone when rank 0 answers."""
    ranks = by_tcp(3, timeout=60)
    first, send = next(iter(ranks[0]._links.values())), link.Link.send

    def lost(self, kind, **body):
        if self is first and kind == "values":
            raise PeerError("a rank was lost")
        send(self, kind, **body)

    monkeypatch.setattr(link.Link, "send", lost)
    start = time.monotonic()
    errors = at_once(*(rank.barrier for rank in ranks))
    assert [type(error) for error in errors] == [PeerError] * 3
    assert all("a rank was lost" in str(error) for error in errors)
    assert time.monotonic() - start < 50
    at_once(*(rank.close for rank in ranks))


def test_a_listening_socket_is_for_another_attempt():
    listener = link.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(TimedOutError, match="rank 1 of 2 did not connect"):
        TcpRendezvous(0, 2, "127.0.0.1", port, listener=listener, timeout=0.1)
    ends = at_once(
        lambda: TcpRendezvous(0, 2, "127.0.0.1", port, listener=listener, timeout=10),
        lambda: TcpRendezvous(1, 2, "127.0.0.1", port, timeout=10),
    )
    for end in ends:
        end.close()


def test_a_listening_socket_of_the_callers():
    listener = link.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    ends = at_once(
        lambda: TcpRendezvous(0, 2, "127.0.0.1", port, listener=listener, key="ours", timeout=10),
        lambda: TcpRendezvous(1, 2, "127.0.0.1", port, key="ours", timeout=10),
    )
    assert at_once(*(lambda end=end: end.allgather(end.rank) for end in ends)) == [[0, 1], [0, 1]]
    assert listener.fileno() == -1
    for end in ends:
        end.close()


def test_a_key_that_cannot_be_sent():
    """Such are the bytes of an environment variable that are no UTF-8 (PEP 383)."""
    with pytest.raises(InvalidValueError, match=r"key = 'k\\udcff' has bytes that are not UTF-8"):
        TcpRendezvous(0, 2, key="k\udcff", timeout=2)


def test_a_rank_with_another_key():
    port = free_port()
    first, second = at_once(
        lambda: TcpRendezvous(0, 2, port=port, key="ours", timeout=2),
        lambda: TcpRendezvous(1, 2, port=port, key="theirs", timeout=2),
    )
    assert isinstance(first, TimedOutError)
    assert isinstance(second, PeerError)
    assert "gave another key: it belongs to another rendezvous" in str(second)


@pytest.mark.parametrize("leaves", [True, False])
def test_leaving_is_no_failure(leaves):
    first, second = by_tcp(2, timeout=10)
    assert first.failure is None
    ended = threading.Thread(target=second.leave if leaves else second.close)
    ended.start()
    with pytest.raises(PeerError, match="closed the connection"):
        first.allgather(0)
    assert (first.failure is None) is leaves
    first.leave()
    ended.join(10)
