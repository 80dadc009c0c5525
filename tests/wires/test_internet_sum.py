"""The Internet checksum of any number of bytes at any address, against its definition (RFC 1071)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.fabric.ip_headers import fold, internet_sum, raw_sum
from gpunetio.jit.compile import engine_function


@engine_function
def _sum_in_pieces(address, first, second):
    return fold(raw_sum(address, first) + raw_sum(address + first, second))


def defined(data: bytes) -> int:
    """Add words of 16 bits with end-around carry; a last byte is the upper half of a word."""
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2")
    total = int(words.sum(dtype=np.uint64))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@given(st.binary(max_size=300), st.integers(0, 9))
def test_any_bytes(data, before):
    memory = np.frombuffer(bytes(before) + data, np.uint8).copy()
    assert internet_sum(memory.ctypes.data + before, len(data)) == defined(data)


@given(st.binary(max_size=300), st.integers(0, 150))
def test_pieces_from_even_offsets_on(data, pairs):
    memory = np.frombuffer(data + b"\0", np.uint8).copy()
    first = min(2 * pairs, len(data) & -2)
    total = _sum_in_pieces(memory.ctypes.data, first, len(data) - first)
    assert int(total).to_bytes(2, "little") == defined(data).to_bytes(2, "big")


def test_the_longest_packet():
    memory = np.full(1 << 16, 0xFF, np.uint8)
    assert internet_sum(memory.ctypes.data, len(memory)) == 0xFFFF
