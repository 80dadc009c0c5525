"""Wires that carry Ethernet: TAP devices and packet sockets, in network namespaces that the tests make."""

import errno
import os
import socket
import subprocess
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptSrcLLAddr,
    IPv6,
    in6_getnsma,
    in6_getnsmac,
)
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from gpunetio import PortConfig, verbs
from gpunetio.errors import InUseError, InvalidValueError, NotFoundError, NotPermittedError, NotSupportedError
from gpunetio.fabric.interface import mtu_of
from gpunetio.fabric.neighbours import Neighbours
from gpunetio.nic.engine.port import gid_of
from gpunetio.nic.state.counters import FRAME_FATES
from gpunetio.nic.wires import packet as packet_wire
from gpunetio.nic.wires import tap
from lan import End, Station, cabled, ethernet_wire, exchange, join, learned, mac_text, namespace, nics
from nic_rig import REQ, WRITE, until
from pcap_rig import dissect, icrc_fits

pytestmark = pytest.mark.root

V4, V6 = ("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")
HERE, THERE = "02:00:00:00:00:01", "02:00:00:00:00:02"


@pytest.fixture
def lan():
    """A namespace with a bridge, into which TAP devices are plugged as they appear."""
    with namespace() as where:
        where.ip("link add br0 type bridge")
        where.ip("link set br0 up")
        yield where


@pytest.fixture
def cable():
    """A namespace with a cable from `here` to `there`: the NIC's end and a station's end."""
    with cabled() as where:
        yield where


def plug(where, *names):
    for name in names:
        where.ip(f"link set {name} master br0")


# --- two NICs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [V4, V6], ids=["ipv4", "ipv6"])
def test_two_nics_on_tap_devices_and_a_bridge(lan, addresses, tmp_path):
    """Every operation; the capture shows what is on the wire, and foreign programs find nothing wrong in it."""
    files = [tmp_path / name for name in ("a.pcap", "b.pcap")]
    ports = [
        {"wire": f"tap:t{i}", "addresses": address, "capture": files[i]} for i, address in enumerate(addresses)
    ]
    with nics(lan, *ports) as (a, b):
        plug(lan, "t0", "t1")
        join(a, b)
        exchange(a, b)
        exchange(b, a)
        assert (a.count("rx_icrc_encapsulated"), a.count("rx_weak_icrc"), a.count("tx_dropped")) == (0, 0, 0)
        macs = [mac_text(end.nic.mac) for end in (a, b)]
    for own, peer, file in ((0, 1, files[0]), (1, 0, files[1])):
        packets = dissect(file)
        roce = [packet for packet in packets if packet.opcode is not None]
        source = "src" if addresses is V4 else "src6"
        sent = [packet for packet in roce if getattr(packet, source) == addresses[own]]
        assert 0 < len(sent) < len(roce)
        for packet in roce:
            mine = packet in sent
            packet.has(eth_src=macs[own if mine else peer], eth_dst=macs[peer if mine else own])
            assert icrc_fits(packet.raw), packet.fields
            if addresses is V4:
                packet.has(ip_checksum=1, ttl=255, id=0)  # the hop limit of paths (DOCA's default)
        asked = [Ether(packet.raw) for packet in packets if packet.opcode is None]
        kind = ARP if addresses is V4 else ICMPv6ND_NS
        assert any(kind in frame for frame in asked), "the capture shows how the peer was found"


def test_packet_sockets_at_both_ends_of_a_cable(cable):
    ports = [
        {"wire": f"packet:{name}", "addresses": addresses}
        for name, *addresses in zip(("here", "there"), V4, V6, strict=True)
    ]
    with nics(cable, *ports) as (a, b):
        join(a, b)
        exchange(a, b)
        a.queue.reset()
        b.queue.reset()
        ends = [end.queue.qp.endpoint(sgid_index=2) for end in (a, b)]
        a.queue.qp.connect(ends[1], sgid_index=2, ack_timeout=15)
        b.queue.qp.connect(ends[0], sgid_index=2, ack_timeout=15)
        exchange(a, b)


def test_link_local_gids_are_addresses(cable):
    """They follow from the MAC, and the NIC answers for them as for any other."""
    ports = [{"wire": f"packet:{name}", "addresses": v4} for name, v4 in zip(("here", "there"), V4, strict=True)]
    with nics(cable, *ports) as (a, b):
        ends = [end.queue.qp.endpoint(sgid_index=1) for end in (a, b)]
        a.queue.qp.connect(ends[1], sgid_index=1, ack_timeout=15)
        b.queue.qp.connect(ends[0], sgid_index=1, ack_timeout=15)
        exchange(a, b)
        with pytest.raises(InvalidValueError, match="cannot be reached from GID index 0"):
            _again(a).connect(ends[1], sgid_index=0)


