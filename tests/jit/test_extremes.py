"""Programs that nobody writes by hand: they compile and do what Python does, or are refused in words."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gpunetio.jit.cubin import ptx_of
from gpunetio.jit.kinds import INT
from gpunetio.jit.values import CompileError

HEAD = "from gpunetio import device_function\nfrom gpunetio.device import st64\n"
FUNCTION = "@device_function\ndef f(a):\n"
TOO_DEEP = "this nests too deeply for the compiler, with the functions that it calls: write parts of it as statements"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(text: str) -> ModuleType:
        file = tmp_path / f"extreme_{tmp_path.name}.py"
        file.write_text(HEAD + text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, made)
        spec.loader.exec_module(made)
        return made

    return run


def as_signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def test_ten_thousand_lines(imported):
    """Without a branch, of a kind for which LLVM's instruction selection takes the square of the time."""
    lines = [f"t = t * 3 + a + {n}" for n in range(10_000)]
    f = imported(FUNCTION + "    t = 0\n" + "".join(f"    {line}\n" for line in lines) + "    return t\n").f
    names = {"t": 0, "a": 5}
    for line in lines:
        exec(line, {}, names)
    assert f(5) == as_signed(names["t"])


@pytest.mark.slow
def test_ten_thousand_lines_for_a_gpu(imported):
    lines = "".join(f"    t = t ^ a * {n}\n    st64(a + 8 * {n}, t)\n" for n in range(5_000))
    f = imported(f"def f(a):\n    t = 0\n{lines}").f
    with pytest.raises(CompileError, match=r"more than 5,000 instructions without a branch .* parts of it into loops"):
        ptx_of(f, (INT,), (9, 0))


def test_a_thousand_branches(imported):
    branches = "".join(f"    if a & {n}:\n        t += {n}\n" for n in range(1000))
    f = imported(f"{FUNCTION}    t = 0\n{branches}    return t\n").f
    for a in (0, 5, -1):
        assert f(a) == sum(n for n in range(1000) if a & n)


def test_a_long_table_of_elifs(imported):
    branches = "".join(f"    elif a == {n}:\n        return {n * n}\n" for n in range(1, 200))
    f = imported(f"{FUNCTION}    if a == 0:\n        return 7\n{branches}    return -1\n").f
    assert [f(a) for a in (0, 1, 199, 200)] == [7, 1, 199 * 199, -1]


@pytest.mark.parametrize("body", [
    "    return " + "+".join(["a"] * 900), "    return " + "".join(f"{n} if a == {n} else " for n in range(400)) + "0",
    "    if a == 0:\n        return 0\n" + "".join(f"    elif a == {n}:\n        return {n}\n" for n in range(1, 900)),
], ids=["operators", "conditions", "elifs"])
def test_what_nests_too_deeply(imported, body):
    f = imported(FUNCTION + body + "\n    return 1\n").f
    with pytest.raises(CompileError, match=TOO_DEEP):
        f(5)


def test_calls_that_go_too_deep(imported):
    chain = "".join(
        f"@device_function\ndef g{n}(a):\n    return {f'g{n - 1}(a + 1)' if n else 'a'}\n" for n in range(400)
    )
    made = imported(chain)
    assert made.g50(1) == 51
    with pytest.raises(CompileError, match=TOO_DEEP):
        made.g399(1)


@pytest.mark.parametrize("double", ["(t, t)", "t + t", "(*t, *t)"])
def test_a_tuple_that_doubles(imported, double):
    """2⁴⁰ values would be copied."""
    f = imported(FUNCTION + "    t = (a,)\n" + f"    t = {double}\n" * 40 + "    return 1\n").f
    with pytest.raises(CompileError, match=r"a tuple with 1,024 values in it: 1,000 are the most"):
        f(5)


@pytest.mark.parametrize("constant, value", [
    ("1 << 10**12", 1 << 10**12 % 64),  # shifts count modulo 64
    ("3 ** N", as_signed(pow(3, 10**9, 1 << 64))), ("1 // (1 << 10**10)", 1), ("-7 % (1 << 10**10)", 0),
])
def test_constants_that_python_would_not_end_to_compute(imported, constant, value):
    """They have 64 bits, also before they are computed."""
    f = imported(f"N = 10**9\n{FUNCTION}    return a + ({constant})\n").f
    assert f(0) == f.interpret(0) == value


def test_a_loop_without_an_end_compiles(imported):
    """It is the program's, also where LLVM could count its turns."""
    made = imported(
        "@device_function\ndef forever(a):\n    while True:\n        a += 1\n"
        f"{FUNCTION}    if a > 10:\n        forever(a)\n    for i in range(1 << 62):\n"
        "        if i == a:\n            return i\n    return -1\n"
    )
    assert made.f(5) == 5


def test_names_that_mean_something_else(imported):
    """Built-in functions, modules and what is imported; words of LLVM; letters that are not ASCII's."""
    made = imported(
        "import math\n"
        "@device_function\ndef f(range, len, ptr, entry, i64, label, st64):\n"
        "    print = range + len\n    math = print * ptr\n"
        "    device_function = math + entry + i64 + label + st64\n    return device_function\n"
        "@device_function\ndef g(größe):\n    ünï = größe * 2\n    变量 = ünï + 1\n    return 变量\n"
        "@device_function\ndef h(f):\n    g = f + 1\n    return g\n"
        "i = 7\n@device_function\ndef k(x):\n    for i in (1, 2):\n        x += i\n    return x + i\n"
    )
    assert made.f(1, 2, 3, 4, 5, 6, 7) == 31
    assert made.g(5) == 11
    assert made.h(5) == 6
    assert made.k(5) == 10


def test_a_function_that_is_shadowed_where_it_is_called(imported):
    made = imported(
        "@device_function\ndef g(a):\n    return a\n"
        "@device_function\ndef f(a):\n    b = g(a)\n    g = b + 1\n    return g\n"
    )
    with pytest.raises(UnboundLocalError):
        made.f.interpret(5)
    with pytest.raises(CompileError, match="g is used before something is assigned to it"):
        made.f(5)


def test_many_parameters_and_variables(imported):
    made = imported(
        "@device_function\ndef f(" + ", ".join(f"a{n}" for n in range(300)) + "):\n"
        + "".join(f"    v{n} = a{n % 300} + {n}\n" for n in range(3000))
        + "    return " + " ^ ".join(f"v{n}" for n in range(0, 3000, 10)) + "\n"
    )
    expected = 0
    for n in range(0, 3000, 10):
        expected ^= n % 300 * 5 + n
    assert made.f(*range(0, 1500, 5)) == expected


def test_a_text_with_a_nul(imported):
    f = imported(FUNCTION + "    print('a\\0b', a)\n    return a\n").f
    with pytest.raises(CompileError, match=r"print\(\) cannot write the text 'a\\x00b'"):
        f(5)
