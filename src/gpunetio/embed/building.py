"""Compile the C libraries of this package, once per machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import DocaError, InitializationError, NotPermittedError, NotSupportedError
from ..kept import DamagedError, read_kept, turn_to_make, users_folder, write_kept
from ..trusted import make_trusted_folder

HEADER = Path(__file__).with_name("python.h")
_OPTIONS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-ldl", f"-I{HEADER.parent}")
_TIMEOUT = 100
_CURE = "set XDG_CACHE_HOME to a folder of yours that only you may write"


def _digest(source: Path, options: Sequence[str]) -> str:
    """Return a hash of everything that determines the library's contents: several machines may share a home directory.
    """
    headers = sorted({*HEADER.parent.glob("*.h"), *source.parent.glob("*.h")})
    machine = platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or ""
    parts = [path.read_bytes() for path in (source, *headers)] + ["\0".join((*options, *machine)).encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def library(name: str, source: Path, user: str, more: Sequence[str] = (), **texts: str) -> Path:
    """Return the shared object `name`, which is compiled from a C file if necessary.

    `more` are options of the compiler, `texts` macros that expand to string literals. `user` is the command that needs
    the library, for messages.

    NotSupportedError without a C compiler; InitializationError if the compiler fails or cannot write the file;
    NotPermittedError if another user could replace the library.
    """
    options = [*_OPTIONS, *more, *(f"-D{macro}={_literal(text)}" for macro, text in texts.items())]
    folder = users_folder()
    if folder is None:
        raise InitializationError("this user has no home folder: set XDG_CACHE_HOME to a folder of yours")
    made = folder / _digest(source, options) / name
    if _is_whole(made):
        return made
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NotSupportedError(
            f"`{user}` compiles a small library once, and there is no C compiler: install one (apt install gcc), "
            "or name it in the environment variable CC"
        )
    try:
        make_trusted_folder(made.parent, cure=_CURE)
        with turn_to_make(made, _TIMEOUT):
            if not _is_whole(made):  # another process may have compiled it in the meantime
                write_kept(made, _compiled(compiler, source, options))
    except DocaError:
        raise
    except OSError as error:
        raise InitializationError(f"{made} cannot be written: {error.strerror}") from None
    return made


def _is_whole(library: Path) -> bool:
    """Return whether the library exists and is intact. NotPermittedError if it is not trusted."""
    try:
        read_kept(library, cure=_CURE)
    except NotPermittedError:
        raise
    except (OSError, DamagedError):
        return False
    return True


def _compiled(compiler: str, source: Path, options: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="gpunetio-") as folder:
        made = Path(folder, "made.so")
        try:
            done = subprocess.run(
                [compiler, source, *options, "-o", made], capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise InitializationError(f"{compiler} did not compile {source.name} within {_TIMEOUT} s") from None
        if done.returncode != 0:
            raise InitializationError(f"{compiler} cannot compile {source.name}: {done.stderr.strip()}")
        return made.read_bytes()


def _literal(text: str) -> str:
    """Return text as a string literal of C."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
