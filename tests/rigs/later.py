"""Calls of C functions after the end of Python (later.c)."""

import subprocess
from pathlib import Path

from repository import RIGS
from stand_in.building import compiler


def build(folder: Path) -> Path:
    """Compile the library whose `later(function, argument)` leaves a call to atexit(3), which prints its result."""
    library = folder / "later.so"
    command = compiler() or "cc", "-shared", "-fPIC", "-Wall", "-Werror", RIGS / "later.c", "-o", library
    subprocess.run(command, check=True, timeout=60)
    return library
