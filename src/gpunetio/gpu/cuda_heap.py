"""CUDA memory, which is freed only when freeing does not block.

cudaFree and cudaFreeHost block while any kernel runs *(measured, H200)*. That kernel may be waiting for something that
the caller does next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass

from ..jit.launch import observers, running


@dataclass(frozen=True)
class Block:
    """An allocation, and the function that frees it. Blocks of one `kind` are interchangeable."""

    base: int
    kind: Hashable
    free: Callable[[int], object]


class CudaHeap:
    """Unused blocks: freed when no kernel runs, or reused before that.

    There is no lock, because finalizers return blocks and may run at any point. List operations are atomic.
    """

    def __init__(self) -> None:
        self._unused: list[Block] = []

    def give_back(self, block: Block) -> None:
        """Free a block, now or later."""
        self._unused.append(block)
        self._free_if_idle()

    def take(self, kind: Hashable) -> Block | None:
        """Return an unused block of this kind, or None. The block still has its old contents."""
        for block in self._unused[:]:
            if block.kind == kind:
                with suppress(ValueError):  # another thread took it
                    self._unused.remove(block)
                    return block
        return None

    def follow_launches(self) -> None:
        """Register for the ends of kernels. A forked child loses its parent's observers and must call this again."""
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
