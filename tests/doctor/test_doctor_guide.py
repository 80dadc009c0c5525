"""docs/setup.md has the texts of the checks."""

import re
from itertools import pairwise

from doctor_rig import report
from gpunetio.doctor import as_json
from gpunetio.doctor.checks.catalog import all_checks
from gpunetio.doctor.probes.trying import PROBES
from gpunetio.doctor.report.guide import BEGIN, END, checks_as_markdown, renewed
from repository import ROOT

GUIDE = ROOT / "docs" / "setup.md"
CHECKS = (*all_checks(), *PROBES)


def test_the_guide_is_made_from_the_checks():
    text = GUIDE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert renewed(text) == text, "run `make docs`"


def test_its_program_runs():
    programs = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(programs) == 1
    exec(compile(programs[0], str(GUIDE), "exec"), {"__name__": "guide"})


def test_the_names_in_json_are_told():
    told = as_json(report())
    words = set(re.findall(r"`(\w+)`", GUIDE.read_text()))
    assert words >= {*told, *told["findings"][0], *told["findings"][0]["read"][0]} - {"findings"}
    assert words >= {use["answer"] for use in told["ready"].values()}


def test_each_check_has_a_name_of_its_own():
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id) for check in CHECKS)


def test_each_check_says_why_and_what_to_do():
    for check in CHECKS:
        assert check.why.endswith("."), check.id
        assert len(check.cure) > 10, check.id
        assert check.source, check.id
        assert check.uses, check.id
        assert not check.source.endswith("."), check.id


def test_a_reboot_is_told_once():
    assert "reboot. Then reboot" not in checks_as_markdown()
    assert "Resizable BAR (Re-Size BAR Support) on. Then reboot." in checks_as_markdown()


def test_areas_stand_together():
    areas = [check.area for check in CHECKS]
    changes = sum(one != other for one, other in pairwise(areas))
    assert changes == len(set(areas)) - 1


def test_checks_that_the_text_names_are_there():
    """In the table of what is seen and where to look."""
    table = GUIDE.read_text().partition("| symptom | look at |")[2].partition("\n## ")[0]
    rows = [line.rpartition("|")[0].rpartition("|")[2] for line in table.splitlines()[2:] if line]
    named = {word for row in rows for word in re.findall(r"\b[a-z0-9]+(?:-[a-z0-9]+)*\b", re.sub(r"`[^`]*`", "", row))}
    prose = {"then", "at", "both", "ends", "the", "harmless", "with", "lkey"}
    assert rows
    assert named - prose <= {check.id for check in CHECKS}
