"""Memory of CUDA's, which is given back when that takes no time.

cudaFree and cudaFreeHost return when no kernel runs any more *(measured, H200)*, and a kernel may wait for what their
caller does next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..device.launch import observers, running


@dataclass(frozen=True)
class Block:
    """An allocation, and the function that frees it. Blocks of one `kind` are alike, and can stand for each other."""

    base: int
    kind: Hashable
    free: Callable[[int], Any]


class CudaHeap:
    """Blocks that nobody uses: freed when no kernel runs, or used again before that.

    Without a lock, as blocks are given back by finalizers, which run anywhere: lists change atomically.
    """

    def __init__(self) -> None:
        self._unused: list[Block] = []

    def give_back(self, block: Block) -> None:
        """Free a block, now or later."""
        self._unused.append(block)
        self._free_if_idle()

    def take(self, kind: Hashable) -> Block | None:
        """A block of this kind that is not freed yet. What it holds is as it was left."""
        for block in self._unused[:]:
            if block.kind == kind:
                with suppress(ValueError):  # somebody else was faster
                    self._unused.remove(block)
                    return block
        return None

    def follow_launches(self) -> None:
        """Hear of the ends of kernels. A forked child, which its parent's observers leave, has to ask again."""
        if self._on_kernels not in observers:
            observers.append(self._on_kernels)

    def _on_kernels(self, change: int) -> None:
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        with suppress(IndexError):
            while running() == 0:
                block = self._unused.pop()
                block.free(block.base)


cuda_heap: CudaHeap = CudaHeap()
