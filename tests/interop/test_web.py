"""A virtual machine gets pages from a kernel: `gpunetio packet_processing`, over QEMU's socket for Ethernet frames.

The server needs no rights here: a socket is its wire.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import pytest

from machines import FIRST_ANSWER, FLOOD, OURS, PINGS, Machines
from packet_server import READY, make_pages

pytestmark = [pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600)]

REQUESTS, AT_ONCE = 10_000, 50
PAGE = "/10000.html"
PAGES = """
python3 - {url} {paths} <<'END' || exit 6
import hashlib, sys, urllib.request
for path in sys.argv[2:]:
    with urllib.request.urlopen(sys.argv[1] + path, timeout=60) as page:
        print("page", path, hashlib.sha256(page.read()).hexdigest())
END
"""
BENCHMARK = """
for kept in "" -k; do
    ab -q -s 120 $kept -n {count} -c {at_once} {url} || exit 7
done
"""


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_guest_gets_pages_from_a_kernel(undo, tmp_path):
    """Pings, each page byte for byte, and requests by 50 connections at once, on their own and kept: none is lost."""
    folder = tmp_path / "pages"
    folder.mkdir()
    pages = make_pages(folder)
    script = PAGES.format(url=f"http://{OURS}", paths=" ".join(pages))
    script += BENCHMARK.format(count=REQUESTS, at_once=AT_ONCE, url=f"http://{OURS}{PAGE}")
    machines = Machines(undo, tmp_path, "web", FIRST_ANSWER + FLOOD + script)
    server = machines.start(
        "-u", "-m", "gpunetio", "packet_processing", "-g", "host", "-n", "soft0", "-q", "1", "-s",
        "--wire", f"unix:{machines.cable}", "--address", OURS, "--pages", str(folder), log="server",
    )
    machines.until(lambda: READY in machines.said("server"), "the server")
    machines.finish(server, "server")
    console = machines.said("guest")
    assert f"{PINGS} packets transmitted, {PINGS} received, 0% packet loss" in console
    for path, data in pages.items():
        assert f"page {path} {hashlib.sha256(data).hexdigest()}" in console
    lines = [" ".join(line.split()) for line in console.splitlines()]
    nbytes = REQUESTS * len(pages[PAGE])
    for words in (f"Complete requests: {REQUESTS}", "Failed requests: 0", f"HTML transferred: {nbytes} bytes"):
        assert lines.count(words) == 2, console
    assert f"Keep-Alive requests: {REQUESTS}" in lines
    assert "Non-2xx" not in console
