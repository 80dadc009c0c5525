"""UD: a packet for each message, to whatever address its WQE names, and nothing acknowledged (IBTA 9.8.3)."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpunetio import verbs
from gpunetio.enums import QpAttrMask, QpState, QpType
from gpunetio.nic.state.counters import PACKET_FATES
from gpunetio.nic.state.reasons import Reason
from gpunetio.verbs import AhAttr
from nic_rig import (
    LOCAL_LENGTH,
    LOCAL_QP_OP,
    REQ,
    RESP_SEND,
    RESP_SEND_IMM,
    SEND,
    SEND_IMM,
    WRITE,
    Queue,
    error_of,
    inline,
    raddr,
    until,
)
from transport_rig import (
    PEER_GID,
    PEER_QPN,
    PSNS,
    SEND_FIRST,
    SEND_ONLY,
    SEND_ONLY_IMM,
    UD,
    WRITE_ONLY,
    Lab,
    Packet,
    players,
)

QKEY, OWN, PSN, MTU = 0x0BADCAFE, 0x8000_0000, PSNS - 2, 4096
GRH = 40
IPV4 = struct.Struct(">BBHHHBBH4s4s")


class Datagrams:
    """A UD queue pair of the lab's NIC, and the rest of the world by hand. `psn` numbers the NIC's packets."""

    def __init__(self, lab: Lab, recv_cq: int = 256, qp_type: QpType = QpType.UD):
        self.lab, self.psn = lab, PSN
        self.queue = Queue(lab.pd, 64, 16, recv_cq=lab.ctx.create_cq(recv_cq), qp_type=qp_type)
        self.qpn = self.queue.qp.qpn
        self.queue.qp.to_rts(qkey=QKEY, psn=PSN)
        self.ah = lab.pd.create_ah(AhAttr(gid=PEER_GID))
        self.before = lab.counters()

    def close(self) -> None:
        self.queue.qp.close()
        self.ah.close()
        self.queue.send_cq.close()
        self.queue.recv_cq.close()

    def av(self, qkey: int = QKEY, qpn: int = PEER_QPN, av: bytes | None = None) -> bytes:
        """The address vector of a WQE."""
        return struct.pack(">III", qkey, 0, qpn | 1 << 31) + (av or self.ah.av)[12:]

    def post(self, opcode: int, *segments: bytes, **fields: Any) -> int:
        return self.queue.post(opcode, *segments, **fields)

    def completed(self, index: int) -> None:
        cqe = self.queue.done.next()
        assert (cqe.opcode, cqe.counter) == (REQ, index)

    def receive(self) -> Packet:
        """The next packet of the NIC."""
        packet = Packet.parse(until(self.lab.receive_raw, "a packet"))
        assert (packet.qpn, packet.migrated, packet.version, packet.pkey, packet.ack) == (PEER_QPN, 1, 0, 0xFFFF, 0)
        assert packet.psn == self.psn % PSNS
        self.psn += 1
        return packet

    def send(self, *packets: Packet) -> None:
        """Packets for the queue pair, unless they name another."""
        self.lab.send_raw(*(replace(packet, qpn=packet.qpn or self.qpn).build() for packet in packets))
        self.lab.settle()

    def counted(self, *names: str) -> Any:
        now = self.lab.counters()
        values = tuple(now[name] - self.before[name] for name in names)
        return values[0] if len(values) == 1 else values

    def silent(self) -> bool:
        self.lab.settle()
        return self.lab.receive_raw() is None


def datagram(payload: bytes, psn: int = 0, imm: int | None = None, qkey: int = QKEY, **fields: Any) -> Packet:
    operation = SEND_ONLY if imm is None else SEND_ONLY_IMM
    return Packet(UD | operation, psn, deth=(qkey, PEER_QPN), imm=imm, payload=payload, **fields)


@pytest.fixture
def ud(lab: Lab) -> Iterator[Callable[..., Datagrams]]:
    """Makes queue pairs for datagrams."""
    yield from players(lab, Datagrams)


# --- sending ---------------------------------------------------------------------------------------------------------


def test_each_message_is_a_packet(ud):
    """With a DETH behind the BTH, then immediate data; it completes at once (9.3.2, 9.8.3)."""
    d = ud()
    for nbytes in (0, 1, 2, 3, 4, 5, MTU - 1, MTU):
        payload = d.lab.here.bytes[:nbytes].tobytes()
        for opcode, imm in ((SEND, None), (SEND_IMM, 0xABCD1234)):
            local = (d.lab.here.at(0, nbytes),) if nbytes else ()
            index = d.post(opcode, d.av(), *local, imm=imm or 0)
            d.completed(index)
            packet = d.receive()
            assert packet.opcode == UD | (SEND_ONLY if imm is None else SEND_ONLY_IMM)
            assert packet.deth == (QKEY, d.qpn)
            assert (packet.imm, packet.payload, packet.pad) == (imm, payload, -nbytes % 4)
    assert d.silent()
    assert d.counted("rdma_tx_packets") == 16


def test_inline_and_several_segments(ud):
    d = ud()
    index = d.post(SEND, d.av(), d.lab.here.at(5, 3), inline(b"between"), d.lab.here.at(100, 50))
    d.completed(index)
    here = d.lab.here.bytes
    assert d.receive().payload == here[5:8].tobytes() + b"between" + here[100:150].tobytes()


def test_around_the_end_of_the_ring(ud):
    """A WQE of two basic blocks, the second of which is the ring's first."""
    d = ud()
    for _ in range(d.queue.qp.sq_entries - 1):
        d.completed(d.post(SEND, d.av()))
        d.receive()
    d.completed(d.post(SEND, d.av(), inline(bytes(range(90)))))
    assert d.receive().payload == bytes(range(90))


