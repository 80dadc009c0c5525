"""Masked atomics of the software NIC, which mlx5 calls extended: words of 4 and 8 bytes, on one NIC and on two."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunetio import Gpu, kernel
from gpunetio.enums import QpAtomicType
from gpunetio.jit import ops
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    CS,
    LOCAL_LENGTH,
    LOCAL_QP_OP,
    MASKED_CS,
    MASKED_FA,
    NOP,
    ON_ERROR,
    OPMOD,
    REMOTE_INVALID,
    REQ,
    Buffer,
    Ends,
    atomic,
    error_of,
    masked_cs,
    masked_fa,
    reports_of,
    until,
)

BOTH_SIZES = pytest.mark.parametrize("nbytes", [4, 8])
WORD = {4: np.dtype("<u4"), 8: np.dtype("<u8")}
RESULT = {4: "big", 8: "little"}  # the byte order of what comes back


@pytest.fixture(params=[("soft0",), ("soft0", "soft1")], ids=["loopback", "wire"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    opened = Ends.open(*request.param)
    yield opened
    opened.close()


@pytest.fixture
def two(ends: Ends) -> Ends:
    """Two QPs that may do extended atomics to each other."""
    ends.again(atomic_type=QpAtomicType.UP_TO_8BYTES)
    return ends


def put(ends: Ends, opcode: int, operands: bytes, nbytes: int, at: int, **fields: int) -> int:
    """A masked atomic on `there` at byte `at`, whose result goes to the same place of `here`."""
    segments = ends.there.remote(at), operands, ends.here.at(at, nbytes)
    return ends.a.put(opcode, *segments, opmod=OPMOD[nbytes], **fields)


def set_words(buffer: Buffer, words: list[int], nbytes: int) -> None:
    buffer.bytes[: nbytes * len(words)] = np.array(words, WORD[nbytes]).view(np.uint8)


def words(buffer: Buffer, count: int, nbytes: int) -> list[int]:
    return buffer.bytes[: nbytes * count].view(WORD[nbytes]).tolist()


def results(buffer: Buffer, count: int, nbytes: int) -> list[int]:
    raw = buffer.bytes.tobytes()
    return [int.from_bytes(raw[i * nbytes : (i + 1) * nbytes], RESULT[nbytes]) for i in range(count)]  # type: ignore[arg-type]


def run(ends: Ends, opcode: int, old: list[int], operands: list[bytes], nbytes: int) -> list[int]:
    """The words that atomics leave, one a word, after a look at what they bring."""
    count = len(old)
    set_words(ends.there, old, nbytes)
    guard = ends.there.bytes[nbytes * count :].copy()
    for i, each in enumerate(operands):
        put(ends, opcode, each, nbytes, i * nbytes, ce=ON_ERROR)
    ends.a.post(NOP)
    cqe = ends.a.done.next()
    assert (cqe.opcode, cqe.wqe_opcode) == (REQ, NOP)
    assert results(ends.here, count, nbytes) == old
    assert np.array_equal(ends.there.bytes[nbytes * count :], guard)
    return words(ends.there, count, nbytes)


# --- what they do ----------------------------------------------------------------------------------------------------


@BOTH_SIZES
def test_fetch_and_add(two, nbytes):
    """Without boundaries the word is one field, and a carry out of it is lost."""
    most = (1 << 8 * nbytes) - 1
    cases = [(0, 1), (5, 7), (most, 1), (most, most), (most // 2, 1), (0x0123_4567, most)]
    left = run(two, MASKED_FA, [old for old, _ in cases], [masked_fa(add, 0, nbytes) for _, add in cases], nbytes)
    assert left == [(old + add) & most for old, add in cases]


@BOTH_SIZES
def test_fetch_and_add_of_bytes(two, nbytes):
    """A boundary at each byte's top bit: NumPy adds bytes in the same way."""
    random = np.random.default_rng(nbytes)
    old, add = (random.integers(0, 256, (8, nbytes), np.uint8) for _ in range(2))
    old[0], add[0] = 0xFF, 0x01  # each byte has a carry
    numbers = [each.reshape(-1).view(WORD[nbytes]).tolist() for each in (old, add)]
    boundary = int.from_bytes(b"\x80" * nbytes)
    left = run(two, MASKED_FA, numbers[0], [masked_fa(each, boundary, nbytes) for each in numbers[1]], nbytes)
    assert left == (old + add).reshape(-1).view(WORD[nbytes]).tolist()


@BOTH_SIZES
def test_fetch_and_add_of_bits_is_xor(two, nbytes):
    """With a boundary at each bit nothing is carried at all."""
    most = (1 << 8 * nbytes) - 1
    cases = [(0x1234_5678, 0xFFFF_0000), (most, most), (0, most), (0xAAAA_AAAA, 0x5555_5555)]
    left = run(two, MASKED_FA, [old for old, _ in cases], [masked_fa(add, most, nbytes) for _, add in cases], nbytes)
    assert left == [old ^ add for old, add in cases]


