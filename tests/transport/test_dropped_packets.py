"""Packets that are for nobody (IBTA 9.6.1) are counted and dropped."""

from dataclasses import replace

import pytest

from gpunetio.nic.state.reasons import Reason
from nic_rig import FLUSHED, READ, WRITE, error_of
from transport_rig import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    RESPONSE_FIRST,
    RESPONSE_LAST,
    RESPONSE_ONLY,
    UC,
    WRITE_ONLY,
    Packet,
    response_packets,
    write_packets,
)
from transport_steps import completed, request, target


@pytest.mark.parametrize(
    ("counter", "change"),
    [
        ("rx_no_qp", {"qpn": 0x7FFFFF}), ("rx_no_qp", {"qpn": 1}), ("rx_wrong_pkey", {"pkey": 0x8001}),
        ("rx_wrong_pkey", {"pkey": 0}), ("rx_malformed", {"version": 1}), ("rx_malformed", {"version": 8}),
        ("rx_malformed", {"opcode": UC | WRITE_ONLY}), ("rx_malformed", {"opcode": 0x60 | WRITE_ONLY}),
        ("rx_malformed", {"opcode": 0xE0 | WRITE_ONLY}), ("rx_malformed", {"payload": b"12345", "pad": 2}),
    ],
)
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
