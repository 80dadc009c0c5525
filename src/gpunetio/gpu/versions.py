"""Versions of the interface between host code and device code: the structures and protocols of GPUNetIO 2.0.

They are `major << 16 | minor << 8 | patch`. The package's own version is `gpunetio.__version__`.
"""

from __future__ import annotations

from ..errors import NotSupportedError
from ..verbs.arguments import whole

VERSION = 2 << 16  # 2.0.0: the structures of 2.0.1 are the same, and so says its library
_OLDEST = {"device": VERSION, "host": VERSION}  # 2.0.1 says 0.2.0 for host code, by a slip that 2.0.2 corrects


def library_version() -> int:
    """The version of GPUNetIO's interface that this package has (`doca_gpu_verbs_get_library_version`)."""
    return VERSION


def check_device_code_compatibility(version: int) -> None:
    """NotSupportedError unless device code of that version works with queues exported here.

    `doca_gpu_verbs_check_device_code_compatibility`: for kernels that were compiled elsewhere.
    """
    _check("device", version)


def check_host_code_compatibility(version: int) -> None:
    """NotSupportedError unless host code written for that version finds its functions here.

    `doca_gpu_verbs_check_host_code_compatibility`.
    """
    _check("host", version)


def _check(side: str, version: int) -> None:
    version = whole("version", version)
    if not _OLDEST[side] <= version <= VERSION:
        raise NotSupportedError(
            f"{side} code of version {_text(version)} is not compatible: {_text(_OLDEST[side])} to {_text(VERSION)} are"
        )


def _text(version: int) -> str:
    return f"{version >> 16}.{version >> 8 & 0xFF}.{version & 0xFF} ({version:#08x})"