@BOTH_SIZES
def test_compare_and_swap(two, nbytes):
    """Only the bits in the masks are compared, and swapped; of what fails nothing is written."""
    most = (1 << 8 * nbytes) - 1
    cases = {
        (0x1122_3344, 99, 0x1122_3344, most, most): 99,  # the plain one
        (0x1122_3344, 99, 0x1122_3345, most, most): 0x1122_3344,
        (0x1122_3344, 99, 0, most, 0): 99,  # compares nothing: an exchange
        (0x1122_3344, 0, 0, 0x0000_FF00, 0): 0x1122_0044,  # and with the other bits
        (0x1122_3344, most, 0, 0x8000_0001, 0): 0x9122_3345,  # or
        (0x1122_3344, 0xAAAA_5566, 0xFFFF_FF44, 0x0000_FFFF, 0x0000_00FF): 0x1122_5566,
        (0x1122_3344, 0xAAAA_5566, 0x1122_3345, 0x0000_FFFF, 0x0000_00FF): 0x1122_3344,
        (most, 0, most, 0, most): most,  # it compares, and swaps nothing
        (most, 0, 0, most, 1 << 8 * nbytes - 1): most,
    }
    operands = [masked_cs(swap, compare, bits, compared, nbytes) for _, swap, compare, bits, compared in cases]
    assert run(two, MASKED_CS, [old for old, *_ in cases], operands, nbytes) == list(cases.values())


def test_any_operands(two):
    """Against the definition, bit by bit: a field's sum, and bits that are swapped or stay."""

    @settings(max_examples=25)
    @given(st.sampled_from([4, 8]), st.data())
    def any_operands(nbytes, data):
        old, one, other, mask, compare_mask = (data.draw(st.integers(0, (1 << 8 * nbytes) - 1)) for _ in range(5))
        total = swapped = carry = 0
        matches = bin((old ^ other) & compare_mask).count("1") == 0
        for bit in range(8 * nbytes):
            a, b, top = (word >> bit & 1 for word in (old, one, mask))
            total |= (a + b + carry & 1) << bit
            carry = 0 if top else (a + b + carry) >> 1
            swapped |= (b if matches and top else a) << bit
        assert run(two, MASKED_FA, [old], [masked_fa(one, mask, nbytes)], nbytes) == [total]
        assert run(two, MASKED_CS, [old], [masked_cs(one, other, mask, compare_mask, nbytes)], nbytes) == [swapped]

    any_operands()


@BOTH_SIZES
def test_completion(two, nbytes):
    """It names the opcode and counts the word's bytes."""
    index = put(two, MASKED_FA, masked_fa(1, 0, nbytes), nbytes, 0)
    two.a.ring()
    cqe = two.a.done.next()
    assert (cqe.opcode, cqe.wqe_opcode, cqe.counter, cqe.byte_cnt) == (REQ, MASKED_FA, index, nbytes)


def test_result_in_pieces(two):
    """The old word goes where the data segments say, in the order of its bytes."""
    two.there.set_word(0, 0x0102_0304_0506_0708)
    two.a.put(MASKED_FA, two.there.remote(), masked_fa(0, 0, 4), two.here.at(0, 3), two.here.at(100, 1), opmod=0x08)
    two.a.put(MASKED_FA, two.there.remote(), masked_fa(0, 0, 8), two.here.at(8, 6), two.here.at(200, 2), opmod=0x09)
    two.a.ring()
    two.a.done.take(2)
    here = two.here.bytes.tobytes()
    assert here[:3] + here[100:101] == (0x0506_0708).to_bytes(4, "big")
    assert here[8:14] + here[200:202] == (0x0102_0304_0506_0708).to_bytes(8, "little")


def test_two_blocks_around_the_end_of_the_ring(two):
    """The compare and swap of 8 bytes has 5 segments: its data segment is in the second block."""
    ring = two.a.qp.sq_entries
    for lap in range(3):
        while two.a.index % ring != ring - 1:
            two.a.post(NOP, ce=ON_ERROR)
        until(two.a.idle, "room in the ring")
        two.there.set_word(0, lap)
        index = put(two, MASKED_CS, masked_cs(lap + 100, lap, -1 % (1 << 64), -1 % (1 << 64), 8), 8, 0)
        two.a.ring()
        assert two.a.done.next().counter == index
        assert two.a.index == index + 2
        assert (two.there.word(), two.here.word()) == (lap + 100, lap)


@kernel
def add_with_compare_and_swap(word, times, out):
    """The CPU's side: 4 bytes at a time, and in 8-byte words where there is an addition for them."""
    for _ in range(times):
        old = ops.ld_relaxed32(word)
        found = ops.cas_sys32(word, old, old + 1)
        while found != old:
            old = found
            found = ops.cas_sys32(word, old, old + 1)
        ops.fetch_add_sys64(word + 8, 1)
    ops.st64(out, 1)


