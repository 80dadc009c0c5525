"""Compiles the C libraries of this package, once for this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import InitializationError, NotSupportedError

HEADER = Path(__file__).with_name("python.h")
_OPTIONS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-ldl", f"-I{HEADER.parent}")
_TIMEOUT = 100


def _cache() -> Path:
    """Return the user's folder for what can be made anew (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpunetio"


def library(name: str, source: Path, user: str, more: Sequence[str] = (), **texts: str) -> Path:
    """Return the shared object `name` that is compiled from a C file.

    `more` are options of the compiler, `texts` macros that expand to string literals. `user` is the command that needs
    the library, for messages.
    NotSupportedError without a C compiler; InitializationError if the compiler fails or cannot write the file.
    """
    options = [*_OPTIONS, *more, *(f"-D{macro}={_literal(text)}" for macro, text in texts.items())]
    parts = (source.read_bytes(), HEADER.read_bytes(), "\0".join(options).encode())
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    made = _cache() / digest / name
    if made.exists():
        return made
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NotSupportedError(
            f"`{user}` compiles a small library once, and there is no C compiler: install one (apt install gcc), "
            "or name it in the environment variable CC"
        )
    fresh = made.with_suffix(f".{os.getpid()}.new")  # two processes may compile at once
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [compiler, source, *options, "-o", fresh], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
        if done.returncode != 0:
            raise InitializationError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()}")
        fresh.replace(made)
    except OSError as error:
        raise InitializationError(f"{made} cannot be written: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InitializationError(f"{compiler} did not compile {source.name} within {_TIMEOUT} s") from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return made


def _literal(text: str) -> str:
    """Return a string literal of C."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
