"""The UDP port that packets of a queue pair leave from."""

import socket
from collections.abc import Iterator

import pytest

from gpunetio import verbs
from gpunetio.enums import LinkLayer, WrOpcode
from gpunetio.errors import DriverError, InvalidValueError, NotSupportedError
from gpunetio.fabric import udp
from gpunetio.formats.packet import ROCE_UDP_PORT
from gpunetio.nic.engine.port import PortConfig
from gpunetio.verbs import QP, QpEndpoint, SendWr
from nic_rig import until

PEER = "127.0.0.77"
PEER_GID = bytes(10) + b"\xff\xff" + socket.inet_aton(PEER)


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    """Whoever takes RoCE v2 at another address, and answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind((PEER, ROCE_UDP_PORT))
        opened.settimeout(20)
        yield opened


@pytest.fixture
def pd() -> Iterator[verbs.PD]:
    with verbs.open("soft0", port=PortConfig(wire="udp")) as ctx:
        yield ctx.create_pd()


def connected(pd: verbs.PD, qpn: int = 17) -> QP:
    qp = pd.create_qp(sq_wr=16, send_cq=pd.ctx.create_cq(16))
    qp.connect(QpEndpoint(qpn, PEER_GID, 0, 1024), ack_timeout=0)
    return qp


def port_of_next(qp: QP, peer: socket.socket) -> int:
    qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=b"from where"))
    return peer.recvfrom(2048)[1][1]


def test_packets_leave_from_the_port_that_was_chosen(pd, peer):
    qp, other = connected(pd), connected(pd, 18)
    assert port_of_next(qp, peer) == ROCE_UDP_PORT
    qp.modify_udp_sport(50_000)
    assert port_of_next(qp, peer) == 50_000
    assert port_of_next(other, peer) == ROCE_UDP_PORT
    other.modify_udp_sport(50_000)
    assert port_of_next(other, peer) == 50_000
    qp.modify_udp_sport(50_001)
    assert port_of_next(qp, peer) == 50_001


def test_a_packet_from_such_a_port_has_the_right_icrc(peer):
    """Two of our own: the receiver would drop it."""
    port = PortConfig(wire="udp")
    with verbs.open("soft0", port=port) as here, verbs.open("soft1", port=port) as there:
        cq = here.create_cq(16)
        a = here.create_pd().create_qp(sq_wr=16, send_cq=cq)
        b = there.create_pd().create_qp(rq_wr=16, receive_cq=there.create_cq(16))
        a.connect(b)
        a.modify_udp_sport(50_000)
        a.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE))
        found: list[verbs.Completion] = []
        until(lambda: bool(found.extend(cq.poll()) or found), "the acknowledgement")
        assert found[0].status.name == "SUCCESS"
        assert there.provider.nic.counters["rx_icrc_encapsulated"] == 0  # type: ignore[attr-defined]


def test_a_reset_forgets_it(pd, peer):
    qp = connected(pd)
    qp.modify_udp_sport(50_000)
    qp.reset()
    qp.connect(QpEndpoint(17, PEER_GID, 0, 1024), ack_timeout=0)
    assert port_of_next(qp, peer) == ROCE_UDP_PORT


@pytest.mark.parametrize("port", [0, ROCE_UDP_PORT, 0xBFFF, 0x10000])
def test_ports_that_are_none_for_a_source(pd, port):
    with pytest.raises(InvalidValueError, match=f"port = {port}"):
        connected(pd).modify_udp_sport(port)


def test_a_port_that_somebody_has(pd):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 50_002))
        with pytest.raises(DriverError, match="50002 is taken"):
            connected(pd).modify_udp_sport(50_002)


def test_ports_that_nobody_uses_make_room(pd, peer, monkeypatch):
    monkeypatch.setattr(udp, "EGRESSES", udp.GID_TABLE + 2)
    qp, other = connected(pd), connected(pd, 18)
    for port in range(50_010, 50_016):
        qp.modify_udp_sport(port)
        assert port_of_next(qp, peer) == port
    other.modify_udp_sport(50_020)
    with pytest.raises(DriverError, match="ports are in use"):
        connected(pd, 19).modify_udp_sport(50_021)


def test_infiniband_has_no_udp():
    with verbs.open("soft0", port=PortConfig(link_layer=LinkLayer.INFINIBAND)) as ctx:
        qp = ctx.create_pd().create_qp(sq_wr=16, send_cq=ctx.create_cq(16))
        with pytest.raises(NotSupportedError, match="UDP source port"):
            qp.modify_udp_sport(50_000)
