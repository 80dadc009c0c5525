"""Benchmarks and pingpong between two processes of this machine, and what happens when one of them goes away."""

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading

import numpy as np
import pytest

from neighbour import address as own_address
from tools import COMMAND, LIMIT, Tool, error_line, running
from udp_rig import Namespace

BENCHMARKS = (
    "put_bw", "write_bw", "get_bw", "put_signal_bw", "put_counter_bw", "twosided_bw", "write_lat", "put_signal_lat",
    "put_counter_lat",
)


FIRST = "put_bw"  # in the quick suite, as each takes two processes; the others are like it in what the ends do


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "payload.bin"
    path.write_bytes(np.random.default_rng(2).bytes(50_001))
    return path


_FAST_RETRANSMIT = """
from gpunetio.rendezvous import link
from gpunetio.cli import main
link.STEP_SECONDS = 4.0
main()
"""
HURRIED = ("-c", _FAST_RETRANSMIT)  # the command, but its other end may be silent for 4 s only


def pair(name, port, server=(), client=(), program=COMMAND, client_program=COMMAND):
    """A server and its client, each at an address of its own, so that other runs are not met."""
    where = own_address()
    first = Tool(name, "--target", "cpu", "--port", port, "--address", where, *server, program=program)
    first.until(f"Waiting for a client on {where} port {port}")
    address = ("--address", own_address())
    second = (name, "--target", "cpu", "-c", where, "--port", port, *address, *client)
    return first, Tool(*second, program=client_program)


# --- what works ------------------------------------------------------------------------------------------------------


# All through shared memory. Over UDP one that reads, one that posts receives and one that waits for a companion; all of
# them are measured over UDP between hosts (test_two_hosts).
@pytest.mark.parametrize(
    "name, wire",
    [
        *(pytest.param(name, "auto", marks=() if name == FIRST else pytest.mark.slow) for name in BENCHMARKS),
        *(pytest.param(name, "udp", marks=pytest.mark.slow) for name in ("get_bw", "twosided_bw", "put_counter_lat")),
    ],
)
def test_client_and_server(name, wire, port):
    options = ("-s", 64, "-s", 5000, "-i", 300, "--wire", wire)
    with running(*pair(name, port, ("--wire", wire), options)) as tools:
        outputs = [tool.end() for tool in tools]
    tables = []
    for status, out, err in outputs:
        assert (status, err) == (0, "")
        assert "Validation successful! Data received correctly" in out
        tables.append([line for line in out.splitlines() if re.match(r" \d", line)])
    assert tables[0] == tables[1]
    assert [line.split()[:2] for line in tables[0]] == [["64", "300"], ["5000", "300"]]


# That pieces of a file are put together in order is tested of all, between two ends in one process. Here one for each
# way that the ends divide the work: the client's data, the server's, receives, flags, both ends'.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["put_bw", "get_bw", "twosided_bw", "put_signal_bw", "write_lat"])
def test_a_file(name, port, file):
    payload = ("--payload", file)
    reads = name == "get_bw"
    client = ("-s", 7, "-s", 1000, "-i", 8000, "--json", *(() if reads else payload))
    with running(*pair(name, port, payload if reads else (), client)) as (server, client):
        status, out, err = client.end()
        assert (status, err) == (0, "")
        assert server.end()[0] == 0
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for result in json.loads(out)["results"]:
        assert (result["payload_bytes"], result["sha256"], result["validated"]) == (50_001, digest, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param(("-e", 1, "-q", 2), marks=pytest.mark.slow), ("-x",)], ids=lambda options: options[0]
)
def test_sends_in_other_ways(options, port):
    """Of the client's; -x is agreed on, with the sizes that go with it."""
    with running(*pair("twosided_bw", port, (), ("-i", 300, *options))) as tools:
        outputs = [tool.end() for tool in tools]
    sizes = [[line.split()[0] for line in out.splitlines() if re.match(r" \d", line)] for _, out, _ in outputs]
    assert [(status, err) for status, _, err in outputs] == [(0, ""), (0, "")]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 10


_MISCOUNTING = """
from gpunetio.bench.words import Words
from gpunetio.cli import main
before = Words.problem
def problem(self):
    self.array[0] += 1
    return before(self)
Words.problem = problem
main()
"""


