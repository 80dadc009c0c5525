"""The talk of two benchmark processes: whatever the peer does, there is one clear error, and soon."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import PortConfig, verbs
from gpunetio.bench import launches, remote
from gpunetio.bench.measure import measure
from gpunetio.bench.options import BENCHMARKS, Options
from gpunetio.bench.remote import Client, Server
from gpunetio.bench.results import BwResult, Check
from gpunetio.enums import ExecScope
from gpunetio.errors import DocaError, DriverError, InvalidValueError, OperatingSystemError, TimedOutError
from gpunetio.gpu import ExportedQp
from gpunetio.rendezvous import link as exchange
from gpunetio.rendezvous.link import (
    MAX_BODY,
    VERSION,
    Decoder,
    Link,
    Message,
    PeerError,
    PeerInterrupted,
    accept,
    dial,
    encode,
    listen,
    own_address,
)
from nic_rig import until

ALL = list(BENCHMARKS)
LATENCY = [name for name, benchmark in BENCHMARKS.items() if benchmark.latency]
# Of what takes seconds each: those that differ in what the ends do, and the others in the slow suite.
SOME = [
    pytest.param(name, marks=() if name in ("put_bw", "get_bw", "write_lat", "twosided_bw") else pytest.mark.slow)
    for name in BENCHMARKS
]
ONE = [pytest.param(name, marks=() if name == "put_bw" else pytest.mark.slow) for name in BENCHMARKS]
PEER = "the client 10.0.0.1"


def raw(body: bytes, magic: bytes = b"GPNT", version: int = VERSION, length: int | None = None) -> bytes:
    return struct.pack(">4sHI", magic, version, len(body) if length is None else length) + body


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


@contextlib.contextmanager
def linked(patience=5.0):
    """A link, and the plain socket of its peer."""
    a, b = socket.socketpair()
    link = Link(FakeTcp(a), PEER, patience)
    try:
        with b:
            b.settimeout(5)
            assert b.recv(100) == encode("ping")  # as every link begins
            yield link, b
    finally:
        link.close()


class FakeTcp(socket.socket):
    """A Unix socket that takes TCP's options."""

    def __init__(self, sock):
        super().__init__(fileno=sock.detach())

    def setsockopt(self, level, *args):
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *args)


# --- messages --------------------------------------------------------------------------------------------------------

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3))
bodies = st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "kind"), values, max_size=4)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(), bodies), max_size=4), st.data())
def test_messages_survive_any_cut(messages, data):
    stream = b"".join(encode(kind, **body) for kind, body in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    decoder = Decoder(PEER)
    found = [m for a, b in zip([0, *cuts], [*cuts, len(stream)]) for m in decoder.feed(stream[a:b])]
    assert [(m.kind, {k: v for k, v in m.items() if k != "kind"}) for m in found] == messages
    assert not decoder.within


nonsense = st.binary(max_size=80) | st.builds(
    raw, st.binary(max_size=60), st.sampled_from([b"GPNT", b"GET "]), st.sampled_from([VERSION, 0, 65535]),
    st.none() | st.integers(0, (1 << 32) - 1),
)


@given(nonsense)
def test_random_bytes_are_messages_or_one_error(data):
    with contextlib.suppress(PeerError):
        assert all(isinstance(message, Message) for message in Decoder(PEER).feed(data))


@settings(max_examples=25)
@given(nonsense)
def test_a_peer_that_speaks_nonsense_is_one_error_soon(data):
    with linked(patience=0.5) as (link, peer):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError) as caught:
            link.expect("hello")
        assert one_line(caught.value).startswith(PEER)


