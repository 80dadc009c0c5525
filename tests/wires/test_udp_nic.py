"""A software NIC on the UDP wire: what strangers can do to it, and which GIDs it reaches."""

import socket
from dataclasses import replace

import pytest

from gpunetio import PortConfig, verbs
from gpunetio.errors import InvalidValueError
from gpunetio.fabric.udp_records import RX_MESSAGES
from gpunetio.nic.control.links import links
from gpunetio.nic.state.counters import PACKET_FATES
from gpunetio.nic.transport.datagrams import ROUNDS, serve_socket
from nic_rig import REQ, SIZE, WRITE, Buffer, Queue, until
from udp_rig import own_address

PORT = 4791
UNCHECKED = bytes(4)  # where the ICRC belongs


class Two:
    """Two NICs that speak UDP, and a connected queue pair on each."""

    def __init__(self, *addresses: str, indices: tuple[int, int] = (0, 0)):
        self.addresses = addresses or (own_address(), own_address())
        ports = [PortConfig(addresses=(address,), wire="udp") for address in self.addresses]
        self.contexts = [verbs.open(f"soft{n}", port=port) for n, port in enumerate(ports)]
        pds = [ctx.create_pd() for ctx in self.contexts]
        self.a, self.b = (Queue(pd) for pd in pds)
        self.here, self.there = Buffer(pds[0], SIZE, fill=1), Buffer(pds[1], SIZE)
        ends = [queue.qp.endpoint(sgid_index=index) for queue, index in zip((self.a, self.b), indices, strict=True)]
        self.a.qp.connect(ends[1], sgid_index=indices[0], ack_timeout=19)
        self.b.qp.connect(ends[0], sgid_index=indices[1], ack_timeout=19)
        self.nic = self.contexts[1].provider.nic

    def __enter__(self) -> "Two":
        return self

    def __exit__(self, *exc: object) -> None:
        for ctx in self.contexts:
            ctx.close()

    def write(self) -> None:
        """Bytes arrive."""
        self.there.bytes[:] = 0
        self.a.post(WRITE, self.there.remote(), self.here.at())
        assert self.a.done.next().opcode == REQ
        assert (self.there.bytes == self.here.bytes).all()

    def counted(self, *names: str) -> tuple[int, ...]:
        return tuple(int(self.nic.counters[name]) for name in names)


@pytest.fixture
def two():
    with Two() as opened:
        yield opened


def bth(qpn: int, opcode: int = 4) -> bytes:
    """A BTH alone, of a SEND if not told otherwise."""
    return bytes([opcode, 0, 0xFF, 0xFF]) + qpn.to_bytes(4, "big") + bytes(4)


def sender(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, 0))
    return sock


def test_what_nobody_expects_costs_no_icrc(two):
    """Peer and QP are looked at first: no ICRC is computed, so none is found wrong."""
    two.write()
    qpn, where = two.b.qp.qpn, (two.addresses[1], PORT)
    before = two.counted("rdma_rx_packets")[0]
    with sender(own_address()) as stranger, sender(two.addresses[0]) as peer:
        stranger.sendto(bth(qpn) + UNCHECKED, where)
        peer.sendto(bth(qpn ^ 1) + UNCHECKED, where)
        peer.sendto(bth(qpn, opcode=0x24) + UNCHECKED, where)  # a UC packet
        until(lambda: two.counted("rdma_rx_packets")[0] == before + 3, "three packets")
        assert two.counted("rx_wrong_peer", "rx_no_qp", "rx_malformed", "rx_icrc_encapsulated") == (1, 1, 1, 0)
        peer.sendto(bth(qpn) + UNCHECKED, where)
        until(lambda: two.counted("rx_icrc_encapsulated") == (1,), "a packet with a wrong ICRC")
    assert two.counted("rdma_rx_packets") == (before + 3,)
    assert sum(two.counted(*PACKET_FATES)) == before + 3
    two.write()


def test_a_socket_has_a_share_of_a_turn(two):
    """However many datagrams wait, and whomever they are for."""
    two.write()
    (wire,) = (wire for wire in two.nic.links._wires if wire.sockets)
    two.nic.pause()  # the engine takes nothing
    most = ROUNDS * RX_MESSAGES
    with sender(own_address()) as stranger:
        for _ in range(most + 50):
            stranger.sendto(bth(5) + UNCHECKED, (two.addresses[1], PORT))
    assert [serve_socket(two.nic.control_address, wire.address, 0) for _ in range(3)] == [most, 50, 0]
    assert two.counted("rx_no_qp") == (most + 50,)
    two.nic.resume()
    two.write()


def test_traffic_goes_on_in_a_flood(two):
    """Between any two packets of ours there are many of a stranger's."""
    with sender(own_address()) as stranger:
        for _ in range(50):
            for _ in range(200):
                stranger.sendto(bth(two.b.qp.qpn) + UNCHECKED, (two.addresses[1], PORT))
            two.write()
    assert two.counted("rx_wrong_peer")[0] > 0
    assert two.counted("rx_icrc_encapsulated") == (0,)


# --- GIDs and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [(1, 1), (0, 1), (1, 0)], ids=str)
def test_the_link_local_gid_stands_for_the_address(indices):
    with Two(indices=indices) as two:
        two.write()
        assert two.counted("rx_wrong_peer", "rx_no_qp") == (0, 0)


def test_link_local_gids_without_an_address_are_refused(monkeypatch):
    """That of an IPv6 port names nothing that a socket could reach, and a link-local peer needs a link-local source."""
    monkeypatch.setattr(links, "can_reach", lambda address: True)
    with verbs.open("soft0", port=PortConfig(addresses=("::1",), wire="udp")) as ctx:
        qp = Queue(ctx.create_pd()).qp
        peer = qp.endpoint()
        for gid, index in (("2001:db8::1", 1), ("fe80::1", 0)):
            stranger = replace(peer, gid=socket.inet_pton(socket.AF_INET6, gid))
            wanted = rf"GID {gid} cannot be reached from GID index {index}: .*index 0"
            with pytest.raises(InvalidValueError, match=wanted):
                qp.connect(stranger, sgid_index=index)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_others_is_refused_when_the_nic_is_opened(address):
    with pytest.raises(InvalidValueError, match=rf"{address} is not an address of this machine"):
        verbs.open("soft0", port=PortConfig(addresses=("127.0.0.1", address), wire="udp"))
    with verbs.open("soft0", port=PortConfig(addresses=(address,))):  # between NICs of this host any will do
        pass
