"""gpunetio packet_processing over TAP devices: curl and ab, several queues, and wires that lose frames."""

import contextlib
import re
from collections.abc import Iterator

import pytest

from nic_rig import until
from packet_lab import INTERFACE, Lab, laboratory, on_a_tap
from packet_server import READY, SERVER, PacketServer
from stream_end import StreamEnd
from tap_relay import Relay, open_tap
from tools import running

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(300)]

REQUESTS, AT_ONCE = 10_000, 50


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    with on_a_tap(tmp_path_factory.mktemp("lab")) as (lab, _):
        yield lab


def test_curl_gets_each_page(lab, tmp_path):
    """On one connection, on connections of their own, and with HTTP 1.0."""
    lab.curl(tmp_path)
    lab.curl(tmp_path, "-H", "Connection: close")
    lab.curl(tmp_path, "--http1.0")


def test_curl_looks_for_a_page_that_is_not_there(lab):
    said = lab.run("curl", "-sS", "--max-time", 20, "-w", "%{http_code}", "-o", "/dev/null", f"http://{SERVER}/nowhere")
    assert said == "404"


@pytest.mark.parametrize("path", ["/index.html", "/10000.html"])
@pytest.mark.parametrize("keep", [False, True], ids=["each-its-own", "kept"])
def test_ab(lab, keep, path):
    said = lab.ab(path, REQUESTS, AT_ONCE, *["-k"] * keep)
    if keep:
        assert re.search(rf"Keep-Alive requests: +{REQUESTS}\n", said), said


@pytest.mark.parametrize("queues", [2, 4])
def test_several_queues(tmp_path, queues):
    with on_a_tap(tmp_path, queues=queues) as (lab, _):
        lab.curl(tmp_path)
        lab.ab("/1461.html", 2000, AT_ONCE)
        lab.ab("/1461.html", 2000, AT_ONCE, "-k")


# --- a wire that loses, doubles and swaps frames ---------------------------------------------------------------------


FAULTS = {
    "loss": {"loss": 0.03}, "twice": {"twice": 0.05}, "swapped": {"swapped": 0.1},
    "all": {"loss": 0.02, "twice": 0.02, "swapped": 0.05},
}


@pytest.mark.parametrize("faults", FAULTS)
def test_a_bad_wire(tmp_path, faults):
    """On both ways. Connections end, and pages are right."""
    with laboratory(tmp_path) as lab, contextlib.ExitStack() as undo:
        cable = tmp_path / "cable"
        server = PacketServer(f"unix:{cable}", "--pages", tmp_path / "pages")
        undo.enter_context(running(server))
        server.until(READY)
        until(cable.exists, "the wire", 60)
        end = StreamEnd(cable)
        undo.callback(end.close)
        relay = Relay(open_tap(lab.where, INTERFACE), end.sock, **FAULTS[faults])
        undo.callback(relay.close)
        lab.join(INTERFACE)
        lab.curl(tmp_path)
        lab.ab("/10000.html", 300, 10)
        lab.ab("/1461.html", 300, 10, "-k")
        for way in relay.ways:
            assert set(way.done) >= set(FAULTS[faults]), "the wire was good"
        server.stop()


@pytest.mark.parametrize("faults", ["loss=0.02,reordering=0.02,duplication=0.02,seed=7"])
def test_a_nic_with_faults(tmp_path, faults):
    """The same by `--faults`, which is for what the server sends."""
    with on_a_tap(tmp_path, "--faults", faults) as (lab, _):
        lab.curl(tmp_path)
        lab.ab("/10000.html", 300, 10)
