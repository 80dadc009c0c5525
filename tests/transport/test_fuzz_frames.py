"""Frames that nobody should send: none of them crashes the NIC, moves a byte it may not, or goes uncounted.

The far end of a wire is in the hands of a generator, in nopython code: random bytes, frames of all opcodes with forged
numbers, keys, addresses and lengths, bits flipped, cut short, wrong ICRCs, and nonsense in the pipe's own fields. Some
of them are right, so that the NIC gets everywhere. What memory may change is worked out from the frames alone.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from gpunetio.enums import Access, CqOverrun
from gpunetio.fabric.frames import (
    FRAME,
    PACKET,
    PIPE,
    Frame,
    PipeEnd,
    commit,
    consume,
    next_frame,
    pipe_end,
    pipe_size,
    publish,
    reserve,
)
from gpunetio.fabric.icrc import HEADER_ROOM, icrc
from gpunetio.fabric.inprocess import LinkEnd
from gpunetio.formats.commands import QpState, ServiceType
from gpunetio.formats.layout import Entry
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import be32, copy, ld8, ld32, ld64, st8, st16, st32, st64, st_release64
from gpunetio.jit.struct_view import struct_view
from gpunetio.memory import HostMemory
from gpunetio.nic.state.counters import PACKET_FATES
from gpunetio.nic.state.qp import QP_ROW, QP_SETUP_BYTES, QpRow
from gpunetio.nic.state.wire import WIRE, WireState
from gpunetio.nic.state.worker import WorkerState
from gpunetio.nic.transport.pending import forget_pending
from gpunetio.nic.turn.step import step
from nic_rig import (
    FA,
    READ,
    REQ,
    RESP_SEND,
    SEND,
    WRITE,
    Buffer,
    Queue,
    connect,
    control,
    data,
    raddr,
    view,
)
from nic_rig import atomic as atomic_segment
from virtual_nics import VirtualNics

# The first test compiles the engine into a loop of its own, which makes its turns on the host.
pytestmark = [pytest.mark.host_memory, pytest.mark.timeout(400)]

CAPACITY = 1 << 16
MTU = 256
REGION = 1 << 14  # bytes of each region
GAP = 1 << 12
DEPTH = 64  # WQEs of a ring
CHECK_EVERY = 512  # frames
ALL = Access.all()
# Regions: name → rights, and whether they are in the PD of the QPs. Frames with their keys come.
REGIONS = {
    "open": (ALL, True), "read": (Access.REMOTE_READ, True), "local": (Access.LOCAL_WRITE, True),
    "foreign": (ALL, False), "sink": (Access.LOCAL_WRITE, True), "inbox": (Access.LOCAL_WRITE, True),
}
WRITTEN = ("cq send", "cq recv", "record ")  # by the NIC or by the generator
KEYS = ("open", "read", "local", "foreign")

FUZZ = Entry("fuzz", 512, """
    random           0  i64
    nic              8  i64
    wire            16  i64
    near            24  i64
    drain           32  i64
    rows            40  i64
    row_count       48  i64
    images          56  i64
    keys            64  i64[4]
    addresses       96  i64[4]
    shadow         128  i64
    allowed        136  i64
    pool           144  i64
    strangers      152  i64
    stranger_count 160  i64
    scratch        168  i64
    posted         176  i64
    sent           200  i64
    wrong_icrc     208  i64
    nonsense       216  i64
    restored       224  i64
    touched        232  i64
    bad_offset     240  i64
    unbroken       248  i64
    here_high      256  i64
    here_low       264  i64
    peer_high      272  i64
    peer_low       280  i64
