"""Programs that connect by address and port, on software NICs, by the system's own librdmacm."""

import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from nic_rig import until
from programs import ATTEMPTS, LIMIT, both_at, iterations, run, serving, serving_at
from rdma_core import skip_without, skip_without_run

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture(autouse=True)
def _needs():
    skip_without_run()


@pytest.fixture
def address(port: int) -> str:
    """An address of this machine that no other test has."""
    return f"127.1.{port >> 8}.{port & 255}"


@pytest.mark.timeout(5 * LIMIT)
def test_rping(address, port):
    """The client verifies what comes back."""
    common = "rping", "-p", port, "-C", 10, "-v", "-V"
    server, client = both_at(address, (*common, "-s"), (*common, "-c", "-a", address))
    for out in server, client:
        assert out.count("ping data: rdma-ping-") == 10
    assert "server DISCONNECT EVENT" in server


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("command", ["ucmatose -c 3 -C 20 -S 500", "udaddy -c 2 -C 20"])
def test_exchanges_of_librdmacm(address, command):
    common = command.split()
    for out in both_at(address, (*common,), (*common, "-s", address)):
        assert out.endswith("test complete\nreturn status 0\n")


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
def test_examples_of_librdmacm(address, port):
    """They wait for events in each call, and move identifiers between channels."""
    server, client = both_at(address, ("rdma_server", "-p", port), ("rdma_client", "-s", address, "-p", port))
    assert server.endswith("rdma_server: end 0\n")
    assert client.endswith("rdma_client: end 0\n")


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("command", [
    "rstream -S 1024 -C 100", "rstream -S 65536 -C 50 -T a", "riostream -S 1024 -C 50",
])
def test_sockets_of_librdmacm(address, port, command):
    """rsockets: streams, and writes to memory that the other end offers."""
    common = *command.split(), "-p", port
    for out in both_at(address, (*common,), (*common, "-s", address)):
        assert re.search(r"^custom .*\d+\.\d+$", out, re.MULTILINE), out


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
def test_a_file_by_sockets_of_librdmacm(address, port, tmp_path):
    sent, received = tmp_path / "sent", tmp_path / "received"
    sent.write_bytes(os.urandom(3_000_000))
    with serving_at(address, "rcopy", "-p", port):
        for _ in range(ATTEMPTS):
            done = run("rcopy", sent, f"{address}:{received}", "-p", port)
            if "Connection refused" not in done.stdout + done.stderr:
                break
    assert done.returncode == 0, done.stdout + done.stderr
    assert received.read_bytes() == sent.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("command", [
    "ib_write_bw -n 200", "ib_write_lat -n 100", "ib_send_bw -n 200 -q 4", "ib_send_lat -n 100", "ib_read_bw -n 100 -e",
    "ib_atomic_lat -n 100", "ib_send_bw -n 200 -c UD",
])
def test_perftest_by_address_and_port(address, port, command):
    common = *command.split(), "-R", "-F", "-p", port
    _, client = both_at(address, common, (*common, address))
    assert iterations(client) >= 50


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_fio(address, port, verb):
    """The client chooses. SENDs may come before fio's server has posted receives, and fio allows none to (RNR)."""
    common = "fio", "--ioengine=rdma", f"--port={port}", "--bs=64k", "--size=16m", "--minimal"
    _, client = both_at(
        address, (*common, "--name=server", "--rw=read", "--iodepth=64"),
        (*common, "--name=client", "--rw=write", "--iodepth=8", f"--hostname={address}", f"--verb={verb}"),
    )
    fields = client.strip().split(";")  # fio(1), TERSE OUTPUT
    assert (fields[2], fields[4]) == ("client", "0"), client
    assert int(fields[46]) == 16 << 10  # KiB written


class Machine:
    """A virtual machine of QEMU, by its monitor (QMP). It is stopped before its first instruction."""

    def __init__(self, path: Path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT)
        until(lambda: self._socket.connect_ex(str(path)) == 0, "QEMU", LIMIT)
        self._lines = self._socket.makefile("rw")
        self._lines.readline()  # a greeting
        self("qmp_capabilities")

    @staticmethod
    def command(path: Path, *more: str) -> tuple[str, ...]:
        return (
            "qemu-system-x86_64", "-accel", "tcg", "-m", "64", "-S", "-display", "none", "-nodefaults", "-qmp",
            f"unix:{path},server=on,wait=off", *more,
        )

    def __call__(self, name: str, **arguments: object) -> Any:
        self._lines.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
        self._lines.flush()
        for line in self._lines:
            answer = json.loads(line)
            if "event" not in answer:
                return answer["return"]
        raise EOFError(name)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("pinned", [False, True])
