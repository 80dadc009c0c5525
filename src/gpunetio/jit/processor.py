"""The host processor to compile for."""

from __future__ import annotations

import functools
import os

from llvmlite import binding as llvm

# To compile for a processor other than this one: its name and features, as LLVM writes them.
CPU_NAME, CPU_FEATURES = "GPUNETIO_CPU_NAME", "GPUNETIO_CPU_FEATURES"


def cpu_name() -> str:
    """Return the processor to compile for, as LLVM names it."""
    return os.environ.get(CPU_NAME) or llvm.get_host_cpu_name()


@functools.cache
def _features_here() -> str:
    return llvm.get_host_cpu_features().flatten()


def cpu_features() -> str:
    """Return the features of the processor to compile for: "+avx,-avx512f,…"."""
    given = os.environ.get(CPU_FEATURES)
    return _features_here() if given is None else given
