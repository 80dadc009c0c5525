"""Print a message before the process dies because the memory of a region was unmapped.

A handler of SIGSEGV and SIGBUS checks whether an engine's thread has faulted. If so, it prints the NIC and the region
to stderr. Then, as for any other thread, it passes the signal on to the previous handler: faulthandler, or the system,
which ends the process. It deliberately does no more: docs/decisions/lost-memory.md says why.

The handler is compiled, because it runs without Python. It calls only functions that signal-safety(7) lists.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...formats.layout import Entry
from ...jit.compile import engine_function
from ...jit.fault_signals import ACTIONS_BYTES, FaultHandler, address_of, by_fault, memory_of_handler, pass_on
from ...jit.ops import ld64, ld8, st64, st8
from ...jit.ops.calls import external
from ...jit.struct_view import struct_view
from ...once import once
from ..state.objects import MKEY_ROW, UMEM_ROW, MkeyRow
from ..state.tables import Table

MOST = 64  # engines registered at a time
_MR_TEXT = (
    "gpunetio: {name} found no memory at 0x{0}: MR 0x{1} [0x{2}, +0x{3}) was unmapped, or its file truncated, while it "
    "was registered. Close an MR before you free its memory.\n"
)
_UMEM_TEXT = (
    "gpunetio: {name} found no memory at 0x{0}: UMEM 0x{1} [0x{2}, +0x{3}) was unmapped, or its file truncated, while "
    "it was registered. Close a UMEM before you free its memory.\n"
)
_ADDRESS, _KEY = "#" * 16, "#" * 8  # replaced by hexadecimal digits
_TEXT_BYTES = 320

# An engine: its thread, the address of the word with that of a helper (host/loop.py), its tables, and the messages for
# a region and a UMEM. `reported`: a message was printed.
ENGINE = Entry("known_engine", 64 + 2 * _TEXT_BYTES, """
    thread           0  i64
    reported         8  i64
    mkeys           16  i64
    mkey_mask       24  i64
    umems           32  i64
    umem_mask       40  i64
    raised          48  i64
    helper          56  i64
""")
_MR_TEXT_AT, _UMEM_TEXT_AT = 64, 64 + _TEXT_BYTES

# State of the process: the previous actions of the signals, and the engines. On the heap, a forked child has a copy.
_ENGINES_AT = ACTIONS_BYTES
_state: Any = ctypes.create_string_buffer(_ENGINES_AT + MOST * ENGINE.size)
_state_address = memory_of_handler("gpunetio_known_engines", _state)

_write = external("write", 32, 64, 64, ret=64)
_pthread_self = external("pthread_self", ret=64)

_engine_at, _umem_row_at = struct_view(ENGINE), struct_view(UMEM_ROW)
_HASH, _ZERO, _TEN = ord("#"), ord("0"), ord("a") - 10


@engine_function
def _fill(at: int, value: int) -> int:
    """Write `value` in hexadecimal over the next sequence of # in a text. Return the address after it."""
    while ld8(at) != _HASH:
        at += 1
    end = at
    while ld8(end) == _HASH:
        end += 1
    digit = end
    while digit != at:
        digit -= 1
        nibble = value & 15
        st8(digit, nibble + (_ZERO if nibble < 10 else _TEN))
        value >>= 4
    return end


@engine_function
def _print_message(text: int, address: int, number: int, start: int, nbytes: int) -> None:
    at = _fill(_fill(_fill(_fill(text, address), number), start), nbytes)
    while ld8(at) != 0:
        at += 1
    _write(2, text, at - text)


@engine_function
def _report(engine: int, address: int) -> None:
    """Print a message about the region, or else the UMEM, in which an address lies."""
    e = _engine_at(engine)
    for i in range(e.mkey_mask + 1):
        mkey = MkeyRow(e.mkeys + i * MKEY_ROW.size)
        start = mkey.iova + mkey.delta
        if mkey.key != 0 and start <= address and address < start + mkey.nbytes:
            _print_message(engine + _MR_TEXT_AT, address, mkey.key, start, mkey.nbytes)
            return
    for i in range(e.umem_mask + 1):
        u = _umem_row_at(e.umems + i * UMEM_ROW.size)
        if u.umem_id != 0 and u.addr <= address and address < u.addr + u.nbytes:
            _print_message(engine + _UMEM_TEXT_AT, address, u.umem_id, u.addr, u.nbytes)
            return


@engine_function
def _own_engine() -> int:
    """Return the engine whose turn this thread is making, or 0."""
    thread = _pthread_self()
    for i in range(MOST):
        engine = _state_address() + _ENGINES_AT + i * ENGINE.size
        first = ld64(engine + ENGINE.thread)
        if first != 0 and (first == thread or ld64(ld64(engine + ENGINE.helper)) == thread):
            return engine
    return 0


@engine_function
def _handle(number: int, info: int, context: int) -> None:
    engine = _own_engine()
    if engine != 0 and by_fault(info) and ld64(engine + ENGINE.reported) == 0:
        st64(engine + ENGINE.reported, 1)
        _report(engine, address_of(info))
    if engine != 0 and not by_fault(info) and ld64(engine + ENGINE.reported) + ld64(engine + ENGINE.raised) == 0:
        # Another handler took the fault first, and raised the signal again. Return, and the fault occurs again.
        st64(engine + ENGINE.raised, 1)
        return
    pass_on(_state_address(), number, info, context)


# --- the Python side -----------------------------------------------------------------------------------------------

_engines = np.frombuffer(_state, ENGINE.dtype, MOST, _ENGINES_AT)
_lock = threading.Lock()


def _after_fork() -> None:
    """Forget the engines in a forked child: they are the parent's, and other threads may get the same thread IDs."""
    global _lock
    _lock = threading.Lock()
    _engines[:] = np.zeros((), ENGINE.dtype)


os.register_at_fork(after_in_child=_after_fork)


@once
def handler() -> FaultHandler:
    """Return the handler."""
    return FaultHandler(_handle, ctypes.addressof(_state))


@contextlib.contextmanager
def reporting(name: str, helper: int, mkeys: Table, umems: Table) -> Iterator[None]:
    """Report faults of this engine's thread in memory of these tables, and of a helper, whose word is at `helper`.

    Faults of engines beyond MOST are not reported.
    """
    with _lock:
        free = np.flatnonzero(_engines["thread"] == 0)
        if len(free):
            if len(free) == MOST:
                handler().install()
            _enter(int(free[0]), name, helper, mkeys, umems)
    try:
        yield
    finally:
        with _lock:
            if len(free):
                _engines[free[0]]["thread"] = 0
                if not _engines["thread"].any():
                    handler().uninstall()


def _enter(place: int, name: str, helper: int, mkeys: Table, umems: Table) -> None:
    engine = _engines[place]
    start = _ENGINES_AT + place * ENGINE.size
    for at, text in ((_MR_TEXT_AT, _MR_TEXT), (_UMEM_TEXT_AT, _UMEM_TEXT)):
        message = text.format(_ADDRESS, _KEY, _ADDRESS, _ADDRESS, name=name[:32]).encode()
        _state[start + at : start + at + len(message) + 1] = message + b"\0"
    engine["reported"] = engine["raised"] = 0
    engine["helper"] = helper
    engine["mkeys"], engine["mkey_mask"] = mkeys.address, mkeys.mask
    engine["umems"], engine["umem_mask"] = umems.address, umems.mask
    engine["thread"] = threading.get_ident()  # pthread_self(), in CPython on Linux
