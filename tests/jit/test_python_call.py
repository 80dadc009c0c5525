"""Calls of compiled functions from Python: what they take, what they give, and what they keep."""

import enum
import gc
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import device_function
from gpunetio.device import ld64, ld_relaxed64, st64
from gpunetio.errors import InvalidValueError
from gpunetio.jit import roots
from gpunetio.memory import HostMemory
from repository import environment

WORD = 1 << 64


@device_function
def weighted(a, b, c):
    return a + 10 * b + 100 * c


FACTOR = 2


@device_function
def by_factor(a):
    return a * FACTOR


@device_function
def nothing(address):
    st64(address, 1)


@device_function
def number():
    return 7


@device_function
def until_told(address):
    """Wait for a thread of Python, some seconds at most."""
    for _ in range(1 << 33):
        if ld_relaxed64(address):
            break
    return ld64(address)


weighted_plain, nothing_plain = weighted.compile().plain, nothing.compile().plain


class Colour(enum.IntEnum):
    RED = 3


def as_signed(value: int) -> int:
    return (value + WORD // 2) % WORD - WORD // 2


@pytest.mark.parametrize("call", [weighted, weighted_plain])
def test_integers_of_all_kinds(call):
    """What has `__index__` is one, as for Python itself."""
    assert call(1, 2, 3) == 321
    assert call(-1, 0, 0) == -1
    assert call(True, Colour.RED, np.int16(-2)) == 1 + 30 - 200
    assert type(call(True, False, False)) is int


@given(st.tuples(*[st.integers(-(1 << 63), WORD - 1)] * 3))
def test_all_words(words):
    """Unsigned ones, too: they are the signed ones with the same bits."""
    a, b, c = words
    assert weighted(a, b, c) == as_signed(a + 10 * b + 100 * c)


@pytest.mark.parametrize("value", [WORD, -(1 << 63) - 1, 1 << 200])
def test_an_integer_of_more_bits(value):
    with pytest.raises(InvalidValueError, match=r"argument b = -?0x[0-9a-f]+ has more than 64 bits"):
        weighted(1, value, 2)
    with pytest.raises(InvalidValueError, match=r"st64 = -?0x[0-9a-f]+ has more than 64 bits"):
        st64(value, 1)


def test_unsigned_words_of_a_primitive():
    memory = HostMemory(8)
    address = int(memory.array.ctypes.data)
    for word in (0, 1, WORD // 2, WORD - 1):
        st64(address, word)
        assert ld64(address) == as_signed(word)
        assert memory.array.view(np.uint64)[0] == word


@pytest.mark.parametrize("arguments", [(), (1, 2), (1, 2, 3, 4)])
def test_another_number_of_arguments(arguments):
    with pytest.raises(TypeError, match=r"weighted\(\): (missing a required|too many positional)"):
        weighted(*arguments)
    with pytest.raises(TypeError):
        weighted_plain(*arguments)
    assert weighted_plain(1, 2, 3) == 321


@pytest.mark.parametrize("value", ["1", b"1", [1]])
def test_no_integer(value):
    with pytest.raises(TypeError):
        weighted_plain(1, value, 3)
    with pytest.raises(InvalidValueError, match="argument b"):
        weighted(1, value, 3)


def test_an_error_of_index():
    class Odd:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        weighted_plain(1, Odd(), 2)


def test_nothing_is_kept():
    """Neither of the arguments, nor of the results, nor of None."""
    memory = HostMemory(8)
    address, big = int(memory.array.ctypes.data), 1 << 60
    for _ in range(100):  # until all is made that is made once
        weighted_plain(big, big, big), nothing_plain(address), number()
    gc.collect()
    before = sys.getrefcount(big), sys.getrefcount(address), sys.getrefcount(None), sys.getallocatedblocks()
    for _ in range(10_000):
        weighted_plain(big, big, big)
        assert nothing_plain(address) is None
        number()
    gc.collect()
    after = sys.getrefcount(big), sys.getrefcount(address), sys.getrefcount(None), sys.getallocatedblocks()
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) < 100
    assert after[3] - before[3] < 100


def test_other_threads_run_meanwhile():
    """One that the function waits for, too."""
    memory = HostMemory(8)
    address, began = int(memory.array.ctypes.data), threading.Event()

    def tell() -> None:
        began.wait()
        st64(address, 5)

    thread = threading.Thread(target=tell)
    thread.start()
    until_told.compile()
    began.set()
    assert until_told(address) == 5
    thread.join()


@device_function
def several(a, x, y):
    return a, (x, y, None), (a + 1,), ()


@device_function
def nothing_or(a, x):
    if a < 0:
        raise ValueError("negative")
    return (x, a) if a else (x, 0)


@device_function
def half(x):
    return x / 2


@device_function
def checked_half(x):
    assert x >= 0
    return x / 2


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.floats(width=32))
def test_all_that_is_returned(a, x, y):
    """Tuples of tuples, too, each as plain Python returns it."""
    y = np.float32(y)
    assert repr(several(a, x, y)) == repr((a, (x, float(y), None), (as_signed(a + 1),), ()))


