"""Run examples as separate processes."""

import os
import re
import subprocess
import sys

from repository import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> tuple[int, list[str], str]:
    """Exit status, lines of stdout with warnings as errors, stderr."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments], capture_output=True, text=True,
        timeout=100, env={**os.environ, "PYTHONPATH": path},
    )
    return done.returncode, re.sub(r"QP 0x\w+", "QP", done.stdout).splitlines(), done.stderr