@pytest.mark.parametrize("qkey, sent", [(OWN | 5, QKEY), (0x7FFF_FFFF, 0x7FFF_FFFF), (OWN, QKEY), (0, 0)])
def test_own_q_key(ud, qkey, sent):
    """If the highest bit is set, the Q_Key is the queue pair's own (10.2.5)."""
    d = ud()
    d.post(SEND, d.av(qkey=qkey))
    assert d.receive().deth == (sent, d.qpn)


def test_solicited(ud):
    d = ud()
    index = d.queue.put(SEND, d.av())
    d.queue.sq[index * 64 + 11] |= 2
    d.queue.ring()
    assert d.receive().solicited == 1


@pytest.mark.parametrize("nbytes", [MTU + 1, 1 << 15])
def test_longer_than_a_packet(ud, nbytes):
    d = ud()
    d.post(SEND, d.av(), d.lab.here.at(0, nbytes))
    assert error_of(d.queue.done.next()) == (LOCAL_LENGTH, Reason.LENGTH)
    assert d.queue.qp.state == QpState.ERR
    assert d.silent()


@pytest.mark.parametrize("opcode", [WRITE, 0x10, 0x12, 0x2F])
def test_other_operations(ud, opcode):
    d = ud()
    d.post(opcode, d.av(), raddr(0, 0), d.lab.here.at(0, 8))
    assert error_of(d.queue.done.next()) == (LOCAL_QP_OP, Reason.WQE_OPCODE)


@pytest.mark.parametrize("segments", [(), (bytes(8) + b"\x80" + bytes(7),)])
def test_a_wqe_that_ends_in_its_address_vector(ud, segments):
    d = ud()
    d.post(SEND, *segments)
    assert error_of(d.queue.done.next()) == (LOCAL_QP_OP, Reason.WQE_MALFORMED)


