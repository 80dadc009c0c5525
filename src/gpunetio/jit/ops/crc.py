"""Carry-less multiplication, of polynomials over GF(2), for CRCs."""

# pyright: reportReturnType=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import platform

from llvmlite import ir

from ..processor import cpu_features
from .lowering import INT, counted, op, stacked

# Bit-reflected, as CRC-32 (IEEE 802.3) is: the lowest bit of the first byte is the highest power of x. On x86,
# PCLMULQDQ multiplies if the processor that is compiled for has it; the cache is also per processor.

CRC32_POLYNOMIAL = 0xEDB88320  # reflected, without x³²


def x_to_the(n: int) -> int:
    """Return x^n modulo the polynomial of CRC-32, reflected: bit 31 is the coefficient of 1. x has order 2³² - 1."""
    result, power = 1 << 31, 1 << 30
    n %= (1 << 32) - 1
    while n:
        if n & 1:
            result = _polynomial_product(result, power)
        power = _polynomial_product(power, power)
        n >>= 1
    return result


def _polynomial_product(a: int, b: int) -> int:
    product = 0
    for bit in reversed(range(32)):
        if b >> bit & 1:
            product ^= a
        a = a >> 1 ^ (CRC32_POLYNOMIAL if a & 1 else 0)
    return product


def _clmul_lanes() -> int:
    """Return the number of 64-bit products per instruction: 0 without PCLMULQDQ, 1 with it, 2 or 4 with VPCLMULQDQ."""
    features = cpu_features().split(",")
    if platform.machine() != "x86_64" or "+pclmul" not in features:
        return 0
    if "+vpclmulqdq" not in features or "+avx2" not in features:
        return 1
    return 4 if "+avx512f" in features else 2


@op(ret=32, cpu=lambda b: INT[32](int(_clmul_lanes() > 0)), cuda=lambda b: INT[32](0))
def has_clmul() -> int:
    """Return 1 where `crc32_fold` works. Folds at compile time."""


_PAIR = ir.VectorType(INT[64], 2)
_PCLMULQDQ = {2: "llvm.x86.pclmulqdq", 4: "llvm.x86.pclmulqdq.256", 8: "llvm.x86.pclmulqdq.512"}


def _pclmul(b, x, y, halves):
    """Multiply a half of `x` and one of `y` in each lane. Bit 0 of `halves` selects that of `x`, bit 4 that of `y`."""
    fnty = ir.FunctionType(x.type, [x.type, x.type, INT[8]])
    return b.call(b.module.declare_intrinsic(_PCLMULQDQ[x.type.count], (), fnty), [x, y, INT[8](halves)])


def _clmul(b, x, y):
    if _clmul_lanes():
        x, y = (b.insert_element(ir.Constant(_PAIR, [0, 0]), v, INT[32](0)) for v in (x, y))
        return b.extract_element(_pclmul(b, x, y, 0x00), INT[32](0))
    return _clmul_by_bits(b, x, y)


def _clmul_by_bits(b, x, y):
    product = stacked(b, INT[64](0))
    with counted(b, INT[64](64)) as index:
        bit = b.and_(b.lshr(y, index), INT[64](1))
        term = b.and_(b.shl(x, index), b.sub(INT[64](0), bit))
        b.store(b.xor(b.load(product), term), product)
    return b.load(product)


@op(64, 64, ret=64, cpu=_clmul, cuda=_clmul_by_bits)
def clmul(a: int, b: int) -> int:
    """Return the lower 64 bits of the carry-less product."""