""")
fuzz_at = struct_view(FUZZ)

_ERR, _RC = int(QpState.ERR), int(ServiceType.RC)


@engine_function
def _rnd(fuzz, limit):
    """A number from 0 to limit - 1 (xorshift64)."""
    f = fuzz_at(fuzz)
    x = f.random
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    f.random = x
    return ((x >> 20) & ((1 << 40) - 1)) % limit


@engine_function
def _any64(fuzz):
    return _rnd(fuzz, 1 << 32) << 32 | _rnd(fuzz, 1 << 32)


@engine_function
def _restore(fuzz, i):
    """Put a QP back to RTS with nothing done, as a program would by way of RST."""
    f = fuzz_at(fuzz)
    row = ld64(f.rows + 8 * i)
    forget_pending(f.nic, row)
    copy(row, f.images + i * QP_SETUP_BYTES, QP_SETUP_BYTES)
    for offset in range(QP_SETUP_BYTES, QP_ROW.size, 8):
        st64(row + offset, 0)
    q = QpRow(row)
    st64(q.doorbell, 0)
    st64(q.dbrec, 0)
    q.expect_psn, q.una_psn, q.tx_psn, q.end_psn = q.rq_psn, q.sq_psn, q.sq_psn, q.sq_psn
    st64(f.posted + 8 * i, 0)
    f.restored += 1


@engine_function
def _post(fuzz, i):
    """Keep WQEs in flight, and now and then receives posted."""
    f = fuzz_at(fuzz)
    q = QpRow(ld64(f.rows + 8 * i))
    posted = ld64(f.posted + 8 * i)
    while posted < q.sq_ci + 8:
        slot = q.sq_addr + (posted & (DEPTH - 1)) * 64
        st32(slot, be32((posted & 0xFFFF) << 8 | be32(ld32(slot)) & 0xFF))
        posted += 1
    st64(f.posted + 8 * i, posted)
    st32(q.doorbell, be32((posted & 0xFFFF) << 8))
    if _rnd(fuzz, 8):
        st32(q.dbrec, be32((q.rq_ci + _rnd(fuzz, 8)) & 0xFFFF))


@engine_function
def _region(fuzz, at, nbytes, key_at):
    """A key at `key_at` and an address at `at` for `nbytes`: mostly right."""
    which = 0 if _rnd(fuzz, 10) < 7 else _rnd(fuzz, 4)
    base = ld64(fuzz + FUZZ.addresses + 8 * which)
    how = _rnd(fuzz, 40)
    va = base + _rnd(fuzz, max(REGION - nbytes, 0) + 1)
    if how < 6:
        va &= -8
    elif how < 9:
        va = base + REGION - nbytes + 1 + _rnd(fuzz, 300)
    elif how < 11:
        va = base - 1 - _rnd(fuzz, 300)
    elif how == 11:
        va = _any64(fuzz)
    if nbytes == 8 and how > 14:
        va &= -8
    key = ld64(fuzz + FUZZ.keys + 8 * which)
    if _rnd(fuzz, 20) == 0:
        key = _rnd(fuzz, 1 << 32) if _rnd(fuzz, 2) else key ^ 1 << _rnd(fuzz, 32)
    st32(at, be32(va >> 32))
    st32(at + 4, be32(va))
    st32(key_at, be32(key))


@engine_function
def _compose(fuzz, i, bth):
    """A frame from a peer of QP `i`, at `bth`: its length. Mostly it fits what the QP waits for."""
    f = fuzz_at(fuzz)
    q = QpRow(ld64(f.rows + 8 * i))
    operation = _rnd(fuzz, 21) if q.service == _RC else _rnd(fuzz, 12)
    left = q.rx_nbytes - q.rx_done
    if q.rx_kind and _rnd(fuzz, 10) < 8:  # go on with the message
        operation = (7 if left > MTU else 8 + _rnd(fuzz, 2)) if q.rx_kind == 2 else 1 + _rnd(fuzz, 3)
    opcode = q.service << 5 | operation
    if _rnd(fuzz, 50) == 0:
        opcode = _rnd(fuzz, 256)
    response = operation > 12 and operation < 19
    psn = q.una_psn if response else q.expect_psn
    how = _rnd(fuzz, 40)
    if how < 2:
        psn += 1 + _rnd(fuzz, 4)
    elif how < 4:
        psn -= 1 + _rnd(fuzz, 4)
    elif how == 4:
        psn = _rnd(fuzz, 1 << 24)
    place = operation % 6
    nbytes = 12
    payload = 0
    if operation < 12:
        payload = _rnd(fuzz, MTU + 1) if _rnd(fuzz, 20) else _rnd(fuzz, 2 * MTU)
        if place < 2 and _rnd(fuzz, 30):
            payload = MTU
        if operation == 8 or operation == 9:
            payload = left if left > 0 and left <= MTU and _rnd(fuzz, 30) else payload
        if operation == 6 or operation == 10 or operation == 11:
            length = payload + (1 + _rnd(fuzz, 4 * MTU) if operation == 6 else 0)
            if _rnd(fuzz, 20) == 0:
                length = _rnd(fuzz, 1 << (1 + _rnd(fuzz, 32)))
            _region(fuzz, bth + nbytes, length, bth + nbytes + 8)
            st32(bth + nbytes + 12, be32(length))
            nbytes += 16
        if place == 3 or place == 5:
            st32(bth + nbytes, _rnd(fuzz, 1 << 32))
            nbytes += 4
    elif operation == 12:
        length = _rnd(fuzz, 4 * MTU) if _rnd(fuzz, 10) else _rnd(fuzz, 1 << (1 + _rnd(fuzz, 32)))
        _region(fuzz, bth + nbytes, length, bth + nbytes + 8)
        st32(bth + nbytes + 12, be32(length))
        nbytes += 16
    elif response:
        if operation != 14:
            syndrome = _rnd(fuzz, 256)
            if operation != 17 or _rnd(fuzz, 3):
                syndrome = 31
            st32(bth + nbytes, be32(syndrome << 24 | _rnd(fuzz, 1 << 24)))
            nbytes += 4
        if operation < 17:
            payload = 100 if _rnd(fuzz, 10) else _rnd(fuzz, MTU + 9)
        elif operation == 18:
            st64(bth + nbytes, _any64(fuzz))
            nbytes += 8
    else:
        _region(fuzz, bth + nbytes, 8, bth + nbytes + 8)
        for at in range(nbytes + 12, nbytes + 28, 4):
            st32(bth + at, _rnd(fuzz, 1 << 32))
        nbytes += 28
    pad = -payload & 3 if _rnd(fuzz, 40) else _rnd(fuzz, 4)
    copy(bth + nbytes, f.pool + _rnd(fuzz, 4096), payload + pad)
    nbytes += payload + pad
    st8(bth, opcode)
    st8(bth + 1, 0x40 | pad << 4 | (_rnd(fuzz, 16) if _rnd(fuzz, 50) == 0 else 0))
    st16(bth + 2, 0xFFFF if _rnd(fuzz, 40) else _rnd(fuzz, 1 << 16))
    qpn = q.qpn
    how = _rnd(fuzz, 40)
    if how == 0:
        qpn = _rnd(fuzz, 1 << 24)
    elif how == 1:
        qpn = ld64(f.strangers + 8 * _rnd(fuzz, f.stranger_count))
    elif how == 2:
        qpn ^= 1 << _rnd(fuzz, 24)
    st32(bth + 4, be32(qpn))
    st32(bth + 8, be32(_rnd(fuzz, 2) << 31 | psn & 0xFFFFFF))
    return nbytes


@engine_function
def _name(fuzz, bth, nbytes):
    """What this frame may write: WRITEs and atomics with the key and within the range of the open region."""
    f = fuzz_at(fuzz)
    operation = ld8(bth) & 0x1F
    if nbytes < 28 or not (operation == 6 or operation == 10 or operation == 11 or operation == 19 or operation == 20):
        return
    va = be32(ld32(bth + 12)) << 32 | be32(ld32(bth + 16))
    length = be32(ld32(bth + 24)) if operation < 12 else 8
    base = ld64(fuzz + FUZZ.addresses)
    if be32(ld32(bth + 20)) != ld64(fuzz + FUZZ.keys) or va < base or length > REGION or va + length > base + REGION:
        return
    for offset in range(va - base, va - base + length):
        st8(f.allowed + offset, 1)


@engine_function
def _check_open(fuzz):
    """Only what frames have named has changed in the open region; from now on anew."""
    f = fuzz_at(fuzz)
    base = ld64(fuzz + FUZZ.addresses)
    for offset in range(0, REGION, 8):
        if ld64(base + offset) == ld64(f.shadow + offset):
            continue
        for at in range(offset, offset + 8):
            if ld8(base + at) != ld8(f.shadow + at):
                if ld8(f.allowed + at) == 0:
                    f.bad_offset = at
                    return 0
                f.touched += 1
    copy(f.shadow, base, REGION)
    for offset in range(0, REGION, 8):
        st64(f.allowed + offset, 0)
    return 1


@engine_function
def _spoil(fuzz, frame):
    """Write nonsense into the pipe's own fields."""
    how = _rnd(fuzz, 7)
    g = Frame(frame)
    e = PipeEnd(fuzz_at(fuzz).near)
    if how == 0:
        g.stride = g.stride + 1 + _rnd(fuzz, 63)
    elif how == 1:
        g.stride = -64 * _rnd(fuzz, 100)
    elif how == 2:
        g.stride = (CAPACITY + 64) << _rnd(fuzz, 40)
    elif how == 3:
        g.nbytes = -2 - _rnd(fuzz, 1 << 38)
    elif how == 4:
        g.nbytes = g.stride - PACKET - 3 + _rnd(fuzz, 1 << 38)
    commit(fuzz_at(fuzz).near)
    publish(fuzz_at(fuzz).near)
    if how == 5:
        st_release64(e.pipe + PIPE.head, e.position + CAPACITY + 64 * _rnd(fuzz, 1 << 20))
    elif how == 6:
        st_release64(e.pipe + PIPE.head, -1 - _rnd(fuzz, 1 << 38))


