"""The RC and UC transport, packet by packet, against a peer made by hand (IBTA, volume 1, chapter 9)."""

import struct
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.enums import Access, QpState
from gpunetio.nic.observe.reasons import Reason
from nic_rig import (
    ALWAYS,
    CS,
    FA,
    FLUSHED,
    LOCAL_LENGTH,
    LOCAL_PROT,
    NOP,
    READ,
    REMOTE_ACCESS,
    REMOTE_INVALID,
    REMOTE_OP,
    REQ,
    RESP_SEND,
    RESP_SEND_IMM,
    RESP_WRITE_IMM,
    RETRY_EXCEEDED,
    RNR_EXCEEDED,
    SEND,
    SEND_IMM,
    WRITE,
    WRITE_IMM,
    Buffer,
    atomic,
    control,
    data,
    error_of,
    raddr,
    reports_of,
)  # fmt: skip
from transport_rig import (
    ACK,
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    COMPARE_SWAP,
    FETCH_ADD,
    NAK_ACCESS,
    NAK_INVALID,
    NAK_OPERATION,
    NAK_SEQUENCE,
    PSNS,
    READ_REQUEST,
    RESPONSE_FIRST,
    RESPONSE_LAST,
    RESPONSE_MIDDLE,
    RESPONSE_ONLY,
    RNR_NAK,
    SEND_ONLY,
    SIZE,
    UC,
    WRITE_ONLY,
    Packet,
    Peer,
    lab,
    peer,
    response_packets,
    segments,
    send_packets,
    write_packets,
)  # fmt: skip

__all__ = ["lab", "peer"]  # fixtures

MTUS = (256, 512, 1024, 2048, 4096)
VA, RKEY = 0x1122334455667788, 0x99AABBCC  # at the peer, which the NIC cannot check
BAD_RESPONSE = 0x10  # PRM, syndromes of CQEs
WAIT = 0x0F
SOLICITED, FENCE = 0x02, 0x20  # flags of a control segment
TIMEOUT = 4096 << 14  # nanoseconds; ack_timeout 14
SOON = (1_000_000, 8_000_000, 64_000_000)  # the timers behind a NAK


def lengths(mtu: int) -> list[int]:
    """Messages around the boundaries of packets."""
    return [0, 1, 2, 3, 4, 5, *(n * mtu + d for n in (1, 2, 3) for d in (-1, 0, 1))]


def post(peer: Peer, opcode: int, *parts: bytes, flags: int = 0, imm: int = 0, ring: bool = True) -> int:
    """Post a WQE with a completion and the given flags."""
    queue, body = peer.queue, b"".join(parts)
    head = bytearray(control(opcode, queue.index, peer.qpn, 1 + len(body) // 16, ALWAYS, imm))
    head[11] |= flags
    index = queue.write_wqe(bytes(head) + body)
    if ring:
        queue.ring()
    return index


def request(peer: Peer, opcode: int, nbytes: int, offset: int = 0, **fields: int) -> int:
    """Post a request for bytes of `here` and for VA + offset."""
    address = () if opcode in (SEND, SEND_IMM) else (raddr(VA + offset, RKEY),)
    local = (peer.lab.here.at(offset, nbytes),) if nbytes else ()
    return post(peer, opcode, *address, *local, **fields)


def completed(peer: Peer, *indices: int) -> None:
    """Exactly these WQEs have succeeded."""
    cqes = peer.queue.done.take(len(indices))
    assert [(cqe.opcode, cqe.counter) for cqe in cqes] == [(REQ, index) for index in indices]
    peer.lab.settle()
    assert peer.queue.done.poll() is None


def failed(peer: Peer, syndrome: int, reason: Reason, flushed: int = 0) -> None:
    """The next WQE has failed, the rest is flushed, the QP is in ERR and the log says why."""
    assert error_of(peer.queue.done.next()) == (syndrome, reason)
    assert [error_of(cqe) for cqe in peer.queue.done.take(flushed)] == [(FLUSHED, Reason.FLUSH)] * flushed
    assert peer.queue.qp.state == QpState.ERR
    *_, report = reports_of(peer.lab.nic, peer.qpn)  # one before the last is of an earlier QP with this number
    assert (report.reason, report.responder) == (reason, False)


def plain(packet: Packet) -> Packet:
    """A packet without what is checked apart: AckReq, padding, MSN, QPN."""
    aeth = (packet.aeth[0], 0) if packet.aeth else None
    return replace(packet, ack=0, pad=None, aeth=aeth, qpn=0)


def same(packets: list[Packet], expected: list[Packet]) -> None:
    """Packets are these, and padded to a multiple of four (9.2.4)."""
    assert [plain(packet) for packet in packets] == [plain(packet) for packet in expected]
    assert [packet.pad for packet in packets] == [-len(packet.payload) % 4 for packet in packets]


# --- requester: packets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtu", MTUS)
@pytest.mark.parametrize("opcode", [SEND, SEND_IMM, WRITE, WRITE_IMM])
def test_requests_in_packets(peer, opcode, mtu):
    """Operations, PSNs across the wrap, RETH in the first, immediate data and the solicited event in the last."""
    p = peer(mtu=mtu, psn=PSNS - 9)
    psn = PSNS - 9
    imm = 0xCAFE0000 if opcode in (SEND_IMM, WRITE_IMM) else None
    for nbytes in lengths(mtu):
        index = request(p, opcode, nbytes, offset=3, flags=SOLICITED, imm=imm or 0x5EED)
        payload = p.lab.here.bytes[3 : 3 + nbytes].tobytes()
        if opcode in (SEND, SEND_IMM):
            expected = send_packets(payload, mtu, psn, imm)
        else:
            expected = write_packets(payload, mtu, psn, VA + 3, RKEY, imm)
        packets = p.take(len(expected))
        same(packets, [*expected[:-1], replace(expected[-1], solicited=1)])
        assert packets[-1].ack == 1  # 9.7.3: or nobody would ever acknowledge it
        assert p.queue.done.poll() is None
        psn = (psn + len(expected)) % PSNS
        p.ack(psn - 1)
        completed(p, index)


def test_no_solicited_event_unless_asked_for(peer):
    p = peer()
    request(p, SEND, 3000)
    assert [packet.solicited for packet in p.take(3)] == [0, 0, 0]


def test_gathered_payload_is_cut_anywhere(peer):
    """Packets end where the MTU says, not where data segments do."""
    p = peer(mtu=256)
    here = p.lab.here
    post(p, SEND, here.at(0, 100), here.at(1000, 1), here.at(500, 300), here.at(9, 255))
    expected = b"".join(here.bytes[a : a + n].tobytes() for a, n in ((0, 100), (1000, 1), (500, 300), (9, 255)))
    same(p.take(3), send_packets(expected, 256, p.psn))


def test_long_message_stays_within_the_window(peer):
    """No more packets than the window are out, and each acknowledgement lets as many follow."""
    p = peer(mtu=256)
    window = p.lab.window
    request(p, WRITE, SIZE)
    packets = p.drain()
    assert len(packets) == window
    assert any(packet.ack for packet in packets[: window // 2])  # so that it can go on before the window is empty
    p.ack(p.psn + 9)
    packets += p.drain()
    assert len(packets) == window + 10
    while len(packets) < SIZE // 256:
        p.ack(packets[-1].psn)
        packets += p.drain()
    same(packets, write_packets(p.lab.here.bytes.tobytes(), 256, p.psn, VA, RKEY))
    p.ack(packets[-1].psn)
    completed(p, 0)


def test_atomic_requests(peer):
    p = peer()
    post(p, FA, raddr(VA, RKEY), atomic(-5), p.lab.here.at(0, 8))
    post(p, CS, raddr(VA + 8, RKEY), atomic(7, (1 << 63) + 9), p.lab.here.at(8, 4), p.lab.here.at(20, 4))
    first, second = p.take(2)
    assert (first.opcode, first.psn, first.ack) == (FETCH_ADD, p.psn, 1)
    assert first.atomic == (VA, RKEY, (1 << 64) - 5, 0)
    assert (second.opcode, second.psn, second.atomic) == (COMPARE_SWAP, p.psn + 1, (VA + 8, RKEY, 7, (1 << 63) + 9))
    p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn, aeth=(ACK, 1), original=0x1122334455667788))
    completed(p, 0)
    p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn + 1, aeth=(ACK, 2), original=(1 << 64) - 2))
    completed(p, 1)
    assert p.lab.here.word(0) == 0x1122334455667788
    assert p.lab.here.bytes[8:12].tobytes() + p.lab.here.bytes[20:24].tobytes() == ((1 << 64) - 2).to_bytes(8, "little")


