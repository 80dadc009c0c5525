"""Handlers of SIGSEGV and SIGBUS that look at a fault first, and pass it on to the handler before them.

A handler is compiled, because it runs without Python, in the thread that faulted. It calls only functions that
signal-safety(7) lists.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

from llvmlite import binding, ir

from ..formats.layout import Entry
from .c_function import c_function
from .compile import DeviceFunction, engine_function
from .ops import call_c, ld32, ld64
from .ops.calls import external
from .ops.lowering import INT, Op, nothing

# struct sigaction of 64-bit Linux: handler, mask of 128 bytes, flags, restorer. siginfo_t: signo, errno, code, address.
_ACTION = Entry("sigaction", 152, """
    handler          0  i64
    flags          136  i32
""")
_SA_SIGINFO, _SA_ONSTACK = 4, 0x0800_0000
_CODE, _ADDRESS = 8, 16
_DEFAULT_OR_IGNORED = 1
_SIGNALS = (int(signal.SIGSEGV), int(signal.SIGBUS))
_SIGBUS = int(signal.SIGBUS)

ACTIONS_BYTES = len(_SIGNALS) * _ACTION.size  # where a handler keeps the actions before its own

_libc: Any = ctypes.CDLL(None, use_errno=True)
_sigaction = external("sigaction", 32, 64, 64, ret=32)
_raise = external("raise", 32, ret=32)


def memory_of_handler(symbol: str, memory: Any) -> Any:
    """Return a function for compiled code that returns the address of a ctypes buffer, which outlives all handlers.

    The function finds the address by a symbol: the address itself would be frozen into code that other processes load.
    """
    binding.add_symbol(symbol, ctypes.addressof(memory))

    def memory_address() -> int: ...

    def emit(b):
        known: Any = b.module.globals.get(symbol) or ir.GlobalVariable(b.module, INT[8], symbol)
        return b.ptrtoint(known, INT[64])

    memory_address.__name__ = symbol
    return Op(memory_address, (), 64, emit, nothing)


@engine_function
def by_fault(info):
    """Return whether the thread faulted. Otherwise kill() or a similar call has sent the signal."""
    return 0 < ld32(info + _CODE) < 1 << 31


@engine_function
def code_of(info):
    """Return the kind of the fault (si_code)."""
    return ld32(info + _CODE)


@engine_function
def address_of(info):
    """Return the address that was accessed (si_addr)."""
    return ld64(info + _ADDRESS)


@engine_function
def pass_on(actions, number, info, context):
    """Call the previous handler, whose actions are at `actions`, or let the system end the process."""
    before = actions + (_ACTION.size if number == _SIGBUS else 0)
    handler = ld64(before)
    if handler > _DEFAULT_OR_IGNORED:
        call_c(handler, number, info, context, 0)
        return
    _sigaction(number, before, 0)
    if not by_fault(info):
        _raise(number)


# Handlers are installed and removed one at a time: a handler that finds itself on top stays there until it is removed.
_changing = threading.Lock()


def _after_fork() -> None:
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class FaultHandler:
    """A handler: an engine function of a signal's number, siginfo_t and ucontext_t.

    `actions` is the address of ACTIONS_BYTES for the previous actions. Keep the handler as long as the process lives:
    handlers that are installed later may call it.
    """

    def __init__(self, function: DeviceFunction, actions: int):
        self._address, self._actions = c_function(function, 32, 64, 64), actions
        self._installed = [False] * len(_SIGNALS)

    def install(self) -> None:
        """Install the handler, unless a handler that was installed later still calls it."""
        ours = ctypes.create_string_buffer(_ACTION.size)
        action = _ACTION.at(memoryview(ours))
        action["handler"], action["flags"] = self._address, _SA_SIGINFO | _SA_ONSTACK
        with _changing:
            for n, number in enumerate(_SIGNALS):
                if not self._installed[n]:
                    _exchange(number, ctypes.addressof(ours), self._actions + n * _ACTION.size)
                    self._installed[n] = True

    def uninstall(self) -> None:
        """Remove the handler, unless a handler that was installed later may call it."""
        with _changing:
            for n, number in enumerate(_SIGNALS):
                if self._is_on_top(number):
                    _exchange(number, self._actions + n * _ACTION.size, 0)
                    self._installed[n] = False

    def _is_on_top(self, number: int) -> bool:
        now = ctypes.create_string_buffer(_ACTION.size)
        _exchange(number, 0, ctypes.addressof(now))
        return int(_ACTION.at(memoryview(now))["handler"]) == self._address


def _exchange(number: int, action: int, before: int) -> None:
    if _libc.sigaction(number, ctypes.c_void_p(action), ctypes.c_void_p(before)):
        code = ctypes.get_errno()
        raise OSError(code, f"sigaction({number}): {os.strerror(code)}")
