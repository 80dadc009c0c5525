"""TSO, several packets in a WQE, and WAIT on send queues of Ethernet packets. scapy is the judge of every segment."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Dot1Q

from eth_programs import V4, V6, Program, steps
from eth_receive_rig import Cq, opened
from eth_send_rig import (
    CHECKSUMS,
    Port,
    Sq,
    error_of,
    eth,
    headers,
    inlined,
    opcode_of,
    pointer,
    recover,
    segments,
    stamp,
    wait_cq,
    wait_time,
)
from gpunetio import PortConfig, verbs
from gpunetio.formats.cqe import CqeOpcode, Syndrome
from gpunetio.formats.ethernet_queues import QueueState, TimestampFormat
from gpunetio.formats.wqe import WAIT_MASK, WaitMode, WqeOpcode
from gpunetio.nic.state.reasons import Reason
from nic_rig import until

TSO, MPSW, WAIT = WqeOpcode.TSO, WqeOpcode.ENHANCED_MPSW, WqeOpcode.WAIT
TIME = WaitMode.TIME


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with opened(port=PortConfig(mtu=1500)) as ctx:
        yield ctx


@pytest.fixture
def port(ctx) -> Port:
    return Port(ctx, receives=256, allow_multi_pkt_send_wqe=1, ts_format=TimestampFormat.REAL_TIME)


def fails(port: Port, syndrome: int, reason: Reason) -> None:
    (cqe,) = port.sq.done()
    assert error_of(cqe) == (syndrome, reason)
    recover(port)


def whole(port: Port, count: int) -> list[bytes]:
    """The frames that arrive after a WQE has completed."""
    (cqe,) = port.sq.done()
    assert opcode_of(cqe) == CqeOpcode.REQ
    return port.frames(count)


# --- TSO -------------------------------------------------------------------------------------------------------------


OPTIONS = IP(src="10.0.0.1", dst="10.0.0.2", options=b"\1" * 8)


@pytest.mark.parametrize("l3", [V4, OPTIONS, V6], ids=["ipv4", "options", "ipv6"])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1001, 5000])
def test_tso(port, l3, tagged, nbytes):
    l2 = port.l2 / Dot1Q(vlan=5) if tagged else port.l2
    tcp = TCP(sport=1, dport=2, seq=0xFFFF_FF00, flags="FPAC", options=[("Timestamp", (1, 2)), ("NOP", None)])
    payload = bytes(i * 7 & 0xFF for i in range(nbytes))
    cut = nbytes // 3
    data = [port.put(0, payload[:cut]), port.put(20000, payload[cut:])] if cut else [inlined(payload)]
    port.sq.post(eth(headers(l2, l3, tcp), CHECKSUMS, mss=1000), *data, opcode=TSO)
    expected = segments(l2, l3, tcp, payload, 1000)
    assert whole(port, len(expected)) == expected


def test_tso_of_the_largest_payload(port):
    tcp, payload = TCP(seq=1, flags="A"), bytes(range(256)) * 200
    port.sq.post(eth(headers(port.l2, V4, tcp), CHECKSUMS, mss=1460), port.put(0, payload), opcode=TSO)
    expected = segments(port.l2, V4, tcp, payload, 1460)
    assert whole(port, len(expected)) == expected


@pytest.mark.parametrize("mss, l4, more", [(0, TCP(), b""), (100, UDP(), b""), (100, TCP(), b"x")])
def test_tso_refused(port, mss, l4, more):
    """No mss, no TCP, or more than headers."""
    port.sq.post(eth(headers(port.l2, V4, l4) + more, mss=mss), port.put(0, bytes(500)), opcode=TSO)
    fails(port, Syndrome.LOCAL_QP_OP, Reason.TSO_HEADERS)


def test_a_tso_of_tiny_segments_lets_other_queues_send():
    """Both are announced while the NIC is paused. The other queue's packet does not wait for all of 2,000 segments."""
    with opened(port=PortConfig(mtu=1500, workers=1)) as ctx:
        port = Port(ctx)
        other = Sq(port.make, Cq(port.make))
        port.nic.pause()
        port.sq.post(eth(headers(port.l2, V4, TCP()), mss=8), port.put(0, bytes(16_000)), opcode=TSO)
        packet = bytes(port.l2 / V4 / UDP(sport=7) / b"other")
        other.post(eth(packet[:18]), port.put(20_000, packet[18:]))
        port.nic.resume()
        (short,), (long,) = other.done(), port.sq.done()
        assert opcode_of(short) == opcode_of(long) == CqeOpcode.REQ
        assert int(short["timestamp"]) < int(long["timestamp"])
        assert port.nic.counters["tx_frames"] == 2001