def _again(end: End):
    end.queue.reset()
    return end.queue.qp


def test_the_kernel_is_a_peer_by_sockets(lan):
    """A NIC on UDP sockets at the kernel's end of a TAP device: two implementations of all headers."""
    with nics(lan, {"wire": "tap:t0", "addresses": V4[0]}) as (a,):
        lan.ip(f"address add {V4[1]}/24 dev t0")
        port = PortConfig(addresses=V4[1], wire="udp")
        with lan.run(verbs.open, "soft1", port=port) as ctx:
            b = End(ctx, fill=9)
            ends = a.queue.qp.endpoint(), b.queue.qp.endpoint()
            a.queue.qp.connect(ends[1], ack_timeout=15)
            lan.run(b.queue.qp.connect, ends[0], ack_timeout=15)
            exchange(a, b)
            exchange(b, a)
            assert b.count("rx_weak_icrc") == 0, "the NIC's IPv4 id is the one that sockets expect"


# --- neighbours ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nic(cable):
    with nics(cable, {"wire": "packet:here", "addresses": (V4[0], V6[0])}) as (end,):
        yield end


@pytest.fixture
def station(cable, nic):
    opened = Station(cable, "there")
    yield opened
    opened.close()


def solicitation(target: str, source: str = V6[1], hlim: int = 255):
    to = in6_getnsma(ip_address(target).packed)
    group = str(ip_address(to))
    packet = Ether(src=THERE, dst=in6_getnsmac(to)) / IPv6(src=source, dst=group, hlim=hlim) / ICMPv6ND_NS(tgt=target)
    return packet if source == "::" else packet / ICMPv6NDOptSrcLLAddr(lladdr=THERE)


def test_arp_is_answered(nic, station):
    request = Ether(src=THERE, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=THERE, psrc=V4[1], pdst=V4[0])
    station.send(Ether(src=THERE, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=THERE, psrc=V4[1], pdst="10.9.0.77"))
    station.send(request)
    answer = station.hear(lambda frame: ARP in frame and frame[ARP].op == 2)
    assert (answer.src, answer.dst) == (mac_text(nic.nic.mac), THERE)
    assert (answer[ARP].psrc, answer[ARP].hwsrc) == (V4[0], answer.src)
    assert (answer[ARP].pdst, answer[ARP].hwdst) == (V4[1], THERE)
    nic.nic.pause()  # no WQE is executed, and no frame taken
    nic.nic.resume()
    station.send(request)
    station.hear(lambda frame: ARP in frame and frame[ARP].op == 2)


@pytest.mark.parametrize("target", [V6[0], "link-local"])
def test_neighbour_solicitations_are_answered(nic, station, target):
    own = str(ip_address(nic.nic.control.gids.gid(1))) if target == "link-local" else target
    station.send(solicitation(own, hlim=64))  # a router has passed it on: not valid
    station.send(solicitation(own))
    answer = station.hear(lambda frame: ICMPv6ND_NA in frame)
    checked = Ether(bytes(answer))
    sum_on_wire = checked[ICMPv6ND_NA].cksum
    del checked[ICMPv6ND_NA].cksum
    assert Ether(bytes(checked))[ICMPv6ND_NA].cksum == sum_on_wire
    assert (answer.src, answer.dst, answer[IPv6].dst, answer[IPv6].hlim) == (
        mac_text(nic.nic.mac), THERE, V6[1], 255
    )
    advertisement = answer[ICMPv6ND_NA]
    assert (advertisement.tgt, advertisement.S, advertisement.O, advertisement.R) == (own, 1, 1, 0)
    assert answer[ICMPv6NDOptDstLLAddr].lladdr == answer.src
    until(lambda: nic.count("rx_frame_neighbour") == 2, "both have been counted")


def test_who_looks_whether_an_address_is_free_hears_that_it_is_not(nic, station):
    station.send(solicitation(V6[0], source="::"))
    answer = station.hear(lambda frame: ICMPv6ND_NA in frame)
    assert (answer[IPv6].dst, answer.dst, answer[ICMPv6ND_NA].S) == ("ff02::1", "33:33:00:00:00:01", 0)


def test_nobody_answers(nic, station, monkeypatch):
    monkeypatch.setattr(Neighbours.resolve, "__defaults__", (0.3,))
    for address, what in ((V4[1], ARP), (V6[1], ICMPv6ND_NS)):
        with pytest.raises(NotFoundError, match=rf"nobody on packet:here answers for {address} within 0.3 s"):
            nic.nic.control.routes.mac_of(gid_of(ip_address(address)))
        question = station.hear(lambda frame, what=what: what in frame)
        assert question.src == mac_text(nic.nic.mac)
    assert not learned(ethernet_wire(nic.nic))


