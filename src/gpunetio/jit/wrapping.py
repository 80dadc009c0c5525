"""Sums and products of signed integers modulo 2⁶⁴: what addresses, sequence numbers and hashes are made of.

Numba tells LLVM that they do not overflow (`nsw`), which spares its arrays a look at negative indices. Whatever LLVM
concludes from that is wrong for numbers that do.
"""

from __future__ import annotations

from typing import Any

_NO_OVERFLOW = "nsw"  # no signed wrap


def let_wrap(module: Any) -> None:
    """Clear that flag of all instructions of a function's IR."""
    for function in module.functions:
        for block in function.blocks:
            for instruction in block.instructions:
                if _NO_OVERFLOW in instruction.flags:
                    instruction.flags.remove(_NO_OVERFLOW)
                    instruction._clear_string_cache()  # of a module that was printed before
