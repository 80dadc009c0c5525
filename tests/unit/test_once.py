"""What a process has once is made once, whoever asks at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

import gpunetio as gn
from gpunetio import device as dev
from gpunetio.jit import roots
from gpunetio.once import once

SLOW = 0.2  # seconds; longer than threads need to get there


def at_once(call):
    with ThreadPoolExecutor(4) as pool:
        return [future.result(100) for future in [pool.submit(call) for _ in range(4)]]


def test_threads_that_ask_first_get_the_same():
    numbers = count()

    @once
    def number():
        time.sleep(SLOW)
        return next(numbers)

    assert at_once(number) == [0] * 4
    assert number() == 0


def test_what_could_not_be_made_is_tried_again():
    numbers = count()

    @once
    def reciprocal():
        return 1 / next(numbers)

    with pytest.raises(ZeroDivisionError):
        reciprocal()
    assert [reciprocal(), reciprocal()] == [1.0, 1.0]


def test_threads_that_launch_a_kernel_first(monkeypatch):
    """One of them compiles it."""
    made = []

    def slow(function, *how):
        contents = load(function, *how)
        if function.__name__ == "answer":
            time.sleep(SLOW)
            made.append(function)
        return contents

    load = roots._load
    monkeypatch.setattr(roots, "_load", slow)

    @gn.kernel
    def answer(out):
        dev.st64(out, 42)

    with gn.Gpu("host") as gpu:

        def answered():
            with gpu.alloc(8) as out:
                assert answer[1, 1, gpu](out).wait(60)
                return int(out.array.view("i8")[0])

        assert at_once(answered) == [42] * 4
    assert len(made) == 1