# --- requester: acknowledgements -------------------------------------------------------------------------------------


def test_one_acknowledgement_for_many(peer):
    p = peer()
    indices = [request(p, WRITE, 2000) for _ in range(5)]  # two packets each
    p.take(10)
    p.ack(p.psn + 4)  # the middle of the third
    completed(p, *indices[:2])
    p.ack(p.psn + 9)
    completed(p, *indices[2:])


def test_nop_waits_its_turn(peer):
    """A NOP needs no packet, and completes behind what was posted before it (10.8.3.2)."""
    p = peer()
    for opcode in (NOP, WRITE, NOP, WRITE, NOP):
        post(p, NOP) if opcode == NOP else request(p, WRITE, 8)
    p.take(2)
    completed(p, 0)
    p.ack(p.psn)
    completed(p, 1, 2)
    p.ack(p.psn + 1)
    completed(p, 3, 4)


def test_acknowledgements_that_mean_nothing(peer):
    """Stale ones, ones for what was never sent, and reserved syndromes are ignored (9.7.5.1)."""
    p = peer(mtu=256)
    request(p, WRITE, 256)
    p.take(1)
    p.ack(p.psn)
    completed(p, 0)
    request(p, WRITE, 256 * (p.lab.window + 50))
    p.drain()
    last = p.psn + p.lab.window
    for psn in (p.psn, p.psn - 1, p.psn - 1000, last + 1, last + 49, last + 60, last + 5000, p.psn + PSNS // 2):
        for syndrome in (ACK, NAK_SEQUENCE, NAK_ACCESS, RNR_NAK | 1):
            p.ack(psn, syndrome)
    for syndrome in (0x40, 0x5F, 0x64, 0x7F):
        p.ack(p.psn + 1, syndrome)
    assert p.silent()
    assert p.queue.qp.state == QpState.RTS
    p.ack(last)
    assert [packet.psn for packet in p.drain()] == [last + 1 + i for i in range(50)]
    p.ack(last + 50)
    completed(p, 1)


def test_every_credit_count_is_an_acknowledgement(peer):
    p = peer()
    for syndrome in range(32):
        request(p, WRITE, 8)
        p.take(1)
        p.ack(p.psn + syndrome, syndrome)
        completed(p, syndrome)


# --- requester: losses -----------------------------------------------------------------------------------------------


def test_go_back(peer):
    """A sequence NAK acknowledges what is before it, and the same bytes come again from there (9.7.5.1.1)."""
    p = peer(psn=PSNS - 2)
    request(p, WRITE, 100)
    request(p, WRITE_IMM, 5000, imm=77)
    request(p, SEND, 1)
    packets = p.take(7)
    p.ack(p.psn + 3, NAK_SEQUENCE)
    completed(p, 0)
    assert p.drain() == packets[3:]
    assert p.counted("packet_seq_err") == 1
    p.ack(p.psn + 6)
    completed(p, 1, 2)


def test_sequence_naks_use_up_the_retries(peer):
    """Unless there is progress."""
    p = peer(retry_cnt=2)
    request(p, WRITE, 3000)
    request(p, WRITE, 8)
    p.take(4)
    for _ in range(2):
        p.ack(p.psn, NAK_SEQUENCE)
        assert len(p.drain()) == 4
    p.ack(p.psn + 1, NAK_SEQUENCE)  # one packet further
    for _ in range(2):
        assert len(p.drain()) == 3
        p.ack(p.psn + 1, NAK_SEQUENCE)
    failed(p, RETRY_EXCEEDED, Reason.NO_RESPONSE, flushed=1)
    assert p.silent()


def test_what_was_asked_for_is_sent_again_soon(peer):
    """A NAK comes once for a gap: if what it asks for gets lost again, a short timer sends it, and no retry is used."""
    p = peer(retry_cnt=1)
    request(p, WRITE, 3000)
    packets = p.drain()
    p.ack(p.psn, NAK_SEQUENCE)
    assert p.drain() == packets
    first = replace(packets[0], ack=1)  # alone: the peer may only be slow
    for soon in SOON:
        p.lab.pass_time(soon - 1)
        assert p.silent()
        p.lab.pass_time(1)
        assert p.drain() == [first]
    p.lab.pass_time(2 * TIMEOUT - 1)  # the one retry was that of the NAK
    assert p.silent()
    p.lab.pass_time(1)
    failed(p, RETRY_EXCEEDED, Reason.NO_RESPONSE)
    assert p.counted("packet_seq_err", "local_ack_timeout_err") == (1, 1 + len(SOON))


@pytest.mark.parametrize("progress", [1, 2])
def test_progress_ends_the_hurry(peer, progress):
    p = peer()
    request(p, WRITE, 3000)
    packets = p.drain()
    p.ack(p.psn, NAK_SEQUENCE)
    assert p.drain() == packets
    p.ack(p.psn + progress - 1)
    p.lab.pass_time(TIMEOUT - 1)
    assert p.silent()
    p.lab.pass_time(1)
    assert p.drain() == packets[progress:]


@pytest.mark.parametrize("retries", [0, 1, 7])
def test_ack_timeout(peer, retries):
    """Nothing comes back: all is sent again retry_cnt times and then given up.

    The timeout grows to four times its value, which is the limit (9.7.6.1.3).
    """
    p = peer(retry_cnt=retries)
    request(p, WRITE, 3000)
    request(p, SEND, 5)
    request(p, WRITE, 5)
    packets = p.drain()
    assert len(packets) == 5
    for retry in range(retries):
        p.lab.pass_time(TIMEOUT * min(1 << retry, 4) - 1)
        assert p.silent()
        p.lab.pass_time(1)
        assert p.drain() == packets
    p.lab.pass_time(TIMEOUT * min(1 << retries, 4) - 1)
    assert p.queue.done.poll() is None
    p.lab.pass_time(1)
    failed(p, RETRY_EXCEEDED, Reason.NO_RESPONSE, flushed=2)
    assert p.counted("local_ack_timeout_err", "req_transport_retries_exceeded") == (retries + 1, 1)
    assert p.silent()


def test_the_ack_timer_does_not_run_while_a_wait_is_open(peer):
    """Nothing is on its way to the peer; what is sent behind the WAIT has all of its retries."""
    p, other = peer(retry_cnt=1, core_direct=True), peer()
    post(p, WAIT, struct.pack(">8xII", 0, other.queue.send_cq.cqn))
    write = request(p, WRITE, 8)
    for _ in range(5):
        p.lab.pass_time(4 * TIMEOUT)
    post(other, NOP)
    (packet,) = p.drain()
    p.lab.pass_time(TIMEOUT - 1)
    assert p.silent()
    p.lab.pass_time(1)
    assert p.drain() == [packet]
    p.ack(p.psn)
    completed(p, write - 1, write)
    assert p.counted("local_ack_timeout_err") == 1


def test_the_ack_timer_runs_while_nothing_can_be_sent(peer):
    """A wire without room, as one that is down, is a peer that does not answer."""
    p = peer(retry_cnt=1)
    p.lab.nic.set_link(False)
    try:
        request(p, WRITE, 8)
        p.lab.pass_time(3 * TIMEOUT - 1)
        assert p.queue.done.poll() is None
        p.lab.pass_time(2 * TIMEOUT)
        failed(p, RETRY_EXCEEDED, Reason.NO_RESPONSE)
    finally:
        p.lab.nic.set_link(True)


def test_progress_gives_the_retries_back_and_restarts_the_timer(peer):
    p = peer(retry_cnt=1)
    request(p, WRITE, 3000)
    packets = p.drain()
    for acknowledged in range(3):
        if acknowledged:
            p.lab.pass_time(TIMEOUT // 2)
            p.ack(p.psn + acknowledged - 1)
        p.lab.pass_time(TIMEOUT - 1)
        assert p.silent()
        p.lab.pass_time(1)
        assert p.drain() == packets[acknowledged:]
    p.ack(p.psn + 2)
    completed(p, 0)


def test_no_timer_without_a_timeout_or_without_anything_in_flight(peer):
    p = peer(ack_timeout=0)
    request(p, WRITE, 8)
    p.take(1)
    p.lab.pass_time(10**12)
    assert p.silent()
    p.ack(p.psn)
    completed(p, 0)
    q = peer(retry_cnt=0)
    q.lab.pass_time(10**12)
    request(q, WRITE, 8)
    q.take(1)
    q.ack(q.psn)
    completed(q, 0)
    q.lab.pass_time(10**12)
    assert q.queue.qp.state == QpState.RTS


# IBTA table 45, in units of 10 µs
RNR_TIMERS = (
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192, 12288, 16384, 24576, 32768, 49152,
)  # fmt: skip


def test_rnr_timers(peer):
    """A receiver that is not ready is left alone for as long as it asks."""
    p = peer(rnr_retry=7)
    request(p, SEND, 3000)
    packets = p.drain()
    for code, units in enumerate(RNR_TIMERS):
        p.ack(p.psn, RNR_NAK | code)
        p.lab.pass_time(units * 10_000 - 1)
        assert p.silent()
        p.lab.pass_time(1)
        assert p.drain() == packets
    assert p.counted("rnr_nak_retry_err", "local_ack_timeout_err") == (32, 0)
    p.ack(p.psn + 2)
    completed(p, 0)


def test_rnr_nak_in_the_middle(peer):
    """It acknowledges what is before it."""
    p = peer(rnr_retry=1)
    request(p, WRITE, 8)
    request(p, WRITE_IMM, 3000)
    packets = p.drain()
    p.ack(p.psn + 3, RNR_NAK | 1)
    completed(p, 0)
    p.lab.pass_time(10_000)
    assert p.drain() == packets[3:]
    p.ack(p.psn + 3)
    completed(p, 1)


def test_rnr_naks_give_the_retries_back(peer):
    """A slow receiver that is not ready also complains of the packet behind, when that is on its way again."""
    p = peer(rnr_retry=7, retry_cnt=1)
    request(p, SEND, 3000)
    packets = p.drain()
    for _ in range(5):
        p.ack(p.psn, RNR_NAK | 1)
        p.lab.pass_time(10_000)
        assert p.drain() == packets
        p.ack(p.psn, NAK_SEQUENCE)
        assert p.drain() == packets
    p.ack(p.psn + 2)
    completed(p, 0)


@pytest.mark.parametrize("retries", [0, 1, 6])
def test_rnr_retries_exceeded(peer, retries):
    p = peer(rnr_retry=retries)
    request(p, SEND, 8)
    request(p, SEND, 8)
    for _ in range(retries):
        assert len(p.drain()) == 2
        p.ack(p.psn, RNR_NAK | 1)
        p.lab.pass_time(10_000)
    assert len(p.drain()) == 2
    p.ack(p.psn, RNR_NAK | 1)
    failed(p, RNR_EXCEEDED, Reason.RNR, flushed=1)
    assert p.counted("rnr_nak_retry_err", "req_rnr_retries_exceeded") == (retries + 1, 1)


@pytest.mark.parametrize(
    ("syndrome", "error", "reason", "counter"),
    [
        (NAK_INVALID, REMOTE_INVALID, Reason.NAK_INVALID_REQUEST, "req_remote_invalid_request"),
        (NAK_ACCESS, REMOTE_ACCESS, Reason.NAK_REMOTE_ACCESS, "req_remote_access_errors"),
        (NAK_OPERATION, REMOTE_OP, Reason.NAK_REMOTE_OPERATION, "req_cqe_error"),
    ],
)
def test_fatal_naks(peer, syndrome, error, reason, counter):
    """They complete what is before them, fail the WQE they name, and flush the rest."""
    p = peer()
    for nbytes in (8, 3000, 8, 8):
        request(p, WRITE, nbytes)
    p.drain()
    p.ack(p.psn + 2, syndrome)
    assert p.queue.done.next().opcode == REQ
    failed(p, error, reason, flushed=2)
    assert p.counted(counter) >= 1
    p.ack(p.psn + 5)
    assert p.silent()
    assert p.queue.done.poll() is None


# --- requester: READs ------------------------------------------------------------------------------------------------


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
                   Packet(ATOMIC_ACKNOWLEDGE, p.psn + 4, aeth=(ACK, 0), original=7)):  # fmt: skip
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
}  # fmt: skip


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


