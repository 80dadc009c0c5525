"""The responder: what it executes, acknowledges and answers, also when packets get lost, come twice or too early."""

import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.enums import QpAtomicType, QpState
from nic_rig import (
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
)
from transport_rig import (
    ACK,
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    COMPARE_SWAP,
    FETCH_ADD,
    MASKED_ADD,
    MASKED_SWAP,
    NAK_SEQUENCE,
    PSNS,
    READ_REQUEST,
    RESPONSE_ONLY,
    RNR_NAK,
    SIZE,
    Packet,
    Peer,
    response_packets,
    send_packets,
    write_packets,
)
from transport_steps import MTUS, arrived, lengths, received, same, target


@pytest.mark.parametrize("mtu", MTUS)
@pytest.mark.parametrize("imm", [None, 0xFEEDF00D])
def test_writes(peer, imm, mtu):
    p = peer(mtu=mtu, own=PSNS - 7)
    psn, random = PSNS - 7, np.random.default_rng(mtu)
    for msn, nbytes in enumerate(lengths(mtu), 1):
        p.lab.there.bytes[:] = 0
        payload = random.bytes(nbytes)
        p.queue.receive()
        packets = write_packets(payload, mtu, psn, *target(p, 7), imm)
        p.send(packets)
        psn = (psn + len(packets)) % PSNS
        p.expect_ack(psn - 1, ACK, msn)
        arrived(p, {7: payload})
        if imm is not None:
            received(p, RESP_WRITE_IMM, nbytes, imm)
    assert p.queue.arrived.poll() is None
    assert p.counted("rdma_rx_bytes", "rx_write_requests") == (sum(lengths(mtu)), len(lengths(mtu)))


@pytest.mark.parametrize("mtu", MTUS)
@pytest.mark.parametrize("imm", [None, 0xFEEDF00D])
def test_sends(peer, imm, mtu):
    """Into receives of several segments, whose ends are not those of packets."""
    p = peer(mtu=mtu, own=PSNS - 7)
    psn, random = PSNS - 7, np.random.default_rng(mtu)
    there = p.lab.there
    for msn, nbytes in enumerate(lengths(mtu), 1):
        there.bytes[:] = 0
        payload = random.bytes(nbytes)
        p.queue.receive(there.at(11, 3), there.at(1000, mtu - 1), there.at(20000, 2), there.at(30000, 3 * mtu))
        packets = send_packets(payload, mtu, psn, imm)
        p.send(packets)
        psn = (psn + len(packets)) % PSNS
        p.expect_ack(psn - 1, ACK, msn)
        received(p, RESP_SEND if imm is None else RESP_SEND_IMM, nbytes, imm or 0)
        cuts = (0, 3, mtu + 2, mtu + 4, nbytes)
        arrived(p, {at: payload[a:b] for at, a, b in zip((11, 1000, 20000, 30000), cuts, cuts[1:])})


@pytest.mark.parametrize("mtu", MTUS)
def test_read_responses(peer, mtu):
    p = peer(mtu=mtu, own=PSNS - 7)
    psn = PSNS - 7
    address, key = p.lab.here.address, p.lab.here.key
    for msn, nbytes in enumerate(lengths(mtu), 1):
        p.send(Packet(READ_REQUEST, psn, ack=1, reth=(address + 9, key, nbytes)))
        expected = response_packets(p.lab.here.bytes[9 : 9 + nbytes].tobytes(), mtu, psn, msn)
        packets = p.take(len(expected))
        same(packets, expected)
        assert [packet.aeth[1] for packet in packets if packet.aeth] == [msn] * min(len(packets), 2)
        assert not any(packet.ack or packet.solicited for packet in packets)
        psn = (psn + len(expected)) % PSNS
    assert p.silent()
    assert p.counted("rdma_tx_bytes", "rx_read_requests") == (sum(lengths(mtu)), len(lengths(mtu)))


