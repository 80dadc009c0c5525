"""Processes that fork while another thread compiles."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpunetio import compiler
from gpunetio.jit.compile import engine_function
from gpunetio.kept import turn_to_make

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads, since Python 3.12


@contextmanager
def compiling() -> Iterator[threading.Event]:
    """Another thread, which compiles until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def compile_something() -> None:
        with compiler.compiling():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=compile_something)
    thread.start()
    assert begun.wait(20)
    try:
        yield over
    finally:
        over.set()
        thread.join()


def may_compile() -> bool:
    """Whether a thread of this process could compile now, or soon."""

    def try_to() -> None:
        if compiler._lock.acquire(timeout=5):
            compiler._lock.release()
            could.set()

    could = threading.Event()
    thread = threading.Thread(target=try_to)
    thread.start()
    thread.join()
    return could.is_set()


def in_child(check: Callable[[], bool]) -> bool:
    """What a check returns in a forked child."""
    child = os.fork()
    if child == 0:
        passed = False
        try:
            passed = check()
        finally:
            os._exit(not passed)
    return os.waitpid(child, 0)[1] == 0


def test_a_fork_waits_until_nobody_compiles() -> None:
    with compiling() as over:
        timer = threading.Timer(0.3, over.set)
        timer.start()
        assert in_child(may_compile)
        assert over.is_set()
        timer.join()
    assert may_compile()


def test_the_thread_that_a_fork_waits_for_can_take_its_turn(tmp_path: Path) -> None:
    """And open its file: a fork that kept it from that would wait for it in vain."""
    begun = threading.Event()

    def compile_something() -> None:
        with compiler.compiling():
            begun.set()
            time.sleep(0.3)
            with turn_to_make(tmp_path / "made"):
                pass

    thread = threading.Thread(target=compile_something)
    thread.start()
    assert begun.wait(20)
    start = time.monotonic()
    assert in_child(may_compile)
    assert time.monotonic() - start < 20
    thread.join()


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiler, "_MOST_OF_FORK", 0.1)
    with compiling() as over:
        assert in_child(may_compile)
        assert not over.is_set()
        assert "forks while it compiles, as that has not ended within 0.1 s" in caplog.text
    assert may_compile()


def test_the_thread_that_compiles_may_fork() -> None:
    with compiler.compiling():
        assert in_child(lambda: is_mine() and not may_compile())
        assert is_mine()
    assert may_compile()


def is_mine() -> bool:
    """Whether this thread is the one that compiles."""
    owned: Any = compiler._lock
    return owned._is_owned()


def test_the_child_of_a_fork_compiles() -> None:
    """Also what its parent was compiling when it forked, which it waits for."""
    function = engine_function(doubled)
    thread = threading.Thread(target=function, args=(1,))
    thread.start()
    assert in_child(lambda: function(21) == 42)
    thread.join()


def doubled(x: int) -> int:
    return x + x
