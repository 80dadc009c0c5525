"""The software NIC, one behaviour at a time: opcodes, sizes of messages, laps of the rings."""

import time

import numpy as np
import pytest

from gpunetio.enums import Access, QpState, QpType
from gpunetio.memory import HostMemory
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    ALWAYS,
    CS,
    DUMP,
    FA,
    LOCAL_LENGTH,
    LOCAL_PROT,
    LOCAL_QP_OP,
    NOP,
    ON_ERROR,
    READ,
    REMOTE_ACCESS,
    REMOTE_INVALID,
    REQ,
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
    RINGS,
    SEND,
    SEND_IMM,
    SIZE,
    WRITE,
    WRITE_IMM,
    Buffer,
    Queue,
    atomic,
    connect,
    control,
    data,
    error_of,
    inline,
    pause,
    raddr,
    until,
    view,
)

MIB, GIB = 1 << 20, 1 << 30


# --- opcodes ---------------------------------------------------------------------------------------------------------


def test_write(ends):
    index = ends.write()
    ends.a.ring()
    cqe = ends.a.done.next()
    assert (cqe.opcode, cqe.wqe_opcode, cqe.counter, cqe.qpn) == (REQ, WRITE, index, ends.a.qp.qpn)
    assert ends.written()
    assert not ends.there.whole[: ends.there.start].any()
    assert ends.b.arrived.none_for()


def test_write_gathers(ends):
    here, there = ends.here, ends.there
    parts = [here.at(100, 7), here.at(0, 1), inline(b"in between"), here.at(4000, 4096)]
    ends.a.post(WRITE, there.remote(3), *parts)
    assert ends.a.done.next().opcode == REQ
    expected = b"".join((here.bytes[100:107], here.bytes[:1], b"in between", here.bytes[4000:8096]))
    assert there.bytes.tobytes() == bytes(3) + expected + bytes(SIZE - 3 - len(expected))


@pytest.mark.parametrize("nbytes", [1, 4, 12, 13, 28, 29, 60, 61, 500])
def test_write_inline(ends, nbytes):
    payload = bytes(range(1, 251)) * 2
    ends.a.post(WRITE, ends.there.remote(5), inline(payload[:nbytes]))
    assert ends.a.done.next().opcode == REQ
    assert ends.there.bytes.tobytes() == bytes(5) + payload[:nbytes] + bytes(SIZE - 5 - nbytes)


def test_write_with_immediate(ends):
    receives = [ends.b.receive(), ends.b.receive()]
    for imm in (0x01020304, 0xFFFFFFFF):
        ends.a.post(WRITE_IMM, ends.there.remote(), ends.here.at(0, 100), imm=imm)
    assert [cqe.opcode for cqe in ends.a.done.take(2)] == [REQ, REQ]
    arrived = ends.b.arrived.take(2)
    assert [cqe.opcode for cqe in arrived] == [RESP_WRITE_IMM] * 2
    assert [cqe.imm for cqe in arrived] == [0x01020304, 0xFFFFFFFF]
    assert [cqe.byte_cnt for cqe in arrived] == [100, 100]
    assert [cqe.counter for cqe in arrived] == receives
    assert [cqe.qpn for cqe in arrived] == [ends.b.qp.qpn] * 2
    assert np.array_equal(ends.there.bytes[:100], ends.here.bytes[:100])


def test_send_scatters_into_receives_in_order(ends):
    ends.b.receive(ends.there.at(0, 10), ends.there.at(100, 5), ends.there.at(200, 100))
    ends.b.receive(ends.there.at(1000, 1000))
    ends.a.put(SEND, ends.here.at(0, 18), imm=0x5EED)
    ends.a.put(SEND_IMM, ends.here.at(50, 4), ends.here.at(60, 4), imm=0xCAFE)
    ends.a.ring()
    assert [cqe.wqe_opcode for cqe in ends.a.done.take(2)] == [SEND, SEND_IMM]
    first, second = ends.b.arrived.take(2)
    assert (first.opcode, first.byte_cnt, first.counter, first.imm) == (RESP_SEND, 18, 0, 0)
    assert (second.opcode, second.byte_cnt, second.counter, second.imm) == (RESP_SEND_IMM, 8, 1, 0xCAFE)
    here, expected = ends.here.bytes, np.zeros(SIZE, np.uint8)
    expected[:10], expected[100:105], expected[200:203] = here[:10], here[10:15], here[15:18]
    expected[1000:1004], expected[1004:1008] = here[50:54], here[60:64]
    assert np.array_equal(ends.there.bytes, expected)


