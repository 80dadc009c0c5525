"""A pytest plugin for programs that use RDMA: software NICs, bad networks, and artefacts of failed tests.

    pytest -p gpunetio.testing.pytest_plugin

or, in the topmost `conftest.py`:

    pytest_plugins = ["gpunetio.testing.pytest_plugin"]

`docs/ci.md` explains the fixtures, markers and options. The compiler is loaded when a test opens its first NIC.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..errors import InvalidValueError
from ..fabric.faults import Faults
from ..providers import watch
from .nics_of_test import Network, NicsOfTest, folder_of, open_nics

if TYPE_CHECKING:
    from ..gpu import Gpu
    from ..verbs import Context
    from ..verbs.qp import ConnectOptions
    from .kernel_pair import KernelPair
    from .rig import Rig, Side

_GPU, _FAULTS, _DEADLINE, _ARTEFACTS = (
    f"--gpunetio-{name}" for name in ("gpu", "faults", "deadline", "artefacts")
)
_TWIN = "twin"
_LONGEST_DEADLINE = 3600.0
_network: pytest.StashKey[Network] = pytest.StashKey()
_nics: pytest.StashKey[NicsOfTest] = pytest.StashKey()


# --- options and markers ---------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("gpunetio", "software NICs (gpunetio)")
    group.addoption(
        _GPU, default="host", metavar="WHICH",
        help="Where the fixture `gpu` runs kernels: host (threads), twin, auto, or a GPU by number or PCI address "
        "(default: host)",
    )
    group.addoption(
        _FAULTS, metavar="NAME=VALUE,…",
        help="Disturb what software NICs send: loss, duplication, reordering, corruption (0 to 1), delay_us, seed. "
        "The marker `faults` of a test goes first",
    )
    group.addoption(
        _DEADLINE, default="10", metavar="SECONDS",
        help="How long the fixtures wait for what must happen (default: 10)",
    )
    group.addoption(
        _ARTEFACTS, metavar="DIR",
        help="Keep captures and a diagnosis of the software NICs of each test that fails, in a folder of DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and check the options."""
    config.addinivalue_line(
        "markers", "faults(text): faults that software NICs of this test inject, as loss=0.01,seed=7; None for none"
    )
    config.addinivalue_line(
        "markers", "deadline(seconds): how long the fixtures of this test wait for what must happen"
    )
    try:
        faults = _parsed(f"{_FAULTS}=", config.getoption(_FAULTS))
        _seconds(f"{_DEADLINE}=", config.getoption(_DEADLINE))
    except InvalidValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_network] = network = Network(faults, twin=config.getoption(_GPU) == _TWIN)
    # For NICs of fixtures that several tests share.
    stack = ExitStack()
    stack.enter_context(watch.watched(NicsOfTest("", network, None)))
    config.add_cleanup(stack.close)


def _parsed(where: str, text: object) -> Faults | None:
    """Return the faults that a marker or option gives."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidValueError(f'{where}{text!r}: give text, such as "loss=0.01,seed=7", or None')
    try:
        return Faults.parse(text)
    except InvalidValueError as error:
        raise InvalidValueError(f"{where}{text}: {error}") from None


def _seconds(where: str, value: object) -> float:
    """Return the deadline that a marker or option gives."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_DEADLINE:
        raise InvalidValueError(f"{where}{value}: give seconds, more than 0 and at most {_LONGEST_DEADLINE:g}")
    return seconds


def _argument(item: pytest.Item, name: str) -> tuple[str, object] | None:
    """Return the only argument of a test's closest marker, and the marker's name in errors; None without a marker."""
    marker = item.get_closest_marker(name)
    if marker is None:
        return None
    if len(marker.args) != 1 or marker.kwargs:
        given = ", ".join([*map(repr, marker.args), *(f"{key}={value!r}" for key, value in marker.kwargs.items())])
        raise InvalidValueError(f"@pytest.mark.{name}({given}): give one argument, as in {_EXAMPLES[name]}")
    return f"@pytest.mark.{name}: ", marker.args[0]


_EXAMPLES = {"faults": '@pytest.mark.faults("loss=0.01,seed=7")', "deadline": "@pytest.mark.deadline(30)"}


def _network_of(item: pytest.Item) -> Network:
    """Return the network of a test: that of its marker, or else that of the options."""
    network = item.config.stash[_network]
    given = _argument(item, "faults")
    return network if given is None else Network(_parsed(*given), forced=True, twin=network.twin)


def _deadline_of(item: pytest.Item) -> float:
    given = _argument(item, "deadline")
    return _seconds(*given) if given else _seconds(f"{_DEADLINE}=", item.config.getoption(_DEADLINE))


