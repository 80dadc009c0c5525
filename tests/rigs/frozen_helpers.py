"""Helpers that the kernels of `frozen_kernels` find in another module."""

import os

from gpunetio import device

NUMBER = int(os.environ.get("NUMBER", "0"))


@device.device_function
def of_this_module(x):
    """Add a global of this module."""
    return x + NUMBER


@device.device_function
def by_default(x, number=NUMBER):
    """Add a default."""
    return x + number


def plain(x):
    """Add a global, and what another helper adds that is not decorated either: nothing."""
    return of_this_module(x) + nothing(x)


def nothing(x):
    return x - x


def made(number):
    """Make a function whose closure has a number."""

    @device.device_function
    def closed_over(x):
        return x + number

    return closed_over


closed_over = made(NUMBER)


@device.device_function
def through_another(x):
    """Call a function that adds a global."""
    return of_this_module(x)


def change(number):
    """Change the number everywhere in this module."""
    global NUMBER, closed_over
    NUMBER = number
    by_default.py_func.__defaults__ = (number,)
    closed_over = made(number)
