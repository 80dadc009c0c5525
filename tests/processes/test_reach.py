"""Two processes whose NICs make their turns on GPUs reach each other's memory without packets."""

import json
import signal
import subprocess
import sys

import pytest

from gpunetio import device
from reaching import COUNT, ROUNDS
from repository import ROOT, environment

pytestmark = [pytest.mark.soft_nic, pytest.mark.timeout(200)]


def two_gpus() -> bool:
    """Return whether there are two GPUs, which kernels of two processes then share with nobody."""
    from gpunetio.gpu.cuda_backend import device_count

    return device_count() > 1


@pytest.mark.parametrize("places, kind", [
    ((("twin", "twin"), ("twin", "twin")), []),
    pytest.param((("0", "gpu0"), ("1", "gpu1")), [], marks=pytest.mark.gpu),
    pytest.param((("0", "gpu0"), ("1", "gpu1")), ["mapped"], marks=pytest.mark.gpu),
], ids=["twin", "cuda", "cuda-mapped"])
def test_requests_without_packets(places, kind, port):
    """They go without packets while all is well, and as packets as soon as anything is not: errors are the same."""
    if places[0][0] != "twin" and not two_gpus():
        pytest.skip("needs two GPUs")
    command, env = (sys.executable, str(ROOT / "tests/rigs/reaching.py")), environment()
    ends = [
        subprocess.Popen([*command, str(rank), str(port), *place, *kind], stdout=subprocess.PIPE, text=True, env=env)
        for rank, place in enumerate(places)
    ]
    outputs = [end.communicate(timeout=150)[0] for end in ends]
    assert [end.returncode for end in ends] == [0, -signal.SIGKILL], outputs
    told = {fact.pop("what"): fact for output in outputs for fact in map(json.loads, output.splitlines())}
    assert told["posted"] == {"statuses": [device.OK] * ROUNDS, "packets": 0}
    assert told["read"]["same"]
    assert told["arrived"] == {"same": True, "words": [COUNT, 2 * COUNT * ROUNDS]}
    assert told["closed"]["status"] == device.EIO
    assert "REMOTE_ACCESS" in told["closed"]["error"]
    assert told["closed"]["packets"] > 0
    assert told["again"] == {"status": device.OK, "packets": 0}
    assert told["killed"]["status"] in (device.EIO, device.ETIMEDOUT)
