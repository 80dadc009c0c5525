"""READs, atomics and fences at the requester: their responses, and what waits for them."""

from dataclasses import replace

import numpy as np
import pytest

from gpunetio.nic.state.reasons import Reason
from nic_rig import FA, LOCAL_PROT, NOP, READ, RETRY_EXCEEDED, SEND, WRITE, Buffer, atomic, raddr
from transport_rig import (
    ACK,
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    PSNS,
    READ_REQUEST,
    RESPONSE_FIRST,
    RESPONSE_LAST,
    RESPONSE_MIDDLE,
    RESPONSE_ONLY,
    SEND_ONLY,
    SIZE,
    WRITE_ONLY,
    Packet,
    response_packets,
)
from transport_steps import MTUS, RKEY, TIMEOUT, VA, completed, failed, lengths, post, request

BAD_RESPONSE = 0x10  # PRM, syndromes of CQEs
FENCE = 0x20  # a flag of a control segment


@pytest.mark.parametrize("mtu", MTUS)
def test_reads(peer, mtu):
    p = peer(mtu=mtu, psn=PSNS - 5)
    psn, random = PSNS - 5, np.random.default_rng(mtu)
    for nbytes in lengths(mtu):
        index = request(p, READ, nbytes, offset=5)
        packet = p.receive()
        assert (packet.opcode, packet.psn, packet.ack, packet.payload) == (READ_REQUEST, psn, 1, b"")
        assert packet.reth == (VA + 5, RKEY, nbytes)
        payload = random.bytes(nbytes)
        before = p.lab.here.whole.copy()
        response = response_packets(payload, mtu, psn)
        p.send(response[:-1])
        p.lab.settle()
        assert p.queue.done.poll() is None
        p.send(response[-1])
        completed(p, index)
        start = p.lab.here.start + 5
        before[start : start + nbytes] = np.frombuffer(payload, np.uint8)
        assert np.array_equal(p.lab.here.whole, before)
        psn = (psn + len(response)) % PSNS
    assert p.counted("rdma_rx_bytes") == sum(lengths(mtu))


def test_long_read_is_asked_for_in_parts(peer):
    """What the window has no room for is asked for later; the parts join."""
    p = peer(mtu=256, ack_timeout=14)
    payload = np.random.default_rng(1).bytes(SIZE - 3)
    count = -(-len(payload) // 256)
    request(p, READ, len(payload))
    begun = done = 0
    queue: list[Packet] = []
    while done < count:
        for packet in p.drain():
            assert packet.reth is not None
            va, rkey, nbytes = packet.reth
            assert (packet.opcode, packet.psn, va, rkey) == (READ_REQUEST, p.psn + begun, VA + 256 * begun, RKEY)
            queue += response_packets(payload[256 * begun :][:nbytes], 256, packet.psn)
            begun += -(-nbytes // 256)
        assert 0 < begun - done <= p.lab.window
        p.send(queue[:10])
        done += len(queue[:10])
        del queue[:10]
    completed(p, 0)
    assert p.lab.here.bytes[: len(payload)].tobytes() == payload


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_reads_and_atomics_in_flight(peer, limit):
    """No more than max_rd_atomic; what is behind them waits, too (10.8.3.2)."""
    p = peer(max_rd_atomic=limit)
    for i in range(limit + 2):
        if i % 2:
            post(p, FA, raddr(VA, RKEY), atomic(1), p.lab.here.at(8 * i, 8))
        else:
            request(p, READ, 8, offset=8 * i)
    request(p, WRITE, 8)
    sent = p.drain()
    assert [packet.psn for packet in sent] == [p.psn + i for i in range(limit)]
    for i in range(limit + 2):
        if i % 2:
            p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn + i, aeth=(ACK, 0), original=i))
        else:
            p.send(response_packets(i.to_bytes(8, "little"), p.mtu, p.psn + i))
        sent += p.drain()
        assert len(sent) == min(limit + i + 1, limit + 2) + (i >= 1 and i + 1 + limit >= limit + 2)
    assert sent[-1].opcode == WRITE_ONLY
    assert [p.lab.here.word(8 * i) for i in range(limit + 2)] == list(range(limit + 2))


@pytest.mark.parametrize("lost", [0, 1, 3, 6])
def test_lost_response_of_a_read(peer, lost):
    """What is missing is asked for again, once, from there on."""
    p = peer(mtu=256)
    request(p, READ, 1700)  # 7 packets
    request(p, WRITE, 8)
    p.take(2)
    payload = np.random.default_rng(lost).bytes(1700)
    response = response_packets(payload, 256, p.psn)
    p.send(*response[:lost], *response[lost + 1 :], Packet(ACKNOWLEDGE, p.psn + 7, aeth=(ACK, 2)))
    again, write = p.drain()
    assert (again.opcode, again.psn) == (READ_REQUEST, p.psn + lost)
    assert again.reth == (VA + 256 * lost, RKEY, 1700 - 256 * lost)
    assert (write.opcode, write.psn) == (WRITE_ONLY, p.psn + 7)
    assert p.queue.done.poll() is None
    p.send(response_packets(payload[256 * lost :], 256, p.psn + lost))
    completed(p, 0)
    p.ack(p.psn + 7)
    completed(p, 1)
    assert p.lab.here.bytes[:1700].tobytes() == payload


