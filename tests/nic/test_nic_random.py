"""Random programs of WQEs, valid and not: the software NIC leaves the bytes, CQEs and states that the model says."""

import logging
import struct
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nic_model as model
from fake_gpu import DeviceBuffer, FakeGpus
from gpunetio import verbs
from gpunetio.enums import Access, QpAtomicType, QpState
from gpunetio.nic.engine.port import PortConfig
from nic_model import (
    ATOMICS,
    CMP_SWAP,
    DUMP,
    FETCH_ADD,
    MASKED,
    MASKED_FA,
    MMO,
    NOP,
    RDMA_WRITE,
    READ,
    SEND,
    SEND_IMM,
    WRITE_IMM,
)
from nic_rig import (
    OPMOD,
    RINGS,
    Buffer,
    Completions,
    Queue,
    atomic,
    connect,
    control,
    data,
    inline,
    masked_cs,
    masked_fa,
    raddr,
    reports_of,
    until,
)

WQES = 12000  # of each wire
SQ, RQ = 64, 16  # entries of a ring
SIZE = 1024  # bytes of a region
SMALL = 64  # bytes of a small receive
LW, RW, RR, RA = Access.LOCAL_WRITE, Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC
ALL = Access.all()
RIGHTS = (RW | RR | RA,) * 16 + (RW | RR, RW | RA, RR | RA, Access(0))
OPCODES = (NOP, DUMP, MMO, *(RDMA_WRITE,) * 3, WRITE_IMM, SEND, SEND, SEND_IMM, READ, READ, CMP_SWAP, FETCH_ADD)
PLAIN_RINGS = tuple(how for how in RINGS if "blueflame" not in how)
BLAMED, EXECUTED, CARRIED = -1, -2, -3  # in the place of a CQE's opcode
UNSUPPORTED = (0x01, 0x0E, 0x0F, 0x19, 0x1B, 0x20, 0x25, 0x2F, 0x7F, 0xFF)

# What regions are for, so that a source and its target never overlap: name → (rights, in the QP's PD, iova).
LOCAL = {
    "local": (LW, True, None), "source": (Access(0), True, None), "zero": (LW, True, 0), "alien": (LW, False, None),
    "copies": (LW, True, None),  # written by MMO alone: no request in flight may read what a copy changes
}
REMOTE = {
    "all": (ALL, True, None), "write": (LW | RW, True, None), "read": (RR, True, None), "atomic": (LW | RA, True, None),
    "based": (ALL, True, (1 << 63) - 512), "foreign": (ALL, False, None), "none": (LW, True, None),
}
INBOX = {"inbox": (LW, True, None), "locked": (Access(0), True, None), "stranger": (LW, False, None)}
# Those that may lie in the memory of a GPU: wherever no atomic has its word.
FAR = {"local", "source", "copies", "zero", "write", "read", "none", "inbox"}
RIGHT_OF = {opcode: Access(right) for opcode, right in model.NEEDS.items() if right}


class Side:
    """A NIC's PDs, regions and queues, and the model's."""

    def __init__(self, name: str, link_mtu: int = 0, gpus: FakeGpus | None = None):
        self.ctx = verbs.open(name, port=PortConfig(mtu=link_mtu))
        if gpus:
            gpus.serve(self.ctx)
        self.pd, self.other_pd = self.ctx.create_pd(), self.ctx.create_pd()
        self.model = model.Nic()
        self.buffers: dict[str, Buffer] = {}
        self.ends: list[End] = []
        self.memories: dict[str, bytearray] = {}
        for fill, (region, (access, own, iova)) in enumerate((LOCAL | REMOTE | INBOX).items()):
            pd = self.pd if own else self.other_pd
            if gpus and region in FAR:
                buffer = DeviceBuffer(gpus, pd, SIZE, fill, access=access, iova=iova)
            else:
                buffer = Buffer(pd, SIZE, fill, access=access, iova=iova)
            self.buffers[region] = buffer
            memory = self.memories[region] = bytearray(buffer.whole.tobytes())
            self.model.register(
                model.Region(buffer.key, pd.pdn, int(access), buffer.address, memory, buffer.start, SIZE)
            )
        gone = Buffer(self.pd, SIZE)
        self.dead_key = gone.key
        gone.mr.close()

    def check(self) -> None:
        for name, buffer in self.buffers.items():
            expected = np.frombuffer(self.memories[name], np.uint8)
            if not np.array_equal(buffer.whole, expected):
                at = np.flatnonzero(buffer.whole != expected)
                pytest.fail(f"region {name}: {len(at)} bytes from offset {at[0] - buffer.start} differ")


