"""Paths in the repository, and the environment in which another Python process can import what this one can."""

import os
import sys
from pathlib import Path

RIGS = Path(__file__).parent
DATA = RIGS.parent / "data"
ROOT = RIGS.parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that can import all that this one can: the package, and the rigs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
