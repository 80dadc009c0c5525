"""Compiled code is cached across processes, and never stale."""

import errno
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compiled import PLAIN, fresh, reached, unit_of, warn_again, watched
from gpunetio import device
from gpunetio.jit import cache, progress
from gpunetio.jit.compile import DeviceFunction, engine_function
from gpunetio.jit.values import CompileError
from gpunetio.kept import read_kept, write_kept
from gpunetio.nic.host import engine
from gpunetio.nic.turn import step
from nic_rig import until
from repository import environment

SAY = """
import json
from gpunetio.jit import roots
print(json.dumps([said, roots.compiled]))
"""


def run(folder: Path, program: str, **variables: str) -> list:
    """What a process says that has a cache of its own for all programs of the folder, and what it has compiled.

    It leaves no bytecode: Python would take that for the source's if an edit follows within a second.
    """
    ran = subprocess.run(
        [sys.executable, "-B", "-c", program + SAY], capture_output=True, text=True, timeout=100, check=False,
        cwd=folder, env=environment(GPUNETIO_CACHE_DIR=str(folder / "cache"), **variables),
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


HELPER = """
from gpunetio.device import device_function

@device_function
def answer(x):
    return x + {addend}
"""
MAIN = """
from gpunetio import Gpu, MemType, device, kernel
from helper import answer

@kernel
def ask(out):
    device.st64(out, answer(40) * device.block_dim())
"""
ASK = """
from gpunetio import Gpu, MemType
from main import ask

with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
    assert ask[1, 1, gpu](out).wait(60)
    said = int(out.array.view("i8")[0])
"""


@pytest.mark.slow
def test_editing_a_callee_in_another_file_recompiles_its_callers(tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "helper.py").write_text(HELPER.format(addend=2))
    said, compiled = run(tmp_path, ASK)
    assert (said, compiled[0]) == (42, "ask")  # besides, what handles signals
    assert run(tmp_path, ASK) == [42, []]
    (tmp_path / "helper.py").write_text(HELPER.format(addend=3))
    assert run(tmp_path, ASK) == [43, ["ask"]]


ROOTS = """
from gpunetio.jit.compile import device_function, engine_function

NUMBER = 4

@device_function
def below(x):
    \"\"\"Return it.\"\"\"
    return x + 1

@engine_function
def through(x):
    return below(x)

@engine_function
def first(x):
    return through(x) * 2

def beside(x):
    return x * NUMBER

@engine_function
def second(x):
    return beside(x)

@engine_function
def nobodys(x):
    return x - 1

TABLE = (first, second)
"""
CALL = "import edited\nsaid = [edited.first(1), edited.second(1)]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said", "compiled"),
    [
        ("x + 1", "x + 2", [6, 4], ["first"]),  # two calls below
        ("* 2", "* 3", [6, 4], ["first"]),
        ("x * NUMBER", "x + NUMBER", [4, 5], ["second"]),  # of a plain function
        ("NUMBER = 4", "NUMBER = 5", [4, 5], ["second"]),
        ("x - 1", "x - 2", [4, 4], []),  # of a function that no root reaches
        ("\nNUMBER", "# A comment.\n\n\nNUMBER", [4, 4], ["first", "second"]),  # errors show their lines
        ("Return it.", "Return the next number.", [4, 4], []),
        ("x + 1\n", "x + 1  # and no more\n", [4, 4], []),
        ("def beside(x):", "def beside(x, y=0):", [4, 4], ["second"]),
    ],
)
def test_an_edit_compiles_what_reaches_it(tmp_path, old, new, said, compiled):
    """And nothing else."""
    source = tmp_path / "edited.py"
    source.write_text(ROOTS)
    assert run(tmp_path, CALL) == [[4, 4], ["first", "second"]]
    assert old in ROOTS
    source.write_text(ROOTS.replace(old, new))
    assert run(tmp_path, CALL) == [said, compiled]
    source.write_text(ROOTS)
    assert run(tmp_path, CALL) == [[4, 4], []]  # of each source, the code is kept


