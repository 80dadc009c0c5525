"""SipHash-2-4 of 8 bytes (Aumasson and Bernstein, 2012), a keyed hash: nobody can predict it without the key."""

from __future__ import annotations

from ..jit.compile import device_function

_V0, _V1, _V2, _V3 = 0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573
_LENGTH = 8 << 56  # the last word: the length of the input
_WHILE_MIXING, _AT_THE_END = 2, 4  # rounds


@device_function
def _rotated(word: int, bits: int) -> int:
    return word << bits | word >> 64 - bits & (1 << bits) - 1


@device_function
def _mixed(v0: int, v1: int, v2: int, v3: int, rounds: int) -> tuple[int, int, int, int]:
    for _ in range(rounds):
        v0, v2 = v0 + v1, v2 + v3
        v1, v3 = _rotated(v1, 13) ^ v0, _rotated(v3, 16) ^ v2
        v0 = _rotated(v0, 32)
        v2, v0 = v2 + v1, v0 + v3
        v1, v3 = _rotated(v1, 17) ^ v2, _rotated(v3, 21) ^ v0
        v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


@device_function
def siphash(key_low: int, key_high: int, word: int) -> int:
    """Return the hash of a word: 64 bits, as a signed integer. Words begin with their least significant byte."""
    v0, v1, v2, v3 = key_low ^ _V0, key_high ^ _V1, key_low ^ _V2, key_high ^ _V3
    v0, v1, v2, v3 = _mixed(v0, v1, v2, v3 ^ word, _WHILE_MIXING)
    v0, v1, v2, v3 = _mixed(v0 ^ word, v1, v2, v3 ^ _LENGTH, _WHILE_MIXING)
    v0, v1, v2, v3 = _mixed(v0 ^ _LENGTH, v1, v2 ^ 0xFF, v3, _AT_THE_END)
    return v0 ^ v1 ^ v2 ^ v3
