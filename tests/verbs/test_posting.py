"""The CPU data path: requests and completions as plain values, on one NIC and between two."""

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import DocaError, QpType, verbs
from gpunetio.enums import CqOverrun, QpState, SendFlags, WcFlags, WcOpcode, WcStatus, WrOpcode
from gpunetio.errors import BadStateError, DocaErrorCode, InvalidValueError
from gpunetio.memory import HostMemory
from gpunetio.nic.turn.step import SCANNED
from gpunetio.verbs import CQ, QP, BadWrError, Completion, QpInitAttr, RecvWr, SendWr, Sge
from gpunetio.verbs.devx import doorbell
from gpunetio.verbs.devx.doorbell import ring_receive
from gpunetio.verbs.devx.queues import ReceiveQueue, SendQueue
from nic_rig import Buffer, until

SIZE = 1 << 14
QUIET = SendFlags(0)
BOTH = pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])


@dataclass
class Side:
    """One end: a QP, a CQ for each of its queues, and registered memory."""

    qp: QP
    sent: CQ
    received: CQ
    memory: Buffer

    @classmethod
    def open(cls, ctx: verbs.Context, fill: int, **init: object) -> "Side":
        pd = ctx.create_pd()
        sent, received = ctx.create_cq(64), ctx.create_cq(64)
        options = {"sq_wr": 16, "rq_wr": 8, "send_max_sges": 3, "receive_max_sges": 3, "max_inline_data": 60, **init}
        qp = pd.create_qp(send_cq=sent, receive_cq=received, **options)  # type: ignore[arg-type]
        return cls(qp, sent, received, Buffer(pd, SIZE, fill))

    def sge(self, offset: int, nbytes: int) -> Sge:
        return Sge(self.memory.address + offset, nbytes, self.memory.key)

    def remote(self, offset: int) -> dict[str, int]:
        return {"remote_addr": self.memory.address + offset, "rkey": self.memory.mr.rkey}


def take(cq: CQ, count: int = 1) -> list[Completion]:
    """So many completions, and no more."""
    found: list[Completion] = []
    until(lambda: len(found.__iadd__(cq.poll(count))) >= count, f"{count} completions of {cq}")
    assert len(found) == count
    assert cq.poll() == []
    return found


@pytest.fixture
def sides(names: tuple[str, str]) -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        contexts = {name: stack.enter_context(verbs.open(name)) for name in names}
        a, b = (Side.open(contexts[name], fill) for name, fill in zip(names, (1, 2), strict=True))
        a.qp.connect(b.qp, ack_timeout=15, retry_cnt=1)
        yield a, b


# --- what requests do ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("imm", [None, 0xDEADBEEF])
def test_send(sides, imm):
    a, b = sides
    b.qp.post_recv(RecvWr(sges=[b.sge(0, 100), b.sge(1000, 5000)], wr_id=7))
    opcode = WrOpcode.SEND if imm is None else WrOpcode.SEND_WITH_IMM
    a.qp.post_send(SendWr(opcode=opcode, sges=[a.sge(0, 3000), a.sge(8000, 1)], wr_id=5, imm=imm or 0))
    (sent,), (received,) = take(a.sent), take(b.received)
    assert sent == Completion(
        wr_id=5, status=WcStatus.SUCCESS, opcode=WcOpcode.SEND, byte_len=0, imm=None, qp_num=a.qp.qpn
    )
    assert received == Completion(
        wr_id=7, status=WcStatus.SUCCESS, opcode=WcOpcode.RECV, byte_len=3001, imm=imm, qp_num=b.qp.qpn,
        flags=QUIET if imm is None else WcFlags.WITH_IMM,
    )
    wanted = np.append(a.memory.bytes[:3000], a.memory.bytes[8000])
    assert np.array_equal(np.append(b.memory.bytes[:100], b.memory.bytes[1000:3901]), wanted)


