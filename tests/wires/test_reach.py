"""Requests without packets, between NICs on the twin of a GPU: what they reach, and what ends them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import neighbour
from gpunetio import ExportedQp, Gpu, GpuMemory, MemType, PortConfig, device, kernel, verbs
from gpunetio.enums import Access, QpAtomicType
from gpunetio.nic.nic import SoftNic
from gpunetio.verbs import PD
from nic_rig import until

pytestmark = [pytest.mark.soft_nic, pytest.mark.timeout(120)]

SIZE = 1 << 14
PUT, GET, ADD, INLINE = range(4)
ADD32, ADD64, SWAP32, TWO_WRITES, TWO_READS = range(5)  # what is no run


@kernel
def request(qp, kind, raddr, rkey, laddr, lkey, nbytes, value, out):
    """Make one request and wait for it: its status goes to `out`."""
    if kind == PUT:
        ticket = device.put(qp, raddr, rkey, laddr, lkey, nbytes, device.EXCLUSIVE)
    elif kind == GET:
        ticket = device.get(qp, raddr, rkey, laddr, lkey, nbytes, device.EXCLUSIVE)
    elif kind == ADD:
        ticket = device.signal(qp, raddr, rkey, laddr, lkey, value, device.EXCLUSIVE)
    else:
        ticket = device.p(qp, raddr, rkey, value, nbytes, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


@kernel
def requests_on_a_collapsed_cq(qp, count, raddr, rkey, laddr, lkey, out):
    """Make requests of 8 bytes, and wait for the last: its status goes to `out`."""
    ticket = 0
    for i in range(count):
        ticket = device.put(qp, raddr + 8 * i, rkey, laddr + 8 * i, lkey, 8, device.EXCLUSIVE)
    status = device.EBUSY
    while status == device.EBUSY:
        status = device.poll_collapsed(qp, ticket, device.EXCLUSIVE)
    device.st64(out, status)


@kernel
def stream(qp, count, every, odd_raddr, odd_rkey, raddr, rkey, laddr, lkey, out):
    """Write words, some of them to another region, as fast as the queue takes them: the last status goes to `out`."""
    ticket = 0
    for i in range(count):
        at = 8 * (i & 255)
        if i % every == 0:
            ticket = device.put(qp, odd_raddr + at, odd_rkey, laddr + at, lkey, 8, device.EXCLUSIVE)
        else:
            ticket = device.put(qp, raddr + at, rkey, laddr + at, lkey, 8, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


@kernel
def no_run(qp, kind, raddr, rkey, laddr, lkey, out):
    """Make a request that is no run, behind a NOP, with a DUMP behind it: the status of the last one goes to `out`."""
    first = device.reserve(qp, 4, device.EXCLUSIVE)
    flags = device.CQ_UPDATE
    device.prepare_nop(qp, first, flags)
    if kind == ADD32:
        device.prepare_masked_add(qp, first + 1, 4, raddr, rkey, laddr, lkey, 3, 0, flags)
    elif kind == ADD64:
        device.prepare_masked_add(qp, first + 1, 8, raddr, rkey, laddr, lkey, -1, 1 << 31, flags)
    elif kind == SWAP32:
        device.prepare_masked_swap32(qp, first + 1, raddr, rkey, laddr, lkey, 0, 0x1234, 0, 0xFFFF, flags)
    elif kind == TWO_WRITES:
        device.prepare_write2(qp, first + 1, raddr, rkey, laddr, lkey, 100, laddr + 1000, lkey, 30, flags)
    else:
        device.prepare_read2(qp, first + 1, raddr, rkey, laddr, lkey, 100, laddr + 1000, lkey, 30, flags)
    device.prepare_dump(qp, first + 2, laddr, lkey, 1, flags)
    device.prepare_nop(qp, first + 3, flags)
    ticket = device.post(qp, first, first + 3, device.EXCLUSIVE)
    device.st64(out, device.wait(qp, ticket, device.EXCLUSIVE))


@dataclass
class End:
    """A NIC with a queue, and a region in the twin's memory."""

    gpu: Gpu
    ctx: verbs.Context
    pd: PD
    queue: ExportedQp
    memory: GpuMemory
    region: Any

    @classmethod
    def open(cls, gpu: Gpu, name: str) -> "End":
        ctx = verbs.open(name, port=PortConfig(engine="twin", addresses=(neighbour.address(),)))
        pd = ctx.create_pd()
        memory = gpu.alloc(SIZE)
        return cls(gpu, ctx, pd, gpu.create_qp(pd, 16, timeout=20.0), memory, pd.register(memory))

    @property
    def nic(self) -> Any:
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    @property
    def packets(self) -> int:
        return int(self.nic.counters["rdma_tx_packets"] + self.nic.counters["rdma_rx_packets"])

    @property
    def sent_again(self) -> int:
        """How often packets were sent again, as none was acknowledged in time or one was missing."""
        return int(self.nic.counters["local_ack_timeout_err"] + self.nic.counters["packet_seq_err"])

    @property
    def reaches(self) -> bool:
        """Whether the engine may make requests of the queue without packets."""
        row = self.nic.qps[self.queue.qpn]
        return bool(row["peer_keys"])

    def post(self, kind: int, far: "End", at: int = 0, nbytes: int = 64, to: int = 0, value: int = 1) -> int:
        """Have a kernel make a request from `at` here, or to there, and `to` there: its status."""
        with self.gpu.alloc(8, MemType.CPU_GPU) as out:
            where = far.region.address + to, far.region.rkey, self.region.address + at, self.region.lkey
            assert request[1, 1, self.gpu](self.queue, kind, *where, nbytes, value, out).wait(60)
            return int(out.array.view(np.int64)[0])

    def write(self, seed: int) -> np.ndarray:
        data = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        self.memory.write(data)
        return data


