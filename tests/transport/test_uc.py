"""UC: the same packets, completed when they are sent, and nothing acknowledged (IBTA 9.8)."""

from dataclasses import replace

import numpy as np
import pytest

from gpunetio.enums import QpState
from gpunetio.nic.state.reasons import Reason
from nic_rig import CS, FA, READ, RESP_SEND, RESP_WRITE_IMM, SEND, SEND_IMM, WRITE, WRITE_IMM, atomic, raddr
from transport_rig import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    FETCH_ADD,
    PSNS,
    READ_REQUEST,
    UC,
    Packet,
    send_packets,
    write_packets,
)
from transport_steps import MTUS, RKEY, VA, arrived, completed, failed, lengths, post, received, request, same, target

GIB = 1 << 30
DATA, BIG = bytes(range(100)), bytes(600)


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
    )
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
    ):
        p.send(replace(packet, psn=psn + i) for i, packet in enumerate(packets))
        psn += len(packets)
        assert p.silent()
        assert p.queue.qp.state == QpState.RTS
    p.lab.there.bytes[:] = 0
    p.send(replace(write, psn=psn))
    assert p.silent()
    arrived(p, {0: DATA})
