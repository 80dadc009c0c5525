"""Compiled code has the values of now: none of an earlier process, and none that has changed since.

Each kernel of `frozen_kernels` writes one number that it does not have from an argument, so the right value is known.
"""

import json
import linecache
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import frozen_helpers
import frozen_kernels
from compiled import watched
from gpunetio import Gpu, MemType, device, kernel
from gpunetio.jit import cache, roots
from gpunetio.jit.cubin import digest_of, ptx_of
from gpunetio.jit.frozen import Frozen
from gpunetio.jit.kinds import INT
from gpunetio.jit.values import CompileError
from repository import RIGS, environment

LIVE = [0]  # an object that only this process has


def printed(number: int, folder: Path) -> dict[str, int]:
    ran = subprocess.run(
        [sys.executable, RIGS / "frozen_kernels.py"], capture_output=True, text=True, timeout=100, check=False,
        env=environment(NUMBER=str(number), GPUNETIO_CACHE_DIR=str(folder)),
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_process_has_other_values(tmp_path):
    """The files are the same; only the environment differs. The last process finds all of its code in the cache."""
    for number in (5, 6, 7, 5):
        found = printed(number, tmp_path)
        switch = {"a_switch": 7 if number > 6 else 5}
        assert found == dict.fromkeys(found, number) | switch


@pytest.mark.timeout(300)
def test_a_change_in_a_process():
    for number in (5, 7, 5):
        frozen_kernels.change(number)
        found = frozen_kernels.written()
        assert len(found) > 15
        assert found == dict.fromkeys(found, number)


def test_what_does_not_change_is_compiled_once():
    frozen_kernels.change(7)
    frozen_kernels.written(["a_global_of_a_helper"])
    before = dict(roots.stats)
    frozen_helpers.NUMBER = int("7")
    frozen_kernels.written(["a_global_of_a_helper"])
    assert roots.stats == before  # neither compiled nor loaded


def cell(scope, number, text):
    """Run a cell of a notebook, whose text is where Python finds that of files."""
    name = f"<cell {number}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), scope)


def test_a_helper_that_is_defined_again():
    """As in a notebook whose cell is run again."""
    scope = {"device": device, "kernel": kernel}
    cell(scope, 1, "@device.device_function\ndef helper(x):\n    return x + 5")
    cell(scope, 2, "@kernel\ndef ask(out):\n    device.st64(out, helper(0) + plain(0))")
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        for number in (5, 7):
            cell(scope, 2 * number, f"@device.device_function\ndef helper(x):\n    return x + {number}")
            cell(scope, 2 * number + 1, f"def plain(x):\n    return x + {number}")
            assert scope["ask"][1, 1, gpu](out).wait(60)
            assert out.array.view("i8")[0] == 2 * number


def test_a_plain_helper_whose_global_changes():
    """Nobody has decorated it, and what it calls; it is compiled with its callers."""
    names = ["a_global_of_a_plain_helper", "a_plain_helper_of_a_module"]
    for number in (5, 7, 5):
        frozen_kernels.change(number)
        assert frozen_kernels.written(names) == dict.fromkeys(names, number)


def test_code_for_cuda_changes_too():
    """PTX of a kernel that stores a global of its helper, and what a launch would look for."""
    launched = frozen_kernels.a_global_of_a_helper.py_func
    seen = []
    for number in (50005, 70007, 50005):
        frozen_helpers.change(number)
        seen.append(digest_of(launched))
        text, _ = ptx_of(launched, (INT,), (9, 0))
        assert str(number) in text
        assert str(120012 - number) not in text
    assert seen[0] == seen[2] != seen[1]


def test_an_object_is_what_code_reads_of_it():
    """Not its address, which would be another object's in another process."""
    things = [SimpleNamespace(read=1, other=2), SimpleNamespace(read=1, other=3), SimpleNamespace(read=2, other=2)]

    def digest(thing):
        def reads():
            return thing.read

        return Frozen(reads).digest

    same, equal, different = map(digest, things)
    assert same == equal != different


def test_what_is_known_by_its_address_only_cannot_be_compiled():
    @device.device_function
    def item():
        return LIVE[0]

    with pytest.raises(CompileError, match=r"LIVE|list"):
        item()


def test_the_newest_code_is_kept(tmp_path, monkeypatch):
    """A program that freezes an address has code of its own in each run."""
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_KEPT", 2)
    for number in (11, 12, 13):
        frozen_kernels.change(number)
        with watched() as done:
            frozen_kernels.written(["a_member"])
        assert done.compiled == ["a_member"]
    assert len(list(tmp_path.iterdir())) == 2
    with watched() as done:
        frozen_kernels.written(["a_member"])
    assert (done.compiled, done.loaded) == ([], 1)


def test_each_file_is_that_of_its_values(tmp_path, monkeypatch):
    """A value that comes back finds the code that was compiled for it."""
    monkeypatch.setenv("GPUNETIO_CACHE_DIR", str(tmp_path))
    compiled = []
    for number in (21, 22, 21, 22):
        frozen_kernels.change(number)
        with watched() as done:
            assert frozen_kernels.written(["a_member"]) == {"a_member": number}
        compiled.append(len(done.compiled))
    assert compiled == [1, 1, 0, 0]
