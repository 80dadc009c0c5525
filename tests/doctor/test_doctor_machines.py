"""Recordings of real machines: the doctor and the topology say of them what they said there.

To renew what is expected, when checks say something else on purpose:
`gpunetio doctor --replay M.json > M.txt` and `gpunetio topo --replay M.json > M.topo.txt`, in data/doctor/machines, and
`gpunetio doctor --probe --replay M.json > M.probe.txt` of recordings made with --probe.
"""


import pytest
from click.testing import CliRunner

from doctor_rig import DATA
from gpunetio.cli import app
from gpunetio.doctor import examine, load
from gpunetio.doctor.finding import Status
from repository import ROOT

NEWER = {"compiler-cache"}  # than the recordings; renew them and take it away
MACHINES = sorted((DATA / "machines").glob("*.json"))


PROBED = [path for path in MACHINES if path.with_suffix(".probe.txt").exists()]
COMMANDS = {".txt": ["doctor"], ".topo.txt": ["topo"], ".probe.txt": ["doctor", "--probe"]}
SAID = [(path, suffix) for suffix in COMMANDS for path in (PROBED if "probe" in suffix else MACHINES)]


@pytest.mark.parametrize(("recording", "suffix"), SAID, ids=lambda value: getattr(value, "stem", value))
def test_what_is_said(recording, suffix):
    result = CliRunner().invoke(app, [*COMMANDS[suffix], "--replay", str(recording)])
    assert result.stdout == recording.with_suffix(suffix).read_text()


def test_machines_with_gpus_were_probed():
    assert {path.stem for path in PROBED} >= {"one_h200", "two_h200"}


def test_the_report_in_the_documents():
    """It is that of a recording, word for word."""
    page = (ROOT / "docs/doctor-report.md").read_text()
    for suffix in (".probe.txt", ".topo.txt"):
        assert f"```text\n{(DATA / 'machines/two_h200').with_suffix(suffix).read_text()}```\n" in page


@pytest.mark.parametrize("recording", MACHINES, ids=lambda path: path.stem)
def test_all_that_is_asked_was_recorded(recording):
    """A check that asks for more than there was leaves a SKIP here."""
    missing = {
        finding.check.id
        for finding in examine(load(recording)).findings
        if finding.status is Status.SKIP and any("this recording does not have it" in one.value for one in finding.read)
    }
    assert missing <= NEWER
