"""Machines rebuilt from people's reports, for which the doctor once had the wrong words.

Each is a recording in data/doctor/reported, made from what the report shows; addresses are documentation addresses.
"""

import pytest

from doctor_rig import DATA, READY, changed, file
from gpunetio.doctor import Status, Use, examine, lines_of, load
from gpunetio.doctor.finding import Readiness

OK, WARN, FAIL, SKIP = Status
REPORTED = {path.stem: path for path in (DATA / "reported").glob("*.json")}


@pytest.fixture(scope="module", params=sorted(REPORTED))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def report(name):
    return examine(load(REPORTED[name]))


# What each report came down to: statuses of checks, and words of summaries and cures.
RIGHT = {
    "pod-macvlan": {"gid": (OK, "GID 15 is 192.0.2.6"), "mtu": (OK, "4200: path MTU 4096")},
    "rhel8-dmabuf": {
        "dmabuf": (WARN, "NVIDIA's guide asks for Linux 6.2"), "gpu-memory-path": (WARN, "gpunetio doctor --probe"),
        "kernel": (WARN, "libcuda says that dmabuf works"), "peermem": (OK, "not needed"),
    },
    "ubuntu2204-dmabuf": {
        "dmabuf": (WARN, "NVIDIA's guide asks for Linux 6.2"), "gpu-memory-path": (WARN, "gpunetio doctor --probe"),
        "kernel": (WARN, "libcuda says that dmabuf works"), "peermem": (OK, "not needed"),
    },
    "bf3-supernic": {"bluefield-mode": (OK, "NIC mode")},
    "gb200": {"topology": (OK, "has no slot"), "dmabuf": (WARN, "NVreg_GrdmaPciTopoCheckOverride=1")},
}


def test_what_is_right(name, report):
    for check, (status, words) in RIGHT[name].items():
        findings = [finding for finding in report.findings if finding.check.id == check]
        assert {finding.status for finding in findings} == {status}, check
        assert all(words in finding.summary + finding.cure for finding in findings), check


def test_each_is_ready_for_verbs(report):
    assert report.ready(Use.VERBS).readiness is Readiness.READY


def test_no_cure_is_out_of_place(report):
    """No slot where there is none, no firmware to write where NIC mode is on, no module that is not needed."""
    cures = " ".join(finding.cure for finding in report.findings if finding.status in (WARN, FAIL))
    assert "to a slot" not in cures
    assert "INTERNAL_CPU" not in cures
    assert "modprobe nvidia-peermem" not in cures


@pytest.mark.parametrize("use", [None, Use.ETHERNET])
def test_a_machine_with_infiniband_only(use):
    """Four cards: one line, and details only for those who ask about Ethernet."""
    report = examine(load(REPORTED["gb200"]))
    assert report.ready(Use.ETHERNET).readiness is Readiness.NOT_READY
    shown = list(lines_of(report, use=use, width=200))
    start = next(i for i, line in enumerate(shown) if line.startswith("  FAIL  nic-link-type"))
    assert "mlx5_0, mlx5_1, mlx5_2, mlx5_3" in shown[start] or use
    assert shown[start + 1].startswith("  OK" if use is None else "        read")


def test_a_second_port_that_is_not_used():
    down = [file("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")]
    lines = list(lines_of(examine(changed(READY, *down))))
    at = lines.index("  FAIL  port-state          mlx5_1: port 1 is DOWN")
    assert not lines[at + 1].startswith("        ")
    both = [*down, file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")]
    lines = list(lines_of(examine(changed(READY, *both))))
    at = lines.index("  FAIL  port-state          mlx5_0: port 1 is DOWN")
    assert lines[at + 1].startswith("        read")


@pytest.mark.parametrize("width", [60, 80, 100, 132])
def test_lines_wrap_at_the_terminals_width(report, width):
    lines = list(lines_of(report, width=width))
    assert max(map(len, lines)) <= width
    words = ["".join("".join(lines_of(report, width=w)).split()) for w in (width, 1000)]
    assert words[0] == words[1]