def test_nobody_has_resolved_the_address(ud):
    """The datagram is lost, as in a network, and the sender does not learn that (9.8.3)."""
    d = ud()
    elsewhere = d.ah.av[:44] + bytes([10, 0, 0, 7])
    base = struct.pack(">III4x", QKEY, 0, PEER_QPN)  # without a GID, which RoCE needs
    for av in (d.av(av=elsewhere), base):
        d.completed(d.post(SEND, av, d.lab.here.at(0, 10)))
        d.psn += 1
    assert d.silent()
    assert d.counted("tx_unreachable") == 2
    d.completed(d.post(SEND, d.av()))
    d.receive()


def test_a_path_outlives_its_address_handles(ud):
    """As on a card, where a WQE with an address vector is complete."""
    d = ud()
    other = d.lab.pd.create_ah(AhAttr(gid=PEER_GID))
    av = d.av(av=other.av)
    other.close()
    d.completed(d.post(SEND, av))
    d.receive()
    d.ah.close()
    d.completed(d.post(SEND, av))
    d.receive()


def test_link_down(ud):
    d = ud()
    d.lab.nic.set_link(False)
    d.completed(d.post(SEND, d.av()))
    assert d.silent()
    d.lab.nic.set_link(True)
    assert d.counted("tx_unreachable") == 1


def test_a_full_wire_delays(ud):
    """What does not fit into the pipe waits; nothing is lost."""
    d = ud()
    count = 400
    for i in range(count):
        d.queue.put(SEND, d.av(), d.lab.here.at(i, 4000), ce=0)
        if d.queue.index % 32 == 0:
            d.queue.ring()
            until(lambda: d.queue.index - int(d.queue.row["sq_ci"]) < 32 or d.lab.fill > 1 << 19, "the NIC to send")
        if d.lab.fill > 1 << 19:
            while d.lab.fill:
                d.receive()
    d.queue.ring()
    while d.psn < PSN + count:
        assert d.receive().payload == d.lab.here.bytes[d.psn - 1 - PSN :][:4000].tobytes()


# --- receiving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imm", [None, 0xABCD1234])
def test_received(ud, imm):
    """The payload lies behind 40 bytes, the last 20 of which are an IPv4 header whose checksum is right (A17.4.5)."""
    d = ud()
    for nbytes in (0, 1, 4, 100, MTU):
        d.queue.receive(d.lab.there.at(0, GRH + MTU))
        payload = np.random.default_rng(nbytes).bytes(nbytes)
        d.send(datagram(payload, imm=imm, solicited=1))
        cqe = d.queue.arrived.next()
        assert (cqe.opcode, cqe.byte_cnt) == (RESP_SEND if imm is None else RESP_SEND_IMM, GRH + nbytes)
        assert (cqe.imm, cqe.payload) == (imm or 0, b"")
        assert d.lab.there.bytes[GRH : GRH + nbytes].tobytes() == payload
        header = d.lab.there.bytes[20:GRH].tobytes()
        length = 20 + 8 + 12 + 8 + (4 if imm is not None else 0) + nbytes + -nbytes % 4 + 4
        parts = IPV4.unpack(header)
        assert (parts[0], parts[2], parts[6]) == (0x45, length, 17)
        assert parts[8:] == (PEER_GID[12:], bytes(d.lab.nic.port.gids[0])[12:])
        total = sum(struct.unpack(">10H", header))
        assert total % 0xFFFF == 0
        assert total > 0
    assert d.counted("rx_accepted") == 5


def test_who_has_sent_it(ud):
    d = ud()
    d.queue.receive(d.lab.there.at(0, 100))
    d.send(datagram(b"x"))
    d.queue.arrived.next()
    slot = d.queue.arrived.ring[0]
    (flags,) = struct.unpack_from(">I", slot, 24)
    assert (flags & 0xFFFFFF, flags >> 28 & 3, flags >> 24 & 3) == (PEER_QPN, 1, 2)  # a GRH, which is an IPv4 header


