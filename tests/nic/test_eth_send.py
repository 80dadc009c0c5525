"""Send queues of Ethernet packets: which frames leave the NIC. scapy is the judge of headers and checksums."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether

from eth_receive_rig import Cq, Rq, lead, opened, remove_rules
from eth_send_rig import CHECKSUMS, Port, Sq, error_of, eth, inlined, opcode_of, pointer, recover
from gpunetio import PortConfig, verbs
from gpunetio.eth import query_caps
from gpunetio.formats.cqe import CqeOpcode, Syndrome
from gpunetio.formats.ethernet_queues import VPORT_FRAMING, QueueState
from gpunetio.formats.events import EQE, EventQueueType, EventType
from gpunetio.formats.wqe import CtrlFlags, WqeOpcode
from gpunetio.nic.state.reasons import Reason
from nic_rig import until

RST, RDY, ERR = QueueState.RST, QueueState.RDY, QueueState.ERR


@pytest.fixture
def ctx() -> Iterator[verbs.Context]:
    with opened() as ctx:
        yield ctx


@pytest.fixture
def port(ctx) -> Port:
    return Port(ctx)


def test_a_packet(port):
    frame = bytes(port.l2 / IP() / UDP() / b"payload")
    assert port.send(eth(), port.put(0, frame)) == frame


@pytest.mark.parametrize("how", ["register", "uar", "record"])
def test_doorbells(port, how):
    frame = bytes(port.l2 / IP() / UDP() / how.encode())
    assert port.send(eth(), port.put(0, frame), how=how) == frame


@pytest.mark.parametrize("inline", [1, 2, 3, 14, 18, 34, 42, 90])
def test_inline_headers(port, inline):
    """The first bytes are in the WQE, the rest is where data segments say: far away, or in the WQE, too."""
    frame = bytes(port.l2 / IP() / UDP() / bytes(range(200)))
    head, rest = frame[:inline], frame[inline:]
    cut = len(rest) // 3
    parts = [port.put(0, rest[:cut]), inlined(rest[cut : 2 * cut]), port.put(1000, rest[2 * cut :])]
    assert port.send(eth(head), *parts) == frame
    assert port.send(eth(frame)) == frame


def test_a_packet_of_many_pieces(port):
    """A WQE has up to 61 data segments; it wraps around the end of the ring; the first bytes may be in pieces, too."""
    frame = bytes(port.l2 / IP() / UDP() / bytes(range(79)))
    for _ in range(9):
        port.put(0, frame)
        pieces = [pointer(*port.out.at(i, 1)) for i in range(60)]
        assert port.send(eth(), *pieces, pointer(*port.out.at(60, len(frame) - 60))) == frame


def test_completions_on_request(port):
    """Only the last of four asks for a CQE, which stands for all."""
    frames = [bytes(port.l2 / IP() / UDP() / bytes([n])) for n in range(4)]
    for n, frame in enumerate(frames):
        port.sq.write(eth(), port.put(100 * n, frame), ask=CtrlFlags.CQ_UPDATE if n == 3 else 0)
    port.sq.ring()
    assert port.frames(4) == frames
    (cqe,) = port.sq.done()
    assert (int(cqe["wqe_counter"]), int(cqe["sop_drop_qpn"])) == (3, WqeOpcode.SEND << 24 | port.sq.number)
    assert port.sq.cq.take() == []


def test_nop(port):
    port.sq.post(opcode=WqeOpcode.NOP)
    (cqe,) = port.sq.done()
    assert opcode_of(cqe) == CqeOpcode.REQ
    assert port.nic.counters["tx_frames"] == 0


# --- offloads --------------------------------------------------------------------------------------------------------


def spoiled(packet: Any, damage: dict[Any, dict[str, int]]) -> bytes:
    """The packet with these fields, whatever they should be."""
    copy = packet.copy()
    for layer, fields in damage.items():
        for name, value in fields.items():
            setattr(copy[layer], name, value)
    return bytes(copy)


L3 = [IP(src="192.0.2.1", dst="192.0.2.2"), IP(src="10.0.0.1", dst="10.9.8.7", options=b"\1\1\1\0"),
      IPv6(src="2001:db8::1", dst="2001:db8::2")]
L4 = [UDP(sport=1, dport=2), TCP(sport=3, dport=4, options=[("MSS", 1460)])]


@pytest.mark.parametrize("l3", L3, ids=["ipv4", "options", "ipv6"])
@pytest.mark.parametrize("l4", L4, ids=["udp", "tcp"])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5])
def test_checksums(port, l3, l4, payload):
    """Whatever was in their place, they are right."""
    packet = port.l2 / l3 / l4 / payload
    damage: dict[Any, dict[str, int]] = {type(l4): {"chksum": 0xDEAD}}
    if isinstance(l3, IP):
        damage[IP] = {"chksum": 0xBEEF}
    frame = spoiled(packet, damage)
    assert port.send(eth(flags=CHECKSUMS), port.put(0, frame)) == bytes(packet)
    assert port.send(eth(frame[:18], flags=CHECKSUMS), port.put(0, frame[18:])) == bytes(packet)
    assert port.send(eth(), port.put(0, frame)) == frame


def test_one_checksum_of_two(port):
    packet = port.l2 / IP() / UDP() / b"abc"
    frame = spoiled(packet, {IP: {"chksum": 1}, UDP: {"chksum": 2}})
    assert port.send(eth(flags=0x40), port.put(0, frame)) == spoiled(packet, {UDP: {"chksum": 2}})
    assert port.send(eth(flags=0x80), port.put(0, frame)) == spoiled(packet, {IP: {"chksum": 1}})


def test_a_sum_of_zero(port):
    """UDP sends 0xFFFF then, because 0 means that there is none (RFC 768); TCP sends 0."""
    for l4 in L4:
        bare = Ether(bytes(port.l2 / L3[0] / l4 / b"\0\0"))
        missing = bare[type(l4)].chksum
        frame = bytearray(bytes(bare))
        frame[-2:] = missing.to_bytes(2, "big")
        sent = Ether(port.send(eth(flags=CHECKSUMS), port.put(0, bytes(frame))))
        assert sent[type(l4)].chksum == (0xFFFF if isinstance(l4, UDP) else 0)


@pytest.mark.parametrize(
    "packet",
    [
        IP(frag=3) / UDP(), IP(flags="MF") / UDP(), IP(len=9) / UDP(), IP() / UDP(len=3), IP() / UDP(len=900),
        IPv6() / b"x", b"\1\2\3\4",
    ],
    ids=str,
)
def test_nothing_to_compute(port, packet):
    """Fragments, other protocols and damaged headers have no checksum of TCP or UDP that could be computed."""
    frame = bytes(port.l2 / packet)
    assert port.send(eth(flags=0x80), port.put(0, frame)) == frame


@pytest.mark.parametrize("service", [False, True])
def test_vlan_insertion(port, service):
    """The tag is inserted before checksums are computed."""
    packet = port.l2 / IP() / UDP() / b"tagged"
    tag = Dot1AD if service else Dot1Q
    tagged = Ether(src=port.l2.src, dst=port.mac) / tag(prio=5, vlan=0x123) / IP() / UDP() / b"tagged"
    frame = spoiled(packet, {IP: {"chksum": 1}, UDP: {"chksum": 2}})
    segment = eth(flags=CHECKSUMS, vlan=5 << 13 | 0x123, service=service)
    assert port.send(segment, port.put(0, frame)) == bytes(tagged)


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(port: Port, syndrome: int, reason: Reason) -> None:
    """The next CQE is this error, and nothing was sent. The SQ recovers by RST."""
    (cqe,) = port.sq.done()
    assert error_of(cqe) == (syndrome, reason)
    assert port.sq.state == ERR
    assert port.nic.counters["tx_frames"] == 0
    assert f"SQ {port.sq.number:#x}, " in port.nic.reports[-1].message
    with pytest.raises(Exception, match="in state ERR"):
        port.sq.modify(RDY, RST)
    recover(port)
    frame = bytes(port.l2 / IP() / UDP())
    assert port.send(eth(), port.put(0, frame)) == frame


def test_refused_opcode(port):
    port.sq.post(eth(), port.put(0, bytes(60)), opcode=WqeOpcode.RDMA_WRITE)
    refused(port, Syndrome.LOCAL_QP_OP, Reason.WQE_OPCODE)


def test_refused_key(port):
    port.sq.post(eth(), pointer(port.out.memory.address, port.out.region.lkey ^ 0x1200, 60))
    refused(port, Syndrome.LOCAL_PROT, Reason.LKEY_UNKNOWN)


def test_refused_bounds(port):
    port.sq.post(eth(), pointer(port.out.memory.address - 1, port.out.region.lkey, 60))
    refused(port, Syndrome.LOCAL_PROT, Reason.LKEY_BOUNDS)


def test_refused_key_of_another_pd(port):
    other = port.ctx.create_pd().register(port.out.memory)
    port.sq.post(eth(), pointer(port.out.memory.address, other.lkey, 60))
    refused(port, Syndrome.LOCAL_PROT, Reason.LKEY_PD)


@pytest.mark.parametrize("nbytes", [0, 13, 65536])
def test_refused_length(port, nbytes):
    segments = [pointer(port.out.memory.address, port.out.region.lkey, nbytes)] if nbytes else []
    port.sq.post(eth(), *segments)
    refused(port, Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)


def test_refused_byte_count_of_0(port):
    port.sq.post(eth(), pointer(port.out.memory.address, port.out.region.lkey, 0))
    refused(port, Syndrome.LOCAL_LENGTH, Reason.LENGTH)


def test_refused_inner_checksums(port):
    port.sq.post(eth(flags=0x20), port.put(0, bytes(60)))
    refused(port, Syndrome.LOCAL_QP_OP, Reason.CHECKSUM_FLAGS)


@pytest.mark.parametrize("ds", [1, 2, 63])
def test_refused_ds(port, ds):
    """Too short for the Ethernet segment or for its inline headers, or behind what was announced."""
    port.sq.post(eth(bytes(34)), ds=ds)
    refused(port, Syndrome.LOCAL_QP_OP, Reason.WQE_MALFORMED)


def test_refused_number_of_another_queue(port):
    port.sq.post(eth(), port.put(0, bytes(60)), sqn=port.sq.number + 1)
    refused(port, Syndrome.LOCAL_QP_OP, Reason.WQE_QPN)


def test_refused_doorbell(port):
    port.sq.ring(index=1000)
    refused(port, Syndrome.LOCAL_QP_OP, Reason.DOORBELL_RANGE)


def test_the_mtu():
    """A VLAN tag does not count."""
    with opened(port=PortConfig(mtu=500)) as ctx:
        port = Port(ctx)
        frame = bytes(port.l2 / IP() / UDP() / bytes(500 - 28))
        assert port.send(eth(), port.put(0, frame)) == frame
        tagged = port.send(eth(vlan=7), port.put(0, frame))
        assert tagged == frame[:12] + b"\x81\0\0\7" + frame[12:]
        assert port.send(eth(), port.put(0, tagged)) == tagged
        port.sq.post(eth(), port.put(0, frame + b"x"))
        (cqe,) = port.sq.done()
        assert error_of(cqe) == (Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)
        assert "the packet has 515 bytes, but the port sends 14 to 514" in port.nic.reports[-1].message


def test_the_largest_mtu():
    """What the port says is what it sends, although the wire has room for one byte more."""
    with opened(port=PortConfig(mtu=65536)) as ctx:
        port, mtu = Port(ctx, receives=2, room=1 << 17), query_caps(ctx).mtu
        assert mtu == 0xFFFF - VPORT_FRAMING
        frame = bytes(port.l2) + bytes(mtu)
        assert port.send(eth(), port.put(0, frame)) == frame
        port.sq.post(eth(), port.put(0, frame + b"x"))
        assert error_of(port.sq.done()[0]) == (Syndrome.LOCAL_LENGTH, Reason.FRAME_LENGTH)


MODES = {1: 14, 2: 34, 3: 42}  # min_wqe_inline_mode: headers of a UDP packet that it wants


@pytest.mark.parametrize("mode", MODES)
def test_min_wqe_inline_mode(ctx, mode):
    port = Port(ctx, min_wqe_inline_mode=mode)
    frame, needed = bytes(port.l2 / IP() / UDP() / b"payload"), MODES[mode]
    assert port.send(eth(frame[:needed]), port.put(0, frame[needed:])) == frame
    port.sq.post(eth(frame[: needed - 1]), port.put(0, frame[needed - 1 :]))
    (cqe,) = port.sq.done()
    assert error_of(cqe) == (Syndrome.LOCAL_QP_OP, Reason.INLINE_HEADERS)
    recover(port)
    port.sq.post(eth(vlan=1), port.put(0, frame))
    (cqe,) = port.sq.done()
    assert error_of(cqe) == (Syndrome.LOCAL_QP_OP, Reason.INLINE_HEADERS)


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", [0, 1])
def test_what_follows_an_error(ctx, flush):
    """It is flushed, or stays without completions, as flush_in_error_en says. So is what is posted in ERR."""
    port = Port(ctx, flush_in_error_en=flush)
    port.sq.write(eth(), opcode=WqeOpcode.RDMA_WRITE, ask=0)
    port.sq.write(eth(), port.put(0, bytes(60)), ask=0)
    port.sq.post(eth(), port.put(0, bytes(60)))
    first, *rest = port.sq.done(1 + 2 * flush)
    assert error_of(first) == (Syndrome.LOCAL_QP_OP, Reason.WQE_OPCODE)
    assert [error_of(cqe) for cqe in rest] == [(Syndrome.WR_FLUSH, Reason.FLUSH)] * 2 * flush
    port.sq.post(eth(), port.put(0, bytes(60)))
    if flush:
        assert error_of(port.sq.done()[0]) == (Syndrome.WR_FLUSH, Reason.FLUSH)
    recover(port)
    frame = bytes(port.l2 / IP() / UDP())
    assert port.send(eth(), port.put(0, frame)) == frame


def test_states_by_command(port):
    """In RST nothing is sent, and what was posted before is forgotten; RDY to ERR flushes what comes."""
    port.sq.modify(RDY, RST)
    port.sq.post(eth(), port.put(0, bytes(60)))
    port.nic.engine.synchronize()
    assert int(port.sq.row["sq_pi"]) == 0
    port.sq.record[1] = port.sq.pi = 0
    port.sq.modify(RST, RDY)
    port.sq.modify(RDY, ERR)
    port.sq.post(eth(), port.put(0, bytes(60)))
    assert error_of(port.sq.done()[0]) == (Syndrome.WR_FLUSH, Reason.FLUSH)
    assert port.sq.state == ERR


def test_a_queue_that_is_destroyed_sends_no_more(port):
    port.sq.made.close()
    port.sq.ring(index=3)
    port.sq.uar[0] = 3 << 40 | port.sq.number << 8
    port.nic.engine.synchronize()
    assert port.nic.counters["tx_frames"] == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_a_full_cq(port, wanted):
    """It fails the SQ, and nothing else. An event tells of that, if it is subscribed to, because no CQE can."""
    small = Cq(port.make, log=1)
    sq = Sq(port.make, small)
    provider = port.ctx.provider
    channel = provider.create_event_channel()
    kind = EventType.WQ_CATAS_ERROR if wanted else EventType.SQ_DRAINED
    provider.subscribe(channel, sq.made.devx_handle, [kind], 55)
    frame = bytes(port.l2 / IP() / UDP())
    for _ in range(3):
        sq.post(eth(), port.put(0, frame))
    until(lambda: sq.state == ERR, "the failure")
    assert f"SQ {sq.number:#x}, SEND at index 2: CQ" in port.nic.reports[-1].message
    assert port.frames(3) == [frame] * 3
    assert port.send(eth(), port.put(0, frame)) == frame
    event = provider.get_event(channel)
    if wanted:
        assert (event.cookie, event.type, event.number) == (55, EventType.WQ_CATAS_ERROR, sq.number)
        assert np.frombuffer(event.eqe, EQE.dtype)[0]["queue_type"] == EventQueueType.SQ
    else:
        assert event is None
    provider.destroy_event_channel(channel)


def test_a_full_cq_of_a_receive_queue(port):
    """The event of an RQ."""
    small = Cq(port.make, log=0)
    rq = Rq(port.make, small, log=2)
    for n in range(4):
        rq.post(port.inbox.at(n * 2048, 2048))
    provider = port.ctx.provider
    channel = provider.create_event_channel()
    provider.subscribe(channel, rq.made.devx_handle, [EventType.WQ_CATAS_ERROR], 56)
    remove_rules(port.ctx)
    lead(port.ctx, port.make.direct(port.domain.number, rq.made.number).number)
    for _ in range(2):
        port.sq.post(eth(), port.put(0, bytes(port.l2 / IP() / UDP())))
        port.sq.done()
    assert rq.state == ERR
    event = provider.get_event(channel)
    assert (event.cookie, event.type, event.number) == (56, EventType.WQ_CATAS_ERROR, rq.made.number)
    assert np.frombuffer(event.eqe, EQE.dtype)[0]["queue_type"] == EventQueueType.RQ
    provider.destroy_event_channel(channel)


# --- which queues of the port get a frame ----------------------------------------------------------------------------


def test_frames_to_others_do_not_come_back(port):
    frame = bytes(Ether(src=port.mac, dst="02:00:00:00:00:06") / IP() / UDP())
    port.sq.post(eth(), port.put(0, frame))
    port.sq.done()
    assert (port.nic.counters["tx_frames"], port.nic.counters["rx_frames"]) == (1, 0)


@pytest.mark.parametrize("group", ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01"])
def test_frames_to_groups_come_back(port, group):
    frame = bytes(Ether(src=port.mac, dst=group) / IP() / UDP())
    assert port.send(eth(), port.put(0, frame)) == frame


@pytest.mark.parametrize("dst, block", [("own", 1), ("ff:ff:ff:ff:ff:ff", 2)])
def test_self_lb_block(port, dst, block):
    """A TIR drops what SQs of its own transport domain send, if it is to."""
    frame = bytes(Ether(src=port.mac, dst=port.mac if dst == "own" else dst) / IP() / UDP())
    for bits, comes in ((3 ^ block, 1), (block, 0)):
        remove_rules(port.ctx)
        tir = port.make.direct(port.sq.domain.number, port.rq.made.number, self_lb_block=bits)
        lead(port.ctx, tir.number)
        port.sq.post(eth(), port.put(0, frame))
        port.sq.done()
        assert len(port.arrived.take()) == comes
    assert port.nic.counters["rx_frame_own"] == 1


def test_own_frames_without_a_rule(port):
    remove_rules(port.ctx)
    for dst in (port.mac, "ff:ff:ff:ff:ff:ff"):
        port.sq.post(eth(), port.put(0, bytes(Ether(src=port.mac, dst=dst) / IP() / UDP())))
        port.sq.done()
    counters = port.nic.counters
    assert (counters["rx_frames"], counters["rx_frame_own"], counters["tx_frames"]) == (1, 1, 2)


def test_the_link_is_down(port):
    port.nic.set_link(False)
    port.sq.post(eth(), port.put(0, bytes(port.l2 / IP() / UDP())))
    assert opcode_of(port.sq.done()[0]) == CqeOpcode.REQ
    port.nic.set_link(True)
    assert (port.nic.counters["tx_frame_link_down"], port.nic.counters["rx_frames"]) == (1, 0)