def connect(a: End, b: End, atomic_type: QpAtomicType = QpAtomicType.UP_TO_8BYTES) -> None:
    """Connect both ends, and wait until each knows of the other."""
    for ours, theirs in ((a, b), (b, a)):
        ours.queue.connect(theirs.queue.qp.endpoint(), ack_timeout=14, retry_cnt=7, atomic_type=atomic_type)
    until(lambda: a.reaches and b.reaches, "each end to know of the other")


def known(end: End, key: int) -> bool:
    """Whether an end knows of a key of its peer."""
    (peer,) = end.nic.reach.peers.values()
    return peer.keys is not None and key in peer.keys.rows["key"] & 0xFFFF_FFFF


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[End, End]]:
    """Two ends whose NICs take each other for NICs of different processes."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(SoftNic, "join", lambda self, other: None)
        gpu = stack.enter_context(Gpu("twin"))
        ends = []
        for name in ("soft6", "soft7"):
            ends.append(End.open(gpu, name))
            stack.callback(ends[-1].ctx.close)
        yield ends[0], ends[1]


@pytest.fixture
def ends(opened: tuple[End, End]) -> tuple[End, End]:
    """The same, connected anew, with regions that have all rights."""
    a, b = opened
    for end in opened:
        end.queue.qp.reset()
        end.queue.reset()
    connect(a, b)
    until(lambda: known(a, b.region.rkey) and known(b, a.region.rkey), "each end to know the other's region")
    return a, b


# --- what they reach -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 7, 8, 64, 65, 4097, SIZE])
def test_contents(ends, nbytes):
    a, b = ends
    before, here, there = a.packets, a.write(1), b.write(2)
    assert a.post(PUT, b, nbytes=nbytes) == device.OK
    assert np.array_equal(b.memory.read(), [*here[:nbytes], *there[nbytes:]])
    there = b.write(3)
    assert a.post(GET, b, nbytes=nbytes) == device.OK
    assert np.array_equal(a.memory.read(), [*there[:nbytes], *here[nbytes:]])
    assert a.packets == before


def test_both_ways_and_words(ends):
    a, b = ends
    a.write(4), b.write(5)
    before = a.packets + b.packets
    word = int(b.memory.read().view(np.int64)[2])
    for count in range(1, 4):
        assert a.post(ADD, b, at=64, to=16, value=5) == device.OK
        assert int(b.memory.read().view(np.int64)[2]) == word + 5 * count
        assert int(a.memory.read().view(np.int64)[8]) == word + 5 * (count - 1)
    assert b.post(INLINE, a, to=8, nbytes=8, value=77) == device.OK
    assert int(a.memory.read().view(np.int64)[1]) == 77
    assert a.packets + b.packets == before


def make_no_run(a: End, b: End, kind: int, to: int) -> int:
    """Have a kernel make such a request from and to byte 64 of `a`, at `to` in the region of `b`: its status."""
    where = b.region.address + to, b.region.rkey, a.region.address + 64, a.region.lkey
    with a.gpu.alloc(8, MemType.CPU_GPU) as out:
        assert no_run[1, 1, a.gpu](a.queue, kind, *where, out).wait(60)
        return int(out.array.view(np.int64)[0])


@pytest.mark.parametrize("kind", [ADD32, ADD64, SWAP32, TWO_WRITES, TWO_READS])
def test_requests_that_are_no_run(ends, kind):
    a, b = ends
    for round in range(3):
        before, here, there = a.packets, a.write(20 + round), b.write(30 + round)
        assert make_no_run(a, b, kind, 1024) == device.OK
        assert a.packets == before
        nbytes = 4 if kind in (ADD32, SWAP32) else 8
        old = int.from_bytes(there[1024 : 1024 + nbytes].tobytes(), "little")
        if kind in (TWO_WRITES, TWO_READS):
            source, target = (here, there) if kind == TWO_WRITES else (there, here)
            at, to = (64, 1024) if kind == TWO_WRITES else (1024, 64)
            pieces = [(at, to, 100), (at + 1000, to + 100, 30)] if kind == TWO_WRITES else [
                (at, to, 100), (at + 100, to + 1000, 30)
            ]
            for begin, end, size in pieces:
                target[end : end + size] = source[begin : begin + size]
        else:
            new = {
                ADD32: (old + 3) & (1 << 32) - 1,
                # Two fields of 32 bits, without a carry between them: -1 in both.
                ADD64: ((old >> 32) - 1 & (1 << 32) - 1) << 32 | (old - 1 & (1 << 32) - 1),
                SWAP32: old & ~0xFFFF | 0x1234,
            }[kind]
            there[1024 : 1024 + nbytes] = np.frombuffer(new.to_bytes(nbytes, "little"), np.uint8)
            here[64 : 64 + nbytes] = np.frombuffer(old.to_bytes(nbytes, "big" if nbytes == 4 else "little"), np.uint8)
        assert np.array_equal(a.memory.read(), here)
        assert np.array_equal(b.memory.read(), there)


@pytest.mark.parametrize("kind", [ADD32, SWAP32, TWO_WRITES, TWO_READS])
def test_what_is_no_run_and_fails_a_check(ends, kind):
    """The peer hears of it, by packets, and nothing has happened."""
    a, b = ends
    before, here, there = a.packets, a.write(40), b.write(41)
    assert make_no_run(a, b, kind, SIZE) == device.EIO
    assert "REMOTE_ACCESS" in str(a.queue.last_error())
    assert a.packets > before
    assert np.array_equal(a.memory.read(), here)
    assert np.array_equal(b.memory.read(), there)


def test_a_masked_atomic_that_the_peer_does_not_allow(ends):
    a, b = ends
    for end in ends:
        end.queue.qp.reset()
        end.queue.reset()
    connect(a, b, QpAtomicType.IB_SPEC)
    there = b.write(42)
    assert make_no_run(a, b, ADD32, 1024) == device.EIO
    assert np.array_equal(b.memory.read(), there)


def test_a_collapsed_cq(ends):
    """Its one entry names the last request."""
    a, b = ends
    a.queue, first = a.gpu.create_qp(a.pd, 64, cq_collapsed=True, timeout=20.0), a.queue
    b.queue, second = b.gpu.create_qp(b.pd, 16, timeout=20.0), b.queue
    try:
        connect(a, b)
        before, here, there = a.packets, a.write(13), b.write(14)
        where = b.region.address, b.region.rkey, a.region.address, a.region.lkey
        with a.gpu.alloc(8, MemType.CPU_GPU) as out:
            for count in (1, 3, 40, 2):
                assert requests_on_a_collapsed_cq[1, 1, a.gpu](a.queue, count, *where, out).wait(60)
                assert out.array.view(np.int64)[0] == device.OK
        assert np.array_equal(b.memory.read(), [*here[:320], *there[320:]])
        assert a.packets == before
    finally:
        a.queue.close()
        b.queue.close()
        a.queue, b.queue = first, second


@pytest.mark.slow
def test_129_queues(ends):
    """As many as NCCL's programs have contexts: none of their requests takes packets."""
    a, b = ends
    pairs = [[replace(end, queue=end.gpu.create_qp(end.pd, 16, timeout=20.0)) for end in ends] for _ in range(128)]
    try:
        for pair in pairs:
            connect(*pair)
        before = a.packets + b.packets
        for seed, (here, there) in enumerate([(a, b), *map(tuple, pairs[::31]), tuple(pairs[-1])]):
            data = here.write(seed)
            assert here.post(PUT, there, nbytes=SIZE) == device.OK
            assert np.array_equal(there.memory.read(), data)
            assert there.post(ADD, here, at=64, to=16, value=seed) == device.OK
        assert a.packets + b.packets == before
    finally:
        for pair in pairs:
            for end in pair:
                end.queue.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([PUT, GET, ADD]), st.booleans(), st.integers(0, 100), st.integers(0, 100)),
                min_size=1, max_size=6))
