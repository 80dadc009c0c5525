"""The hash of masked words, by which the entries of a mask are found."""

from __future__ import annotations

from ...jit.compile import device_function

START = 0x1F83D9AB5BE0CD19  # an arbitrary number: fractional bits of √17, as in SHA-512
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # modulo 2⁶⁴: that divided by the golden ratio (Knuth, volume 3, 6.4)


@device_function
def mix(hash_: int, word: int) -> int:
    """Return the hash of a sequence of words from that of all but the last.

    A product's low bits depend only on low bits of its factors. So the upper half is folded into the lower one before,
    and again after: slots are chosen by low bits, and fields may lie anywhere in a word. `mix.py_func` takes arrays.
    """
    both = hash_ ^ word
    product = (both ^ (both >> 32 & 0xFFFFFFFF)) * _FACTOR
    return product ^ (product >> 32 & 0xFFFFFFFF)
