"""The doctor's checks of the operating system and of the process."""

import pytest

from doctor_rig import file, found
from gpunetio.doctor import Status


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("6.2.0", Status.OK), ("6.18.44-fc-v595", Status.OK), ("10.0", Status.OK), ("6.1.0-44-amd64", Status.WARN),
        ("5.15.0-122-generic", Status.WARN), ("", Status.SKIP), ("six", Status.SKIP),
    ],
)  # fmt: skip
def test_kernel(release, status):
    (finding,) = found("kernel", file("/proc/sys/kernel/osrelease", release + "\n"))
    assert finding.status is status
    assert release in finding.summary or status is Status.SKIP
    assert ("nvidia-peermem" in finding.cure) == (status is Status.WARN)
