"""Traffic class and hop limit of a path, in the headers of its packets: as others see them, on each kind of wire."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet
from scapy.utils import rdpcap

from gpunetio import LinkLayer, verbs
from gpunetio.enums import AddrType, QpType, WrOpcode
from gpunetio.formats.packet import GRH, LRH, ROCE_UDP_PORT
from gpunetio.nic.control.port import PortConfig
from gpunetio.verbs import PD, QP, AhAttr, QpEndpoint, SendWr
from nic_rig import REQ, SEND, Buffer, Queue, connect
from pcap_rig import records

CLASS, HOPS = 0x68, 33  # DSCP 26
TRAFFIC = {"traffic_class": CLASS, "hop_limit": HOPS}
OWN, PEER = "127.0.0.79", "127.0.0.78"
IP_RECVTTL = 12


def gid_of(address: str) -> bytes:
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address)
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)


def send(pd: PD, address: str, nbytes: int) -> QP:
    """Connect a queue pair to somebody who answers nothing, and send."""
    qp = pd.create_qp(sq_wr=16, max_inline_data=nbytes, send_cq=pd.ctx.create_cq(16))
    qp.connect(QpEndpoint(17, gid_of(address), 0, 256), ack_timeout=0, **TRAFFIC)
    qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes(nbytes)))
    return qp


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    """Whoever takes RoCE v2 at another address, and asks the kernel for what the headers said."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind((PEER, ROCE_UDP_PORT))
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        opened.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        opened.settimeout(20)
        yield opened


def traffic_of_next(peer: socket.socket) -> dict[int, int]:
    """What the kernel says of the next datagram."""
    return {kind: data[0] for _, kind, data in peer.recvmsg(2048, 256)[1]}


@pytest.mark.parametrize("packets", [1, 3])
def test_over_udp(peer, packets):
    """One packet is a message of its own; several share one (UDP_SEGMENT)."""
    with verbs.open("soft0", port=PortConfig(wire="udp", addresses=OWN)) as ctx:
        send(ctx.create_pd(), PEER, 256 * packets)
        for _ in range(packets):
            assert traffic_of_next(peer) == {socket.IP_TOS: CLASS, socket.IP_TTL: HOPS}


def test_a_datagram_over_udp(peer):
    """Its address handle has the path."""
    with verbs.open("soft0", port=PortConfig(wire="udp", addresses=OWN)) as ctx:
        pd = ctx.create_pd()
        qp = pd.create_qp(qp_type=QpType.UD, sq_wr=4, max_inline_data=8, send_cq=ctx.create_cq(4))
        qp.to_rts(qkey=7)
        for traffic in (TRAFFIC, {"traffic_class": 0, "hop_limit": 0}):
            ah = pd.create_ah(AhAttr(gid=gid_of(PEER), **traffic))
            qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes(8), ah=ah, remote_qpn=17, remote_qkey=7))
            found = traffic_of_next(peer)
            assert found == {socket.IP_TOS: traffic["traffic_class"], socket.IP_TTL: traffic["hop_limit"] or 64}


def traffic_in(packet: Packet) -> tuple[int, int]:
    assert packet[UDP].dport == ROCE_UDP_PORT
    return (packet[IP].tos, packet[IP].ttl) if IP in packet else (packet[IPv6].tc, packet[IPv6].hlim)


@pytest.mark.parametrize("addresses", [("10.97.0.1", "10.97.0.2"), ("fd00:97::1", "fd00:97::2")], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("ethernet", [False, True], ids=["pipes", "Ethernet"])
def test_captures_of_both_ends(tmp_path, addresses, ethernet):
    """Between two NICs of a process, only captures have IP headers. On Ethernet wires, the frames have them."""
    paths, ends = [tmp_path / "a.pcap", tmp_path / "b.pcap"], (tmp_path / "a", tmp_path / "b")
    wires = [f"dgram:{here},{there}" if ethernet else "auto" for here, there in (ends, ends[::-1])]
    exchange(paths, [{"addresses": own, "wire": wire} for own, wire in zip(addresses, wires, strict=True)])
    for path in paths:
        packets = [packet for packet in rdpcap(str(path)) if UDP in packet]
        assert len(packets) == 2
        assert [traffic_in(packet) for packet in packets] == [(CLASS, HOPS)] * 2


def test_global_routes_of_infiniband(tmp_path):
    paths = [tmp_path / "a.pcap", tmp_path / "b.pcap"]
    exchange(paths, [{"link_layer": LinkLayer.INFINIBAND}] * 2, addr_type=AddrType.IB_GRH)
    for path in paths:
        for record in records(path):
            grh = record[16 + LRH.size :]
            assert (grh[0] << 4 & 0xF0 | grh[1] >> 4, grh[GRH.hop_limit]) == (CLASS, HOPS)


def exchange(paths: list[Path], ports: list[dict[str, Any]], **path: Any) -> None:
    """Send a message between two NICs that capture, on a path with a traffic class both ways."""
    with contextlib.ExitStack() as stack:
        contexts = [
            stack.enter_context(verbs.open(f"soft{i}", port=PortConfig(capture=str(paths[i]), **ports[i])))
            for i in range(2)
        ]
        a, b = (Queue(ctx.create_pd()) for ctx in contexts)
        connect(a, b, ack_timeout=19, retry_cnt=7, **TRAFFIC, **path)  # nothing is sent twice on a slow machine
        memory = Buffer(a.qp.pd, 64)
        b.receive(Buffer(b.qp.pd, 64).at())
        a.post(SEND, memory.at())
        assert a.done.next().opcode == REQ
