"""Programs that nobody here wrote, at one end on a software NIC (`gpunetio run`), at the other on Soft-RoCE."""

import re
import subprocess
import sys

import pytest

from cm_tools import asks, pings, until_it_listens
from guest import Guest
from protocol import listening
from rdma_core import skip_without, skip_without_run
from repository import environment

LIMIT = 100.0  # seconds
PORT = 18700
OURS, RXE = ("-d", "soft0"), ("-d", "rxe0")  # of devices
GIDS = {"ib": ("-x", "0", "1"), "ibv": ("-g", "0", "1")}  # how programs take the index of a GID: ours, that of rxe0
PROGRAMS = (
    "ib_write_bw -n 100 -s 65536", "ib_write_lat -n 50", "ib_read_bw -n 50 -s 8192 -o 16", "ib_read_lat -n 50 -o 16",
    "ib_send_bw -n 100", "ib_send_lat -n 50", "ib_atomic_bw -n 50 -o 16", "ibv_rc_pingpong -n 50 -c",
    "ibv_ud_pingpong -n 50 -s 512",
)

pytestmark = [pytest.mark.interop, pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"])]


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> list[str]:
    skip_without_run()
    name, *options = request.param.split()
    skip_without(name)
    if name.startswith("ib_"):
        options += ["-F", "-m", "1024"]
    return [name, *options, "-p", str(PORT)]


def ends(program: list[str]) -> tuple[list[str], list[str]]:
    """The command on a software NIC, and on rxe0."""
    option, ours, theirs = GIDS[program[0].partition("_")[0]]
    return [*program, *OURS, option, ours], [*program, *RXE, option, theirs]


def start(guest: Guest, command: list[str]) -> subprocess.Popen[str]:
    guest.without_ours()  # which have the address, if other tests ran before
    run = sys.executable, "-m", "gpunetio", "run", "--nics", "1", "--address", guest.HOST, "--"
    return subprocess.Popen(
        ["ip", "netns", "exec", guest.namespace, *run, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment(),
    )


def end(process: subprocess.Popen[str]) -> str:
    """What it has printed. It must have ended well."""
    with process:
        try:
            out, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode == 0, out
    return out


def check(program: list[str], client: str) -> None:
    """The client has counted all messages, and found no wrong byte in them."""
    if program[0].startswith("ibv_"):
        assert "50 iters in" in client
        assert "invalid data" not in client
    else:
        assert re.search(rf"^ \d+ +{program[2]} +\S+", client, re.MULTILINE), client


def test_the_guest_is_the_server(guest: Guest, program: list[str]) -> None:
    ours, theirs = ends(program)
    server = guest.session("a")
    server.begin_run(*theirs, timeout=LIMIT)
    assert guest.session("b").call("listening", port=PORT, timeout=10)
    check(program, end(start(guest, [*ours, guest.ADDRESS])))
    server.finish_run()


def test_the_guest_is_the_client(guest: Guest, program: list[str]) -> None:
    ours, theirs = ends(program)
    server = start(guest, ours)
    try:
        assert listening(PORT, 20, server.pid)
        said = guest.session("a").run(*theirs, guest.HOST, timeout=LIMIT)
    finally:
        end(server)
    check(program, said)


RPING = "rping", "-p", "18701", "-C", "20", "-v", "-V"  # which verifies


def test_rping_with_a_server_in_the_guest(guest: Guest) -> None:
    skip_without_run()
    skip_without("rping")
    server = guest.session("a")
    server.begin_run(*RPING, "-s", timeout=LIMIT)
    until_it_listens(guest)
    assert len(pings(end(start(guest, [*RPING, "-c", "-a", guest.ADDRESS])), "ping data: ")) == 20
    assert len(pings(server.finish_run(), "server ping data: ")) == 20


def test_rping_with_a_client_in_the_guest(guest: Guest) -> None:
    skip_without_run()
    skip_without("rping")
    server = start(guest, [*RPING, "-s"])
    try:
        asked = asks(guest, [*RPING, "-c", "-a", guest.HOST])
    finally:
        served = end(server)
    assert len(pings(asked, "ping data: ")) == len(pings(served, "server ping data: ")) == 20
