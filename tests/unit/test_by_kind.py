"""Dispatch by kind, in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from compiled import reached
from gpunetio.jit.by_kind import by_kind
from gpunetio.jit.compile import engine_function


class Shape(IntEnum):
    LINE, SQUARE, POINT = 1, 7, 9


@engine_function
def _line(size, factor):
    return size * factor


@engine_function
def _square(size, factor):
    return size * size * factor


@by_kind({Shape.LINE: _line, Shape.SQUARE: _square, Shape.POINT: None})
def measure(kind, size, factor):
    """Return the measure of a shape."""


EXPECTED: dict[int, Callable[[int, int], int]] = {1: lambda a, b: a * b, 7: lambda a, b: a * a * b}


@given(kind=st.integers(-2, 12), size=st.integers(-1000, 1000), factor=st.integers(-1000, 1000))
def test_the_function_of_the_kind_is_called(kind: int, size: int, factor: int):
    """A kind without a function, or without a row, gives 0."""
    made: Any = measure
    assert made(kind, size, factor) == EXPECTED.get(kind, lambda *_: 0)(size, factor)


@engine_function
def _through(kind, size, factor):
    return measure(kind, size, factor) + 1


@given(kind=st.integers(-2, 12), size=st.integers(-1000, 1000), factor=st.integers(-1000, 1000))
def test_compiled_code_calls_it(kind: int, size: int, factor: int):
    """By a switch, with direct calls."""
    assert _through(kind, size, factor) == EXPECTED.get(kind, lambda *_: 0)(size, factor) + 1


def test_it_is_what_was_decorated():
    made: Any = measure
    assert made.__qualname__ == "measure"
    assert made.__module__ == __name__
    assert made.__doc__ == "Return the measure of a shape."


def test_what_its_functions_do_decides_about_its_callers():
    found = reached(_through)
    assert {_through, _line, _square} <= set(found)