@settings(max_examples=30)
@given(st.data())
def test_random_requests(lab, choose):
    """Random WQEs over random MTUs, acknowledged at random: the peer gathers what they say, in order."""
    mtu = choose.draw(st.sampled_from(MTUS))
    psn = choose.draw(st.sampled_from((0, PSNS - 3, 12345)))
    p = Peer(lab, mtu=mtu, psn=psn, sq=32)
    lab.here.bytes[:] = np.arange(SIZE) * 7 + 1
    memory, expected = bytearray(SIZE), bytearray(SIZE)
    sends: list[tuple[int | None, bytes]] = []
    messages = choose.draw(
        st.lists(
            st.tuples(
                st.sampled_from((WRITE, WRITE_IMM, SEND, SEND_IMM, READ)), st.integers(0, 4 * mtu + 5),
                st.integers(0, 1000), st.integers(0, (1 << 32) - 1),
            ),
            min_size=1, max_size=8,
        )
    )  # fmt: skip
    for opcode, nbytes, offset, imm in messages:
        payload = lab.here.bytes[offset : offset + nbytes].tobytes()
        request(p, opcode, nbytes, offset, imm=imm)
        if opcode in (WRITE, WRITE_IMM):
            expected[offset : offset + nbytes] = payload
        if opcode in (SEND, SEND_IMM, WRITE_IMM):
            sends.append((None if opcode == SEND else imm, b"" if opcode == WRITE_IMM else payload))
    seen: list[tuple[int | None, bytes]] = []
    at, begun, gathered, next_psn = 0, False, b"", psn
    deadline = time.monotonic() + 60
    while int(p.row["sq_ci"]) != p.queue.index:
        assert time.monotonic() < deadline, f"stuck at PSN {next_psn}"
        packets = p.drain()
        for packet in packets:
            assert packet.psn == next_psn
            next_psn = (next_psn + 1) % PSNS
            operation = packet.opcode
            if operation == READ_REQUEST:
                assert packet.reth is not None
                va, _, nbytes = packet.reth
                same_bytes = lab.here.bytes[va - VA : va - VA + nbytes].tobytes()  # so that sources do not change
                p.send(response_packets(same_bytes, mtu, packet.psn))
                next_psn = (packet.psn + len(segments(same_bytes, mtu))) % PSNS
                continue
            writing, place = divmod(operation, 6)
            assert begun == (place not in (0, 4, 5))
            if packet.reth:
                assert writing
                at = packet.reth[0] - VA
            if writing:
                memory[at : at + len(packet.payload)] = packet.payload
                at += len(packet.payload)
            else:
                gathered += packet.payload
            begun = place in (0, 1)
            if not begun and (packet.imm is not None or not writing):
                seen.append((packet.imm, gathered))
                gathered = b""
        if packets:
            last = packets[-1]
            if last.opcode != READ_REQUEST:
                p.ack(last.psn)
        lab.settle()
    assert seen == sends
    assert memory == expected
    assert [cqe.opcode for cqe in p.queue.done.take(len(messages))] == [REQ] * len(messages)
    p.close()


