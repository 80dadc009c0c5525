"""The kernel of a slice: one block, whose warps have each their part (slices.py)."""

from __future__ import annotations

from ..jit.ops import block_sync, dynamic_shared, thread_idx
from .copies import HELPERS
from .slices import prepare_slice, take_part

THREADS = 32 * (2 + HELPERS)
OPTIONS = ("-maxrregcount=128",)


def gpunetio_slice(nic):
    """Make a slice of turns of the worker whose record is at `nic`."""
    near = dynamic_shared()
    if thread_idx() == 0:
        prepare_slice(near)
    block_sync()
    take_part(nic, near, thread_idx() >> 5)
