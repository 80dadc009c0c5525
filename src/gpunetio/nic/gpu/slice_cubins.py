"""Compile the kernel of slices for GPUs that need not be installed, and store the cubins with the compiled code.

    python -m gpunetio.nic.gpu.slice_cubins 9.0 10.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ...jit.cubin import cubin
from .slice_kernel import OPTIONS, PREFERRED, gpunetio_slice


def main(capabilities: Iterable[str]) -> None:
    """Compile for GPUs of these compute capabilities."""
    for capability in capabilities:
        major, _, minor = capability.partition(".")
        cubin(gpunetio_slice, (int(major), int(minor)), OPTIONS, PREFERRED)


if __name__ == "__main__":
    main(sys.argv[1:])