@BOTH
@pytest.mark.parametrize("imm", [None, 0])
def test_write(sides, imm):
    a, b = sides
    b.qp.post_recv(RecvWr(wr_id=9))
    opcode = WrOpcode.RDMA_WRITE if imm is None else WrOpcode.RDMA_WRITE_WITH_IMM
    a.qp.post_send(SendWr(opcode=opcode, sges=[a.sge(3, 5000)], **b.remote(100)))
    (sent,) = take(a.sent)
    assert (sent.opcode, sent.status, sent.wr_id) == (WcOpcode.RDMA_WRITE, WcStatus.SUCCESS, 0)
    assert np.array_equal(b.memory.bytes[100:5100], a.memory.bytes[3:5003])
    if imm is None:
        assert b.received.poll() == []
    else:
        (received,) = take(b.received)
        assert (received.opcode, received.imm, received.wr_id) == (WcOpcode.RECV_RDMA_WITH_IMM, imm, 9)
        assert received.byte_len == 5000


@BOTH
def test_read(sides):
    a, b = sides
    a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_READ, sges=[a.sge(0, 10), a.sge(100, 4990)], **b.remote(7)))
    (done,) = take(a.sent)
    assert (done.opcode, done.byte_len) == (WcOpcode.RDMA_READ, 5000)
    got = np.append(a.memory.bytes[:10], a.memory.bytes[100:5090])
    assert np.array_equal(got, b.memory.bytes[7:5007])


@BOTH
def test_atomics(sides):
    a, b = sides
    old = b.memory.word(64)
    add = SendWr(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, sges=[a.sge(0, 8)], add=-3, **b.remote(64))
    swap = SendWr(
        opcode=WrOpcode.ATOMIC_CMP_AND_SWP, sges=[a.sge(8, 8)], compare=(old - 3) % 2**64, swap=77, **b.remote(64)
    )
    a.qp.post_send(add, swap)
    assert [(done.opcode, done.byte_len) for done in take(a.sent, 2)] == [
        (WcOpcode.FETCH_ADD, 8), (WcOpcode.COMP_SWAP, 8),
    ]
    assert (a.memory.word(0), a.memory.word(8), b.memory.word(64)) == (old, (old - 3) % 2**64, 77)


@BOTH
@pytest.mark.parametrize("nbytes", [0, 1, 12, 13, 60])
def test_inline(sides, nbytes):
    """Bytes that may change at once, and need no key."""
    a, b = sides
    payload = bytearray(range(1, nbytes + 1))
    source = np.frombuffer(bytes(payload) + b"x", np.uint8)
    by_address = Sge(int(source.ctypes.data), nbytes, 0xBAD)
    a.qp.post_send(
        SendWr(opcode=WrOpcode.RDMA_WRITE, inline=bytes(payload), **b.remote(0)),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[by_address], flags=SendFlags.INLINE, **b.remote(1000)),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.sge(0, 1)], **b.remote(2000)),
    )
    assert [done.status for done in take(a.sent, 2)] == [WcStatus.SUCCESS] * 2
    for at in (0, 1000):
        assert b.memory.bytes[at : at + nbytes].tobytes() == payload


@BOTH
def test_flags(sides):
    """What is not signalled completes with what is; a fence lets a READ's bytes be sent on."""
    a, b = sides
    b.qp.post_recv(RecvWr(sges=[b.sge(4000, 100)]))
    a.qp.post_send(
        SendWr(opcode=WrOpcode.RDMA_READ, sges=[a.sge(0, 100)], flags=QUIET, **b.remote(200)),
        SendWr(opcode=WrOpcode.SEND, sges=[a.sge(0, 100)], wr_id=2, flags=SendFlags.FENCE | SendFlags.SIGNALED),
    )
    (done,) = take(a.sent)
    assert (done.wr_id, done.opcode) == (2, WcOpcode.SEND)
    take(b.received)
    assert np.array_equal(b.memory.bytes[4000:4100], b.memory.bytes[200:300])


def test_all_signalled():
    with verbs.open("soft0") as ctx:
        a, b = Side.open(ctx, 1, sq_sig_all=True), Side.open(ctx, 2)
        a.qp.connect(b.qp)
        a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", flags=QUIET, **b.remote(0)))
        take(a.sent)