# --- responder: messages ---------------------------------------------------------------------------------------------


def received(peer: Peer, opcode: int, nbytes: int, imm: int = 0) -> None:
    """The next receive has been completed with this."""
    cqe = peer.queue.arrived.next()
    assert (cqe.opcode, cqe.byte_cnt, cqe.imm, cqe.qpn) == (opcode, nbytes, imm, peer.qpn)


def target(peer: Peer, offset: int = 0) -> tuple[int, int]:
    """(va, rkey) of memory that the peer may write and read."""
    return peer.lab.there.address + offset, peer.lab.there.key


def arrived(peer: Peer, expected: dict[int, bytes]) -> None:
    """The memory holds these bytes at these offsets, and nothing else."""
    memory = bytearray(len(peer.lab.there.whole))
    for offset, payload in expected.items():
        start = peer.lab.there.start + offset
        memory[start : start + len(payload)] = payload
    assert peer.lab.there.whole.tobytes() == bytes(memory)


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


# --- responder: losses and duplicates --------------------------------------------------------------------------------


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
                      (1, (va + 256, key, 345)), (2, (va + 512, key, 1 << 31))):  # fmt: skip
        p.send(Packet(READ_REQUEST, p.own + psn, ack=1, reth=reth))
        assert p.silent(), (psn, reth)
    p.send(replace(Packet(READ_REQUEST, p.own, ack=1, reth=(va, key, 600)), payload=bytes(4)))
    assert p.silent()
    assert p.queue.qp.state == QpState.RTS