def test_who_was_not_asked_is_not_learned(nic, station):
    """Else strangers could fill the table."""
    station.send(Ether(src=THERE, dst="ff:ff:ff:ff:ff:ff") / ARP(op=2, hwsrc=THERE, psrc="10.9.0.9", pdst=V4[0]))
    until(lambda: nic.count("rx_frame_neighbour") == 1, "it has arrived")
    station.send(Ether(src=THERE, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=THERE, psrc=V4[1], pdst=V4[0]))
    station.hear(lambda frame: ARP in frame and frame[ARP].op == 2)
    assert not learned(ethernet_wire(nic.nic))


# --- frames that are none of the NIC's -------------------------------------------------------------------------------


def roce(nic: End, **changed):
    """A frame that leads to the NIC, and to a queue pair that does not exist."""
    ether = Ether(src=THERE, dst=changed.pop("dst", mac_text(nic.nic.mac)))
    ip = changed.pop("ip", IP(src=V4[1], dst=V4[0], flags="DF"))
    return ether / ip / UDP(sport=0xC000, dport=changed.pop("dport", 4791)) / BTH(dqpn=5) / Raw(bytes(16))


FATES = [
    ("another MAC", lambda nic: roce(nic, dst="02:00:00:00:00:77"), "rx_frame_other_mac"),
    ("cut off", lambda nic: bytes(roce(nic))[:30], "rx_frame_malformed"),
    ("longer than it is", lambda nic: bytes(roce(nic))[:70], "rx_frame_malformed"),
    ("header checksum", lambda nic: roce(nic, ip=IP(src=V4[1], dst=V4[0], chksum=1)), "rx_frame_checksum"),
    ("fragment", lambda nic: roce(nic, ip=IP(src=V4[1], dst=V4[0], flags="MF")), "rx_frame_fragment"),
    ("last fragment", lambda nic: roce(nic, ip=IP(src=V4[1], dst=V4[0], frag=3)), "rx_frame_fragment"),
    ("IPv4 address", lambda nic: roce(nic, ip=IP(src=V4[1], dst="10.9.0.77")), "rx_frame_other_address"),
    ("IPv6 address", lambda nic: roce(nic, ip=IPv6(src=V6[1], dst="fd09::77")), "rx_frame_other_address"),
    ("port", lambda nic: roce(nic, dport=53), "rx_frame_other_protocol"),
    ("EtherType", lambda nic: Ether(src=THERE, dst=mac_text(nic.nic.mac), type=0x88B5) / Raw(bytes(50)),
     "rx_frame_other_protocol"),
    ("VLAN", lambda nic: bytes(roce(nic))[:12] + b"\x81\0\0\x05" + bytes(roce(nic))[12:], "rx_frame_vlan"),
    ("no queue pair", roce, "rx_no_qp"),
    ("IPv4 options", lambda nic: roce(nic, ip=IP(src=V4[1], dst=V4[0], options=b"\x01" * 4)), "rx_no_qp"),
    ("broadcast", lambda nic: roce(nic, dst="ff:ff:ff:ff:ff:ff"), "rx_no_qp"),
    ("IPv6", lambda nic: roce(nic, ip=IPv6(src=V6[1], dst=V6[0])), "rx_no_qp"),
]


@pytest.mark.parametrize(("frame", "counter"), [row[1:] for row in FATES], ids=[row[0] for row in FATES])
def test_what_becomes_of_a_frame(nic, station, frame, counter):
    """Each is counted once, under a name that says why it was dropped."""
    before = {name: nic.count(name) for name in (*FRAME_FATES, "rx_no_qp")}
    station.send(frame(nic))
    until(lambda: nic.count("rx_frames") == 1, "the frame has arrived")
    nic.nic.engine.synchronize()
    after = {name: nic.count(name) for name in before}
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {counter: 1}


def test_link_down(nic, station):
    nic.nic.set_link(False)
    station.send(roce(nic))
    until(lambda: nic.count("rx_frame_link_down") == 1, "the frame was dropped")


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(where, kind, match, **port):
    with pytest.raises(kind, match=match):
        where.run(verbs.open, "soft7", port=PortConfig(**{"addresses": V4[0], **port}))


def test_interfaces_that_cannot_be_used(cable):
    refused(cable, NotFoundError, "there is no interface nothere: `ip link`", wire="packet:nothere")
    refused(cable, InvalidValueError, "lo is no Ethernet", wire="packet:lo")
    refused(cable, InvalidValueError, "MTU is to be 9000, but that of the interface here is 1500. `ip link set here "
            "mtu 9000`", wire="packet:here", mtu=9000)
    refused(cable, InvalidValueError, "here exists, and is no TAP device", wire="tap:here")
    cable.ip("link set here down")
    refused(cable, InvalidValueError, "interface here is down. `ip link set here up`", wire="packet:here")
    cable.ip("tuntap add t0 mode tap")
    refused(cable, InvalidValueError, "interface t0 is down", wire="tap:t0")
    cable.ip("link set t0 up")
    with nics(cable, {"wire": "tap:t0", "addresses": V4[0]}):
        refused(cable, InUseError, "another program has t0", wire="tap:t0", addresses=V4[1])
    cable.ip("link show t0")  # a device that was there before stays