@pytest.mark.parametrize(
    "data, text",
    [
        (b"GET / HTTP/1.0\r\n", "is not a gpunetio program: it sent b'GET ' instead of b'GPNT'"),
        (b"x", "is not a gpunetio program"),
        (raw(b"{}", version=77), f"speaks version 77 of the protocol and this end version {VERSION}"),
        (raw(b"", length=MAX_BODY + 1), f"announced a message of {MAX_BODY + 1} bytes: {MAX_BODY} is the limit"),
        (raw(b"{"), "not a JSON object with a kind"),
        (raw(b"[]"), "not a JSON object with a kind"),
        (raw(b"{}"), "not a JSON object with a kind"),
        (raw(b'{"kind": 1}'), "not a JSON object with a kind"),
        (raw(b"\xff"), "not a JSON object with a kind"),
        (raw(b"[" * 100_000), "not a JSON object with a kind"),
        (raw(b'{"kind": "hello", "n": ' + b"9" * 10_000 + b"}"), "not a JSON object with a kind"),
        (encode("other"), "sent 'other' instead of 'hello'"),
        (encode("hello")[:-1], "closed the connection in the middle of a message"),
        (b"", "closed the connection: it died"),
        (encode("error", text="boom\x1b[2J"), "ended with an error: boom?[2J"),
        (encode("interrupted"), "was interrupted (Ctrl+C)"),
        (encode("spam") * 100, "messages that this end did not ask for"),
    ],
)
def test_what_is_wrong_is_said(data, text):
    with linked() as (link, peer):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        if "did not ask" in text:  # the first of them is there before the last
            until(lambda: link.failure, "the failure")
            assert text in str(link.failure)
            return
        with pytest.raises(PeerError) as caught:
            link.expect("hello")
        assert text in one_line(caught.value)


def test_a_silent_peer_hangs():
    with linked(patience=0.3) as (link, _), pytest.raises(TimedOutError, match=r"silent for 0\.3 s: it hangs"):
        link.expect("hello", timeout=5)


@pytest.mark.usefixtures("brief_end")
def test_a_peer_that_pings_and_does_not_answer_is_too_late():
    a, b = socket.socketpair()
    ends = Link(FakeTcp(a), PEER), Link(FakeTcp(b), "the server")
    with pytest.raises(TimedOutError, match=r"did not send 'ready' within 0\.3 s"):
        ends[0].expect("ready", timeout=0.3)
    assert ends[0].failure is None
    for end in ends:
        end.close()


def test_an_interrupt_at_the_end_waits_until_the_peer_has_heard(monkeypatch):
    """A second Ctrl+C, while the first one's last word waits for the thread that reads."""
    with linked() as (link, peer):
        join = link._reader.join

        def interrupted(*arguments):
            signal.raise_signal(signal.SIGINT)
            return join(*arguments)

        monkeypatch.setattr(link._reader, "join", interrupted)
        threading.Timer(0.2, peer.shutdown, (socket.SHUT_WR,)).start()  # so that nobody waits for it
        with pytest.raises(KeyboardInterrupt):
            link.close(KeyboardInterrupt())
        assert b"interrupted" in peer.recv(1000)
        assert link._socket.fileno() == -1


def test_a_caller_who_goes_while_another_one_comes(monkeypatch):
    """The oldest caller has left, and is hung up on for want of room in the same look."""
    monkeypatch.setattr(exchange, "MOST_CALLERS", 1)
    with exchange.listen("127.0.0.1", 0) as listener, exchange.Callers(listener) as callers:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert callers.look(time.monotonic() + 20) is None
        select = callers._selector.select

        def listener_first(timeout):
            while len(ready := select(timeout)) < 2:
                time.sleep(0.001)
            return sorted(ready, key=lambda one: one[0].fileobj is not listener)

        monkeypatch.setattr(callers._selector, "select", listener_first)
        with socket.create_connection(("127.0.0.1", port)) as second:
            assert callers.look(time.monotonic() + 20) is None
            monkeypatch.undo()
            second.sendall(b"GPNT")
            found = None
            while found is None:
                found = callers.look(time.monotonic() + 20)
            found[0].close()


@pytest.mark.slow
@pytest.mark.usefixtures("brief_end")
def test_pings_keep_a_talk_alive(monkeypatch):
    monkeypatch.setattr(exchange, "PING_SECONDS", 0.1)
    a, b = socket.socketpair()
    ends = Link(FakeTcp(a), PEER, 2.0), Link(FakeTcp(b), "the server", 2.0)
    time.sleep(3)
    ends[1].send("hello")
    assert ends[0].expect("hello").kind == "hello"
    for end in ends:
        end.close()


def test_the_last_word_is_read_before_the_end():
    """Even with bytes on the way that nobody reads."""
    for _ in range(10):
        a, b = socket.socketpair()
        ends = Link(FakeTcp(a), PEER), Link(FakeTcp(b), "the server")
        with contextlib.suppress(DocaError):
            for _ in range(5):
                ends[1].send("chatter")
        closer = threading.Thread(target=ends[0].close, args=(ValueError("out of\nbeans"),))
        closer.start()
        with pytest.raises(PeerError, match="the server ended with an error: out of beans"):
            ends[1].expect("hello")
        ends[1].close()
        closer.join()


