"""The wire by a Unix socket, with no rights: two NICs, and an end made by hand that speaks as QEMU does."""

import contextlib
import logging
import os
import socket
import time

import pytest
from scapy.layers.inet6 import ICMPv6ND_NA, ICMPv6ND_NS, ICMPv6NDOptSrcLLAddr, IPv6
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether

from gpunetio import PortConfig, verbs
from gpunetio.errors import InUseError, InvalidValueError, NotFoundError, OperatingSystemError, TimedOutError
from gpunetio.fabric.ethernet_records import STREAM
from gpunetio.fabric.ethernet_transmit import transmit_frames
from gpunetio.fabric.ethernet_wire import EthernetWire
from gpunetio.nic.wires import unix
from lan import End, ethernet_wire, exchange, join, learned, mac_text
from nic_child import Child
from nic_rig import REQ, SIZE, WRITE, raddr, until

V4 = ("10.9.0.1", "10.9.0.2")
STATION = "02:00:00:00:00:05"
MOST_OUTSTANDING = 30_000  # bytes: they fit into the pipe of frames to send


@contextlib.contextmanager
def nic(path, index, **port):
    with verbs.open(f"soft{index}", port=PortConfig(addresses=V4[index], wire=f"unix:{path}", **port)) as ctx:
        yield End(ctx, fill=index)