@engine_function
def _mend(fuzz):
    """Lay the wire anew: both pipes are empty."""
    f = fuzz_at(fuzz)
    WireState(f.wire).broken = 0
    for end in (f.near, f.wire + WIRE.rx, f.wire + WIRE.tx):
        e = PipeEnd(end)
        e.position, e.seen, e.reserved = 0, 0, 0
        st64(e.pipe + PIPE.head, 0)
        st64(e.pipe + PIPE.tail, 0)


@engine_function
def _turn(fuzz):
    """One turn of the NIC; what it sends goes nowhere, and QPs that have failed are put right."""
    f = fuzz_at(fuzz)
    WorkerState(f.nic).now += 3000
    step(f.nic)
    pipe = PipeEnd(f.wire + WIRE.tx).pipe
    st_release64(pipe + PIPE.tail, ld64(pipe + PIPE.head))
    for i in range(f.row_count):
        if QpRow(ld64(f.rows + 8 * i)).state == _ERR:
            step(f.nic)  # flushes
            _restore(fuzz, i)
        _post(fuzz, i)


@engine_function
def run(fuzz, count):
    """Feed the NIC `count` frames: how many bytes of the open region changed against the rules is in `bad_offset`."""
    f = fuzz_at(fuzz)
    for i in range(f.row_count):
        _restore(fuzz, i)
        _post(fuzz, i)
    _turn(fuzz)
    fed = 0
    while fed < count:
        frame = reserve(f.near, 2 * MTU + 128)
        if frame == 0:
            return 0
        bth = frame + PACKET
        if _rnd(fuzz, 30) == 0:
            nbytes = _rnd(fuzz, 2 * MTU)
            copy(bth, f.pool + _rnd(fuzz, 4096), nbytes)
        else:
            nbytes = _compose(fuzz, _rnd(fuzz, f.row_count), bth)
        if _rnd(fuzz, 8) == 0:
            for _ in range(1 + _rnd(fuzz, 4)):
                at = bth + _rnd(fuzz, max(min(nbytes, 48 if _rnd(fuzz, 2) else nbytes), 1))
                st8(at, ld8(at) ^ 1 << _rnd(fuzz, 8))
        if _rnd(fuzz, 16) == 0:
            nbytes = _rnd(fuzz, nbytes + 1) if _rnd(fuzz, 2) else nbytes & -4
            nbytes += 4 * _rnd(fuzz, 4) if _rnd(fuzz, 2) else 0
        g = Frame(frame)
        g.nbytes, g.peer_high, g.peer_low, g.source = nbytes, _any64(fuzz), _any64(fuzz), _any64(fuzz)
        if _rnd(fuzz, 50) == 0:
            g.life = _any64(fuzz)
        _name(fuzz, bth, nbytes)
        if _rnd(fuzz, 2000) == 0:
            publish(f.near)  # those before it arrive
            _turn(fuzz)
            _spoil(fuzz, frame)
            step(f.nic)
            f.nonsense += 1
            f.unbroken += WireState(f.wire).broken == 0
            _mend(fuzz)
            continue
        if _rnd(fuzz, 5) == 0:
            g.icrc = 1 + _rnd(fuzz, 2) * _any64(fuzz)
            if g.icrc == 0:
                g.icrc = 1
            check = icrc(
                f.scratch, bth, nbytes, 6, f.peer_high, f.peer_low, f.here_high, f.here_low, 0, 0
            )
            if _rnd(fuzz, 3) == 0:
                check ^= 1 << _rnd(fuzz, 32)
                f.wrong_icrc += nbytes >= 12
            st32(bth + nbytes, check)
        commit(f.near)
        fed += 1
        f.sent += 1
        if _rnd(fuzz, 3) == 0 or fed % CHECK_EVERY == 0:
            publish(f.near)
            _turn(fuzz)
        if fed % CHECK_EVERY == 0:
            for i in range(f.row_count):
                _restore(fuzz, i)
            if _check_open(fuzz) == 0:
                return 0
            for i in range(f.row_count):
                _post(fuzz, i)
    publish(f.near)
    _turn(fuzz)
    return _check_open(fuzz)


