"""The wire by Unix datagrams: two NICs, and an end made by hand that speaks as QEMU's `-netdev dgram` does."""

import contextlib
import os
import socket

import pytest
from scapy.layers.l2 import ARP, Ether

from gpunetio import PortConfig, verbs
from gpunetio.errors import InUseError, InvalidValueError, NotFoundError, OperatingSystemError
from lan import End, ethernet_wire, exchange, join, mac_text
from nic_rig import until

V4 = ("10.9.0.1", "10.9.0.2")
STATION = "02:00:00:00:00:05"


@contextlib.contextmanager
def nic(here, there, index=0):
    with verbs.open(f"soft{index}", port=PortConfig(addresses=V4[index], wire=f"dgram:{here},{there}")) as ctx:
        yield End(ctx, fill=index)


@contextlib.contextmanager
def qemu(here):
    """The other end."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sock:
        sock.bind(str(here))
        sock.settimeout(20)
        yield sock
    os.unlink(here)


def ask(sock, there, a):
    """ARP, and the answer."""
    question = Ether(src=STATION, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=STATION, psrc="10.9.0.5", pdst=V4[0])
    sock.sendto(bytes(question), str(there))
    answer = Ether(sock.recv(9000))
    assert (answer.src, answer.dst, answer[ARP].op, answer[ARP].psrc) == (mac_text(a.nic.mac), STATION, 2, V4[0])


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "a", tmp_path / "b"


def test_two_nics(paths):
    here, there = paths
    with nic(here, there, 0) as a, nic(there, here, 1) as b:
        join(a, b)
        exchange(a, b)
        exchange(b, a)
        assert a.count("tx_dropped") == b.count("tx_dropped") == 0
    assert not here.exists()
    assert not there.exists()


def test_an_end_that_comes_later_and_again(paths):
    here, there = paths
    with nic(here, there) as a:
        with pytest.raises(NotFoundError, match="answers"):
            ethernet_wire(a.nic).neighbours.resolve(bytes(10) + b"\xff\xff\x0a\x09\x00\x02", 0.2)
        for _ in range(2):
            with qemu(there) as sock:
                ask(sock, here, a)


def test_what_the_other_end_reads_slowly_is_not_lost(paths):
    """The kernel holds few datagrams: the others wait in the NIC."""
    here, there = paths
    with nic(here, there) as a, qemu(there) as sock:
        question = ARP(hwsrc=STATION, psrc="10.9.0.5", pdst=V4[0])
        for i in range(100):
            question.psrc = f"10.9.1.{i}"
            sock.sendto(bytes(Ether(src=STATION, dst="ff:ff:ff:ff:ff:ff") / question), str(here))
        until(lambda: a.count("rx_frame_neighbour") == 100, "the NIC to take all")
        assert [Ether(sock.recv(9000))[ARP].pdst for _ in range(100)] == [f"10.9.1.{i}" for i in range(100)]


def test_paths_that_cannot_be_used(paths, tmp_path):
    here, there = paths

    def refused(kind, match, *names):
        with pytest.raises(kind, match=match), nic(*names):
            pass

    refused(InvalidValueError, "needs two paths", here, "")
    refused(InvalidValueError, "needs two paths", here, here)
    refused(InvalidValueError, "at most 107 bytes, not 108", here, "x" * 108)
    refused(OperatingSystemError, "cannot make .*No such file", tmp_path / "none" / "s", there)
    (tmp_path / "file").write_text("kept")
    refused(InUseError, "file exists", tmp_path / "file", there)
    assert (tmp_path / "file").read_text() == "kept"
    with qemu(here):
        refused(InUseError, "another program has it", here, there)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as killed:
        killed.bind(str(here))
    with nic(here, there) as a, qemu(there) as sock:  # what it left is replaced
        ask(sock, here, a)
    assert not here.exists()