@pytest.mark.slow
def test_a_wrong_flag_is_noticed(port):
    """The server's flags are not what they should be: both ends say so, and fail."""
    client = ("-s", 64, "-i", 300, "-t", 1)
    with running(*pair("put_signal_bw", port, (), client, program=("-c", _MISCOUNTING))) as tools:
        for tool in tools:
            status, out, err = tool.end()
            assert status == 1
            assert "validation failed: message size 64: the server's flag 0 is 301 instead of 300" in err
            assert "successful" not in out


@pytest.mark.slow
def test_documents_and_pictures(port, tmp_path):
    """Of both ends, which have measured the same."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra 'plot')")
    pictures = tmp_path / "server.svg", tmp_path / "client.png"
    server = ("--json", "--plot", pictures[0])
    where = own_address()
    with running(
        Tool("put_bw", "--target", "cpu", "--port", port, "--address", where, *server),
        Tool("put_bw", "--target", "cpu", "--port", port, "--address", own_address(), "-c", where, "-s", 64,
             "--plot", pictures[1], "--json", program=("-c", _PATIENT)),
    ) as tools:
        documents = []
        for tool in tools:
            status, out, err = tool.end()
            assert status == 0, err
            documents.append(json.loads(out))
    assert [document["role"] for document in documents] == [f"server of {LOOPBACK}", f"client of {where}"]
    assert documents[0]["results"] == documents[1]["results"]
    assert pictures[0].read_bytes().startswith(b"<?xml")
    assert pictures[1].read_bytes().startswith(b"\x89PNG")


# With --json a server says on stderr that it waits: a client that calls again until it is there.
_PATIENT = """
import time
from gpunetio.bench import remote
from gpunetio.rendezvous import link as exchange
from gpunetio.cli import main
dial, end = remote.dial, time.monotonic() + 60
def call(*where):
    while True:
        try:
            return dial(*where)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
remote.dial = call
main()
"""
LOOPBACK = "127.0.0.1"  # whence a client calls


@pytest.mark.slow
def test_both_ends_of_many_queues(port):
    with running(*pair("put_bw", port, (), ("-q", 3, "-D", 0.3, "-s", 4096, "--report_gbits"))) as tools:
        assert [tool.end()[0] for tool in tools] == [0, 0]


# Each set of options over one of the wires: many packets and many messages over both, in one set or another.
@pytest.mark.parametrize(
    "wire, options",
    [
        ("auto", ()),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in (
              ("udp", ()), ("udp", ("-c", "-s", 9000)), ("auto", ("-n", 10_000)), ("udp", ("-s", 1, "-r", 1)),
              ("auto", ("-c", "-s", 65536, "-m", 4096, "-n", 200)), ("udp", ("-n", 10_000)),
          )),
    ],
)
def test_pingpong(options, wire, port):
    where, options = own_address(), ("-p", port, "--wire", wire, *options)
    with running(Tool("pingpong", "--address", where, *options)) as (server,):
        server.until("local address")
        with running(_calling(("pingpong", where, "--address", own_address(), *options), port)) as (client,):
            for status, out, err in (client.end(), server.end()):
                assert (status, err) == (0, "")
                assert re.search(r"^\d+ iters in \d+\.\d\d seconds = \d+\.\d\d usec/iter$", out, re.MULTILINE)


def listens(pid):
    """The addresses and ports of a process's listening TCP sockets."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    with open(f"/proc/{pid}/net/tcp6") as table:
        rows += [line.split() for line in table.readlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(number, 16)) for host, number in found]