def test_one_cq_for_all():
    """Completions of both queues of several QPs, in the order in which they came."""
    with verbs.open("soft0") as ctx:
        pd, cq = ctx.create_pd(), ctx.create_cq(64)
        memory = Buffer(pd, 64, 0)
        qps = [pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cq, receive_cq=cq) for _ in range(4)]
        for here, there in zip(qps[::2], qps[1::2], strict=True):
            here.connect(there)
        for n, qp in enumerate(qps):
            qp.post_recv(RecvWr(sges=[Sge(memory.address, 64, memory.key)], wr_id=100 + n))
        for n, qp in enumerate(qps):
            qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=b"?", wr_id=n))
        done = take(cq, 8)
        numbers = {qp.qpn: n for n, qp in enumerate(qps)}
        assert sorted((numbers[one.qp_num], one.wr_id) for one in done) == sorted(
            (n, wr_id) for n in range(4) for wr_id in (n, 100 + n)
        )


# --- errors ----------------------------------------------------------------------------------------------------------


@BOTH
def test_bad_requests(sides):
    """The first that is refused is named; those before it are posted, those behind it are not."""
    a, b = sides
    good = SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.sge(0, 8)], wr_id=1, **b.remote(0))
    write, send = WrOpcode.RDMA_WRITE, WrOpcode.SEND
    one = [a.sge(0, 1)]
    bad = [
        (SendWr(opcode=99), "must be a WrOpcode"),  # type: ignore[arg-type]
        (SendWr(opcode=send, sges=one * 4), "4 scatter/gather entries"),
        (SendWr(opcode=send, sges=[Sge(0, -1, 0)]), "length = -1"),
        (SendWr(opcode=send, sges=[Sge(0, (1 << 30) + 1, 0)]), "has 0 to 1073741824 bytes"),
        (SendWr(opcode=send, sges=[Sge(0, 1 << 29, 0)] * 3), "a request has 1073741824 at most"),
        (SendWr(opcode=send, sges=[Sge(1 << 64, 1, 0)]), "does not fit in 64 bits"),
        (SendWr(opcode=send, sges=[Sge(0, 1, 1 << 32)]), "lkey = 0x100000000"),
        (SendWr(opcode=send, inline=bytes(a.qp.init_attr.max_inline_data + 1)), "bytes inline: .* takes 92"),
        (SendWr(opcode=send, inline=b"", sges=one), "give one of the two"),
        (SendWr(opcode=WrOpcode.RDMA_READ, inline=b""), "cannot be inline"),
        (SendWr(opcode=WrOpcode.SEND_WITH_IMM, imm=1 << 32), "imm = 0x100000000"),
        (SendWr(opcode=write, remote_addr=-1), "remote_addr = -0x1"),
        (SendWr(opcode=write, rkey=1 << 32), "rkey = 0x100000000"),
        (SendWr(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, sges=one, **b.remote(0)), "for the result of an atomic"),
        (SendWr(opcode=write, sges=one), "RDMA_WRITE without remote_addr and rkey: it needs the peer's memory"),
        (SendWr(opcode=write, inline=b"1", remote_addr=0), "RDMA_WRITE without rkey"),
        (SendWr(opcode=WrOpcode.RDMA_READ, sges=one, rkey=1), "RDMA_READ without remote_addr"),
    ]
    for request, text in bad:
        with pytest.raises(BadWrError, match=text) as caught:
            a.qp.post_send(good, request, good)
        assert (caught.value.index, caught.value.request) == (1, request)
        assert caught.value.code == DocaErrorCode.INVALID_VALUE
        assert [done.wr_id for done in take(a.sent)] == [1]
    assert a.qp.state == QpState.RTS


@BOTH
def test_full_queues(sides):
    a, b = sides
    room = a.qp.sq_entries
    writes = [SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"", wr_id=n, **b.remote(0)) for n in range(room + 1)]
    with pytest.raises(BadWrError, match="basic blocks of its send queue") as caught:
        a.qp.post_send(*writes)
    assert (caught.value.index, caught.value.code) == (room, DocaErrorCode.FULL)
    assert [done.wr_id for done in take(a.sent, room)] == list(range(room))
    receives = b.qp.rq_entries
    with pytest.raises(BadWrError, match="all 8 receives are posted") as caught:
        b.qp.post_recv(*[RecvWr(wr_id=n) for n in range(receives + 1)])
    assert caught.value.index == receives
    a.qp.post_send(*[SendWr(opcode=WrOpcode.SEND, inline=b"") for _ in range(receives)])
    assert [done.wr_id for done in take(b.received, receives)] == list(range(receives))


