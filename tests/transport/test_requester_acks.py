"""Acknowledgements and NAKs at the requester (IBTA 9.7.5.1): what completes, and what is sent again."""


import pytest

from gpunetio.enums import QpState
from gpunetio.nic.state.reasons import Reason
from nic_rig import NOP, REMOTE_ACCESS, REMOTE_INVALID, REMOTE_OP, REQ, RETRY_EXCEEDED, SEND, WRITE, WRITE_IMM
from transport_rig import ACK, NAK_ACCESS, NAK_INVALID, NAK_OPERATION, NAK_SEQUENCE, PSNS, RNR_NAK
from transport_steps import completed, failed, post, request


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