def test_duplicate_atomic(peer):
    """The result is remembered, and the word left alone (9.7.5.1.5)."""
    p = peer()
    p.lab.there.set_word(0, 10)
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


# --- responder: not ready --------------------------------------------------------------------------------------------


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


# --- responder: refusals ---------------------------------------------------------------------------------------------

GIB = 1 << 30
ALL = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
DATA, BIG = bytes(range(100)), bytes(600)


def aimed(packet: Packet, buffer: Buffer) -> Packet:
    """The same request for other memory."""
    if packet.reth:
        return replace(packet, reth=(buffer.address, buffer.key, packet.reth[2]))
    return replace(packet, atomic=(buffer.address, buffer.key, 1, 0))


def bad_requests(p: Peer) -> dict[str, tuple[list[Packet], int, Reason]]:
    """Packets for an MTU of 256, of which the last is refused, with which NAK, and why."""
    va, key = target(p)
    there, own = p.lab.there, p.own
    unknown = key ^ 0xFF00
    write, big = write_packets(DATA, 256, own, va, key)[0], write_packets(BIG, 256, own, va, key)
    send, message = send_packets(DATA, 256, own)[0], send_packets(BIG, 256, own)
    read = Packet(READ_REQUEST, own, ack=1, reth=(va, key, 100))
    add = Packet(FETCH_ADD, own, ack=1, atomic=(va, key, 1, 0))
    swap = Packet(COMPARE_SWAP, own, ack=1, atomic=(va, key, 1, 0))
    late = [replace(big[0], psn=own), replace(big[1], psn=own + 1)]
    bad, long, access = (NAK_INVALID, Reason.BAD_REQUEST), (NAK_INVALID, Reason.MESSAGE_TOO_LONG), NAK_ACCESS
    cases: dict[str, tuple[list[Packet], int, Reason]] = {
        "write: no such key": ([replace(write, reth=(va, unknown, 100))], access, Reason.RKEY_UNKNOWN),
        "read: no such key": ([replace(read, reth=(va, unknown, 100))], access, Reason.RKEY_UNKNOWN),
        "atomic: no such key": ([replace(add, atomic=(va, unknown, 1, 0))], access, Reason.RKEY_UNKNOWN),
        "write: before the region": ([replace(write, reth=(va - 1, key, 100))], access, Reason.RKEY_BOUNDS),
        "write: behind the region": ([replace(write, reth=(va + SIZE - 99, key, 100))], access, Reason.RKEY_BOUNDS),
        "write: its end": ([replace(big[0], reth=(va + SIZE - 512, key, 600))], access, Reason.RKEY_BOUNDS),
        "read: behind the region": ([replace(read, reth=(va + 1, key, SIZE))], access, Reason.RKEY_BOUNDS),
        "atomic: behind the region": ([replace(swap, atomic=(va + SIZE, key, 1, 0))], access, Reason.RKEY_BOUNDS),
        "atomic: misaligned": ([replace(add, atomic=(va + 4, key, 1, 0))], NAK_INVALID, Reason.ATOMIC_ALIGNMENT),
        "write: more than 1 GiB": ([replace(big[0], reth=(va, key, GIB + 1))], *long),
        "read: more than 1 GiB": ([replace(read, reth=(va, key, GIB + 1))], *long),
        "read: 4 GiB": ([replace(read, reth=(va, key, (1 << 32) - 1))], *long),
        "write: only, shorter than it says": ([replace(write, reth=(va, key, 101))], *bad),
        "write: only, longer than it says": ([replace(write, reth=(va, key, 99))], *bad),
        "write: first, longer than it says": ([replace(big[0], reth=(va, key, 255))], *bad),
        "write: last, shorter than it says": ([*big[:2], replace(big[2], payload=BIG[:87])], *bad),
        "write: last, longer than it says": ([*big[:2], replace(big[2], payload=BIG[:89])], *bad),
        "write: middle beyond what it says": ([*big[:2], replace(big[1], psn=own + 2)], *bad),
        "write: empty last": ([*big[:2], replace(big[2], payload=b"")], *bad),
        "write: first below the MTU": ([replace(big[0], payload=BIG[:252])], *bad),
        "write: first with padding": ([replace(big[0], payload=BIG[:255])], *bad),
        "write: first above the MTU": ([replace(big[0], payload=BIG[:260])], *bad),
        "write: middle below the MTU": ([big[0], replace(big[1], payload=BIG[:128])], *bad),
        "write: only above the MTU": ([replace(write, reth=(va, key, 260), payload=BIG[:260])], *bad),
        "send: first below the MTU": ([replace(message[0], payload=BIG[:252])], *bad),
        "send: middle above the MTU": ([message[0], replace(message[1], payload=BIG[:260])], *bad),
        "send: empty last": ([*message[:2], replace(message[2], payload=b"")], *bad),
        "send: only above the MTU": ([replace(send, payload=BIG[:257])], *bad),
        "write: too short for its RETH": ([replace(write, reth=None, payload=DATA[:12])], *bad),
        "send: no immediate data": ([send, replace(send, psn=own + 1, opcode=SEND_ONLY + 1, payload=b"")], *bad),
        "read: too short": ([replace(read, reth=None, payload=DATA[:12])], *bad),
        "read: too long": ([replace(read, payload=DATA[:4])], *bad),
        "atomic: too short": ([replace(add, atomic=None, payload=DATA[:24])], *bad),
        "atomic: too long": ([replace(add, payload=DATA[:4])], *bad),
        "middle of nothing": ([replace(message[1], psn=own)], *bad),
        "last of nothing": ([replace(message[2], psn=own)], *bad),
        "write middle of nothing": ([replace(big[1], psn=own)], *bad),
        "last behind a whole message": ([send, replace(message[2], psn=own + 1)], *bad),
        "first in a message": ([message[0], replace(message[0], psn=own + 1)], *bad),
        "only in a message": ([message[0], replace(send, psn=own + 1)], *bad),
        "write in a send": ([message[0], replace(big[1], psn=own + 1)], *bad),
        "send in a write": ([*late, replace(message[2], psn=own + 2)], *bad),
        "read in a message": ([message[0], replace(read, psn=own + 1)], *bad),
        "atomic in a message": ([big[0], replace(add, psn=own + 1)], *bad),
        "send: longer than its receive": (
            [*send_packets(bytes(1001), 256, own)], NAK_INVALID, Reason.RECV_TOO_SMALL),
        "send: into a bad receive": (
            [replace(send, psn=own), replace(send, psn=own + 1), replace(send, psn=own + 2)],
            NAK_OPERATION, Reason.RECV_LKEY),
    }  # fmt: skip
    for operation in (0x15, 0x16, 0x17, 0x1F):  # reserved, or what this NIC does not model
        cases[f"operation {operation:#x}"] = ([replace(send, opcode=operation)], *bad)
    for name, right, packet in (
        ("write", Access.REMOTE_WRITE, write), ("read", Access.REMOTE_READ, read),
        ("atomic", Access.REMOTE_ATOMIC, add),
    ):  # fmt: skip
        locked = Buffer(p.lab.pd, 4096, access=Access.LOCAL_WRITE | ALL & ~right)
        cases[f"{name}: the key does not allow it"] = ([aimed(packet, locked)], access, Reason.RKEY_RIGHTS)
        stranger = Buffer(p.lab.ctx.create_pd(), 4096)
        cases[f"{name}: of another PD"] = ([aimed(packet, stranger)], access, Reason.RKEY_PD)
    for _ in range(2):
        p.queue.receive(there.at(0, 1000))
    p.queue.receive(data(there.address, 0x123400, 1000))
    return cases