def test_tso_beyond_the_mtu(port):
    port.sq.post(eth(headers(port.l2, V4, TCP()), mss=1461), port.put(0, bytes(3000)), opcode=TSO)
    fails(port, Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)


def test_tso_that_is_too_long(port):
    pieces = [pointer(*port.out.at(0, 1 << 16))] * 4
    port.sq.post(eth(headers(port.l2, V4, TCP()), mss=1000), *pieces, inlined(b"x"), opcode=TSO)
    fails(port, Syndrome.LOCAL_LENGTH, Reason.LENGTH)


# --- several packets in a WQE ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 61])
def test_multi_packet(port, count):
    """Each data segment is a packet; all share the flags."""
    packets = [port.l2 / V4 / UDP(sport=n) / bytes(n) for n in range(count)]
    spoiled = []
    for n, packet in enumerate(packets):
        wrong = packet.copy()
        wrong[UDP].chksum = 0x1234
        spoiled.append(port.put(200 * n, bytes(wrong)))
    port.sq.post(eth(flags=CHECKSUMS), *spoiled, opcode=MPSW)
    assert whole(port, count) == [bytes(packet) for packet in packets]


def test_multi_packet_with_inline_packets_and_a_tag(port):
    frames = [bytes(port.l2 / V4 / UDP() / bytes([n])) for n in range(4)]
    port.sq.post(eth(vlan=9), inlined(frames[0]), port.put(0, frames[1]), inlined(frames[2]), opcode=MPSW)
    assert whole(port, 3) == [frame[:12] + b"\x81\0\0\x09" + frame[12:] for frame in frames[:3]]


def test_multi_packet_refused(port, ctx):
    """With inline headers; an SQ that was not made for it; a packet that is too short, behind one that was sent."""
    frame = bytes(port.l2 / V4 / UDP())
    port.sq.post(eth(frame[:18]), port.put(0, frame[18:]), opcode=MPSW)
    fails(port, Syndrome.LOCAL_QP_OP, Reason.WQE_MALFORMED)
    port.sq.post(eth(), port.put(0, frame), port.put(100, b"short"), port.put(200, frame), opcode=MPSW)
    fails(port, Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)
    assert port.frames(1) == [frame]
    plain = Sq(port.make, Cq(port.make))
    plain.post(eth(), port.put(0, frame), opcode=MPSW)
    assert error_of(plain.done()[0]) == (Syndrome.LOCAL_QP_OP, Reason.WQE_OPCODE)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_multi_packet_with_an_inline_packet_of_no_bytes(port, place):
    """It is refused like any that is too short, and no packet of its WQE leaves."""
    frame = bytes(port.l2 / V4 / UDP())
    parts = [inlined(frame), port.put(0, frame)]
    parts.insert(place, inlined(b""))
    port.sq.post(eth(), *parts, opcode=MPSW)
    fails(port, Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)
    port.sq.post(eth(), *parts[:place], *parts[place + 1 :], opcode=MPSW)
    assert port.frames(2) == [frame] * 2


# --- WAIT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [-10_000, -1, 0, 1, 40])
@pytest.mark.parametrize("ts_format", TimestampFormat)
def test_wait_for_a_time(ctx, ahead_ms, ts_format):
    """What is behind it in the queue is not sent before that time. Times that have passed do not wait."""
    port = Port(ctx, ts_format=ts_format)
    cycles = ts_format == TimestampFormat.FREE_RUNNING
    clock = time.monotonic_ns if cycles else time.time_ns
    frame = bytes(port.l2 / V4 / UDP())
    due = clock() + ahead_ms * 1_000_000
    segment = wait_time(due, WAIT_MASK) if cycles else wait_time(stamp(due))
    port.sq.write(segment, opcode=WAIT, opmod=TIME, ask=0)
    port.sq.post(eth(), port.put(0, frame))
    (cqe,) = port.sq.done()
    assert opcode_of(cqe) == CqeOpcode.REQ
    assert clock() >= due
    assert port.frames(1) == [frame]
    sent = int(cqe["timestamp"])
    assert due <= (sent if cycles else (sent >> 32) * 10**9 + (sent & 0xFFFF_FFFF)) <= clock()