def test_atomics(peer):
    p = peer()
    there = p.lab.there
    there.set_word(8, (1 << 64) - 1)
    p.send(Packet(FETCH_ADD, p.own, ack=1, atomic=(*target(p, 8), 5, 99)))
    p.send(Packet(COMPARE_SWAP, p.own + 1, ack=1, atomic=(*target(p, 8), 1 << 63, 4)))
    p.send(Packet(COMPARE_SWAP, p.own + 2, ack=1, atomic=(*target(p, 8), 0, 5)))
    packets = p.take(3)
    assert [(packet.opcode, packet.psn) for packet in packets] == [(ATOMIC_ACKNOWLEDGE, p.own + i) for i in range(3)]
    assert [packet.original for packet in packets] == [(1 << 64) - 1, 4, 1 << 63]
    assert [packet.aeth for packet in packets] == [(ACK, msn) for msn in (1, 2, 3)]
    assert there.word(8) == 1 << 63
    assert p.counted("rx_atomic_requests") == 3


def test_masked_atomics(peer):
    """Their operands, for words of both sizes; the old word comes as a number."""
    p = peer(atomic_type=QpAtomicType.UP_TO_8BYTES)
    there = p.lab.there
    there.set_word(8, 0x8899_AABB_CCDD_EEFF)
    p.send(
        Packet(MASKED_ADD, p.own, ack=1, masked=(*target(p, 8), 4, 0x0101_0101, 0, 0x8080_8080, 0)),
        Packet(MASKED_SWAP, p.own + 1, ack=1, masked=(*target(p, 12), 4, 0x1234_5678, 0xBB, 0xFFFF, 0xFF)),
        Packet(MASKED_SWAP, p.own + 2, ack=1, masked=(*target(p, 8), 8, 1, 0, (1 << 64) - 1, (1 << 64) - 1)),
        Packet(MASKED_ADD, p.own + 3, ack=1, masked=(*target(p, 8), 8, 1, 0, 0, 0)),
    )
    packets = p.take(4)
    assert [(packet.opcode, packet.psn) for packet in packets] == [(ATOMIC_ACKNOWLEDGE, p.own + i) for i in range(4)]
    added = 0x8899_5678_CDDE_EF00
    assert [packet.original for packet in packets] == [0xCCDD_EEFF, 0x8899_AABB, added, added]
    assert there.word(8) == added + 1
    assert p.counted("rx_atomic_requests") == 4


def test_acknowledgements_are_merged(peer):
    """One for all that came together; none for what does not ask (9.7.3)."""
    p = peer()
    p.send(*(write_packets(bytes(8), p.mtu, p.own + i, *target(p)) for i in range(6)))
    p.expect_ack(p.own + 5, ACK, 6)
    p.send(replace(packet, ack=0) for packet in write_packets(bytes(8), p.mtu, p.own + 6, *target(p)))
    assert p.silent()
    long = write_packets(bytes(5 * p.mtu), p.mtu, p.own + 7, *target(p))
    p.send(replace(long[0], ack=1), *long[1:3])
    p.expect_ack(p.own + 7, ACK, 7)  # messages that have begun are not counted (9.7.7.1)
    p.send(long[3:])
    p.expect_ack(p.own + 11, ACK, 8)


def test_congestion_marks_and_limited_members(peer):
    """FECN, BECN, the migration state and the upper bit of the partition key change nothing (9.2, 10.9.3)."""
    p = peer()
    (write,) = write_packets(b"fine", p.mtu, p.own, *target(p))
    p.send(replace(write, congestion=3, migrated=0, pkey=0x7FFF, solicited=1))
    p.expect_ack(p.own)
    arrived(p, {0: b"fine"})


# --- losses and duplicates -------------------------------------------------------------------------------------------


def test_one_nak_for_a_gap(peer):
    p = peer()
    packets = [packet for i in range(6) for packet in write_packets(bytes([i]), p.mtu, p.own + i, *target(p, i))]
    p.send(packets[0], *packets[2:4])
    p.expect_ack(p.own + 1, NAK_SEQUENCE, 1)
    p.send(packets[4:])
    assert p.silent()
    p.send(packets[1])
    p.expect_ack(p.own + 1)
    p.send(packets[3])
    p.expect_ack(p.own + 2, NAK_SEQUENCE)
    p.send(packets[2:])
    p.expect_ack(p.own + 5)
    arrived(p, {0: bytes(range(6))})


