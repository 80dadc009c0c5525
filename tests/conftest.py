"""What all tests share: markers that skip themselves where the machine lacks something, and Hypothesis profiles."""

import ctypes
import gc
import importlib.util
import os
import signal
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import workers
from gpunetio import Gpu, log, verbs
from gpunetio.compiler import little_garbage_collection
from gpunetio.gpu import device
from gpunetio.gpu.twin_backend import TwinBackend
from gpunetio.jit.launch import running
from gpunetio.providers import PortConfig
from nic_rig import Ends, until
from pair import Pair, make_pair
from stand_in import StandIn, building, installed, nics_of_cards

# No deadline: the first example of a test may compile. Fewer and repeatable examples in CI, which has two cores.
settings.register_profile("gpunetio", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "gpunetio-ci", settings.get_profile("gpunetio"), max_examples=25, derandomize=True, database=None, print_blob=True
)
settings.load_profile("gpunetio-ci" if os.environ.get("CI") else "gpunetio")

# A script's background process ignores Ctrl+C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

OPTIONS = {"twin": "--twin", "gpu": "--gpu-engine"}  # by engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stand-in", action="store_true",
        help="open soft0, soft1, … as cards: through libibverbs and libmlx5, for which tests/rigs/stand_in stands in. "
        "GPUNETIO_STAND_IN names its shared object where it cannot be compiled",
    )
    parser.addoption(
        "--twin", action="store_true",
        help="make the host the twin of a GPU: kernels on host threads have memory that the CPU does not reach, and "
        "software NICs make their turns there",
    )
    parser.addoption(
        "--gpu-engine", action="store_true",
        help="have software NICs make their turns on the first GPU; for tests marked gpu",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.count(config.getoption("numprocesses"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        spec.python = workers.python()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with little_garbage_collection():
        return (yield)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Commands that run in this process set the level and the handlers of the log, for good."""
    level, handlers = log.logger.level, list(log.logger.handlers)
    yield
    log.logger.setLevel(level)
    log.logger.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=True)
def engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --twin all tests on the host run on the twin of a GPU; with --gpu-engine, NICs make their turns on a GPU."""
    engine = next((name for name in ("twin", "gpu") if request.config.getoption(OPTIONS[name])), None)
    with pytest.MonkeyPatch.context() as patch:
        if engine == "twin":
            patch.setitem(device.WITHOUT_CUDA, "host", TwinBackend)
        if engine:
            whole = PortConfig.__post_init__

            def there(config: PortConfig) -> None:
                if config.wire_kind.neighbours:
                    object.__setattr__(config, "engine", engine)
                whole(config)

            patch.setattr(PortConfig, "__post_init__", there)
        yield


@pytest.fixture(scope="session", autouse=True)
def cards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With --stand-in all tests see software NICs through the provider of cards."""
    if not request.config.getoption("--stand-in"):
        yield
        return
    path = building.built(tmp_path_factory.mktemp("stand_in"))
    with installed(path, "soft") as opened, nics_of_cards(opened):
        yield
    assert not opened.complaints


def why_no_gpu() -> str | None:
    """Why kernels cannot run on a GPU here, or None when they can."""
    if not all(map(importlib.util.find_spec, ("cuda", "cuda.bindings"))):
        return "cuda.bindings is not installed (extra 'cuda')"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the CUDA driver does not start (cuInit returns {status})"
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value > 0 else "the CUDA driver finds no GPU"


def why_not_root() -> str | None:
    """Why privileged tests cannot run here, or None when they can."""
    return None if os.geteuid() == 0 else "runs as root only"


def why_no_host_memory(config: pytest.Config) -> str | None:
    """Why kernels on the host do not share all memory with the CPU, or None when they do."""
    return next((f"not with {option}" for option in OPTIONS.values() if config.getoption(option)), None)


def why_no_soft_nic(config: pytest.Config) -> str | None:
    """Why tests do not see the software NIC itself, or None when they do."""
    return "not with --stand-in" if config.getoption("--stand-in") else None


def longest_first(items: list[pytest.Item]) -> None:
    """Put the files with the longest timeouts first. At the end, the other processes would wait for them."""
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark and mark.args:
            longest[item.path] = max(longest.get(item.path, 0.0), mark.args[0])
    items.sort(key=lambda item: -longest.get(item.path, 0.0))


@pytest.hookimpl(trylast=True)  # after -m and -k: the driver is asked only for tests that are to run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process that gets files from pytest-xdist
        longest_first(items)
    reasons = (
        ("gpu", why_no_gpu), ("root", why_not_root), ("soft_nic", lambda: why_no_soft_nic(config)),
        ("host_memory", lambda: why_no_host_memory(config)),
    )
    for mark, ask in reasons:
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = ask() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{mark}: {reason}"))


@pytest.fixture(scope="module", autouse=True)
def out_of_the_collectors_way() -> Iterator[None]:
    """Compilers leave a million objects behind, which each test that collects garbage would look through."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_kernel_is_left() -> Iterator[None]:
    """One that is counted for ever keeps NICs awake, and memory, while other files are tested."""
    before = running()
    yield
    until(lambda: running() == before, "the end of all kernels that this file has launched")


@pytest.fixture
def kept_by_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that a test does not name stay until their context closes. Otherwise the next one would close them."""
    monkeypatch.setattr(verbs.Handle, "_kept", True)


@pytest.fixture(scope="session")
def stand_in_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libibverbs and libmlx5, compiled."""
    if reason := building.why_not():
        pytest.skip(reason)
    return building.built(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, stand_in_file: Path) -> Iterator[StandIn]:
    """mlx5_0, mlx5_1, … in front of software NICs; whoever uses them must do nothing that crashes or leaks."""
    if request.config.getoption("--stand-in"):
        pytest.skip("with --stand-in all tests have it, as soft0, soft1, …")
    with installed(stand_in_file) as opened:
        yield opened
    assert not opened.complaints
    assert opened.open_contexts == 0


@pytest.fixture(params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Every test that uses it runs on host threads and, where there is one, on a GPU."""
    with Gpu(request.param) as opened:
        yield opened


@pytest.fixture
def pair(gpu: Gpu) -> Iterator[Pair]:
    """See `Pair`."""
    with verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu)
        yield opened
        opened.a.close()
        opened.b.close()


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two QPs connected by hand, on one NIC and on two."""
    opened = Ends.open(*request.param)
    yield opened
    opened.close()


@pytest.fixture
def port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
