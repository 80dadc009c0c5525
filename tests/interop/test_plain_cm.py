"""Connections of this package in the guest, on rxe0: the kernel's connection manager by librdmacm, in either role."""

import pytest

from cm_tools import APART, PATIENCE, asks, ping, pings, serve_here, serve_in_guest, until_it_listens
from guest import BOTH_ROLES, OURS, Failed, Guest

pytestmark = [
    pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"]),
]

PROGRAM = [*OURS, "-m", "gpunetio"]
NIC = ["-n", "rxe0"]
COUNT, NBYTES = 10, 3000
NUMBERS = ["-v", "-V", "-S", str(NBYTES), "-C", str(COUNT)]
WANTED = [ping(number, NBYTES) for number in range(COUNT)]


def check(served: str, asked: str) -> None:
    assert pings(served, "server ping data: ") == WANTED, served
    assert pings(asked, "ping data: ") == WANTED, asked


@pytest.mark.parametrize("server, client", BOTH_ROLES)
def test_rping_in_the_guest(guest: Guest, server: str, client: str) -> None:
    """Both ends in the guest: ours on rxe0, and rdma-core's."""
    programs = {"ours": [*PROGRAM, "rping", *NIC], "theirs": ["rping"]}
    session = guest.session("a")
    session.begin_run(*APART, *programs[server], "-s", "-a", Guest.ADDRESS, *NUMBERS, timeout=PATIENCE)
    until_it_listens(guest)
    asking = [*APART, *programs[client], "-c", "-a", Guest.ADDRESS, *NUMBERS]
    printed = guest.session("c").run(*asking, timeout=PATIENCE)
    check(session.finish_run(), printed)


@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_rping_with_the_software_nic(guest: Guest, ip: str, guest_serves: bool) -> None:
    """The same program at both ends, above the kernel's connection manager and above ours."""
    here, there = (Guest.HOST, Guest.ADDRESS) if ip == "ipv4" else (Guest.HOST6, Guest.ADDRESS6)
    if guest_serves:
        server, client = ["-s", "-a", there, *NUMBERS], ["-c", "-a", there, *NUMBERS]
        check(*serve_in_guest(guest, guest.ours(), [*PROGRAM, "rping", *NIC, *server], ["rping", *client]))
    else:
        server, client = ["-s", "-a", here, *NUMBERS], ["-c", "-a", here, *NUMBERS]
        check(*serve_here(guest, guest.ours(), ["rping", *server], [*PROGRAM, "rping", *NIC, *client]))


def test_errors(guest: Guest) -> None:
    """Nobody listens; no device has the address; the port is taken."""
    session = guest.session("a")
    for arguments, text in (
        (["-c", "-a", Guest.ADDRESS, "-p", "9"], "INVALID_SERVICE_ID"),
        (["-s", "-a", "10.77.0.9"], "does not have the address 10.77.0.9"),
    ):
        with pytest.raises(Failed, match=text):
            session.run(*PROGRAM, "rping", *NIC, *arguments, timeout=PATIENCE)
    session.begin_run("rping", "-s", "-C", "1", timeout=PATIENCE)
    until_it_listens(guest)
    with pytest.raises(Failed, match="another program listens"):
        guest.session("c").run(*PROGRAM, "rping", *NIC, "-s", timeout=PATIENCE)
    asks(guest, ["rping", "-c", "-a", Guest.ADDRESS, "-C", "1"])