def refuses(p: Peer, packets: list[Packet], syndrome: int, reason: Reason) -> None:
    """The last of the packets is refused with a NAK, the QP is in ERR, and whatever comes then is ignored."""
    p.send(packets[:-1])
    p.drain()
    p.lab.there.bytes[:] = 0
    p.send(packets[-1])
    p.expect_ack(packets[-1].psn, syndrome)
    assert p.queue.qp.state == QpState.ERR
    *_, report = reports_of(p.lab.nic, p.qpn)
    assert (report.reason, report.responder) == (reason, True)
    assert not p.lab.there.bytes.any()
    p.send(packets[-1], write_packets(DATA, 256, packets[-1].psn + 1, *target(p))[0])
    assert p.silent()
    assert p.counted("rx_wrong_state") == 2
    assert not p.lab.there.bytes.any()


@pytest.fixture(scope="module")
def bad_names(lab):
    p = Peer(lab, mtu=256)
    names = list(bad_requests(p))
    p.close()
    return names


def test_bad_requests(peer, bad_names):
    """Each is refused with the NAK that the specification gives it (9.7.4.1, 9.9.3)."""
    for name in bad_names:
        p = peer(mtu=256)
        try:
            refuses(p, *bad_requests(p)[name])
        except BaseException as error:
            error.add_note(name)
            raise


def test_more_padding_than_payload(peer):
    p = peer()
    p.queue.receive(p.lab.there.at())
    raw = bytearray(replace(send_packets(b"", p.mtu, p.own)[0], qpn=p.qpn).build())
    raw[1] |= 3 << 4
    p.lab.send_raw(bytes(raw))
    p.expect_ack(p.own, NAK_INVALID)
    *_, report = reports_of(p.lab.nic, p.qpn)
    assert report.reason == Reason.BAD_REQUEST


@pytest.mark.parametrize("right", [Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC])
def test_rights_of_the_qp(peer, right):
    """The QP's own rights come first, and also bind requests of no bytes, and ones without a receive."""
    requests = {
        Access.REMOTE_WRITE: [
            lambda p: write_packets(DATA, 256, p.own, *target(p)), lambda p: write_packets(b"", 256, p.own, 0, 0),
            lambda p: write_packets(DATA, 256, p.own, *target(p), imm=1),
        ],
        Access.REMOTE_READ: [
            lambda p: [Packet(READ_REQUEST, p.own, ack=1, reth=(*target(p), 8))],
            lambda p: [Packet(READ_REQUEST, p.own, ack=1, reth=(0, 0, 0))],
        ],
        Access.REMOTE_ATOMIC: [lambda p: [Packet(FETCH_ADD, p.own, ack=1, atomic=(*target(p), 1, 0))]],
    }  # fmt: skip
    for make in requests[right]:
        p = peer(mtu=256, remote_access=ALL & ~right)
        refuses(p, make(p), NAK_INVALID, Reason.QP_RIGHTS)


def test_empty_requests_need_no_key(peer):
    """9.7.4.1.6"""
    p = peer()
    p.send(write_packets(b"", p.mtu, p.own, 0x1234, 0xBAD))
    p.expect_ack(p.own)
    p.send(Packet(READ_REQUEST, p.own + 1, ack=1, reth=(0x1234, 0xBAD, 0)))
    (response,) = p.drain()
    assert (response.opcode, response.psn, response.payload) == (RESPONSE_ONLY, p.own + 1, b"")


def test_region_that_goes_away_in_a_message(peer):
    """Each packet's memory is looked up again."""
    p = peer(mtu=256)
    buffer = Buffer(p.lab.pd, 1000)
    packets = write_packets(BIG, 256, p.own, buffer.address, buffer.key)
    p.send(packets[:2])
    assert p.silent()
    buffer.mr.close()
    p.send(packets[2])
    p.expect_ack(p.own + 2, NAK_ACCESS)
    *_, report = reports_of(p.lab.nic, p.qpn)
    assert report.reason == Reason.RKEY_UNKNOWN


