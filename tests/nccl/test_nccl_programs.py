"""The library in programs without Python, and the command that builds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import later
from gpunetio.embed import python
from gpunetio.nccl import plugin
from repository import RIGS, environment
from stand_in.building import compiler

LIMIT = 60
COMMAND = sys.executable, "-m", "gpunetio", "nccl-plugin"
pytestmark = [pytest.mark.soft_nic, pytest.mark.host_memory]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = compiler()
    if cc is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("program") / "program"
    options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-strict-prototypes", "-ldl")
    subprocess.run([cc, RIGS / "gin/program.c", *options, "-o", built], check=True, timeout=LIMIT)
    return built


def run(program: Path, library: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GPUNETIO_NCCL_GPU": "host", "GPUNETIO_QUIET": "1"}
    env.pop("PYTHONPATH", None)  # the library knows where gpunetio is
    return subprocess.run([program, library], capture_output=True, text=True, timeout=LIMIT, env=env, check=False)


def skip_without_shared_library() -> None:
    if python.shared_library() is None:
        pytest.skip("this Python has no shared library")


def test_a_program_without_python(program):
    skip_without_shared_library()
    done = run(program, plugin())
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr
    assert done.stderr.splitlines() == ["GIN/gpunetio: a call before init(), or after an init() that failed"]


LATE = """
import ctypes, sys
table = (ctypes.c_void_p * 17).in_dll(ctypes.CDLL(sys.argv[1]), "ncclGinPlugin_v14")
init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)(table[1])
context = ctypes.c_void_p()
assert init(ctypes.addressof(context), 0, None) == 0
ctypes.CDLL(sys.argv[2]).later(ctypes.c_void_p(table[16]), context)  # finalize
"""


def test_a_call_after_pythons_end(tmp_path):
    """As by a communicator that nobody has destroyed."""
    if compiler() is None:
        pytest.skip("no C compiler")
    command = sys.executable, "-c", LATE, plugin(), later.build(tmp_path)
    env = environment(GPUNETIO_NCCL_GPU="host")
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr  # ncclSystemError
    assert done.stderr == "GIN/gpunetio: a call after the end of Python\n"


@pytest.mark.parametrize("library, why", [
    ("", "the program has no Python, and gpunetio's has no shared library"),
    ("/nowhere/libpython.so", "Python cannot be loaded: /nowhere/libpython.so: cannot open"),
])
def test_no_python_library(program, monkeypatch, tmp_path, library, why):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(python, "shared_library", lambda: library or None)
    done = run(program, plugin())
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first.startswith(f"2 GIN/gpunetio: {why}")
    assert second.endswith(": 2")  # ncclSystemError


def test_a_python_without_gpunetio(program, monkeypatch, tmp_path):
    skip_without_shared_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {**python.description(), "path": "/nowhere"}
    monkeypatch.setattr(python, "description", lambda: found)
    done = run(program, plugin())
    assert "2 GIN/gpunetio: gpunetio cannot be imported: see the traceback on stderr" in done.stdout
    assert "ModuleNotFoundError: No module named 'gpunetio'" in done.stderr


def command(**variables: str) -> subprocess.CompletedProcess[str]:
    env = environment(**variables)
    return subprocess.run(COMMAND, capture_output=True, text=True, timeout=LIMIT, env=env, check=False)


def test_the_command_prints_the_path(tmp_path):
    if compiler() is None:
        pytest.skip("no C compiler")
    done = command(XDG_CACHE_HOME=str(tmp_path))
    path = Path(done.stdout.strip())
    assert (done.returncode, done.stderr, path.name) == (0, "", "libnccl-gin-gpunetio.so")
    assert path.is_file()
    assert path.is_relative_to(tmp_path)


def test_the_command_without_a_compiler(tmp_path):
    done = command(XDG_CACHE_HOME=str(tmp_path), CC="no-such-compiler")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "gpunetio: error: `gpunetio nccl-plugin` compiles a small library once, and there is no C compiler: install one"
    )
    assert done.stderr.count("\n") == 1