@BOTH
def test_failures_flush_what_is_behind_them(sides):
    a, b = sides
    b.qp.post_recv(RecvWr(wr_id=3))
    wrong = {**b.remote(0), "rkey": b.memory.mr.rkey ^ 1}
    requests = [SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", flags=QUIET, wr_id=0, **b.remote(0))]
    requests += [SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", wr_id=1, **wrong)]
    requests += [SendWr(opcode=WrOpcode.SEND, inline=b"x", wr_id=n, flags=QUIET) for n in (2, 3)]
    a.qp.post_send(*requests)
    assert [(done.wr_id, done.status) for done in take(a.sent, 3)] == [
        (1, WcStatus.REM_ACCESS_ERR), (2, WcStatus.WR_FLUSH_ERR), (3, WcStatus.WR_FLUSH_ERR),
    ]
    a.qp.post_send(SendWr(opcode=WrOpcode.SEND, wr_id=4))  # in ERR it is taken, and flushed
    assert [(done.wr_id, done.status) for done in take(a.sent)] == [(4, WcStatus.WR_FLUSH_ERR)]
    b.qp.to_error()
    assert [(done.wr_id, done.status) for done in take(b.received)] == [(3, WcStatus.WR_FLUSH_ERR)]


@BOTH
def test_reset_forgets(sides):
    """What had completed and was not polled is not told, and the queues begin anew."""
    a, b = sides
    for _ in range(3):
        b.qp.post_recv(RecvWr(wr_id=1), RecvWr(wr_id=2))
        a.qp.post_send(*[SendWr(opcode=WrOpcode.SEND, inline=b"", wr_id=5)] * 2)
        assert [done.wr_id for done in take(b.received, 2)] == [1, 2]
        a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"y", wr_id=6, **b.remote(0)))
        until(lambda: b.memory.bytes[0] == ord("y"), "the write")
        for side in sides:
            side.qp.reset()
        assert a.sent.poll() == []
        b.memory.bytes[0] = 0
        with pytest.raises(BadStateError, match="takes sends from RTS on"):
            a.qp.post_send(SendWr(opcode=WrOpcode.SEND))
        with pytest.raises(BadStateError, match="takes receives from INIT on"):
            a.qp.post_recv(RecvWr())
        a.qp.connect(b.qp)


@BOTH
def test_a_queue_that_goes_takes_its_completions_along(sides):
    a, b = sides
    a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"y", **b.remote(0)))
    until(lambda: b.memory.bytes[0] == ord("y"), "the write")
    a.qp.close()
    assert a.sent.poll() == []


def test_what_the_cpu_cannot_do():
    with verbs.open("soft0") as ctx:
        pd = ctx.create_pd()
        umem = ctx.register_umem(HostMemory(8192))
        collapsed, plain = ctx.create_cq(64, overrun=CqOverrun.ENABLE, collapsed=True), ctx.create_cq(64)
        qp = pd.create_qp(sq_wr=4, send_cq=plain, external_umem=(umem, 0), external_dbr_umem=(umem, 4096))
        with pytest.raises(BadStateError, match="external data path"):
            qp.post_send(SendWr(opcode=WrOpcode.SEND))
        with pytest.raises(BadStateError, match="collapsed"):
            collapsed.poll()
        with pytest.raises(InvalidValueError, match="most = 0"):
            plain.poll(0)
        plain.poll()
        uc, other = (pd.create_qp(sq_wr=4, send_cq=plain, qp_type=QpType.UC) for _ in range(2))
        uc.connect(other)
        with pytest.raises(BadWrError, match="only RC"):
            uc.post_send(SendWr(opcode=WrOpcode.RDMA_READ))
        with pytest.raises(InvalidValueError, match="has no such queue"):
            other.post_recv(RecvWr())
        for closed in (qp, uc):
            closed.close()
            with pytest.raises(DocaError, match="is closed"):
                closed.post_send(SendWr(opcode=WrOpcode.SEND))


