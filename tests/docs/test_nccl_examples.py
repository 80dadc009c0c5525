"""Programs on NCCL's device headers: examples/nccl_*.py build them, and run them on GPUs."""

import importlib.metadata
import re
import shutil

import pytest

from example import run

# The oldest NCCL that a program compiles with, and what it says for one rank.
PROGRAMS = {
    "nccl_all_to_all": (
        (2, 28, 7), r"rank 0 of 1, NCCL \d+( with gets)?: 100 rounds of 65536 bytes, [\d.]+ us each, 0 wrong",
    ),
    "nccl_dispatch": ((2, 30, 7), r"rank 0 of 1: 1024 tokens of 7168 bytes by 17 contexts, \d+ us a round, 0 wrong"),
}
PACKAGE = "nvidia-nccl-cu13"
by_program = pytest.mark.parametrize("name", PROGRAMS)


def installed() -> tuple[int, ...] | None:
    """The version of NCCL for pip, which is too large to be installed for every run of the tests."""
    try:
        return tuple(map(int, importlib.metadata.version(PACKAGE).split(".")))
    except importlib.metadata.PackageNotFoundError:
        return None


def skip_without_nccl(name: str) -> None:
    found, least = installed(), PROGRAMS[name][0]
    if found is None or found < least:
        pytest.skip(f"needs {PACKAGE} {'.'.join(map(str, least))} or later")
    if shutil.which("nvcc") is None:
        pytest.skip("no CUDA toolkit")


@by_program
def test_it_is_built(name, tmp_path):
    """With the headers of NCCL itself."""
    skip_without_nccl(name)
    status, _, err = run(name, "--build", str(tmp_path / "program"), "--arch", "sm_90")
    assert status == 0, err
    assert (tmp_path / "program").stat().st_size > 0


@pytest.mark.gpu
@by_program
def test_one_rank(name, monkeypatch):
    skip_without_nccl(name)
    monkeypatch.setenv("GPUNETIO_NCCL_DEVICE", "gpu")
    status, lines, err = run(name, "--ranks", "1")
    assert status == 0, err
    assert re.fullmatch(PROGRAMS[name][1], lines[-1])


@by_program
def test_without_nccl_it_says_so(name, tmp_path):
    if installed() is not None:
        pytest.skip("NCCL is installed")
    status, _, err = run(name, "--build", str(tmp_path / "program"))
    assert (status, err) == (1, "NCCL is not installed: pip install nvidia-nccl-cu13\n")
