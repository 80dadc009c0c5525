"""Compiled code is cached across processes, and never stale."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    stats = ask.body.stats
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


def test_constants_do_not_multiply_compilations():
    from gpunetio.device import device_function

    @device_function
    def add(x, y):
        return x + y

    @device_function
    def use(x):
        return add(x, 1) + add(x, 2) + add(3, x)

    assert use(10) == 11 + 12 + 13
    assert len(add.signatures) == 1


@pytest.mark.parametrize("module", ["nic.engine", "nic.step", "device.onesided", "bench.onesided_kernels"])
def test_the_stamp_covers_the_files_of_all_callees(module):
    """Followed from function to function, which is not how the stamp finds them."""
    import importlib
    import inspect

    from numba.core.dispatcher import Dispatcher

    from gpunetio.device.compile import sources_of

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
    from gpunetio.device import compile as compilation

    paths = sorted(Path(compilation.__file__).parents[1].rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        named = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                named |= {base.with_suffix(".py"), base / "__init__.py", *(base / f"{a.name}.py" for a in node.names)}
        assert set(compilation._read(path)[1]) == {name for name in named if name.is_file()}, path


def test_the_stamp_changes_with_an_imported_file_and_only_then(monkeypatch, tmp_path):
    import shutil

    from gpunetio.device import compile as compilation

    copy = tmp_path / "gpunetio"
    shutil.copytree(Path(compilation.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))

    def stamps():
        compilation._read.cache_clear()
        compilation.sources_of.cache_clear()
        return [compilation.stamp_of.__wrapped__(copy / part) for part in ("nic/engine.py", "device/onesided.py")]

    engine, onesided = stamps()
    changed = copy / "device" / "cq.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamps()[0] == engine
    assert stamps()[1] != onesided
    changed = copy / "formats" / "wqe.py"
    changed.write_text(changed.read_text() + "\n")
    assert stamps()[0] != engine
