"""Describe this Python to programs in other languages that start it."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_PACKAGES = ("site-packages", "dist-packages")


def shared_library() -> str | None:
    """Return the shared library of this Python, or None if there is none."""
    get = sysconfig.get_config_var
    names = {get("INSTSONAME"), get("LDLIBRARY")} - {None}
    folders = [get("LIBDIR"), str(Path(sys.base_prefix) / "lib"), f"/usr/lib/{get('MULTIARCH')}"]
    for folder in folders:
        for name in sorted(names):
            path = Path(str(folder)) / name
            if ".so" in name and path.exists():
                return str(path)
    return None


def how_to_get_one() -> str:
    """Return instructions to get the shared library of this Python."""
    return (
        f"on Debian or Ubuntu, apt install libpython{sysconfig.get_python_version()}; else build Python with "
        "--enable-shared"
    )


def description(path: str | None = None) -> dict[str, str]:
    """Return the members of `struct python` in python.h, by name.

    `path` has the entries of `sys.path` for gpunetio and its dependencies. By default, these are the folder of this
    package and those of installed packages, which do not depend on the current folder.
    """
    own = str(Path(__file__).parents[2])
    found = [own, *(part for part in sys.path if Path(part).name in _PACKAGES)]
    return {
        "library": shared_library() or "",
        "home": sys.base_prefix,
        "version": sysconfig.get_python_version(),
        "path": os.pathsep.join(dict.fromkeys(found)) if path is None else path,
    }
