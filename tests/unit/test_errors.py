"""Errors that are kept and raised often: of a launch, and those that `again` copies."""

import traceback

import pytest

from gpunetio.errors import ConnectionRejectedError, DocaError, DriverError, OperatingSystemError, again
from gpunetio.jit.host_threads import HostLaunch
from gpunetio.verbs import BadWrError, RecvWr
from nic_rig import until

CAUSE = DriverError("why", 3, 4)
KINDS = sorted(
    set(DocaError.__subclasses__()) - {OperatingSystemError, DriverError, ConnectionRejectedError, BadWrError},
    key=lambda kind: kind.__name__,
)
KEPT = [
    *(kind("what happened") for kind in KINDS),
    OperatingSystemError(2, "No such file"),
    CAUSE,
    ConnectionRejectedError("refused", 28, b"no"),
    BadWrError(1, RecvWr(), CAUSE),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: type(kept).__name__)
def test_a_copy_says_the_same(kept):
    kept.__cause__ = CAUSE
    copy = again(kept)
    assert copy is not kept
    assert type(copy) is type(kept)
    assert (str(copy), copy.args, vars(copy), copy.code) == (str(kept), kept.args, vars(kept), kept.code)
    assert copy.__cause__ is CAUSE
    assert getattr(copy, "errno", None) == getattr(kept, "errno", None)
    with pytest.raises(type(kept)):
        raise copy
    assert kept.__traceback__ is None


def test_a_launch_that_failed_is_asked_often():
    def body() -> None:
        raise ValueError("in a thread")

    launch = HostLaunch(body, (), 1, 1)
    until(lambda: launch.ended, "the end of the launch")
    depths = set()
    for _ in range(20):
        with pytest.raises(ValueError, match="in a thread") as caught:
            launch.done  # noqa: B018
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1