def test_a_tap_device_has_the_ports_mtu_and_vanishes(lan):
    with nics(lan, {"wire": "tap:t0", "addresses": V4[0], "mtu": 9000}) as (a,):
        assert a.ctx.query_port().active_mtu == 4096
        assert lan.run(mtu_of, "t0") == 9000
    with pytest.raises(subprocess.CalledProcessError):
        lan.ip("link show t0")


def test_the_port_has_the_interfaces_mtu(cable):
    for end in ("here", "there"):
        cable.ip(f"link set {end} mtu 600")
    with nics(cable, {"wire": "packet:here", "addresses": V4[0]}) as (a,):
        assert a.ctx.query_port().active_mtu == 512


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [(errno.ENOENT, NotSupportedError, "has no /dev/net/tun. `modprobe tun`"),
     (errno.EACCES, NotPermittedError, "/dev/net/tun cannot be opened.*unshare -Urn")],
)
def test_no_tun_device(lan, monkeypatch, error, kind, text):
    real = os.open

    def refuse(path, *args, **options):
        if path == "/dev/net/tun":
            raise OSError(error, os.strerror(error), path)
        return real(path, *args, **options)

    monkeypatch.setattr(tap.os, "open", refuse)
    refused(lan, kind, text, wire="tap:t0")


def test_without_the_rights(cable, monkeypatch):
    """What other users are told."""

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(tap.fcntl, "ioctl", refuse)
        refused(cable, NotPermittedError, "takes CAP_NET_ADMIN.*ip tuntap add t0 mode tap user.*unshare -Urn",
                wire="tap:t0")
    monkeypatch.setattr(packet_wire, "socket", SimpleNamespace(**{**vars(socket), "socket": refuse}))
    refused(cable, NotPermittedError, "takes CAP_NET_RAW.*unshare -Urn", wire="packet:here")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "224.0.0.1", "0.0.0.0"])
def test_addresses_that_no_ethernet_carries(cable, address):
    refused(cable, InvalidValueError, f"where {address} is nobody's address: give the port", wire="packet:here",
            addresses=address)


def test_the_device_goes_away_under_the_nic(lan, caplog, monkeypatch):
    monkeypatch.setattr(Neighbours.resolve, "__defaults__", (0.1,))
    with nics(lan, {"wire": "tap:t0", "addresses": V4[0]}) as (a,):
        with pytest.raises(NotFoundError):
            a.nic.control.routes.mac_of(gid_of(ip_address(V4[1])))
        lan.ip("link delete t0")
        until(lambda: "tap:t0 is gone" in caplog.text, "the log says so")


def test_the_interface_goes_down_and_up_again(cable):
    """What is sent meanwhile is lost and counted, and queue pairs send it again."""
    ports = [{"wire": f"packet:{name}", "addresses": v4} for name, v4 in zip(("here", "there"), V4, strict=True)]
    with nics(cable, *ports) as (a, b):
        join(a, b)
        cable.ip("link set here down")
        a.queue.post(WRITE, b.there.remote(), a.here.at())
        until(lambda: a.count("tx_dropped") > 0, "packets are lost")
        cable.ip("link set here up")
        assert a.queue.done.next().opcode == REQ
        exchange(a, b)


def test_the_interface_goes_away_under_the_nic(cable, monkeypatch):
    """The NIC goes on without it, and closes."""
    monkeypatch.setattr(Neighbours.resolve, "__defaults__", (0.2,))
    with nics(cable, {"wire": "packet:here", "addresses": V4[0]}) as (a,):
        cable.ip("link delete here")
        with pytest.raises(NotFoundError, match="nobody on packet:here answers for"):
            a.nic.control.routes.mac_of(gid_of(ip_address(V4[1])))
        until(lambda: a.count("tx_dropped") > 0, "the question is lost")


def test_an_open_nic_works_after_a_refused_one(cable):
    ports = [{"wire": f"packet:{name}", "addresses": v4} for name, v4 in zip(("here", "there"), V4, strict=True)]
    with nics(cable, *ports) as (a, b):
        refused(cable, NotFoundError, "no interface", wire="packet:nothere", addresses="10.9.0.3")
        join(a, b)
        a.queue.post(WRITE, b.there.remote(), a.here.at())
        assert a.queue.done.next().opcode == REQ