@pytest.mark.slow
def test_a_server_listens_where_its_nic_is(port):
    """And nowhere else; nobody is listened to once the client is there."""
    where = own_address()
    with running(*pair("put_bw", port, (), LONG)) as tools:
        for tool in tools:
            tool.until("#bytes")
            assert listens(tool.process.pid) == []
    with running(Tool("put_bw", "--target", "cpu", "--port", port, "--address", where)) as (server,):
        server.until("Waiting")
        assert listens(server.process.pid) == [(where, port)]


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable: as two machines."""
    opened = Namespace(), Namespace()
    opened[0].connect(opened[1])
    opened[0].ip("addr add 10.99.0.1/24 dev here")
    opened[1].ip("addr add 10.99.0.2/24 dev there")
    yield opened
    for host in opened:
        host.close()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("name", BENCHMARKS)
def test_two_hosts(name, hosts, port):
    """Over UDP, with the MTU that Ethernet leaves."""
    here, there = ([*args, "--target", "cpu", "--port", port, "-s", 64, "-s", 50_000, "-i", 300] for args in (
        (name, "--address", "10.99.0.1"), (name, "--address", "10.99.0.2", "-c", "10.99.0.1"),
    ))
    server = Tool(*here, start=functools.partial(hosts[0].run, subprocess.Popen))
    with running(server):
        server.until("Waiting for a client on 10.99.0.1")
        with running(Tool(*there, start=functools.partial(hosts[1].run, subprocess.Popen))) as (client,):
            for tool, peer in ((client, "client of 10.99.0.1"), (server, "server of 10.99.0.2")):
                status, out, err = tool.end()
                assert (status, err) == (0, "")
                assert "Validation successful!" in out
                assert peer in out
                assert ": 1024 bytes" in out


@pytest.mark.root
@pytest.mark.slow
def test_a_cable_that_breaks(hosts, port):
    """Neither end waits for ever, though nobody tells it anything."""
    options = ("--target", "cpu", "--port", port)
    with running(
        Tool(
            "put_bw", *options, "--address", "10.99.0.1", program=HURRIED,
            start=functools.partial(hosts[0].run, subprocess.Popen),
        )
    ) as (server,):
        server.until("Waiting")
        client = Tool(
            "put_bw", *options, "--address", "10.99.0.2", "-c", "10.99.0.1", *LONG, program=HURRIED,
            start=functools.partial(hosts[1].run, subprocess.Popen),
        )
        with running(client):
            for tool in (server, client):
                tool.until("#bytes")
            hosts[0].ip("link set here down")
            for tool in (server, client):
                status, _, err = tool.end()
                assert status == 1
                error_line(err)


_CORRUPTING = """
from gpunetio.bench import data
from gpunetio.cli import main
def corrupting(kind, collect):
    def flip(self, bits):
        for sink in self._ends.sinks:
            sink.write(sink.read({at}, 1) ^ bits, {at})
    def corrupt(self, first, count):
        flip(self, 0x10)
        collect(self, first, count)
        flip(self, 0x10 * {again})
    kind.collect = corrupt
corrupting(data.Pattern, data.Pattern.collect)
corrupting(data.Arrival, data.Arrival.collect)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_file", [False, True])
def test_a_wrong_byte_is_noticed(with_file, port, file):
    """A bit flips in the server's memory, behind the NIC's back: both ends say so, and fail."""
    payload = ("--payload", file) if with_file else ()
    program = ("-c", _CORRUPTING.format(at=99, again=int(with_file)))
    client = ("-s", 100, "-i", 2000 if with_file else 200, *payload)
    with running(*pair("put_bw", port, (), client, program=program)) as tools:
        for tool in tools:
            status, out, err = tool.end()
            assert status == 1
            assert "gpunetio: error: validation failed: message size 100: " in err
            assert "SHA-256 differs" in err if with_file else "byte at offset 99" in err
            assert "successful" not in out


def _calling(args, port):
    """A client, once its server listens: pingpong does not say when. (Its own call would be the one that counts.)"""
    for _ in range(LIMIT * 20):
        with open("/proc/net/tcp") as table:
            if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in table):
                return Tool(*args)
        threading.Event().wait(0.05)
    raise AssertionError("the server does not listen")


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_benchmark(port):
    where = own_address()
    server = Tool("put_bw", "--port", port, "--target", "cpu", "--address", where)
    server.until("Waiting")
    with running(server, Tool("get_bw", "-c", where, "--port", port, "--target", "cpu")) as tools:
        for tool in tools:
            status, _, err = tool.end()
            assert status == 1
            assert "run the same at both ends" in error_line(err)


@pytest.mark.slow
def test_other_sizes(port):
    with running(*pair("put_bw", port, ("-s", 64), ("-s", 128))) as tools:
        for tool in tools:
            status, _, err = tool.end()
            assert status == 1
            assert "--size" in error_line(err)


NONSENSE = {
    b"GET / HTTP/1.0\r\n\r\n": "is not a gpunetio program", b"": "closed the connection",
    b"\0" * 4096: "is not a gpunetio program", b"0000:000000:000000:": "is not a gpunetio program",
    struct.pack(">4sHI", b"GPNT", 9, 2) + b"{}": "speaks version 9 of the protocol",
}