def _fold(b, x, nbytes):
    """Fold each lane `nbytes` forward (Gopal et al., Intel 323102, for reflected CRCs)."""
    halves = [x_to_the(8 * nbytes + 32) << 1, x_to_the(8 * nbytes - 32) << 1]
    constants = ir.Constant(x.type, halves * (x.type.count // 2))
    return b.xor(_pclmul(b, x, constants, 0x00), _pclmul(b, x, constants, 0x11))


def _crc32_fold(b, initial, address, nbytes):
    lanes = _clmul_lanes()
    if not lanes:
        return INT[64](0)

    def load(at, lanes=1):
        return b.load(b.inttoptr(at, ir.VectorType(INT[64], 2 * lanes).as_pointer()), align=1)

    def first(lanes=1):
        zero = ir.Constant(ir.VectorType(INT[64], 2 * lanes), [0] * 2 * lanes)
        return b.xor(load(address, lanes), b.insert_element(zero, initial, INT[32](0)))

    def fold_all(x, at, lanes):
        """Fold the rest, from `at` to `end`, into `x`, in steps of the size of `x`."""
        last = b.sub(end, INT[64](16 * lanes))
        with _while(b, lambda: b.icmp_unsigned("<=", b.load(at), last)):
            b.store(b.xor(_fold(b, b.load(x), 16 * lanes), load(b.load(at), lanes)), x)
            b.store(b.add(b.load(at), INT[64](16 * lanes)), at)

    end = b.add(address, nbytes)
    x = stacked(b, first())
    at = stacked(b, b.add(address, INT[64](16)))

    step = 64 * lanes
    with b.if_then(b.icmp_unsigned(">=", nbytes, INT[64](step))):
        # Four streams hide the latency of a product, several cycles. Only they are live in this loop.
        wide = [first(lanes)] + [load(b.add(address, INT[64](16 * lanes * i)), lanes) for i in (1, 2, 3)]
        streams = [stacked(b, value) for value in wide]
        b.store(b.add(address, INT[64](step)), at)
        last = b.sub(end, INT[64](step))
        with _while(b, lambda: b.icmp_unsigned("<=", b.load(at), last)):
            for i, stream in enumerate(streams):
                data = load(b.add(b.load(at), INT[64](16 * lanes * i)), lanes)
                b.store(b.xor(_fold(b, b.load(stream), step), data), stream)
            b.store(b.add(b.load(at), INT[64](step)), at)
        for stream in streams[1:]:
            b.store(b.xor(_fold(b, b.load(streams[0]), 16 * lanes), b.load(stream)), streams[0])
        if lanes > 1:
            fold_all(streams[0], at, lanes)
        whole = b.load(streams[0])
        for i in range(lanes):
            lane = b.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(INT[32], 2), [2 * i, 2 * i + 1]))
            b.store(lane if i == 0 else b.xor(_fold(b, b.load(x), 16), lane), x)

    fold_all(x, at, 1)
    rest = b.sub(end, b.load(at))
    with b.if_then(b.icmp_unsigned("!=", rest, INT[64](0))):
        # `rest` bytes are left. The bytes of x before the last 16 are folded forward. The other bytes of x join the
        # bytes that are left.
        bits = b.shl(b.zext(rest, INT[128]), INT[128](3))
        others = b.sub(INT[128](128), bits)
        whole = b.bitcast(b.load(x), INT[128])
        carried = b.bitcast(b.shl(whole, others), _PAIR)
        left = b.shl(b.lshr(b.bitcast(load(b.sub(end, INT[64](16))), INT[128]), others), others)
        b.store(b.xor(_fold(b, carried, 16), b.bitcast(b.or_(b.lshr(whole, bits), left), _PAIR)), x)

    # Reduce 128 bits to 96, and these to 64. The bytes are followed by 32 zero bits, as in any CRC.
    to_96, to_64 = (ir.Constant(_PAIR, [x_to_the(bits) << 1, 0]) for bits in (96, 64))
    x = b.load(x)
    high = b.zext(b.extract_element(x, INT[32](1)), INT[128])
    x = b.xor(b.bitcast(_pclmul(b, x, to_96, 0x00), INT[128]), high)
    low = b.bitcast(b.and_(x, INT[128](0xFFFF_FFFF)), _PAIR)
    x = b.xor(b.bitcast(_pclmul(b, low, to_64, 0x00), INT[128]), b.lshr(x, INT[128](32)))
    return b.trunc(x, INT[64])


@contextlib.contextmanager
def _while(b, condition):
    """Emit a loop that tests first and has one branch per turn."""
    body, after = b.append_basic_block("body"), b.append_basic_block("after")
    b.cbranch(condition(), body, after)
    b.position_at_end(body)
    yield
    b.cbranch(condition(), body, after)
    b.position_at_end(after)


@op(64, 64, 64, ret=64, cpu=_crc32_fold, cuda=lambda b, *args: INT[64](0))
def crc32_fold(initial: int, address: int, nbytes: int) -> int:
    """Reduce at least 16 bytes, followed by 32 zero bits, to 64 bits that are congruent modulo the polynomial.

    `initial`, the CRC register so far, is XORed into the first 8 bytes. Only if `has_clmul`.
    """
