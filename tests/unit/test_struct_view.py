"""Fields of structures in compiled code: int64 in the order of the host, whatever they are in memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio.formats.layout import Entry
from gpunetio.jit.compile import engine_function
from gpunetio.jit.ops import ld64, st64
from gpunetio.jit.struct_view import struct_view
from gpunetio.jit.values import CompileError

ALL = Entry("all_kinds", 80, """
    byte      0  u8
    b16       1  be16
    b32       3  be32
    b64       7  be64
    l16      15  u16
    l32      17  u32
    l64      21  u64
    i32      29  i32
    i64      33  i64
    mac      41  raw[6]
    ip       47  raw[4]
    ip6      51  raw[16]
    rest     67  raw[13]
""")
# Of each attribute: where its bytes are, in which order, and whether it has a sign.
ATTRIBUTES = (
    (0, 1, "big", False), (1, 2, "big", False), (3, 4, "big", False), (7, 8, "big", True), (15, 2, "little", False),
    (17, 4, "little", False), (21, 8, "little", True), (29, 4, "little", True), (33, 8, "little", True),
    (41, 6, "big", False), (47, 4, "big", False), (51, 8, "big", True), (59, 8, "big", True),
)
all_at = struct_view(ALL, 1)


@engine_function
def _sum_of(row):
    return row.byte + row.b16


@engine_function
def read(address, out):
    row = all_at(address)
    st64(out, row.byte)
    st64(out + 8, row.b16)
    st64(out + 16, row.b32)
    st64(out + 24, row.b64)
    st64(out + 32, row.l16)
    st64(out + 40, row.l32)
    st64(out + 48, row.l64)
    st64(out + 56, row.i32)
    st64(out + 64, row.i64)
    st64(out + 72, row.mac)
    st64(out + 80, row.ip)
    st64(out + 88, row.ip6_high)
    st64(out + 96, row.ip6_low)
    return _sum_of(row)  # structures are arguments of functions, too


@engine_function
def write(address, values):
    row = all_at(address)
    row.byte = ld64(values)
    row.b16 = ld64(values + 8)
    row.b32 = ld64(values + 16)
    row.b64 = ld64(values + 24)
    row.l16 = ld64(values + 32)
    row.l32 = ld64(values + 40)
    row.l64 = ld64(values + 48)
    row.i32 = ld64(values + 56)
    row.i64 = ld64(values + 64)
    row.mac = ld64(values + 72)
    row.ip = ld64(values + 80)
    row.ip6_high = ld64(values + 88)
    row.ip6_low = ld64(values + 96)


@given(st.binary(min_size=80, max_size=80), st.integers(0, 7))
def test_reads(data, before):
    memory, out = np.frombuffer(bytes(before) + data, np.uint8).copy(), np.zeros(13, np.int64)
    total = read(memory.ctypes.data + before, out.ctypes.data)
    expected = [
        int.from_bytes(data[at : at + size], order, signed=signed) for at, size, order, signed in ATTRIBUTES
    ]
    assert out.tolist() == expected
    assert total == expected[0] + expected[1]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=13, max_size=13), st.integers(0, 7))
def test_writes(numbers, before):
    """The low bytes of a value are stored, and nothing else changes."""
    memory, values = np.full(before + 80, 0xEE, np.uint8), np.array(numbers, np.int64)
    write(memory.ctypes.data + before, values.ctypes.data)
    expected = bytearray(b"\xee" * 80)
    for (at, size, order, _), number in zip(ATTRIBUTES, numbers, strict=True):
        expected[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, order)
    assert memory.tobytes() == b"\xee" * before + bytes(expected)


@engine_function
def _of_no_field(address):
    return all_at(address).rest


def test_a_field_that_is_no_integer():
    with pytest.raises(CompileError, match="the structure all_kinds has no field rest; it has byte, b16, "):
        _of_no_field(0)


@engine_function
def _first(row):
    return row.first


@engine_function
def _firsts(address):
    return _first(one_at(address)) << 8 | _first(other_at(address))


one_at, other_at = (struct_view(Entry("pair", 2, f"first {at} u8")) for at in (0, 1))


def test_structures_of_the_same_name():
    memory = np.array([3, 5], np.uint8)
    assert _firsts(memory.ctypes.data) == 3 << 8 | 5