def test_too_small_receive(peer):
    """Found while packets arrive; the receive completes with an error, those behind it are flushed."""
    p = peer(mtu=256)
    for nbytes in (600, 100):
        p.queue.receive(p.lab.there.at(0, nbytes))
    packets = send_packets(bytes([7]) * 601, 256, p.own)
    p.send(packets[:2])
    assert p.silent()
    assert p.queue.arrived.poll() is None
    p.send(packets[2])
    p.expect_ack(p.own + 2, NAK_INVALID)
    assert error_of(p.queue.arrived.next()) == (LOCAL_LENGTH, Reason.RECV_TOO_SMALL)
    assert error_of(p.queue.arrived.next()) == (FLUSHED, Reason.FLUSH)
    assert not p.lab.there.bytes[512:].any()
    assert p.counted("resp_local_length_error") == 1


def test_overrun_of_the_receive_queue(peer):
    """A completion that has no room is a remote operation error (9.9.3)."""
    p = peer(recv_cq=1)
    for i in range(2):
        p.queue.receive(p.lab.there.at())
        p.send(send_packets(b"x", p.mtu, p.own + i))
        p.expect_ack(p.own + i, NAK_OPERATION if i else ACK)
    assert p.queue.qp.state == QpState.ERR
    *_, report = reports_of(p.lab.nic, p.qpn)
    assert report.reason == Reason.CQ_OVERRUN


def test_more_reads_than_agreed(peer):
    """A response that waits for room on the wire keeps its place; a request beyond max_rd_atomic is refused."""
    p = peer(mtu=4096, max_rd_atomic=1)
    big = Buffer(p.lab.pd, 2 << 20, fill=5)
    p.send(Packet(READ_REQUEST, p.own, ack=1, reth=(big.address, big.key, big.nbytes)))
    p.lab.settle()
    p.send(Packet(READ_REQUEST, p.own + 512, ack=1, reth=(big.address, big.key, 8)))
    p.lab.settle()
    assert p.queue.qp.state == QpState.ERR
    packets = p.take(513)
    same(packets[:512], response_packets(big.bytes.tobytes(), 4096, p.own))
    assert (packets[512].opcode, packets[512].psn) == (ACKNOWLEDGE, p.own + 512)
    assert packets[512].aeth is not None
    assert packets[512].aeth[0] == NAK_INVALID
    assert p.silent()
    *_, report = reports_of(p.lab.nic, p.qpn)
    assert report.reason == Reason.BAD_REQUEST


def test_region_that_goes_away_in_a_response(peer):
    """The NAK comes where the rest of the response would, and nothing behind it."""
    p = peer(mtu=4096)
    big = Buffer(p.lab.pd, 2 << 20, fill=5)
    p.send(Packet(READ_REQUEST, p.own, ack=1, reth=(big.address, big.key, big.nbytes)))
    p.send(Packet(READ_REQUEST, p.own + 512, ack=1, reth=(p.lab.here.address, p.lab.here.key, 8)))
    p.lab.settle()
    big.mr.close()
    packets = p.drain()
    assert 0 < len(packets) - 1 < 512
    assert [packet.psn for packet in packets] == [p.own + i for i in range(len(packets))]
    assert packets[-1].opcode == ACKNOWLEDGE
    assert packets[-1].aeth is not None
    assert packets[-1].aeth[0] == NAK_ACCESS


# --- what is for nobody ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "change"),
    [
        ("rx_no_qp", {"qpn": 0x7FFFFF}), ("rx_no_qp", {"qpn": 1}), ("rx_wrong_pkey", {"pkey": 0x8001}),
        ("rx_wrong_pkey", {"pkey": 0}), ("rx_malformed", {"version": 1}), ("rx_malformed", {"version": 8}),
        ("rx_malformed", {"opcode": UC | WRITE_ONLY}), ("rx_malformed", {"opcode": 0x60 | WRITE_ONLY}),
        ("rx_malformed", {"opcode": 0xE0 | WRITE_ONLY}), ("rx_malformed", {"payload": b"12345", "pad": 2}),
    ],
)  # fmt: skip
def test_dropped_packets(peer, counter, change):
    """Each is counted once, and nothing else happens (9.6.1)."""
    p = peer()
    (write,) = write_packets(b"1234", p.mtu, p.own, *target(p))
    p.send(replace(write, **change))
    assert p.silent()
    assert p.counted(counter, "rdma_rx_packets") == (1, 1)
    grown = {name for name, value in p.lab.counters().items() if value != p.before[name]}
    assert grown == {counter, "rdma_rx_packets"}
    assert not p.lab.there.bytes.any()
    p.send(write)
    p.expect_ack(p.own)


@pytest.mark.parametrize("nbytes", [0, 1, 4, 8, 11])
def test_packet_without_a_whole_bth(peer, nbytes):
    p = peer()
    p.lab.send_raw(bytes(nbytes))
    assert p.silent()
    assert p.counted("rx_malformed", "rdma_rx_packets") == (1, 1)


def test_responses_without_a_whole_aeth(peer):
    p = peer()
    request(p, READ, 8)
    p.take(1)
    for operation in (RESPONSE_FIRST, RESPONSE_LAST, RESPONSE_ONLY, ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE):
        p.send(Packet(operation, p.psn))
    assert p.silent()
    assert p.counted("rx_malformed") == 5
    p.send(response_packets(bytes(8), p.mtu, p.psn))
    completed(p, 0)


def test_states_that_receive_nothing(peer):
    """RST and ERR take neither requests nor responses; a QP in RST has no peer."""
    p = peer()
    (write,) = write_packets(b"1234", p.mtu, p.own, *target(p))
    request(p, WRITE, 8)
    p.take(1)
    p.queue.qp.to_error()
    p.send(write)
    p.ack(p.psn)
    assert p.silent()
    assert p.counted("rx_wrong_state") == 2
    assert error_of(p.queue.done.next()) == (FLUSHED, Reason.FLUSH)
    p.queue.reset()
    p.send(write)
    p.ack(p.psn)
    assert p.silent()
    assert p.counted("rx_wrong_peer", "rx_wrong_state") == (2, 2)
    assert not p.lab.there.bytes.any()


