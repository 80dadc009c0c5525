"""Compiled code that comes with a wheel: when it is used, and when everything is compiled for this machine."""

import errno
import importlib
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from llvmlite import binding as llvm

from compiled import fresh, warn_again, watched
from gpunetio.jit import cache, frozen, prebuilt, processor
from repository import ROOT, environment

HERE = prebuilt.here()


def described(**changes: Any) -> str:
    """A description of code for this machine, except for the changes."""
    stamped = replace(HERE, baseline="this machine", compiler=frozen.compiler_stamp())
    return json.dumps(asdict(replace(stamped, **changes)))


@pytest.fixture
def told(caplog, monkeypatch):
    """What the log says of the cache at WARNING."""
    warn_again()
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Compiled code of `double`, which is below this folder, as a wheel has it. The machine's cache is empty."""
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path / "_prebuilt"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "_prebuilt")
    forget()
    with watched() as done:
        assert fresh(tmp_path)(4) == 8
    assert done.compiled == ["double"]
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "_prebuilt" / "target.json").write_text(described())
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for asked in prebuilt.found, prebuilt.usable, prebuilt.tell_why_not:
        asked.cache_clear()


def is_from_the_wheel(package: Path) -> bool:
    """Whether `double` is loaded from there. Otherwise it was compiled, and is in the machine's cache."""
    forget()
    with watched() as done:
        assert fresh(package)(4) == 8
    saved = list((package / "cache").glob("double-*.o"))
    assert len(done.compiled) == len(saved)
    assert len(done.compiled) + done.loaded == 1
    return bool(done.loaded)


def test_the_wheels_code_is_used(package, told, caplog):
    caplog.set_level(logging.DEBUG, "gpunetio.compile")
    assert is_from_the_wheel(package)
    assert told() == []
    assert "the wheel's compiled code is for this machine; it is used" in caplog.messages


@pytest.mark.parametrize(
    ("changes", "why_not", "cure"),
    [
        ({"features": HERE.features + ",+avx1024"}, "this processor lacks avx1024", ""),
        ({"triple": "riscv64-linux"}, f"it was compiled for riscv64-linux, and this is {HERE.triple}", ""),
        ({"versions": HERE.versions | {"Python": "cpython-399"}}, f"this is Python {sys.implementation.cache_tag}", ""),
        ({"versions": HERE.versions | {"llvmlite": "9"}}, "it was compiled with llvmlite 9",
         "(to use it: pip install llvmlite==9)"),
    ],
)
def test_code_that_does_not_fit_is_not_used(package, told, changes, why_not, cure):
    """It is compiled here, which is said once, with the cure if it is another compiler; the doctor says so, too."""
    (package / "_prebuilt" / "target.json").write_text(described(**changes))
    assert not is_from_the_wheel(package)
    (message,) = told()
    assert why_not in message
    assert message.endswith(cure or "it is compiled for this machine, once")
    assert is_not_compiled_again(package)
    assert told() == [message]
    baseline, reported = prebuilt.report()
    assert baseline == "this machine"
    assert why_not in reported


def is_not_compiled_again(package: Path) -> bool:
    """Whether `double` is loaded from the machine's cache."""
    with watched() as done:
        assert fresh(package)(4) == 8
    return done.loaded == 1


FEATURES = st.sets(st.sampled_from(["avx", "avx2", "bmi", "fma", "sse4.2"]))


@given(FEATURES, FEATURES, FEATURES)
@example(set(), set(), set())
@example({"avx"}, set(), {"avx"})
def test_no_code_for_features_that_the_processor_lacks(needed, has, has_not):
    """It would end in SIGILL. Features with a minus are not used by code, and are not there."""
    code = replace(HERE, features=",".join([f"+{one}" for one in needed] + ["-amx-tile"]))
    host = replace(HERE, features=",".join([f"+{one}" for one in has - has_not] + [f"-{one}" for one in has_not]))
    assert (code.why_not(host) == "") is (needed <= has - has_not)


def test_a_function_that_was_edited(package, told):
    """Its code is compiled, and nothing is said: what is not in the wheel is no fault of it."""
    module = package / "plain.py"
    module.write_text(module.read_text().replace("x + x", "x * 2"))
    assert not is_from_the_wheel(package)
    module.write_text(module.read_text().replace("x * 2", "x + x  # edited"))
    for file in (package / "cache").iterdir():
        file.unlink()
    assert is_from_the_wheel(package)
    assert told() == []


