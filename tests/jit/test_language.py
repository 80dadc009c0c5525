"""What kernels can do besides calling device functions: floats, arrays, shared memory, exceptions, print."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpunetio import Gpu, GpuMemory, MemType, device, kernel
from gpunetio.errors import InvalidValueError
from gpunetio.jit.roots import CHECKS_BOUNDS
from gpunetio.jit.values import CompileError

TILE = 8
SCALE = np.float32(0.1)


Show = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def shown(gpu: Gpu) -> Iterator[Show]:
    """A copy of an array in memory that the GPU and the CPU reach."""
    made: list[GpuMemory] = []

    def show(values: np.ndarray) -> np.ndarray:
        memory = gpu.alloc(values.nbytes, MemType.CPU_GPU)
        made.append(memory)
        assert memory.array is not None
        array = memory.array[: values.nbytes].view(values.dtype).reshape(values.shape)
        array[...] = values
        return array

    yield show
    for memory in made:
        memory.close()


@kernel
def scale(out, given, factor):
    for i in range(device.global_id(), len(given), device.grid_dim() * device.block_dim()):
        out[i] = given[i] * factor + 0.5


@pytest.mark.parametrize("dtype, factor", [
    (np.float32, 1.1), (np.float32, np.float32(1.1)), (np.float64, 1.1), (np.float64, np.float32(1.1)), (np.int32, 3.0),
])
def test_floats(gpu: Gpu, shown: Show, dtype: Any, factor: Any) -> None:
    """A float32 with a float is a float; constants take the type of the other side (NumPy 2's rule, NEP 50)."""
    given, out = shown(np.arange(100).astype(dtype)), shown(np.zeros(100, np.float32))
    assert scale[2, 16, gpu](out, given, factor).wait(30)
    wide = np.float64 if isinstance(factor, float) or dtype is np.float64 else np.float32
    expected = given.astype(wide) * wide(factor) + wide(0.5)
    assert np.array_equal(out, expected.astype(np.float32))


@kernel
def halves(out, given):
    out[0] = given[0] * 0.1
    out[1] = given[0] * SCALE
    out[2] = given[0] / 3
    out[3] = -given[0] // 2
    out[4] = given[0] % -3
    out[5] = given[0] ** 2


def test_constants_stay_narrow(gpu: Gpu, shown: Show) -> None:
    given, out = shown(np.array([7.3], np.float32)), shown(np.zeros(6, np.float64))
    assert halves[1, 1, gpu](out, given).wait(30)
    x = given[0]
    expected = [x * np.float32(0.1), x * SCALE, x / np.float32(3), np.floor(-x / 2), x % np.float32(-3), x * x]
    assert out.tolist() == [float(np.float32(one)) for one in expected]


@kernel
def copy_elements(out, given):
    for i in range(given.size):
        out[i] = given[i]
    out[-1] = given[-2]


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_elements_of_all_widths(gpu: Gpu, shown: Show, dtype: str) -> None:
    values = np.array([0, 1, -1, 127, 128, 255, 32768, -40000, 1 << 31, -1 << 31, 1 << 40]).astype(dtype)
    given, out = shown(values), shown(np.zeros(len(values), dtype))
    assert copy_elements[1, 1, gpu](out, given).wait(30)
    expected = values.copy()
    expected[-1] = values[-2]
    assert out.tolist() == expected.tolist()


@kernel
def rows(out, cube):
    planes, lines, _ = cube.shape
    for i in range(planes):
        plane = cube[i]
        for j in range(lines):
            row, total = plane[j], 0.0
            for k in range(len(row)):
                total += row[k] * cube[i, j, -1]
            out[i, j] += total
    out[0, 0] = cube.ndim * 100 + cube.itemsize


def test_dimensions_and_parts(gpu: Gpu, shown: Show) -> None:
    """Also of arrays with gaps, and backwards."""
    for step in (slice(None), slice(None, None, 2), slice(None, None, -1)):
        cube, out = shown(np.random.default_rng(1).random((3, 4, 6))), shown(np.ones((3, 4)))
        given = cube[step, step, step]
        assert rows[1, 1, gpu](out, given).wait(30)
        expected = np.ones((3, 4))
        for i, j in np.ndindex(given.shape[:2]):
            total = 0.0
            for value in given[i, j]:
                total += value * given[i, j, -1]
            expected[i, j] += total
        expected[0, 0] = 308
        assert np.array_equal(out, expected)


FUNCTIONS = [
    math.sin, math.cos, math.tan, math.asin, math.acos, math.atan, math.sinh, math.cosh, math.tanh, math.asinh,
    math.acosh, math.atanh, math.exp, math.exp2, math.expm1, math.log, math.log2, math.log10, math.log1p, math.cbrt,
    math.erf, math.erfc, math.sqrt, math.fabs, math.floor, math.ceil, math.trunc,
]


@kernel
def all_functions(out, given):
    x, y, at = given[0], given[1], 0
    for value in (
        math.sin(x), math.cos(x), math.tan(x), math.asin(x), math.acos(x), math.atan(x), math.sinh(x), math.cosh(x),
        math.tanh(x), math.asinh(x), math.acosh(y), math.atanh(x), math.exp(x), math.exp2(x), math.expm1(x),
        math.log(x), math.log2(x), math.log10(x), math.log1p(x), math.cbrt(x), math.erf(x), math.erfc(x), math.sqrt(x),
        math.fabs(-x), math.floor(-y), math.ceil(y), math.trunc(-y), math.pow(y, x), math.atan2(x, y),
        math.hypot(x, y), math.fmod(y, x),
        math.copysign(y, -x), math.isnan(x), math.isinf(x / 0.0), math.isfinite(x), math.pi * x,
    ):
        out[at] = value
        at += 1  # noqa: SIM113  # kernels have no enumerate()


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_functions_of_math(gpu: Gpu, shown: Show, dtype: Any, tolerance: float) -> None:
    given, out = shown(np.array([0.37, 2.6], dtype)), shown(np.zeros(36))
    assert all_functions[1, 1, gpu](out, given).wait(30)
    x, y = map(float, given)
    expected = [f(y if f is math.acosh else x) for f in FUNCTIONS[:-3]]
    expected += [math.floor(-y), math.ceil(y), math.trunc(-y), math.pow(y, x), math.atan2(x, y), math.hypot(x, y)]
    expected += [math.fmod(y, x), -y, 0, 1, 1, math.pi * x]
    assert out == pytest.approx(expected, rel=tolerance)


@kernel
def transpose(out, given):
    tile = device.shared_array((TILE, TILE), np.float32)
    across = given.shape[1] // TILE
    left, top = device.block_idx() % across * TILE, device.block_idx() // across * TILE
    row, column = device.thread_idx() // TILE, device.thread_idx() % TILE
    tile[row, column] = given[top + row, left + column]
    device.block_sync()
    out[left + row, top + column] = tile[column, row]


def test_a_shared_array(gpu: Gpu, shown: Show) -> None:
    values = np.arange(2 * TILE * 2 * TILE, dtype=np.float32).reshape(2 * TILE, 2 * TILE)
    given, out = shown(values), shown(np.zeros(values.T.shape, np.float32))
    assert transpose[4, TILE * TILE, gpu](out, given).wait(60)
    assert np.array_equal(out, values.T)
    if gpu.target == "cpu":
        out[...] = 0
        assert transpose.interpret[4, TILE * TILE, gpu](out, given).wait(60)
        assert np.array_equal(out, values.T)


@device.device_function
def two_tiles(n):
    tile, other = device.shared_array(4, np.int64), device.shared_array(4, np.int64)
    tile[0], other[0] = n, n + 1
    return tile[0] + other[0]


def test_a_shared_array_is_for_kernels() -> None:
    with pytest.raises(InvalidValueError, match=r"two_tiles\(\) has a shared array: call it in a kernel"):
        two_tiles(3)
    with pytest.raises(RuntimeError, match=r"shared_array\(\) is for kernels"):
        two_tiles.interpret(3)


@kernel
def refuse(number, out):
    assert number >= 0, "below"
    if number > 3:
        raise IndexError("above")
    assert number != 2
    device.st64(out, number)


@pytest.mark.parametrize("number, error, message", [
    (-1, AssertionError, "below"), (4, IndexError, "above"), (2, AssertionError, ""), (1, None, ""),
])
def test_exceptions(gpu: Gpu, number: int, error: Any, message: str) -> None:
    """The message is the constant one, and a note says where it is from. The next launch is as any other."""
    with gpu.alloc(8, MemType.CPU_GPU) as out:
        launch = refuse[1, 4, gpu](number, out)
        if error is None:
            assert launch.wait(30)
            return
        with pytest.raises(error) as raised:
            launch.wait(30)
        assert str(raised.value) == message
        (note,) = raised.value.__notes__
        assert note.startswith(f"raised by compiled code: refuse, {__file__}:")
        assert refuse[1, 4, gpu](1, out).wait(30)


@device.device_function
def inverse(n):
    if n == 0:
        raise ZeroDivisionError("no inverse")
    return 1000 // n


@device.device_function
def sum_of_inverses(n):
    return inverse(n) + inverse(n + 1)


def test_exceptions_reach_python() -> None:
    assert sum_of_inverses(10) == 100 + 90
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="no inverse"):
            sum_of_inverses(-1)