def test_requests_of_both_in_any_order(ends, requests):
    """Memory is that of a model in plain Python, and nothing is sent."""
    model = [end.write(seed).copy() for seed, end in enumerate(ends)]
    before = sum(end.packets for end in ends)
    for kind, way, at, to in requests:
        mine, far = int(way), 1 - int(way)
        at, to, nbytes = 8 * at, 8 * to, 8 if kind == ADD else 24
        assert ends[mine].post(kind, ends[far], at=at, to=to, nbytes=nbytes, value=3) == device.OK
        here, there = model[mine][at : at + nbytes], model[far][to : to + nbytes]
        if kind == PUT:
            there[:] = here
        else:
            old = there.copy()
            there.view(np.int64)[0] += 3 * (kind == ADD)
            here[:] = old
    assert all(np.array_equal(end.memory.read(), data) for end, data in zip(ends, model))
    assert sum(end.packets for end in ends) == before


# --- what goes as packets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bounds", "rights", "key", "domain"])
def test_what_fails_a_check_meets_the_peers_own_error(ends, case):
    a, b = ends
    good, options = b.region, {}
    domain = b.ctx.create_pd()
    if case == "bounds":
        options = {"to": SIZE - 32}
    elif case == "rights":
        b.region = b.pd.register(b.memory, access=Access.LOCAL_WRITE | Access.REMOTE_READ)
    elif case == "domain":
        b.region = domain.register(b.memory)
    else:
        b.region = SimpleNamespace(address=good.address, rkey=good.rkey ^ 1, close=lambda: None)
    before, there = a.packets, b.write(6)
    try:
        assert a.post(PUT, b, **options) == device.EIO
        assert "REMOTE_ACCESS" in str(a.queue.last_error())
        assert a.packets > before
        assert np.array_equal(b.memory.read(), there)
    finally:
        if b.region is not good:
            b.region.close()
        b.region = good
        domain.close()


