"""Ranks in processes of their own, as NCCL starts them: each version of the table, with kernels on the host."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpunetio.nccl import plugin
from repository import RIGS, environment

LIMIT = 60
CHILD = sys.executable, str(RIGS / "nccl_child.py")
QP_BYTES = {11: 280, 13: 296, 14: 296}

pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The kernels of gin.cpp for a version's layout of queues, compiled for threads of the host."""
    if shutil.which("g++") is None:
        pytest.skip("the kernels are compiled by g++, which is not installed")
    folder = tmp_path_factory.mktemp("gin")

    def built(version: int) -> Path:
        path = folder / f"gin{QP_BYTES[version]}.so"
        if not path.exists():
            options = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
            layout = f"-DQP_BYTES={QP_BYTES[version]}"
            subprocess.run(["g++", *options, layout, RIGS / "gin/gin.cpp", "-o", path], check=True, timeout=LIMIT)
        return path

    return built


def carry(ranks: Sequence[subprocess.Popen[str]], said: list[list[str]]) -> None:
    """Be NCCL's bootstrap: gather a line of each rank, and give all to each, until one says no more."""
    while True:
        lines = [rank.stdout.readline().strip() for rank in ranks if rank.stdout]
        for mine, line in zip(said, lines):
            mine.append(line)
        if not all(lines):
            return
        for rank in ranks:
            if rank.stdin:
                try:
                    rank.stdin.write(" ".join(lines) + "\n")
                    rank.stdin.flush()
                except BrokenPipeError:
                    return


def run(
    version: int, backend: int, kernels: Path | str, ranks: int = 2, nic: str = ""
) -> list[tuple[int, str, str]]:
    """Status, remaining output and stderr of each rank."""
    env = environment(
        GPUNETIO_NCCL_GPU="host", GPUNETIO_NCCL_TIMEOUT="20", GPUNETIO_QUIET="1", GPUNETIO_NCCL_DEVICE=nic
    )
    started = [
        subprocess.Popen(
            [*CHILD, *map(str, (plugin(), version, backend, rank, ranks, kernels))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(ranks)
    ]
    said: list[list[str]] = [[] for _ in started]
    bootstrap = threading.Thread(target=carry, args=(started, said), daemon=True)
    bootstrap.start()
    try:
        for rank in started:
            rank.wait(LIMIT)
        bootstrap.join(LIMIT)
        return [
            (rank.returncode, f"{mine[-1]}\n{rank.stdout.read()}".strip(), rank.stderr.read())
            for mine, rank in zip(said, started) if rank.stdout and rank.stderr
        ]
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("version, backend", [
    *(pytest.param(version, 1, marks=pytest.mark.slow) for version in (11, 13, 14)), (14, 2),
])
def test_two_ranks(kernels, version, backend):
    """Puts, values, signals and counters, by kernels that know only NCCL's structures."""
    assert run(version, backend, kernels(version)) == [(0, "", "")] * 2


@pytest.mark.parametrize("version, backend", [(13, 1), pytest.param(14, 2, marks=pytest.mark.slow)])
def test_two_ranks_by_our_device_functions(version, backend):
    """The second form of a context also has gets, and signals to words in windows."""
    assert run(version, backend, "python") == [(0, "", "")] * 2


@pytest.mark.slow
def test_three_ranks(kernels):
    assert run(14, 2, kernels(14), ranks=3) == [(0, "", "")] * 3


def test_two_ranks_name_the_same_nic():
    """Both are told, instead of requests that nobody answers."""
    for status, _, err in run(13, 1, "python", nic="soft0"):
        assert status == 1
        assert "ranks 0 and 1 have opened the same NIC in two processes: set GPUNETIO_NCCL_DEVICE to gpu" in err


def test_a_rank_dies():
    """The other one is told at once, by queryLastError and by each call that needs both."""
    (status, out, err), (died, _, _) = run(14, 2, "die")
    assert (status, died) == (0, 9), err
    first, second, lines = out.splitlines()
    assert (first, second) == ("6", "6")  # ncclRemoteError
    assert "rank 1 (127.0.0." in lines
    assert "closed the connection: it died or was killed" in lines or "was lost" in lines