RAISES = """
from gpunetio.device import device_function

@device_function
def refuse(x):
    if x > 3:
        raise ValueError("too big")
    return x
"""
REFUSED = """
import moved
try:
    moved.refuse(4)
except ValueError as error:
    said = error.__notes__
"""


def test_an_error_has_the_place_of_this_program(tmp_path):
    """Also where the same function was compiled before for another file, or in another line."""
    for folder, above, line in (("one", "", 7), ("two", "", 7), ("two", "# A comment.\n", 8)):
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / "moved.py"
        file.write_text(above + RAISES)
        said = run(tmp_path, f"import sys\nsys.path.insert(0, {str(file.parent)!r}){REFUSED}")[0]
        assert said == [f"raised by compiled code: refuse, {file}:{line}"]


OURS = """
import os
from gpunetio.device import device_function

NUMBER = int(os.environ["NUMBER"])

@device_function
def plus(x):
    return x + NUMBER
"""
AS_OURS = """
from pathlib import Path
from gpunetio.jit import frozen

frozen.compiler_stamp()
frozen.PACKAGE = Path.cwd()
import ours

assert frozen.is_ours(ours.__file__)
said = ours.plus(1)
"""


@pytest.mark.slow
def test_a_global_of_the_packages_own_that_the_environment_decides(tmp_path):
    """Of these modules, nobody looks whether their globals change, but another process may have others."""
    (tmp_path / "ours.py").write_text(OURS)
    for number, compiled in ((5, ["plus"]), (7, ["plus"]), (5, [])):
        assert run(tmp_path, AS_OURS, NUMBER=str(number)) == [1 + number, compiled]


def test_a_function_without_a_file_cannot_be_compiled():
    scope: dict = {}
    exec("def double(x):\n    return 2 * x\n", scope)
    with pytest.raises(CompileError, match=r"double\(\) has no source: the compiler reads the file in which"):
        device.device_function(scope["double"])(21)


@device.device_function
def add(x, y):
    return x + y


@device.device_function
def use(x):
    return add(x, 1) + add(x, 2) + add(3, x)


def test_constants_do_not_multiply_what_is_compiled():
    assert use(10) == 11 + 12 + 13
    assert reached(use).count(add) == 1
    assert unit_of(use).text().count("define ") == unit_of(add).text().count("define ") + 1


@pytest.mark.parametrize("module", ["nic.host.engine", "nic.turn.step", "device.onesided", "bench.kernels.onesided"])
def test_the_search_finds_all_that_is_compiled(module, monkeypatch):
    """What is found from function to function, by names, and what the compiler has in its unit."""
    from gpunetio.jit import frozen

    home = importlib.import_module(f"gpunetio.{module}")
    compiled = [value for value in vars(home).values() if isinstance(value, DeviceFunction)]
    assert compiled
    searched: set[str] = set()
    take = frozen._Search._take

    def watch(self, function):
        searched.add(f"{function.__module__}.{function.__qualname__}")
        return take(self, function)

    monkeypatch.setattr(frozen._Search, "_take", watch)
    for function in compiled:
        searched.clear()
        frozen.Frozen(function.py_func)
        assert {f"{one.py_func.__module__}.{one.py_func.__qualname__}" for one in reached(function)} <= searched


# --- a cache that is not as it should be -----------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path, caplog, monkeypatch):
    """What the log says of the cache, once for each message. The cache is a folder of this test."""
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path / "cache"))
    warn_again()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "gpunetio.compile"]


def compiles(folder: Path, name: str = "double") -> bool:
    """Whether a function of the folder's module has to be compiled in a new process."""
    with watched() as done:
        assert fresh(folder, name)(4) == (8 if name == "double" else 16)
    assert len(done.compiled) + done.loaded == 1
    return bool(done.compiled)


def kept(folder: Path, name: str = "double") -> Path:
    """The file of a function in the cache."""
    (file,) = (folder / "cache").glob(f"{name}-*")
    return file