def test_missing_response_uses_up_the_retries(peer):
    """An implied NAK is a retry (9.9.2.4.1.1), and what comes late for the same gap is not another."""
    p = peer(mtu=256, retry_cnt=1)
    request(p, READ, 1000)
    p.take(1)
    response = response_packets(bytes(1000), 256, p.psn)
    for packet in response[1:]:
        p.send(packet)
        p.lab.settle()
    assert [packet.psn for packet in p.drain()] == [p.psn]
    assert p.counted("implied_nak_seq_err") >= 1
    p.lab.pass_time(2 * TIMEOUT)
    failed(p, RETRY_EXCEEDED, Reason.NO_RESPONSE)


def test_acknowledgement_of_an_unanswered_read(peer):
    """An ACK behind it says that the response got lost (9.7.5.1.2)."""
    p = peer()
    request(p, WRITE, 8)
    request(p, READ, 8)
    request(p, WRITE, 8)
    packets = p.take(3)
    p.ack(p.psn + 2)
    completed(p, 0)
    assert p.drain() == packets[1:]
    p.send(response_packets(bytes(8), p.mtu, p.psn + 1))
    completed(p, 1)
    p.ack(p.psn + 2)
    completed(p, 2)
    assert p.counted("implied_nak_seq_err") == 1


def test_response_acknowledges_what_was_before(peer):
    p = peer()
    request(p, WRITE, 3000)
    request(p, SEND, 8)
    request(p, READ, 8)
    p.take(5)
    p.send(response_packets(bytes(8), p.mtu, p.psn + 4))
    completed(p, 0, 1, 2)


def test_responses_out_of_order(peer):
    """The later one is asked for again; the earlier one, which comes before that is sent, counts."""
    p = peer()
    for i in range(2):
        request(p, READ, 8, offset=8 * i)
    first, second = p.take(2)
    p.send(response_packets(b"response", p.mtu, second.psn), response_packets(b"earlier.", p.mtu, first.psn))
    completed(p, 0)
    assert p.drain() == [second]
    p.send(response_packets(b"response", p.mtu, second.psn))
    completed(p, 1)
    assert p.lab.here.bytes[:16].tobytes() == b"earlier.response"


def test_doubled_responses(peer):
    p = peer(mtu=256)
    request(p, READ, 1000)
    post(p, FA, raddr(VA, RKEY), atomic(1), p.lab.here.at(2000, 8))
    p.take(2)
    for packet in (*response_packets(bytes(range(250)) * 4, 256, p.psn),
                   Packet(ATOMIC_ACKNOWLEDGE, p.psn + 4, aeth=(ACK, 0), original=7)):
        p.send(packet, replace(packet, payload=bytes(len(packet.payload))))
    completed(p, 0, 1)
    assert p.lab.here.bytes[:1000].tobytes() == bytes(range(250)) * 4
    assert p.silent()


def test_lost_response_of_an_atomic(peer):
    p = peer()
    post(p, FA, raddr(VA, RKEY), atomic(1), p.lab.here.at(0, 8))
    (packet,) = p.drain()
    p.lab.pass_time(TIMEOUT)
    assert p.drain() == [packet]
    p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn, aeth=(ACK, 1), original=41))
    completed(p, 0)
    assert p.lab.here.word(0) == 41


def test_read_into_memory_that_is_gone(peer):
    """The local key is looked at again when the response comes."""
    p = peer()
    buffer = Buffer(p.lab.pd, 64)
    post(p, READ, raddr(VA, RKEY), buffer.at())
    p.take(1)
    buffer.mr.close()
    p.send(response_packets(bytes(range(64)), p.mtu, p.psn))
    failed(p, LOCAL_PROT, Reason.LKEY_UNKNOWN)
    assert not buffer.bytes.any()


