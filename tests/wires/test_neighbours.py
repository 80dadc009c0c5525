"""NICs of one host: claims on addresses, links, and what comes through the door that should not."""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from ipaddress import ip_address

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio.errors import BadStateError, InUseError, InvalidValueError, TimedOutError
from gpunetio.fabric import control_message, link_limits
from gpunetio.fabric.claims import PATIENCE, names, owner_of
from gpunetio.fabric.control_message import VERSION
from gpunetio.fabric.control_socket import ControlSocket
from gpunetio.fabric.discovery import look, look_at_all
from gpunetio.fabric.frames import PIPE
from gpunetio.fabric.link import Link, Parts
from gpunetio.memory import PAGE, HostMemory
from neighbour import TIMEOUT, Frames, Heard, address, ring, rings
from repository import RIGS

CAPACITY = 1 << 16


class Child:
    """A process with a door at `address`."""

    def __init__(self, place: str):
        self.address = place
        self.process = subprocess.Popen(
            [sys.executable, RIGS / "neighbour.py", place],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.hello = self.answer()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

    def ask(self, *words: object) -> dict:
        self.tell(*words)
        return self.answer()

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture
def child():
    started = Child(address())
    yield started
    started.stop()


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def door(heard):
    with heard.open(address(), capacity=CAPACITY) as opened:
        yield opened
        for link in opened.links:
            link.close()


@pytest.fixture
def other():
    """A second door, of this process."""
    heard = Heard()
    with heard.open(address(), name="soft1", capacity=CAPACITY) as opened:
        opened.heard = heard
        yield opened
        for link in opened.links:
            link.close()


def place(door: ControlSocket) -> str:
    return str(door.addresses[0])


def are_ends_of_one(a: Link, b: Link) -> bool:
    """Whether what `a` sends arrives at `b`, and the reverse."""
    for out, back in ((a, b), (b, a)):
        ctypes.c_int64.from_address(out.tx + PIPE.size).value = word = time.monotonic_ns()
        if ctypes.c_int64.from_address(back.rx + PIPE.size).value != word:
            return False
    return True


def wait_for(condition, what: str) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(1e-3)


# --- two processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here_first", [True, False])
def test_frames_both_ways(child, door, heard, here_first):
    if here_first:
        link = door.connect(child.address, TIMEOUT)
        assert child.ask("link") == {"capacity": CAPACITY, "peer": os.getpid()}
        assert heard.laid.get(timeout=TIMEOUT) is link
    else:
        child.ask("connect", place(door))
        link = heard.laid.get(timeout=TIMEOUT)
        assert door.connect(child.address) is link
    assert (link.peer_pid, link.peer_name, str(link.peer_address)) == (child.hello["pid"], "child", child.address)
    assert not link.closed
    rng = np.random.default_rng(1)
    packets = [rng.bytes(int(size)) for size in rng.integers(12, 4200, 200)]  # several times around the pipe
    child.tell("echo", len(packets))
    wire = Frames(link)
    for packet in packets:
        wire.send(packet)
        assert wire.receive() == packet[::-1]
    assert child.answer() == {"echoed": True}
    assert rings(link) > 0


def test_killed_peer_is_gone(child, door, heard):
    link = door.connect(child.address, TIMEOUT)
    child.ask("link")
    child.process.kill()
    assert heard.gone.get(timeout=TIMEOUT) is link
    assert link.gone
    assert not link.closed
    ctypes.string_at(link.rx, PIPE.size)  # still mapped
    assert door.links == []
    assert door.connect(child.address) is None
    assert owner_of(child.address) is None
    again = Child(child.address)
    try:
        fresh = door.connect(child.address, TIMEOUT)
        assert fresh.peer_pid == again.hello["pid"]
        fresh.close()
    finally:
        again.stop()
    link.close()


def test_closed_here_is_gone_there(child, door, heard):
    link = door.connect(child.address, TIMEOUT)
    child.ask("link")
    link.close()
    link.close()
    assert link.closed
    assert child.ask("gone") == {"links": 0}
    assert heard.gone.empty()  # whoever closes it knows


def test_both_connect_at_once(child, door, heard):
    for _ in range(25):
        child.tell("connect", place(door))
        link = door.connect(child.address, TIMEOUT)
        child.answer()
        assert child.ask("link")["peer"] == os.getpid()
        assert heard.laid.get(timeout=TIMEOUT) is link
        assert door.links == [link]
        wire, packet = Frames(link), os.urandom(100)
        child.tell("echo", 1)
        wire.send(packet)
        assert wire.receive() == packet[::-1]
        child.answer()
        link.close()
        child.ask("gone")
    assert heard.laid.empty()


def test_stopped_process_costs_no_more_than_the_timeout(child, door):
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitpid(child.process.pid, os.WUNTRACED)  # now it stands still
    try:
        with pytest.raises(TimedOutError, match=f"process {child.hello['pid']} there does not answer"):
            door.connect(child.address, 0.2)
        assert look(child.address, 0.2) is None
        assert owner_of(child.address) == child.hello["pid"]
    finally:
        os.kill(child.process.pid, signal.SIGCONT)
    assert door.connect(child.address, TIMEOUT).peer_pid == child.hello["pid"]


def test_claimed_twice(child):
    with Heard().open(child.address, address()) as door:
        assert child.hello["claimed"] == [True]
        assert [*door.claimed.values()] == [False, True]
        assert owner_of(child.address) == child.hello["pid"]
        assert {child.address, f"{child.address}/{os.getpid()}"} <= set(names())
        pid, description, _ = look(f"{child.address}/{os.getpid()}")
        assert (pid, description["name"]) == (os.getpid(), "soft0")
        third = address()
        with Heard().open(third):
            with pytest.raises(InUseError, match=f"process {child.hello['pid']} has claimed that address"):
                door.connect(third)
            link = door.connect(third, source=door.addresses[1])
            assert str(link.own_address) == str(door.addresses[1])
            link.close()
    assert f"{child.address}/{os.getpid()}" not in names()
    assert owner_of(child.address) == child.hello["pid"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_holds_nothing(child, door):
    """A forked child of ours neither keeps our name nor our link alive, and cannot use the door."""
    link = door.connect(child.address, TIMEOUT)
    child.ask("link")
    context = multiprocessing.get_context("fork")
    used, done = context.SimpleQueue(), context.Event()

    def forked() -> None:
        try:
            door.connect(child.address)
        except BadStateError as error:
            used.put(str(error))
        door.close()
        link.close()
        done.wait(TIMEOUT)

    process = context.Process(target=forked)
    process.start()
    try:
        assert "belongs to the parent process" in used.get()
        assert not link.is_dead()
        assert owner_of(place(door)) == os.getpid()
        link.close()
        door.close()
        assert child.ask("gone") == {"links": 0}
        assert owner_of(place(door)) is None
    finally:
        done.set()
        process.join(TIMEOUT)


# --- two doors of one process --------------------------------------------------------------------------------------


def test_link(door, other, heard):
    link = door.connect(place(other))
    there = other.heard.laid.get(timeout=TIMEOUT)
    assert are_ends_of_one(link, there)
    for one, two in ((link, there), (there, link)):
        ring(one)
        ring(one)
        assert (rings(two), rings(one)) == (2, 0)
    assert door.connect(place(other)) is link
    assert other.connect(place(door)) is there
    assert (str(there.peer_address), there.peer_name) == (place(door), "soft0")
    there.close()
    assert heard.gone.get(timeout=TIMEOUT) is link
    fresh = door.connect(place(other))
    assert fresh is not link
    assert are_ends_of_one(fresh, other.heard.laid.get(timeout=TIMEOUT))
    link.close()
    assert door.links == [fresh]


def test_nobody_there(door):
    assert door.connect(address()) is None
    assert door.connect("fe80::1") is None
    assert owner_of("fe80::1") is None
    with pytest.raises(InvalidValueError, match="leads from one of them to another NIC's"):
        door.connect(place(door))
    with pytest.raises(InvalidValueError, match=r"cannot lay a link from 127\.0\.0\.1"):
        door.connect(address(), source=ip_address("127.0.0.1"))


def test_door_without_links(door):
    with ControlSocket([address()], "soft1") as quiet:
        assert door.connect(place(quiet)) is None
    with pytest.raises(InvalidValueError, match="soft1 has no address"):
        ControlSocket([], "soft1")
    for capacity in (0, 3000, 1 << 12, 1 << 29, 1e6):
        with pytest.raises(InvalidValueError, match="a pipe cannot have"):
            ControlSocket([address()], "soft1", capacity=capacity)


def test_closed_door(door, other, heard):
    link = door.connect(place(other))
    there = other.heard.laid.get(timeout=TIMEOUT)
    door.close()
    door.close()
    assert other.heard.gone.get(timeout=TIMEOUT) is there
    assert owner_of(place(door)) is None
    assert other.connect(place(door)) is None
    with pytest.raises(BadStateError, match="soft0 is closed"):
        door.connect(place(other))
    assert are_ends_of_one(link, there)  # an engine may still be at it
    link.close()
    there.close()
    assert heard.gone.empty()


def test_callbacks_may_wait_for_whoever_connects(other):
    """`connect` is called with a lock held that the callbacks take."""
    lock, heard = threading.Lock(), Heard()

    def on_link(link: Link) -> None:
        with lock:
            heard.laid.put(link)

    with ControlSocket([address()], "soft0", on_link=on_link) as door, lock:
        link = door.connect(place(other))
        with pytest.raises(queue.Empty):
            heard.laid.get(timeout=0.05)
        lock.release()
        assert heard.laid.get(timeout=TIMEOUT) is link
        lock.acquire()
        link.close()


def test_failing_callback_is_logged(other, caplog):
    def on_link(link: Link) -> None:
        raise RuntimeError("no room")

    with ControlSocket([address()], "soft0", on_link=on_link) as door:
        door.connect(place(other)).close()
        link = door.connect(place(other))
        wait_for(lambda: "no room" in caplog.text, "the failure is not logged")
        assert not link.is_dead()
        link.close()


@settings(max_examples=40)
@given(st.booleans(), st.lists(st.integers(0, 300), min_size=4, max_size=4))
def test_simultaneous_links(closes_first, delays):
    """Any number of connects from both sides, at about the same time: one link, which all of them return."""
    heard = Heard(), Heard()
    with heard[0].open(address(), capacity=8192) as one, heard[1].open(address(), capacity=8192) as two:
        found: list[tuple[bool, Link]] = []

        def connect(first: bool, delay: int) -> None:
            time.sleep(delay * 1e-6)
            link = one.connect(place(two), TIMEOUT) if first else two.connect(place(one), TIMEOUT)
            found.append((first, link))

        for _ in range(2):
            found.clear()
            threads = [threading.Thread(target=connect, args=(n % 2 == 0, delay)) for n, delay in enumerate(delays)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
            ones, twos = {link for first, link in found if first}, {link for first, link in found if not first}
            assert (len(found), len(ones), len(twos)) == (4, 1, 1)
            a, b = ones.pop(), twos.pop()
            assert (one.links, two.links) == ([a], [b])
            assert are_ends_of_one(a, b)
            assert [h.laid.get(timeout=TIMEOUT) for h in heard] == [a, b]
            closing, left, side = (a, b, 1) if closes_first else (b, a, 0)
            closing.close()
            assert heard[side].gone.get(timeout=TIMEOUT) is left
            left.close()
        assert all(h.laid.empty() and h.gone.empty() for h in heard)


def test_nothing_is_left_open(door, other):
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def lay() -> None:
        link = door.connect(place(other))
        there = other.heard.laid.get(timeout=TIMEOUT)
        link.close()
        assert other.heard.gone.get(timeout=TIMEOUT) is there
        there.close()

    lay()
    wait_for(lambda: not door.links, "the link stays")
    before = count()
    for _ in range(20):
        lay()
        assert door.connect(address()) is None
    wait_for(lambda: count() <= before, f"{count()} descriptors are open, {before} were")


# --- strangers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def visit(door: ControlSocket):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(TIMEOUT)
        while True:
            try:
                sock.connect(f"\0gpunetio/{place(door)}")
                break
            except BlockingIOError:  # many wait there
                time.sleep(1e-3)
        yield sock


def answer_to(door: ControlSocket, request: dict, fds=()) -> dict:
    with visit(door) as sock:
        control_message.send(sock, request, fds)
        answer, received = control_message.receive(sock, time.monotonic() + TIMEOUT)
        assert len(received) == (answer["ok"] is True)  # what notifies the peer
        for fd in received:
            os.close(fd)
        return answer


def hangs_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def message(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", message(b""), struct.pack(">I", 1 << 17), message(b"{"), message(b"[]"),
        message(b"7"), message(b"\xff\xfe"), message(b"[" * 60000),
        pytest.param(b"\0\0", marks=pytest.mark.slow),  # waits for the rest
    ],
)
def test_garbage_is_dropped(door, other, data):
    with visit(door) as sock:
        sock.sendall(data)
        assert other.connect(place(door)) is not None  # others are not disturbed
        assert hangs_up(sock)


@pytest.mark.slow
def test_silence_is_dropped(door, other):
    with visit(door) as silent, visit(door) as slow:
        link = other.connect(place(door))
        assert link is not None
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < start + TIMEOUT:
                slow.send(message(b" " * 60000)[:1])
                time.sleep(PATIENCE / 4)
        assert hangs_up(silent)
        assert not link.is_dead()


def test_crowd_is_thinned(door, other):
    with contextlib.ExitStack() as crowd:
        first = crowd.enter_context(visit(door))
        for _ in range(100):
            crowd.enter_context(visit(door))
        assert hangs_up(first)
        assert other.connect(place(door), TIMEOUT) is not None


@settings(max_examples=30)
@given(st.binary(max_size=300), st.booleans())
def test_any_garbage(data, framed):
    heard = Heard()
    with heard.open(address(), capacity=8192) as door:
        with visit(door) as sock:
            sock.sendall(message(data) if framed else data)
        assert answer_to(door, {"version": VERSION, "op": "?"})["ok"] is False
        assert heard.laid.empty()


def test_other_versions_and_requests(door):
    answer = answer_to(door, {"version": VERSION + 1, "op": "look"})
    assert (answer["ok"], answer["version"]) == (False, VERSION)
    assert f"speaks version {VERSION}, not {VERSION + 1}" in answer["reason"]
    assert "not None" in answer_to(door, {})["reason"]
    assert "does not know the request 'sing'" in answer_to(door, {"version": VERSION, "op": "sing"})["reason"]


def test_links_that_are_refused(door, other, heard):
    """Lengths, descriptors and addresses of a request are checked."""
    parts = Parts.new(CAPACITY)
    small, (reading, writing) = HostMemory(PAGE, shared=True, sealed=False), os.pipe()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sealed = HostMemory(parts.memory.nbytes, shared=True)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, parts.memory.nbytes)
    fds = parts.fds
    asked = {
        "version": VERSION, "op": "connect", "name": "x", "capacity": CAPACITY, "medium": "ETHERNET",
        "from": place(other), "to": place(door),
    }
    with Heard().open(place(other), place(door)) as unclaimed:
        assert not any(unclaimed.claimed.values())
    for change, sent, reason in (
        ({"capacity": CAPACITY + 64}, fds, "a pipe cannot have 65600 bytes"),
        ({"capacity": 1 << 62}, fds, "a pipe cannot have"),
        ({"capacity": "65536"}, fds, "a pipe cannot have '65536' bytes"),
        ({"capacity": None}, fds, "a pipe cannot have None bytes"),
        ({"capacity": CAPACITY // 2}, fds, "bytes, not the"),
        ({"capacity": CAPACITY * 2}, fds, "bytes, not the"),
        ({}, [], "0 descriptors came with the request"),
        ({}, fds[:1], "1 descriptors"),
        ({}, [*fds, reading], "3 descriptors"),
        ({}, [small.fd, *fds[1:]], "bytes, not the"),
        ({}, [sealed.fd, *fds[1:]], "does not allow writing: the owner has sealed the memory"),
        ({}, [loose, *fds[1:]], "is not sealed memory"),
        ({}, [fds[0], writing], "cannot notify an engine"),
        ({}, [fds[0], stream.fileno()], "cannot notify an engine"),
        ({}, fds[::-1], "cannot notify an engine"),
        ({"medium": "INFINIBAND"}, fds, "is on ETHERNET, not on INFINIBAND"),
        ({"from": "here"}, fds, "'here' does not appear to be"),
        ({"to": None}, fds, "'None' does not appear to be"),
        ({"to": address()}, fds, "has no link from"),
        ({"from": place(door)}, fds, "has no link from"),
        ({"from": address()}, fds, "is not claimed by process"),
    ):
        answer = answer_to(door, asked | change, sent)
        assert answer["ok"] is False
        assert reason in answer["reason"]
    with visit(door) as sock, pytest.raises(control_message.BadMessage, match="descriptors do not fit"):
        control_message.send(sock, asked, [reading] * 33)
    with visit(door) as sock:
        socket.send_fds(sock, [message(b"{}")], [reading] * 33)
        assert hangs_up(sock)
    assert door.links == []
    assert heard.laid.empty()
    assert answer_to(door, asked, fds)["ok"] is True  # nothing else was wrong
    for fd in (reading, writing, loose):
        os.close(fd)
    for closing in (small, sealed, stream, parts):
        closing.close()


def test_a_link_that_talks_is_cut(door, other, heard):
    link = door.connect(place(other))
    other.heard.laid.get(timeout=TIMEOUT).heartbeat.send(b"hello")
    assert heard.gone.get(timeout=TIMEOUT) is link
    link.close()


@pytest.mark.parametrize("answer", [b"", b"garbage", message(b"[]"), message(b'{"version": 9}')])
def test_a_host_that_talks_nonsense(door, answer):
    """Whatever listens under that name, `connect` ends."""
    where = address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0gpunetio/{where}")
        listener.listen()
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(TIMEOUT)
                    sock.recv(1 << 16)
                    sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with contextlib.suppress(TimedOutError):
            assert door.connect(where, 0.2) is None
        assert look(where, 0.2) is None
        over.set()
        owner_of(where)
        thread.join(TIMEOUT)


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "visit":
    sock.settimeout(20)
    sock.connect(sys.argv[1])
    try:
        text = b'{"version": 2, "op": "look"}'
        sock.sendall(len(text).to_bytes(4, "big") + text)
        print(sock.recv(100))
    except (BrokenPipeError, ConnectionResetError):
        print(b"")
else:
    sock.bind(sys.argv[1])
    sock.listen()
    print("listening", flush=True)
    sys.stdin.read()
"""


def stranger(name: str, what: str) -> subprocess.Popen:
    """A process of another user."""
    code = STRANGER.replace("sys.argv[1]", repr(f"\0gpunetio/{name}"))
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code, "-", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.root
def test_other_users(door, heard):
    with stranger(place(door), "visit") as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert output == "b''\n"
    theirs = address()
    with stranger(theirs, "listen") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        assert door.connect(theirs) is None
        assert look(theirs) is None
        assert owner_of(theirs) == process.pid
        process.communicate(timeout=TIMEOUT)


# --- odd names, and too many links -----------------------------------------------------------------------------------


def listener(name: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(b"\0" + name)
    sock.listen()
    return sock


def test_odd_names(door):
    """Anybody may give a socket any name; /proc/net/unix shows it as it is."""
    odd = [
        b"gpunetio/\xff\xfe", b"gpunetio/a\nb", b"gpunetio/ a b", b"gpunetio/", b"\n\n", b"\xff" * 100,
        b"x\n0: 00000002 00000000 00010000 0001 01 7 @gpunetio/made-up",
    ]
    with contextlib.ExitStack() as stack:
        for name in odd:
            stack.enter_context(listener(name))
        found = names()
        assert place(door) in found
        assert "made-up" in found  # it cannot be told from a real one,
        assert [*look_at_all(found, TIMEOUT)].count("made-up") == 0  # but nobody is there
        assert place(door) in look_at_all(found)


@pytest.mark.slow
def test_all_are_looked_at_at_once(door):
    """Hosts that answer once all of them have been asked, one that never does, and a NIC."""
    hosts = [address() for _ in range(5)]
    asked = threading.Barrier(len(hosts))

    def serve(sock: socket.socket) -> None:
        caller, _ = sock.accept()
        with caller:
            control_message.receive(caller, time.monotonic() + TIMEOUT)
            asked.wait(TIMEOUT)
            control_message.send(caller, {"version": VERSION, "ok": True})

    with contextlib.ExitStack() as stack:
        stack.enter_context(listener(b"gpunetio/silent"))
        for host in hosts:
            sock = stack.enter_context(listener(f"gpunetio/{host}".encode()))
            thread = threading.Thread(target=serve, args=(sock,))
            thread.start()
            stack.callback(thread.join, TIMEOUT)
        assert {*look_at_all([*hosts, "silent", place(door)], 3)} == {*hosts, place(door)}


def test_one_neighbour_lays_so_many_links(door, monkeypatch):
    """Beyond the limit a neighbour's links are refused, until it hangs some up."""
    monkeypatch.setattr(link_limits, "MAX_LINKS_OF_ONE", 3)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(Heard().open(address(), name=f"soft{n}", capacity=CAPACITY)) for n in range(5)]
        links = [other.connect(place(door)) for other in others[:3]]
        assert None not in links
        open_now = len(os.listdir("/proc/self/fd"))
        for other in others[3:]:
            assert other.connect(place(door)) is None
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= open_now, "descriptors stay open")
        asked = {
            "version": VERSION, "op": "connect", "name": "x", "capacity": CAPACITY, "medium": "ETHERNET",
            "from": place(others[4]), "to": place(door),
        }
        laid = f"of which process {os.getpid()} has laid 3: the limits are 64 in all and 3 from one process"
        assert answer_to(door, asked)["reason"] == f"soft0 has 3 links, {laid}"
        links.append(door.connect(place(others[4])))  # what we lay ourselves is not a neighbour's
        assert links[-1] is not None
        links.pop(0).close()
        wait_for(lambda: len(door.links) == 3, "the link stays")
        links.append(others[3].connect(place(door)))
        assert links[-1] is not None
        monkeypatch.setattr(link_limits, "MAX_LINKS_OF_ONE", 9)
        monkeypatch.setattr(link_limits, "MAX_LINKS", 4)
        assert others[0].connect(place(door)) is None
        for link in links:
            link.close()
        for other in others:
            for link in other.links:
                link.close()


# --- messages -------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.integers(0, 5), st.integers(1, 400))
def test_letters_arrive(body, count, piece):
    here, there = socket.socketpair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        fds = [os.eventfd(n) for n in range(count)]
        text = json.dumps(body).encode()
        data = message(text)
        sent = socket.send_fds(here, [data[:piece]], fds)
        here.sendall(data[sent:])
        control_message.send(here, {"next": 1})
        got, received = control_message.receive(there, time.monotonic() + TIMEOUT)
        assert got == body
        assert len(received) == count
        assert control_message.receive(there, time.monotonic() + TIMEOUT) == ({"next": 1}, [])
        with pytest.raises(TimeoutError):
            control_message.receive(there, time.monotonic())
        here.close()
        with pytest.raises(EOFError):
            control_message.receive(there, time.monotonic() + TIMEOUT)
        for fd in (*fds, *received):
            os.close(fd)
    with pytest.raises(control_message.BadMessage, match="do not fit"):
        control_message.send(there, {"long": "x" * control_message.MAX_BYTES})
