"""Where things lie in the repository, and how another Python process finds what this one can import."""

import os
import sys
from pathlib import Path

RIGS = Path(__file__).parent
DATA = RIGS.parent / "data"
ROOT = RIGS.parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that can import all that this one can: the package, and the rigs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