WHOLE = response_packets(bytes(600), 256, 0)
ANSWERS = {  # to a READ of 600 bytes with an MTU of 256: 256, 256 and 88
    "short only": [Packet(RESPONSE_ONLY, 0, aeth=(ACK, 1), payload=bytes(256))],
    "short first": [Packet(RESPONSE_FIRST, 0, aeth=(ACK, 1), payload=bytes(252))],
    "long first": [Packet(RESPONSE_FIRST, 0, aeth=(ACK, 1), payload=bytes(260))],
    "empty first": [Packet(RESPONSE_FIRST, 0, aeth=(ACK, 1))],
    "short last": [*WHOLE[:2], Packet(RESPONSE_LAST, 2, aeth=(ACK, 1), payload=bytes(87))],
    "long last": [*WHOLE[:2], Packet(RESPONSE_LAST, 2, aeth=(ACK, 1), payload=bytes(89))],
    "last too soon": [WHOLE[0], Packet(RESPONSE_LAST, 1, aeth=(ACK, 1), payload=bytes(256))],
    "no last": [*WHOLE[:2], Packet(RESPONSE_MIDDLE, 2, payload=bytes(88))],
    "atomic's": [Packet(ATOMIC_ACKNOWLEDGE, 0, aeth=(ACK, 1), original=1)],
}


@pytest.mark.parametrize("name", ANSWERS)
def test_wrong_response_of_a_read(peer, name):
    p = peer(mtu=256)
    request(p, READ, 600)
    request(p, WRITE, 8)
    p.take(2)
    p.send(replace(packet, psn=p.psn + packet.psn) for packet in ANSWERS[name])
    failed(p, BAD_RESPONSE, Reason.BAD_RESPONSE, flushed=1)


@pytest.mark.parametrize(
    "packet",
    [
        Packet(RESPONSE_ONLY, 0, aeth=(ACK, 1), payload=bytes(8)),
        Packet(ATOMIC_ACKNOWLEDGE, 0, aeth=(ACK, 1), original=0, payload=bytes(4)),
        Packet(ATOMIC_ACKNOWLEDGE, 0, aeth=(ACK, 1)),
    ],
    ids=["read's", "long", "short"],
)
def test_wrong_response_of_an_atomic(peer, packet):
    p = peer()
    post(p, FA, raddr(VA, RKEY), atomic(1), p.lab.here.at(0, 8))
    p.take(1)
    p.send(replace(packet, psn=p.psn))
    failed(p, BAD_RESPONSE, Reason.BAD_RESPONSE)


@pytest.mark.parametrize("operation", [RESPONSE_ONLY, RESPONSE_MIDDLE, ATOMIC_ACKNOWLEDGE])
def test_response_to_what_asked_for_none(peer, operation):
    """A WRITE is acknowledged, not answered."""
    p = peer()
    request(p, WRITE, 8)
    p.take(1)
    aeth = None if operation == RESPONSE_MIDDLE else (ACK, 1)
    p.send(Packet(operation, p.psn, aeth=aeth, original=0 if operation == ATOMIC_ACKNOWLEDGE else None))
    failed(p, BAD_RESPONSE, Reason.BAD_RESPONSE)


# --- fences ----------------------------------------------------------------------------------------------------------


def test_fence(peer):
    """A fenced WQE waits for the READs and atomics before it (10.8.3.3), for nothing else; others do not wait."""
    p = peer()
    request(p, WRITE, 8)
    request(p, READ, 3000)
    request(p, WRITE, 8)
    request(p, WRITE, 8, flags=FENCE)
    request(p, SEND, 8)
    assert [packet.opcode for packet in p.drain()] == [WRITE_ONLY, READ_REQUEST, WRITE_ONLY]
    response = response_packets(np.random.default_rng(0).bytes(3000), p.mtu, p.psn + 1)
    p.send(response[:2])
    assert p.silent()
    p.send(response[2])
    packets = p.drain()
    assert [packet.opcode for packet in packets] == [WRITE_ONLY, SEND_ONLY]
    assert packets[0].payload == response[0].payload[:8]
    request(p, WRITE, 8, flags=FENCE)  # nothing to wait for, though not all is acknowledged
    assert [packet.opcode for packet in p.drain()] == [WRITE_ONLY]


def test_fence_of_a_nop(peer):
    """A fence needs no request of its own: it holds up what is behind it all the same."""
    p = peer()
    request(p, READ, 8)
    post(p, NOP, flags=FENCE)
    request(p, WRITE, 8)
    assert [packet.opcode for packet in p.drain()] == [READ_REQUEST]
    p.send(response_packets(b"fenced--", p.mtu, p.psn))
    (write,) = p.drain()
    assert write.payload == b"fenced--"


def test_fence_while_a_read_is_asked_for_again(peer):
    p = peer()
    request(p, READ, 8)
    request(p, WRITE, 8, flags=FENCE)
    assert len(p.drain()) == 1
    p.lab.pass_time(TIMEOUT)
    assert [packet.opcode for packet in p.drain()] == [READ_REQUEST]
    p.send(response_packets(b"fenced--", p.mtu, p.psn))
    (write,) = p.drain()
    assert write.payload == b"fenced--"
