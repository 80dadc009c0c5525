"""Whatever is in files, links, folders, outputs of commands and answers: the doctor tells of it, and never fails."""

import string
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor_rig import READY
from gpunetio.doctor import Machine, ReplayHost, Trouble, Wanted, as_json, examine, lines_of
from gpunetio.doctor.machine.host import Kind, Reading
from gpunetio.doctor.machine.topology import matrix
from gpunetio.doctor.report.text import WIDTH, hanging
from gpunetio.doctor.report.tree import table
from gpunetio.errors import InvalidValueError

# Bytes that no machine has, and such as nearly might be.
NUMBERS = st.sampled_from([b"0", b"-1", b"0x", b"0x10de\n", b"9" * 30, b"1e9", b"4: ACTIVE", b"\n\n"])
BYTES = st.binary(max_size=300) | st.text(string.printable, max_size=200).map(str.encode) | NUMBERS
NAME = st.text(min_size=1, max_size=12) | st.sampled_from(["mlx5_0", "0000:ca:00.0", "..", "1", "ibdev"])
FIELD = st.sampled_from(["devices", "driver_version", "name", "total", "uid", "error"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELD, inner, max_size=4),
    max_leaves=10,
)
VALUES = {
    Kind.FILE: BYTES,
    Kind.COMMAND: BYTES,
    Kind.FOLDER: st.lists(NAME, max_size=4),
    Kind.LINK: st.text(max_size=30) | st.sampled_from(["/", "/sys/devices/pci0000:b0", "/sys/devices/pci/a/b/c"]),
    Kind.QUESTION: JSON,
}


def test_lines_break_between_words_only():
    """An option or a path that is cut at a hyphen is no use to whoever copies it."""
    words = ["start", "the", "container", "with", "--no-cgroups", "and", "--network=host", "or", "with", "--set-ulimit"]
    for width in range(40, 90):
        assert " ".join(hanging("cure: ", " ".join(words), width)).split() == ["cure:", *words]


TROUBLES = [Trouble.NONE] * 12 + list(Trouble)  # mostly there is something to read
READINGS = {kind: st.lists(st.tuples(values, st.sampled_from(TROUBLES)), min_size=1, max_size=4)
            for kind, values in VALUES.items()}


@st.composite
def garbled(draw, host: ReplayHost) -> ReplayHost:
    """A machine of whose readings some, or all, are something else: for each kind one of a few things."""
    share = draw(st.sampled_from([0.02, 0.2, 1.0]))
    garbage = {kind: draw(values) for kind, values in READINGS.items()}
    random = Random(draw(st.integers(0, 2**32)))
    readings = dict(host.recorded)
    for kind, key in sorted(readings):
        if random.random() < share:
            value, trouble = random.choice(garbage[kind])
            readings[kind, key] = Reading(kind, key, None if trouble else value, trouble, "trouble" if trouble else "")
    return ReplayHost(readings)


def told(host: ReplayHost, wanted: Wanted) -> None:
    try:
        report = examine(host, wanted)
    except InvalidValueError:  # what is wanted is not there
        assert wanted != Wanted()
        return
    mistakes = [finding for finding in report.findings if "a bug in this check" in finding.summary]
    assert not mistakes
    assert as_json(report)["findings"]
    for line in lines_of(report, verbose=True):
        assert len(line) <= WIDTH
        assert line.isprintable()


@given(garbled(READY), st.sampled_from([Wanted(), Wanted("0", "mlx5_0", 1024), Wanted("ca:00.0", "ens6f0")]))
def test_garbage(host, wanted):
    told(host, wanted)


@given(garbled(READY))
def test_garbage_of_a_topology(host):
    found = matrix(Machine(host, Wanted()))
    assert len({tuple(row) for row in found.values()}) <= 1  # each GPU beside the same devices
    for line in table(found):
        assert len(line) <= WIDTH
        assert line.isprintable()


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=300)
@given(garbled(READY))
def test_much_garbage(host):
    told(host, Wanted())


def test_nothing_at_all():
    told(ReplayHost({}), Wanted())