*STRANGE, OTHER_VERSION = NONSENSE


@pytest.mark.slow
@pytest.mark.parametrize("data", STRANGE)
def test_a_stranger_calls(data, port):
    """The server hangs up on it, and waits on for its client."""
    where, short = own_address(), ("--port", port, "--target", "cpu", "-s", 64, "-i", 100)
    with running(Tool("put_bw", "--address", where, *short)) as (server,):
        server.until("Waiting")
        with socket.create_connection((where, port)) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            with running(Tool("put_bw", "-c", where, *short)) as (client,):
                for tool in (client, server):
                    status, _, err = tool.end()
                    assert status == 0, err


@pytest.mark.slow
def test_a_client_of_another_version_calls(port):
    where = own_address()
    with running(Tool("put_bw", "--port", port, "--target", "cpu", "--address", where)) as (server,):
        server.until("Waiting")
        with socket.create_connection((where, port)) as sock:
            sock.sendall(OTHER_VERSION)
            status, _, err = server.end()
    assert status == 1
    assert f"the client {LOOPBACK} {NONSENSE[OTHER_VERSION]}" in error_line(err)


@pytest.mark.slow
@pytest.mark.parametrize("data", NONSENSE)
def test_a_stranger_answers(data, port):
    where = own_address()
    with socket.create_server((where, port)) as listener:
        listener.settimeout(LIMIT)
        with running(Tool("put_bw", "--port", port, "--target", "cpu", "-c", where)) as (client,):
            sock, _ = listener.accept()
            with sock:
                sock.sendall(data)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                status, _, err = client.end()
    assert status == 1
    assert f"the server {where} {NONSENSE[data]}" in error_line(err)


# --- one end goes away -----------------------------------------------------------------------------------------------

LONG = ("-s", 4096, "-D", 50)
# What the end that is left is busy with: a kernel that waits for puts, for reads, for its companion, or for receives or
# answers of the other end, a kernel that posts receives or answers, or no kernel.
LEFT = (
    ("put_bw", 0), ("put_bw", 1), ("twosided_bw", 0), ("twosided_bw", 1), ("write_lat", 0), ("write_lat", 1),
    ("get_bw", 0), ("put_counter_bw", 0), ("put_counter_lat", 1),
)


def victims(cases):
    """Which end goes, 0 for the server."""
    return pytest.mark.parametrize(
        "name, victim", cases, ids=lambda value: ("server", "client")[value] if isinstance(value, int) else value
    )


@pytest.mark.slow
@victims(LEFT[::3])
def test_ctrl_c_ends_both(name, victim, port):
    with running(*pair(name, port, (), LONG)) as tools:
        for tool in tools:
            tool.until("#bytes")
        threading.Event().wait(1.5)
        tools[victim].signal(signal.SIGINT)
        status, _, err = tools[victim].end()
        assert (status, err) == (130, "")
        status, _, err = tools[1 - victim].end()
        assert status == 130
        assert "was interrupted (Ctrl+C)" in error_line(err)


@pytest.mark.slow
@victims(LEFT)
def test_a_kill_is_noticed(name, victim, port):
    with running(*pair(name, port, (), LONG)) as tools:
        for tool in tools:
            tool.until("#bytes")
        threading.Event().wait(1.5)
        tools[victim].signal(signal.SIGKILL)
        status, _, err = tools[1 - victim].end()
        assert status == 1
        assert "closed the connection" in error_line(err) or "was lost" in error_line(err)


@pytest.mark.slow
@pytest.mark.parametrize("name, victim", [("put_bw", 0), ("write_lat", 1)], ids=["put_bw-server", "write_lat-client"])
def test_an_end_that_hangs_is_noticed(name, victim, port):
    with running(*pair(name, port, (), LONG, HURRIED, HURRIED)) as tools:
        for tool in tools:
            tool.until("#bytes")
        tools[victim].signal(signal.SIGSTOP)
        status, _, err = tools[1 - victim].end()
        assert status == 1
        assert "gpunetio: error:" in err


@pytest.mark.slow
def test_ctrl_c_of_a_server_that_waits(port):
    with running(Tool("put_bw", "--port", port, "--target", "cpu", "--address", own_address())) as (server,):
        server.until("Waiting")
        server.signal(signal.SIGINT)
        status, _, err = server.end()
    assert (status, err) == (130, "")
