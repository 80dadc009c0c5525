"""WQE builders: the bytes of each, in the ring and elsewhere, and what the NIC makes of them."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nic_model
from builder_kernels import BUILD, NAMES, build
from gpunetio import Gpu, MemType, device, verbs
from gpunetio.enums import QpAtomicType
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.wqe import (
    ATOMIC_SEG,
    CTRL_SEG,
    DATA_SEG,
    MASKED_CS32_SEG,
    MASKED_CS64_SEG,
    MASKED_FA32_SEG,
    MASKED_FA64_SEG,
    RADDR_SEG,
    WAIT_SEG,
    CtrlFlags,
    WqeOpcode,
)
from gpunetio.nic.state.reasons import Reason
from nic_rig import control, data, inline, raddr, view
from pair import Pair, make_pair

pytestmark = pytest.mark.host_memory  # it looks at rings and records

DEPTH = 16
CQ_UPDATE = int(CtrlFlags.CQ_UPDATE)
FILL = 0x77  # of memory that a builder must leave alone
Row = dict[str, Any]


def run_rows(pair: Pair, rows: list[Row], execute: bool = False) -> list[int]:
    table = np.zeros(len(rows), BUILD.dtype)
    table["flags"] = CQ_UPDATE
    for target, row in zip(table, rows):
        for name, value in row.items():
            target[name] = NAMES.index(value) if name == "what" else np.uint64(value & (1 << 64) - 1).astype(np.int64)
    with pair.gpu.alloc(max(64, table.nbytes), MemType.CPU_GPU) as memory, pair.gpu.alloc(4096, MemType.CPU_GPU) as out:
        memory.array[: table.nbytes] = table.view(np.uint8)
        assert build[1, 1, pair.gpu](pair.a, memory, len(rows), int(execute), out).wait(110)
        return out.array.view(np.int64)[: len(rows)].tolist()


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.gpu, id="cuda")])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A `Pair` whose first queue has a collapsed CQ, and whose second allows masked atomics."""
    with Gpu(request.param) as gpu, verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, DEPTH)
        opened.a.close()
        opened.a = gpu.create_qp(opened.pd, DEPTH, cq_collapsed=True)
        connect(opened)
        yield opened
        opened.a.close()
        opened.b.close()


def connect(pair: Pair) -> None:
    for end in (pair.a, pair.b):
        end.qp.reset()
        end.reset()
    pair.a.connect(pair.b, retry_cnt=2, rnr_retry=2, atomic_type=QpAtomicType.UP_TO_8BYTES)


# --- bytes -----------------------------------------------------------------------------------------------------------
#
# What the PRM says of each, by tests/rigs/nic_rig.py, which packs by `struct` and knows nothing of the formats' tables.

U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def big(*words: int, nbytes: int) -> bytes:
    return b"".join((word & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "big") for word in words)


def address(row: Row) -> bytes:
    return raddr(row["raddr"], row["rkey"])


def local(row: Row, nbytes: int | None = None) -> bytes:
    return data(row["laddr"], row["lkey"], row["nbytes"] & 0x7FFF_FFFF if nbytes is None else nbytes)


def local1(row: Row) -> bytes:
    return data(row["laddr1"], row["lkey1"], row["nbytes1"] & 0x7FFF_FFFF)


# Of each builder: opcode, immediate, opmod and the segments behind the control segment.
EXPECTED: dict[str, Callable[[Row], tuple[int, int, int, bytes]]] = {
    "nop": lambda r: (0x00, 0, 0, b""),
    "write": lambda r: (r["opcode"], r["imm"], 0, address(r) + local(r)),
    "write2": lambda r: (r["opcode"], r["imm"], 0, address(r) + local(r) + local1(r)),
    "write_value": lambda r: (  # all of the value, whatever its length
        0x08, 0, 0, address(r) + big(r["nbytes"] | 1 << 31, nbytes=4) + r["first"].to_bytes(8, "little") + bytes(4)
    ),
    "write_inline": lambda r: (0x08, 0, 0, address(r) + inline(view(r["laddr"], 28)[: r["nbytes"]].tobytes())),
    "read": lambda r: (0x10, 0, 0, address(r) + local(r)),
    "read2": lambda r: (0x10, 0, 0, address(r) + local(r) + local1(r)),
    "send": lambda r: (r["opcode"], r["imm"], 0, local(r)),
    "atomic": lambda r: (r["opcode"], 0, 0, address(r) + big(r["second"], r["first"], nbytes=8) + local(r, 8)),
    "masked_add": lambda r: (
        0x15, 0, 0x08 if r["nbytes"] == 4 else 0x09,
        address(r) + big(r["first"], r["second"], nbytes=r["nbytes"]).ljust(16, b"\0") + local(r),
    ),
    "masked_swap32": lambda r: (
        0x14, 0, 0x08, address(r) + big(r["second"], r["first"], r["lkey1"], r["laddr1"], nbytes=4) + local(r, 4)
    ),
    "masked_swap64": lambda r: (
        0x14, 0, 0x09, address(r) + big(r["second"], r["first"], r["lkey1"], r["laddr1"], nbytes=8) + local(r, 8)
    ),
    "wait": lambda r: (0x0F, 0, 0, bytes(8) + big(r["first"], r["second"], nbytes=4)),
    "dump": lambda r: (0x23, 0, 0, local(r)),
}


