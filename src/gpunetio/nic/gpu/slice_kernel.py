"""The kernel of a slice: a block whose warps have different roles (slices.py), and blocks that only copy."""

from __future__ import annotations

from ...jit.ops import block_idx, block_sync, dynamic_shared, thread_idx
from ..memory.copies import COPY_WARPS, copy_from_board
from .slices import prepare_slice, take_part

THREADS = 32 * (2 + COPY_WARPS)
OPTIONS = ("-maxrregcount=128",)
PREFERRED = "nvvm"  # libNVVM's code executes small requests 5 to 12 % faster than LLVM's


def gpunetio_slice(worker: int, board: int, number: int) -> None:
    """Make slice `number` of a worker's turns. Blocks that only copy find their work on `board`."""
    if block_idx() == 0:
        shared = dynamic_shared()
        prepare_slice(shared, number)
        block_sync()
        take_part(worker, shared, number, thread_idx() >> 5)
    else:
        copy_from_board(board, number)