def test_gap_of_half_the_range(peer):
    """What is up to 2^23 - 1 ahead is new, what is behind is old (9.7.2)."""
    p = peer()
    (write,) = write_packets(b"x", p.mtu, p.own, *target(p))
    p.send(write)
    p.expect_ack(p.own)
    for distance in (PSNS // 2, PSNS - 1, PSNS - 2):
        p.send(replace(write, psn=p.own + 1 + distance))
        p.expect_ack(p.own)
    p.send(replace(write, psn=p.own + PSNS // 2))
    p.expect_ack(p.own + 1, NAK_SEQUENCE)


def test_duplicates_are_acknowledged_and_not_executed(peer):
    """Acknowledged where the peer asks, as new ones are: rxe stalls on answers amid what it repeats."""
    p = peer(mtu=256)
    p.queue.receive(p.lab.there.at(0, 1000))
    packets = send_packets(bytes([1]) * 600, 256, p.own)
    packets += write_packets(bytes([2]) * 600, 256, p.own + 3, *target(p, 2000))
    p.send(packets)
    p.expect_ack(p.own + 5, ACK, 2)
    received(p, RESP_SEND, 600)
    p.lab.there.bytes[:] = 0
    for packet in packets:
        p.send(packet)
        if packet.ack:
            p.expect_ack(p.own + 5, ACK, 2)
        else:
            assert p.drain() == []
    p.send(packets)
    p.expect_ack(p.own + 5, ACK, 2)
    assert not p.lab.there.bytes.any()
    assert p.queue.arrived.poll() is None
    assert p.counted("duplicate_request") == 12


def test_duplicates_before_a_read_do_not_acknowledge_it(peer):
    """That is its response's part, which may have got lost."""
    p = peer()
    writes = [packet for i in range(2) for packet in write_packets(bytes(8), p.mtu, p.own + i, *target(p))]
    read = Packet(READ_REQUEST, p.own + 2, p.qpn, ack=1, reth=(*target(p), 8))
    p.send(writes)
    p.expect_ack(p.own + 1)
    p.send(read)
    assert [packet.opcode for packet in p.take(1)] == [RESPONSE_ONLY]
    p.send(writes)
    p.expect_ack(p.own + 1)
    p.send(writes[1], writes[0])
    p.expect_ack(p.own + 1)
    p.send(read, writes[0])
    assert sorted(packet.opcode for packet in p.take(2)) == [RESPONSE_ONLY, ACKNOWLEDGE]
    (write,) = write_packets(bytes(8), p.mtu, p.own + 3, *target(p))
    p.send(write, writes[0])
    p.expect_ack(p.own + 3)


def test_nak_is_not_lost_behind_a_duplicate(peer):
    """A duplicate that comes together with a gap must not hide it: nobody would hear of it again."""
    p = peer()
    packets = [packet for i in range(3) for packet in write_packets(bytes(8), p.mtu, p.own + i, *target(p))]
    p.send(packets[0])
    p.expect_ack(p.own)
    p.send(packets[2], packets[0])
    p.expect_ack(p.own + 1, NAK_SEQUENCE)
    (send,) = send_packets(bytes(8), p.mtu, p.own + 1)
    p.send(send, packets[0])
    p.expect_ack(p.own + 1, RNR_NAK | 12)


@pytest.mark.parametrize("begun", [0, 1, 3, 6])
def test_duplicate_read(peer, begun):
    """It is answered again, from where it asks on (9.7.5.1.3)."""
    p = peer(mtu=256)
    va, key = p.lab.here.address, p.lab.here.key
    p.send(Packet(READ_REQUEST, p.own, ack=1, reth=(va, key, 1700)))
    assert len(p.drain()) == 7
    p.lab.here.bytes[:] += 1
    payload = p.lab.here.bytes[256 * begun : 1700].tobytes()
    again = Packet(READ_REQUEST, p.own + begun, ack=1, reth=(va + 256 * begun, key, 1700 - 256 * begun))
    for _ in range(2):
        p.send(again)
        same(p.drain(), response_packets(payload, 256, p.own + begun))
    p.send(write_packets(bytes(8), 256, p.own + 7, *target(p)))
    p.expect_ack(p.own + 7)
    if begun < 6:
        part = min(len(payload), 512)
        p.send(replace(again, reth=(va + 256 * begun, key, part)))
        same(p.drain(), response_packets(payload[:part], 256, p.own + begun))
    assert p.counted("rx_read_requests") == 1


def test_duplicate_read_that_asks_for_something_else(peer):
    p = peer(mtu=256)
    va, key = p.lab.here.address, p.lab.here.key
    p.send(Packet(READ_REQUEST, p.own, ack=1, reth=(va, key, 600)))
    p.drain()
    for psn, reth in ((0, (va + 4, key, 596)), (0, (va, key ^ 1, 600)), (0, (va, key, 601)), (1, (va, key, 600)),
                      (1, (va + 256, key, 345)), (2, (va + 512, key, 1 << 31))):
        p.send(Packet(READ_REQUEST, p.own + psn, ack=1, reth=reth))
        assert p.silent(), (psn, reth)
    p.send(replace(Packet(READ_REQUEST, p.own, ack=1, reth=(va, key, 600)), payload=bytes(4)))
    assert p.silent()
    assert p.queue.qp.state == QpState.RTS


@pytest.mark.parametrize("masked", [False, True])
def test_duplicate_atomic(peer, masked):
    """The result is remembered, and the word left alone (9.7.5.1.5)."""
    p = peer(atomic_type=QpAtomicType.UP_TO_8BYTES)
    p.lab.there.set_word(0, 10)
    if masked:
        first = Packet(MASKED_ADD, p.own, ack=1, masked=(*target(p), 4, 1, 0, 0, 0))
        second = Packet(MASKED_SWAP, p.own + 1, ack=1, masked=(*target(p), 8, 77, 11, 0xFF, 0xFF))
    else:
        first = Packet(FETCH_ADD, p.own, ack=1, atomic=(*target(p), 1, 0))
        second = Packet(COMPARE_SWAP, p.own + 1, ack=1, atomic=(*target(p), 77, 11))
    p.send(first, second)
    answers = p.drain()
    p.lab.there.set_word(0, 500)
    for packet, answer in ((first, answers[0]), (second, answers[1]), (first, answers[0])):
        p.send(packet)
        (again,) = p.drain()
        assert (again.opcode, again.psn, again.original) == (answer.opcode, answer.psn, answer.original)
    assert [answer.original for answer in answers] == [10, 11]
    assert p.lab.there.word(0) == 500
    assert p.counted("rx_atomic_requests", "duplicate_request") == (2, 3)


def test_old_reads_and_atomics_are_forgotten(peer):
    """As many as max_rd_atomic are remembered; a duplicate of an older one is ignored."""
    p = peer(max_rd_atomic=2)
    reads = [Packet(READ_REQUEST, p.own + i, ack=1, reth=(p.lab.here.address, p.lab.here.key, 8)) for i in range(2)]
    atomics = [Packet(FETCH_ADD, p.own + 2 + i, ack=1, atomic=(*target(p), 1, 0)) for i in range(2)]
    for packet in (*reads, *atomics):
        p.send(packet)
        assert len(p.drain()) == 1
    for packet in reads:
        p.send(packet)
        assert p.silent()
    for packet in atomics:
        p.send(packet)
        assert len(p.drain()) == 1
    p.send(replace(reads[0], psn=p.own + 2), replace(atomics[0], psn=p.own + 1))  # others than there were
    assert p.silent()
    assert p.lab.there.word(0) == 2


# --- no receive ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 12, 31])
@pytest.mark.parametrize("nbytes", [0, 100, 600])
def test_send_without_a_receive(peer, nbytes, code):
    """RNR NAK with the QP's timer code at the first packet; the rest of the message is silently dropped."""
    p = peer(mtu=256, min_rnr_timer=code)
    payload = bytes(range(1, 201)) * 3
    packets = [*send_packets(payload[:nbytes], 256, p.own), *write_packets(b"more", 256, p.own + 3, *target(p, 5000))]
    for _ in range(3):
        p.send(packets)
        p.expect_ack(p.own, RNR_NAK | code, 0)
    assert not p.lab.there.bytes.any()
    assert p.counted("out_of_buffer") == 3
    p.queue.receive(p.lab.there.at(0, 600))
    p.send(packets if nbytes == 600 else packets[0])
    p.expect_ack(p.own + (3 if nbytes == 600 else 0))
    received(p, RESP_SEND, nbytes)
    arrived(p, {0: payload[:nbytes], 5000: b"more" if nbytes == 600 else b""})


@pytest.mark.parametrize("nbytes", [0, 100, 600])
def test_immediate_data_without_a_receive(peer, nbytes):
    """A WRITE takes its receive with the last packet; what came before that stays."""
    p = peer(mtu=256)
    payload = bytes(range(1, 201)) * 3
    packets = write_packets(payload[:nbytes], 256, p.own, *target(p, 9), imm=5)
    p.send(packets)
    last = len(packets) - 1
    p.expect_ack(p.own + last, RNR_NAK | 12, 0)
    arrived(p, {9: payload[: 256 * last]})
    assert p.queue.qp.state == QpState.RTS
    p.queue.receive()
    p.send(packets[last])
    p.expect_ack(p.own + last, ACK, 1)
    received(p, RESP_WRITE_IMM, nbytes, 5)
    arrived(p, {9: payload[:nbytes]})


# --- at random -------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_random_messages(lab, choose):
    """Random messages, with packets lost and doubled, from a peer that goes back as it should: all arrives once."""
    mtu = choose.draw(st.sampled_from(MTUS))
    own = choose.draw(st.sampled_from((0, PSNS - 5, 777)))
    random = choose.draw(st.randoms(use_true_random=False))
    with closing(Peer(lab, mtu=mtu, own=own, rq=16)) as p:
        lab.there.bytes[:] = 0
        memory = bytearray(SIZE)
        messages = choose.draw(
            st.lists(
                st.tuples(
                    st.sampled_from(("write", "write_imm", "send", "send_imm")), st.integers(0, 3 * mtu + 3),
                    st.integers(0, 1000), st.integers(0, (1 << 32) - 1),
                ),
                min_size=1, max_size=8,
            )
        )
        packets: list[Packet] = []
        expected = []
        for kind, nbytes, offset, imm in messages:
            payload = random.randbytes(nbytes)
            psn, with_imm = own + len(packets), imm if kind.endswith("imm") else None
            if kind.startswith("write"):
                packets += write_packets(payload, mtu, psn, *target(p, offset), with_imm)
                memory[offset : offset + nbytes] = payload
                if with_imm is not None:
                    p.queue.receive()
                    expected.append((RESP_WRITE_IMM, nbytes, imm))
            else:
                packets += send_packets(payload, mtu, psn, with_imm)
                p.queue.receive(lab.there.at(20000 + offset, 20000))
                memory[20000 + offset : 20000 + offset + nbytes] = payload
                expected.append((RESP_SEND, nbytes, 0) if with_imm is None else (RESP_SEND_IMM, nbytes, imm))
        done, deadline = 0, time.monotonic() + 60
        while done < len(packets):
            assert time.monotonic() < deadline, f"stuck at packet {done} of {len(packets)}"
            batch = packets[done : done + random.randint(1, 6)]
            p.send(packet for packet in batch for _ in range(random.choice((0, 1, 1, 1, 2))))
            p.send(replace(packets[done], ack=1))  # what is expected, so that there is an answer
            for answer in p.drain():
                assert answer.aeth is not None
                at = (answer.psn - own) % PSNS
                assert answer.aeth[0] in (ACK, NAK_SEQUENCE)
                done = max(done, at + (answer.aeth[0] == ACK))
        for opcode, nbytes, imm in expected:
            received(p, opcode, nbytes, imm)
        assert p.queue.arrived.poll() is None
        assert lab.there.bytes.tobytes() == bytes(memory)
        assert p.queue.qp.state == QpState.RTS
