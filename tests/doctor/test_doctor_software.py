"""The doctor's checks of Python, packages and what the software NIC takes."""

from __future__ import annotations

import re
import tomllib

import pytest

from doctor_rig import answer, file, folder, found, report, without
from gpunetio.doctor import LiveHost, Status, Trouble, Use
from gpunetio.doctor.checks.software import CUDA_STACK, NEEDED, OLDEST_PYTHON
from gpunetio.doctor.finding import HARDWARE, Readiness
from gpunetio.doctor.machine.host import Kind
from gpunetio.kept import write_kept
from repository import ROOT

OK, WARN, FAIL, SKIP = Status.OK, Status.WARN, Status.FAIL, Status.SKIP
NO_GPU = (folder("/sys/bus/pci/devices"), without(Kind.COMMAND, "nvidia-smi", "-q"))


def python(version: object):
    return answer("system", value={"sysname": "Linux", "python": version})


def package(name: str, version: str):
    return answer("package", name, value=version)


def no_package(name: str):
    return without(Kind.QUESTION, "package", name, trouble=Trouble.FAILED)


def cache(free: int = 1 << 40, damaged: int | None = 0, **wheel: str):
    return answer("compiler_cache", value={"free": free, "damaged": damaged} | wheel)


def no_cache(trouble: Trouble):
    return without(Kind.QUESTION, "compiler_cache", trouble=trouble)


def no_memory(trouble: Trouble):
    return without(Kind.QUESTION, "shared_memory", trouble=trouble)


@pytest.mark.parametrize(
    ("check", "changes", "expected", "words"),
    [
        ("python", [], [OK], "3.12.3"),
        ("python", [python("3.11.0")], [OK], "3.11.0"),
        ("python", [python("3.10.14")], [FAIL], "python3.11 -m venv"),
        ("python", [python(None)], [SKIP], "unknown"),
        ("python", [answer("system", value=[1])], [SKIP], "unknown"),
        ("packages", [], [OK, OK], "numpy 2.4.6"),
        ("packages", [no_package("llvmlite")], [OK, FAIL], "pip install"),
        ("packages", [no_package("numpy")], [FAIL, OK], "numpy is not installed"),
        ("packages", [package("numpy", "1.25.2")], [WARN, OK], "≥ 1.26"),
        ("packages", [package("numpy", "2.5.0")], [OK, OK], "2.5.0"),
        ("packages", [package("numpy", "1.26.0")], [OK, OK], "1.26.0"),
        ("packages", [package("llvmlite", "0.44.1")], [OK, WARN], "≥ 0.45"),
        ("packages", [package("llvmlite", "main")], [OK, SKIP], "cannot find out"),
        ("cuda-stack", [], [OK], "cuda-bindings 13.5.0"),
        ("cuda-stack", NO_GPU, [SKIP], "no GPU"),
        ("cuda-stack", [no_package("cuda-bindings")], [FAIL, WARN], "not installed: cuda-bindings; "),
        ("cuda-stack", [no_package("cuda-bindings")], [FAIL, WARN], "pip install 'gpunetio[cuda]'"),
        ("cuda-stack", [package("cuda-bindings", "12.9.1")], [WARN], "cuda-bindings ≥ 13.0, < 14.0"),
        ("cuda-stack", [answer("package", "cuda-bindings", value=7)], [SKIP], "cannot find out"),
        ("compiler-cache", [], [OK], "cached"),
        ("compiler-cache", [cache(free=50 << 20)], [WARN], "50 MiB are free for compiled code"),
        ("compiler-cache", [cache(free=50 << 20)], [WARN], "GPUNETIO_CACHE_DIR"),
        ("compiler-cache", [cache(damaged=3)], [WARN], "3 files of compiled code are damaged"),
        ("compiler-cache", [cache(damaged=3)], [WARN], "-delete"),
        ("compiler-cache", [cache(baseline="", why_not="")], [OK], "cached"),
        ("compiler-cache", [cache(baseline="x86-64-v3", why_not="")], [OK], "the wheel has some for x86-64-v3"),
        ("compiler-cache", [cache(baseline="x86-64-v3", why_not="it is late")], [WARN], "is not used: it is late"),
        ("compiler-cache", [cache(baseline="x86-64-v3", why_not="it is late")], [WARN], "gpunetio warm"),
        ("compiler-cache", [cache(damaged=None)], [SKIP], "cannot find out"),
        ("compiler-cache", [no_cache(Trouble.DENIED)], [WARN], "every process compiles again"),
        ("compiler-cache", [no_cache(Trouble.FAILED)], [SKIP], "cannot find out"),
        ("processors", [answer("processors", value=1)], [WARN], "taskset"),
        ("processors", [answer("processors", value=2)], [OK], "2 processors"),
        ("processors", [answer("processors", value="two")], [SKIP], "unknown"),
        ("soft-nic", [], [OK], "share"),
        ("soft-nic", [no_memory(Trouble.DENIED)], [FAIL], "seccomp"),
        ("soft-nic", [no_memory(Trouble.FAILED)], [FAIL], "memfd_create"),
        ("soft-nic", [no_memory(Trouble.UNRECORDED)], [SKIP], "cannot find out"),
        ("soft-nic", [answer("system", value={"sysname": "Darwin"})], [FAIL], "Linux"),
        ("loopback", [], [OK], "up"),
        ("loopback", [file("/sys/class/net/lo/flags", "0x8\n")], [WARN], "sudo ip link set lo up"),
        ("loopback", [file("/sys/class/net/lo/flags", "up\n")], [SKIP], "cannot find out"),
    ],
)
def test_causes(check, changes, expected, words):
    findings = found(check, *changes)
    assert [finding.status for finding in findings] == expected
    assert any(words in f"{f.summary} {f.cure}" for f in findings)
    assert all(bool(f.cure) is (f.status in (WARN, FAIL)) and len(f.summary) < 80 for f in findings)


