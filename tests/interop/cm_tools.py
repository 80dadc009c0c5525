"""Tools of librdmacm in the guest, and ours: how they are run, and what they print."""

import time
from collections.abc import Sequence

from guest import Guest, Remote

PATIENCE = 120.0  # seconds for a tool: Linux sends a lost message again after 4 to 6 s
NO_LISTENER = "error 8", "Connection refused", "INVALID_SERVICE_ID"  # as the tools say
LETTERS = "".join(map(chr, range(ord("A"), ord("z") + 1)))


def ping(number: int, nbytes: int) -> str:
    """The data of a ping as both ends print them."""
    start = f"rdma-ping-{number}: "
    letters = LETTERS[number % len(LETTERS) :] + LETTERS * (nbytes // len(LETTERS) + 1)
    return (start + letters)[: nbytes - 1]


def pings(printed: str, end: str) -> list[str]:
    return [line.removeprefix(end) for line in printed.splitlines() if line.startswith(end)]


def listens(guest: Guest) -> bool:
    """Whether a program in the guest has a listener of the connection manager."""
    return "LISTEN" in guest.session("b").run("rdma", "resource", "show", "cm_id", timeout=10)


def until_it_listens(guest: Guest) -> None:
    end = time.monotonic() + PATIENCE
    while not listens(guest):
        assert time.monotonic() < end, "nobody listens"
        time.sleep(0.1)


# What a tool says on stderr comes behind its lines, instead of into them.
APART = ("sh", "-c", '"$@" 2>/tmp/errors.$$; status=$?; cat /tmp/errors.$$; exit $status', "sh")


def serve_in_guest(guest: Guest, ours: Remote, server: Sequence[str], client: Sequence[str]) -> tuple[str, str]:
    """Run a server in the guest and a client of ours: what both print."""
    session = guest.session("a")
    session.begin_run(*APART, *server, timeout=PATIENCE)
    until_it_listens(guest)
    done = ours.call("tool", name=client[0], arguments=client[1:], timeout=PATIENCE)
    assert done["status"] == 0, done["output"]
    return session.finish_run(), done["output"]


def asks(guest: Guest, client: Sequence[str]) -> str:
    """Run a client in the guest, again and again while nobody listens: what it prints."""
    end = time.monotonic() + 60
    while True:
        done = guest.session("d").call("run", argv=[*APART, *client], timeout=PATIENCE)
        if done["status"] == 0:
            return done["output"]
        assert any(text in done["output"] for text in NO_LISTENER), done["output"]
        assert time.monotonic() < end, done["output"]
        time.sleep(0.2)


def serve_here(guest: Guest, ours: Remote, server: Sequence[str], client: Sequence[str]) -> tuple[str, str]:
    """Run a server of ours and a client in the guest: what both print."""
    ours.begin("tool", name=server[0], arguments=server[1:], timeout=PATIENCE)
    printed = asks(guest, client)
    served = ours.finish()
    assert served["status"] == 0, served["output"]
    return served["output"], printed