@given(st.integers(-3, 3), st.floats(allow_nan=False))
def test_what_may_fail(a, x):
    """It raises, or returns a value."""
    if a < 0:
        with pytest.raises(ValueError, match="negative") as raised:
            nothing_or(a, x)
        assert "nothing_or" in raised.value.__notes__[0]
    else:
        assert nothing_or(a, x) == (x, a)


@pytest.mark.parametrize("call", [half, checked_half])
@pytest.mark.parametrize("value", [0.0, 1.0, 5e-324, 1.7976931348623157e308, math.inf])
def test_floats(call, value):
    assert call(value) == value / 2
    assert call(np.float32(1.5)) == 0.75


def test_minus_one_is_a_float():
    """The value that tells of an error in Python's C API."""
    assert half(-1.0) == -0.5
    with pytest.raises(AssertionError):
        checked_half(-1.0)


def test_what_is_returned_is_not_kept():
    for _ in range(100):
        several(1 << 40, 0.5, np.float32(1)), nothing_or(3, 0.25)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10_000):
        several(1 << 40, 0.5, np.float32(1)), nothing_or(3, 0.25)
    gc.collect()
    assert sys.getallocatedblocks() - before < 100


def test_the_process_ends(tmp_path):
    """With a function that lives longer than all modules but one. Memory that was freed is full of something else."""
    (tmp_path / "program.py").write_text(
        "import builtins\n"
        "from gpunetio import device_function\n"
        "@device_function\n"
        "def doubled(a):\n"
        "    return 2 * a\n"
        "plain = doubled.compile().plain\n"
        "assert plain(21) == 42\n"
        "builtins.kept = plain\n"
    )
    poisoned = environment(
        PYTHONMALLOC="malloc", MALLOC_PERTURB_="255", GLIBC_TUNABLES="glibc.malloc.tcache_count=0"
    )
    ran = subprocess.run([sys.executable, tmp_path / "program.py"], env=poisoned, timeout=100, check=False)
    assert ran.returncode == 0


def test_values_that_change_between_calls(monkeypatch):
    """A function of a program is compiled for them, also when it was called before."""
    for factor in (3, 5, 3):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert [by_factor(value) for value in (1, 7)] == [factor, 7 * factor]


def test_a_value_that_changes_while_it_is_compiled(monkeypatch):
    """As another thread may change it. The next call has the new one."""
    root = roots.root

    def changing(*what):
        made = root(*what)
        monkeypatch.setitem(globals(), "FACTOR", 13)
        return made

    monkeypatch.setitem(globals(), "FACTOR", 11)
    monkeypatch.setattr(roots, "root", changing)
    assert by_factor(1) == 11
    assert by_factor(1) == 13


def test_the_name():
    """As a traceback of Python's has it."""
    assert weighted_plain.__name__ == "weighted"
    assert repr(weighted_plain) == "<built-in function weighted>"