@dataclass
class Place:
    """Part of the arena."""

    start: int
    nbytes: int
    name: str


class Fuzz:
    """A NIC whose wire leads to the generator, and all memory that it may touch in one arena with gaps."""

    QUEUES = 6

    def __init__(self, seed: int):
        self.nics = VirtualNics()
        nic, pd = self.nics.nics[0], self.nics.pds[0]
        ctx = pd.ctx
        foreign = ctx.create_pd()
        self.arena = HostMemory(1 << 20)
        self.arena.array[:] = np.random.default_rng(seed).integers(0, 256, self.arena.nbytes, np.uint8)
        self.places: list[Place] = []
        self.end = GAP
        regions = {name: self.place(name, REGION) for name in REGIONS}
        self.mrs = mrs = {
            name: (pd if own else foreign).register(self.bytes(regions[name]), access=access)
            for name, (access, own) in REGIONS.items()
        }
        umem = ctx.register_umem(self.arena)
        self.queues = [self.queue(pd, umem, i) for i in range(self.QUEUES)]
        self.peers = [Queue(self.nics.pds[1]) for _ in range(self.QUEUES)]
        self.good = Queue(pd), Queue(self.nics.pds[1])
        for a, b in (*zip(self.queues, self.peers), self.good):
            connect(a, b, ack_timeout=8, retry_cnt=7, rnr_retry=7, max_rd_atomic=4, psn=0xFF_FFF0)
        self.idle = Queue(pd)
        self.pipes = HostMemory(2 * pipe_size(CAPACITY))
        rx, tx = self.pipes.address, self.pipes.address + pipe_size(CAPACITY)
        gid = bytes(range(16))
        self.wire = nic.links.add_pipes(LinkEnd(tx, rx, CAPACITY, 0), "stranger", (nic.port.gids[0], gid), lambda: None)
        self.nics.stop()
        for i, queue in enumerate(self.queues):
            queue.row["wire"] = self.wire
            queue.row["service"] = ServiceType.UC if i >= 4 else ServiceType.RC
            self.fill(queue, mrs)
        self.idle.row["wire"] = self.wire
        self.hold(seed, mrs, [self.good[0].qp.qpn, self.idle.qp.qpn], rx, gid)
        self.whole = self.arena.array.copy()

    def place(self, name: str, nbytes: int) -> Place:
        made = Place(self.end, nbytes, name)
        self.places.append(made)
        self.end += -(-nbytes // GAP) * GAP + GAP
        assert self.end <= self.arena.nbytes
        return made

    def bytes(self, place: Place) -> np.ndarray:
        return self.arena.array[place.start : place.start + place.nbytes]

    def queue(self, pd, umem, i: int) -> Queue:
        """A queue whose rings, CQs and records lie in the arena."""
        cqs = []
        for side in ("send", "recv"):
            ring, record = self.place(f"cq {side} {i}", 64 * 64), self.place(f"cq record {side} {i}", 8)
            self.bytes(ring)[63::64] = 0xF1
            cqs.append(pd.ctx.create_cq(
                64, overrun=CqOverrun.ENABLE, external_umem=(umem, ring.start),
                external_dbr_umem=(umem, record.start),
            ))
        ring, record = self.place(f"ring {i}", DEPTH * 64 + 16 * 32), self.place(f"record {i}", 8)
        self.bytes(record)[:] = 0
        return Queue(
            pd, DEPTH, 16, 2, *cqs, external_umem=(umem, ring.start), external_dbr_umem=(umem, record.start)
        )

    def fill(self, queue: Queue, mrs) -> None:
        """WQEs that are answered in all ways, and receives."""
        sink, source, inbox = mrs["sink"], mrs["read"], mrs["inbox"]
        rc = queue.row["service"] == ServiceType.RC
        for index in range(DEPTH):
            qpn, at = queue.qp.qpn, 128 * index
            bodies = [
                (READ, raddr(0x1000, 1) + data(sink.iova + at, sink.lkey, 100)),
                (FA, raddr(0x1000, 1) + atomic_segment(1) + data(sink.iova + at, sink.lkey, 8)),
                (SEND, data(source.iova + at, source.lkey, 64)),
                (WRITE, raddr(0x1000, 1) + data(source.iova + at, source.lkey, 300)),
            ]
            opcode, body = bodies[index % 4 if rc else 2 + index % 2]
            wqe = control(opcode, index, qpn, 1 + len(body) // 16) + body
            queue.sq[64 * index : 64 * index + len(wqe)] = np.frombuffer(wqe, np.uint8)
        for _ in range(queue.qp.rq_entries):
            at = 512 * queue.received
            queue.write_receive(data(inbox.iova + at, inbox.lkey, 200), data(inbox.iova + at + 256, inbox.lkey, 200))

    def hold(self, seed: int, mrs, strangers: list[int], rx: int, gid: bytes) -> None:
        """What `run` is given."""
        self.record = np.zeros(1, FUZZ.dtype)
        r = self.record[0]
        nic = self.nics.nics[0]
        rows = [nic.qps.row_address(queue.qp.qpn) for queue in self.queues]
        self.kept = {
            "rows": np.array(rows, np.int64), "strangers": np.array(strangers, np.int64),
            "images": np.concatenate([view(row, QP_SETUP_BYTES) for row in rows]),
            "shadow": self.bytes(self.places[0]).copy(), "allowed": np.zeros(REGION, np.uint8),
            "pool": np.random.default_rng(seed).integers(0, 256, 8192, np.uint8),
            "scratch": np.zeros(HEADER_ROOM, np.uint8), "posted": np.zeros(len(rows), np.int64),
            "near": pipe_end(rx, CAPACITY),
        }
        for name, array in self.kept.items():
            r[name] = array.ctypes.data
        r["random"], r["nic"], r["wire"] = seed * 0x9E3779B97F4A7C15 % (1 << 63) | 1, nic.control_address, self.wire
        r["row_count"], r["stranger_count"] = len(rows), len(strangers)
        r["keys"], r["addresses"] = [mrs[name].rkey for name in KEYS], [mrs[name].iova for name in KEYS]
        r["here_high"], r["here_low"] = np.frombuffer(nic.port.gids[0], np.int64)
        r["peer_high"], r["peer_low"] = np.frombuffer(gid, np.int64)

    def check_arena(self) -> None:
        """Outside what the NIC may write nothing has changed. The generator itself stamps WQEs and posts receives."""
        changed = self.arena.array != self.whole
        for place in self.places:
            part = changed[place.start : place.start + place.nbytes]
            if place.name in ("open", "inbox", "sink") or place.name.startswith(WRITTEN):
                part[:] = False
            elif place.name.startswith("ring"):  # receives first
                part[16 * 32 :].reshape(DEPTH, 64)[:, :4] = False
        at = np.flatnonzero(changed)
        assert not len(at), f"{len(at)} bytes changed, the first at {at[0]}"
        # Nor did bytes between and behind what receives and READs name.
        for name, stride, used in (("inbox", 512, ((0, 200), (256, 456))), ("sink", 128, ((0, 100),))):
            place = next(place for place in self.places if place.name == name)
            rest = np.ones(stride, bool)
            for low, high in used:
                rest[low:high] = False
            whole = self.whole[place.start : place.start + REGION].reshape(-1, stride)
            assert np.array_equal(self.bytes(place).reshape(-1, stride)[:, rest], whole[:, rest])

    def check_counters(self) -> dict[str, int]:
        """Every frame that was fed is in exactly one counter."""
        c, r = self.nics.nics[0].counters, self.record[0]
        assert c["rx_icrc_encapsulated"] == r["wrong_icrc"]
        assert c["rdma_rx_packets"] == r["sent"] - r["wrong_icrc"]
        fates = {name: int(c[name]) for name in PACKET_FATES}
        assert sum(fates.values()) == c["rdma_rx_packets"]
        return fates

    def check_good_peer(self) -> None:
        """A peer that keeps to the rules is served as ever."""
        a, b = self.good
        self.nics.go_on()
        here, there = Buffer(self.nics.pds[0], 4096, 3), Buffer(self.nics.pds[1], 4096)
        a.post(WRITE, there.remote(), here.at())
        assert a.done.next().opcode == REQ
        assert np.array_equal(here.bytes, there.bytes)
        here.bytes[:] = 0
        a.post(READ, there.remote(), here.at())
        assert a.done.next().opcode == REQ
        assert np.array_equal(here.bytes, there.bytes)
        a.receive(here.at(0, 64))
        b.post(SEND, there.at(100, 64))
        assert a.arrived.next().opcode == RESP_SEND
        assert np.array_equal(here.bytes[:64], there.bytes[100:164])

    def close(self) -> None:
        self.nics.close()
        self.pipes.close()


def fuzz(count: int, seed: int) -> dict[str, int]:
    """Feed `count` frames to a NIC and check all that must hold."""
    f = Fuzz(seed)
    try:
        ok = run(f.record.ctypes.data, count)
        r = f.record[0]
        assert ok, f"byte {r['bad_offset']} of the open region changed after {r['sent']} frames, and none had named it"
        f.check_arena()
        fates = f.check_counters()
        assert r["nonsense"] > 0
        assert r["unbroken"] == 0, "nonsense in the pipe's fields was believed"
        assert r["touched"] > 0, "no frame got anywhere"
        assert fates.pop("rx_link_down") == 0
        assert fates.pop("rx_wrong_qkey") == 0  # of datagrams, and all its queue pairs are connected
        assert all(fates.values()), f"some fate was met by no frame: {fates}"
        f.check_good_peer()
        others = ("nonsense", "restored", "touched", "wrong_icrc")
        return fates | {name: int(r[name]) for name in others}
    finally:
        f.close()


def test_fuzz():
    fuzz(20_000, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fuzz_a_million():
    print(fuzz(1_000_000, 2))



def test_capture_of_fuzzed_frames():
    """A capture copies what was checked, whatever the frame says of its length and ICRC."""
    f = Fuzz(3)
    try:
        capacity = 1 << 16
        memory = HostMemory(pipe_size(capacity) + GAP)
        memory.array[pipe_size(capacity) :] = 0x5A
        end = pipe_end(memory.address, capacity)
        f.nics.nics[0].record["capture"] = end.ctypes.data
        assert run(f.record.ctypes.data, 20_000)
        assert (memory.array[pipe_size(capacity) :] == 0x5A).all()
        assert end["position"] > capacity // 2
        f.nics.nics[0].record["capture"] = 0
        memory.close()
    finally:
        f.close()


def test_a_frames_length_is_looked_at_once():
    """A peer that changes it afterwards, in memory that both reach, cannot lead the NIC out of the pipe."""
    memory = HostMemory(pipe_size(CAPACITY))
    near, far = pipe_end(memory.address, CAPACITY), pipe_end(memory.address, CAPACITY)
    frame = reserve(near.ctypes.data, 100)
    header = view(frame, FRAME.size, FRAME.dtype)[0]
    header["nbytes"] = 100
    commit(near.ctypes.data)
    publish(near.ctypes.data)
    assert next_frame(far.ctypes.data) == frame
    header["nbytes"], header["stride"] = 1 << 40, 1 << 40
    assert far["nbytes"] == 100
    consume(far.ctypes.data)
    assert far["position"] == near["position"]
    memory.close()


# --- what a stranger would have to guess -----------------------------------------------------------------------------


def _varied(numbers: list[int]) -> bool:
    """Whether numbers are all different, and neither they nor their distances follow each other."""
    steps = np.diff(numbers)
    return len(set(numbers)) == len(numbers) and len(set(steps.tolist())) > len(steps) * 0.75 and (steps < 0).any()


def test_keys_cannot_be_guessed():
    with VirtualNics() as nics:
        buffers = [Buffer(nics.pds[0], 64) for _ in range(200)]
        keys = [buffer.key for buffer in buffers]
        assert _varied(keys)
        assert len({key & 0xFF for key in keys}) > 60  # the tag, of 255
        assert len({key >> 16 for key in keys}) > 100  # the upper half of the index, of 256


def test_queue_pair_numbers_cannot_be_guessed():
    with VirtualNics() as nics:
        cq = nics.contexts[0].create_cq(64)
        qps = [nics.pds[0].create_qp(sq_wr=4, send_cq=cq) for _ in range(200)]
        numbers = [qp.qpn for qp in qps]
        assert _varied(numbers)
        assert len({number >> 16 for number in numbers}) > 100  # of 256
