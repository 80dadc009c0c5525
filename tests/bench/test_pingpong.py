"""gpunetio pingpong, and its talk held against a model of ibv_rc_pingpong's."""

import re
import socket
import threading
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.bench import launches, pingpong_cpu
from gpunetio.bench.pingpong import (
    ADDRESS_BYTES,
    PingPong,
    PingPongOptions,
    Played,
    pack_address,
    read_exactly,
    show_address,
    talk,
    unpack_address,
)
from gpunetio.cli import app
from gpunetio.enums import QpType
from gpunetio.errors import DocaError, InvalidValueError, TimedOutError
from gpunetio.rendezvous import PeerError
from gpunetio.verbs import QpEndpoint

HERE = QpEndpoint(0xB46001, bytes(10) + b"\xff\xff\x7f\0\0\x01", 0, 1024, 0x00F00D)
THERE = QpEndpoint(0x000011, bytes.fromhex("fe800000000000000000000000abcdef"), 0x2A, 1024, 0xFFFFFF)


# --- ibv_rc_pingpong, as far as TCP sees it: written from its behaviour, with nothing of ours ------------------------


@dataclass
class Model:
    """One end of the C program: what it prints with, parses with, and in which order it reads and writes."""

    lid: int
    qpn: int
    psn: int
    gid: str  # 32 digits
    cut: int = 52  # the first write is split here, as TCP may

    heard: tuple[int, int, int, str] | None = None

    def text(self) -> bytes:
        return f"{self.lid:04x}:{self.qpn:06x}:{self.psn:06x}:{self.gid}".encode() + b"\0"

    def say(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(data[: self.cut])
        sock.sendall(data[self.cut :])

    def hear(self, sock: socket.socket) -> None:
        data = sock.recv(52, socket.MSG_WAITALL)
        assert len(data) == 52
        assert data[51] == 0
        lid, qpn, psn, gid = data[:51].decode().split(":")
        self.heard = int(lid, 16), int(qpn, 16), int(psn, 16), gid

    def client(self, sock: socket.socket) -> None:
        self.say(sock, self.text())
        self.hear(sock)
        sock.sendall(b"done\0")
        sock.close()

    def server(self, sock: socket.socket) -> None:
        self.hear(sock)
        self.say(sock, self.text())
        assert sock.recv(52) == b"done\0"
        sock.close()


def model_of(end: QpEndpoint, cut: int = 52) -> Model:
    return Model(end.lid, end.qpn, end.psn, end.gid.hex(), cut)


def against(model, as_client, own=HERE):
    """Our end with the model as the other: what our end learnt, and when it connected."""
    a, b = socket.socketpair()
    b.settimeout(5)
    thread = threading.Thread(target=model.server if as_client else model.client, args=(b,))
    thread.start()
    connected = []
    with a:
        far = talk(a, "the peer", own, 1024, as_client, connected.append, 5)
    thread.join(5)
    assert connected == [far]
    return far


ends = st.builds(
    QpEndpoint, st.integers(0, 0xFFFFFF), st.binary(min_size=16, max_size=16), st.integers(0, 0xFFFF), st.just(1024),
    st.integers(0, 0xFFFFFF),
)


@settings(max_examples=50)
@given(ends, ends, st.integers(1, 51), st.booleans())
def test_either_end_may_be_the_kernels_tool(here, there, cut, as_client):
    model = model_of(there, cut)
    assert against(model, as_client, here) == there
    assert model.heard == (here.lid, here.qpn, here.psn, here.gid.hex())


def test_the_text():
    text = pack_address(THERE)
    assert text == b"002a:000011:ffffff:fe800000000000000000000000abcdef\0"
    assert len(text) == ADDRESS_BYTES
    assert text == model_of(THERE).text()
    assert unpack_address(text, 1024, "the peer") == THERE


@given(st.binary(max_size=60))
def test_other_texts_are_refused(data):
    with pytest.raises(PeerError, match="the peer is no rc_pingpong"):
        unpack_address(data, 1024, "the peer")


@pytest.mark.parametrize("text", ["+02a:", "0x2a:", "002a ", " 02a:", "-02a:", "002g:"])
def test_numbers_are_digits_only(text):
    with pytest.raises(PeerError):
        unpack_address(text.encode() + pack_address(THERE)[5:], 1024, "the peer")


@settings(max_examples=25)
@given(st.binary(max_size=120), st.booleans())
def test_nonsense_is_one_error_soon(data, as_client):
    a, b = socket.socketpair()
    with a, b:
        b.sendall(data)
        b.shutdown(socket.SHUT_WR)
        with pytest.raises(DocaError) as caught:
            talk(a, "the peer", HERE, 1024, as_client, lambda far: None, 0.5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("as_client", [False, True])
@pytest.mark.parametrize("said", [b"", b"00", pack_address(THERE)[:-1]])
def test_a_peer_that_hangs_or_dies(said, as_client):
    for dies, kind in ((False, TimedOutError), (True, PeerError)):
        a, b = socket.socketpair()
        with a, b:
            b.sendall(said)
            if dies:
                b.close()
            with pytest.raises(kind, match="the peer"):
                talk(a, "the peer", HERE, 1024, as_client, lambda far: None, 0.2)


def test_a_client_that_says_something_else_than_done():
    a, b = socket.socketpair()
    with a, b:
        b.sendall(pack_address(THERE) + b"fine\0")
        with pytest.raises(PeerError, match=r"sent b'fine\\x00' instead of b'done\\x00'"):
            talk(a, "the peer", HERE, 1024, False, lambda far: None, 1)


def test_a_dripping_peer_has_a_deadline():
    a, b = socket.socketpair()
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            b.sendall(b"0")

    thread = threading.Thread(target=drip)
    thread.start()
    with a, b:
        with pytest.raises(TimedOutError):
            read_exactly(a, 1000, "the peer", "its address", 0.3)
        stop.set()
        thread.join()


def test_lines_are_those_of_the_original():
    assert show_address("local", HERE) == (
        "  local address:  LID 0x0000, QPN 0xb46001, PSN 0x00f00d, GID ::ffff:127.0.0.1"
    )
    assert show_address("remote", THERE) == (
        "  remote address: LID 0x002a, QPN 0x000011, PSN 0xffffff, GID fe80::ab:cdef"
    )
    assert Played(4096, 1000, 0.0125).lines() == [
        "8192000 bytes in 0.01 seconds = 5242.88 Mbit/sec",
        "1000 iters in 0.01 seconds = 12.50 usec/iter",
    ]


# --- with queue pairs ------------------------------------------------------------------------------------------------


class ServerThread:
    """A server on soft0."""

    def __init__(self, **options):
        self.played = self.error = None
        self._up = threading.Event()
        wanted = PingPongOptions(device="soft0", tcp_port=0, **options)
        self._thread = threading.Thread(target=self._run, args=(wanted,))
        self._thread.start()
        assert self._up.wait(60)

    def _run(self, options):
        try:
            with PingPong(options) as end:
                end.meet(self._waiting)
                self.played = end.play()
        except DocaError as error:
            self.error = error
        finally:
            self._up.set()

    def _waiting(self, address, port):
        self.address = address, port
        self._up.set()

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server hangs"
        return self.error


def play(server, **options):
    address, port = server.address
    with PingPong(PingPongOptions(device="soft1", server=address, tcp_port=port, **options)) as end:
        end.meet()
        return end.play()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"validate": True}, {"size": 1, "rx_depth": 1}, {"size": 100_000, "rx_depth": 2},
        {"size": 9000, "validate": True, "mtu": 256}, {"iterations": 1}, {"rx_depth": 512, "iterations": 1100},
        {"gid_index": 0, "sl": 3}, pytest.param({"iterations": 3000}, marks=pytest.mark.slow),
        pytest.param({"rx_depth": 511, "iterations": 1100}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("server_plays", [{}, {"cpu": True}], ids=["kernel", "cpu"])
@pytest.mark.parametrize("client_plays", [{}, {"cpu": True}, {"events": True}], ids=["kernel", "cpu", "events"])
def test_both_ends_play(options, server_plays, client_plays):
    server = ServerThread(**options, **server_plays)
    played = play(server, **options, **client_plays)
    assert server.join() is None
    assert server.played is not None
    for one in (played, server.played):
        assert (one.size, one.iterations, one.problem) == (
            options.get("size", 4096), options.get("iterations", 1000), None,
        )


@pytest.mark.parametrize("qp_type", [QpType.UC, QpType.UD])
@pytest.mark.parametrize("options", [
    pytest.param({"size": 2048}, marks=pytest.mark.slow), {"size": 4096, "validate": True}, {"size": 1, "rx_depth": 1},
])
@pytest.mark.parametrize("plays", [{}, {"cpu": True}, {"events": True}], ids=["kernel", "cpu", "events"])
def test_other_services(qp_type, options, plays):
    """UC and UD; the CPU always plays for UD."""
    server = ServerThread(qp_type=qp_type, **options)
    played = play(server, qp_type=qp_type, **options, **plays)
    assert server.join() is None
    assert (played.size, played.iterations, played.problem) == (options["size"], 1000, None)


def test_a_datagram_that_is_too_long():
    with pytest.raises(InvalidValueError, match="a datagram of 4097 bytes: a packet of port 1 of soft0 has up to 4096"):
        PingPong(PingPongOptions(device="soft0", size=4097, qp_type=QpType.UD))


def test_wrong_contents_of_a_datagram():
    server = ServerThread(validate=True, iterations=50, size=100, qp_type=QpType.UD)
    play(server, iterations=50, size=100, qp_type=QpType.UD)
    assert server.join() is None
    assert server.played is not None
    assert "the byte at offset 0 of message 1 is wrong" in str(server.played.problem)


@pytest.mark.slow
def test_indices_that_wrap():
    """More messages than a doorbell record can count."""
    options = {"iterations": 70_000, "size": 8, "rx_depth": 100}
    server = ServerThread(**options)
    assert play(server, **options).iterations == 70_000
    assert server.join() is None


@pytest.mark.parametrize("plays", [{}, {"cpu": True}], ids=["kernel", "cpu"])
def test_wrong_contents_are_seen(plays):
    server = ServerThread(validate=True, iterations=50, **plays)
    play(server, iterations=50)
    assert server.join() is None
    assert server.played is not None
    assert server.played.problem is not None
    assert server.played.problem.startswith("the byte at offset 0 of message 1 is wrong")


def test_a_message_that_is_too_long():
    server = ServerThread(size=64)
    with pytest.raises(DocaError, match="error completion"):
        play(server, size=65)
    assert "a receive failed after 0 messages: LOCAL_LENGTH" in str(server.join())


def test_a_message_that_is_too_long_for_a_cpu():
    server = ServerThread(size=64, cpu=True)
    with pytest.raises(DocaError, match="a send failed after 0 messages: REM_INV_REQ_ERR"):
        play(server, size=65, cpu=True)
    assert "a receive failed after 0 messages: LOC_LEN_ERR" in str(server.join())


@pytest.mark.parametrize("plays", [{}, {"cpu": True}, {"events": True}], ids=["kernel", "cpu", "events"])
def test_a_client_that_sends_nothing(monkeypatch, plays):
    monkeypatch.setattr(launches, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(pingpong_cpu, "WAIT_SECONDS", 0.3)
    server = ServerThread(**plays)
    with socket.create_connection(server.address) as sock:
        model_of(HERE).client(sock)
    error = server.join()
    assert isinstance(error, TimedOutError)
    assert "nothing came for 0.3 s, after 0 messages" in str(error)


def test_options_are_checked():
    with pytest.raises(InvalidValueError, match="MTU 999"):
        PingPong(PingPongOptions(mtu=999))
    with pytest.raises(InvalidValueError, match="port 2"):
        PingPong(PingPongOptions(port=2))


# --- the command -----------------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["pingpong", *map(str, args)])


def test_the_command_for_datagrams():
    server = ServerThread(iterations=100, size=2048, qp_type=QpType.UD)
    result = run(server.address[0], "-p", server.address[1], "-d", "soft1", "-n", 100, "--qp-type", "ud")
    assert server.join() is None
    assert result.exit_code == 0
    assert "409600 bytes in " in result.stdout


@pytest.mark.parametrize("plays", [[], ["--cpu"], ["-e"]])
def test_the_command(plays):
    server = ServerThread(iterations=100)
    result = run(server.address[0], "-p", server.address[1], "-d", "soft1", "-n", 100, *plays)
    assert server.join() is None
    assert result.exit_code == 0
    patterns = [
        r"  local address:  LID 0x0000, QPN 0x[0-9a-f]{6}, PSN 0x[0-9a-f]{6}, GID ::ffff:127\.0\.0\.2",
        r"  remote address: LID 0x0000, QPN 0x[0-9a-f]{6}, PSN 0x[0-9a-f]{6}, GID ::ffff:127\.0\.0\.1",
        r"819200 bytes in \d+\.\d\d seconds = \d+\.\d\d Mbit/sec",
        r"100 iters in \d+\.\d\d seconds = \d+\.\d\d usec/iter",
    ]
    for line, pattern in zip(result.stdout.splitlines(), patterns, strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    "args, status, text",
    [
        (["-m", "1000"], 2, "--help)"), (["-s", "0"], 2, "--help)"), (["-r", "0"], 2, "--help)"),
        (["-p", "1", "127.0.0.1"], 1, "no server at 127.0.0.1 port 1"), (["a", "b"], 2, "--help)"),
        (["-g", "9"], 1, "no GID at index 9"), (["-d", "soft99"], 1, "no device 'soft99'"),
        (["-i", "2"], 1, "port 2"),
    ],
)
def test_mistakes(args, status, text):
    result = run(*args)
    assert result.exit_code == status
    (line,) = result.stderr.splitlines()
    assert text in line