class End:
    """A queue pair of the NIC beside the model's."""

    def __init__(self, side: Side, user_index: int, wired: bool, cqe_inline: bool):
        self.side = side
        side.ends.append(self)
        self.queue = Queue(
            side.pd, SQ, RQ, send_cq=side.ctx.create_cq(SQ), recv_cq=side.ctx.create_cq(RQ), user_index=user_index,
            cqe_inline=cqe_inline, memcpy=True,
        )
        qp = self.queue.qp
        assert (qp.sq_entries, qp.rq_entries) == (SQ, RQ)
        self.send_cq, self.recv_cq = model.Cq(6), model.Cq(4)
        self.model = model.Qp(
            side.model, qp.qpn, side.pd.pdn, SQ, RQ, qp.rq_stride, self.send_cq, self.recv_cq, user_index, wired,
            cqe_inline,
        )

    def reset(self) -> None:
        self.queue.reset()
        self.model.reset()

    def settle(self) -> None:
        """Wait until the NIC has caught up with the model, and compare."""
        queue = self.queue
        until(queue.idle, f"WQE {queue.index} of {queue.qp}, at {int(queue.row['sq_ci'])}")
        self._compare(queue.done, self.send_cq, "send")
        self._compare(queue.arrived, self.recv_cq, "receive")
        state = QpState[self.model.state]
        assert queue.qp.state == state
        if self.model.blamed:
            *_, report = reports_of(queue.nic, queue.qp.qpn)
            assert (report.reason, report.responder) == (self.model.blamed, True)

    @staticmethod
    def _compare(real: Completions, cq: model.Cq, name: str) -> None:
        for expected in cq.cqes[real.ci :]:
            at = real.ci
            cqe = until(real.poll, f"{name} CQE {at}: {expected}")
            seen = [None if want is None else got for got, want in zip(cqe, expected)]
            assert seen == list(expected), f"{name} CQE {at} is {cqe}, and should be {expected}"
        extra = real.poll()
        assert extra is None, f"{name} CQE that nothing called for: {extra}"


