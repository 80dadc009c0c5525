"""A bad network under RC and UC: whatever is lost, doubled, reordered or damaged, programs see what they should.

All of it runs on the virtual clock (virtual_nics.py), so that a seed always gives the same run.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from gpunetio.fabric.faults import Faults
from gpunetio.fabric.frames import (
    PACKET,
    Frame,
    commit,
    consume,
    next_frame,
    pipe_end,
    pipe_size,
    publish,
    release,
    reserve,
)
from gpunetio.fabric.injector import FAULTS, FaultInjector, Injector, icrc_fits, inject
from gpunetio.formats.commands import ServiceType
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import ld64, st64
from gpunetio.memory import HostMemory
from gpunetio.nic.state.counters import PACKET_FATES
from nic_rig import (
    FA,
    READ,
    REQ,
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
    SEND,
    SEND_IMM,
    WRITE,
    WRITE_IMM,
    Buffer,
    Queue,
    connect,
)
from virtual_nics import Stream, VirtualNics

# The first test compiles the engine into a loop of its own, which makes its turns on the host.
pytestmark = [pytest.mark.host_memory, pytest.mark.timeout(400)]

MTU = 256
SIZES = np.array([0, 1, 3, 4, 5, 255, 256, 257, 511, 512, 513, 767, 769, 1021])  # around multiples of the MTU
POOL = 1 << 16  # bytes that messages are taken from
FILL = 0xEE  # what is in places that nothing may be written to
COUNT = 10_000  # messages of a cell
OPCODES = {
    "send": [SEND], "write": [WRITE], "read": [READ], "atomic": [FA],
    "mixed": [SEND, SEND_IMM, WRITE, WRITE_IMM, READ, FA],
}
RESPONSE = {SEND: RESP_SEND, SEND_IMM: RESP_SEND_IMM, WRITE_IMM: RESP_WRITE_IMM}
CONNECTION = {"ack_timeout": 8, "retry_cnt": 7, "rnr_retry": 7, "min_rnr_timer": 1}


@dataclass
class End:
    """A NIC's memory: random bytes to take from, places for what arrives, a word to count in.

    `expected` is what the sink must hold in the end.
    """

    pool: Buffer
    sink: Buffer
    word: Buffer
    expected: np.ndarray


@dataclass
class Program:
    """A stream and its messages. Message i ends up in its own place of a sink, with a gap behind."""

    stream: Stream
    opcodes: np.ndarray
    sizes: np.ndarray
    imms: np.ndarray
    places: np.ndarray


def words(values: np.ndarray) -> np.ndarray:
    """Big-endian halves of 64-bit values: two columns."""
    values = values.astype(np.uint64)
    return np.stack([values >> np.uint64(32), values & np.uint64(0xFFFFFFFF)], -1).astype(">u4")


def end(pd, room: int, seed: int) -> End:
    made = End(Buffer(pd, POOL), Buffer(pd, room), Buffer(pd, 8), np.full(room, FILL, np.uint8))
    made.pool.bytes[:] = np.random.default_rng(seed).integers(0, 256, POOL, np.uint8)
    made.sink.bytes[:] = FILL
    return made


def program(
    queues: tuple[Queue, Queue], ends: tuple[End, End], kinds: list[int], count: int, seed: int, base: int, **options
) -> Program:
    """`count` random messages of `kinds` from the first queue to the second; sinks are used from `base` on."""
    rng = np.random.default_rng(seed)
    (sender, receiver), (here, there) = queues, ends
    opcodes = rng.choice(kinds, count)
    sizes = np.where(opcodes == FA, 8, rng.choice(SIZES, count))
    imms = rng.integers(0, 1 << 32, count, np.uint64)
    source = rng.integers(0, POOL - SIZES.max(), count)
    place = base + np.concatenate([[0], np.cumsum((sizes + 15) & -8)[:-1]])
    inwards = np.isin(opcodes, (READ, FA))  # the bytes come here

    w = np.zeros((count, 16), ">u4")
    index = np.arange(count)
    headers = np.select([np.isin(opcodes, (SEND, SEND_IMM)), opcodes == FA], [1, 3], 2)
    w[:, 0], w[:, 1] = (index & 0xFFFF) << 8 | opcodes, sender.qp.qpn << 8 | (headers + (sizes > 0))
    w[:, 2] = 8 | np.where(rng.random(count) < 0.02, 1 << 6, 0)  # a CQE each; some have a fence
    w[:, 3] = imms
    remote = np.where(opcodes == READ, there.pool.address + source, there.sink.address + place)
    remote = np.where(opcodes == FA, there.word.address, remote)
    key = np.select([opcodes == READ, opcodes == FA], [there.pool.key, there.word.key], there.sink.key)
    many = headers > 1
    w[many, 4:6], w[many, 6] = words(remote)[many], key[many]
    atomics = opcodes == FA
    w[atomics, 8:10] = words(np.ones(count))[atomics]
    local = np.where(inwards, here.sink.address + place, here.pool.address + source)
    at = 4 * headers
    w[index, at] = sizes
    w[index, at + 1] = np.where(inwards, here.sink.key, here.pool.key)
    w[index, at + 2], w[index, at + 3] = words(local).T

    sends = np.isin(opcodes, (SEND, SEND_IMM))
    takes = sends | (opcodes == WRITE_IMM)
    receives = scatter_lists(receiver, there, place[takes], np.where(sends, sizes, 0)[takes])
    for i in np.flatnonzero(~atomics):
        pool = (there if opcodes[i] == READ else here).pool.bytes
        target = (here if inwards[i] else there).expected
        target[place[i] : place[i] + sizes[i]] = pool[source[i] : source[i] + sizes[i]]
    stream = Stream(sender, receiver, w.view(np.uint8), receives, **options)
    return Program(stream, opcodes, sizes, imms, place)


def scatter_lists(receiver: Queue, there: End, place: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Receives for messages of `sizes`, in two segments where there are bytes for two."""
    r = np.zeros((len(place), receiver.qp.rq_stride // 4), ">u4")
    first = np.maximum(np.where(sizes >= 8, sizes // 3, sizes), 1)  # 0 would be 2 GiB
    rest = sizes - first
    r[:, 0], r[:, 1], r[:, 2:4] = first, there.sink.key, words(there.sink.address + place)
    two = rest > 0
    r[two, 4], r[two, 5], r[two, 6:8] = rest[two], there.sink.key, words(there.sink.address + place + first)[two]
    r[~two, 5] = 0x100
    if receiver.qp.rq_stride > 32:
        r[:, 9] = 0x100
    return r.view(np.uint8)


def fields(cqes: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of CQEs."""
    w = cqes.view(">u4").reshape(-1, 16).astype(np.int64)
    return {
        "imm": w[:, 9], "byte_cnt": w[:, 11], "wqe_opcode": w[:, 14] >> 24, "qpn": w[:, 14] & 0xFFFFFF,
        "counter": w[:, 15] >> 16, "opcode": w[:, 15] >> 4 & 15,
    }


def check_completions(p: Program) -> None:
    """One CQE for each WQE and for each receive, in order, saying what it must."""
    sent, got, count = fields(p.stream.sent), fields(p.stream.got), len(p.opcodes)
    assert len(p.stream.sent) == count
    assert not sent["opcode"].any()
    assert REQ == 0
    assert np.array_equal(sent["counter"], np.arange(count) & 0xFFFF)
    assert np.array_equal(sent["wqe_opcode"], p.opcodes)
    assert np.array_equal(sent["byte_cnt"], p.sizes)
    takes = np.flatnonzero(np.isin(p.opcodes, list(RESPONSE)))
    assert len(p.stream.got) == len(takes)
    assert np.array_equal(got["counter"], np.arange(len(takes)) & 0xFFFF)
    assert np.array_equal(got["opcode"], [RESPONSE[opcode] for opcode in p.opcodes[takes].tolist()])
    assert np.array_equal(got["byte_cnt"], p.sizes[takes])
    assert np.array_equal(got["imm"], np.where(p.opcodes[takes] == SEND, 0, p.imms[takes]))


def check_bytes(programs: list[Program], ends: tuple[End, End]) -> None:
    """Each place holds its message, and nothing else has changed; atomics were executed once each, in order."""
    for side, e in enumerate(ends):
        results = [np.zeros(0, np.int64)]
        for p in programs:
            if p.stream.sender.nic.name == f"soft{side}":
                fetched = p.places[p.opcodes == FA][:, None] + np.arange(8)
                olds = e.sink.bytes[fetched].view(np.int64).ravel()
                assert (np.diff(olds) > 0).all(), "atomics of one QP are not in order"
                results.append(olds)
                e.expected[fetched] = e.sink.bytes[fetched]
        if not np.array_equal(e.sink.bytes, e.expected):
            at = np.flatnonzero(e.sink.bytes != e.expected)
            pytest.fail(f"sink {side}: {len(at)} bytes differ, the first at {at[0]}")
        for buffer in (e.pool, e.sink, e.word):
            assert not buffer.whole[: buffer.start].any()
            assert not buffer.whole[buffer.start + buffer.nbytes :].any()
        olds = np.sort(np.concatenate(results))
        assert np.array_equal(olds, np.arange(len(olds)))
        assert ends[side ^ 1].word.word() == len(olds)


def check_counters(nics: VirtualNics) -> None:
    """Every frame is accounted for: by the injector that it passed, and by the NIC that it reached."""
    for side, nic in enumerate(nics.nics):
        here, there = nic.counters, nics.nics[side ^ 1].counters
        assert here["rdma_rx_packets"] == sum(int(here[name]) for name in PACKET_FATES)
        passed, damaged = int(here["rdma_tx_packets"]), 0
        if (f := nics.injector(side)) is not None:
            assert f["held"] == 0
            assert f["passed"] == passed - f["lost"] + f["duplicated"]
            passed, damaged = int(f["passed"]), int(f["corrupted"])
        assert there["rx_icrc_encapsulated"] == damaged
        assert there["rdma_rx_packets"] == passed - damaged


# --- RC --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: which faults on which way, and what traffic."""

    faults: Faults
    ways: str  # "both", or from the requester "out" only, or "back" only
    traffic: str
    count: int = COUNT
    qps: int = 1
    duplex: bool = False
    slow_ns: int = 0
    psn: int = 0xFF_FF00  # soon wraps

    def __str__(self) -> str:
        f = self.faults
        faults = "-".join(f"{100 * p:g}" for p in (f.loss, f.duplication, f.reordering, f.corruption))
        return f"{self.traffic}-{faults}-{self.ways}{'-slow' * bool(self.slow_ns)}{f'-{self.qps}qps' * (self.qps > 1)}"


def run_cell(cell: Cell) -> VirtualNics:
    """Carry a cell out and check everything that a program can see; the NICs are still open."""
    ways = {"both": (True, True), "out": (True, False), "back": (False, True)}[cell.ways]
    nics = VirtualNics(tuple(cell.faults if way else None for way in ways))  # type: ignore[arg-type]
    try:
        directions = 2 if cell.duplex else 1
        each = cell.count // (cell.qps * directions)
        room = directions * cell.qps * (each * 600 + 4096)
        ends = end(nics.pds[0], room, 1), end(nics.pds[1], room, 2)
        pairs = [tuple(Queue(pd, 256, 64, 2) for pd in nics.pds) for _ in range(cell.qps)]
        programs = []
        base = 0
        for i, pair in enumerate(pairs):
            connect(*pair, psn=cell.psn, max_rd_atomic=(16, 4, 1)[i % 3], **CONNECTION)
            assert pair[0].row["mtu"] == MTU
            for turned in range(directions):
                step = -1 if turned else 1
                programs.append(program(
                    pair[::step], ends[::step], OPCODES[cell.traffic], each, 10 * i + turned, base, slow_ns=cell.slow_ns
                ))
                base = int(programs[-1].places[-1]) + 2048
        assert base <= room
        nics.stop()
        nics.run([p.stream for p in programs])
        for p in programs:
            check_completions(p)
        check_bytes(programs, ends)
        check_counters(nics)
        for pair in pairs:
            for queue in pair:
                assert queue.row["failed"] == 0
    except BaseException:
        nics.close()
        raise
    return nics


def faults(loss: float, others: tuple[float, float, float], seed: int = 1) -> Faults:
    duplication, reordering, corruption = others
    return Faults(loss, duplication, reordering, corruption, seed=seed)


LOSSES = (0, 0.001, 0.01, 0.05)
OTHERS = tuple(product((0, 0.02), (0, 0.02), (0, 0.01)))
MATRIX = [
    Cell(faults(loss, others), ways, traffic, slow_ns=40_000 if traffic in ("send", "mixed") and loss == 0.01 else 0)
    for loss, others, ways, traffic in product(LOSSES, OTHERS, ("both", "out", "back"), OPCODES)
]
ALL = (0.02, 0.02, 0.01)
SAMPLE = [
    *(Cell(faults(0.01, ALL), "both", traffic, 1000) for traffic in OPCODES),
    Cell(faults(0.05, (0, 0, 0)), "out", "mixed", 1000),
    Cell(faults(0.05, (0, 0, 0)), "back", "mixed", 1000),
    Cell(faults(0.01, ALL), "both", "mixed", 1000, slow_ns=40_000),
    Cell(faults(0.01, ALL), "both", "mixed", 3000, qps=3, duplex=True),
    Cell(faults(0, (0, 0, 0)), "both", "mixed", 1000),
    # With one atomic in flight a new request may come right behind a late duplicate of the one before.
    Cell(faults(0, (0.2, 0.1, 0)), "both", "atomic", 6000, qps=6, duplex=True),
]
MANY = [
    Cell(faults(loss, others, seed), "both", "mixed", COUNT, qps=8, duplex=True, slow_ns=slow)
    for loss, others, seed, slow in product(LOSSES, (ALL, (0.05, 0.05, 0.02)), range(1, 4), (0, 40_000))
]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_rc(cell):
    run_cell(cell).close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("traffic", OPCODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_rc_matrix(traffic, loss):
    cells = [cell for cell in MATRIX if cell.traffic == traffic and cell.faults.loss == loss]
    assert len(cells) == 24
    for cell in cells:
        try:
            run_cell(cell).close()
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("cell", MANY, ids=lambda cell: f"{cell}-{cell.faults.seed}")
def test_rc_many_qps(cell):
    run_cell(cell).close()


def test_a_seed_repeats_exactly():
    """The same seed gives the same run, to the nanosecond and the last frame; another one does not."""
    runs = []
    for seed in (1, 1, 2):
        nics = run_cell(Cell(faults(0.02, ALL, seed), "both", "mixed", 600, qps=2, duplex=True))
        counters = [dict(nic.counters) for nic in nics.nics]
        runs.append((nics.now, counters, [int(nics.injector(i)["state"]) for i in (0, 1)]))
        nics.close()
    assert runs[0] == runs[1] != runs[2]


def test_reads_see_the_writes_before_them():
    """A READ behind a WRITE sees it, whatever is sent again; one that is answered again may see a later WRITE.

    So a READ may even see more than the next one, whose first answer was late or doubled on its way.
    """
    count = 2000
    with VirtualNics((faults(0.02, ALL), faults(0.02, ALL))) as nics:
        a, b = (Queue(pd, 256, 16, 2) for pd in nics.pds)
        connect(a, b, **CONNECTION)
        numbers, results, word = Buffer(nics.pds[0], 8 * count), Buffer(nics.pds[0], 8 * count), Buffer(nics.pds[1], 8)
        numbers.bytes.view(np.int64)[:] = np.arange(count)
        index = np.arange(count)
        reads = index % 2 == 1
        w = np.zeros((count, 16), ">u4")
        w[:, 0], w[:, 1] = (index & 0xFFFF) << 8 | np.where(reads, READ, WRITE), a.qp.qpn << 8 | 3
        w[:, 2], w[:, 4:6], w[:, 6] = 8, words(np.full(count, word.address)), word.key
        w[:, 8], w[:, 9] = 8, np.where(reads, results.key, numbers.key)
        w[:, 10:12] = words(np.where(reads, results.address, numbers.address) + 8 * index)
        nics.stop()
        nics.run([Stream(a, b, w.view(np.uint8), np.zeros((0, b.qp.rq_stride), np.uint8))])
        seen = results.bytes.view(np.int64)[reads]
        assert (seen >= index[reads] - 1).all()
        assert seen[-1] == count - 2
        check_counters(nics)


# --- UC --------------------------------------------------------------------------------------------------------------

UC_SIZES = np.array([8, 252, 256, 260, 508, 512, 516, 1020])
SLOT = 1024


def contents(number: int, nbytes: int) -> np.ndarray:
    """The bytes of message `number`: its number, and words that no other message has in that place."""
    w = (number * 0x9E3779B1 + np.arange(nbytes // 4) * 0x85EBCA77 & 0xFFFFFFFF).astype(np.uint32)
    w[0] = number
    return w.view(np.uint8)


def run_uc(injected: Faults, count: int) -> int:
    """Numbered messages over UC: how many arrived. Each of those is complete, in a place of its own."""
    with VirtualNics((injected, injected)) as nics:
        a, b = (Queue(pd, 256, 64, 1) for pd in nics.pds)
        connect(a, b, psn=0xFF_FF00, **CONNECTION)
        rng = np.random.default_rng(injected.seed)
        opcodes, sizes = rng.choice([SEND, SEND_IMM, WRITE, WRITE_IMM], count), rng.choice(UC_SIZES, count)
        source, target = (Buffer(pd, SLOT * count) for pd in nics.pds)
        inbox = Buffer(nics.pds[1], SLOT * count)
        target.bytes[:] = inbox.bytes[:] = FILL
        for i in range(count):
            source.bytes[SLOT * i : SLOT * i + sizes[i]] = contents(i, int(sizes[i]))
        index = np.arange(count)
        writes = np.isin(opcodes, (WRITE, WRITE_IMM))
        w = np.zeros((count, 16), ">u4")
        w[:, 0], w[:, 1] = (index & 0xFFFF) << 8 | opcodes, a.qp.qpn << 8 | (2 + writes)
        w[:, 2], w[:, 3] = 8, index
        w[writes, 4:6], w[writes, 6] = words(target.address + SLOT * index)[writes], target.key
        at = np.where(writes, 8, 4)
        w[index, at], w[index, at + 1] = sizes, source.key
        w[index, at + 2], w[index, at + 3] = words(source.address + SLOT * index).T
        room = count  # receives: more messages may arrive than were sent, but not with these probabilities
        r = np.zeros((room, b.qp.rq_stride // 4), ">u4")
        r[:, 0], r[:, 1], r[:, 2:4] = SLOT, inbox.key, words(inbox.address + SLOT * np.arange(room))
        nics.stop()
        for queue in (a, b):
            queue.row["service"] = ServiceType.UC
        stream = Stream(a, b, w.view(np.uint8), r.view(np.uint8), lossy=True)
        nics.run([stream])
        sent, got = fields(stream.sent), fields(stream.got)
        assert np.array_equal(sent["counter"], index & 0xFFFF)
        assert not sent["opcode"].any()
        numbers = []
        columns = (got[name].tolist() for name in ("opcode", "byte_cnt", "imm"))
        for k, (opcode, nbytes, imm) in enumerate(zip(*columns)):
            arrived = inbox.bytes[SLOT * k : SLOT * (k + 1)]
            if opcode == RESP_WRITE_IMM:
                number, arrived = imm, target.bytes[SLOT * imm :]
            else:
                number = int(arrived[:4].view(np.uint32)[0])
            assert RESPONSE.get(int(opcodes[number])) == opcode
            assert nbytes == sizes[number]
            assert np.array_equal(arrived[:nbytes], contents(number, nbytes)), f"message {number} is torn"
            assert opcode == RESP_SEND or imm == number
            numbers.append(number)
        if not injected.duplication and not injected.reordering:
            assert (np.diff(numbers) > 0).all()
        check_counters(nics)
        drops = sum(int(nics.nics[1].counters[name]) for name in PACKET_FATES[1:])
        assert nics.nics[1].counters["rx_uc_dropped"] == drops
        assert a.row["failed"] == b.row["failed"] == 0
        return len(numbers)


@pytest.mark.parametrize("injected", [
    faults(0, (0, 0, 0)), faults(0.001, (0, 0, 0)), faults(0.05, (0, 0, 0.02)), faults(0.05, ALL, 3),
], ids=["clean", "loss", "damage", "all"])
def test_uc(injected):
    count = 1000
    arrived = run_uc(injected, count)
    if injected == Faults():
        assert arrived > 0.7 * count  # all that take a receive: three kinds of four
    else:
        assert 0 < arrived < count


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loss", LOSSES)
def test_uc_matrix(loss):
    for others in OTHERS:
        assert 0 < run_uc(faults(loss, others), COUNT) <= COUNT


# --- the injector ----------------------------------------------------------------------------------------------------


@engine_function
def _push(near, injector, far, count, step_ns, seen, out):
    """Send `count` numbered frames through an injector, and list what comes out: number, time, whether it is whole."""
    got = 0
    now = 1_000
    sent = 0
    while sent < count or FaultInjector(injector).held:
        now += step_ns
        for _ in range(min(7, count - sent)):
            frame = reserve(near, 64)
            if frame == 0:
                break
            f = Frame(frame)
            f.nbytes, f.peer_high, f.peer_low, f.source = 64, 0, 0, 0
            for i in range(0, 64, 8):
                st64(frame + PACKET + i, sent)
            commit(near)
            st64(seen + 8 * sent, now)
            sent += 1
        publish(near)
        inject(injector, now)
        while True:
            frame = next_frame(far)
            if frame <= 0:
                break
            numbers = 0
            for i in range(0, 64, 8):
                numbers |= ld64(frame + PACKET + i) ^ ld64(frame + PACKET + 8 * ((i >> 3) + 1 & 7))
            at = out + 32 * got
            st64(at, ld64(frame + PACKET + 8 * (numbers != 0)))
            st64(at + 8, now)
            st64(at + 16, numbers == 0)
            st64(at + 24, icrc_fits(injector + FAULTS.scratch, frame + PACKET, 64, 1, 2, 3, 4))
            consume(far)
            got += 1
        release(far)
    return got


def push(injected: Faults, count: int, step_ns: int = 1000) -> tuple[np.ndarray, dict[str, int], np.ndarray]:
    """What comes out of an injector (columns: number, time, whole, ICRC fits), its counts, when frames went in."""
    capacity = 1 << 16
    memory = HostMemory(pipe_size(capacity))
    near_end, far_end = pipe_end(memory.address, capacity), pipe_end(memory.address, capacity)
    ids = [np.array([first, second], np.int64).tobytes() for first, second in ((1, 2), (3, 4))]
    injector = Injector(injected, near_end, *ids, make_icrc=True)
    own = injector.from_nic.copy()
    out, seen = np.zeros((2 * count + 64, 4), np.int64), np.zeros(count, np.int64)
    got = _push(
        own.ctypes.data, injector.address, far_end.ctypes.data, count, step_ns, seen.ctypes.data, out.ctypes.data
    )
    counts = {name: int(injector.record[name]) for name in ("lost", "duplicated", "reordered", "corrupted", "passed")}
    injector.close()
    memory.close()
    return out[:got], counts, seen


FRAMES = 100_000


@pytest.mark.parametrize("probability", [0.001, 0.02, 0.5])
@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering", "corruption"])
def test_injector_statistics(fault, probability):
    counted = {"loss": "lost", "duplication": "duplicated", "reordering": "reordered", "corruption": "corrupted"}[fault]
    out, counts, _ = push(Faults(**{fault: probability}), FRAMES)
    expected, deviation = FRAMES * probability, (FRAMES * probability * (1 - probability)) ** 0.5
    if (fault, probability) == ("reordering", 0.5):
        assert counts[counted] > 0.4 * FRAMES  # there is room for so many frames at a time only
    else:
        assert abs(counts[counted] - expected) < 5 * deviation
    assert all(counts[name] == 0 for name in ("lost", "duplicated", "reordered", "corrupted") if name != counted)
    assert counts["passed"] == len(out) == FRAMES - counts["lost"] + counts["duplicated"]
    assert np.count_nonzero(out[:, 3] == 0) == counts["corrupted"]  # the ICRC finds all damage
    assert np.count_nonzero(out[:, 2] == 0) == counts["corrupted"]
    assert (np.count_nonzero(np.diff(out[:, 0]) < 0) > 0) == (fault == "reordering" or fault == "corruption")
    assert len(np.unique(out[out[:, 2] == 1, 0])) == FRAMES - counts["lost"] - counts["corrupted"]


@pytest.mark.parametrize("probability", [0, 1])
def test_injector_certainties(probability):
    out, counts, _ = push(Faults(loss=probability), 1000)
    assert (len(out), counts["lost"]) == ((0, 1000) if probability else (1000, 0))
    assert np.array_equal(out[:, 0], np.arange(len(out)))


def test_injector_repeats_by_seed():
    runs = [push(Faults(0.05, 0.05, 0.05, 0.05, seed=seed), 5000)[0] for seed in (7, 7, 8)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("step_ns", [100, 5_000])
def test_injector_delay_keeps_order(step_ns):
    """Each frame is late by the delay at least, also when more than the injector holds are on their way."""
    out, counts, seen = push(Faults(delay_us=20, duplication=0.05), 5000, step_ns)
    assert counts["duplicated"] > 0
    assert (np.diff(out[:, 0]) >= 0).all()
    assert np.array_equal(np.unique(out[:, 0]), np.arange(5000))
    assert (out[:, 1] - seen[out[:, 0]] >= 20_000).all()
    assert np.array_equal(out[:, 2], np.ones(len(out)))


def test_injector_delays_the_wire():
    """RC over a wire with a delay takes that long, and nothing is sent twice."""
    nics = run_cell(Cell(Faults(delay_us=5), "both", "mixed", 500))
    assert nics.now > 100_000
    assert nics.nics[1].counters["duplicate_request"] == 0
    nics.close()
