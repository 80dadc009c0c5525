"""The requester's timers: for acknowledgements (IBTA 9.7.6.1.3), behind a NAK, and those of RNR NAKs (table 45)."""

import struct
from dataclasses import replace

import pytest

from gpunetio.enums import QpState
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    NOP,
    RETRY_EXCEEDED,
    RNR_EXCEEDED,
    SEND,
    WRITE,
    WRITE_IMM,
)
from transport_rig import (
    NAK_SEQUENCE,
    RNR_NAK,
)
from transport_steps import (
    TIMEOUT,
    completed,
    failed,
    post,
    request,
)

WAIT = 0x0F
SOON = (1_000_000, 8_000_000, 64_000_000)  # the timers behind a NAK


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
def test_progress_ends_the_fast_retransmit(peer, progress):
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


def test_while_quiescing_a_queue_pair_that_reaches_its_peer_starts_nothing(peer):
    """Requests in flight continue. Only the engine of a GPU quiesces (nic/gpu/slices.py)."""
    p, other = peer(), peer()
    p.row["peer_keys"] = 1
    begun = request(p, WRITE, 3000)
    packets = p.drain()
    p.lab.nic.record["quiesce_until"] = 1 << 62
    held = request(p, WRITE, 8)
    assert p.silent()
    p.lab.pass_time(TIMEOUT)
    assert p.drain() == packets
    p.ack(p.psn + 2)
    completed(p, begun)
    assert p.silent()
    request(other, WRITE, 8)
    assert len(other.drain()) == 1
    p.lab.nic.record["quiesce_until"] = 0
    assert len(p.drain()) == 1
    p.ack(p.psn + 3)
    completed(p, held)


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
)


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