@device.device_function
def alone(n):
    device.block_sync()
    device.warp_sync()
    sums = device.block_sum(n), device.warp_max(n), device.block_broadcast(n, 0), device.warp_broadcast(n, 0)
    return device.global_id(), device.block_dim(), device.warp_size(), device.lane_id(), sum_of(sums)


def sum_of(numbers):
    total = 0
    for one in numbers:
        total += one
    return total


def test_a_thread_that_runs_no_kernel_is_alone() -> None:
    """In its block, its warp and the grid: such as one of Python's that calls a device function."""
    assert alone(7) == (0, 1, 1, 0, 28)
    assert device.global_id() == 0


@kernel
def beyond(out, at):
    out[at] = 1


def test_bounds_are_checked_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS_BOUNDS, "1")
    with Gpu("host") as gpu:
        out = np.zeros(3)
        assert beyond[1, 1, gpu](out, -3).wait(30)
        assert out.tolist() == [1, 0, 0]
        for at in (3, -4):
            with pytest.raises(IndexError, match="an index is outside of the array"):
                beyond[1, 1, gpu](out, at).wait(30)


@kernel
def say(number):
    print("number", number, "is 100%", number / 4)


def test_print(capfd: pytest.CaptureFixture[str]) -> None:
    with Gpu("host") as gpu:
        assert say[1, 1, gpu](7).wait(30)
    assert capfd.readouterr().out == "number 7 is 100% 1.75\n"


