"""The stamp of the package's compiled code: a hash of all that it may contain, and of what compiled it.

Numba's cache checks only the function's own file, so after an edit of a callee stale code would run. What functions of
programs contain besides the package's code is found by frozen.py.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

import llvmlite
import numba

PACKAGE = Path(__file__).parents[1]

# A regular expression: parsing the package with `ast` would take a third of a program's start-up time.
_IMPORT = re.compile(r"^[ \t]*from (\.+)([\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@functools.cache
def _files(folder: str) -> frozenset[str]:
    """Return the names of what lies in a folder; none if there is no such folder."""
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()


@functools.cache
def _read(path: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the hash of a module, and the package's modules that its relative imports name."""
    with open(path, "rb") as file:
        source = file.read()
    found = []
    for dots, module, names in _IMPORT.findall(source.decode()):
        base = path
        for _ in dots:
            base = os.path.dirname(base)
        base = os.path.join(base, *filter(None, module.split(".")))
        above, name = os.path.split(base)
        if f"{name}.py" in _files(above):
            found.append(f"{base}.py")
        found += [os.path.join(base, file) for file in _modules(names) & _files(base)]
    return hashlib.sha256(source).digest(), tuple(found)


def _modules(names: str) -> set[str]:
    return {"__init__.py", *(f"{name}.py" for name in re.findall(r"\w+", names))}


@functools.cache
def _sources_of(path: str) -> tuple[str, ...]:
    seen: set[str] = set()
    todo = [path]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += _read(module)[1]
    return tuple(sorted(seen))


def sources_of(path: Path) -> tuple[Path, ...]:
    """Return a module and all modules of the package that it imports, directly or not: its code may contain theirs."""
    return tuple(map(Path, _sources_of(str(path))))


@functools.cache
def is_ours(file: str) -> bool:
    """Return whether a file is one of this package."""
    return PACKAGE in Path(file).parents


@functools.cache
def stamp_of(file: str) -> str:
    """Return a hash of everything that a module's compiled functions may contain, and of the compiler's versions."""
    digest = hashlib.sha256(f"numba {numba.__version__}, llvmlite {llvmlite.__version__}".encode())
    for source in _sources_of(file):
        digest.update(_read(source)[0])
    return digest.hexdigest()