def test_an_end_with_unread_bytes_is_no_reset():
    """The reader has stopped at the nonsense, and the peer went on."""
    with linked() as (link, peer):
        peer.sendall(b"nonsense")
        until(lambda: link.failure, "the failure, after which nothing is read")
        peer.sendall(b"and more of it")
        peer.shutdown(socket.SHUT_WR)
        link.close(ValueError("out of beans"))
        last = Decoder("this end").feed(b"".join(iter(lambda: peer.recv(1000), b"")))[-1]
        assert (last.kind, last["text"]) == ("error", "out of beans")


@pytest.mark.parametrize("news", [encode("hello"), encode("error", text="boom")], ids=["message", "end"])
def test_news_end_a_wait_for_them(news):
    with linked(patience=60) as (link, peer):
        waiter = threading.Thread(target=link.wait_for_news, args=(60,), daemon=True)
        waiter.start()
        peer.sendall(news)
        waiter.join(10)
        assert not waiter.is_alive()


def test_ctrl_c_is_told():
    a, b = socket.socketpair()
    ends = Link(FakeTcp(a), PEER), Link(FakeTcp(b), "the server")
    closer = threading.Thread(target=ends[0].close, args=(KeyboardInterrupt(),))
    closer.start()
    with pytest.raises(PeerInterrupted):
        ends[1].expect("hello")
    ends[1].close()
    closer.join()


def test_sending_to_the_dead_says_why():
    with linked() as (link, peer):
        peer.sendall(encode("error", text="no memory"))
        peer.close()

        def chatter():
            for _ in range(1000):
                link.send("hello", padding="x" * 10_000)
                time.sleep(0.01)

        with pytest.raises(PeerError, match="no memory"):
            chatter()


def test_why_a_kernel_failed(monkeypatch):
    """A peer's death reaches the NIC before the connection is closed."""

    def launch(*args, **options):
        threading.Timer(0.2, peer.close).start()
        raise DriverError("no answer through all retries")

    monkeypatch.setattr(launches.Launcher, "launch", launch)
    with linked() as (link, peer):
        end = object.__new__(Client)
        end.link = link
        with pytest.raises(PeerError, match="closed the connection"):
            end.launch(None, 1, 1)
    monkeypatch.setattr(exchange, "WHY_SECONDS", 0.1)
    monkeypatch.setattr(threading, "Timer", lambda *args: threading.Thread())
    with linked() as (link, peer):
        end.link = link
        with pytest.raises(DriverError, match="no answer"):
            end.launch(None, 1, 1)


@pytest.mark.parametrize("body", [{}, {"n": -1}, {"n": 11}, {"n": True}, {"n": 1.0}, {"n": "1"}, {"n": None}])
def test_fields_are_checked(body):
    with pytest.raises(PeerError, match=r"sent 'size' with n .*: it must be an integer from 0 to 10"):
        Message(PEER, {"kind": "size", **body}).integer("n", 0, 10)


@given(st.dictionaries(st.sampled_from(["a", "b"]), values))
def test_no_field_crashes(body):
    message = Message(PEER, {"kind": "x", **body})
    for read in (
        lambda: message.integer("a", 0, 9), lambda: message.number("a", 0, 9), lambda: message.text("a"),
        lambda: message.raw("a", 4), lambda: message.part("a"), lambda: message.parts("a", 4),
    ):
        with contextlib.suppress(PeerError):
            read()


# --- how it begins ---------------------------------------------------------------------------------------------------


