"""Loads of words at even addresses, where the headers of a packet lie.

A GPU loads a word only from a multiple of the word's size. Ethernet headers have 14 bytes, so what follows them in a
frame is at an address that only 2 divides.
"""

from __future__ import annotations

from ...jit.compile import device_function
from ...jit.ops import ld16, ld32, ld64, on_host


@device_function
def ld32_even(address: int) -> int:
    """Return the 32 bits at an even address."""
    if on_host():
        return ld32(address)
    return ld16(address) | ld16(address + 2) << 16


@device_function
def ld64_even(address: int) -> int:
    """Return the 64 bits at an even address."""
    if on_host():
        return ld64(address)
    return ld32_even(address) | ld32_even(address + 4) << 32
