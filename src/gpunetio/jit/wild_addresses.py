"""Survive a host thread whose kernel accesses an address without memory.

The process continues, as it does when a kernel on a GPU faults. The signal handler lets the thread continue in a Python
function, which ends the thread's part of the launch and never returns, because the frames below it on the stack were
interrupted. docs/decisions/lost-memory.md says why the NIC's own threads are not saved like this.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Callable, Iterator
from typing import Any

from ..formats.layout import Entry
from ..once import once
from .compile import engine_function
from .fault_signals import ACTIONS_BYTES, FaultHandler, address_of, by_fault, code_of, memory_of_handler, pass_on
from .ops import ld64, st64, thread_record

# Registers in the ucontext_t of 64-bit Linux: those of the first three arguments, the stack pointer, and the program
# counter (sys/ucontext.h); and the bytes between a stack aligned to 16 and the stack pointer at a function's first
# instruction (the return address of a call on x86-64).
_REGISTERS = {
    "x86_64": ((104, 112, 136), 160, 168, 8),
    "aarch64": ((184, 192, 200), 432, 440, 0),
}
_FIRST, _SECOND, _THIRD = _REGISTERS.get(platform.machine(), _REGISTERS["x86_64"])[0]
_STACK, _COUNTER, _CALL = _REGISTERS.get(platform.machine(), _REGISTERS["x86_64"])[1:]
_BELOW = 256  # more than the bytes below the stack pointer that a function may use without moving it (128 on x86-64)
_SI_KERNEL = 0x80  # code of a fault whose address the processor does not report

# Words of a thread in the record of its launch (host_threads.py).
STATE_WORD, RECORD_WORDS = 8, 9
_RUNS, _FAULTED, _RAISED = 0, 1, 2

# Once per process: the previous actions of the signals, and where a thread continues.
_SHARED = Entry("wild_addresses", ACTIONS_BYTES + 8, f"""
    continues      {ACTIONS_BYTES}  i64
""")
_shared: Any = ctypes.create_string_buffer(_SHARED.size)
_shared_address = memory_of_handler("gpunetio_wild_addresses", _shared)

_libc: Any = ctypes.CDLL(None)


@engine_function
def _handle(number, info, context):
    record = thread_record()
    if record != 0:
        state = record + 8 * STATE_WORD
        if by_fault(info) and ld64(state) != _FAULTED:
            st64(state, _FAULTED)
            st64(context + _FIRST, record)
            st64(context + _SECOND, address_of(info))
            st64(context + _THIRD, code_of(info))
            st64(context + _STACK, (ld64(context + _STACK) - _BELOW) // 16 * 16 - _CALL)
            st64(context + _COUNTER, ld64(_shared_address() + _SHARED.continues))
            return
        if not by_fault(info) and ld64(state) == _RUNS:
            # Another handler took the fault first, and raised the signal again. After a return, the fault recurs.
            st64(state, _RAISED)
            return
    pass_on(_shared_address(), number, info, context)


# --- the Python side -----------------------------------------------------------------------------------------------

# By the address of a thread's record: the function to call with the address of a fault (None if it is not known).
_told: dict[int, Callable[[int | None], None]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int64)
def _continue(record: int, address: int, code: int) -> None:
    """Report the fault of a thread, which continues here, and never return."""
    try:
        _told[record](None if code == _SI_KERNEL else address)
    finally:
        while True:
            _libc.pause()


@once
def _install() -> FaultHandler | None:
    """Install the handler for good. Return None on other processors."""
    if platform.machine() not in _REGISTERS:
        return None
    _SHARED.at(memoryview(_shared))["continues"] = ctypes.cast(_continue, ctypes.c_void_p).value
    handler = FaultHandler(_handle, ctypes.addressof(_shared))
    handler.install()
    return handler


@contextlib.contextmanager
def survived(record: int, tell: Callable[[int | None], None]) -> Iterator[None]:
    """Call `tell` with the address if this thread faults in the block. The block then never ends.

    `record` is the address of the thread's record. On processors other than x86-64 and 64-bit Arm, the process dies.
    """
    _install()
    _told[record] = tell
    try:
        yield
    finally:
        del _told[record]
