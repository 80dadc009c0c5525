"""The requester's packets (IBTA, volume 1, 9.2 and 9.7): how messages are cut, and what each header says."""

import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    CS,
    FA,
    LOCAL_LENGTH,
    LOCAL_QP_OP,
    MASKED_CS,
    MASKED_FA,
    OPMOD,
    READ,
    REQ,
    SEND,
    SEND_IMM,
    WRITE,
    WRITE_IMM,
    atomic,
    error_of,
    masked_cs,
    masked_fa,
    raddr,
)
from transport_rig import (
    ACK,
    ATOMIC_ACKNOWLEDGE,
    COMPARE_SWAP,
    FETCH_ADD,
    MASKED_ADD,
    MASKED_SWAP,
    PSNS,
    READ_REQUEST,
    SIZE,
    Packet,
    Peer,
    response_packets,
    segments,
    send_packets,
    write_packets,
)
from transport_steps import MTUS, RKEY, VA, completed, lengths, post, request, same

SOLICITED = 0x02  # a flag of a control segment


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


@pytest.mark.parametrize("changed", [SIZE - 256, SIZE // 2, 4096, 1, 0])
def test_a_wqe_that_is_changed_while_it_is_sent(peer, changed):
    """Each burst reads it again. If its length is another one, nothing more of it is sent."""
    p = peer(mtu=256)
    request(p, WRITE, SIZE)
    sent = p.drain()
    assert len(sent) == p.lab.window
    p.queue.sq[32:36] = list(changed.to_bytes(4, "big"))  # byte_count, behind control segment and remote address
    p.ack(sent[-1].psn)
    assert error_of(p.queue.done.next()) in ((LOCAL_QP_OP, Reason.WQE_MALFORMED), (LOCAL_LENGTH, Reason.LENGTH))
    assert not p.drain()


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


def test_masked_atomic_requests(peer):
    """A result of 4 bytes comes big-endian into memory, one of 8 bytes in host order."""
    p = peer()
    add, swap = masked_fa(5, 0x8000_0000, 4), masked_cs(1, 2, 3, (1 << 64) - 4, 8)
    post(p, MASKED_FA, raddr(VA, RKEY), add, p.lab.here.at(0, 4), opmod=OPMOD[4])
    post(p, MASKED_CS, raddr(VA + 8, RKEY), swap, p.lab.here.at(8, 8), opmod=OPMOD[8])
    first, second = p.take(2)
    assert (first.opcode, first.psn, first.ack) == (MASKED_ADD, p.psn, 1)
    va, rkey, nbytes, addend, _, boundary, _ = first.masked
    assert (va, rkey, nbytes, addend, boundary) == (VA, RKEY, 4, 5, 0x8000_0000)
    assert (second.opcode, second.psn) == (MASKED_SWAP, p.psn + 1)
    assert second.masked == (VA + 8, RKEY, 8, 1, 2, 3, (1 << 64) - 4)
    p.lab.here.bytes[:16] = 0xEE
    p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn, aeth=(ACK, 1), original=0x1122_3344))
    completed(p, 0)
    p.send(Packet(ATOMIC_ACKNOWLEDGE, p.psn + 1, aeth=(ACK, 2), original=(1 << 64) - 2))
    completed(p, 1)
    old = bytes.fromhex("11223344 eeeeeeee") + ((1 << 64) - 2).to_bytes(8, "little")
    assert p.lab.here.bytes[:16].tobytes() == old


@settings(max_examples=30)
@given(st.data())
def test_random_requests(lab, choose):
    """Random WQEs over random MTUs, acknowledged at random: the peer gathers what they say, in order."""
    mtu = choose.draw(st.sampled_from(MTUS))
    psn = choose.draw(st.sampled_from((0, PSNS - 3, 12345)))
    with closing(Peer(lab, mtu=mtu, psn=psn, sq=32)) as p:
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
        )
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
