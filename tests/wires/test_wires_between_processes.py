"""Wires between NICs of different processes: which one is laid, when, and what a neighbour can do to us."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from ipaddress import ip_address

import pytest

from far import DEADLINE, Far, Farm, Side, side, write_all
from gpunetio import verbs
from gpunetio.errors import InUseError
from gpunetio.fabric.control_socket import ControlSocket
from gpunetio.memory import PAGE, HostMemory
from gpunetio.nic.engine.port import PortConfig
from gpunetio.nic.observe.publish import TABLES
from gpunetio.nic.transport.wire_kinds import PIPES, UDP
from gpunetio.providers import soft
from neighbour import address
from nic_rig import REQ_ERR, RETRY_EXCEEDED


@pytest.fixture(scope="module")
def farm():
    with Farm() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _cleared(farm):
    yield
    farm.clear()


def join(near: Side, far: Far) -> dict:
    """A queue pair on each side, connected at the same time: what the far one shows."""
    here, there = near.open(), far("open")
    far.start("connect", -1, here, retry_cnt=7)
    near.connect(-1, there, retry_cnt=7)
    far.answer("connect")
    return there


def write_both_ways(near: Side, far: Far, there: dict, index: int = -1) -> None:
    write_all(near, index, there, 3, 4096)
    assert {cqe.opcode for cqe in near.take(index, 3, DEADLINE)} == {0}
    far("write", index, near.shown(index), 3, 4096)


@pytest.mark.parametrize(
    ("here", "there", "wanted"),
    [("auto", "auto", PIPES), ("auto", "udp", UDP), ("udp", "auto", UDP), ("udp", "udp", UDP)],
)
def test_which_wire(farm, here, there, wanted):
    """Shared memory if both ends want it, UDP if one insists."""
    with side(here) as near:
        far = farm.spawn(address(), there)
        shown = join(near, far)
        assert near.wire_kind(-1) == far("wire_kind", -1) == wanted
        write_both_ways(near, far, shown)


def number(monkeypatch, addresses):
    """Have soft0, soft1, … and then NICs without a number take these addresses."""
    monkeypatch.setattr(soft, "_address", lambda n: addresses[n])


def test_two_processes_that_open_the_first_nic_at_once(monkeypatch):
    """The one that comes second takes the next: a name that was free a moment ago is claimed meanwhile."""
    asked = []

    def owner(ip):
        asked.append(ip)
        if len(asked) == 1:
            doors.append(ControlSocket([ip], "the faster one"))
        return None

    addresses = [address() for _ in range(soft.DEVICES)]
    number(monkeypatch, addresses)
    monkeypatch.setattr(soft, "claimant", owner)
    doors = []
    with verbs.open() as ctx:
        assert ctx.name == "soft1"
        assert ctx.provider.nic.control_socket.claimed == {ip_address(addresses[1]): True}
    doors[0].close()
    assert asked == addresses[:2]


def test_addresses_of_our_own(monkeypatch):
    """No other process's NIC is in the way of one that has them."""
    monkeypatch.setattr(soft, "claimant", lambda ip: "process 1")
    with pytest.raises(InUseError, match=r"127\.0\.0\.1 to 127\.0\.0\.254 belong to NICs in other processes"):
        verbs.open()
    with verbs.open(port=PortConfig(addresses=(address(),))) as ctx:
        assert ctx.name == "soft0"


