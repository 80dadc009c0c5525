"""NIXL, by the UCX of its own wheel: two agents, each with a software NIC."""

import importlib.util
import re
import sys

import pytest

from programs import LIMIT, run, serving
from rdma_core import skip_without_run
from repository import RIGS

pytestmark = [pytest.mark.interop, pytest.mark.soft_nic, pytest.mark.host_memory]

CHILD = sys.executable, RIGS / "nixl_child.py"


@pytest.fixture(autouse=True)
def _needs():
    skip_without_run()
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("the wheel nixl-cu12 is not installed (make .venv/.interop)")


@pytest.mark.parametrize("transports", [{"UCX_TLS": "rc_x"}, {"UCX_TLS": "rc_v"}, {}], ids=["rc_x", "rc_v", "default"])
def test_two_agents_read_and_write(port, transports):
    """Transfers of 64 KiB to 4 MiB in host memory, with notifications. By default, UCX chooses rc_x for them."""
    variables = {"UCX_LOG_LEVEL": "info", **transports}
    with serving(*CHILD, "target", port, options=("--nics", "1"), **variables) as target:
        initiator = run(*CHILD, "initiator", port, options=("--nics", "1"), **variables)
        if initiator.returncode:
            target.kill()
        out, _ = target.communicate(timeout=LIMIT)
    said = initiator.stdout + initiator.stderr
    assert initiator.returncode == 0, said + out
    assert target.returncode == 0, out
    assert initiator.stdout.endswith("initiator done\n")
    kind = "rc_verbs" if transports.get("UCX_TLS") == "rc_v" else "rc_mlx5"
    assert re.search(rf"int(er|ra)-node cfg#\d+ rma\({kind}/soft0:1\)", said), said
    for text in said, out:
        assert not re.search(r"UCX +ERROR|gpunetio\.\w+: ", text), text