class Qemu:
    """An end made by hand: lengths, and frames."""

    def __init__(self, sock):
        self.sock = sock
        sock.settimeout(20)

    @classmethod
    def dial(cls, path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        return cls(sock)

    def send(self, frame, pieces=1):
        data = len(bytes(frame)).to_bytes(4, "big") + bytes(frame)
        step = -(-len(data) // pieces)
        for at in range(0, len(data), step):
            self.sock.sendall(data[at : at + step])

    def hear(self):
        return Ether(self._take(int.from_bytes(self._take(4), "big")))

    def _take(self, nbytes):
        data = b""
        while len(data) < nbytes:
            more = self.sock.recv(nbytes - len(data))
            assert more, "the NIC has closed the connection"
            data += more
        return data

    def ask(self, pieces=1):
        """ARP, and the answer."""
        question = ARP(hwsrc=STATION, psrc="10.9.0.5", pdst=V4[0])
        self.send(Ether(src=STATION, dst="ff:ff:ff:ff:ff:ff") / question, pieces)
        answer = self.hear()
        assert (answer[ARP].op, answer[ARP].psrc, answer.dst) == (2, V4[0], STATION)
        return answer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


def test_two_nics(path):
    with nic(path, 0) as a, nic(path, 1) as b:
        join(a, b)
        exchange(a, b)
        exchange(b, a)
        assert a.count("rx_icrc_encapsulated") == b.count("rx_icrc_encapsulated") == 0
    assert not path.exists()


def test_two_processes(path):
    """One of them listens, the other connects, and none of them needs any right."""
    child = Child("soft1", addresses=[V4[1]], wire=f"unix:{path}", mtu=9000)
    try:
        with nic(path, 0, mtu=9000) as a:
            a.queue.qp.connect(child.endpoint, ack_timeout=17, retry_cnt=7)
            child.connect(a.queue.qp.endpoint(), ack_timeout=17)
            for _ in range(200):
                a.queue.post(WRITE, raddr(child.address, child.key), a.here.at())
                assert a.queue.done.next().opcode == REQ
            assert a.count("tx_dropped") == 0
            assert child.ask("bytes", SIZE) == a.here.bytes.tobytes().hex()
    finally:
        child.close()


@pytest.mark.parametrize("tags", [Dot1Q(vlan=5, prio=3), Dot1AD(vlan=7) / Dot1Q(vlan=5)], ids=["one", "two"])
def test_questions_in_a_vlan_are_answered_there(path, tags):
    """By ARP and by neighbour discovery. Nobody there is a neighbour: a queue pair's packets have no tags."""
    wanted = bytes(Ether() / tags)[12:-2]
    port = PortConfig(addresses=(V4[0], "fd09::1"), wire=f"unix:{path}")
    with verbs.open("soft0", port=port) as ctx, contextlib.closing(Qemu.dial(path).sock) as sock:
        qemu, l2 = Qemu(sock), Ether(src=STATION, dst="ff:ff:ff:ff:ff:ff") / tags
        qemu.send(l2 / ARP(op=2, hwsrc=STATION, psrc=V4[1], pdst=V4[0]))
        qemu.send(l2 / ARP(hwsrc=STATION, psrc=V4[1], pdst=V4[0]))
        answer = qemu.hear()
        assert bytes(answer)[12:].startswith(wanted + b"\x08\x06")
        assert (answer.dst, answer[ARP].op, answer[ARP].psrc, answer[ARP].hwsrc) == (STATION, 2, V4[0], answer.src)
        solicitation = IPv6(src="fd09::2", dst="ff02::1:ff00:1", hlim=255) / ICMPv6ND_NS(tgt="fd09::1")
        qemu.send(l2 / solicitation / ICMPv6NDOptSrcLLAddr(lladdr=STATION))
        answer = qemu.hear()
        assert bytes(answer)[12:].startswith(wanted + b"\x86\xdd")
        assert (answer.dst, answer[ICMPv6ND_NA].tgt) == (STATION, "fd09::1")
        wire = ethernet_wire(ctx.provider.nic)
        with pytest.raises(NotFoundError, match="nobody on unix"):
            wire.neighbours.resolve(bytes(10) + b"\xff\xff" + bytes((10, 9, 0, 2)), 0.1)
        qemu.send(l2 / ARP(op=2, hwsrc=STATION, psrc=V4[1], pdst=V4[0]))
        assert ARP in qemu.hear()  # the question, without tags
        assert not learned(wire)


@pytest.mark.parametrize("pieces", [1, 3, 46])
def test_frames_in_pieces(path, pieces):
    with nic(path, 0) as a, contextlib.closing(Qemu.dial(path).sock) as sock:
        qemu = Qemu(sock)
        for _ in range(3):
            assert qemu.ask(pieces).src == mac_text(a.nic.mac)


def test_many_frames_at_once(path):
    """More than a batch, and the end of one that is not there yet."""
    with nic(path, 0) as a, contextlib.closing(Qemu.dial(path).sock) as sock:
        frame = bytes(Ether(src=STATION, dst="02:00:00:00:00:99", type=0x88B5)) + bytes(1000)
        data = (len(frame).to_bytes(4, "big") + frame) * 1000
        sock.sendall(data[:-500])
        until(lambda: a.count("rx_frames") == 999, "all whole frames")
        sock.sendall(data[-500:])
        until(lambda: a.count("rx_frame_other_mac") == 1000, "the last frame")
        Qemu(sock).ask()


def test_a_frame_that_leaves_in_parts():
    """TCP takes what fits, as a virtual machine's socket may. Then the rest leaves before the next frame."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        near.connect(server.getsockname())
        near.setblocking(False)
        far, _ = server.accept()
        wire = EthernetWire("test", near.fileno(), STREAM, bytes(6), [bytes(16)])
        far.settimeout(20)
        with contextlib.closing(far), contextlib.closing(wire):
            sent, got, parts = b"", b"", 0
            for i in range(600):
                frame = bytes([i & 0xFF]) * (60 + 131 * i % 9000)
                wire.send(frame)
                sent += len(frame).to_bytes(4, "big") + frame
                transmit_frames(wire.address, 0, 0)
                while len(sent) - len(got) > MOST_OUTSTANDING:
                    parts += int(wire.record["rest_at"] < wire.record["rest_end"])
                    got += far.recv(1 << 12)
                    transmit_frames(wire.address, 0, 0)
            while len(got) < len(sent):
                got += far.recv(1 << 16)
                transmit_frames(wire.address, 0, 0)
            assert got == sent
            assert parts > 0, "the socket has always taken all"


@pytest.mark.parametrize("length", [69633, 0xFFFF_FFFF])
def test_an_impossible_length_ends_the_connection(path, length, caplog):
    caplog.set_level(logging.INFO)
    with nic(path, 0):
        with contextlib.closing(Qemu.dial(path).sock) as sock:
            sock.sendall(length.to_bytes(4, "big") + bytes(100))
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        until(lambda: "waits for another" in caplog.text, "the log says so")
        with contextlib.closing(Qemu.dial(path).sock) as sock:
            Qemu(sock).ask()


def test_the_next_peer_is_taken(path):
    """A virtual machine that was started again."""
    with nic(path, 0) as a:
        for i in range(3):
            with contextlib.closing(_dial_until_taken(path, a, i)) as sock:
                Qemu(sock).ask()


def _dial_until_taken(path, a, count):
    del count
    until(lambda: a.nic.wire_to_others()._free.is_set(), "the NIC has noticed that the last one is gone")
    return Qemu.dial(path).sock


def test_a_peer_that_leaves_when_the_thread_is_behind(path):
    """The engine cannot tell the thread, which has more to hear than there is room for. The next peer is taken."""
    with nic(path, 0) as a:
        wire = ethernet_wire(a.nic)
        with wire.neighbours._changed:  # so that the thread hears nothing
            first = Qemu.dial(path)
            question = Ether(src=STATION, dst="ff:ff:ff:ff:ff:ff") / ARP(hwsrc=STATION, psrc="10.9.0.5", pdst=V4[0])
            for _ in range(5000):
                first.send(question)
            first.sock.close()
            until(lambda: wire.record["gone"], "the engine to notice")
        with contextlib.closing(_dial_until_taken(path, a, 1)) as sock:
            Qemu(sock).ask()


def test_no_frame_is_sent_on_a_wire_that_has_closed(path):
    """Whoever looks for a way may do so while the NIC closes."""
    with nic(path, 0) as a:
        wire = ethernet_wire(a.nic)
    wire.send(bytes(60))


def test_the_nic_connects_to_who_listens(path, caplog):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        with nic(path, 0):
            sock, _ = listener.accept()
            with contextlib.closing(sock):
                Qemu(sock).ask()
            until(lambda: "is gone: the NIC reaches nobody there" in caplog.text, "the log says so")
    assert path.exists(), "it belongs to who has made it"


def test_paths_that_cannot_be_used(path, tmp_path, monkeypatch):
    monkeypatch.setattr(unix, "PATIENCE", 0.3)

    def refused(kind, match, where):
        with pytest.raises(kind, match=match), nic(where, 1):
            pass

    (tmp_path / "file").write_text("")
    refused(InvalidValueError, "file exists, and is no socket", tmp_path / "file")
    refused(InvalidValueError, "at most 107 bytes", "x" * 108)
    refused(OperatingSystemError, "cannot listen at .*No such file", tmp_path / "none" / "s")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(tmp_path / "stale"))
    refused(NotFoundError, "nobody listens at .*stale any more. Remove the file", tmp_path / "stale")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as other:
        other.bind(str(tmp_path / "dgram"))
        refused(InvalidValueError, "a socket for datagrams", tmp_path / "dgram")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as busy, contextlib.ExitStack() as undo:
        busy.bind(str(tmp_path / "busy"))
        busy.listen(0)
        for _ in range(3):
            caller = undo.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(str(tmp_path / "busy"))
        refused(TimedOutError, "takes no connection", tmp_path / "busy")
    with nic(path, 0) as a, contextlib.closing(Qemu.dial(path).sock) as sock:
        qemu = Qemu(sock)
        qemu.ask()
        refused(InUseError, "has its peer already", path)
        qemu.ask()
        assert a.count("rx_frame_neighbour") == 2
    assert not os.path.exists(path)


def test_nobody_is_there_yet(path):
    """The NIC that listens works before anybody connects: what it sends is lost, and the peer is found later."""
    with nic(path, 0) as a:
        start = time.monotonic()
        with pytest.raises(NotFoundError, match=f"nobody on unix:{path} answers"):
            ethernet_wire(a.nic).neighbours.resolve(bytes(10) + b"\xff\xff\x0a\x09\x00\x02", 0.3)
        assert time.monotonic() >= start + 0.3
        with nic(path, 1) as b:
            join(a, b)
            exchange(a, b)
