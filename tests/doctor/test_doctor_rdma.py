"""The doctor's checks of libibverbs, libmlx5, DOCA and OFED."""

import pytest

from doctor_rig import answer, found, of_cause, without
from gpunetio.doctor import LiveHost, Status
from gpunetio.doctor.machine.host import Kind, Reading, Trouble

OK, WARN, FAIL, SKIP = Status


def library(name: str, **other: object) -> Reading:
    value = {"file": f"/usr/lib/{name}.so.1.14.50.0", "lacks": [], "lacks_optional": []} | other
    return answer("verbs_library", name, value=value)


# cause: what is changed, which check tells, how, and words of its summary and cure
CAUSES = {
    "libibverbs is missing": (
        [Reading(Kind.QUESTION, ("verbs_library", "libibverbs"), None, Trouble.FAILED, "libibverbs.so.1: cannot open")],
        "rdma-core", FAIL, "libibverbs cannot be loaded", "apt install libibverbs1",
    ),
    "libibverbs of long ago": (
        [library("libibverbs", lacks=["ibv_a", "ibv_b"])], "rdma-core", FAIL, "lacks ibv_a and 1 more", "release 44",
    ),
    "libibverbs without dmabuf": (
        [library("libibverbs", lacks_optional=["ibv_reg_dmabuf_mr"])], "rdma-core", WARN,
        "lacks ibv_reg_dmabuf_mr: GPU memory needs nvidia-peermem", "release 44",
    ),
    "libibverbs before the guide's": (
        [library("libibverbs", file="/usr/lib/libibverbs.so.1.14.39.0")], "rdma-core", WARN, "1.14.39 is older", "44",
    ),
    "neither DOCA nor OFED": (
        [without(Kind.FILE, "/opt/mellanox/doca/applications/VERSION"), without(Kind.COMMAND, "ofed_info", "-s")],
        "doca-version", SKIP, "neither is installed", "",
    ),
}


def test_ready_machine():
    assert [f.summary for f in found("rdma-core")] == ["libibverbs.so.1.14.50.0", "libmlx5.so.1.25.50.0"]
    assert [f.summary for f in found("doca-version")] == ["DOCA 2.9.0, OFED-internal-24.10-0.7.0"]


@pytest.mark.parametrize("cause", CAUSES)
def test_causes(cause):
    first = of_cause(*CAUSES[cause])[0]
    assert bool(first.cure) == (first.status in (WARN, FAIL))


def test_packages_of_both_families():
    """Those that the set-up guide installs."""
    (check,) = {finding.check for finding in found("doca-version")}
    assert "apt install doca-all doca-sdk-gpunetio libdoca-sdk-gpunetio-dev," in check.cure
    assert "yum install doca-all doca-sdk-gpunetio doca-sdk-gpunetio-devel;" in check.cure


def test_libraries_that_lack_functions(monkeypatch):
    monkeypatch.setenv("GPUNETIO_LIBIBVERBS", "libc.so.6")
    told = LiveHost().ask("verbs_library", "libibverbs").value
    assert "ibv_open_device" in told["lacks"]
    assert "ibv_reg_dmabuf_mr" in told["lacks_optional"]
    monkeypatch.setenv("GPUNETIO_LIBMLX5", "libnone.so.1")
    assert LiveHost().ask("verbs_library", "libmlx5").trouble is Trouble.FAILED