class Programs:
    """Random WQEs from one end to the other."""

    def __init__(self, random: Random, bad: float):
        self.random, self.bad = random, bad
        self.filled: list[tuple[int, int, int]] = []  # (key, start, end) of what READs and atomics in flight fill

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def local(self, side: Side, nbytes: int, write: bool, names: dict | None = None) -> bytes:
        """A data segment of `nbytes`, now and then one that is refused."""
        r = self.random
        name = r.choice(("local", "zero") if write else ("local", "zero", "source"))
        offset = r.randint(0, SIZE - nbytes)
        key = None
        if self.chance(self.bad / 3):
            match r.randrange(6):
                case 0:
                    key = r.choice((0, side.dead_key, r.getrandbits(32)))
                case 1:
                    name = "alien"
                case 2:
                    name = "source"  # refused when the operation writes
                case 3:
                    offset = SIZE - nbytes + r.randint(1, 9)
                case 4:
                    offset = -r.randint(1, 1 << 40)
                case 5:
                    nbytes = r.choice((0, (1 << 30) + 1, 1 << 30, SIZE + 1, 0x7FFF_FFFF))
        buffer = side.buffers[name]
        return data(buffer.address + offset, buffer.key if key is None else key, nbytes)

    def copy(self, side: Side, nbytes: int) -> bytes:
        """The segments of an MMO: metadata, source, destination."""
        r = self.random
        source = self.local(side, nbytes, False)
        key = r.choice((0, side.dead_key, side.buffers["source"].key)) if self.chance(self.bad / 3) else None
        target = side.buffers["copies"]
        offset = r.randint(0, SIZE - nbytes) + (r.randint(1, SIZE) if self.chance(self.bad / 3) else 0)
        if self.chance(self.bad / 3):
            nbytes += 1
        return raddr(0, 0) + source + data(target.address + offset, target.key if key is None else key, nbytes)

    def locals(self, side: Side, total: int, write: bool) -> list[bytes]:
        """Data segments of `total` bytes together, some of them inline where that is allowed."""
        r = self.random
        segments = []
        while total > 0:
            part = total if self.chance(0.6) else r.randint(1, total)
            if part <= 220 and self.chance(self.bad / 10 if write else 0.3):
                segments.append(inline(r.randbytes(part)))
            else:
                segments.append(self.local(side, part, write))
            total -= part
        if not write and self.chance(0.03):
            segments.append(inline(b""))
        return segments

    def operands(self, peer: Side, opcode: int, nbytes: int) -> bytes:
        """An atomic's segments: words that are likely to meet, and fields of some size."""
        r, bits = self.random, 8 * nbytes
        words = peer.buffers["all"]
        compare = words.word(r.randrange(0, SIZE, 8)) if self.chance(0.5) else r.getrandbits(64)
        if opcode in (CMP_SWAP, FETCH_ADD):
            return atomic(r.getrandbits(64), compare)
        masks = [r.choice((0, (1 << bits) - 1, r.getrandbits(bits), 1 << r.randrange(bits))) for _ in range(2)]
        if opcode == MASKED_FA:
            return masked_fa(r.getrandbits(bits), masks[0], nbytes)
        return masked_cs(r.getrandbits(bits), compare & (1 << bits) - 1, masks[0], masks[1], nbytes)

    def remote(self, side: Side, opcode: int, nbytes: int) -> bytes:
        r = self.random
        names = [n for n, (access, own, _) in REMOTE.items() if own and access & RIGHT_OF[opcode]]
        name, key = r.choice(names), None
        offset = r.randint(0, SIZE - nbytes)
        if opcode in ATOMICS:
            offset &= -nbytes
        if self.chance(self.bad):
            match r.randrange(6):
                case 0:
                    key = r.choice((0, side.dead_key, r.getrandbits(32), 0x100))
                case 1:
                    name = "foreign"
                case 2:
                    name = r.choice(list(REMOTE))
                case 3:
                    offset = SIZE - nbytes + r.randint(1, 9)
                case 4:
                    offset = -r.randint(1, 1 << 40)
                case 5:
                    offset += r.randint(1, 7)
        buffer = side.buffers[name]
        return raddr(buffer.address + offset, buffer.key if key is None else key, r.getrandbits(32))

    def wqe(self, end: End, peer: End) -> bytes:
        """One WQE for the next index of `end`."""
        r, queue = self.random, end.queue
        opcode, opmod = r.choice(OPCODES + MASKED * 2), 0
        total = r.choice((0, 1, 8, 32, 33, SMALL, SMALL + 1, r.randint(1, SMALL), r.randint(1, SIZE), SIZE))
        body = b""
        if opcode in ATOMICS:
            total = r.choice((4, 8)) if opcode in MASKED else 8
            opmod = OPMOD[total] if opcode in MASKED else 0
            body = self.remote(peer.side, opcode, total) + self.operands(peer.side, opcode, total)
            if self.chance(self.bad / 3):
                total = r.choice((4, 7, 8, 9, 16))
            if opcode in MASKED and self.chance(self.bad / 3):
                opmod = r.choice((0, 1, 0x07, 0x08, 0x09, 0x0A, 0xFF))
        elif opcode in RIGHT_OF:
            body = self.remote(peer.side, opcode, total)
        if opcode == DUMP:
            body = self.local(end.side, total or 1, False)
            if self.chance(self.bad / 3):
                body = r.choice((inline(bytes(total)), b"", body * 2))
        elif opcode == MMO:
            opmod, body = 1, self.copy(end.side, total or 1)
        elif opcode != NOP:
            body += b"".join(self.locals(end.side, total, opcode in model.RETURNS))
        index, qpn, ds = queue.index, queue.qp.qpn, 1 + len(body) // 16
        if self.chance(self.bad / 2):
            match r.randrange(5):
                case 0:
                    ds = r.choice((0, 1, ds - 1, ds + 1, ds + 3, 63))
                case 1:
                    qpn = r.choice((peer.queue.qp.qpn ^ (peer.queue.qp.qpn == qpn), 0, qpn ^ 1))
                case 2:
                    opcode, opmod = r.choice(UNSUPPORTED), r.choice((0x08, 0x09))
                case 3:
                    index += r.choice((1, -1, 0x100, SQ))
                case 4:
                    body += r.randbytes(16)
                    ds += 1
        ce = r.choice((0, 1, 2, 2, 2, 3))
        junk = r.getrandbits(16)
        if self.must_wait(opcode, opmod, body):
            junk |= r.randint(1, 7)  # the fence
        return control(opcode, index, qpn, min(ds, 63), ce, r.getrandbits(32), junk, opmod) + body

    def must_wait(self, opcode: int, opmod: int, body: bytes) -> bool:
        """Whether a request sends what a READ or atomic before it may not have fetched yet (10.8.3.3)."""
        headers = 16 * (model.header_segments(opcode, opmod) - 1) if opcode in model.ROWS else 0
        returns = opcode in model.RETURNS
        waits, at = False, headers
        while at + 16 <= len(body):
            nbytes, key, address = struct.unpack_from(">IIQ", body, at)
            if nbytes >> 31:
                at += -(-(4 + (nbytes & 0x7FFF_FFFF)) // 16) * 16
                continue
            if returns:
                self.filled.append((key, address, address + nbytes))
            waits |= any(key == k and address < end and start < address + nbytes for k, start, end in self.filled)
            at += 16
        return waits and not returns

    def receive(self, end: End) -> None:
        """Post a receive, now and then one that is too small or refused."""
        r = self.random
        segments = []
        sizes = [r.choice((SIZE // 2, SIZE)) for _ in range(r.choice((2, 2, 3, 4)))]
        if self.chance(2 * self.bad):
            sizes = r.choice(([1], [SMALL], [SMALL // 4] * 4, [SMALL - 1, 1], [SMALL - 3, 1, 1, 1]))
        for nbytes in sizes:
            name = "inbox"
            if self.chance(self.bad / 2):
                name = r.choice(("locked", "stranger"))
            buffer = end.side.buffers[name]
            key = buffer.key if self.chance(1 - self.bad / 4) else r.choice((0, end.side.dead_key))
            offset = r.randint(0, SIZE - nbytes) + (r.randint(1, SIZE) if self.chance(self.bad / 4) else 0)
            if self.chance(self.bad / 4):
                nbytes = 0
            segments.append(data(buffer.address + offset, key, nbytes))
        end.model.post_receive((b"".join(segments) + data(0, 0x100, 0))[: end.queue.qp.rq_stride])
        end.queue.receive(*segments)

    def run(self, end: End, peer: End, length: int) -> int:
        """Up to `length` WQEs from one end to the other: how many there were."""
        r, queue = self.random, end.queue
        wanted = r.choice((0, 1, length // 3)) if self.chance(2 * self.bad) else RQ
        for _ in range(len(peer.model.receives), min(wanted, RQ - 1)):
            self.receive(peer)
        start, posted = queue.index, 0
        self.filled.clear()
        while posted < length:
            wqe = self.wqe(end, peer)
            if queue.index + -(-len(wqe) // 64) - start > SQ:
                break
            queue.write_wqe(wqe)
            posted += 1
        image = queue.sq.tobytes()
        queue.ring(r.choice(RINGS if self.may_flame(queue) else PLAIN_RINGS))
        end.model.post(image, queue.index)
        for one in (end, peer):
            one.settle()
            one.side.check()
        return posted

    @staticmethod
    def may_flame(queue: Queue) -> bool:
        """Whether the latest WQE says of itself which one it is, and how long: BlueFlame's doorbell believes it."""
        dwords = queue.sq.view(">u4").reshape(-1, 16)[queue.last % SQ, :2].tolist()
        ds = queue.index - queue.last << 2
        return dwords[0] >> 8 & 0xFFFF == queue.last & 0xFFFF and dwords[1] >> 8 == queue.qp.qpn and (
            ds - 4 < (dwords[1] & 0x3F or dwords[1] & 0x40) <= ds
        )


def run_programs(sides: list[Side], seed: int, wqes: int, bad: float = 0.04) -> Counter:
    """Programs in both directions, `wqes` WQEs together: how often each (CQE opcode, syndrome, vendor) was seen, each
    (BLAMED, syndrome, vendor) of a responder, each (EXECUTED, WQE opcode, 0), and each (CARRIED, bytes in a CQE, 0)."""
    random = Random(seed)
    wired = len(sides) == 2
    programs = Programs(random, bad)
    ends = [End(sides[0], 0x123456, wired, True), End(sides[-1], 0xABCDEF, wired, False)]
    posted = used = 0
    while posted < wqes:
        broken = any(end.model.state == "ERR" for end in ends)
        if used == 0 or random.random() < (0.9 if broken else 0.02):
            for end in ends:
                end.reset()
            rights = random.choice(RIGHTS) if bad else RIGHTS[0]
            extended = random.random() < (0.9 if bad else 1)
            psn = random.choice((0, 0xFFFFFE, random.getrandbits(24)))
            connect(
                ends[0].queue, ends[1].queue, remote_access=rights, psn=psn, rnr_retry=random.randrange(3),
                retry_cnt=random.randrange(3) + wired,  # a machine may be busy for longer than one timeout of a wire
                atomic_type=QpAtomicType.UP_TO_8BYTES if extended else QpAtomicType.IB_SPEC,
            )
            for end, peer in (ends, ends[::-1]):
                end.model.connect(peer.model, int(rights), extended)
        random.shuffle(ends)
        posted += programs.run(*ends, length=random.choice((1, 4, 12, 12, 30 if bad else RQ - 1)))
        used += 1
    cqes = [cqe for end in ends for cqe in end.send_cq.cqes + end.recv_cq.cqes]
    blamed = [(BLAMED, *refusal) for end in ends for refusal in end.model.refusals]
    executed = [(EXECUTED, cqe.wqe_opcode, 0) for cqe in cqes if cqe.opcode == model.REQ]
    carried = [(CARRIED, len(cqe.payload), 0) for cqe in cqes if cqe.payload]
    return Counter([(cqe.opcode, cqe.syndrome, cqe.vendor) for cqe in cqes] + blamed + executed + carried)


@pytest.fixture
def quiet():
    """Thousands of errors, none of them worth a line of log."""
    logger = logging.getLogger("gpunetio.nic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture
def sides(quiet, request):
    names, link_mtu, *far = request.param
    gpus = FakeGpus(delay=2, eager=far[0] == "eager") if far else None
    sides = [Side(name, link_mtu, gpus) for name in names]
    yield sides
    for side in sides:
        side.ctx.close()


LOOPBACK, WIRE = (("soft0",), 0), (("soft0", "soft1"), 0)
EVERYWHERE = pytest.mark.parametrize("sides", [LOOPBACK, WIRE], indirect=True, ids=["loopback", "wire"])

# What the programs must have met: (CQE opcode, syndrome, vendor).
MET = {
    *((opcode, 0, 0) for opcode in (model.REQ, model.RESP_SEND, model.RESP_SEND_IMM, model.RESP_WRITE_IMM)),
    *((model.REQ_ERR, model.LOCAL_QP_OP, vendor) for vendor in (1, 2, 3, 4)),
    *((model.REQ_ERR, model.LOCAL_LENGTH, vendor) for vendor in (model.LENGTH, model.ATOMIC_LENGTH)),
    *((model.REQ_ERR, model.LOCAL_PROT, model.LKEY + n) for n in range(4)),
    (model.REQ_ERR, model.RETRY_EXCEEDED, model.NO_RESPONSE),
    (model.REQ_ERR, model.RNR_EXCEEDED, model.RNR),
    (model.REQ_ERR, model.WR_FLUSH, model.FLUSH),
    (model.RESP_ERR, model.LOCAL_LENGTH, model.RECV_TOO_SMALL),
    (model.RESP_ERR, model.LOCAL_PROT, model.RECV_LKEY),
    (model.RESP_ERR, model.WR_FLUSH, model.FLUSH),
}

REFUSED = {  # by the peer: (syndrome, vendor)
    *((model.REMOTE_ACCESS, model.RKEY + n) for n in range(4)),
    *((model.REMOTE_INVALID, vendor) for vendor in (model.QP_RIGHTS, model.MISALIGNED, model.RECV_TOO_SMALL)),
    (model.REMOTE_OP, model.RECV_LKEY),
}


@pytest.mark.parametrize(
    "sides",
    [pytest.param(LOOPBACK, id="loopback"), pytest.param(WIRE, id="wire", marks=pytest.mark.slow)],
    indirect=True,
)
def test_random_programs(sides):
    met = Counter()
    for seed in range(4):
        met += run_programs(sides, seed, WQES // 4)
    wired = len(sides) == 2
    told = model.NAK_VENDORS.items() if wired else REFUSED
    masked = (model.REQ_ERR, model.LOCAL_QP_OP, model.OPMOD)
    wanted = MET | {(model.REQ_ERR, *error) for error in told} | {(BLAMED, *error) for error in REFUSED} | {masked}
    wanted |= {(EXECUTED, opcode, 0) for opcode in OPCODES + MASKED}
    wanted |= {(CARRIED, 1, 0), (CARRIED, 32, 0)}
    assert met.keys() >= wanted
    assert max(nbytes for kind, nbytes, _ in met if kind == CARRIED) == 32
    assert met[model.REQ, 0, 0] > WQES // 4


@pytest.mark.parametrize(
    "sides",
    [
        (("soft0",), 0), (("soft0", "soft1"), 0), (("soft0", "soft1"), 336), (("soft0",), 0, "lazy"),
        (("soft0",), 0, "eager"), (("soft0", "soft1"), 336, "lazy"),
    ],
    indirect=True,
    ids=["loopback", "wire", "packets of 256", "GPU, loopback", "eager GPU, loopback", "GPU, packets of 256"],
)
def test_valid_programs(sides):
    """No error at all: long runs around the rings, without a reset."""
    met = run_programs(sides, 3, WQES // 4, bad=0.0)
    assert all(syndrome == 0 for opcode, syndrome, _ in met if opcode >= 0)
    assert not any(opcode == BLAMED for opcode, _, _ in met)


@pytest.mark.parametrize(
    "sides", [
        pytest.param((("soft0",), 0, "lazy"), id="loopback"),
        pytest.param((("soft0", "soft1"), 0, "lazy"), marks=pytest.mark.slow, id="wire"),
    ], indirect=True,
)
def test_random_programs_with_gpu_memory(sides):
    """Most regions lie in the memory of a GPU; the model does not know, so that nothing may show it."""
    met = run_programs(sides, 5, WQES // 4)
    assert met[model.REQ, 0, 0] > WQES // 16
    assert len(met) > 15


@EVERYWHERE
def test_small_programs(sides):
    """The same for Hypothesis, which finds the smallest program that goes wrong."""

    @settings(max_examples=20)
    @given(st.integers(0, 1 << 32), st.integers(1, 12))
    def small(seed, wqes):
        run_programs(sides, seed, wqes, bad=0.3)

    small()