# --- each test -------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the markers of a test."""
    network, wrong = Network(), ""
    try:
        network = _network_of(item)
        _deadline_of(item)
    except InvalidValueError as error:
        wrong = str(error)
    if wrong:  # fail here, because pytest also prints the function that raises
        pytest.fail(wrong, pytrace=False)
    directory = item.config.getoption(_ARTEFACTS)
    folder = folder_of(Path(directory).absolute(), item.nodeid) if directory else None
    item.stash[_nics] = NicsOfTest(item.nodeid, network, folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the artefacts of a test that fails, and remove those of any other."""
    report = yield
    nics = item.stash.get(_nics, None)
    if nics is not None:
        if report.failed:
            nics.failed(report.when or "", report.longreprtext)
        if report.when == "teardown":
            nics.ended()
            del item.stash[_nics]
    return report


@pytest.fixture(autouse=True)
def _gpunetio_nics(request: pytest.FixtureRequest) -> Iterator[NicsOfTest]:
    """Apply the network of the test to the software NICs that open while it runs.

    It is the first fixture of a test, so all other fixtures close their NICs before it ends.
    """
    nics = request.node.stash[_nics]
    if nics.network.forced:
        other = [nic for nic in open_nics() if nic.port.config.faults != nics.network.faults]
        if other:
            pytest.fail(
                f"@pytest.mark.faults: {', '.join(nic.name for nic in other)} is open since before this test, with "
                f"faults = {other[0].port.config.faults}: NICs get their faults when they open, so close it first, or "
                f"give {_FAULTS} to all tests",
                pytrace=False,
            )
    with watch.watched(nics), pytest.MonkeyPatch.context() as patch:
        if nics.folder is not None:
            patch.setenv(watch.ARTEFACTS, str(nics.folder))
        yield nics


# --- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def faults(_gpunetio_nics: NicsOfTest) -> Faults | None:
    """The faults that the NICs of this test inject, by the marker `faults` or the option; None on a good network."""
    return _gpunetio_nics.network.faults


@pytest.fixture
def injected(_gpunetio_nics: NicsOfTest) -> Callable[[], dict[str, int]]:
    """A function that returns how many frames NICs have lost, duplicated, reordered, corrupted and passed on so far.

    It counts the frames of NICs in this process since the test began.
    """
    return _gpunetio_nics.injected


@pytest.fixture
def deadline(request: pytest.FixtureRequest) -> float:
    """The most seconds that a wait may take, by the marker `deadline` or the option. Use it for your own waits as well.
    """
    return _deadline_of(request.node)


@pytest.fixture
def connect_options() -> ConnectOptions:
    """The options of `QP.connect` for `rc_pair` and `kernel_pair`. Override it to change timers and retries.

    An `ack_timeout` of 14 is 67 ms (4.096 µs · 2^14).
    """
    return {"ack_timeout": 14}


@pytest.fixture
def rig(deadline: float) -> Iterator[Rig]:
    """Two ends, `rig.near` on soft0 and `rig.far` on soft1, as the conformance kit uses them.

    A NIC opens when it is first asked for. Everything is closed after the test. The waits of `rig`, such as
    `rig.until`, raise `gpunetio.testing.Violation` after the deadline.
    """
    from .rig import Rig

    with Rig(lambda: _open("soft0"), lambda: _open("soft1"), deadline) as opened:
        yield opened


def _open(name: str) -> Context:
    """Open a software NIC whose address differs from those of NICs in other processes."""
    from ..interrupts import uninterrupted
    from ..nic.engine.port import PortConfig
    from ..providers import soft
    from ..verbs import Context

    return uninterrupted(lambda: Context(soft.open_beside_others(name, PortConfig())))  # type: ignore[arg-type]


@pytest.fixture
def nic(rig: Rig) -> Context:
    """A software NIC, soft0. It is closed after the test."""
    return rig.near


@pytest.fixture
def nics(rig: Rig) -> tuple[Context, Context]:
    """Two software NICs, soft0 and soft1, with a wire between them. They are closed after the test."""
    return rig.near, rig.far


@pytest.fixture
def rc_pair(rig: Rig, connect_options: ConnectOptions) -> tuple[Side, Side]:
    """Two connected RC queue pairs, one on each NIC, each with a PD, two CQs and registered memory."""
    return rig.pair(**connect_options)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Gpu]:
    """The place where kernels run: threads of the host, unless the option names a GPU. It closes before the NICs."""
    from ..gpu import Gpu

    with Gpu(str(request.config.getoption(_GPU))) as opened:
        yield opened


@pytest.fixture
def kernel_pair(
    gpu: Gpu, nics: tuple[Context, Context], deadline: float, connect_options: ConnectOptions
) -> Iterator[KernelPair]:
    """Two connected queue pairs that kernels drive, one on each NIC, with registered memory at both ends."""
    from .kernel_pair import open_pair
    from .rig import SIZE

    with ExitStack() as stack:
        yield open_pair(stack, gpu, *nics, SIZE, deadline, connect_options)
