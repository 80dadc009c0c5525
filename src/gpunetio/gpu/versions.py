"""Versions of the interface between host code and device code: the structures and protocols of GPUNetIO 2.0.

A version is `major << 16 | minor << 8 | patch`. The package's own version is `gpunetio.__version__`.
"""

from __future__ import annotations

from ..arguments import whole
from ..errors import NotSupportedError

VERSION = 2 << 16  # 2.0.0; 2.0.1 has the same structures, and its library reports 2.0.0
_OLDEST = {"device": VERSION, "host": VERSION}  # 2.0.1 reports 0.2.0 for host code, a mistake that 2.0.2 corrects


def library_version() -> int:
    """Return the GPUNetIO interface version that this package implements (`doca_gpu_verbs_get_library_version`)."""
    return VERSION


def check_device_code_compatibility(version: int) -> None:
    """Raise NotSupportedError unless device code of that version works with queues exported here.

    `doca_gpu_verbs_check_device_code_compatibility`: for kernels that were compiled elsewhere.
    """
    _check("device", version)


def check_host_code_compatibility(version: int) -> None:
    """Raise NotSupportedError unless host code written for that version finds its functions here.

    `doca_gpu_verbs_check_host_code_compatibility`.
    """
    _check("host", version)


def _check(side: str, version: int) -> None:
    version = whole("version", version)
    if not _OLDEST[side] <= version <= VERSION:
        raise NotSupportedError(
            f"{side} code of version {_text(version)} is not compatible: use {_text(_OLDEST[side])} to {_text(VERSION)}"
        )


def _text(version: int) -> str:
    return f"{version >> 16}.{version >> 8 & 0xFF}.{version & 0xFF} ({version:#08x})"
