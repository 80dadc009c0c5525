"""Compiles preload.c, once for this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from ..errors import InitializationError, NotSupportedError

_SOURCE = Path(__file__).with_name("preload.c")
_OPTIONS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-ldl")
_TIMEOUT = 100


def _cache() -> Path:
    """Return the user's folder for what can be made anew (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpunetio"


def library() -> Path:
    """Return the compiled library. NotSupportedError without a C compiler; InitializationError if it fails."""
    name = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_OPTIONS).encode()).hexdigest()[:16]
    made = _cache() / f"libgpunetio-uverbs.{name}.so"
    if made.exists():
        return made
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NotSupportedError(
            "`gpunetio run` compiles a small library once, and there is no C compiler: install one (apt install gcc), "
            "or name it in the environment variable CC"
        )
    made.parent.mkdir(parents=True, exist_ok=True)
    fresh = made.with_suffix(f".{os.getpid()}.new")  # two processes may compile at once
    done = subprocess.run(
        [compiler, _SOURCE, *_OPTIONS, "-o", fresh], capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    if done.returncode != 0:
        raise InitializationError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()}")
    fresh.replace(made)
    return made
