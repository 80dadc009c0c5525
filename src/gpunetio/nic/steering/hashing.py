"""The hash of masked words, which selects an entry's slot in the hash table of its mask."""

from __future__ import annotations

from ...jit.compile import device_function

START = 0x1F83D9AB5BE0CD19  # an arbitrary number: fractional bits of √17, as in SHA-512
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # modulo 2⁶⁴: that divided by the golden ratio (Knuth, volume 3, 6.4)


@device_function
def mix(hash_: int, word: int) -> int:
    """Return the hash of a sequence of words: `hash_` is the hash of all words but the last, which is `word`.

    The low bits of a product depend only on the low bits of its factors. So the upper half is folded into the lower
    half before the multiplication and after it: low bits select a slot, and a field may be anywhere in a word.
    `mix.py_func` also takes arrays.
    """
    both = hash_ ^ word
    product = (both ^ (both >> 32 & 0xFFFFFFFF)) * _FACTOR
    return product ^ (product >> 32 & 0xFFFFFFFF)
