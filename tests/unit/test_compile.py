"""Compiled code is cached across processes, and never stale."""

import ast
import contextlib
import errno
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import pytest

from gpunetio import device
from gpunetio.jit import cache, progress, units
from gpunetio.jit.compile import engine_function
from gpunetio.kept import write_kept
from gpunetio.nic import engine, step
from nic_rig import until

HELPER = """
from gpunetio.device import device_function

@device_function
def answer(x):
    return x + {addend}
"""
MAIN = """
import json
import sys
sys.path.insert(0, {folder!r})
from gpunetio import Gpu, MemType, device, kernel
from helper import answer

@kernel
def ask(out):
    device.st64(out, answer(40) * device.block_dim())

with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
    assert ask[1, 1, gpu](out).wait(60)
    stats = ask.code["cpu"].body.stats
    print(json.dumps([int(out.array.view("i8")[0]), sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


def run(folder: Path) -> list[int]:
    ran = subprocess.run(
        [sys.executable, folder / "main.py"], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_editing_a_callee_in_another_file_recompiles_its_callers(tmp_path):
    (tmp_path / "main.py").write_text(MAIN.format(folder=str(tmp_path)))
    (tmp_path / "helper.py").write_text(HELPER.format(addend=2))
    assert run(tmp_path) == [42, 0, 1]
    assert run(tmp_path) == [42, 1, 0]
    (tmp_path / "helper.py").write_text(HELPER.format(addend=3))
    assert run(tmp_path) == [43, 0, 1]


def test_a_function_without_a_file_is_compiled_and_not_cached():
    from gpunetio.device import device_function

    scope: dict = {}
    exec("def double(x):\n    return 2 * x\n", scope)
    assert device_function(scope["double"])(21) == 42


def test_constants_do_not_multiply_stampings():
    from gpunetio.device import device_function

    @device_function
    def add(x, y):
        return x + y

    @device_function
    def use(x):
        return add(x, 1) + add(x, 2) + add(3, x)

    assert use(10) == 11 + 12 + 13
    assert len(add.units.parts) == 1


@pytest.mark.parametrize("module", ["nic.engine", "nic.step", "device.onesided", "bench.kernels.onesided"])
def test_the_stamp_covers_the_files_of_all_callees(module):
    """Followed from function to function, which is not how the stamp finds them."""
    import importlib
    import inspect

    from numba.core.dispatcher import Dispatcher

    from gpunetio.jit.stamps import sources_of

    home = importlib.import_module(f"gpunetio.{module}")
    covered = set(sources_of(Path(home.__file__)))
    todo = [value.py_func for value in vars(home).values() if isinstance(value, Dispatcher)]
    seen, files = set(), set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        files.add(Path(inspect.getfile(function)))
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        todo += [callee.py_func for callee in named if isinstance(callee, Dispatcher)]
    assert len(files) > 1
    assert files <= covered


def test_imports_are_those_that_the_parser_finds():
    from gpunetio.jit import stamps as stamping

    paths = sorted(Path(stamping.__file__).parents[1].rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        named = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                named |= {base.with_suffix(".py"), base / "__init__.py", *(base / f"{a.name}.py" for a in node.names)}
        assert {*map(Path, stamping._read(str(path))[1])} == {name for name in named if name.is_file()}, path


def test_the_stamp_changes_with_an_imported_file_and_only_then(monkeypatch, tmp_path):
    import shutil

    from gpunetio.jit import stamps as stamping

    copy = tmp_path / "gpunetio"
    shutil.copytree(Path(stamping.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))

    def stamps():
        stamping._read.cache_clear()
        stamping._sources_of.cache_clear()
        return [stamping.stamp_of.__wrapped__(str(copy / part)) for part in ("nic/engine.py", "device/onesided.py")]

    engine, onesided = stamps()
    changed = copy / "device" / "cq.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamps()[0] == engine
    assert stamps()[1] != onesided
    changed = copy / "formats" / "wqe.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamps()[0] != engine


# --- a cache that is not as it should be -----------------------------------------------------------------------------

PLAIN = """
from gpunetio.device import device_function

@device_function
def double(x):
    return x + x
"""


@pytest.fixture
def told(caplog, monkeypatch):
    """What the log says of the cache, once for each message. The cache is beside the source."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    cache._tell.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "gpunetio.compile"]


