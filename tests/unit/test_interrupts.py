"""Ctrl+C at any moment: what is being made or closed is made or closed whole, and memory outlives the engine."""

import inspect
import signal
import subprocess
import sys
import threading

import pytest

import gpunetio as gn
from gpunetio.errors import TimedOutError
from gpunetio.interrupts import allowed, deferred, uninterrupted, until_terminated
from gpunetio.service import ServiceThread
from repository import RIGS


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(count: int, seed: int, timeout: float) -> None:
    gn.open("soft0").close()  # compiled here, if it must be: the child has a deadline
    child = subprocess.run(
        [sys.executable, RIGS / "interrupted_child.py", str(count), str(seed)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )
    assert child.returncode == 0, f"{child.returncode}\n{child.stderr[-4000:]}"
    assert child.stdout.startswith(f"{count} interrupts"), child.stdout


@pytest.mark.soft_nic
def test_interrupts_at_random_moments():
    interrupted(150, 1, 100)


@pytest.mark.soft_nic
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_two_thousand_interrupts_at_random_moments():
    interrupted(2000, 2, 400)


@pytest.mark.soft_nic
def test_nothing_is_freed_before_the_engine_has_stopped(monkeypatch):
    ctx = gn.open("soft0")
    nic = ctx.provider.nic  # type: ignore[attr-defined]
    monkeypatch.setattr(nic.engine._workers[0]._thread, "join", lambda: False)
    with pytest.raises(TimedOutError, match="the engine of soft0 did not stop"):
        ctx.close()
    assert not nic._control.closed
    with pytest.raises(TimedOutError, match="the engine of soft0 did not stop"):
        gn.open("soft0")
    monkeypatch.undo()
    with gn.open("soft0") as again:
        assert again.provider.nic is not nic  # type: ignore[attr-defined]
    assert nic._control.closed


@pytest.mark.soft_nic
def test_an_engine_is_alive_until_it_says_otherwise():
    with gn.open("soft0") as ctx:
        engine = ctx.provider.nic.engine  # type: ignore[attr-defined]
        thread = engine._workers[0]._thread._thread
        thread._is_stopped, thread._tstate_lock = True, None  # as in Python 3.11 when a signal interrupts is_alive()
        assert engine.running
        ctx.create_pd().close()
    assert not engine.running


def test_an_interrupt_waits_for_the_end():
    steps = []

    @deferred()
    def inner() -> None:
        interrupt()
        steps.append("inner")

    @deferred()
    def outer() -> None:
        inner()
        steps.append("outer")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            outer()
    assert steps == ["inner", "outer"] * 2
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_what_takes_long_can_be_interrupted():
    steps = []

    @deferred()
    def make() -> None:
        try:
            with allowed():
                interrupt()
                steps.append("not reached")
        finally:
            interrupt()  # noted again
            steps.append("cleaned up")

    @deferred()
    def too_late() -> None:
        interrupt()
        with allowed():
            steps.append("not reached either")

    for function in (make, too_late):
        with pytest.raises(KeyboardInterrupt):
            function()
    assert steps == ["cleaned up"]


def test_what_nobody_will_get_is_closed():
    class Made:
        closed = False

        def close(self) -> None:
            self.closed = True

    made = Made()

    def make() -> Made:
        interrupt()
        return made

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(make)
    assert made.closed


def test_a_handler_of_the_program_is_called_and_stays():
    heard = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: heard.append(frame is not None))
    try:
        with deferred():
            interrupt()
            assert heard == []
        assert heard == [True]
        interrupt()
        assert heard == [True, True]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(action):
    before = signal.signal(signal.SIGINT, action)
    try:
        with deferred(), allowed():
            assert signal.getsignal(signal.SIGINT) == action
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_interrupted_anyway():
    found, go = [], threading.Event()

    def look() -> None:
        go.wait(10)
        with deferred(), allowed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = ServiceThread("look", look)
    thread.start()
    go.set()
    assert thread.join(10)
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_thread_runs_until_its_last_step():
    go = threading.Event()
    thread = ServiceThread("waits", go.wait)
    assert not thread.running
    thread.start()
    assert thread.running
    assert not thread.is_current
    assert not thread.join(0.01)
    go.set()
    assert thread.join(10)
    assert not thread.running
    thread.start()
    assert thread.join(10)


def test_help_shows_the_arguments_of_what_is_made_whole():
    assert list(inspect.signature(gn.Gpu).parameters) == ["which", "warp", "queue_memory"]
    assert str(inspect.signature(gn.Gpu).parameters["warp"]) == "warp: 'int' = 1"


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_sigterm_does_what_ctrl_c_does():
    with until_terminated(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with deferred() as interrupts:
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.came
        raise AssertionError("the interrupt is delivered at the end of deferred()")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_in_the_background_of_a_shell():
    """There, Ctrl+C is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), until_terminated():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_in_another_thread():
    def body():
        with until_terminated():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