@pytest.mark.parametrize("wire", ["auto", "udp"])
def test_many_neighbours(farm, wire):
    """One wire to each over shared memory, however many queue pairs; one for all over UDP."""
    with side(wire) as near:
        fars = [farm.spawn(address(), wire) for _ in range(5)]
        shown = [(far, join(near, far)) for far in fars for _ in range(2)]
        for index, (far, there) in enumerate(shown):
            write_all(near, index, there, 3, 4096)
            assert {cqe.opcode for cqe in near.take(index, 3, DEADLINE)} == {0}
            assert far("byte", index % 2, 100) == near.byte(index, 100)
        assert near.wires() == (len(fars) if wire == "auto" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_neighbour_that_scribbles(farm, seed):
    """What it shares with us harms its own queue pairs only."""
    with side() as near:
        good, bad = farm.spawn(address()), farm.spawn(address())
        shown, other = join(near, bad), join(near, good)
        write_both_ways(near, bad, shown, 0)
        bad("scribble", seed)
        write_all(near, 0, shown, 1, 64)
        (cqe,) = near.take(0, 1, DEADLINE)
        assert (cqe.opcode, cqe.syndrome) == (REQ_ERR, RETRY_EXCEEDED)
        write_all(near, 1, other, 3, 64)
        assert {cqe.opcode for cqe in near.take(1, 3, DEADLINE)} == {0}
        bad.end()
        # A new process gets a new wire.
        write_both_ways(near, again := farm.spawn(address()), join(near, again))


@pytest.mark.slow
def test_a_neighbour_that_jams_its_notifier(farm):
    """O_NONBLOCK belongs to both ends of a descriptor that was sent: the engine waits for nobody all the same."""
    with side() as near:
        good, bad = farm.spawn(address()), farm.spawn(address())
        shown, other = join(near, bad), join(near, good)
        write_both_ways(near, bad, shown, 0)
        bad("jam")
        for _ in range(3):
            write_all(near, 0, shown, 1, 64)
            write_both_ways(near, good, other)
        (cqe, *_) = near.take(0, 3, DEADLINE)
        assert (cqe.opcode, cqe.syndrome) == (REQ_ERR, RETRY_EXCEEDED)


INTRUDER = """
import ctypes, errno, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
KEEP_SIZE_PUNCH_HOLE = 3

def refused(act):
    try:
        act()
    except PermissionError:
        return True
    return False

def punch(fd):
    if libc.fallocate(fd, KEEP_SIZE_PUNCH_HOLE, 0, 4096) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")

found = []
where = f"/proc/{sys.argv[1]}/fd"
for name in os.listdir(where):
    try:
        if "memfd:gpunetio" not in os.readlink(f"{where}/{name}"):
            continue
        fd = os.open(f"{where}/{name}", os.O_RDWR)
    except FileNotFoundError:
        continue  # it was a moment's
    size = os.fstat(fd).st_size
    found.append([
        refused(lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)),
        refused(lambda: os.pwrite(fd, b"x", 0)), refused(lambda: punch(fd)), refused(lambda: os.ftruncate(fd, 0)),
        not refused(lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)),
    ])
print(json.dumps(found))
"""


def test_nobody_else_can_write_to_what_is_shared(farm):
    """Tables, granted memory and pipes, opened again by another process of the same user through /proc."""
    with side() as near, contextlib.closing(HostMemory(PAGE, shared=True)) as granted:
        far = farm.spawn(address())
        shown = join(near, far)
        with near.pd.register(granted):
            write_both_ways(near, far, shown)
            for pid in (os.getpid(), far.pid):
                command = [sys.executable, "-I", "-c", INTRUDER, str(pid)]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=DEADLINE)
                found = json.loads(done.stdout)
                assert len(found) >= len(TABLES)
                assert found == [[True] * 5] * len(found)


# --- the first NIC that is free


def squat(where: str, listening: bool = True) -> contextlib.ExitStack:
    """Keep a name for oneself: bound only, or with so many callers that nobody can call any more."""
    kept = contextlib.ExitStack()
    owner = kept.enter_context(socket.socket(socket.AF_UNIX))
    owner.bind(f"\0gpunetio/{where}")
    if listening:
        owner.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = kept.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(f"\0gpunetio/{where}")
    return kept


@pytest.mark.parametrize("listening", [True, False], ids=["silent", "bound"])
def test_a_squatted_name_is_taken(monkeypatch, listening):
    addresses = [address() for _ in range(2)]
    number(monkeypatch, addresses)
    with squat(addresses[0], listening), verbs.open() as ctx:
        assert (ctx.name, str(ctx.provider.nic.port.addresses[0])) == ("soft1", addresses[1])
    with squat(addresses[0], listening), verbs.open("soft0") as ctx:  # beside it
        assert not any(ctx.provider.nic.control_socket.claimed.values())
        with pytest.raises(InUseError, match=r"process.* has claimed that address"):
            ctx.provider.nic.control_socket.connect(addresses[1])


def test_a_ninth_process_gets_an_address(monkeypatch):
    addresses = [address() for _ in range(soft.DEVICES + 2)]
    number(monkeypatch, addresses)
    taken = [ControlSocket([place], "somebody's") for place in addresses[:-1]]
    with verbs.open(port=PortConfig(wire="udp")) as ctx:
        assert (ctx.name, ctx.provider.nic.port.config) == ("soft0", PortConfig((addresses[-1],), "udp"))
    for door in taken:
        door.close()
