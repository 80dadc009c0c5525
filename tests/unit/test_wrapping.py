"""Sums and products of compiled code are modulo 2⁶⁴."""

import numpy as np
import pytest

from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import ld64
from gpunetio.nic.steering.hashing import START, mix

MOST, LEAST = 2**63 - 1, -(2**63)


@engine_function
def grows(number):
    return number + 1 > number


@engine_function
def shrinks(number):
    return number - 1 < number


@engine_function
def doubled_has_the_sign(number):
    return (number * 2 < 0) == (number < 0)


@engine_function
def of_a_caller(address):
    return grows(ld64(address))


@pytest.mark.parametrize("function", [grows, shrinks, doubled_has_the_sign], ids=lambda function: function.__name__)
def test_overflow(function):
    """LLVM answers yes without a look if numbers cannot overflow."""
    edge = LEAST if function is shrinks else MOST
    assert function(5)
    assert not function(edge)


def test_overflow_in_a_callee():
    """A function that is inlined into its caller, with a number that comes from memory."""
    numbers = np.array([5, MOST])
    assert of_a_caller(numbers.ctypes.data)
    assert not of_a_caller(numbers.ctypes.data + 8)


@pytest.mark.parametrize("word", [0, 1, MOST, LEAST, -1, START])
def test_a_hash(word):
    """The engine's is that of the control path, which takes arrays."""
    array = mix.py_func(np.array([START]), np.array([word]))
    assert mix(START, word) == array[0]
    product = (START ^ word) & 2**64 - 1
    product = (product ^ product >> 32) * 0x9E3779B97F4A7C15 % 2**64
    assert mix(START, word) & 2**64 - 1 == product ^ product >> 32