@kernel
def many(a, b, c, d):
    x = a + b.nothing
    y = unknown(c)  # type: ignore[name-defined]  # noqa: F821
    z = x + y
    device.put(d)
    return 1.5 << z


def test_all_mistakes_at_once() -> None:
    """What follows from one is not told."""
    with Gpu("host") as gpu, pytest.raises(CompileError) as raised:
        many[1, 1, gpu](1, 2, 3, 4)
    said = [line.rpartition(": ")[2] for line in str(raised.value).splitlines() if "in many()" in line]
    assert said[:2] == ["an integer has no attribute nothing", "unknown is not defined"]
    assert said[2] == "'raddr'"  # put(): missing a required argument
    assert len(said) == 3


ANNOTATED = """
from gpunetio import device, kernel

@device.device_function
def twice(n: Unknown) -> Unknown:
    return 2 * n

@kernel
def store_twice(out: Unknown, n: Unknown = 4) -> None:
    device.st64(out, twice(n))
"""


def test_annotations_are_for_type_checkers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may name what is not there. Since Python 3.14 they need no `__future__` for that."""
    future = "" if sys.version_info >= (3, 14) else "from __future__ import annotations"
    (tmp_path / "annotated_program.py").write_text(future + ANNOTATED)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = importlib.import_module("annotated_program")
    assert program.twice(3) == 6
    assert "n: 'Unknown' = 4" in repr(program.store_twice)
    with Gpu("host") as gpu, gpu.alloc(8, MemType.CPU_GPU) as out:
        assert program.store_twice[1, 1, gpu](out).wait(30)
        assert out.array is not None
        assert int(out.array.view("i8")[0]) == 8


def test_arrays_that_a_kernel_cannot_take() -> None:
    with Gpu("host") as gpu:
        for array, words in (
            (np.zeros(3, np.complex128), "out is an array of complex128: kernels take arrays of bool, int8"),
            (np.zeros(3, ">i4"), "out is an array of >i4: kernels take arrays of"),
            (np.zeros((1, 1, 1, 1)), "out is an array with 4 dimensions: kernels take 1 to 3"),
        ):
            with pytest.raises(InvalidValueError, match=words):
                beyond[1, 1, gpu](array, 0)