def test_read_scatters(ends):
    ends.there.bytes[:] = ends.here.bytes[::-1]
    before = ends.here.bytes.copy()
    ends.a.post(READ, ends.there.remote(1000), ends.here.at(2000, 5), ends.here.at(0, 95))
    cqe = ends.a.done.next()
    assert (cqe.opcode, cqe.wqe_opcode, cqe.byte_cnt) == (REQ, READ, 100)
    before[2000:2005], before[:95] = ends.there.bytes[1000:1005], ends.there.bytes[1005:1100]
    assert np.array_equal(ends.here.bytes, before)


def test_fetch_and_add(ends):
    ends.there.set_word(16, (1 << 64) - 3)
    ends.a.put(FA, ends.there.remote(16), atomic(10), ends.here.at(8, 8))
    ends.a.put(FA, ends.there.remote(16), atomic(-1), ends.here.at(24, 4), ends.here.at(40, 4))
    ends.a.ring()
    assert [(cqe.wqe_opcode, cqe.byte_cnt) for cqe in ends.a.done.take(2)] == [(FA, 8)] * 2
    assert ends.here.word(8) == (1 << 64) - 3
    assert ends.there.word(16) == 6
    assert ends.here.bytes[24:28].tobytes() + ends.here.bytes[40:44].tobytes() == (7).to_bytes(8, "little")


def test_compare_and_swap(ends):
    ends.there.set_word(0, 0x1122334455667788)
    ends.a.put(CS, ends.there.remote(), atomic(99, 0x1122334455667788), ends.here.at(0, 8))
    ends.a.put(CS, ends.there.remote(), atomic(1, 98), ends.here.at(8, 8))
    ends.a.ring()
    assert [cqe.wqe_opcode for cqe in ends.a.done.take(2)] == [CS, CS]
    assert (ends.here.word(0), ends.here.word(8), ends.there.word(0)) == (0x1122334455667788, 99, 99)


def test_nop_completes_in_order(ends):
    kinds = (WRITE, NOP, WRITE, NOP, NOP)
    for opcode in kinds:
        ends.a.put(opcode, *((ends.there.remote(), ends.here.at()) if opcode == WRITE else ()))
    ends.a.ring()
    assert [(cqe.wqe_opcode, cqe.counter) for cqe in ends.a.done.take(5)] == list(zip(kinds, range(5)))


def test_dump_completes_behind_reads_and_atomics(ends):
    """Its completion says that what they brought is in memory, though they make none themselves."""
    for lap in range(5):
        ends.there.bytes[:] = np.arange(SIZE) * 3 + lap
        ends.there.set_word(0, lap)
        ends.a.put(READ, ends.there.remote(64), ends.here.at(64, SIZE - 64), ce=ON_ERROR)
        ends.a.put(FA, ends.there.remote(), atomic(1), ends.here.at(0, 8), ce=ON_ERROR)
        dump = ends.a.post(DUMP, ends.here.at(100, 1))
        cqe = ends.a.done.next()
        assert (cqe.opcode, cqe.wqe_opcode, cqe.counter, cqe.byte_cnt) == (REQ, DUMP, dump, 0)
        assert ends.here.word(0) == lap
        assert np.array_equal(ends.here.bytes[64:], ends.there.bytes[64:])


@pytest.mark.parametrize("fence", [0, 2])
def test_dump_waits_for_a_peer_that_is_slow(ends, fence):
    """What a READ before it has not brought yet holds it up, with a fence and without; what is behind it waits too."""
    ends.again(ack_timeout=20, retry_cnt=7)
    pause(ends.b)
    ends.there.bytes[:] = 7
    ends.a.put(READ, ends.there.remote(), ends.here.at())
    ends.a.put(DUMP, ends.here.at(0, 1), junk=fence)
    ends.a.put(WRITE, ends.there.remote(8), inline(bytes(8)))
    ends.a.ring()
    assert ends.a.done.none_for()
    ends.b.nic.resume()
    assert [cqe.wqe_opcode for cqe in ends.a.done.take(3)] == [READ, DUMP, WRITE]
    assert (ends.here.bytes == 7).all()


def test_dump_needs_a_key_and_no_peer(ends):
    """Any key that reads is good enough; a peer that is gone does not matter."""
    locked = Buffer(ends.a.qp.pd, 64, access=Access.LOCAL_READ)
    ends.b.reset()
    ends.a.post(DUMP, locked.at())
    assert ends.a.done.next().opcode == REQ
    uc, other = (Queue(queue.qp.pd, qp_type=QpType.UC) for queue in (ends.a, ends.b))
    connect(uc, other)
    uc.post(DUMP, locked.at())
    assert uc.done.next().opcode == REQ