def test_one_queue_waits_for_a_time_and_another_goes_on(port):
    """Also after the first was reset."""
    other = Sq(port.make, Cq(port.make))
    frame = bytes(port.l2 / V4 / UDP())
    port.sq.post(wait_time(stamp(time.time_ns() + 3 * 10**9)), opcode=WAIT, opmod=TIME)
    other.post(eth(), port.put(0, frame))
    assert opcode_of(other.done()[0]) == CqeOpcode.REQ
    assert port.frames(1) == [frame]
    assert port.sq.cq.take() == []
    port.sq.modify(QueueState.RDY, QueueState.RST)
    port.sq.record[1] = port.sq.pi = 0
    port.sq.modify(QueueState.RST, QueueState.RDY)
    assert port.send(eth(), port.put(0, frame)) == frame


def test_wait_too_far(port):
    port.sq.post(wait_time(stamp(time.time_ns() + 5 * 10**9)), opcode=WAIT, opmod=TIME)
    fails(port, Syndrome.LOCAL_QP_OP, Reason.WAIT_TOO_FAR)
    assert "but 4 s is the most" in port.nic.reports[-1].message


@pytest.mark.parametrize("segment, opmod", [
    (wait_time(0, operation=2), TIME), (wait_time(0, mask=1), TIME), (wait_time(0), WaitMode.DATA), (wait_time(0), 9),
])
def test_wait_refused(port, segment, opmod):
    port.sq.post(segment, opcode=WAIT, opmod=opmod)
    fails(port, Syndrome.LOCAL_QP_OP, Reason.WAIT_MODE)


def test_wait_of_another_length(port):
    port.sq.post(wait_time(0), bytes(16), opcode=WAIT, opmod=TIME)
    fails(port, Syndrome.LOCAL_QP_OP, Reason.WQE_MALFORMED)


def test_send_scheduling_is_off():
    with opened(port=PortConfig(send_scheduling=False)) as ctx:
        port = Port(ctx)
        port.sq.post(wait_time(0), opcode=WAIT, opmod=TIME)
        fails(port, Syndrome.LOCAL_QP_OP, Reason.WAIT_MODE)
        assert "PortConfig.send_scheduling" in port.nic.reports[-1].message


def test_wait_for_a_cq(ctx):
    """A core-direct SQ waits for the completion of another; others may not."""
    port = Port(ctx, cd_master=1)
    other = Sq(port.make, Cq(port.make))
    frames = [bytes(port.l2 / V4 / UDP(sport=n)) for n in range(2)]
    port.sq.write(wait_cq(other.cq.made.number, 0), opcode=WAIT, ask=0)
    port.sq.post(eth(), port.put(0, frames[0]))
    other.post(eth(), port.put(200, frames[1]))
    assert opcode_of(port.sq.done()[0]) == CqeOpcode.REQ
    assert port.frames(2) == frames[::-1]
    other.done()
    other.post(wait_cq(port.sq.cq.made.number, 0), opcode=WAIT)
    assert error_of(other.done()[0]) == (Syndrome.LOCAL_QP_OP, Reason.WQE_OPCODE)


def test_wait_for_a_cq_where_a_send_has_failed(ctx):
    """The packet behind the WAIT is not sent."""
    port = Port(ctx, cd_master=1)
    other = Sq(port.make, Cq(port.make))
    frame = bytes(port.l2 / V4 / UDP(sport=1))
    other.post(bytes(16), opcode=TSO)
    assert error_of(other.done()[0])[0] == Syndrome.LOCAL_QP_OP
    port.sq.write(wait_cq(other.cq.made.number, 0), opcode=WAIT)
    port.sq.post(eth(), port.put(0, frame))
    assert error_of(port.sq.done()[0]) == (Syndrome.WR_FLUSH, Reason.WAIT_FAILED)
    until(lambda: port.sq.state == QueueState.ERR, "the SQ to fail")
    assert not port.nic.sqs[port.sq.number]["frames"]


# --- random programs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_port() -> Iterator[Port]:
    with opened(port=PortConfig(mtu=1500)) as ctx:
        yield Port(ctx, receives=1 << 12, room=1536, log=4, allow_multi_pkt_send_wqe=1)


@settings(max_examples=15)
@given(steps(most_payload=900))
def test_random_programs(long_port, steps):
    """Around a ring of 16 blocks, again and again."""
    program = Program(long_port, long_port.l2)
    program.run(steps)
    assert long_port.frames(len(program.expected)) == program.expected
