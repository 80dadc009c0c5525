"""Traffic class, flow label and hop limit of paths, in the headers of its packets: as others see them, on each wire."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scapy.contrib import roce
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet
from scapy.utils import rdpcap

from gpunetio import LinkLayer, verbs
from gpunetio.enums import AddrType, QpAttrMask, QpType, WrOpcode
from gpunetio.formats.packet import LRH, ROCE_UDP_PORT
from gpunetio.nic.engine.port import PortConfig
from gpunetio.verbs import PD, QP, AhAttr, QpAttr, QpEndpoint, SendWr
from lan import End, namespace, nics
from nic_rig import REQ, SEND, Buffer, Queue, connect, until
from pcap_rig import records
from udp_rig import Namespace

CLASS, HOPS, LABEL = 0x68, 33, 0xABCDE  # DSCP 26
TRAFFIC: dict[str, Any] = {"traffic_class": CLASS, "hop_limit": HOPS, "flow_label": LABEL}
OWN, PEER = "127.0.0.79", "127.0.0.78"
OWN6, PEER6 = "fd00:97::1", "fd00:97::2"
IP_RECVTTL = 12
IPV6_FLOWINFO, IPV6_FLOWLABEL_MGR = 11, 32  # linux/in6.h
IPV6_FL_A_GET, IPV6_FL_F_CREATE, IPV6_FL_S_EXCL = 0, 1, 1


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


class OverIpv6(NamedTuple):
    """A NIC in a namespace, and a socket of another address there, which asks the kernel for what the headers said."""

    where: Namespace
    end: End
    peer: socket.socket

    def send(self, nbytes: int, label: int) -> None:
        """Connect the queue pair to the socket, and send."""
        queue = self.end.queue
        queue.reset()
        traffic = dict(TRAFFIC, flow_label=label)
        self.where.run(queue.qp.connect, QpEndpoint(17, gid_of(PEER6), 0, 256), ack_timeout=0, **traffic)
        queue.post(SEND, self.end.here.at(0, nbytes))

    def next(self) -> dict[int, int]:
        """What the kernel says of the next datagram. Class and flow label are big-endian (RFC 3493 3.3)."""
        return {
            kind: int.from_bytes(data, "big" if kind == IPV6_FLOWINFO else "little")
            for _, kind, data in self.peer.recvmsg(2048, 256)[1]
        }


@pytest.fixture
def over_ipv6() -> Iterator[OverIpv6]:
    with namespace() as where:
        for address in (OWN6, PEER6):
            where.ip(f"address add {address}/128 dev lo nodad")
        with (
            where.run(socket.socket, socket.AF_INET6, socket.SOCK_DGRAM) as peer,
            nics(where, {"wire": "udp", "addresses": OWN6}) as (end,),
        ):
            peer.bind((PEER6, ROCE_UDP_PORT))
            peer.setsockopt(socket.IPPROTO_IPV6, IPV6_FLOWINFO, 1)
            peer.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
            peer.settimeout(20)
            yield OverIpv6(where, end, peer)


@pytest.mark.root
@pytest.mark.parametrize("packets", [1, 3])
def test_over_udp_in_ipv6(over_ipv6, packets):
    """A path without a flow label has none: the kernel derives none from the ports."""
    for label in (LABEL, 0):
        over_ipv6.send(256 * packets, label)
        for _ in range(packets):
            assert over_ipv6.next() == {IPV6_FLOWINFO: CLASS << 20 | label, socket.IPV6_HOPLIMIT: HOPS}


@pytest.mark.root
def test_a_datagram_over_udp_in_ipv6(over_ipv6):
    pd, run = over_ipv6.end.pd, over_ipv6.where.run
    with pd.ctx.create_cq(4) as cq, pd.create_qp(qp_type=QpType.UD, sq_wr=4, max_inline_data=8, send_cq=cq) as qp:
        run(qp.to_rts, qkey=7)
        for label in (LABEL, 0xFFFFF, 0):
            with run(pd.create_ah, AhAttr(gid=gid_of(PEER6), **dict(TRAFFIC, flow_label=label))) as ah:
                qp.post_send(SendWr(opcode=WrOpcode.SEND, inline=bytes(8), ah=ah, remote_qpn=17, remote_qkey=7))
                assert over_ipv6.next() == {IPV6_FLOWINFO: CLASS << 20 | label, socket.IPV6_HOPLIMIT: HOPS}


@pytest.mark.root
def test_a_flow_label_while_another_is_leased(over_ipv6):
    """Linux refuses labels that nobody has leased while a program has leased one for itself, and no others."""
    # struct in6_flowlabel_req
    request = struct.pack("!16sIBB", gid_of(PEER6), 1, IPV6_FL_A_GET, IPV6_FL_S_EXCL)
    request += struct.pack("=HHHI", IPV6_FL_F_CREATE, 0, 0, 0)
    with over_ipv6.where.run(socket.socket, socket.AF_INET6, socket.SOCK_DGRAM) as owner:
        owner.setsockopt(socket.IPPROTO_IPV6, IPV6_FLOWLABEL_MGR, request)
        over_ipv6.send(8, LABEL)
        until(lambda: over_ipv6.end.count("tx_dropped") == 1, "a packet that the kernel refuses")
        over_ipv6.send(8, 0)
        assert over_ipv6.next()[IPV6_FLOWINFO] == CLASS << 20


def traffic_in(packet: Packet) -> tuple[int, ...]:
    """Traffic class, hop limit and, in IPv6, flow label."""
    assert packet[UDP].dport == ROCE_UDP_PORT
    if IP in packet:
        return packet[IP].tos, packet[IP].ttl
    return packet[IPv6].tc, packet[IPv6].hlim, packet[IPv6].fl


@pytest.mark.parametrize(
    "addresses, traffic", [(("10.97.0.1", "10.97.0.2"), (CLASS, HOPS)), ((OWN6, PEER6), (CLASS, HOPS, LABEL))],
    ids=["IPv4", "IPv6"],
)
@pytest.mark.parametrize("ethernet", [False, True], ids=["pipes", "Ethernet"])
def test_captures_of_both_ends(tmp_path, addresses, traffic, ethernet):
    """Between two NICs of a process, only captures have IP headers. On Ethernet wires, the frames have them."""
    paths, ends = [tmp_path / "a.pcap", tmp_path / "b.pcap"], (tmp_path / "a", tmp_path / "b")
    wires = [f"dgram:{here},{there}" if ethernet else "auto" for here, there in (ends, ends[::-1])]
    exchange(paths, [{"addresses": own, "wire": wire} for own, wire in zip(addresses, wires, strict=True)])
    for path in paths:
        packets = [packet for packet in rdpcap(str(path)) if UDP in packet]
        assert len(packets) == 2
        assert [traffic_in(packet) for packet in packets] == [traffic] * 2


def test_global_routes_of_infiniband(tmp_path):
    paths = [tmp_path / "a.pcap", tmp_path / "b.pcap"]
    exchange(paths, [{"link_layer": LinkLayer.INFINIBAND}] * 2, addr_type=AddrType.IB_GRH)
    for path in paths:
        for record in records(path):
            grh = roce.GRH(record[16 + LRH.size :])
            assert (grh.tclass, grh.hoplmt, grh.flowlabel) == (CLASS, HOPS, LABEL)


def test_query():
    """A connected queue pair keeps its flow label, whatever path it is given: no optional parameter is for it."""
    with verbs.open("soft0", port=PortConfig(addresses=OWN6)) as ctx:
        qp = ctx.create_pd().create_qp(sq_wr=1, send_cq=ctx.create_cq(1))
        qp.connect(qp, **TRAFFIC)
        path = qp.query()[0].ah_attr
        assert path is not None
        assert path.flow_label == LABEL
        qp.modify(QpAttr(ah_attr=replace(path, flow_label=1, traffic_class=0)), QpAttrMask.AH_ATTR)
        assert qp.query()[0].ah_attr == replace(path, traffic_class=0)


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