DROPPED: list[tuple[str, Packet, str]] = [
    ("another Q_Key",       datagram(b"x", qkey=QKEY ^ 1),                                     "rx_wrong_qkey"),
    ("own Q_Key",           datagram(b"x", qkey=OWN | QKEY),                                   "rx_wrong_qkey"),
    ("another partition",   datagram(b"x", pkey=0x1234),                                       "rx_wrong_pkey"),
    ("longer than the MTU", datagram(bytes(MTU + 4)),                                          "rx_malformed"),
    ("the first of several", replace(datagram(b"abcd"), opcode=UD | SEND_FIRST),               "rx_malformed"),
    ("a WRITE",             replace(datagram(b"abcd"), opcode=UD | WRITE_ONLY, reth=(0, 0, 4)), "rx_malformed"),
    ("RC",                  replace(datagram(b"abcd"), opcode=SEND_ONLY),                      "rx_malformed"),
    ("RD",                  replace(datagram(b"abcd"), opcode=0x40 | SEND_ONLY),               "rx_malformed"),
    ("no DETH",             Packet(UD | SEND_ONLY, 0),                                         "rx_malformed"),
    ("no immediate data",   replace(datagram(b""), opcode=UD | SEND_ONLY_IMM),                 "rx_malformed"),
    ("only padding",        replace(datagram(b""), pad=3),                                     "rx_malformed"),
    ("nobody's",            datagram(b"x", qpn=0xFFFFFE),                                      "rx_no_qp"),
]


@pytest.mark.parametrize("packet, counter", [row[1:] for row in DROPPED], ids=[row[0] for row in DROPPED])
def test_dropped(ud, packet, counter):
    """In silence, with a counter, and without a receive (9.6.1.4, 9.8.3)."""
    d = ud()
    d.queue.receive(d.lab.there.at(0, 2 * MTU))
    d.send(packet)
    assert d.counted(counter, "rdma_rx_packets") == (1, 1)
    assert d.silent()
    assert d.queue.arrived.poll() is None
    assert not d.lab.there.bytes.any()
    d.send(datagram(b"next"))
    assert d.queue.arrived.next().byte_cnt == GRH + 4
    assert d.queue.qp.state == QpState.RTS


def test_without_a_receive(ud):
    d = ud()
    d.send(datagram(b"lost"))
    assert d.counted("out_of_buffer") == 1
    d.queue.receive(d.lab.there.at(0, 100))
    d.send(datagram(b"here"))
    assert d.queue.arrived.next().byte_cnt == GRH + 4


@pytest.mark.parametrize("room", [GRH + 9, 39, 1])
def test_receive_too_small(ud, room):
    """A datagram that is too long for its receive is dropped and counted: no stranger ends a UD queue pair.

    So does Linux (rxe_resp.c, RESPST_ERR_LENGTH: class D). The receive is there for the next datagram.
    """
    d = ud()
    d.queue.receive(d.lab.there.at(0, room))
    for _ in range(3):
        d.send(datagram(bytes(10)))
    assert d.counted("rx_refused", "resp_local_length_error", "resp_cqe_error") == (3, 3, 0)
    assert d.silent()
    assert d.queue.arrived.poll() is None
    assert d.queue.qp.state == QpState.RTS
    assert not d.lab.there.bytes.any()
    if room >= GRH:
        d.send(datagram(bytes(room - GRH)))
        assert d.queue.arrived.next().byte_cnt == room


def test_segments_of_a_receive(ud):
    """GRH and payload fill the receive's segments as one message."""
    d = ud()
    d.queue.receive(d.lab.there.at(0, 30), d.lab.there.at(1000, 15), d.lab.there.at(2000, 100))
    d.send(datagram(bytes(range(1, 101))))
    assert d.queue.arrived.next().byte_cnt == GRH + 100
    there = d.lab.there.bytes
    assert there[20] == 0x45
    assert there[1010:1015].tolist() == [1, 2, 3, 4, 5]
    assert there[2000:2095].tolist() == list(range(6, 101))
    assert not there[30:1000].any()


