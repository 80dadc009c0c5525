"""Connections with the kernel's connection manager: `gpunetio rping` and the tools of librdmacm, in either role."""

from collections.abc import Iterator

import pytest

from cm_tools import PATIENCE, asks, listens, ping, pings, serve_here, serve_in_guest, until_it_listens
from guest import Failed, Guest, Remote

pytestmark = [
    pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"]),
]

LOSS = 0.05
FOR_EVER = 60  # seconds: less than a session's patience
CONNECTIONS = 2  # of rping with losses: each lost message costs 4 to 6 s


def rping_both_ways(guest: Guest, ours: Remote, here: str, there: str, guest_serves: bool, nbytes: int, count: int):
    numbers = ["-v", "-V", "-S", str(nbytes), "-C", str(count)]
    if guest_serves:
        printed = serve_in_guest(
            guest, ours, ["rping", "-s", "-a", there, *numbers], ["rping", "-c", "-a", there, *numbers]
        )
    else:
        printed = serve_here(guest, ours, ["rping", "-s", "-a", here, *numbers], ["rping", "-c", "-a", here, *numbers])
    wanted = [ping(number, nbytes) for number in range(count)]
    assert pings(printed[0], "server ping data: ") == wanted, printed
    assert pings(printed[1], "ping data: ") == wanted, printed


@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_rping(guest: Guest, ip: str, guest_serves: bool) -> None:
    """The letters go round, and both ends print and compare them; one ping has many packets."""
    here, there = (Guest.HOST, Guest.ADDRESS) if ip == "ipv4" else (Guest.HOST6, Guest.ADDRESS6)
    rping_both_ways(guest, guest.ours(), here, there, guest_serves, 64, 60)
    rping_both_ways(guest, guest.ours(), here, there, guest_serves, 5000, 10)


@pytest.fixture
def lossy(guest: Guest) -> Iterator[None]:
    with guest.losing(LOSS):
        yield


def test_clients_with_losses(guest: Guest, lossy: None) -> None:
    """Both ends lose packets, also those of the connection manager: all connections come up, and end."""
    for _ in range(CONNECTIONS):
        rping_both_ways(guest, guest.ours(LOSS), Guest.LOSSY_HOST, Guest.ADDRESS, True, 64, 10)
    session = guest.session("a")
    # The client does not stay to acknowledge the server's message again. If that was lost, rxe sends it for ever.
    session.begin("run", argv=["timeout", str(FOR_EVER), "rdma_server"], timeout=PATIENCE)
    until_it_listens(guest)
    client = guest.ours(LOSS).call("tool", name="rdma_client", arguments=["-s", Guest.ADDRESS], timeout=PATIENCE)
    assert client["output"].splitlines() == ["rdma_client: start", "rdma_client: end 0"]
    session.finish()


def test_servers_with_losses(guest: Guest, lossy: None) -> None:
    """The same with clients in the guest. They end without an answer to their DREQ, and nobody sends it again."""
    arguments = ["-p", "7178", "-v", "-V", "-C", "10"]
    wanted = [ping(number, 64) for number in range(10)]
    for _ in range(CONNECTIONS):
        ours = guest.ours(LOSS)
        ours.begin("tool", name="rping", arguments=["-s", *arguments], timeout=PATIENCE)
        assert pings(asks(guest, ["rping", "-c", "-a", Guest.LOSSY_HOST, *arguments]), "ping data: ") == wanted
        served = ours.finish()
        assert pings(served["output"], "server ping data: ") == wanted
        assert served["status"] == 0 or "the other end sent nothing" in served["output"]
    ours = guest.ours(LOSS)
    ours.begin("tool", name="rdma_server", arguments=["-p", "7179"], timeout=PATIENCE)
    asked = asks(guest, ["rdma_client", "-s", Guest.LOSSY_HOST, "-p", "7179"])
    assert asked.splitlines() == ["rdma_client: start", "rdma_client: end 0"]
    ours.finish()


def test_clients_of_a_persistent_server(guest: Guest) -> None:
    """One server in the guest, three clients of ours one after the other; nothing stays in the kernel."""
    session = guest.session("a")
    session.begin("run", argv=["sh", "-c", "rping -s -P -p 7175 & echo $! >/tmp/rping; wait"], timeout=PATIENCE)
    until_it_listens(guest)
    for number in range(3):
        done = guest.ours().call(
            "tool", name="rping", timeout=PATIENCE,
            arguments=["-c", "-a", Guest.ADDRESS, "-p", "7175", "-v", "-V", "-C", str(2 + number)],
        )
        assert done["status"] == 0, done["output"]
        assert len(pings(done["output"], "ping data: ")) == 2 + number
    guest.session("c").run("sh", "-c", "kill $(cat /tmp/rping)", timeout=10)
    session.finish()
    assert not listens(guest)


@pytest.mark.parametrize("guest_serves", [True, False], ids=["guest_serves", "guest_asks"])
def test_rdma_client_and_server(guest: Guest, guest_serves: bool) -> None:
    ours = guest.ours()
    if guest_serves:
        server, client = serve_in_guest(guest, ours, ["rdma_server"], ["rdma_client", "-s", Guest.ADDRESS])
    else:
        server, client = serve_here(guest, ours, ["rdma_server"], ["rdma_client", "-s", Guest.HOST])
    assert server.splitlines() == ["rdma_server: start", "rdma_server: end 0"]
    assert client.splitlines() == ["rdma_client: start", "rdma_client: end 0"]


def test_nobody_listens(guest: Guest) -> None:
    """Each end tells the other so, and its program says it."""
    ours = guest.ours()
    done = ours.call("tool", name="rping", arguments=["-c", "-a", Guest.ADDRESS, "-p", "9"], timeout=PATIENCE)
    assert done["status"] == 1
    assert "INVALID_SERVICE_ID" in done["output"]

    ours.begin("tool", name="rping", arguments=["-s", "-p", "7176"], timeout=PATIENCE)
    asks(guest, ["rping", "-c", "-a", Guest.HOST, "-C", "1", "-p", "7176"])  # and the server ends
    assert ours.finish()["status"] == 0
    ours.begin("tool", name="rdma_server", arguments=["-p", "7177"], timeout=PATIENCE)
    with pytest.raises(Failed, match="REJECTED, error 8"):
        guest.session("a").run("rping", "-c", "-a", Guest.HOST, "-p", "9", timeout=PATIENCE)
    asks(guest, ["rdma_client", "-s", Guest.HOST, "-p", "7177"])
    assert ours.finish()["status"] == 0
