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
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import cpu_target

from gpunetio.jit import cache, prebuilt
from gpunetio.jit.stamps import stamp_of
from repository import ROOT, environment

PLAIN = """
from gpunetio.device import device_function

@device_function
def double(x):
    return x + x
"""
HERE = prebuilt.here()


def described(**changes: Any) -> str:
    """A description of code for this machine, except for the changes."""
    stamped = replace(HERE, baseline="this machine", engine=stamp_of(str(prebuilt.ENGINE)))
    return json.dumps(asdict(replace(stamped, **changes)))


@pytest.fixture
def told(caplog, monkeypatch):
    """What the log says of the cache at WARNING."""
    cache._tell.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a module `plain`, and its compiled code as a wheel has it. The machine's cache is empty."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    monkeypatch.setattr(prebuilt, "PACKAGE", tmp_path)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "_prebuilt")
    module = tmp_path / "sub" / "plain.py"
    module.parent.mkdir()
    module.write_text(PLAIN)
    forget()
    assert loaded(tmp_path)(4) == 8
    (module.parent / "__pycache__").rename(tmp_path / "made")
    (tmp_path / "_prebuilt").mkdir()
    (tmp_path / "made").rename(tmp_path / "_prebuilt" / "sub")
    (tmp_path / "_prebuilt" / "target.json").write_text(described())
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for asked in prebuilt.found, prebuilt.usable, prebuilt.tell_why_not:
        asked.cache_clear()


def loaded(package: Path) -> Any:
    """`double`, as a new process has it."""
    spec = importlib.util.spec_from_file_location("plain", package / "sub" / "plain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def is_from_the_wheel(package: Path) -> bool:
    """Whether `double` is loaded from there. Otherwise it was compiled, and is in the machine's cache."""
    forget()
    double = loaded(package)
    assert double(4) == 8
    hits = sum(double.stats.cache_hits.values())
    saved = list((package / "sub" / "__pycache__").glob("plain.double*.nbc"))
    assert bool(saved) is (hits == 0)
    return hits == 1


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
        ({"versions": HERE.versions | {"Numba": "0.1"}}, f"with Numba 0.1, and this is Numba {HERE.versions['Numba']}",
         "(to use it: pip install numba==0.1)"),
        ({"versions": HERE.versions | {"Python": "cpython-399"}}, f"this is Python {sys.implementation.cache_tag}", ""),
        ({"versions": HERE.versions | {"llvmlite": "9"}}, "it was compiled with llvmlite 9",
         "(to use it: pip install llvmlite==9)"),
    ],
)  # fmt: skip
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
    double = loaded(package)
    assert double(4) == 8
    return sum(double.stats.cache_hits.values()) == 1


FEATURES = st.sets(st.sampled_from(["avx", "avx2", "bmi", "fma", "sse4.2"]))


@given(FEATURES, FEATURES, FEATURES)
@example(set(), set(), set())
@example({"avx"}, set(), {"avx"})
def test_no_code_for_features_that_the_processor_lacks(needed, has, has_not):
    """It would end in SIGILL. Features with a minus are not used by code, and are not there."""
    code = replace(HERE, features=",".join([f"+{one}" for one in needed] + ["-amx-tile"]))
    host = replace(HERE, features=",".join([f"+{one}" for one in has - has_not] + [f"-{one}" for one in has_not]))
    assert (code.why_not(host) == "") is (needed <= has - has_not)


def test_sources_that_were_edited(package, told):
    """Their code is compiled; the other is still the wheel's."""
    module = package / "sub" / "plain.py"
    module.write_text(PLAIN + "\n# edited\n")
    assert not is_from_the_wheel(package)
    assert told() == []
    (package / "_prebuilt" / "target.json").write_text(described(engine="another stamp"))
    forget()
    assert prebuilt.report() == ("this machine", "the package was changed after it was installed")
    (package / "_prebuilt" / "target.json").unlink()
    forget()
    assert prebuilt.report() == ("", "")


def test_this_machines_code_comes_first(package):
    """It may use more features than the wheel's."""
    (package / "_prebuilt" / "target.json").rename(package / "aside.json")
    assert not is_from_the_wheel(package)
    (package / "aside.json").rename(package / "_prebuilt" / "target.json")
    for file in (package / "_prebuilt" / "sub").iterdir():
        file.write_bytes(b"")
    forget()
    double = loaded(package)
    assert double(4) == 8
    assert sum(double.stats.cache_hits.values()) == 1


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
    for file in (package / "sub" / "__pycache__").iterdir():
        file.unlink()
    assert is_from_the_wheel(package)


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_a_damaged_wheel(package, told, ending):
    for file in (package / "_prebuilt" / "sub").glob(f"*{ending}"):
        file.write_bytes(file.read_bytes()[:-1])
    assert not is_from_the_wheel(package)
    (message,) = told()
    assert f"the wheel's compiled code in {package}/_prebuilt/sub cannot be read" in message


def test_a_wheel_in_which_others_write(package, told):
    """Its code is not executed."""
    (package / "_prebuilt" / "sub").chmod(0o777)
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
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert is_from_the_wheel(package)
    assert told() == []


def test_descriptors_that_run_out_are_not_the_wheels_fault(package, told, monkeypatch):
    load_index = IndexDataCacheFile._load_index

    def none_left(self):
        if "_prebuilt" in str(self._index_path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return load_index(self)

    double = loaded(package)
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        double(4)
    assert told() == []


OTHER_CPU = """
from numba.core.registry import cpu_target
from gpunetio.jit import prebuilt
assert prebuilt.here().magic_tuple() == cpu_target.target_context.codegen().magic_tuple(), prebuilt.here()
assert prebuilt.here().features == "+sse3"
"""


def test_what_this_process_compiles_for():
    """It is what Numba says, also if the user has chosen a processor: then code for more is not loaded."""
    compiler: Any = cpu_target.target_context
    assert compiler.codegen().magic_tuple() == HERE.magic_tuple()
    chosen = environment(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse3")
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
)  # fmt: skip
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
from gpunetio.nic import engine

with gn.open("soft0"):
    pass
print("compiled" if engine.run.stats.cache_misses else "loaded", gn.__file__)
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
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "build", "--wheel", "--no-isolation", "--outdir", ".", str(ROOT), GPUNETIO_PREBUILT="1")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith(f"-cp3{sys.version_info.minor}-linux_{platform.machine()}")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    sees_wheel = {"PYTHONPATH": os.pathsep.join([str(installed), environment()["PYTHONPATH"]])}

    how, where = run("-c", OPEN, NUMBA_CACHE_DIR="empty", **sees_wheel).split()
    assert Path(where).is_relative_to(installed)
    assert how == "loaded"
    assert not list((tmp_path / "empty").rglob("*.nbc"))
    if platform.machine() == "x86_64":  # elsewhere, the baseline is what every processor has
        usable = "from gpunetio.jit import prebuilt; print(prebuilt.usable())"
        lesser = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse4.2,+pclmul"}
        assert run("-c", usable, **sees_wheel, **lesser) == "None\n"
