"""The UDP wire against itself, plain sockets, and scapy."""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from gpunetio.errors import DocaError, InUseError, InvalidValueError
from gpunetio.fabric import frames, udp, udp_records
from gpunetio.fabric.udp_records import (
    GSO_OFF,
    GSO_ON,
    GSO_REFUSED,
    ICRC_FULL,
    ICRC_WEAK,
    MAX_SEGMENTS,
    SOL_UDP,
    TX_MESSAGES,
    UDP_SEGMENT,
)
from udp_rig import Arrived, Namespace, Node, own_address

PORT = 4791


def packets_of(*sizes: int) -> list[bytes]:
    return [os.urandom(size) for size in sizes]


def packets(arrived: list[Arrived]) -> list[bytes]:
    return [a.packet for a in arrived]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", PORT))
    except OSError:
        return False
    return True


class Two:
    """A sender and a receiver; over IPv6, which has one loopback address, they are the same."""

    def __init__(self, version: int, **options: bool):
        if version == 6 and not has_ipv6():
            pytest.skip("::1 port 4791 is not to be had")
        here, self.to = ("::1", "::1") if version == 6 else (own_address(), own_address())
        self.a = Node(here, **options)
        self.b = self.a if version == 6 else Node(self.to, **options)

    def close(self) -> None:
        for node in {self.a, self.b}:
            node.__exit__()


