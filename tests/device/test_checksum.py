"""The Internet checksum of any number of bytes at any address, against its definition (RFC 1071)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.device.checksum import checksum, fold, internet_sum, raw_sum, update_checksum
from gpunetio.jit.compile import engine_function
from guarded import Guarded

MEMORY = Guarded()


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


@given(st.binary(max_size=200))
def test_no_byte_behind_the_end_is_read(data):
    """The page behind it cannot be read."""
    assert internet_sum(MEMORY.put(data), len(data)) == defined(data)


@given(st.binary(min_size=2, max_size=100), st.data())
def test_updates_give_what_is_computed_anew(data, draw):
    """RFC 1624: a field of 2, 4 or 6 bytes at an even offset changes."""
    data = data[: len(data) & -2]
    size = draw.draw(st.sampled_from([size for size in (2, 4, 6) if size <= len(data)]))
    at = 2 * draw.draw(st.integers(0, (len(data) - size) // 2))
    changed = data[:at] + draw.draw(st.binary(min_size=size, max_size=size)) + data[at + size :]
    before = checksum(MEMORY.put(data), len(data))
    old, new = (int.from_bytes(some[at : at + size], "big") for some in (data, changed))
    after = int(update_checksum(before, old, new))
    assert after % 0xFFFF == (0xFFFF - defined(changed)) % 0xFFFF
    assert not any(changed) or after == 0xFFFF - defined(changed)
