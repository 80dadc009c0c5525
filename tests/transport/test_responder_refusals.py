"""What the responder refuses (IBTA 9.7.4.1, 9.9.3): with which NAK, and for which reason."""

from dataclasses import replace

import pytest

from gpunetio.enums import Access, QpAtomicType, QpState
from gpunetio.nic.state.reasons import Reason
from nic_rig import FLUSHED, LOCAL_LENGTH, Buffer, data, error_of, reports_of
from transport_rig import (
    ACK,
    ACKNOWLEDGE,
    COMPARE_SWAP,
    FETCH_ADD,
    MASKED_ADD,
    NAK_ACCESS,
    NAK_INVALID,
    NAK_OPERATION,
    READ_REQUEST,
    RESPONSE_ONLY,
    SEND_ONLY,
    SIZE,
    Packet,
    Peer,
    response_packets,
    send_packets,
    write_packets,
)
from transport_steps import same, target

GIB = 1 << 30
ALL = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
DATA, BIG = bytes(range(100)), bytes(600)


def aimed(packet: Packet, buffer: Buffer) -> Packet:
    """The same request for other memory."""
    if packet.masked:
        return replace(packet, masked=(buffer.address, buffer.key, *packet.masked[2:]))
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
    masked = Packet(MASKED_ADD, own, ack=1, masked=(va, key, 4, 1, 0, 0, 0))
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
        "masked atomic: no such key": (
            [replace(masked, masked=(va, unknown, *masked.masked[2:]))], access, Reason.RKEY_UNKNOWN),
        "masked atomic: misaligned": (
            [replace(masked, masked=(va + 2, *masked.masked[1:]))], NAK_INVALID, Reason.ATOMIC_ALIGNMENT),
        "masked atomic: too short": ([replace(masked, masked=None, payload=DATA[:44])], *bad),
        "masked atomic: too long": ([replace(masked, payload=DATA[:4])], *bad),
        "masked atomic in a message": ([big[0], replace(masked, psn=own + 1)], *bad),
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
    }
    for nbytes in (0, 1, 2, 16, (1 << 32) - 8):
        packet = replace(masked, masked=(va, key, nbytes, *masked.masked[3:]))
        cases[f"masked atomic: {nbytes} bytes"] = ([packet], *bad)
    # reserved, what this NIC does not model, and others than ours in the range for manufacturers
    for opcode in (0x15, 0x16, 0x17, 0x1B, 0x1E, 0x1F, 0xC0, 0xC4, 0xD3, 0xDD):
        cases[f"opcode {opcode:#x}"] = ([replace(send, opcode=opcode)], *bad)
    for name, right, packet in (
        ("write", Access.REMOTE_WRITE, write), ("read", Access.REMOTE_READ, read),
        ("atomic", Access.REMOTE_ATOMIC, add), ("masked atomic", Access.REMOTE_ATOMIC, masked),
    ):
        locked = Buffer(p.lab.pd, 4096, access=Access.LOCAL_WRITE | ALL & ~right)
        p.beside.enter_context(locked.mr)
        cases[f"{name}: the key does not allow it"] = ([aimed(packet, locked)], access, Reason.RKEY_RIGHTS)
        stranger = Buffer(p.beside.enter_context(p.lab.ctx.create_pd()), 4096)
        p.beside.enter_context(stranger.mr)
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
        p = peer(mtu=256, atomic_type=QpAtomicType.UP_TO_8BYTES)
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
    }
    for make in requests[right]:
        p = peer(mtu=256, remote_access=ALL & ~right)
        refuses(p, make(p), NAK_INVALID, Reason.QP_RIGHTS)


def test_atomic_mode_of_the_qp(peer):
    """The specification's atomics only: masked ones are refused."""
    p = peer(mtu=256, atomic_type=QpAtomicType.IB_SPEC)
    refuses(p, [Packet(MASKED_ADD, p.own, ack=1, masked=(*target(p), 8, 1, 0, 0, 0))], NAK_INVALID, Reason.QP_RIGHTS)


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
    big.mr.close()


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
