"""Recordings of real machines: the doctor and the topology say of them what they said there.

To renew what is expected, when checks say something else on purpose:
`gpunetio doctor --replay M.json > M.txt` and `gpunetio topo --replay M.json > M.topo.txt`, in data/doctor/machines.
"""

import pytest
from click.testing import CliRunner

from doctor_rig import DATA
from gpunetio.cli import app
from gpunetio.doctor import examine, load
from gpunetio.doctor.finding import Status

MACHINES = sorted((DATA / "machines").glob("*.json"))


@pytest.mark.parametrize("recording", MACHINES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("command", "suffix"), [("doctor", ".txt"), ("topo", ".topo.txt")])
def test_what_is_said(recording, command, suffix):
    result = CliRunner().invoke(app, [command, "--replay", str(recording)])
    assert result.stdout == recording.with_suffix(suffix).read_text()


@pytest.mark.parametrize("recording", MACHINES, ids=lambda path: path.stem)
def test_all_that_is_asked_was_recorded(recording):
    """A check that asks for more than there was leaves a SKIP here."""
    missing = {
        finding.check.id
        for finding in examine(load(recording)).findings
        if finding.status is Status.SKIP and any("this recording does not have it" in one.value for one in finding.read)
    }
    assert not missing
