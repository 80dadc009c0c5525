"""gpunetio packet_processing over TAP devices: ping, sockets of UDP, and a user without rights."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from packet_lab import Lab, need, on_a_tap
from packet_server import CLIENT, READY, SERVER, make_pages
from repository import environment

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(300)]

PINGS = 100_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    with on_a_tap(tmp_path_factory.mktemp("lab"), http=False) as (lab, _):
        yield lab


def test_a_flood_of_pings(lab):
    said = lab.run("ping", "-f", "-q", "-c", PINGS, "-W", 10, SERVER)
    assert f"{PINGS} packets transmitted, {PINGS} received, 0% packet loss" in said


@pytest.mark.parametrize("nbytes", [0, 1, 1472])
def test_pings_of_all_sizes(lab, nbytes):
    said = lab.run("ping", "-q", "-c", 20, "-i", 0.01, "-s", nbytes, SERVER)
    assert "20 received, 0% packet loss" in said


@pytest.mark.parametrize("queues", [1, 3])
def test_sockets_of_udp(tmp_path, queues):
    """The kernel cuts nothing and sums nothing that the counts depend on. Those to port 53 are DNS."""
    with on_a_tap(tmp_path, http=False, queues=queues) as (lab, server):
        with lab.where.run(socket.socket, socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for n in range(1000):
                sock.sendto(bytes(n), (SERVER, 53 if n % 4 == 0 else 5353))
                if n % 100 == 0:
                    lab.run("ping", "-c", 1, SERVER)  # the device's queue in the kernel is short
        lab.run("ping", "-c", 1, SERVER)
    last = server.said[server.said.rindex("Seconds ") :]
    counts = re.findall(r"\[UDP\] QUEUE: \d DNS: (\d+) .* OTHER: (\d+) .* TOTAL: (\d+) ", last)
    assert [sum(int(one[i]) for one in counts) for i in range(3)] == [250, 750, 1000]


RECIPE = """
"{python}" -m gpunetio packet_processing -g host -n soft0 -q 1 -s --wire tap:gpu0 --address {server} \\
    --pages "{folder}/pages" >"{folder}/log" 2>&1 &
until grep -q "{ready}" "{folder}/log"; do kill -0 $! || exit 2; sleep 0.1; done
ip addr add {client}/24 dev gpu0
ip link set gpu0 up
ping -q -c 5 -i 0.1 {server} || exit 3
curl -sS --fail --max-time 60 -o "{folder}/page" http://{server}/10000.html || exit 4
kill -INT $!
wait $!
"""


def test_a_user_in_a_namespace_of_their_own(tmp_path):
    """`unshare -Urn`: root there, and nobody outside."""
    need("unshare", "ip", "ping", "curl")
    (tmp_path / "pages").mkdir()
    pages = make_pages(tmp_path / "pages")
    script = RECIPE.format(python=sys.executable, server=SERVER, client=CLIENT, folder=tmp_path, ready=READY)
    done = subprocess.run(
        ["unshare", "-Urn", "bash", "-c", script], capture_output=True, text=True, timeout=200, env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
    assert "5 packets transmitted, 5 received, 0% packet loss" in done.stdout
    assert (tmp_path / "page").read_bytes() == pages["/10000.html"]
