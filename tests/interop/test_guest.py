"""The harness against itself: two queue pairs of the guest's Soft-RoCE device, with nothing of ours between them."""

import pytest

from conformance import RXE, Conformance, Link, expect
from guest import Failed, Guest, connect

pytestmark = pytest.mark.interop

one_guest = pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"])


@pytest.mark.parametrize("ip", ["ipv6"])  # the program below has both
class TestRxe(Conformance):
    @pytest.fixture
    def link(self, guest: Guest, ip: str) -> Link:
        return Link(guest.session("a"), guest.session("b"), RXE, RXE, ip, guest.path_mtu)


def test_path_mtu(guest: Guest) -> None:
    made = guest.session("a").create()
    assert made.about["mtu"] == guest.path_mtu
    made.call("destroy")


@one_guest
def test_unreliable_connection(guest: Guest) -> None:
    """rxe has it: a write and a send arrive, and a refused write is dropped in silence."""
    a, b = (guest.session(name).create(transport="UC") for name in "ab")
    connect(a, b)
    a.fill(1)
    a.post("WRITE", [[0, 5000]], remote=b.address + 3, rkey=b.rkey)
    expect(a.sent())
    a.post("WRITE", [[0, 50]], remote=b.address + 3, rkey=b.rkey ^ 0xFF)
    expect(a.sent())
    b.receive([9000, 100])
    a.post("SEND_IMM", [[7, 100]], imm=77)
    expect(a.sent())
    expect(b.received(), imm=77)
    b.image[3:5003], b.image[9000:9100] = a.image[:5000], a.image[7:107]
    b.verify()
    for party in (a, b):
        party.call("destroy")


@pytest.mark.parametrize("events", [False, True], ids=["polled", "events"])
@one_guest
def test_rc_pingpong(guest: Guest, ip: str, events: bool) -> None:
    """The program that everybody has, as server and as client."""
    server, client = guest.session("a"), guest.session("b")
    options = {"ip": ip, "nbytes": 3000, "count": 100, "mtu": 1024, "events": events, "port": 18600, "timeout": 20}
    server.begin("rc_pingpong", **options)
    assert client.call("listening", port=18600, timeout=10)
    assert "600000 bytes" in client.call("rc_pingpong", host=Guest.ADDRESS, **options)
    assert "600000 bytes" in server.finish()


@one_guest
def test_errors_of_the_harness(guest: Guest) -> None:
    """A command that fails says why, and the session goes on; one that dies is replaced."""
    session = guest.session("a")
    with pytest.raises(Failed, match="KeyError"):
        session.call("state", qp=1)
    assert session.call("run", argv=["sh", "-c", "echo hello; exit 3"], timeout=5) == {"status": 3, "output": "hello\n"}
    with pytest.raises(Failed, match="TimeoutExpired"):
        session.call("run", argv=["sleep", "10"], timeout=0.1)
    session.connection.sock.shutdown(1)
    with pytest.raises((Failed, OSError)):
        session.call("run", argv=["true"], timeout=5)
    assert guest.session("a") is not session
    assert guest.session("a").call("run", argv=["true"], timeout=5)["status"] == 0
