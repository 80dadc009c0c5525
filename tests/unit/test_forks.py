"""Processes that fork while another thread compiles."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from numba.core.compiler_lock import global_compiler_lock

import gpunetio.jit.compile  # noqa: F401  # which lets forks wait
from gpunetio import compiler

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads, since Python 3.12


@contextmanager
def compiling() -> Iterator[threading.Event]:
    """Another thread, which compiles until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def compile_something() -> None:
        with global_compiler_lock:
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
        if global_compiler_lock._lock.acquire(timeout=5):
            global_compiler_lock._lock.release()
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


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiler, "_MOST_OF_FORK", 0.1)
    with compiling() as over:
        assert in_child(may_compile)
        assert not over.is_set()
        assert "forks while it compiles, as that has not ended within 0.1 s" in caplog.text
    assert may_compile()


def test_the_thread_that_compiles_may_fork() -> None:
    with global_compiler_lock:
        assert in_child(lambda: bool(global_compiler_lock.is_locked()))
        assert global_compiler_lock.is_locked()
    assert may_compile()