def fresh(folder: Path) -> Any:
    """`double` of a module in the folder, as a new process has it."""
    file = folder / "plain.py"
    file.write_text(PLAIN)
    spec = importlib.util.spec_from_file_location("plain", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def files(folder: Path) -> list[Path]:
    return sorted((folder / "__pycache__").glob("plain.double*.nb[ic]"))


def test_what_is_cached_is_loaded(tmp_path, told):
    assert fresh(tmp_path)(4) == 8
    again = fresh(tmp_path)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    assert told() == []


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_half_a_file_is_ignored(tmp_path, told, ending, left):
    """It is compiled anew, which is said once, and then the cache is as it should be."""
    fresh(tmp_path)(4)
    (cut,) = (file for file in files(tmp_path) if file.suffix == ending)
    cut.write_bytes(cut.read_bytes()[:left])
    for hits in (0, 1):
        double = fresh(tmp_path)
        assert double(4) == 8
        assert sum(double.stats.cache_hits.values()) == hits
    (message,) = told()
    assert f"compiled code in {tmp_path}/__pycache__ cannot be read (" in message


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_bytes_that_are_wrong_are_ignored(tmp_path, told, ending, share):
    """In the middle of machine code they would end the process."""
    fresh(tmp_path)(4)
    (damaged,) = (file for file in files(tmp_path) if file.suffix == ending)
    contents = damaged.read_bytes()
    at = int(share * len(contents))
    damaged.write_bytes(contents[:at] + bytes(byte ^ 0xFF for byte in contents[at : at + 8]) + contents[at + 8 :])
    for hits in (0, 1):
        double = fresh(tmp_path)
        assert double(4) == 8
        assert sum(double.stats.cache_hits.values()) == hits
    (message,) = told()
    assert "cannot be read (it is damaged: its checksum is wrong): it is compiled again and replaced" in message


def test_code_of_an_older_source_is_never_loaded(tmp_path, monkeypatch):
    """Another process may look, or this one may be killed, between any two files that are written."""

    def kept(stamp):
        return cache._File(tmp_path, "plain.double", stamp, str(tmp_path / "plain.py"))

    kept("old").save("key", "old code")
    newer, seen = kept("new"), []
    write = newer._open_for_write

    @contextlib.contextmanager
    def written(path):
        with write(path) as file:
            yield file
        seen.append(kept("new").load("key"))

    monkeypatch.setattr(newer, "_open_for_write", written)
    for code in ("new code", "newer code"):
        newer.save("key", code)
    assert seen == [None, "new code", "new code", "newer code"]
    assert len([*tmp_path.glob("*.nbc")]) == 1


class Planted:
    """An object whose pickle makes a file."""

    def __init__(self, made: Path):
        self._made = made

    def __reduce__(self):
        return Path.touch, (self._made,)


def plant(folder: Path, made: Path) -> None:
    """Replace an index, as somebody would who may write it: checksums are no secret."""
    (index,) = (file for file in files(folder) if file.suffix == ".nbi")
    write_kept(index, pickle.dumps(Planted(made)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("what", ["owner of the folder", "owner of the file", "mode of the folder", "mode of the file"])
def test_code_of_another_user_is_not_loaded(tmp_path, told, monkeypatch, what):
    """It is compiled; where the folder is not trusted, it is kept in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    fresh(source)(4)
    plant(source, tmp_path / "made")
    folder, (index,) = source / "__pycache__", (file for file in files(source) if file.suffix == ".nbi")
    path = folder if "folder" in what else index
    os.chown(path, 65534, 65534) if "owner" in what else path.chmod(0o777)
    assert fresh(source)(4) == 8
    assert not (tmp_path / "made").exists()
    assert told()
    assert all("belongs to nobody" in said or "can be written by others (mode 777)" in said for said in told())
    again = fresh(source)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1


def test_what_the_planted_index_does(tmp_path, told):
    """Where it is trusted, it does what it says, or the test before would show nothing."""
    fresh(tmp_path)(4)
    plant(tmp_path, tmp_path / "made")
    fresh(tmp_path)(4)
    assert (tmp_path / "made").exists()


def test_code_beside_a_source_of_another_user(tmp_path, told):
    """Who runs a program trusts its owner anyway, as root does with a checkout that a container shares."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    fresh(tmp_path)(4)
    for path in (tmp_path, tmp_path / "__pycache__", *files(tmp_path)):
        os.chown(path, 65534, 65534)
    again = fresh(tmp_path)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    assert told() == []


TOGETHER = """
import sys

import plain

print("ready", flush=True)
sys.stdin.readline()
plain.double(4)
print(sum(plain.double.stats.cache_misses.values()))
"""


def test_processes_that_start_together_compile_once(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"NUMBA_CACHE_DIR": ""},
        ) for _ in range(3)
    ]  # fmt: skip
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert sorted(int(child.communicate(timeout=100)[0]) for child in children) == [0, 0, 1]
    assert [file.suffix for file in sorted((tmp_path / "__pycache__").glob(".*"))] == []  # the lock


def test_a_full_disk_keeps_nothing(tmp_path, told, monkeypatch):
    """Nor may an index name a file that was not written: an older one in its place would be run."""

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    for _ in range(2):
        assert fresh(tmp_path)(4) == 8
    assert files(tmp_path) == []
    (message,) = told()
    assert f"compiled code cannot be saved in {tmp_path}/__pycache__ (No space left on device): every" in message
    assert message.endswith("free space there, or set NUMBA_CACHE_DIR to a folder that you can write to")


def test_no_folder_to_keep_code_in(tmp_path, told, monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    for _ in range(2):
        assert fresh(tmp_path)(4) == 8
    (message,) = told()
    assert f"compiled code of {tmp_path} cannot be saved: neither a folder there nor the user's cache can be" in message


def test_descriptors_that_run_out_are_not_the_caches_fault(tmp_path, told, monkeypatch):
    """Compiling instead, for minutes, would hide the reason."""

    def none_left(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    double = fresh(tmp_path)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._load_index", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        double(4)
    assert told() == []


# --- who waits is told -----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "PERIOD", 0.02)
    monkeypatch.delenv("GPUNETIO_QUIET", raising=False)


@pytest.mark.parametrize("quiet", ["", "1"])
def test_compiling_is_told(tmp_path, impatient, monkeypatch, capfd, caplog, quiet):
    """On stderr unless that is not wanted, and in the log at INFO."""
    monkeypatch.setenv("GPUNETIO_QUIET", quiet)
    double = fresh(tmp_path)
    caplog.set_level(logging.INFO, "gpunetio.compile")
    over = threading.Event()
    thread = threading.Thread(target=progress._tell, args=(double, over))
    thread.start()
    until(lambda: len(caplog.records) >= 2, "two messages")
    over.set()
    thread.join()
    line = "compiling double, 0 of 1 functions; once for this machine"
    assert {record.getMessage() for record in caplog.records} == {line}
    err = capfd.readouterr().err
    assert ("gpunetio: " + line in err.splitlines()) is (not quiet)


def test_the_outermost_stamping_is_told(tmp_path, impatient, monkeypatch):
    """Once for a function and all that it calls; functions of others are none of our business."""
    begun = []
    monkeypatch.setattr(progress, "_tell", lambda root, over: begun.append((root.py_func.__name__, over)))
    double = fresh(tmp_path)

    @engine_function
    def caller(x):
        return double(x) + 1

    @numba.njit
    def foreign(x):
        return x - 1

    assert caller(4) == 9
    assert foreign(4) == 3
    ((name, over),) = begun
    assert name == "caller"
    assert over.is_set()


def through_a_module(qp):
    device.wait(qp, device.put(qp, 0, 0, 0, 0, 8))


def test_parts_of_a_kernel():
    """What it names by itself, and what it names as attributes of a module."""
    parts = list(progress.parts_of(engine_function(through_a_module)))
    assert {device.wait, device.put} <= set(parts)


def test_parts_of_the_nic():
    """What the total is counted from: each function that the engine calls, once."""
    parts = list(progress.parts_of(engine.run))
    assert parts[0] is engine.run
    assert step.step in parts
    assert len(set(parts)) == len(parts) > 200



def test_what_one_caller_does_not_need_another_may():
    """A linker that leaves out what nobody has asked for yet would leave the later call without a target."""

    @engine_function
    def asked(x):
        return x + 1

    @engine_function
    def asks_in_vain(x):
        return asked(x) if x != x else 0  # LLVM removes the call

    @engine_function
    def asks(x):
        return asked(x)

    @engine_function
    def asks_through_another(x):
        return asks(x)

    @engine_function
    def root(x):
        return asks_through_another(x) + asks_in_vain(x)

    assert root(41) == 42


def test_a_function_is_lowered_once_for_all_roots(monkeypatch):
    lowered = []
    compile_core = units.UnitCompiler._compile_core

    def watched(self, args, return_type, part=False):
        lowered.append(self.py_func.__name__)
        return compile_core(self, args, return_type, part)

    monkeypatch.setattr(units.UnitCompiler, "_compile_core", watched)

    @engine_function
    def shared(x):
        return x + 1

    @engine_function
    def first(x):
        return shared(x)

    @engine_function
    def second(x):
        return shared(x) + 1

    assert (first(41), second(41)) == (42, 43)
    assert sorted(lowered) == ["first", "second", "shared"]


def test_parts_of_different_processes_fit(tmp_path):
    """A caller from the cache calls a callee that another process has compiled, after other functions."""
    (tmp_path / "shared.py").write_text(
        "from gpunetio.device import device_function\n\n"
        "@device_function\ndef other(x):\n    return x + 2\n\n"
        "@device_function\ndef another(x):\n    return x + 3\n\n"
        "@device_function\ndef callee(x):\n    return x + 1\n\n"
        "@device_function\ndef caller(x):\n    return callee(x) * 2\n\n"
        "@device_function\ndef first(x):\n    return caller(x)\n\n"
        "@device_function\ndef second(x):\n    return other(x) + another(x) + callee(x) + caller(x)\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(call: str) -> str:
        code = f"import shared; print(shared.{call})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("first(1)") == "4"
    saved = list((tmp_path / "cache").rglob("shared.callee-*"))
    assert saved
    for file in saved:
        file.unlink()
    assert run("second(1)") == "13"


def test_a_function_without_a_name_is_no_part_of_the_cache():
    """Another process could not find it: two of one factory have one name."""

    @engine_function
    def nameless(x):
        return x + 1

    @engine_function
    def root(x):
        return nameless(x)

    assert root(41) == 42
    folder = Path(nameless._cache.cache_path)
    assert not list(folder.glob("*nameless-*"))