@pytest.fixture
def deep(ends: tuple[End, End]) -> Iterator[tuple[End, End]]:
    """The same with a queue that a kernel fills faster than packets empty it."""
    a, b = (replace(end, queue=end.gpu.create_qp(end.pd, 1024, timeout=20.0)) for end in ends)
    connect(a, b)
    yield a, b
    a.queue.close()
    b.queue.close()


@pytest.mark.parametrize("every", [1, 50, 2000])
def test_a_stream_in_which_some_requests_take_packets(deep, every):
    """Those to memory of the host do. How many of the others do depends on the time."""
    a, b = deep
    count, data = 20_000, a.write(15)
    with b.gpu.alloc(SIZE, MemType.CPU_GPU) as host, a.gpu.alloc(8, MemType.CPU_GPU) as out:
        odd = b.pd.register(host)
        before, again, there = int(a.nic.counters["rdma_tx_packets"]), a.sent_again, b.write(16)
        where = odd.address, odd.rkey, b.region.address, b.region.rkey, a.region.address, a.region.lkey
        assert stream[1, 1, a.gpu](a.queue, count, every, *where, out).wait(100)
        assert out.array.view(np.int64)[0] == device.OK
        sent = int(a.nic.counters["rdma_tx_packets"]) - before
        assert count / every <= sent
        assert sent <= count or a.sent_again > again  # a busy machine is late with acknowledgements
        reached = np.concatenate([data[:2048] if every != 1 else there[:2048], there[2048:]])
        assert np.array_equal(b.memory.read(), reached)
        if every == 1:
            assert np.array_equal(host.array[:2048], data[:2048])
        odd.close()


def test_streams_both_ways_in_which_some_requests_take_packets(deep):
    """Each end holds its own requests back while packets of the other arrive, and neither waits for ever."""
    count, half = 20_000, SIZE // 2
    data = [end.write(20 + i) for i, end in enumerate(deep)]
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(end.gpu.alloc(SIZE, MemType.CPU_GPU)) for end in deep]
        outs = [stack.enter_context(end.gpu.alloc(8, MemType.CPU_GPU)) for end in deep]
        odds = [end.pd.register(host) for end, host in zip(deep, hosts, strict=True)]
        launches = []
        for i, end in enumerate(deep):
            far, odd = deep[1 - i], odds[1 - i]
            where = odd.address, odd.rkey, far.region.address + half, far.region.rkey
            here = end.region.address, end.region.lkey
            launches.append(stream[1, 1, end.gpu](end.queue, count, 500, *where, *here, outs[i]))
        for launch in launches:
            assert launch.wait(100)
        assert [int(out.array.view(np.int64)[0]) for out in outs] == [device.OK, device.OK]
        for i, end in enumerate(deep):
            assert np.array_equal(end.memory.read()[half : half + 2048], data[1 - i][:2048])
            assert np.array_equal(end.memory.read()[:half], data[i][:half])
        for odd in odds:
            odd.close()