def test_nobody_there():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(OperatingSystemError, match=f"no server at 127.0.0.1 port {port}: Connection refused"):
            dial("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "", "a..b", "\udcff"])
def test_no_address(host):
    if host:
        with pytest.raises(OperatingSystemError, match="is not an address"):
            dial(host, 1)


def test_the_port_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: .*Choose another --port"):
            listen("127.0.0.1", port)


def test_one_client_only():
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with dial("127.0.0.1", port) as client:
        client.sendall(encode("ping"))
        sock, caller = accept(listener, timeout=5)
        sock.close()
        assert caller == "127.0.0.1"
        with pytest.raises(OperatingSystemError, match="Connection refused"):
            dial("127.0.0.1", port)


def test_no_client_calls():
    with pytest.raises(TimedOutError, match="no client connected"):
        accept(listen("127.0.0.1", 0), timeout=0.05)


def stray(port, said=b""):
    sock = dial("127.0.0.1", port)
    sock.sendall(said)
    return sock


def test_strangers_do_not_keep_the_client_out(caplog, monkeypatch):
    """Who hangs up, speaks something else, or says nothing is no client, and the server waits on."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    monkeypatch.setattr(exchange, "MOST_CALLERS", 4)
    with contextlib.ExitStack() as undo:
        undo.enter_context(stray(port)).shutdown(socket.SHUT_RDWR)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"", b"GP", b"\0"):
            undo.enter_context(stray(port, said))
        for _ in range(4):
            undo.enter_context(stray(port))
        undo.enter_context(stray(port, encode("ping")))
        sock, _ = accept(listener, timeout=10)
        with sock:
            assert sock.recv(1 << 16) == encode("ping")  # nothing was taken from it
    told = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1 connected and has disconnected: it is not a client; still waiting for one" in told
    assert "127.0.0.1 connected and has sent b'GET ': it is not a client; still waiting for one" in told
    assert any("has sent nothing, and many others are connecting" in text for text in told)


@pytest.mark.slow
def test_a_stranger_that_says_nothing_is_hung_up_on(caplog, monkeypatch):
    monkeypatch.setattr(exchange, "STEP_SECONDS", 0.05)
    listener = listen("127.0.0.1", 0)
    with stray(listener.getsockname()[1], b"GP") as silent:
        with pytest.raises(TimedOutError, match="no client connected within 1 s"):
            accept(listener, timeout=1)
        silent.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # which closing with unread bytes is
            assert silent.recv(1) == b""
    assert "127.0.0.1 connected and has sent nothing: it is not a client; still waiting for one" in caplog.text


def test_a_server_of_a_benchmark_waits_on():
    server = ServerThread("put_bw")
    with stray(server.address[1] if server.address[0] == "127.0.0.1" else 0, b"GET "):
        puppet = Puppet(server, "put_bw")
    puppet.play("ends")
    puppet.die()
    assert isinstance(server.join(), PeerError)
    puppet.link.close()


@pytest.mark.parametrize(("bound", "shown"), [("127.0.0.6", "127.0.0.6"), ("::1", "::1"), ("0.0.0.0", "0.0.0.0")])
def test_who_listens(bound, shown):
    with socket.create_server((bound, 0), family=socket.AF_INET6 if ":" in bound else socket.AF_INET) as server:
        port = server.getsockname()[1]
        assert exchange.listening(port) == [shown]
    assert exchange.listening(port) == []


def test_a_server_listens_on_the_address_of_its_nic():
    for name, address in (("soft0", "127.0.0.1"), ("soft3", "127.0.0.4")):
        with verbs.open(name) as ctx:
            assert own_address(ctx, 0) == address
    with verbs.open("soft4", port=PortConfig(addresses="192.0.2.1")) as ctx:
        assert own_address(ctx, 0) == "0.0.0.0"  # this host has no such address


# --- benchmarks ------------------------------------------------------------------------------------------------------


def options(name, device="soft0", **values):
    asked = frozenset(values) & {"sizes", "iterations", "duration", "qps"}
    return Options(
        benchmark=BENCHMARKS[name], device=device, tcp_port=0,
        **{"gpu": "host", "sizes": (64,), "iterations": 300, **values, "asked": asked},
    )


class ServerThread:
    """A server on soft0: its results and what it raised, and the address to call."""

    def __init__(self, name, **values):
        self.results, self.error, self.server = [], None, None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(options(name, **values),))
        self._thread.start()
        assert self._up.wait(60)
        self.address = self._address

    def _run(self, wanted):
        try:
            with Server(wanted, self._waiting) as self.server:
                self.results.extend(self.server.results())
        except DocaError as error:
            self.error = error
        finally:
            self._up.set()

    def _waiting(self, address, port):
        self._address = address, port
        self._up.set()

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server hangs"
        return self.error


def run_client(server, name, **values):
    """A client on soft1 of a ServerThread: its results."""
    address, port = server.address
    wanted = dataclasses.replace(options(name, "soft1", **values), server=address, tcp_port=port)
    with Client(wanted) as client:
        results = []
        for index, size in enumerate(client.options.sizes):
            results.append(measure(client, index, size))
            client.tell(results[-1])
        client.finish()
    return results


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "payload"
    path.write_bytes(np.random.default_rng(1).bytes(100_003))
    return path


def given_to(name, side, file):
    """The payload option of one side, when the sender has it."""
    return {"payload": file} if (side == "server") == BENCHMARKS[name].reads else {}


@pytest.mark.parametrize("name", ALL)
def test_both_ends_agree_on_what_arrived(name):
    server = ServerThread(name)
    results = run_client(server, name, sizes=(1, 7, 4096, 100_000), qps=1 if name in LATENCY else 2)
    assert server.join() is None
    check = Check(flag=300 if name in ("put_signal_bw", "put_counter_bw") else None)
    assert [(r.size, r.iterations, r.check) for r in results] == [(n, 300, check) for n in (1, 7, 4096, 100_000)]
    assert server.results == results


@pytest.mark.parametrize(
    "late", ["soft0", pytest.param("soft1", marks=pytest.mark.slow)], ids=["server", "client"]
)
@pytest.mark.parametrize("name", ["put_bw", pytest.param("write_lat", marks=pytest.mark.slow)])
def test_an_end_that_connects_late(name, late, monkeypatch):
    """Later than the other one's retries would last."""
    connect = ExportedQp.connect

    def connect_late(self, *args, **options):
        if self.qp.ctx.name == late:
            time.sleep(1.5)
        connect(self, *args, **options)

    monkeypatch.setattr(ExportedQp, "connect", connect_late)
    server = ServerThread(name)
    (result,) = run_client(server, name)
    assert server.join() is None
    assert result.check == Check()


@pytest.mark.parametrize("name", SOME)
def test_a_duration(name):
    server = ServerThread(name, duration=0.2)
    (result,) = run_client(server, name)
    assert server.join() is None
    assert result.iterations > 0
    flag = result.iterations if name in ("put_signal_bw", "put_counter_bw") else None
    assert result.check == Check(flag=flag)


@pytest.mark.parametrize("name", ALL)
def test_a_payload_arrives(name, file, monkeypatch):
    monkeypatch.setattr("gpunetio.bench.run.BUFFER_BYTES", 65536)  # so that it goes in parts
    server = ServerThread(name, **given_to(name, "server", file))
    results = run_client(server, name, sizes=(100, 4096, 200_000), iterations=2000, **given_to(name, "client", file))
    assert server.join() is None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert [dataclasses.replace(r.check, flag=None) for r in results] == [Check(None, 100_003, digest)] * 3
    assert server.results == results


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("with_payload", [False, True])
def test_a_wrong_byte_is_seen_at_both_ends(name, with_payload, file, monkeypatch):
    """A byte of the receiver changes after the transfer."""
    kinds = [remote.Pattern, remote.Arrival]
    before = {kind: kind.collect for kind in kinds}

    def corrupting(data, first, count):
        for sink in data._ends.sinks[:1]:
            sink.write(sink.read(7, 1) ^ 0x10, 7)
        before[type(data)](data, first, count)

    for kind in kinds:
        monkeypatch.setattr(kind, "collect", corrupting)
    payload = dict(given_to(name, "server", file)) if with_payload else {}
    server = ServerThread(name, **payload)
    payload = dict(given_to(name, "client", file)) if with_payload else {}
    iterations = 2000 if with_payload else 255  # one launch after the warm-up, so that it is not changed back
    (result,) = run_client(server, name, sizes=(100,), iterations=iterations, **payload)
    assert server.join() is None
    assert result.check.problem is not None
    assert result.check.problem.startswith("message size 100: ")
    assert server.results[0].check == result.check


@pytest.mark.parametrize(
    "ours, theirs, text",
    [
        ({"sizes": (64,)}, {"sizes": (64, 128)}, "has --size 64, 128, this end 64: give the same to both"),
        ({"iterations": 10}, {"iterations": 20}, "has --iters 20, this end 10"),
        ({"duration": 0.5}, {"duration": 1.0}, "has --duration 1, this end 0.5"),
        ({"duration": 0.5}, {"iterations": 20}, "they exclude each other"),
        ({"qps": 2}, {"qps": 3}, "has --qp 3, this end 2"),
    ],
)
def test_ends_that_disagree(ours, theirs, text):
    server = ServerThread("put_bw", **ours)
    with pytest.raises(PeerError):
        run_client(server, "put_bw", **theirs)
    error = server.join()
    assert isinstance(error, PeerError)
    assert text in one_line(error)


@pytest.mark.parametrize("depth", [4, 8])
def test_a_server_with_too_few_receives(depth):
    """For threads that send together, and would wait for the last of them."""
    server = ServerThread("twosided_bw", depth=depth)
    with pytest.raises(InvalidValueError, match=f"-e 2: 8 threads send together.* of {depth} slots.*--tx-depth 16"):
        run_client(server, "twosided_bw", scope=ExecScope.BLOCK, threads=8)
    assert "--tx-depth 16" in str(server.join())


@pytest.mark.parametrize("ours, theirs", [(16, 2048), (2048, 16)])
def test_queues_of_different_depths(ours, theirs):
    server = ServerThread("twosided_bw", depth=ours)
    (result,) = run_client(server, "twosided_bw", scope=ExecScope.BLOCK, threads=8, depth=theirs)
    assert server.join() is None
    assert result.check == Check()


def test_another_benchmark():
    server = ServerThread("put_bw")
    with pytest.raises(PeerError, match="runs put_bw, but this end get_bw: run the same at both ends"):
        run_client(server, "get_bw")
    assert "runs get_bw, but this end put_bw" in str(server.join())


def test_payloads_that_differ(file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    server = ServerThread("put_bw", payload=other)
    with pytest.raises(PeerError, match="another --payload: 5 bytes with SHA-256"):
        run_client(server, "put_bw", payload=file)
    server.join()
    server = ServerThread("put_bw", payload=file)
    with pytest.raises(PeerError, match="this end sends the data, but has no --payload"):
        run_client(server, "put_bw")
    assert "sends the data, but has no --payload" in str(server.join())
    server = ServerThread("put_bw", duration=1.0)
    with pytest.raises(DocaError, match="do not give --duration"):
        run_client(server, "put_bw", payload=file)
    server.join()


# --- a peer that goes away -------------------------------------------------------------------------------------------


class Puppet:
    """A client that says what a test makes it say, through a real queue pair."""

    def __init__(self, server, name):
        self.socket = dial(*server.address)
        self.link = Link(self.socket, "the server")
        self.name = name

    def die(self):
        """Have the kernel end the connection, as after the end of a process."""
        self.socket.shutdown(socket.SHUT_RDWR)

    steps = ("hello", "ends", "ready", "size", "prepare", "collect", "check", "result", "end")

    def play(self, upto):
        """All steps before the one of this name."""
        for step in self.steps[: self.steps.index(upto)]:
            getattr(self, step)()

    def hello(self):
        self.link.send("hello", benchmark=self.name, asked={}, payload=None)
        self.link.expect("hello")

    def ends(self):
        gid = bytes(10) + b"\xff\xff\x7f\0\0\1"
        qp = {"qpn": 0x77, "gid": gid.hex(), "lid": 0, "mtu": 4096, "psn": 0}
        self.link.send("ends", address=4096, rkey=1, nbytes=1 << 30, receives=0, qps=[qp])
        self.link.expect("ends")

    def ready(self):
        self.link.send("ready")
        self.link.expect("ready", timeout=60)

    def size(self):
        self.link.send("size", size=64, value=1)

    def prepare(self):
        self.link.send("prepare", first=0, count=10, marks="", counters=1)
        self.link.expect("ready", timeout=60)

    def collect(self):
        self.link.send("collect", sha256="")
        self.link.expect("collected")

    def check(self):
        self.link.send("check")
        self.link.expect("checked")

    def result(self):
        result = BwResult.of(64, [(10, 640, 1.0)], Check())
        self.link.send("result", **{**dataclasses.asdict(result), "check": {"problem": None}})

    def end(self):
        self.link.send("end")
        self.link.expect("end")


@pytest.fixture
def brief_end(monkeypatch):
    """A peer that has stopped playing reads no last message: a closing link need not wait long for it."""
    monkeypatch.setattr(exchange, "LINGER_SECONDS", 0.05)


# The steps between the first, one in the middle and the last are in the slow suite.
STEPS = pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=() if step in ("hello", "size", "end") else pytest.mark.slow) for step in Puppet.steps],
)