def test_what_is_cached_is_loaded(tmp_path, told):
    assert compiles(tmp_path)
    assert not compiles(tmp_path)
    assert kept(tmp_path).suffix == ".o"
    assert told() == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"GPUNETIO_CACHE_DIR": "/given", "XDG_CACHE_HOME": "/xdg"}, "/given"),
        ({"GPUNETIO_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/gpunetio/code"),
        ({"GPUNETIO_CACHE_DIR": "", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/gpunetio/code"),
        ({"GPUNETIO_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/gpunetio/code"),
    ],
)
def test_the_folder(monkeypatch, variables, folder):
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path(folder)


@pytest.mark.parametrize("left", [0, 1, 20, 300, -1])
def test_half_a_file_is_ignored(tmp_path, told, left):
    """It is compiled anew, which is said once, and then the cache is as it should be."""
    compiles(tmp_path)
    cut = kept(tmp_path)
    cut.write_bytes(cut.read_bytes()[:left])
    assert compiles(tmp_path)
    assert not compiles(tmp_path)
    (message,) = told()
    assert f"compiled code in {tmp_path}/cache cannot be read (" in message


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_bytes_that_are_wrong_are_ignored(tmp_path, told, share):
    """In the middle of machine code they would end the process."""
    compiles(tmp_path)
    damaged = kept(tmp_path)
    contents = damaged.read_bytes()
    at = int(share * len(contents))
    damaged.write_bytes(contents[:at] + bytes(byte ^ 0xFF for byte in contents[at : at + 8]) + contents[at + 8 :])
    assert compiles(tmp_path)
    assert not compiles(tmp_path)
    (message,) = told()
    assert "cannot be read (it is damaged: its checksum is wrong): it is compiled again and replaced" in message


def plant(folder: Path) -> None:
    """Replace a file by another one's contents, as somebody would who may write it: checksums are no secret."""
    compiles(folder, "square")
    write_kept(kept(folder), read_kept(kept(folder, "square")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("what", ["owner of the folder", "owner of the file", "mode of the folder", "mode of the file"])
def test_code_of_another_user_is_not_loaded(tmp_path, told, what):
    """It is compiled. A file is replaced; in a folder that is not trusted, nothing is kept."""
    compiles(tmp_path)
    plant(tmp_path)
    path = tmp_path / "cache" if "folder" in what else kept(tmp_path)
    os.chown(path, 65534, 65534) if "owner" in what else path.chmod(0o777)
    assert compiles(tmp_path)
    assert told()
    assert all("belongs to nobody" in said or "can be written by others (mode 777)" in said for said in told())
    assert compiles(tmp_path) is ("folder" in what)
    assert len(told()) == (2 if "folder" in what else 1)


def test_what_the_planted_file_does(tmp_path, told):
    """Where it is trusted, it does what it says, or the test before would show nothing."""
    compiles(tmp_path)
    plant(tmp_path)
    with watched():
        assert fresh(tmp_path)(5) == 25


TOGETHER = """
import sys

import plain
from gpunetio.jit import roots

print("ready", flush=True)
sys.stdin.readline()
plain.double(4)
print(roots.stats["compiled"])
"""


def test_processes_that_start_together_compile_once(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(GPUNETIO_CACHE_DIR=str(tmp_path / "cache")),
        ) for _ in range(3)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    assert sorted(int(child.communicate(timeout=100)[0]) for child in children) == [0, 0, 1]
    assert list((tmp_path / "cache").iterdir()) == [kept(tmp_path)]  # without the lock


def test_a_full_disk_keeps_nothing(tmp_path, told, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "write_kept", full)
    for _ in range(2):
        assert compiles(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    (message,) = told()
    assert f"compiled code cannot be kept in {tmp_path}/cache (No space left on device): every process" in message
    assert message.endswith("free space there, or set GPUNETIO_CACHE_DIR to a folder of yours that only you may write")


def test_a_folder_that_cannot_be_made(tmp_path, told, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert compiles(tmp_path)
    (message,) = told()
    assert message.startswith("compiled code cannot be kept (Not a directory): every process compiles again")


def test_a_user_without_a_home(tmp_path, told, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GPUNETIO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    for _ in range(2):
        assert compiles(tmp_path)
    (message,) = told()
    assert "compiled code cannot be kept (this user has no home folder): every process compiles again" in message


def test_descriptors_that_run_out_are_not_the_caches_fault(tmp_path, told, monkeypatch):
    """Compiling instead would hide the reason."""

    def none_left(*args, **named):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cache, "read_kept", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        compiles(tmp_path)
    assert told() == []


# --- who waits is told -----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "PERIOD", 0.02)
    monkeypatch.delenv("GPUNETIO_QUIET", raising=False)


@pytest.mark.parametrize("quiet", ["", "1"])
def test_compiling_is_told(impatient, monkeypatch, capfd, caplog, quiet):
    """On stderr unless that is not wanted, and in the log at INFO; again until it is over, and no more."""
    monkeypatch.setenv("GPUNETIO_QUIET", quiet)
    caplog.set_level(logging.INFO, "gpunetio.compile")
    with progress.told(add):
        until(lambda: len(caplog.records) >= 2, "two messages")
    line = "compiling add; once for this machine"
    assert {record.getMessage() for record in caplog.records} == {line}
    err = capfd.readouterr().err
    assert ("gpunetio: " + line in err.splitlines()) is (not quiet)
    until(lambda: "gpunetio compiling" not in {thread.name for thread in threading.enumerate()}, "its end")


def test_a_root_is_told_with_its_name(tmp_path, told, monkeypatch):
    """Once for a function and all that it calls."""
    begun = []
    monkeypatch.setattr(progress, "_tell", lambda line, over: begun.append((line, over)))
    double = fresh(tmp_path)

    @engine_function
    def caller(x):
        return double(x) + 1

    assert caller(4) == 9
    ((line, over),) = begun
    assert line == "compiling caller; once for this machine"
    assert over.is_set()


def test_the_nic_is_told_by_name():
    assert progress._name(engine.run) == "the NIC"


def through_a_module(qp):
    device.wait(qp, device.put(qp, 0, 0, 0, 0, 8))


def test_what_a_root_contains():
    """What it names by itself, and what it names as attributes of a module."""
    assert {device.wait, device.put} <= set(reached(engine_function(through_a_module)))


def test_what_the_nic_contains():
    """Each function that the engine calls, once for the types of its arguments, which are integers."""
    parts = reached(engine.run)
    assert {engine.run, step.step} <= set(parts)
    assert len(set(parts)) == len(parts) > 200


def test_roots_of_different_processes_fit(tmp_path):
    """Each contains all that it calls, whatever is in the cache besides."""
    (tmp_path / "shared.py").write_text(
        "from gpunetio.device import device_function\n\n"
        "@device_function\ndef other(x):\n    return x + 2\n\n"
        "@device_function\ndef callee(x):\n    return x + 1\n\n"
        "@device_function\ndef caller(x):\n    return callee(x) * 2\n\n"
        "@device_function\ndef first(x):\n    return caller(x)\n\n"
        "@device_function\ndef second(x):\n    return other(x) + callee(x) + caller(x)\n"
    )
    assert run(tmp_path, "import shared\nsaid = shared.first(1)") == [4, ["first"]]
    assert run(tmp_path, "import shared\nsaid = [shared.second(1), shared.first(1)]") == [[9, 4], ["second"]]
    assert run(tmp_path, "import shared\nsaid = [shared.callee(1), shared.first(1)]") == [[2, 4], ["callee"]]


def test_two_functions_with_one_name(tmp_path, told):
    """Two of one factory: each has a file of its own, by what it closes over."""

    def made(number):
        @engine_function
        def nameless(x):
            return x + number

        return nameless

    with watched() as done:
        assert [made(1)(41), made(2)(41), made(1)(1)] == [42, 43, 2]
    assert done.compiled == ["nameless", "nameless"]
    assert len(list((tmp_path / "cache").glob("nameless-*"))) == 2
