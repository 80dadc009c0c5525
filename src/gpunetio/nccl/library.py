"""The shared object that NCCL loads."""

from __future__ import annotations

from pathlib import Path

from ..embed import building, python

NAME = "libnccl-gin-gpunetio.so"
# Threads of Python may still run when NCCL unloads the library.
_OPTIONS = ("-fvisibility=hidden", "-Wl,-z,nodelete")


def plugin() -> Path:
    """Return the path of the plugin, which is compiled once for this machine and this Python.

    NotSupportedError without a C compiler; InitializationError if the compiler fails.
    """
    how = {f"PYTHON_{member.upper()}": text for member, text in python.description().items()}
    return building.library(NAME, Path(__file__).with_name("plugin.c"), "gpunetio nccl-plugin", _OPTIONS, **how)
