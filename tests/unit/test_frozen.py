"""Compiled code has the values of now: none of an earlier process, and none that has changed since.

Each kernel of `frozen_kernels` writes one number that it does not have from an argument, so the right value is known.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from numba import cuda, int64, void

import frozen_helpers
import frozen_kernels
from gpunetio import Gpu, MemType, device, kernel
from gpunetio.errors import InvalidValueError
from gpunetio.jit import cache
from gpunetio.jit.frozen import Frozen
from gpunetio.jit.launch import offline
from repository import RIGS, environment

LIVE = [0]  # an object that Numba does not freeze


def printed(number: int, folder: Path) -> dict[str, int]:
    ran = subprocess.run(
        [sys.executable, RIGS / "frozen_kernels.py"], capture_output=True, text=True, timeout=100, check=False,
        env=environment(NUMBER=str(number), NUMBA_CACHE_DIR=str(folder)),
    )  # fmt: skip
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
    body = frozen_kernels.a_global_of_a_helper.code["cpu"].body
    frozen_helpers.NUMBER = int("7")
    frozen_kernels.written(["a_global_of_a_helper"])
    assert frozen_kernels.a_global_of_a_helper.code["cpu"].body is body


def test_a_helper_that_is_defined_again():
    """As in a notebook whose cell is run again."""
    scope = {"device": device, "kernel": kernel}
    exec("@device.device_function\ndef helper(x):\n    return x + 5", scope)
    exec("@kernel\ndef ask(out):\n    device.st64(out, helper(0))", scope)
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        for number in (5, 7):
            exec(f"@device.device_function\ndef helper(x):\n    return x + {number}", scope)
            assert scope["ask"][1, 1, gpu](out).wait(60)
            assert out.array.view("i8")[0] == number


def test_a_function_of_numba_that_would_stay_old_is_refused(tmp_path, monkeypatch):
    """Only if this process has compiled it: code from the cache leaves Numba's function as it is."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    frozen_kernels.change(5)
    assert frozen_kernels.written(["through_numba"]) == {"through_numba": 5}
    frozen_kernels.change(7)
    with pytest.raises(InvalidValueError) as refused:
        frozen_kernels.written(["through_numba"])
    assert str(refused.value) == (
        "through_numba: it calls of_numba, which Numba has compiled with values that have changed since: decorate "
        "of_numba with @device_function instead, or pass it the values as arguments"
    )
    frozen_kernels.change(5)
    assert frozen_kernels.written(["through_numba"]) == {"through_numba": 5}


def test_code_for_cuda_changes_too():
    """PTX of a kernel that stores a global of its helper, and the dispatcher that a launch would use."""
    name = "a_global_of_a_helper"
    launched = getattr(frozen_kernels, name).code["cuda"]
    seen = []
    for number in (50005, 70007):
        frozen_helpers.change(number)
        seen.append(launched.compiled)
        with offline((9, 0)):
            text, _ = cuda.compile(seen[-1].py_func, void(int64), device=False, cc=(9, 0), output="ptx", abi="numba")
        assert str(number) in text
        assert str(120012 - number) not in text
    assert seen[0] is not seen[1]
    assert launched.compiled is seen[1]


def test_an_object_of_this_process_is_not_kept_on_disk():
    """Its address would be another object's in another process."""

    def names_it():
        return LIVE

    assert not Frozen(names_it).lasting
    assert Frozen(frozen_kernels.a_global.py_func).lasting


def test_the_newest_code_is_kept(tmp_path, monkeypatch):
    """A program that freezes an address has code of its own in each run."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_KEPT", 2)
    for number in (1, 2, 3):
        frozen_kernels.change(number)
        frozen_kernels.written(["a_member"])
    for ending in ("nbi", "nbc"):
        kept = [*tmp_path.rglob(f"frozen_kernels.a_member-*.{ending}")]
        assert len(kept) == 2
        assert any(Frozen(frozen_kernels.a_member.py_func).digest[:16] in file.name for file in kept)