# --- programs --------------------------------------------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "send", "inline"]), st.integers(0, 2000), st.integers(0, 1000),
              st.integers(1, 3), st.booleans()),
    min_size=1, max_size=60,
)


@settings(max_examples=25)
@given(REQUESTS)
def test_programs(requests):
    """Any mixture, around the ring's end and over again, against a model in plain Python."""
    with ExitStack() as stack:
        a, b = (Side.open(stack.enter_context(verbs.open(f"soft{n}")), n) for n in range(2))
        a.qp.connect(b.qp, ack_timeout=17)
        here, there = a.memory.bytes.copy(), b.memory.bytes.copy()
        open_requests: list[int] = []
        for wr_id, (kind, nbytes, offset, pieces, signaled) in enumerate(requests):
            signaled = signaled or wr_id == len(requests) - 1 or wr_id % 4 == 3
            flags = SendFlags.SIGNALED if signaled else QUIET
            cuts = [nbytes * n // pieces for n in range(pieces + 1)]
            spots = [(offset + 2500 * n, high - low) for n, (low, high) in enumerate(pairwise(cuts))]
            sges = [a.sge(at, length) for at, length in spots]
            index = np.concatenate([np.arange(at, at + length) for at, length in spots]).astype(int)
            target = slice(9000 + offset, 9000 + offset + nbytes)
            if kind == "inline":
                data = bytes([wr_id & 0xFF]) * min(nbytes, 60)
                a.qp.post_send(SendWr(
                    opcode=WrOpcode.RDMA_WRITE, inline=data, wr_id=wr_id, flags=flags, **b.remote(target.start)
                ))
                there[target.start : target.start + len(data)] = np.frombuffer(data, np.uint8)
            elif kind == "read":
                a.qp.post_send(SendWr(
                    opcode=WrOpcode.RDMA_READ, sges=sges, wr_id=wr_id, flags=flags | SendFlags.FENCE,
                    **b.remote(target.start),
                ))
                here[index] = there[target]
            elif kind == "write":
                a.qp.post_send(SendWr(
                    opcode=WrOpcode.RDMA_WRITE, sges=sges, wr_id=wr_id, flags=flags | SendFlags.FENCE,
                    **b.remote(target.start),
                ))
                there[target] = here[index]
            else:
                b.qp.post_recv(RecvWr(sges=[b.sge(target.start, nbytes)], wr_id=wr_id))
                a.qp.post_send(SendWr(
                    opcode=WrOpcode.SEND, sges=sges, wr_id=wr_id, flags=flags | SendFlags.FENCE
                ))
                there[target] = here[index]
                (received,) = take(b.received)
                assert (received.wr_id, received.byte_len) == (wr_id, nbytes)
            if signaled:
                open_requests.append(wr_id)
                assert [done.wr_id for done in take(a.sent)] == [open_requests.pop()]
        assert np.array_equal(a.memory.bytes, here)
        assert np.array_equal(b.memory.bytes, there)


def test_counters_of_16_bits_wrap():
    """65,536 requests and some more on one queue."""
    with verbs.open("soft0") as ctx:
        a, b = Side.open(ctx, 1, sq_wr=512), Side.open(ctx, 2)
        a.qp.connect(b.qp)
        end = time.monotonic() + 60
        batch = [SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", flags=QUIET, **b.remote(0))] * 255
        for n in range(260):
            assert time.monotonic() < end
            a.qp.post_send(*batch, SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", wr_id=n, **b.remote(1)))
            assert [done.wr_id for done in take(a.sent)] == [n]
        assert a.qp.posting.send.producer > 1 << 16


# --- the queues by themselves ----------------------------------------------------------------------------------------

SLOTS, BLOCK = 8, 64


class Ring:
    """A queue in memory that no device reads, and beside it what it should hold: requests in order, in plain Python."""

    def __init__(self, kind: type[SendQueue] | type[ReceiveQueue], qpn: int):
        self.ring, self.record = np.zeros((SLOTS, BLOCK), np.uint8), np.zeros(16, np.uint8)
        address = int(self.record.ctypes.data)
        qp = SimpleNamespace(
            qpn=qpn, rq_stride=BLOCK, dbr_address=address, doorbell_register=address + 8,
            init_attr=QpInitAttr(send_max_sges=3, receive_max_sges=4, max_inline_data=200), type=QpType.RC,
        )
        self.qpn, self.queue = qpn, kind(qp, self.ring)  # type: ignore[arg-type]
        self.waiting: deque[tuple[int, int, SendWr | RecvWr]] = deque()  # index, slots, request
        self.producer = 0

    def post(self, requests: list[SendWr] | list[RecvWr], slots: Callable[[Any], int]) -> None:
        """Post, and see that just those are taken for which there is room."""
        refused = None
        for n, request in enumerate(requests):
            if sum(taken for _, taken, _ in self.waiting) + slots(request) > SLOTS:
                refused = n
                break
            self.waiting.append((self.producer, slots(request), request))
            self.producer += slots(request)
        if refused is None:
            self.queue.post(requests)
        else:
            with pytest.raises(BadWrError) as caught:
                self.queue.post(requests)
            assert (caught.value.index, caught.value.request) == (refused, requests[refused])
            assert caught.value.code is DocaErrorCode.FULL
        assert self.queue.producer == self.producer

    def bytes_at(self, index: int, count: int) -> bytes:
        """The ring's content of so many slots."""
        return b"".join(self.ring[(index + n) % SLOTS].tobytes() for n in range(count))


def blocks_of(request: SendWr) -> int:
    return -(-(16 + 16 + 4 + len(request.inline or b"")) // BLOCK)


SENDS = [
    SendWr(opcode=WrOpcode.RDMA_WRITE, inline=bytes([n] * n), wr_id=100 + n, remote_addr=0, rkey=n, imm=n)
    for n in (1, 28, 29, 92, 93, 156)
]
RECEIVES = [RecvWr(sges=[Sge(1000 * n, n, 7)] * n, wr_id=n) for n in range(1, 5)]
LISTS = st.lists(st.integers(0, 5), max_size=10)


@given(st.lists(st.tuples(st.integers(0, 1), LISTS, st.integers(0, 8)), max_size=30))
def test_send_queues_against_a_model(steps):
    """Two queues with requests that both have posted before, of one to three blocks; any may be signalled."""
    rings = Ring(SendQueue, 0x123456), Ring(SendQueue, 0x65)
    for which, chosen, completed in steps:
        ring = rings[which]
        ring.post([SENDS[n] for n in chosen], blocks_of)
        for index, count, request in ring.waiting:
            wqe = ring.bytes_at(index, count)
            segments = 2 + -(-(4 + len(request.inline)) // 16)
            assert struct.unpack(">II", wqe[:8]) == ((index & 0xFFFF) << 8 | 0x08, ring.qpn << 8 | segments)
            assert struct.unpack(">I", wqe[12:16]) == (0,)  # a write without immediate data
            assert struct.unpack(">I", wqe[24:28]) == (request.rkey,)
            assert struct.unpack(">I", wqe[32:36]) == (1 << 31 | len(request.inline),)
            assert wqe[36:].rstrip(b"\0") == request.inline
        if any(ring.record):
            assert int.from_bytes(ring.record[4:8].tobytes(), "big") == ring.producer & 0xFFFF
        done = [ring.waiting.popleft() for _ in range(min(completed, len(ring.waiting)))]
        if done:  # only the last one was signalled
            index, count, request = done[-1]
            assert ring.queue.complete(index & 0xFFFF) == (request.wr_id, WcOpcode.RDMA_WRITE, False)
            assert ring.queue.consumer == index + count


@given(st.lists(st.tuples(LISTS, st.integers(0, 8)), max_size=30))
def test_receive_queue_against_a_model(steps):
    ring = Ring(ReceiveQueue, 1)
    for chosen, completed in steps:
        ring.post([RECEIVES[n % 4] for n in chosen], lambda _: 1)
        for index, _, request in ring.waiting:
            ends = () if len(request.sges) == 4 else (0, 0x100, 0)
            words = [word for sge in request.sges for word in (sge.length, sge.lkey, sge.address)]
            assert struct.unpack(">" + "IIQ" * 4, ring.bytes_at(index, 1)) == tuple([*words, *ends, *[0] * 12][:12])
        for _ in range(min(completed, len(ring.waiting))):
            assert ring.queue.complete(0) == ring.waiting.popleft()[2].wr_id


def test_what_was_posted_before_is_packed_anew():
    """For another queue, after a reset, and where the bytes may be others now."""
    with verbs.open("soft0") as ctx:
        a, b = Side.open(ctx, 1), Side.open(ctx, 2)
        a.qp.connect(b.qp)
        write = SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.sge(0, 8)], **b.remote(0))
        there = SendWr(
            opcode=WrOpcode.RDMA_WRITE, sges=[a.sge(0, 8)], flags=SendFlags.INLINE | SendFlags.SIGNALED, **b.remote(8)
        )
        for n in range(3):
            a.memory.bytes[:8] = n
            a.qp.post_send(write, there, write)
            take(a.sent, 3)
            assert set(b.memory.bytes[:16]) == {n}
        both = SendWr(opcode=WrOpcode.SEND, inline=b"both ways")
        for near, far in (a, b), (b, a), (a, b):
            far.qp.post_recv(RecvWr(sges=[far.sge(0, 16)]))
            near.qp.post_send(both)
            take(near.sent)
            assert take(far.received)[0].byte_len == 9
        for side in a, b:
            side.qp.reset()
        a.qp.connect(b.qp)
        a.qp.post_send(write)
        assert take(a.sent)[0].status is WcStatus.SUCCESS


def test_requests_are_values():
    entries = [Sge(1, 2, 3)]
    request = SendWr(opcode=WrOpcode.SEND, sges=entries)
    entries.clear()
    assert request == SendWr(opcode=WrOpcode.SEND, sges=(Sge(1, 2, 3),))
    assert RecvWr(sges=[]) == RecvWr(sges=())
    ring = Ring(SendQueue, 5)
    ring.queue.post([request])
    again = pickle.loads(pickle.dumps(request))
    assert again == request
    assert hash(again) == hash(request)
    assert not hasattr(again, "packed")
    assert "packed" not in {field.name for field in fields(request)}


# --- an engine that sleeps, and queues that do nothing ---------------------------------------------------------------


def test_a_post_wakes_the_engine():
    with verbs.open("soft0") as ctx:
        a, b = Side.open(ctx, 1), Side.open(ctx, 2)
        a.qp.connect(b.qp)
        nic = ctx.provider.nic  # type: ignore[attr-defined]
        nic.record["sleep_ms"] = 3_600_000
        for n in range(20):
            until(lambda: nic.record["asleep"] == 1, "the engine to sleep")
            a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"wake", wr_id=n, **b.remote(0)))
            assert take(a.sent)[0].wr_id == n


def test_queues_come_and_go():
    """Those that are left work, whichever others are gone."""
    with verbs.open("soft0") as ctx:
        sides = [Side.open(ctx, n) for n in range(6)]
        target = Side.open(ctx, 9)
        for gone in (2, 0, 3, 2):  # in the middle, the first, the last
            sides.pop(gone).qp.close()
            for n, side in enumerate(sides):
                target.qp.connect(side.qp)
                side.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", wr_id=n, **target.remote(n)))
                assert [done.wr_id for done in take(side.sent)] == [n]
                target.qp.reset()
                side.qp.reset()


def test_a_missed_ring_among_many_queues(monkeypatch):
    """The doorbell record is looked at in turns with those of others."""
    monkeypatch.setattr(doorbell, "ring_send", lambda record, producer, register, qpn: ring_receive(record, producer))
    with verbs.open("soft0") as ctx:
        pd, cq = ctx.create_pd(), ctx.create_cq(64)
        others = [pd.create_qp(sq_wr=1, send_cq=cq) for _ in range(2 * SCANNED)]
        a, b = Side.open(ctx, 1), Side.open(ctx, 2)
        a.qp.connect(b.qp)
        for n in range(3):
            a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, inline=b"x", wr_id=n, **b.remote(n)))
            assert take(a.sent)[0].wr_id == n
            others.pop().close()
