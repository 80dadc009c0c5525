"""The doctor in the guest: what it says of Soft-RoCE is what its recording says."""

from pathlib import Path

import pytest

from gpunetio.doctor import Report, examine, load
from guest import OURS, Guest
from repository import DATA

pytestmark = [
    pytest.mark.interop, pytest.mark.root, pytest.mark.timeout(600),
    pytest.mark.parametrize("guest", [1024], indirect=True, ids=["mtu1024"]),
]

RECORDED = DATA / "doctor" / "machines" / "soft_roce.json"
FILE = "/tmp/doctor.json"
SLOW = 60.0  # seconds for a command there


def test_a_recording_is_what_a_machine_says(guest: Guest, tmp_path: Path) -> None:
    session = guest.session("a")
    command = (*OURS, "-m", "gpunetio", "doctor", "--record", FILE, "--redact")
    there = session.run(*command, timeout=SLOW, status=1)
    (tmp_path / "now.json").write_text(session.run("cat", FILE, timeout=SLOW))
    now, then = examine(load(tmp_path / "now.json")), examine(load(RECORDED))
    assert _told(now) == _told(then)
    assert all(finding.check.id in there for finding in now.findings)


def _told(report: Report) -> list[tuple[str, str, str]]:
    return [(finding.check.id, finding.subject, finding.status) for finding in report.findings]