@STEPS
def test_a_client_that_dies(step):
    server = ServerThread("put_bw")
    puppet = Puppet(server, "put_bw")
    puppet.play(step)
    puppet.die()
    error = server.join()
    puppet.link.close()
    assert isinstance(error, PeerError)
    assert "closed the connection" in one_line(error)


@STEPS
@pytest.mark.usefixtures("brief_end")
def test_a_client_that_hangs(step, monkeypatch):
    monkeypatch.setattr(exchange, "STEP_SECONDS", 0.5)
    server = ServerThread("put_bw")
    puppet = Puppet(server, "put_bw")
    puppet.play(step)
    with puppet.link._sending:  # no ping either
        error = server.join()
    puppet.link.close()
    assert isinstance(error, TimedOutError)
    assert "the client 127.0.0.1 " in one_line(error)


@STEPS
@pytest.mark.usefixtures("brief_end")
def test_a_client_that_speaks_nonsense(step):
    server = ServerThread("put_bw")
    puppet = Puppet(server, "put_bw")
    puppet.play(step)
    puppet.link.send("nonsense")
    error = server.join()
    puppet.link.close()
    assert isinstance(error, PeerError)
    assert "sent 'nonsense' instead of" in one_line(error)


WRONG_VALUES = [
    ("hello", {"benchmark": 7}), ("ends", {}), ("size", {}), ("prepare", {}), ("result", {}),
    ("size", {"size": 64, "value": 256}), ("prepare", {"first": 300, "count": 1}),
]
MORE_WRONG_VALUES = [
    ("hello", {"benchmark": "put_bw"}),
    ("hello", {"benchmark": "put_bw", "asked": {"sizes": [0]}}),
    ("hello", {"benchmark": "put_bw", "asked": {"sizes": []}}),
    ("hello", {"benchmark": "put_bw", "asked": {"qps": 1 << 40}}),
    ("hello", {"benchmark": "put_bw", "asked": {"duration": -1}}),
    ("hello", {"benchmark": "put_bw", "asked": {}, "payload": {"nbytes": -1}}),
    ("ends", {"nbytes": 1, "qps": []}), ("ends", {"nbytes": 1 << 30, "qps": [{}]}),
    ("ends", {"nbytes": 1 << 30, "qps": [{"gid": "00", "mtu": 1024}]}),
    ("size", {"size": 65, "value": 1}), ("prepare", {"first": 0, "count": 1 << 40}), ("result", {"size": 64}),
]