# --- UC --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtu", MTUS)
def test_uc_requests(peer, mtu):
    """The same packets with the service's opcodes; they complete when they are sent (9.8)."""
    p = peer(mtu=mtu, service=UC, psn=PSNS - 9)
    psn = PSNS - 9
    for nbytes in lengths(mtu):
        payload = p.lab.here.bytes[:nbytes].tobytes()
        for opcode, imm in ((SEND, None), (SEND_IMM, 7), (WRITE, None), (WRITE_IMM, 8)):
            index = request(p, opcode, nbytes, imm=imm or 0)
            if opcode in (SEND, SEND_IMM):
                expected = send_packets(payload, mtu, psn, imm, UC)
            else:
                expected = write_packets(payload, mtu, psn, VA, RKEY, imm, UC)
            packets = p.take(len(expected))
            same(packets, expected)
            assert not any(packet.ack for packet in packets)
            completed(p, index)
            psn = (psn + len(packets)) % PSNS
    p.lab.pass_time(10**12)
    assert p.silent()


@pytest.mark.parametrize("opcode", [READ, FA, CS])
def test_uc_has_no_reads_and_atomics(peer, opcode):
    p = peer(service=UC)
    parts = (raddr(VA, RKEY), *((atomic(1),) if opcode != READ else ()), p.lab.here.at(0, 8))
    post(p, opcode, *parts)
    failed(p, 0x02, Reason.WQE_OPCODE)
    assert p.silent()


def test_uc_messages(peer):
    """Nothing is ever acknowledged, not even a request that asks for it."""
    p = peer(mtu=256, service=UC, own=PSNS - 3)
    payload = np.random.default_rng(0).bytes(1000)
    p.queue.receive(p.lab.there.at(0, 1000))
    p.queue.receive()
    p.send(
        send_packets(payload, 256, p.own, None, UC), write_packets(payload, 256, p.own + 4, *target(p, 2000), 9, UC),
        [replace(packet, ack=1) for packet in write_packets(b"z", 256, p.own + 8, *target(p, 4000), None, UC)],
    )  # fmt: skip
    assert p.silent()
    received(p, RESP_SEND, 1000)
    received(p, RESP_WRITE_IMM, 1000, 9)
    arrived(p, {0: payload, 2000: payload, 4000: b"z"})


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_uc_torn_message(peer, lost):
    """A message that loses a packet is dropped, its receive is used again, and the next message is delivered."""
    p = peer(mtu=256, service=UC)
    p.queue.receive(p.lab.there.at(0, 1000))
    packets = send_packets(bytes([1]) * 1000, 256, p.own, 5, UC)
    p.send(packet for packet in packets if packet is not packets[lost])
    assert p.silent()
    assert p.queue.arrived.poll() is None
    p.send(send_packets(bytes([2]) * 700, 256, p.own + 4, None, UC))
    assert p.silent()
    received(p, RESP_SEND, 700)
    assert p.lab.there.bytes[:700].tobytes() == bytes([2]) * 700
    assert p.queue.qp.state == QpState.RTS


@pytest.mark.parametrize("operation", [READ_REQUEST, ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE, FETCH_ADD, 0x15, 0x1F])
def test_uc_operations_that_it_does_not_have(peer, operation):
    """They are dropped, and are not taken for the end of a message."""
    p = peer(mtu=256, service=UC)
    p.queue.receive(p.lab.there.at(0, 1000))
    first, *_ = send_packets(bytes(600), 256, p.own, None, UC)
    p.send(first, Packet(UC | operation, p.own + 1, payload=bytes(256)))
    assert p.silent()
    assert p.queue.arrived.poll() is None
    assert p.counted("rx_malformed") == 1
    p.send(send_packets(b"whole", 256, p.own + 2, None, UC))
    p.lab.settle()
    received(p, RESP_SEND, 5)


def test_uc_without_a_receive(peer):
    """The message is lost; nobody is told (9.8.2.2)."""
    p = peer(mtu=256, service=UC)
    p.send(send_packets(bytes(600), 256, p.own, None, UC), write_packets(b"w", 256, p.own + 3, *target(p), 5, UC))
    assert p.silent()
    assert p.counted("out_of_buffer") == 2
    p.queue.receive(p.lab.there.at(0, 100))
    p.send(send_packets(b"here", 256, p.own + 4, None, UC))
    assert p.silent()
    received(p, RESP_SEND, 4)


def test_uc_refusals_are_silent(peer):
    """A bad key, wrong lengths: the message is dropped, and the QP stays."""
    p = peer(mtu=256, service=UC)
    va, key = target(p)
    (write,) = write_packets(DATA, 256, p.own, va, key, None, UC)
    big = write_packets(BIG, 256, p.own, va, key, None, UC)
    psn = p.own
    for packets in (
        [replace(write, reth=(va, key ^ 0xFF00, 100))], [replace(write, reth=(va - 1, key, 100))],
        [replace(write, reth=(va, key, 101))], [replace(big[0], reth=(va, key, GIB + 1))],
        [big[0], replace(big[1], payload=BIG[:128])], [big[1]], [big[2]],
    ):  # fmt: skip
        p.send(replace(packet, psn=psn + i) for i, packet in enumerate(packets))
        psn += len(packets)
        assert p.silent()
        assert p.queue.qp.state == QpState.RTS
    p.lab.there.bytes[:] = 0
    p.send(replace(write, psn=psn))
    assert p.silent()
    arrived(p, {0: DATA})


# --- responder: at random --------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.data())
def test_random_messages(lab, choose):
    """Random messages, with packets lost and doubled, from a peer that goes back as it should: all arrives once."""
    mtu = choose.draw(st.sampled_from(MTUS))
    own = choose.draw(st.sampled_from((0, PSNS - 5, 777)))
    random = choose.draw(st.randoms(use_true_random=False))
    p = Peer(lab, mtu=mtu, own=own, rq=16)
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
    )  # fmt: skip
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
    p.close()
