"""A device can be controlled where llvmlite is not installed: a process that cannot import it does all of that."""

import re
import subprocess
import sys

import pytest

from repository import environment

FORBID = """
import sys

class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llvmlite":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoCompiler())
"""


def run(program: str) -> str:
    """What a process without llvmlite prints."""
    done = subprocess.run(
        [sys.executable, "-c", FORBID + program], env=environment(), text=True, timeout=60,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_imports() -> None:
    run("""
import gpunetio.bench.pingpong, gpunetio.cli, gpunetio.doctor.probes.process, gpunetio.fabric.faults
import gpunetio.nic.engine.port, gpunetio.providers, gpunetio.samples.verbs_server_client, gpunetio.testing
import gpunetio.verbs
""")


def test_the_control_path() -> None:
    """Objects of a device that is none: what a mailbox can say, and queues that somebody else fills."""
    run("""
from gpunetio import QpState, verbs
from fake_device import FakeProvider

device = FakeProvider()
with verbs.import_context(device) as ctx:
    pd = ctx.create_pd()
    mr = pd.register(bytearray(100))
    cq = ctx.create_cq(16, external_datapath=True)
    qp = pd.create_qp(sq_wr=16, send_cq=cq, external_datapath=True)
    qp.connect(qp.endpoint())
    assert qp.state == QpState.RTS
    assert (mr.nbytes, ctx.query_gid()[-4:]) == (100, bytes([10, 0, 0, 1]))
assert not device.left()
""")


def test_what_is_compiled_says_so() -> None:
    said = run("""
import gpunetio
from gpunetio import verbs
from gpunetio.errors import NotFoundError, NotSupportedError
from fake_device import FakeProvider

assert not [device for device in verbs.device_list() if device.provider == "soft"]
ctx = verbs.import_context(FakeProvider())
for call in (lambda: verbs.open("soft0"), lambda: verbs.open(port=gpunetio.PortConfig()), lambda: ctx.create_cq(16)):
    try:
        call()
    except (NotFoundError, NotSupportedError) as error:
        print(error)
try:
    gpunetio.Gpu
except ModuleNotFoundError as error:
    print(error)
""")
    named, *others = said.splitlines()
    assert re.fullmatch(r"no device 'soft0'; there are: .*(no software NIC can run without llvmlite .*)", named)
    assert others == [
        "no software NIC can run without llvmlite (No module named 'llvmlite'): pip install llvmlite",
        ("the CPU cannot work at the rings of a queue without llvmlite (No module named 'llvmlite'): "
         "pip install llvmlite"),
        "No module named 'llvmlite'",
    ]


@pytest.mark.parametrize(
    "arguments, status, text",
    [
        ("devices -l", 0, ""),
        ("conformance -l states", 0, "RST, INIT, RTR, RTS"),
        ("pingpong -d soft0", 1, "no software NIC can run without llvmlite"),
        ("verbs_server_client -d soft0", 1, "no software NIC can run without llvmlite"),
        ("conformance -d soft0", 1, "no software NIC can run without llvmlite"),
    ],
)
def test_commands(arguments: str, status: int, text: str) -> None:
    said = run(f"""
from click.testing import CliRunner
from gpunetio.cli import app

done = CliRunner().invoke(app, {arguments.split()})
assert done.exit_code == {status}, done.output
print(done.output)
""")
    assert text in said


def test_the_doctors_probes() -> None:
    """What takes no compiler is tried all the same."""
    run("""
from contextlib import ExitStack
from gpunetio import verbs
from gpunetio.doctor.probes import bench as probe_bench
from gpunetio.doctor.probes.process import probe
from fake_device import FakeProvider

probe_bench.open_context = lambda name: verbs.import_context(FakeProvider())
with ExitStack() as opened:
    said = []
    probe(probe_bench.Bench("fake0", "auto", opened), said.append)
found = {line["probe"]: (line["status"], line["summary"]) for line in said if "probe" in line}
assert found["probe-open"][0] == "OK", found
assert found["probe-uar"] == found["probe-dmabuf"] == found["probe-umem"] == ("SKIP", "no GPU"), found
for name in ("probe-loopback-host", "probe-gpu", "probe-loopback-gpu"):
    assert found[name][0] == "FAIL" and "without llvmlite" in found[name][1], found[name]
""")