def wqe_of(row: Row, qpn: int) -> bytes:
    """The bytes that a builder must write."""
    opcode, imm, opmod, segments = EXPECTED[row["what"]](row)
    head = bytearray(control(opcode, row["index"], qpn, 1 + len(segments) // 16, 0, imm, opmod=opmod))
    head[11] = row["flags"]
    return bytes(head) + segments


U = st.binary(min_size=8, max_size=8).map(lambda b: int.from_bytes(b, "big"))  # st.integers prefers small ones
KEY = st.binary(min_size=4, max_size=4).map(lambda b: int.from_bytes(b, "big"))


@st.composite
def rows(draw: st.DrawFn, what: str) -> Row:
    """Any arguments of a builder."""
    row: Row = {
        "what": what, "index": draw(st.one_of(st.integers(0, 100), st.integers(0, 1 << 40))),
        "flags": draw(st.sampled_from([int(flag) for flag in CtrlFlags])), "imm": draw(KEY),
        "raddr": draw(U), "rkey": draw(KEY), "laddr": draw(U), "lkey": draw(KEY),
        "nbytes": draw(st.integers(0, 1 << 31)), "laddr1": draw(U), "lkey1": draw(KEY),
        "nbytes1": draw(st.integers(0, 1 << 31)), "first": draw(U), "second": draw(U),
    }
    row["opcode"] = draw(st.sampled_from({"send": (0x0A, 0x0B), "atomic": (0x11, 0x12)}.get(what, (0x08, 0x09))))
    if what == "masked_add":
        row["nbytes"] = draw(st.sampled_from((4, 8)))
    elif what == "write_value":
        row["nbytes"] = draw(st.integers(1, 8))
    elif what == "write_inline":
        row["nbytes"] = draw(st.integers(0, 28))
    elif what == "masked_swap32":
        row["laddr1"] &= U32
    elif what == "masked_swap64":
        row["lkey1"] = draw(U)
    return row


@pytest.mark.parametrize("what", NAMES)
@settings(max_examples=30)
@given(data_=st.data())
def test_bytes(pair: Pair, what, data_):
    """In the ring at the slot of the index, around its end too, or elsewhere, at the address `at`."""
    row = data_.draw(rows(what))
    elsewhere = what != "masked_swap64" and data_.draw(st.booleans())
    if what == "write_inline":  # whose bytes are read
        row["laddr"] = pair.here.address + data_.draw(st.integers(0, 64))
    ring = view(pair.a.qp.sq_address, DEPTH * 64)
    with pair.gpu.alloc(128, MemType.CPU_GPU) as copy:
        ring[:], copy.array[:] = FILL, FILL
        row["at"] = copy.device_address if elsewhere else 0
        assert run_rows(pair, [row]) == [device.OK]
        wqe = wqe_of(row, pair.a.qpn)
        expected, expected_copy = np.full(DEPTH * 64, FILL, np.uint8), np.full(128, FILL, np.uint8)
        slot = row["index"] % DEPTH * 64
        if elsewhere:
            expected_copy[: len(wqe)] = list(wqe)
        else:
            expected[(slot + np.arange(len(wqe))) % len(expected)] = list(wqe)
        if what in ("write_inline", "write_value"):  # the bytes behind the payload are anything
            start, payload = 0 if elsewhere else slot, 8 if what == "write_value" else row["nbytes"]
            ignored = slice(start + 36 + payload, start + (48 if payload <= 12 else 64))
            (copy.array if elsewhere else ring)[ignored] = (expected_copy if elsewhere else expected)[ignored] = 0
        assert np.array_equal(ring, expected)
        assert np.array_equal(copy.array, expected_copy)
    ring[:] = 0


def test_the_tables_of_the_formats_say_the_same():
    """Field by field, the bytes above are those that the formats' tables name."""
    row: Row = {
        "index": 0x123456, "flags": 8, "imm": 0xA1B2C3D4, "raddr": 0x1122334455667788, "rkey": 0x99AABBCC,
        "laddr": 0x0102030405060708, "lkey": 0x0A0B0C0D, "nbytes": 4, "laddr1": 0xDDDD, "lkey1": 0xEEEE, "nbytes1": 5,
        "first": 0x1F1F, "second": 0x2E2E,
    }

    def segments(what: str, opcode: int = 0, nbytes: int = 4) -> np.ndarray:
        return np.frombuffer(wqe_of(row | {"what": what, "opcode": opcode, "nbytes": nbytes}, 0xABCDEF), np.uint8)

    for what, opcode, ds in (("write", WqeOpcode.RDMA_WRITE_IMM, 3), ("atomic", WqeOpcode.ATOMIC_CS, 4)):
        wqe = segments(what, opcode)
        ctrl = CTRL_SEG.at(wqe)
        assert (ctrl["opmod_idx_opcode"], ctrl["qpn_ds"]) == (0x3456 << 8 | opcode, 0xABCDEF << 8 | ds)
        assert (ctrl["fm_ce_se"], len(wqe)) == (8, 16 * ds)
        assert (RADDR_SEG.at(wqe, 16)["raddr"], RADDR_SEG.at(wqe, 16)["rkey"]) == (row["raddr"], row["rkey"])
    found = DATA_SEG.at(segments("write", WqeOpcode.RDMA_WRITE), 32)
    assert [found[name] for name in ("byte_count", "lkey", "addr")] == [4, row["lkey"], row["laddr"]]
    tables = (
        ("atomic", 8, ATOMIC_SEG, {"swap_add": "second", "compare": "first"}),
        ("masked_add", 4, MASKED_FA32_SEG, {"add_data": "first", "field_boundary": "second"}),
        ("masked_add", 8, MASKED_FA64_SEG, {"add_data": "first", "field_boundary": "second"}),
        ("masked_swap32", 4, MASKED_CS32_SEG, {
            "swap_data": "second", "compare_data": "first", "swap_mask": "lkey1", "compare_mask": "laddr1"}),
        ("masked_swap64", 8, MASKED_CS64_SEG, {"swap": "second", "compare": "first"}),
    )
    for what, nbytes, entry, names in tables:
        wqe = segments(what, WqeOpcode.ATOMIC_CS, nbytes)
        for name, field in names.items():
            assert entry.at(wqe, 32)[name] == row[field], (what, name)
    masks = MASKED_CS64_SEG.at(segments("masked_swap64", nbytes=8), 48)
    assert (masks["swap"], masks["compare"]) == (row["lkey1"], row["laddr1"])
    waits = WAIT_SEG.at(segments("wait"), 16)
    assert (waits["max_index"], waits["qpn_cqn"]) == (row["first"], row["second"])


def test_sizes_that_are_refused(pair: Pair):
    """EINVAL, and nothing is written."""
    ring = view(pair.a.qp.sq_address, DEPTH * 64)
    ring[:] = FILL
    bad = [{"what": "masked_add", "nbytes": n} for n in (-1, 0, 1, 2, 3, 5, 7, 9, 16, 1 << 32)]
    bad += [{"what": "write_inline", "nbytes": n} for n in (-1, 29, 1 << 32)]
    assert run_rows(pair, bad) == [device.EINVAL] * len(bad)
    assert (ring == FILL).all()
    ring[:] = 0


# --- execution -------------------------------------------------------------------------------------------------------


def at(pair: Pair, there: int, here: int, **more: Any) -> Row:
    return {
        "raddr": pair.there.address + there, "rkey": pair.there_mr.rkey, "laddr": pair.here.address + here,
        "lkey": pair.here_mr.lkey, **more,
    }


def test_reads_and_writes_of_two_segments(pair: Pair):
    connect(pair)
    random = np.random.default_rng(1)
    for memory in (pair.here, pair.there):
        memory.array[:] = random.integers(0, 256, memory.nbytes, np.uint8)
    here, there = pair.here.array.copy(), pair.there.array.copy()
    two = {"laddr1": pair.here.address + 5000, "lkey1": pair.here_mr.lkey}
    program = [
        at(pair, 100, 200, what="write2", opcode=0x08, nbytes=77, nbytes1=1000, **two),
        at(pair, 9000, 20_000, what="read2", nbytes=1000, nbytes1=33, **two),
        at(pair, 0, 300, what="dump", nbytes=64),
    ]
    assert run_rows(pair, program, execute=True) == [device.OK] * 3
    there[100:177], there[177:1177] = here[200:277], here[5000:6000]
    here[20_000:21_000], here[5000:5033] = there[9000:10_000], there[10_000:10_033]
    assert np.array_equal(pair.there.array, there)
    assert np.array_equal(pair.here.array, here)


MASKED = ("masked_add", "masked_swap32", "masked_swap64")
WORD = st.one_of(U, st.sampled_from((0, 1, U32, U64, 1 << 31, 1 << 63, 0x8000_8000_8000_8000)))


@settings(max_examples=60)
@given(st.data())
def test_masked_atomics(pair: Pair, data_):
    """The word and the old one that comes back are what nic_model.py says; one of 4 bytes comes big-endian."""
    connect(pair)
    words = pair.there.array[:64]
    words[:] = list(data_.draw(st.binary(min_size=64, max_size=64)))
    pair.here.array[:256] = FILL
    expected_there, expected_here = bytearray(words.tobytes()), bytearray(pair.here.array[:256].tobytes())
    program: list[Row] = []
    for i in range(data_.draw(st.integers(1, 6))):
        what = data_.draw(st.sampled_from(MASKED))
        nbytes = {"masked_swap32": 4, "masked_swap64": 8}.get(what) or data_.draw(st.sampled_from((4, 8)))
        mask = (1 << 8 * nbytes) - 1
        where = nbytes * data_.draw(st.integers(0, 64 // nbytes - 1))
        word = int.from_bytes(expected_there[where : where + nbytes], "little")
        first = data_.draw(WORD) & mask
        if what != "masked_add" and data_.draw(st.booleans()):
            first = word  # so that it is equal
        second = data_.draw(WORD) & mask
        if what == "masked_add":
            operands, opcode = (first, second), nic_model.MASKED_FA
            row = {"first": first, "second": second}
        else:
            swap_mask, compare_mask = data_.draw(WORD) & mask, data_.draw(WORD) & mask
            operands, opcode = (second, first, swap_mask, compare_mask), nic_model.MASKED_CS
            row = {"first": first, "second": second, "laddr1": compare_mask, "lkey1": swap_mask}
        program.append(at(pair, where, 16 * i, what=what, nbytes=nbytes, **row))
        result = nic_model.combined(opcode, word, operands, nbytes)
        expected_there[where : where + nbytes] = result.to_bytes(nbytes, "little")
        expected_here[16 * i : 16 * i + nbytes] = word.to_bytes(nbytes, "big" if nbytes == 4 else "little")
    assert run_rows(pair, program, execute=True) == [device.OK] * len(program)
    assert words.tobytes() == bytes(expected_there)
    assert pair.here.array[:256].tobytes() == bytes(expected_here)


def test_wqes_of_two_slots_go_round_the_ring(pair: Pair):
    """A compare and swap of 8 bytes may begin in the last slot: its end is in the first one."""
    connect(pair)
    word = pair.there.array[:8].view(np.int64)
    word[0] = 0
    program = [at(pair, 64, 64, what="nop")] + [
        at(pair, 0, 8, what="masked_swap64", first=i, second=i + 1, laddr1=U64, lkey1=U64) for i in range(2 * DEPTH)
    ]
    assert run_rows(pair, program, execute=True) == [device.OK] * len(program)
    assert word[0] == 2 * DEPTH
    assert pair.here.array[8:16].view(np.int64)[0] == 2 * DEPTH - 1


def test_a_wait_needs_a_core_direct_queue(pair: Pair, caplog):
    """What the builder writes is what the NIC waits for; on another queue it is an error."""
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    connect(pair)
    with pair.gpu.create_qp_group(pair.pd, DEPTH) as group:
        group.companion.connect(group.companion)
        ours, pair.a = pair.a, group.companion
        try:
            nop, waiting = at(pair, 0, 0, what="nop"), {"what": "wait", "second": group.companion.cq.cqn}
            program = [nop, nop, waiting | {"first": 1}, waiting | {"first": 2}, waiting | {"first": 0}]
            assert run_rows(pair, program, execute=True) == [device.OK] * 5
            unknown = {"what": "wait", "first": 0, "second": 0xFFFFFF}
            assert run_rows(pair, [unknown], execute=True) == [device.EIO]
            error = pair.a.last_error()
            assert error is not None
            assert (error.index, error.syndrome) == (5, Syndrome.LOCAL_QP_OP)
        finally:
            pair.a = ours
    assert run_rows(pair, [{"what": "wait", "first": 0, "second": pair.a.cq.cqn}], execute=True) == [device.EIO]
    error = pair.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome, error.vendor_syndrome) == (0, Syndrome.LOCAL_QP_OP, Reason.WQE_OPCODE)