@pytest.mark.parametrize(
    ("change", "readiness"),
    [
        (no_package("llvmlite"), Readiness.NOT_READY),
        (package("numpy", "2.5.0"), Readiness.READY),
        (no_memory(Trouble.DENIED), Readiness.NOT_READY),
        (no_memory(Trouble.UNRECORDED), Readiness.UNKNOWN),
        (file("/sys/class/net/lo/flags", "0x8\n"), Readiness.READY),
    ],
)
def test_ready_for_the_software_nic(change, readiness):
    assert report(change).ready(Use.SOFTWARE).readiness is readiness


@pytest.mark.parametrize("name", CUDA_STACK)
def test_without_a_package_kernels_do_not_reach_the_gpu(name):
    told = report(no_package(name))
    assert {use for use in Use if told.ready(use).readiness is not Readiness.READY} == HARDWARE
    assert told.ready(Use.VERBS).why == "cuda-stack"


def test_versions_are_those_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    bounds = {}
    for one in asked:
        name, requirement = re.match(r"([a-z-]+)(?:\[.*?])?([^;]*)", one).groups()
        bounds[name] = dict(re.findall(r"(>=|<|==)([\d.]+)", requirement))
    for name, (least, below) in (NEEDED | CUDA_STACK).items():
        exact = bounds[name].get("==")
        lower, upper = bounds[name].get(">=", exact), bounds[name].get("<")
        assert _two(lower) == least
        assert below == (_two(upper) if upper else (least[0], least[1] + 1) if exact else None)
    assert project["requires-python"] == ">={}.{}".format(*OLDEST_PYTHON)


def _two(text):
    major, minor, *_ = (*map(int, text.split(".")), 0)
    return major, minor


def test_this_machine_runs_the_software_nic():
    """So these checks must say so."""
    host = LiveHost()
    assert host.ask("shared_memory").value is True
    near = host.ask("affinity").value
    assert len(near) == host.ask("processors").value > 0
    assert near == sorted(set(near))


def test_damaged_files_are_counted(tmp_path, monkeypatch):
    """In the folder of compiled code, whether it is there yet or not."""
    folder = tmp_path / "not" / "yet"
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(folder))
    assert LiveHost().ask("compiler_cache").value["damaged"] == 0
    assert not folder.exists()
    folder.mkdir(parents=True)
    write_kept(folder / "whole-1.o", b"it")
    whole = (folder / "whole-1.o").read_bytes()
    for name, contents in (
        ("cut-1.o", whole[:-1]), ("overwritten-1.sm_90.cubin", b"at" + whole[2:]), ("step-2.sm_90.ptx", b""),
        ("notes.txt", b""), (".whole-2.o.lock", b""), ("whole-2.o", whole),
    ):
        (folder / name).write_bytes(contents)
    found = LiveHost().ask("compiler_cache").value
    assert found["damaged"] == 3
    assert found["free"] > 0


def no_home(folder, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GPUNETIO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)


def a_file(folder, monkeypatch):
    folder.write_text("")


def anybodys(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (no_home, "this user has no home folder, and GPUNETIO_CACHE_DIR names no other"),
        (a_file, "the folder of compiled code cannot be written to"),
        (anybodys, "others can write to the folder of compiled code, or to one above it"),
    ],
)
def test_no_folder_for_compiled_code(tmp_path, monkeypatch, how, said):
    """The path, which is private, is not in the answer."""
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path / "code"))
    how(tmp_path / "code", monkeypatch)
    reading = LiveHost().ask("compiler_cache")
    assert (reading.trouble, reading.error) == (Trouble.DENIED, said)
