"""Report on stderr while the user waits for the compiler.

If a root takes longer than a second, a line goes to stderr and to the log, at INFO, and another one every 15 seconds
after that. A non-empty GPUNETIO_QUIET keeps the lines off stderr.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..log import tell_who_waits

PATIENCE = 1.0  # seconds before the first line
PERIOD = 15.0  # seconds between lines
_NIC = Path(__file__).parents[1] / "nic"


@contextmanager
def told(function: Any) -> Iterator[None]:
    """Report, inside the block, that a function is being compiled."""
    over = threading.Event()
    line = f"compiling {_name(function)}; once for this machine"
    threading.Thread(target=_tell, args=(line, over), name="gpunetio compiling", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(line: str, over: threading.Event) -> None:
    pause = PATIENCE
    while not over.wait(pause):
        pause = PERIOD
        tell_who_waits(line)


def _name(function: Any) -> str:
    if function.extension is not None:
        return function.extension.name
    file = Path(function.py_func.__code__.co_filename)
    return "the NIC" if _NIC in file.parents else function.__name__
