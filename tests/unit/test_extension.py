"""Compiled code that is loaded when it is first needed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from compiled import reached
from gpunetio.jit import progress
from gpunetio.jit.compile import engine_function
from gpunetio.jit.extension import Extension
from gpunetio.jit.ops import ld_relaxed64, pause, st64, st_relaxed64
from gpunetio.jit.values import CompileError
from gpunetio.nic.host import engine
from gpunetio.nic.state import extensions
from nic_rig import until

MORE = Extension("more")
BROKEN = Extension("broken")


@MORE.function
def total(a, b, c, d, e):
    """Return the digits of a number."""
    return a + 10 * b + 100 * c + 1000 * d + 10000 * e


@MORE.function
def note(at, value):
    st64(at, value)


@BROKEN.function
def good(x):
    return x


@BROKEN.function
def bad(x):
    return x.nothing


@engine_function
def ask_both(x):
    return good(x) * 10 + bad(x)


@engine_function
def ask(at):
    note(at, 7)
    return total(1, 2, 3, 4, 5)


@engine_function
def ask_until(at):
    """Ask until there is an answer, or `at` says to stop. Say in the word behind it how often there was none."""
    while ld_relaxed64(at) == 0:
        answer = total(1, 2, 3, 4, 5)
        if answer != 0:
            return answer
        st_relaxed64(at + 8, ld_relaxed64(at + 8) + 1)
        pause()
    return 0


def test_code_that_runs_already_reaches_what_is_loaded():
    """Before, nothing happens, and the answer is 0. Load twice: the second time does nothing."""
    word, words = np.zeros(1, np.int64), np.zeros(2, np.int64)
    assert ask(word.ctypes.data) == 0
    assert word[0] == 0
    answers: list[Any] = []
    words[0] = 1
    ask_until(words.ctypes.data)  # compile it here, not in the thread
    words[0] = 0
    asking = threading.Thread(target=lambda: answers.append(ask_until(words.ctypes.data)))
    asking.start()
    try:
        until(lambda: words[1] > 0, "a call in vain")
        MORE.load()
        until(lambda: not asking.is_alive(), "an answer")
    finally:
        words[0] = 1
        asking.join()
    assert answers == [54321]
    MORE.load()
    assert ask(word.ctypes.data) == 54321
    assert word[0] == 7


def test_what_cannot_be_compiled_is_not_called():
    for _ in range(2):
        with pytest.raises(CompileError):
            BROKEN.load()
    assert ask_both(3) == 30


def test_it_is_what_was_decorated():
    made: Any = total
    assert made.py_func.__qualname__ == "total"
    assert made.py_func.__module__ == __name__
    assert made.py_func.__doc__ == "Return the digits of a number."


def test_the_wait_says_what_is_compiled():
    assert progress._name(total.direct) == "more"


# --- the engine ----------------------------------------------------------------------------------------------------

OF_ETHERNET = (
    "gpunetio.fabric.ethernet_", "gpunetio.nic.steering.", "gpunetio.nic.transport.eth_",
    "gpunetio.nic.transport.frame_sorting", "gpunetio.nic.transport.lan",
)


def names(root: Any) -> set[str]:
    return {f"{part.py_func.__module__}.{part.py_func.__qualname__}" for part in reached(root)}


def entries() -> dict[str, Any]:
    """The functions of the engine's extensions, by name."""
    return {
        f"{function.py_func.__module__}.{function.py_func.__qualname__}": function
        for extension in extensions.ALL
        for function, _ in extension._functions
    }


def test_who_opens_a_nic_does_not_wait_for_ethernet():
    """Of Ethernet, an engine that is opened has what calls extensions, and two small functions about SQs."""
    found = {name for name in names(engine.run) if name.startswith(OF_ETHERNET)}
    eth_send = "gpunetio.nic.transport.eth_send"
    assert found - set(entries()) == {f"{eth_send}.waits", f"{eth_send}.clear_send_queue"}


def test_extensions_have_what_opening_leaves_out():
    """All of Ethernet is reached from some extension: nothing is called that no one loads."""
    reached = set().union(*map(names, entries().values()))
    for name in ("eth_frame.send_packet", "eth_segment.send_segments", "eth_receive.receive_frame"):
        assert f"gpunetio.nic.transport.{name}" in reached
    assert "gpunetio.nic.steering.steer.look_up_fate" in reached
    assert "gpunetio.fabric.ethernet_receive.receive_frames" in reached
