"""The doctor is quick because what takes time is asked at once."""

import threading

import pytest

from doctor_rig import READY
from gpunetio.cli.machine import opened
from gpunetio.doctor import ReplayHost, Wanted, examine
from gpunetio.doctor.machine.host import Kind

_DEADLINE = 20.0  # seconds


class Together(ReplayHost):
    """Answers some things only when all of them have been asked, each by a thread of its own."""

    def __init__(self, recorded, *keys):
        super().__init__(recorded)
        self.keys, self.met = keys, threading.Barrier(len(keys))

    def fetch(self, kind, key):
        if (kind, key) in self.keys:
            self.met.wait(_DEADLINE)
        return super().fetch(kind, key)


@pytest.mark.parametrize("wanted", [Wanted(), Wanted("0", "mlx5_0")], ids=str)
@pytest.mark.parametrize(
    "keys",
    [
        (
            (Kind.COMMAND, ("nvidia-smi", "-q")), (Kind.COMMAND, ("nvidia-smi", "topo", "-m")),
            (Kind.QUESTION, ("cuda",)),
        ),
        ((Kind.QUESTION, ("package", "numpy")), (Kind.QUESTION, ("limit", "MEMLOCK"))),  # of several checks
    ],
    ids=lambda keys: keys[-1][1][-1],
)
def test_slow_answers_overlap(keys, wanted):
    host = Together(READY.recorded, *keys)
    assert examine(host, wanted) == examine(READY, wanted)
    assert not host.met.broken


def test_the_command_line_asks_nothing_before():
    assert opened(None, None, Wanted("0", "mlx5_0")).host.readings() == []
