"""Report on stderr while the user waits for the compiler.

Numba reports when it begins to compile a function, and when it is done. If one of our functions takes longer than a
second, a line goes to stderr and to the log, at INFO, and then another one every 15 seconds. A non-empty GPUNETIO_QUIET
keeps the lines off stderr.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from numba.core.dispatcher import Dispatcher
from numba.core.event import Listener

from ..log import tell_who_waits
from .cache import keeps_nothing

PATIENCE = 1.0  # seconds before the first line
PERIOD = 15.0  # seconds between lines
_NIC = Path(__file__).parents[1] / "nic"


class Progress(Listener):
    """Reports the outermost compilation, which includes those inside it. Numba compiles in one thread at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._over = threading.Event()

    def on_start(self, event: Any) -> None:
        self._depth += 1
        root = (event.data or {}).get("dispatcher")
        if self._depth == 1 and hasattr(root, "units"):
            self._over = threading.Event()
            threading.Thread(target=_tell, args=(root, self._over), name="gpunetio compiling", daemon=True).start()

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._over.set()


def _tell(root: Dispatcher, over: threading.Event) -> None:
    parts: set[Any] = set(parts_of(root))
    pause = PATIENCE
    while not over.wait(pause):
        pause = PERIOD
        done = sum(part.units.done for part in parts)
        tell_who_waits(f"compiling {_name(root)}, {done} of {len(parts)} functions; {_how_often(root)}")


def parts_of(root: Dispatcher) -> Iterator[Dispatcher]:
    """Yield the compiled function and everything that it calls."""
    seen = {root}
    todo = [root]
    while todo:
        part = todo.pop()
        yield part
        names = part.py_func.__code__.co_names
        named = [part.py_func.__globals__.get(name) for name in names]
        named += [getattr(module, name, None) for module in named if isinstance(module, ModuleType) for name in names]
        found = {value for value in named if isinstance(value, Dispatcher) and hasattr(value, "units")}
        todo += found - seen
        seen |= found


def _name(root: Any) -> str:
    if extension := getattr(root, "extension", None):
        return extension.name
    return "the NIC" if _NIC in Path(inspect.getfile(root.py_func)).parents else root.py_func.__name__


def _how_often(root: Any) -> str:
    return "again in every process" if keeps_nothing(root._cache) else "once for this machine"