@pytest.mark.parametrize("state, taken", [(QpState.INIT, False), (QpState.RTR, True)])
def test_states(lab, state, taken):
    """Datagrams are taken from RTR on."""
    queue = Queue(lab.pd, qp_type=QpType.UD)
    queue.qp.to_init(qkey=QKEY)
    if state is QpState.RTR:
        queue.qp.modify(verbs.QpAttr(next_state=QpState.RTR), QpAttrMask.NEXT_STATE)
    queue.receive(lab.there.at(0, 100))
    before = lab.counters()["rx_wrong_state"]
    lab.send_raw(replace(datagram(b"x"), qpn=queue.qp.qpn).build())
    lab.settle()
    assert (queue.arrived.poll() is not None) == taken
    assert lab.counters()["rx_wrong_state"] - before == (not taken)
    for made in (queue.qp, queue.send_cq, queue.recv_cq):
        made.close()


def test_an_rc_queue_pair_takes_no_datagram(lab, peer):
    p = peer()
    p.queue.receive(lab.there.at(0, 100))
    p.send(datagram(b"x"))
    lab.settle()
    assert p.counted("rx_malformed") == 1


def test_the_general_services_have_a_q_key_of_their_own(ud):
    """Queue pair 1, of which a port has one (3.9.4, 10.2.5)."""
    d = ud(qp_type=QpType.GSI)
    assert d.qpn == 1
    d.queue.receive(d.lab.there.at(0, 1000))
    d.send(datagram(b"no"), datagram(b"yes", qkey=0x8001_0000))
    assert d.queue.arrived.next().byte_cnt == GRH + 3
    assert d.counted("rx_wrong_qkey") == 1
    d.post(SEND, d.av(qkey=0x8001_0000, qpn=PEER_QPN))
    assert d.receive().deth == (0x8001_0000, 1)


# --- a model ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(
    st.tuples(st.just("receive"), st.integers(0, 300)),
    st.tuples(st.just("packet"), st.integers(0, 300), st.sampled_from([QKEY, QKEY, QKEY, 7]), st.booleans()),
    st.tuples(st.just("send"), st.integers(0, 300), st.booleans()),
), max_size=40))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_datagrams(lab, steps):
    """Any sequence of receives, packets and sends has the effects of a few lines of Python."""
    d = Datagrams(lab)
    posted: list[int] = []
    accepted = 0
    try:
        for n, step in enumerate(steps):
            match step:
                case "receive", room if len(posted) < 16:
                    d.queue.receive(lab.there.at(0, GRH + room))
                    posted.append(room)
                case "packet", nbytes, qkey, with_imm:
                    payload = np.random.default_rng(n).bytes(nbytes)
                    d.send(datagram(payload, imm=n if with_imm else None, qkey=qkey))
                    if qkey != QKEY or not posted or nbytes > posted[0]:
                        assert d.queue.arrived.poll() is None
                        continue
                    cqe = d.queue.arrived.next()
                    posted.pop(0)
                    assert (cqe.byte_cnt, cqe.imm) == (GRH + nbytes, n if with_imm else 0)
                    assert lab.there.bytes[GRH : GRH + nbytes].tobytes() == payload
                    accepted += 1
                case "send", nbytes, with_imm:
                    local = (lab.here.at(n, nbytes),) if nbytes else ()
                    d.completed(d.post(SEND_IMM if with_imm else SEND, d.av(), *local, imm=n))
                    packet = d.receive()
                    assert packet.payload == lab.here.bytes[n : n + nbytes].tobytes()
                    assert packet.imm == (n if with_imm else None)
        assert d.counted("rx_accepted") == accepted
        assert d.counted("rdma_rx_packets") == sum(d.counted(*PACKET_FATES))
    finally:
        d.close()
        lab.settle()