def test_atomic_with_what_the_cpu_does(two):
    """While a kernel adds to the same words nothing is lost, of 4 bytes or of 8, however the NIC adds."""
    times, rounds = 200_000, 300
    with Gpu("host") as host, host.alloc(4096) as out:
        launch = add_with_compare_and_swap[1, 1, host](two.there.bytes.ctypes.data, times, out)
        posted = 0
        while not launch.done or posted < rounds:
            for _ in range(4):
                put(two, MASKED_FA, masked_fa(1 << 16, 1 << 15, 4), 4, 0, ce=ON_ERROR)
                put(two, MASKED_FA, masked_fa(1, 0, 8), 8, 8, ce=ON_ERROR)
            two.a.post(NOP)
            assert two.a.done.next().opcode == REQ
            posted += 4
        assert launch.wait(60)
    assert two.there.word() == (times + (posted << 16)) & 0xFFFF_FFFF
    assert two.there.word(8) == times + posted


# --- what is refused -------------------------------------------------------------------------------------------------


@BOTH_SIZES
def test_atomic_mode(ends, nbytes):
    """The specification's atomics are all that IB_SPEC allows; UP_TO_8BYTES allows both kinds."""
    for mode, masked, plain in (
        (QpAtomicType.UP_TO_8BYTES, True, True), (QpAtomicType.IB_SPEC, False, True), (QpAtomicType.NONE, False, False),
    ):
        ends.again(atomic_type=mode)
        ends.a.post(CS, ends.there.remote(), atomic(1, 2), ends.here.at(0, 8))
        assert (ends.a.done.next().opcode == REQ) == plain
        ends.again(atomic_type=mode)
        put(ends, MASKED_FA, masked_fa(1, 0, nbytes), nbytes, 0)
        ends.a.ring()
        cqe = ends.a.done.next()
        assert (cqe.opcode == REQ) == masked
        if not masked:
            ends.refused(cqe, REMOTE_INVALID, Reason.QP_RIGHTS)
            *_, report = reports_of(ends.b.nic, ends.b.qp.qpn)
            assert "UP_TO_8BYTES" in report.message


@pytest.mark.parametrize(("nbytes", "offset", "allowed"), [
    (4, 4, True), (4, 12, True), (4, 2, False), (4, 7, False), (8, 16, True), (8, 4, False), (8, 15, False),
])
def test_alignment(two, nbytes, offset, allowed):
    """A word lies at a multiple of its own size."""
    two.a.post(MASKED_FA, two.there.remote(offset), masked_fa(1, 0, nbytes), two.here.at(0, nbytes),
               opmod=OPMOD[nbytes])
    cqe = two.a.done.next()
    if allowed:
        assert cqe.opcode == REQ
        assert two.there.bytes[offset] == 1
    else:
        two.refused(cqe, REMOTE_INVALID, Reason.ATOMIC_ALIGNMENT)
        assert not two.there.bytes.any()


def test_region_that_is_aligned_differently(two):
    """What counts is where the word is in memory, too."""
    region = Buffer(two.b.qp.pd, 64)
    with two.b.qp.pd.register(region.bytes[2:], iova=0) as mr:
        two.a.post(MASKED_FA, (0).to_bytes(8) + mr.rkey.to_bytes(4) + bytes(4), masked_fa(1, 0, 4), two.here.at(0, 4),
                   opmod=0x08)
        two.refused(two.a.done.next(), REMOTE_INVALID, Reason.ATOMIC_ALIGNMENT)
        two.again()


@pytest.mark.parametrize(("opcode", "opmod", "operands", "nbytes", "syndrome", "reason"), [
    (MASKED_FA, 0x00, masked_fa(1, 0, 8), 8, LOCAL_QP_OP, Reason.WQE_OPMOD),
    (MASKED_CS, 0x0A, masked_cs(1, 0, 1, 1, 8), 8, LOCAL_QP_OP, Reason.WQE_OPMOD),
    (MASKED_FA, 0x08, masked_fa(1, 0, 4), 8, LOCAL_LENGTH, Reason.ATOMIC_LENGTH),
    (MASKED_FA, 0x09, masked_fa(1, 0, 8), 4, LOCAL_LENGTH, Reason.ATOMIC_LENGTH),
    (MASKED_CS, 0x08, masked_cs(1, 0, 1, 1, 4), 5, LOCAL_LENGTH, Reason.ATOMIC_LENGTH),
])
def test_malformed(two, opcode, opmod, operands, nbytes, syndrome, reason):
    before = two.there.bytes.copy()
    two.a.post(opcode, two.there.remote(), operands, two.here.at(0, nbytes), opmod=opmod)
    assert error_of(two.a.done.next()) == (syndrome, reason)
    assert np.array_equal(two.there.bytes, before)


def test_masks_without_data(two):
    """Four segments are enough for all masked atomics but the compare and swap of 8 bytes."""
    two.a.post(MASKED_CS, two.there.remote(), masked_cs(1, 0, 1, 1, 8)[:16], opmod=0x09)
    assert error_of(two.a.done.next()) == (LOCAL_QP_OP, Reason.WQE_MALFORMED)
