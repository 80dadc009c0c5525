"""Kernels that each write one number, which does not come from an argument.

    NUMBER=5 python frozen_kernels.py        prints the numbers that they write, as JSON
"""

import json
import os
from collections import namedtuple
from enum import IntEnum

import numpy as np

import frozen_helpers
from frozen_helpers import by_default, of_this_module, through_another
from gpunetio import Gpu, MemType, device, kernel
from gpunetio.formats.layout import Entry
from gpunetio.jit.launch import Kernel
from gpunetio.jit.struct_view import struct_view

NUMBER = int(os.environ.get("NUMBER", "0"))
Pair = namedtuple("Pair", "first second")
pair = Pair(0, NUMBER)


def defaulted(number):
    return namedtuple("Defaulted", "first second", defaults=(number,))


Defaulted = defaulted(NUMBER)
table = np.array([0, NUMBER])
scalar = np.int64(NUMBER)
switch = NUMBER > 6
fraction = NUMBER / 2


class Settings:
    NUMBER = NUMBER

    def __init__(self, number):
        self.number = number


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


settings, slotted = Settings(NUMBER), Slotted(NUMBER)


def numbers(number):
    return IntEnum("Numbers", {"ONE": number})


Numbers = numbers(NUMBER)
member = Numbers.ONE
entry = Entry("entry", 64, f"field {NUMBER} u8")
view = struct_view(entry)


def plain(x):
    """A helper that is not decorated."""
    return x + NUMBER


@kernel
def a_global(out):
    device.st64(out, NUMBER)


@kernel
def an_attribute_of_a_module(out):
    device.st64(out, frozen_helpers.NUMBER)


@kernel
def a_global_of_a_helper(out):
    device.st64(out, of_this_module(0))


@kernel
def a_global_of_a_helper_of_a_helper(out):
    device.st64(out, through_another(0))


@kernel
def a_helper_of_a_module(out):
    device.st64(out, frozen_helpers.of_this_module(0))


@kernel
def a_closure_of_a_helper(out):
    device.st64(out, frozen_helpers.closed_over(0))


@kernel
def a_default_of_a_helper(out):
    device.st64(out, by_default(0))


@kernel
def a_default(out, number=NUMBER):
    device.st64(out, number)


@kernel
def a_helper_that_comes_later(out):
    device.st64(out, later(0))


@device.device_function
def later(x):
    return x + NUMBER


@kernel
def a_member(out):
    device.st64(out, member)


@kernel
def an_attribute_of_an_object(out):
    device.st64(out, settings.number)


@kernel
def an_attribute_of_a_class(out):
    device.st64(out, Settings.NUMBER)


@kernel
def an_attribute_in_a_slot(out):
    device.st64(out, slotted.number)


@kernel
def an_enumeration(out):
    device.st64(out, Numbers.ONE)


@kernel
def a_named_tuple(out):
    device.st64(out, pair.second)


@kernel
def a_default_of_a_named_tuple(out):
    device.st64(out, Defaulted(0).second)


@kernel
def an_array(out):
    device.st64(out, table[1])


@kernel
def a_scalar(out):
    device.st64(out, scalar)


@kernel
def a_switch(out):
    device.st64(out, 7 if switch else 5)


@kernel
def a_fraction(out):
    device.st64(out, int(2 * fraction))


@kernel
def an_offset(out):
    device.st64(out, entry.field)


@kernel
def a_view(out):
    view(out).field = 1  # the byte of the field
    found = 0
    for at in range(16):
        if device.ld8(out + at) == 1:
            found = at
    device.st64(out + 8, 0)
    device.st64(out, found)


@kernel
def a_global_of_a_plain_helper(out):
    device.st64(out, plain(0))


@kernel
def a_plain_helper_of_a_module(out):
    device.st64(out, frozen_helpers.plain(0))


def closing_over(number):
    @kernel
    def a_closure(out):
        device.st64(out, number)

    return a_closure


a_closure = closing_over(NUMBER)


def change(number):
    """Change the number everywhere."""
    global NUMBER, pair, Defaulted, scalar, switch, fraction, Numbers, member, entry, view, a_closure
    NUMBER, pair, scalar, switch, fraction = number, Pair(0, number), np.int64(number), number > 6, number / 2
    Defaulted = defaulted(number)
    table[1] = number
    settings.number = slotted.number = Settings.NUMBER = number
    Numbers = numbers(number)
    member = Numbers.ONE
    entry = Entry("entry", 64, f"field {number} u8")
    view = struct_view(entry)
    a_default.py_func.__defaults__ = (number,)
    a_closure.py_func.__closure__[0].cell_contents = number
    frozen_helpers.change(number)


def written(names=()):
    """Return what kernels write, by name: all of them, unless some are named."""
    kernels = {name: found for name, found in globals().items() if isinstance(found, Kernel)}
    numbers = {}
    with Gpu("host") as gpu, gpu.alloc(64, MemType.CPU_GPU) as out:
        for name in names or kernels:
            out.array[:] = 0
            assert kernels[name][1, 1, gpu](out).wait(60)
            numbers[name] = int(out.array.view("i8")[0])
    return numbers


if __name__ == "__main__":
    others = [closing_over(NUMBER), closing_over(NUMBER + 1)]
    result = written()
    with Gpu("host") as gpu, gpu.alloc(64, MemType.CPU_GPU) as out:
        for number, other in enumerate(others):
            assert other[1, 1, gpu](out).wait(60)
            result[f"closure {number}"] = int(out.array.view("i8")[0]) - number
    print(json.dumps(result))