@pytest.mark.parametrize(
    "step, body", [*WRONG_VALUES, *(pytest.param(*values, marks=pytest.mark.slow) for values in MORE_WRONG_VALUES)]
)
@pytest.mark.usefixtures("brief_end")
def test_a_client_with_wrong_values(step, body):
    server = ServerThread("put_bw")
    puppet = Puppet(server, "put_bw")
    puppet.play(step)
    puppet.link.send(step, **body)
    error = server.join()
    puppet.link.close()
    assert isinstance(error, DocaError)
    assert "the client 127.0.0.1 " in one_line(error)


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("how", ["dies", "is interrupted", "fails"])
def test_a_server_that_goes_while_the_kernel_runs(name, how, monkeypatch):
    """In a latency test the client's kernel would wait for longer than a test may last."""
    monkeypatch.setattr(launches, "WAIT_SECONDS", 600)
    server = ServerThread(name, duration=30.0)

    def go():
        while server.server is None:  # until the client's part of it is done
            time.sleep(0.01)
        time.sleep(0.3)
        link = server.server.link
        if how == "dies":
            link._gone = True
            link._socket.shutdown(socket.SHUT_RDWR)
        else:
            link.close(KeyboardInterrupt() if how == "is interrupted" else ValueError("no more"))

    goer = threading.Thread(target=go)
    goer.start()
    with pytest.raises(PeerInterrupted if how == "is interrupted" else PeerError) as caught:
        run_client(server, name)
    goer.join()
    server.join()
    expected = {"dies": "closed the connection", "is interrupted": "Ctrl+C", "fails": "ended with an error: no more"}
    assert expected[how] in one_line(caught.value)


@pytest.mark.parametrize("name", ONE)
def test_ctrl_c_while_the_kernel_runs(name):
    """At the client, whose launches have the main thread."""
    server = ServerThread(name, duration=30.0)

    def press():
        while server.server is None:
            time.sleep(0.01)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_client(server, name)
    presser.join()
    assert isinstance(server.join(), PeerInterrupted)


def test_json_is_what_travels():
    body = encode("hello", a=1)
    assert json.loads(body[10:]) == {"kind": "hello", "a": 1}
    with pytest.raises(ValueError, match="is the limit"):
        encode("hello", a="x" * MAX_BODY)