def test_bad_dumps(ends):
    """One data segment in memory of the queue's own, and nothing else."""
    here, foreign = ends.here, Buffer(ends.a.qp.ctx.create_pd(), 64)
    cases = [
        ([], LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([here.at(0, 1), here.at(0, 1)], LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([inline(b"x")], LOCAL_QP_OP, Reason.WQE_MALFORMED),
        ([data(here.address, here.key, 0)], LOCAL_LENGTH, Reason.LENGTH),
        ([data(here.address, 0xBAD00, 1)], LOCAL_PROT, Reason.LKEY_UNKNOWN),
        ([foreign.at()], LOCAL_PROT, Reason.LKEY_PD),
        ([here.at(SIZE - 1, 2)], LOCAL_PROT, Reason.LKEY_BOUNDS),
    ]
    for segments, syndrome, reason in cases:
        ends.a.put(READ, ends.there.remote(), ends.here.at())  # the error waits for its turn
        ends.a.put(DUMP, *segments)
        ends.a.put(NOP)
        ends.a.ring()
        read, dump, flushed = ends.a.done.take(3)
        assert (read.opcode, error_of(dump), dump.wqe_opcode) == (REQ, (syndrome, reason), DUMP)
        assert error_of(flushed)[1] == Reason.FLUSH
        ends.again()


@pytest.mark.parametrize("opcode", [0x02, 0x7F, 0xFF])
def test_unknown_opcode(ends, opcode):
    ends.a.post(opcode)
    cqe = ends.a.done.next()
    assert (*error_of(cqe), cqe.wqe_opcode) == (LOCAL_QP_OP, Reason.WQE_OPCODE, opcode)
    assert ends.a.qp.state == QpState.ERR
    assert ends.b.qp.state == QpState.RTS


def test_ignored_fields(ends):
    """Signature, stream, fence mode, immediate and reserved words may hold anything."""
    ends.b.receive(ends.there.at())
    remote = raddr(ends.there.address, ends.there.key, 0xDEADBEEF)
    ends.a.put(WRITE, remote, ends.here.at(), junk=0xFFFF, imm=0xFFFFFFFF)
    ends.a.put(SEND, ends.here.at(), junk=0x5A5A)
    ends.a.put(NOP, junk=0xFFFF, imm=7)
    ends.a.ring()
    assert [cqe.opcode for cqe in ends.a.done.take(3)] == [REQ] * 3


def test_user_index_and_timestamp(ends):
    pd = ends.a.qp.pd
    queue, peer = Queue(pd, user_index=0xABCDE), Queue(ends.b.qp.pd, user_index=0x54321)
    connect(queue, peer)
    peer.receive(ends.there.at())
    queue.post(SEND, ends.here.at())
    assert queue.done.next().user_index == 0xABCDE
    assert peer.arrived.next().user_index == 0x54321
    stamps = [int(view(cq.ring_address, 64, ">u8")[6]) for cq in (queue.send_cq, peer.recv_cq)]
    assert all(abs(stamp - time.clock_gettime_ns(time.CLOCK_MONOTONIC)) < 60e9 for stamp in stamps)
    queue.post(0x7F)
    assert queue.done.next().user_index == 0xABCDE


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [WRITE, READ, SEND, SEND_IMM, WRITE_IMM])
def test_empty_message(ends, opcode):
    """A message of no bytes needs no memory: its key is not checked."""
    before = ends.here.bytes.copy()
    ends.b.receive(ends.there.at())
    ends.a.post(opcode, *((raddr(0x1234, 0xBAD),) if opcode not in (SEND, SEND_IMM) else ()), imm=3)
    cqe = ends.a.done.next()
    assert (cqe.opcode, cqe.byte_cnt) == (REQ, 0)
    if opcode not in (WRITE, READ):
        assert ends.b.arrived.next().byte_cnt == 0
    assert np.array_equal(ends.here.bytes, before)
    assert not ends.there.bytes.any()


def test_empty_message_needs_the_right_of_the_qp(ends):
    ends.again(remote_access=Access.REMOTE_READ)
    ends.a.post(WRITE, raddr(0, 0))
    ends.refused(ends.a.done.next(), REMOTE_INVALID, Reason.QP_RIGHTS)


@pytest.mark.parametrize("nbytes", [65535, 65536, 65537, 3 * MIB + 5])
@pytest.mark.parametrize("opcode", [WRITE, READ, SEND])
def test_large_messages(ends, opcode, nbytes):
    here, there = Buffer(ends.a.qp.pd, nbytes, fill=3), Buffer(ends.b.qp.pd, nbytes)
    if opcode == READ:
        there.bytes[:] = here.bytes[::-1]
    ends.b.receive(there.at())
    ends.a.post(opcode, *(() if opcode == SEND else (there.remote(),)), here.at())
    assert ends.a.done.next().opcode == REQ
    assert np.array_equal(here.bytes, there.bytes)
    assert not there.whole[: there.start].any()
    assert not there.whole[there.start + nbytes :].any()


def test_more_than_a_gibibyte(one):
    """1 GiB is the most; what is longer is refused before any memory is looked at, 0 meaning 2 GiB."""
    memory = HostMemory(GIB + 4096)  # untouched pages cost nothing
    with one.a.qp.pd.register(memory) as mr:
        for segments in ([GIB + 1], [GIB, 1], [1, GIB], [0], [5, 0]):
            one.a.post(WRITE, one.there.remote(), *(data(mr.address, mr.lkey, nbytes) for nbytes in segments))
            assert error_of(one.a.done.next()) == (LOCAL_LENGTH, Reason.LENGTH), segments
            one.again()
        one.a.post(WRITE, one.there.remote(), data(mr.address, mr.lkey, GIB))
        assert error_of(one.a.done.next()) == (REMOTE_ACCESS, Reason.RKEY_BOUNDS)
    memory.close()


# --- rings -----------------------------------------------------------------------------------------------------------


def test_wqes_of_many_blocks_wrap_around_the_ring(ends):
    """Gather lists and inline data that start in the last slots of the ring go on in the first."""
    ring = ends.a.qp.sq_entries
    for lap in range(3):
        while ends.a.index % ring != ring - 3:
            ends.a.post(NOP, ce=ON_ERROR)
        until(ends.a.idle, "room in the ring")
        pieces = [ends.here.at(64 * i + lap, 64) for i in range(20)]
        index = ends.a.put(WRITE, ends.there.remote(64), *pieces)  # 22 segments: 6 blocks
        payload = bytes(range(lap, lap + 230))
        ends.a.put(WRITE, ends.there.remote(4096), inline(payload))  # 5 blocks
        ends.a.ring()
        assert [cqe.counter for cqe in ends.a.done.take(2)] == [index, index + 6]
        assert np.array_equal(ends.there.bytes[64 : 64 + 1280], ends.here.bytes[lap : lap + 1280])
        assert ends.there.bytes[4096 : 4096 + 230].tobytes() == payload


def test_inline_data_across_the_end_of_the_ring(ends):
    """The same with the wrap in the middle of the payload."""
    ring = ends.a.qp.sq_entries
    for start in range(ring - 4, ring):
        while ends.a.index % ring != start:
            ends.a.post(NOP, ce=ON_ERROR)
        until(ends.a.idle, "room in the ring")
        payload = bytes(range(start % 7, start % 7 + 200))
        ends.a.post(WRITE, ends.there.remote(), inline(payload))
        assert ends.a.done.next().opcode == REQ
        assert ends.there.bytes[:200].tobytes() == payload


def test_16_bit_indices_wrap(one):
    """More than 65536 WQEs, and CQEs over many laps of a small queue."""
    cq = one.a.qp.ctx.create_cq(64)
    queue = Queue(one.a.qp.pd, sq=4096, send_cq=cq)
    queue.qp.connect(queue.qp)
    slots = queue.sq.reshape(-1, 64)
    depth = queue.qp.sq_entries
    template = np.frombuffer(control(NOP, 0, queue.qp.qpn, 1, ce=ON_ERROR).ljust(64, b"\0"), np.uint8)
    slots[:] = template
    for lap in range(65536 // depth + 2):
        indices = np.arange(lap * depth, (lap + 1) * depth) & 0xFFFF
        slots[:, 1:3] = indices.astype(">u2").view(np.uint8).reshape(-1, 2)
        slots[:, 11] = 0
        slots[::128, 11] = ALWAYS << 2
        slots[-1, 11] = ALWAYS << 2
        queue.index += depth
        queue.ring(RINGS[lap % 3])
        counters = [cqe.counter for cqe in queue.done.take(depth // 128 + 1)]
        assert counters == [(lap * depth + i) & 0xFFFF for i in (*range(0, depth, 128), depth - 1)]
    assert queue.index > 65536 + depth
    assert queue.done.ci > 8 * cq.entries


def test_receive_ring_laps(ends):
    """Many laps of the receive ring, posted one ahead."""
    for i in range(3 * ends.b.qp.rq_entries + 1):
        ends.b.receive(ends.there.at(i * 8, 8))
        ends.a.post(SEND, ends.here.at(i * 8, 8))
        assert ends.b.arrived.next().counter == i
    assert np.array_equal(ends.there.bytes[: i * 8], ends.here.bytes[: i * 8])