def test_a_region_that_is_closed_and_registered_anew(ends):
    a, b = ends
    data, key = a.write(7), b.region.rkey
    b.region.close()
    assert b.region.closed
    other = b.pd.register(b.memory)
    until(lambda: known(a, other.rkey), "the new region to be known")
    until(lambda: not known(a, key), "the old region to be forgotten")
    b.region = other
    until(lambda: a.reaches, "the queue to reach its peer")
    assert a.post(PUT, b) == device.OK
    assert np.array_equal(b.memory.read()[:64], data[:64])


def test_a_region_that_moves(ends):
    """After `reregister` returns, nothing is written to the old place."""
    a, b = ends
    a.write(8)
    with b.gpu.alloc(SIZE) as second:
        old = b.write(9)
        b.region.reregister(second)
        assert a.post(PUT, b) == device.OK
        assert np.array_equal(b.memory.read(), old)
        assert np.array_equal(second.read()[:64], a.memory.read()[:64])
        b.region.reregister(b.memory)


def test_a_queue_that_leaves_rts(ends):
    a, b = ends
    there = b.write(10)
    b.queue.qp.to_error()
    assert a.post(PUT, b) == device.EIO
    assert "RETRY_EXC" in str(a.queue.last_error())
    assert np.array_equal(b.memory.read(), there)


def test_a_queue_that_fails_by_itself(ends):
    """A failed request of the peer takes its queue to ERR, where it answers nothing."""
    a, b = ends
    assert b.post(PUT, a, to=SIZE) == device.EIO
    there = b.write(11)
    assert a.post(PUT, b) == device.EIO
    assert np.array_equal(b.memory.read(), there)


def test_a_paused_nic_answers_withdrawals(ends):
    a, b = ends
    a.nic.pause()
    extra = b.pd.register(b.memory)
    until(lambda: known(a, extra.rkey), "the region to be known")
    extra.close()
    (peer,) = b.nic.reach.peers.values()
    assert peer.tx["answered"] == peer.tx["withdrawn"]
    a.nic.resume()


# --- letters ---------------------------------------------------------------------------------------------------------

LETTERS = [
    {"op": "key"},
    {"op": "key", "key": 256, "pdn": 1, "access": 15, "iova": 0, "nbytes": 1 << 70, "number": 1, "offset": 0},
    {"op": "key", "key": -5, "pdn": 1, "access": 15, "iova": 0, "nbytes": 8, "number": "one", "offset": 0},
    {"op": "key", "key": 256, "pdn": 1, "access": 15, "iova": 0, "nbytes": 8, "number": 999, "offset": 0},
    {"op": "key", "key": 256, "pdn": 1, "access": 15, "iova": 0, "nbytes": 1 << 40, "number": 1, "offset": 0},
    {"op": "key", "key": 256, "pdn": 1, "access": 15, "iova": 0, "nbytes": 8, "number": 1, "offset": -64},
    {"op": "queue", "qpn": 1},
    {"op": "queue", "qpn": 5, "remote_qpn": -1, "pdn": 1, "rights": 1, "msg_max": 1, "withdrawn": 1 << 80, "failed": 0},
    {"op": "forget", "keys": "all", "queues": [], "withdrawn": 0, "failed": 0},
    {"op": "forget", "keys": [1 << 90], "queues": [1.5], "withdrawn": 0, "failed": 0},
    {"op": "forget", "keys": [], "queues": []},
    {"op": "reach", "sharing": 5},
]


@pytest.mark.parametrize("letter", LETTERS, ids=str)
def test_letters_that_make_no_sense(ends, letter):
    """They do no harm: requests still succeed, if need be as packets."""
    a, b = ends
    (link,) = b.nic.reach.peers
    link.send(letter)
    link.send({"op": "lend", "number": 0})  # heard behind the letter
    data = a.write(12)
    assert a.post(PUT, b) == device.OK
    assert np.array_equal(b.memory.read()[:64], data[:64])
    assert not known(a, 256)