def test_a_virtual_machine_moves(address, port, tmp_path, pinned):
    """QEMU writes the memory, by keys that the other end makes piece by piece or all at once, and sends the rest."""
    skip_without("qemu-system-x86_64")
    start, payload = 16 << 20, tmp_path / "payload"
    payload.write_bytes(os.urandom(8 << 20))
    here, there = tmp_path / "here", tmp_path / "there"
    source = Machine.command(here, "-device", f"loader,file={payload},addr={start},force-raw=on")
    destination = Machine.command(there, "-incoming", "defer")
    at = "--nics", "1", "--address", address
    with (
        serving(*destination, options=at) as server, serving(*source) as client,
        contextlib.closing(Machine(there)) as moved, contextlib.closing(Machine(here)) as machine,
    ):
        for end in moved, machine:
            end("migrate-set-capabilities", capabilities=[{"capability": "rdma-pin-all", "state": pinned}])
        moved("migrate-incoming", uri=f"rdma:{address}:{port}")
        machine("migrate", uri=f"rdma:{address}:{port}")
        until(lambda: machine("query-migrate")["status"] in ("completed", "failed"), "the end", LIMIT)
        assert machine("query-migrate")["status"] == "completed"
        moved("pmemsave", val=start, size=8 << 20, filename=str(tmp_path / "moved"))
        for end, process in (machine, client), (moved, server):
            end("quit")
            out, _ = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, out
    assert (tmp_path / "moved").read_bytes() == payload.read_bytes()


@pytest.mark.slow
def test_nobody_listens(address, port):
    """The NIC is there, and another port is open."""
    with serving_at(address, "rping", "-s", "-p", port):
        done = run("rping", "-c", "-a", address, "-p", port + 1 if port < 65535 else port - 1)
    assert done.returncode != 0
    assert "RDMA_CM_EVENT_REJECTED, error 8" in done.stderr


CLOSES = """
import ctypes, os, threading, time
from pathlib import Path

library = ctypes.CDLL("librdmacm.so.1")
library.rdma_create_event_channel.restype = ctypes.c_void_p
channel, event = ctypes.c_void_p(library.rdma_create_event_channel()), ctypes.c_void_p()
thread = threading.Thread(target=library.rdma_get_cm_event, args=(channel, ctypes.byref(event)), daemon=True)
thread.start()
where, end = Path(f"/proc/self/task/{thread.native_id}/wchan"), time.monotonic() + 20
while "poll" not in where.read_text() and time.monotonic() < end:  # not all kernels say so
    time.sleep(0.01)
library.rdma_destroy_event_channel(channel)
thread.join(2)
print("waits" if thread.is_alive() else "returned", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_channel_is_closed_while_another_thread_waits():
    """As in the kernel, that thread hears nothing of it: rping's would end the program with an error."""
    skip_without("rping")
    done = run(sys.executable, "-c", CLOSES)
    assert (done.returncode, done.stdout) == (0, "waits\n"), done.stderr


WAITS_WITH_THE_LOCK = """
import ctypes, socket, struct, sys, threading

class Event(ctypes.Structure):  # the beginning of struct rdma_cm_event
    _fields_ = (("id", ctypes.c_void_p), ("listen_id", ctypes.c_void_p), ("event", ctypes.c_int))

library = ctypes.PyDLL("librdmacm.so.1")
library.rdma_create_event_channel.restype = ctypes.c_void_p
address = ctypes.create_string_buffer(struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", int(sys.argv[2]),
    socket.inet_aton(sys.argv[1])))

def new_id():
    channel, made = ctypes.c_void_p(library.rdma_create_event_channel()), ctypes.c_void_p()
    assert library.rdma_create_id(channel, ctypes.byref(made), None, 0x106) == 0  # RDMA_PS_TCP
    return channel, made

def next_event(channel):
    event = ctypes.POINTER(Event)()
    assert library.rdma_get_cm_event(channel, ctypes.byref(event)) == 0
    return event.contents.event

def connect():
    channel, client = new_id()
    assert library.rdma_resolve_addr(client, None, address, 5000) == 0
    assert next_event(channel) == 0  # RDMA_CM_EVENT_ADDR_RESOLVED
    assert library.rdma_resolve_route(client, 5000) == 0
    assert next_event(channel) == 2  # RDMA_CM_EVENT_ROUTE_RESOLVED
    assert library.rdma_connect(client, ctypes.create_string_buffer(256)) == 0

channel, server = new_id()
assert library.rdma_bind_addr(server, address) == 0 and library.rdma_listen(server, 1) == 0
threading.Timer(0.2, connect).start()
print("event", next_event(channel), flush=True)
"""


def test_a_program_in_python_waits_with_pythons_lock(address, port):
    """As pyverbs does. The NIC of its process, which needs the lock to take a peer's request, goes on."""
    skip_without("rping")
    done = run(sys.executable, "-c", WAITS_WITH_THE_LOCK, address, port, options=("--nics", "1", "--address", address))
    assert (done.returncode, done.stdout) == (0, "event 4\n"), done.stderr  # RDMA_CM_EVENT_CONNECT_REQUEST


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("killed", ["client", "server"])
def test_an_end_that_is_killed(address, port, killed):
    """The other one hears of it in seconds."""
    common = "rping", "-p", port, "-v"
    with serving_at(address, *common, "-s") as server, contextlib.ExitStack() as undo:
        for _ in range(ATTEMPTS):
            client = undo.enter_context(serving(*common, "-c", "-a", address))
            assert client.stdout
            if any(line.startswith("ping data") for line in client.stdout):
                break
        dying, other = (client, server) if killed == "client" else (server, client)
        dying.kill()
        out, _ = other.communicate(timeout=LIMIT)
    assert "DISCONNECT EVENT" in out