def test_a_compiler_that_was_edited(package):
    """Then the names of all files are others."""
    assert prebuilt.report() == ("this machine", "")
    (package / "_prebuilt" / "target.json").write_text(described(compiler="another stamp"))
    forget()
    assert prebuilt.report() == ("this machine", "the package was changed after it was installed")
    (package / "_prebuilt" / "target.json").unlink()
    forget()
    assert prebuilt.report() == ("", "")


def test_this_machines_code_comes_first(package):
    """It may use more features than the wheel's."""
    (package / "_prebuilt" / "target.json").rename(package / "aside.json")
    for file in (package / "_prebuilt").iterdir():
        file.rename(package / file.name)
    assert not is_from_the_wheel(package)
    (package / "aside.json").rename(package / "_prebuilt" / "target.json")
    for file in package.glob("double-*.o"):
        (package / "_prebuilt" / file.name).write_bytes(b"")
    forget()
    assert is_not_compiled_again(package)


def test_warm_compiles_for_this_processor(monkeypatch):
    command = importlib.import_module("gpunetio.cli.warm")
    ignored = []
    monkeypatch.setattr(command, "_warm", lambda: ignored.append(os.environ.get(prebuilt.IGNORED)))
    assert CliRunner().invoke(command.warm).exit_code == 0
    assert ignored == ["1"]
    assert prebuilt.IGNORED not in os.environ


def test_it_can_be_ignored(package):
    with prebuilt.ignored():
        assert not is_from_the_wheel(package)
    for file in (package / "cache").iterdir():
        file.unlink()
    assert is_from_the_wheel(package)


def test_a_damaged_wheel(package, told):
    for file in (package / "_prebuilt").glob("*.o"):
        file.write_bytes(file.read_bytes()[:-1])
    assert not is_from_the_wheel(package)
    (message,) = told()
    assert message.startswith(f"compiled code in {package}/_prebuilt cannot be read")
    assert message.endswith("it is compiled again")
    assert is_not_compiled_again(package)


def test_a_wheel_in_which_others_write(package, told):
    """Its code is not executed."""
    (package / "_prebuilt").chmod(0o777)
    assert not is_from_the_wheel(package)
    (message,) = told()
    assert "can be written by others (mode 777)" in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cpu": "x86-64"}'])
def test_a_damaged_description(package, told, text):
    (package / "_prebuilt" / "target.json").write_text(text)
    assert not is_from_the_wheel(package)
    (message,) = told()
    assert "_prebuilt/target.json cannot be read" in message


def test_no_folder_can_be_written_to(package, told, monkeypatch):
    """What the wheel has needs none."""
    (package / "file").write_text("")
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(package / "file" / "cache"))
    assert is_from_the_wheel(package)
    assert told() == []


