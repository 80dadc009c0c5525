"""Handlers of SIGSEGV and SIGBUS that are installed and removed at the same time."""

import ctypes
import signal
import threading

import pytest

from gpunetio.jit import fault_signals
from gpunetio.jit.fault_signals import ACTIONS_BYTES, FaultHandler
from gpunetio.memory import HostMemory

BEFORE = 7  # the handler that was there


@pytest.fixture
def now(monkeypatch) -> dict[int, int]:
    """The handler of each signal, as sigaction(2) would have it."""
    handlers = dict.fromkeys((signal.SIGSEGV, signal.SIGBUS), BEFORE)

    def exchange(number: int, action: int, before: int) -> None:
        if before:
            ctypes.c_int64.from_address(before).value = handlers[number]
        if action:
            handlers[number] = ctypes.c_int64.from_address(action).value

    monkeypatch.setattr(fault_signals, "_exchange", exchange)
    monkeypatch.setattr(fault_signals, "c_function", lambda function, *_: function)
    return handlers


def handler(address: int) -> FaultHandler:
    """Make a handler whose C function would be at this address."""
    return FaultHandler(address, HostMemory(ACTIONS_BYTES).address)  # type: ignore[arg-type]


def test_one_is_installed_while_another_is_removed(now, monkeypatch):
    """It stays: the other one must not put back what was there before both."""
    first, second = handler(1), handler(2)
    first.install()
    looked, installing = threading.Event(), threading.Thread(target=second.install, daemon=True)
    is_on_top = first._is_on_top

    def look(number: int) -> bool:
        found = is_on_top(number)
        if not looked.is_set():
            looked.set()
            installing.start()
            installing.join(0.5)  # it gets so far, or waits
        return found

    monkeypatch.setattr(first, "_is_on_top", look)
    first.uninstall()
    installing.join(30)
    assert now == {signal.SIGSEGV: 2, signal.SIGBUS: 2}
    second.uninstall()
    assert now == {signal.SIGSEGV: BEFORE, signal.SIGBUS: BEFORE}
