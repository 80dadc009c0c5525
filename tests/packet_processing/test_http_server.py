"""What the HTTP server makes of a connection's segments and of time that passes: no client, and a clock of the test."""

from contextlib import ExitStack

import pytest

from gpunetio.packet_processing.connection import CLOSING, RESPONDING
from server_bench import ServerBench

REQUESTS = (
    b"\r\nGET /a HTTP/1.1\r\nHost: a\r\n\r\nHEAD /none HTTP/1.0\nConnection: keep-alive\n\n"
    b"GET http://a/a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
)
BODY = bytes(60_000)


@pytest.fixture(scope="module")
def bench():
    with ExitStack() as undo:
        yield ServerBench({b"/a": BODY, b"/b": b"short"}, undo)


def answered(bench, parts):
    """Return how many requests got a page, and how many got none, when they come in these parts, and how they end."""
    before = [bench.count(name) for name in ("ok", "not_found", "requests")]
    client = bench.client(7)
    for part in parts:
        client.send(part)
        while int(client.served["flags"]) & RESPONDING and client.acked < int(client.served["snd_max"]):
            client.acknowledge()
    after = [bench.count(name) for name in ("ok", "not_found", "requests")]
    return [new - old for new, old in zip(after, before, strict=True)], bool(int(client.served["flags"]) & CLOSING)


def test_requests_that_are_cut_anywhere(bench):
    """Each position, and each byte by itself. Only the last request closes."""
    for at in range(len(REQUESTS) + 1):
        assert answered(bench, (REQUESTS[:at], REQUESTS[at:])) == ([2, 1, 3], True), at
    assert answered(bench, [bytes([byte]) for byte in REQUESTS]) == ([2, 1, 3], True)


@pytest.mark.parametrize(("greeting", "status"), [
    (b"\x16\x03\x01\x00", "bad_request"), (b"SSH-2.0-OpenSSH_9.6\r\n", "bad_request"), (b"\0" * 1400, "bad_request"),
    (b"GET /" + b"x" * 1400, None),
])
def test_what_cannot_become_a_request_is_answered_at_once(bench, greeting, status):
    client, before = bench.client(8), bench.count("bad_request")
    client.send(greeting)
    assert bench.count("bad_request") - before == (status is not None)
    assert bool(int(client.served["flags"]) & CLOSING) == (status is not None)


def test_a_request_that_is_too_long(bench):
    client, before = bench.client(8), bench.count("too_large")
    for _ in range(2):
        client.send(b"GET /" + b"x" * 1400)
    assert bench.count("too_large") == before + 1


def taken(bench, steps):
    """Return after how many seconds a client is given up that acknowledges so many bytes each second.

    None: it gets all. Steps are (bytes a second, seconds); the last one goes on.
    """
    client = bench.client(9)
    client.send(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n")
    rates = [rate for rate, seconds in steps for _ in range(seconds)]
    for second in range(600):
        bench.look(1)
        if client.ended:
            return second + 1
        client.acknowledge(rates[min(second, len(rates) - 1)])
        if not int(client.served["flags"]) & RESPONDING:
            return None
    raise AssertionError("it is never given up")


@pytest.mark.parametrize(("steps", "given_up"), [
    ([(0, 1)], 30), ([(1, 1)], 30), ([(200, 1)], 30), ([(260, 1)], None), ([(10_000, 1)], None),
    ([(40_000, 1), (1, 1)], 60), ([(300, 55), (10, 1)], 90),
])
def test_a_client_that_takes_too_little_is_given_up(bench, steps, given_up):
    """The server's documents: 240 bytes a second, looked at every 30 s. What was taken before does not count."""
    assert taken(bench, steps) == given_up


def test_a_short_response_that_nobody_acknowledges(bench):
    client, before = bench.client(9), bench.count("retransmitted")
    client.send(b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n")
    for _ in range(29):
        bench.look(1)
    assert not client.ended
    assert bench.count("retransmitted") - before == 6  # after 0.3, 0.6, 1.2 … s, as far as this clock shows
    bench.look(1)
    assert client.ended