@pytest.fixture(params=[4, 6], ids=["ipv4", "ipv6"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    opened = Two(request.param)
    yield opened
    opened.close()


def bth(qpn: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BBHII", 0, 0, 0xFFFF, qpn, 0) + payload


def test_frames_that_are_recalled_are_not_sent(two):
    """Of one QP of one peer, wherever in the pipe they are."""
    other = "::2" if two.to == "::1" else own_address()
    for i, (qpn, to) in enumerate([(5, two.to), (6, two.to), (5, other), (5, two.to), (6, two.to)]):
        two.a.put(bth(qpn, bytes([i] * 4)), to)
    frames.publish(two.a.producer)
    frames.recall(two.a.consumer, 0, 5, *udp.gid_of(ip_address(two.to)))
    two.a.transmit()
    assert packets(two.b.receive(2)) == [bth(6, bytes([i] * 4)) for i in (1, 4)]
    assert two.a["tx_dropped"] >= 2  # and the one to nobody, where the system says so
    two.b.wait_for("rx_datagrams", 2)


def test_what_came_before_a_mark(two):
    """Until the sockets were seen empty a datagram may be old, and is then given a lower position than the mark."""
    old = packets_of(*range(100, 200, 10))
    two.a.send(old, two.to)
    begin = udp_records.mark(two.b.wire.address)
    while two.b["marked"]:
        assert two.b["position"] < begin
        two.b.turn([])
    assert (two.b["rx_datagrams"], two.b["position"] >= begin) == (len(old), True)
    begin, position = udp_records.mark(two.b.wire.address), two.b["position"]
    two.b.turn([])
    assert two.b["position"] == begin == position + two.b["capacity"]
    two.b.turn([])
    assert two.b["position"] == begin  # it counts on for marks and for bytes only


def test_a_mark_when_the_sockets_are_never_empty(two):
    """What they can hold has then been received."""
    two.b.wire.record["rx_share"], two.b.wire.record["capacity"] = 1, 1000
    begin = udp_records.mark(two.b.wire.address)
    old = packets_of(*range(300, 100, -10))  # no two of a size, so that each is a message
    for packet in old:
        two.a.send([packet], two.to)
    received = 0
    while two.b["position"] < begin:
        received += two.b.turn([])
    assert two.b["marked"] == 1
    assert 1000 <= sum(len(packet) + 4 for packet in old[:received]) < 1400


@pytest.mark.parametrize("options", [{}, {"gso": False}, {"gro": False}], ids=["batched", "no gso", "no gro"])
@pytest.mark.parametrize("version", [4, 6])
def test_all_sizes(version, options):
    two = Two(version, **options)
    sizes = range(12, 4125) if not options else range(12, 4125, 13)
    for start in range(0, len(sizes), 100):
        sent = packets_of(*reversed(sizes[start : start + 100]))
        two.a.send(sent, two.to)
        got = two.b.receive(len(sent))
        assert packets(got) == sent
        assert {str(a.peer) for a in got} == {str(two.a.wire.addresses[0])}
        assert {(a.source, a.status) for a in got} == {(0, ICRC_FULL)}
    two.close()


def test_equal_packets_share_a_message(two):
    """15 of 4124 bytes fill a message; a smaller one ends it."""
    sent = packets_of(*[4124] * 31, 100, 100, 4124)
    two.a.send(sent, two.to)
    assert two.a["tx_messages"] == 5  # 15, 15, one with the first of 100, the second of 100, the last
    assert packets(two.b.receive(len(sent))) == sent
    assert two.b["weak_icrc"] == 0


def test_no_message_is_larger_than_what_all_kernels_take(two):
    sent = packets_of(*[64] * 1000)
    two.a.send(sent, two.to)
    assert two.a["tx_messages"] == -(-1000 // MAX_SEGMENTS)
    got = two.b.receive(1000)
    assert packets(got) == sent
    assert {a.status for a in got} == {ICRC_FULL}


@settings(max_examples=20)
@given(plan=st.lists(
    st.tuples(st.sampled_from([12, 16, 52, 52, 4124]) | st.integers(12, 300), st.integers(0, 1), st.integers(0, 1)),
    min_size=1, max_size=60,
))
def test_any_order_of_destinations_and_sizes(plan):
    """Packets of (size, from, to)."""
    here = [own_address(), own_address()]
    there = [own_address(), own_address()]
    with Node(*here, gid_indices=[3, 200]) as a, Node(there[0]) as b, Node(there[1]) as c:
        sent = packets_of(*[size for size, _, _ in plan])
        for packet, (_, source, to) in zip(sent, plan, strict=True):
            a.put(packet, there[to], (3, 200)[source])
        assert a.transmit() == len(sent)
        for to, node in enumerate((b, c)):
            expected = [(packet, source) for packet, (_, source, t) in zip(sent, plan, strict=True) if t == to]
            got = node.receive(len(expected))
            assert sorted((g.packet, here.index(str(g.peer))) for g in got) == sorted(expected)
            for source in (0, 1):  # in order, from each address
                ordered = [packet for packet, s in expected if s == source]
                assert packets([g for g in got if str(g.peer) == here[source]]) == ordered


def test_a_wire_of_several_addresses_says_which_one_was_reached():
    addresses = [own_address() for _ in range(8)]
    with Node(*addresses, gid_indices=range(10, 18)) as a:
        for i, address in enumerate(addresses):
            a.put(bytes([i]) * 20, address, source=17 - i)
        a.transmit()
        got = sorted(a.receive(8), key=lambda g: g.source)
        assert [(g.packet[0], g.source, str(g.peer)) for g in got] == [
            (i, 10 + i, addresses[7 - i]) for i in range(8)
        ]


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bit", [0, 5, 8 * 12 + 3, 8 * 51 + 7, 8 * 52 + 1])
def test_a_damaged_packet_is_dropped_and_counted(two, bit):
    """The last bit is one of the ICRC itself."""
    sent = packets_of(*[52] * 5)
    for i, packet in enumerate(sent):
        two.a.put(packet, two.to, corrupt=1 + bit if i in (0, 3) else 0)
    assert two.a.transmit() == 5
    assert packets(two.b.receive(3, lambda: two.b["rx_icrc_encapsulated"] > 2)) == [sent[i] for i in (1, 2, 4)]
    assert two.b["rx_icrc_encapsulated"] == 2


def test_a_congestion_mark_is_no_damage(two):
    packet = bytes(40)
    two.a.put(packet, two.to, corrupt=1 + 8 * 4 + 7)
    two.a.transmit()
    assert packets(two.b.receive(1)) == [bytes(4) + b"\x80" + bytes(35)]


def plain_socket(address: str, port: int = 0) -> socket.socket:
    """What any program may open; not connected, so that its datagrams have IPv4's id 0."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER: IP_PMTUDISC_DO
    opened.bind((address, port))
    opened.settimeout(10)
    return opened


def scapy_packet(source: str, destination: str, port: int, payload: bytes, ip_id: int = 0) -> bytes:
    """IP header to ICRC."""
    return bytes(
        IP(src=source, dst=destination, id=ip_id, flags="DF")
        / UDP(sport=port, dport=PORT) / BTH(opcode="RC_SEND_ONLY", dqpn=7, psn=9) / Raw(payload)
    )


def test_what_is_too_short_is_dropped_and_counted():
    address = own_address()
    with Node(address) as node, plain_socket(own_address()) as peer:
        for size in (0, 1, 15):
            peer.sendto(bytes(size), (address, PORT))
        node.wait_for("rx_malformed", 3)
        peer.sendto(bytes(16), (address, PORT))
        node.wait_for("rx_icrc_encapsulated", 1)


# --- an independent peer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4, 24, 1000, 4096])
def test_packets_of_scapy_through_a_plain_socket_are_taken(size):
    address, other = own_address(), own_address()
    with Node(address) as node, plain_socket(other) as peer:
        raw = scapy_packet(other, address, peer.getsockname()[1], os.urandom(size))
        peer.sendto(raw[28:], (address, PORT))
        (got,) = node.receive(1)
        assert (got.packet, str(got.peer), got.status) == (raw[28:-4], other, ICRC_FULL)


def test_a_plain_sender_with_segments_is_understood():
    """UDP_SEGMENT set on the socket by somebody else, ICRCs by scapy, for the ids 0, 1, 2."""
    address, other = own_address(), own_address()
    with Node(address) as node, plain_socket(other) as peer:
        raws = [scapy_packet(other, address, peer.getsockname()[1], bytes([k]) * 500, k)[28:] for k in range(3)]
        peer.sendmsg([b"".join(raws)], [(SOL_UDP, UDP_SEGMENT, struct.pack("H", len(raws[0])))], 0, (address, PORT))
        got = node.receive(3)
        assert packets(got) == [raw[:-4] for raw in raws]
        assert {g.status for g in got} == {ICRC_FULL}


def test_ipv6_without_udp_checksum_is_taken():
    """As the kernel's rxe sends it: the ICRC is all the protection there is."""
    if not has_ipv6():
        pytest.skip("::1 port 4791 is not to be had")
    udp_no_check6_tx = 101
    with Node("::1") as node, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as peer:
        peer.setsockopt(SOL_UDP, udp_no_check6_tx, 1)
        peer.bind(("::1", 0))
        bth = BTH(opcode="RC_SEND_ONLY", dqpn=7, psn=9)
        raw = bytes(IPv6(src="::1", dst="::1") / UDP(sport=peer.getsockname()[1], dport=PORT) / bth / Raw(bytes(100)))
        peer.sendto(raw[48:], ("::1", PORT))
        (got,) = node.receive(1)
        assert (got.packet, str(got.peer), got.status) == (raw[48:-4], "::1", ICRC_FULL)


@pytest.mark.parametrize("gso", [True, False])
def test_a_plain_socket_gets_what_scapy_would_have_sent(gso):
    """Segment k with the ICRC of id k, a single datagram with that of id 0."""
    address, other = own_address(), own_address()
    with Node(address, gso=gso) as node, plain_socket(other, PORT) as peer:
        raws = [scapy_packet(address, other, PORT, bytes([k]) * 600, k if gso else 0)[28:] for k in range(5)]
        node.send([raw[:-4] for raw in raws], other)
        assert [peer.recvfrom(2000) for _ in raws] == [(raw, (address, PORT)) for raw in raws]


@pytest.mark.root
@pytest.mark.parametrize(
    ("ids", "weak"),
    [
        ([5, 6, 7, 8], [1, 0, 0, 0]),  # counting, as the kernel's rxe does: the first one is unknown
        ([65533, 65534, 65535, 1], [1, 0, 0, 1]),  # the id 0 would be expected
        ([100, 5000, 77, 78], [1, 1, 1, 0]),
    ],
    ids=["counting", "wrapping", "random"],
)
def test_other_ids_are_solved_for(ids, weak):
    """Raw sockets say which id; the kernel fills in 0 only."""
    address, other = own_address(), own_address()
    with Node(address) as node, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as peer:
        statuses = []
        for ip_id in ids:
            raw = scapy_packet(other, address, 49152, os.urandom(100), ip_id)
            peer.sendto(raw, (address, 0))
            (got,) = node.receive(1)
            assert (got.packet, str(got.peer)) == (raw[28:-4], other)
            statuses.append(got.status)
        assert statuses == [ICRC_WEAK if w else ICRC_FULL for w in weak]
        assert node["weak_icrc"] == statuses.count(ICRC_WEAK)
        damaged = bytearray(scapy_packet(other, address, 49152, os.urandom(100), ids[-1] + 1))
        damaged[26:28] = 0, 0  # UDP's own checksum would see it
        damaged[60] ^= 4
        peer.sendto(damaged, (address, 0))
        node.wait_for("rx_icrc_encapsulated", 1)


# --- what cannot be sent -------------------------------------------------------------------------------------------


def test_without_segmentation_the_wire_falls_back_to_single_datagrams():
    """A socket without checksums refuses UDP_SEGMENT with EINVAL, as a path without it does."""
    so_no_check = 11
    address, other = own_address(), own_address()
    with Node(address) as a, Node(other) as b:
        with socket.socket(fileno=os.dup(a.wire.fds[0])) as same:
            same.setsockopt(socket.SOL_SOCKET, so_no_check, 1)
        sent = packets_of(*[300] * 20)
        for i, packet in enumerate(sent):
            a.put(packet, other, corrupt=99 if i == 7 else 0)
        assert a.transmit() == 20
        assert (a.wire.rows[0]["gso"], a.wire.rows[0]["segments"]) == (GSO_REFUSED, 1)
        assert (a["tx_messages"], a["tx_dropped"]) == (20, 0)
        got = b.receive(19)
        assert packets(got) == sent[:7] + sent[8:]
        assert {g.status for g in got} == {ICRC_FULL}
        assert b["rx_icrc_encapsulated"] == 1


def test_segmentation_can_be_turned_off():
    with Node(own_address(), gso=False) as a:
        assert (a.wire.rows[0]["gso"], a.wire.rows[0]["segments"]) == (GSO_OFF, 1)
        a.send(packets_of(20, 20, 20), str(a.wire.addresses[0]))
        assert a["tx_messages"] == 3


@pytest.mark.parametrize(
    ("nbytes", "to", "source"),
    [(20, "fd00::1", 0), (20, "127.0.0.1", 1), (20, "127.0.0.1", -1), (20, "127.0.0.1", 256), (11, "127.0.0.1", 0),
     (64997, "127.0.0.1", 0), (20, "192.0.2.1", 0)],
    ids=["ipv6 by ipv4", "no such gid", "negative", "beyond the table", "no BTH", "too large", "unreachable"],
)
def test_what_cannot_be_sent_is_dropped_and_counted(nbytes, to, source):
    """Between two that can. 192.0.2.1 cannot be reached from 127.0.0.0/8."""
    with Node(own_address()) as a:
        me = str(a.wire.addresses[0])
        a.put(b"1" * 20, me)
        a.put(bytes(nbytes), to, source)
        a.put(b"2" * 20, me)
        assert a.transmit() == 2
        assert (a["tx_frames"], a["tx_dropped"]) == (2, 1)
        assert packets(a.receive(2)) == [b"1" * 20, b"2" * 20]


def test_many_that_cannot_be_sent_do_not_stop_the_others():
    with Node(own_address()) as a:
        me = str(a.wire.addresses[0])
        for i in range(5 * TX_MESSAGES):
            a.put(bytes([i]) * 20, me)
            a.put(bytes([i]) * 20, "192.0.2.1")
        assert a.transmit() == 5 * TX_MESSAGES
        assert a["tx_dropped"] == 5 * TX_MESSAGES
        assert a["tx_error"] != 0
        assert [g.packet[0] for g in a.receive(5 * TX_MESSAGES)] == list(range(5 * TX_MESSAGES))


def test_a_pipe_of_nonsense_is_told():
    with Node(own_address()) as a:
        a.put(bytes(20), "127.0.0.1")
        a.memory.view(frames.FRAME.dtype, a.pipe - a.memory.address + frames.PIPE.size)[0]["stride"] = 7
        frames.publish(a.producer)
        assert udp.transmit(a.wire.address) == -1


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two machines, as it were, with a cable."""
    try:
        opened = (Namespace(), Namespace())
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    opened[0].connect(opened[1])
    yield opened
    for namespace in opened:
        namespace.close()


@pytest.mark.root
def test_a_packet_larger_than_the_mtu_is_dropped_and_segmentation_stays(namespaces):
    here, there = namespaces
    here.ip("address add 10.9.0.1/24 dev here")
    there.ip("address add 10.9.0.2/24 dev there")
    with here.run(Node, "10.9.0.1") as a, there.run(Node, "10.9.0.2") as b:
        small = packets_of(*[1000] * 4)
        for packet in [*packets_of(*[4000] * 3), *small]:
            a.put(packet, "10.9.0.2")
        assert a.transmit() == 4
        assert (a["tx_dropped"], a["tx_error"]) == (3, errno.EMSGSIZE)
        assert (a.wire.rows[0]["gso"], a.wire.rows[0]["segments"]) == (GSO_ON, MAX_SEGMENTS)
        assert packets(b.receive(4)) == small


@pytest.mark.root
@pytest.mark.parametrize("version", [4, 6])
def test_the_kernel_gives_segment_k_the_id_k(namespaces, version):
    """A device that takes no batches has the kernel cut them; scapy checks what a raw socket sees of IPv4's headers."""
    here, there = namespaces
    here.ip("link set here gso_max_segs 1")
    mine, yours = ("10.9.0.1", "10.9.0.2") if version == 4 else ("fd00::1", "fd00::2")
    here.ip(f"address add {mine}/64 dev here nodad" if version == 6 else f"address add {mine}/24 dev here")
    there.ip(f"address add {yours}/64 dev there nodad" if version == 6 else f"address add {yours}/24 dev there")
    sent = packets_of(*[1000] * 30, 16, 1000)
    with here.run(Node, mine) as a, there.run(Node, yours, gro=False) as b:
        raw = there.run(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
        raw.settimeout(10)
        a.send(sent, yours)
        assert a["tx_messages"] == 2
        got = b.receive(len(sent))
        assert packets(got) == sent
        assert {g.status for g in got} == {ICRC_FULL}
        if version == 4:
            for k, packet in enumerate(sent):
                seen = IP(raw.recv(2000))
                assert seen.id == (k if k < 31 else 0)
                icrc = bytes(seen)[-4:]
                assert seen[BTH].compute_icrc(b"") == icrc
                assert bytes(seen)[28:-4] == packet
        raw.close()


@pytest.mark.root
def test_link_local_addresses_reach_their_link(namespaces):
    here, there = namespaces
    here.ip("address add fe80::9:1/64 dev here nodad")
    there.ip("address add fe80::9:2/64 dev there nodad")
    with here.run(Node, "fe80::9:1%here") as a, there.run(Node, "fe80::9:2%there") as b:
        sent = packets_of(50, 50)
        a.send(sent, "fe80::9:2")
        assert packets(b.receive(2)) == sent
    with pytest.raises(InvalidValueError, match="%eth0"):
        here.run(Node, "fe80::9:1")


@pytest.mark.root
@pytest.mark.parametrize("gso", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_the_socket_has_no_room_for_stays_in_the_pipe(namespaces, gso):
    """Until the peer's address resolves, packets wait in the kernel and count against the send buffer."""
    here, there = namespaces
    here.ip("address add 10.9.0.1/24 dev here")
    with here.run(Node, "10.9.0.1", gso=gso) as a:
        with socket.socket(fileno=os.dup(a.wire.fds[0])) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent = [bytes([i]) * 1000 for i in range(200)]
        for i, packet in enumerate(sent):
            a.put(packet, "10.9.0.2", corrupt=77 if i == 150 else 0)
        early = a.transmit()
        assert 0 < early < 200
        assert a["tx_blocked"] > 0
        assert a.transmit() == 0
        there.ip("address add 10.9.0.2/24 dev there")
        with there.run(Node, "10.9.0.2") as b:
            got = b.receive(199, lambda: a.transmit() < 0, timeout=30)
            assert packets(got) == sent[:150] + sent[151:]
            assert (b["rx_icrc_encapsulated"], a["tx_frames"], a["tx_dropped"]) == (1, 200, 0)


# --- opening and closing -------------------------------------------------------------------------------------------


def test_an_address_in_use_is_named():
    address = own_address()
    with Node(address), pytest.raises(InUseError, match=rf"{address} port 4791 .*rdma_rxe.*ss -lunp"):
        Node(address)
    with Node(address):  # free again
        pass


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "fe80::1"])
def test_an_address_of_others_is_named(address):
    with pytest.raises(DocaError, match=rf"{address}"):
        Node(address)


@pytest.mark.parametrize(
    ("addresses", "options", "text"),
    [
        ([], {}, "1 to 8 addresses"), (["127.0.0.1"] * 9, {}, "1 to 8 addresses"), (["0.0.0.0"], {}, "cannot be a GID"),
        (["ff02::1"], {}, "cannot be a GID"), (["::ffff:127.0.0.1"], {}, "give it as IPv4Address"),
        (["127.0.0.1"], {"gid_indices": [256]}, "GID index 256"), (["127.0.0.1"], {"gid_indices": []}, "as many"),
        (["127.0.0.1", "127.0.0.2"], {"gid_indices": [1, 1]}, "different"),
    ],
)
def test_bad_arguments_are_explained(addresses, options, text):
    with pytest.raises(InvalidValueError, match=text):
        Node(*addresses, **options)


def test_a_failed_open_leaves_no_socket_behind():
    address = own_address()
    with pytest.raises(InvalidValueError, match=r"192\.0\.2\.1"):
        Node(address, "192.0.2.1")
    with Node(address) as node:
        assert len(node.wire.fds) == 1


def test_closing_twice_is_harmless():
    node = Node(own_address())
    node.wire.close()
    node.wire.close()
    assert node.wire.closed
    assert node.wire.fds == ()