def test_descriptors_that_run_out_are_not_the_wheels_fault(package, told, monkeypatch):
    read_kept = cache.read_kept

    def none_left(path, **named):
        if "_prebuilt" in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_kept(path, **named)

    monkeypatch.setattr(cache, "read_kept", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        is_from_the_wheel(package)
    assert told() == []


OTHER_CPU = """
from gpunetio.jit import prebuilt, processor
assert prebuilt.here().key()[1:] == ("generic", "+sse3"), prebuilt.here()
assert (processor.cpu_name(), processor.cpu_features()) == ("generic", "+sse3")
"""


def test_what_this_process_compiles_for():
    """It is this processor, unless the user has chosen another: then code for more is not loaded."""
    if not {processor.CPU_NAME, processor.CPU_FEATURES} & os.environ.keys():
        assert prebuilt.Target(**asdict(HERE)).key() == (
            llvm.get_default_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        )
    chosen = environment(GPUNETIO_CPU_NAME="generic", GPUNETIO_CPU_FEATURES="+sse3")
    done = subprocess.run([sys.executable, "-c", OTHER_CPU], env=chosen, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# --- building it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hatch_build():
    pytest.importorskip("hatchling", reason="needs hatchling (dependency group 'build')")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("asked", "machine", "chosen"),
    [
        ("1", "x86_64", "x86-64-v3"), ("x86-64-v3", "x86_64", "x86-64-v3"), ("x86-64-v2", "x86_64", "x86-64-v2"),
        ("1", "aarch64", "aarch64"), ("aarch64", "aarch64", "aarch64"),
    ],
)
def test_the_baseline_is_chosen(hatch_build, asked, machine, chosen):
    assert hatch_build.chosen(asked, machine) == chosen


@pytest.mark.parametrize(
    ("asked", "machine", "words"),
    [
        ("aarch64", "x86_64", "'aarch64'; on x86_64 it may be 1 or x86-64-v3, x86-64-v2"),
        ("yes", "aarch64", "'yes'; on aarch64 it may be 1 or aarch64"),
        ("1", "riscv64", "no baseline is known for riscv64"),
    ],
)
def test_no_such_baseline(hatch_build, asked, machine, words):
    with pytest.raises(ValueError, match="GPUNETIO_PREBUILT") as raised:
        hatch_build.chosen(asked, machine)
    assert words in str(raised.value)


def test_the_machine_that_builds_must_be_able_to_run_it(hatch_build, monkeypatch, tmp_path):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx": True, "avx2": False})
    with pytest.raises(ValueError, match=r"cannot run code for x86-64-v3: it lacks .*\bavx2\b"):
        hatch_build.compile_for("x86-64-v3", tmp_path, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_the_path_of_the_build_stays_there(hatch_build, monkeypatch, tmp_path):
    """A front end of builds may put the compiler there."""
    ran = []

    def run(command, env, **_):
        ran.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, 0, "{}")

    features = dict.fromkeys(hatch_build.BASELINES["x86-64-v3"].features, True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr(hatch_build.subprocess, "run", run)
    monkeypatch.delenv(hatch_build.GPUS, raising=False)
    (tmp_path / "made").mkdir()
    for before, expected in (("/a:/b", f"{tmp_path}:/a:/b"), ("", f"{tmp_path}")):
        monkeypatch.setenv("PYTHONPATH", before)
        hatch_build.compile_for("x86-64-v3", tmp_path, tmp_path / "made")
        assert set(ran) == {expected}
        ran.clear()


@pytest.mark.parametrize(("asked", "version"), [("", "standard"), ("1", "editable")])
def test_nothing_is_compiled_unasked(hatch_build, monkeypatch, asked, version):
    monkeypatch.setenv("GPUNETIO_PREBUILT", asked)
    monkeypatch.setattr(hatch_build, "compile_for", None)
    data: dict[str, Any] = {"pure_python": True}
    hook = hatch_build.Prebuilt(str(ROOT), {}, None, None, "", "wheel")
    hook.initialize(version, data)
    assert data == {"pure_python": True}


OPEN = """
import gpunetio as gn
from gpunetio.jit import roots

with gn.open("soft0"):
    pass
print("loaded" if roots.stats["loaded"] and not roots.compiled else roots.compiled, gn.__file__)
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wheel_with_compiled_code(hatch_build, tmp_path):
    """It is for this interpreter and architecture. Nothing is compiled, unless the processor lacks something."""
    pytest.importorskip("build", reason="needs build (extra 'dev')")
    if platform.machine() not in {baseline.machine for baseline in hatch_build.BASELINES.values()}:
        pytest.skip(f"no baseline is known for {platform.machine()}")

    def run(*command: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", *command], env=environment(**more), cwd=tmp_path,
            capture_output=True, text=True, timeout=1000,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "build", "--wheel", "--no-isolation", "--outdir", ".", str(ROOT), GPUNETIO_PREBUILT="1")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith(f"-cp3{sys.version_info.minor}-linux_{platform.machine()}")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    sees_wheel = {"PYTHONPATH": os.pathsep.join([str(installed), environment()["PYTHONPATH"]])}

    how, where = run("-c", OPEN, GPUNETIO_CACHE_DIR=str(tmp_path / "empty"), **sees_wheel).split()
    assert Path(where).is_relative_to(installed)
    assert how == "loaded"
    assert not list((tmp_path / "empty").rglob("*.o"))
    if platform.machine() == "x86_64":  # elsewhere, the baseline is what every processor has
        usable = "from gpunetio.jit import prebuilt; print(prebuilt.usable())"
        lesser = {"GPUNETIO_CPU_NAME": "generic", "GPUNETIO_CPU_FEATURES": "+sse4.2,+pclmul"}
        assert run("-c", usable, **sees_wheel, **lesser) == "None\n"
