"""Records: addresses that know their fields, as parameters of compiled functions."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import Gpu, kernel
from gpunetio.formats.device_structs import VerbsCq, VerbsQp, VerbsRq
from gpunetio.formats.eth_device import EthTxq, PacketAttr
from gpunetio.formats.layout import BE16, BE32, BE64, I32, I64, U8, U16, U32, U64, Record
from gpunetio.jit.compile import DeviceFunction, device_function
from gpunetio.jit.frozen import Frozen
from gpunetio.jit.ops import ld_fixed32, st64
from gpunetio.jit.struct_view import kind_of_record, struct_view
from gpunetio.jit.values import CompileError


class All(Record, size=80, alignment=1):
    """A field of each kind."""

    byte: U8 = 0
    b16: BE16 = 1
    b32: BE32 = 3
    b64: BE64 = 7
    l16: U16 = 15
    l32: U32 = 17
    l64: U64 = 21
    i32: I32 = 29
    i64: I64 = 33
    mac: Annotated[int, "raw[6]"] = 41
    rest: Annotated[int, "raw[13]"] = 67


# As NumPy reads them, and without `mac`, which it does not know.
AS_NUMPY = np.dtype({
    "names": ["byte", "b16", "b32", "b64", "l16", "l32", "l64", "i32", "i64"],
    "formats": ["u1", ">u2", ">u4", ">i8", "<u2", "<u4", "<i8", "<i4", "<i8"],
    "offsets": [0, 1, 3, 7, 15, 17, 21, 29, 33], "itemsize": 80,
})
MAC = slice(41, 47)


class Other(Record, size=80):
    first: I64 = 0


class Longer(Other, size=96):
    """Begins with the fields of another one."""

    second: I64 = 80


# --- declarations -----------------------------------------------------------------------------------------------------


class CqInC(ctypes.Structure):
    """`struct doca_gpu_dev_verbs_cq` of DOCA's headers."""

    _fields_ = (
        ("cqe_daddr", ctypes.c_void_p), ("cq_num", ctypes.c_uint32), ("cqe_num", ctypes.c_uint32),
        ("dbrec", ctypes.c_void_p), ("cqe_ci", ctypes.c_uint64), ("cqe_mask", ctypes.c_uint32),
        ("cqe_size", ctypes.c_uint8), ("cqe_rsvd", ctypes.c_uint64), ("mem_type", ctypes.c_int),
    )


def test_offsets_are_those_of_the_structure_in_c():
    for name, _ in CqInC._fields_:
        assert getattr(VerbsCq, name) == getattr(CqInC, name).offset
        assert VerbsCq.entry.dtype.fields[name][0].itemsize == getattr(CqInC, name).size
    assert VerbsCq.size == VerbsCq.entry.size >= ctypes.sizeof(CqInC)


def test_a_record_is_an_address_and_an_entry():
    memory = np.arange(80, dtype=np.uint8)
    row = All(memory.ctypes.data)
    assert isinstance(row, int)
    assert row + All.b32 == memory.ctypes.data + 3
    assert All.entry.offsets == {"byte": 0, "b16": 1, "b32": 3, "b64": 7, "l16": 15, "l32": 17, "l64": 21, "i32": 29,
                                 "i64": 33, "mac": 41, "rest": 67}
    assert row.b16 == All.entry.at(memory)["b16"] == 0x0102
    row.b16 = 0x1_ABCD
    assert memory[:4].tolist() == [0, 0xAB, 0xCD, 3]
    with pytest.raises(AttributeError, match=r"All has no field b17; it has byte, b16, "):
        row.b17 = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"All.rest is no integer: it lies at the address \+ All.rest"):
        _ = row.rest


def test_a_derived_record_has_the_fields_of_both():
    assert list(Longer.entry.offsets) == ["first", "second"]
    assert EthTxq.sq_wqe_num == VerbsQp.sq_wqe_num
    assert kind_of_record(Longer).is_a(kind_of_record(Other))
    assert not kind_of_record(Other).is_a(kind_of_record(Longer))


def test_a_view_of_the_entry_is_of_the_same_type():
    assert struct_view(All.entry, 1) is kind_of_record(All)


@pytest.mark.parametrize("fields, message", [
    ("a: Annotated[int, 'u24'] = 0", "Wrong.a: there is no type u24; types are u8"),
    ("a: int = 0", "Wrong.a is declared as <class 'int'>: types of fields are I64"),
    ("a: U24 = 0", "Wrong: name 'U24' is not defined; types of fields are I64"),
    ("a: I64", r"Wrong.a needs its offset in bytes, such as a: I64 = 0"),
    ("a: I64 = -8", r"Wrong.a needs its offset in bytes"),
    ("a: I64 = 0; b: U16 = 6", "Wrong.b begins at byte 6, inside a, which ends at byte 8"),
    ("a: I64 = 12", "Wrong.a ends at byte 20, and the record has 16 bytes"),
    ("size: I64 = 0", "Wrong.size: every record has something of this name"),
])
def test_wrong_declarations(fields, message):
    with pytest.raises(TypeError, match=message):
        exec(f"class Wrong(Record, size=16):\n    {fields}", dict(globals()))


def test_a_field_is_declared_once():
    with pytest.raises(TypeError, match=r"Again\.first is a field of Other, too"):
        exec("class Again(Other, size=88):\n    first: I64 = 80", dict(globals()))


# --- compiled and interpreted code ------------------------------------------------------------------------------------


@device_function
def read(row: All, out: int) -> None:
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


@device_function
def write(row: All, value: int) -> None:
    row.byte = row.b16 = row.b32 = row.b64 = row.l16 = row.l32 = row.l64 = row.i32 = row.i64 = row.mac = value


@pytest.fixture(params=["compiled", "interpreted"])
def how(request) -> Any:
    return (lambda function: function) if request.param == "compiled" else (lambda function: function.interpret)


CASES = (read, read.interpret), (write, write.interpret)


@given(data=st.binary(min_size=80, max_size=80), at=st.integers(0, 7))
def test_reads_as_numpy_does(data, at):
    memory, out = np.frombuffer(bytes(at) + data, np.uint8).copy(), np.zeros(10, np.int64)
    row = np.frombuffer(data, AS_NUMPY)[0]
    expected = [*(int(row[name]) for name in AS_NUMPY.names or ()), int.from_bytes(data[MAC], "big")]
    for one in CASES[0]:
        one(memory.ctypes.data + at, out.ctypes.data)
        assert out.tolist() == expected


@given(value=st.integers(-(1 << 63), (1 << 63) - 1))
def test_writes_as_numpy_does(value):
    expected = np.full(80, 0xEE, np.uint8)
    row = expected.view(AS_NUMPY)
    for name in AS_NUMPY.names or ():
        kind = AS_NUMPY[name]
        row[name] = np.array(value & (1 << 8 * kind.itemsize) - 1, f"u{kind.itemsize}").astype(kind.newbyteorder("="))
    expected[MAC] = np.frombuffer((value & (1 << 48) - 1).to_bytes(6, "big"), np.uint8)
    for one in CASES[1]:
        memory = np.full(80, 0xEE, np.uint8)
        one(memory.ctypes.data, value)
        assert memory.tobytes() == expected.tobytes()


@device_function
def chosen(one: Other, other: Other, first: int) -> Other:
    row = one
    if first == 0:
        row = other
    return row


@device_function
def as_integers(row: Other, by: int):
    total = row + by
    total = total * 2 - ~row + (row << 1) + max(row, by) + abs(row) + int(row) + divmod(row, by)[1]
    if row and row > by and row != 0:
        total += ld_fixed32(row + Other.first) + ld_fixed32(row)
    for _ in range(row, row + 2):
        total += -row
    return total, (row or Other(by)), Other(by), row.first if row else 0


@device_function
def through(row: Longer) -> int:
    found = chosen(row, Other(0), 1)
    found.first += 5
    return found.first + row.second + found


def test_a_record_is_an_integer_where_one_is_needed(how):
    memory = np.array([7, 0], np.int64)
    a = memory.ctypes.data
    total = (a + 3) * 2 - ~a + (a << 1) + a + a + a + a % 3 + 14 - 2 * a
    total = (total + (1 << 63)) % (1 << 64) - (1 << 63)
    assert how(as_integers)(a, 3) == (total, a, 3, 7)


def test_functions_give_each_other_records(how):
    memory = np.zeros(12, np.int64)
    memory[10] = 1
    assert how(through)(memory.ctypes.data) == memory.ctypes.data + 6
    assert how(chosen)(16, 32, 0) == 32
    assert memory[0] == 5


def test_a_call_with_an_instance():
    memory = np.array([7], np.int64)
    assert as_integers(Other(memory.ctypes.data), 3)[3] == 7


@kernel
def add(row: Other, by: int) -> None:
    row.first += by


def test_a_kernel_takes_an_integer():
    memory = np.array([7], np.int64)
    with Gpu("host") as gpu:
        assert add[1, 1, gpu](memory.ctypes.data, 2).wait(60)
    assert memory[0] == 9


# --- mistakes ---------------------------------------------------------------------------------------------------------


@device_function
def first_of(row: Other) -> int:
    return row.first


@device_function
def of_a_queue(qp: VerbsQp):
    return first_of(qp)


@device_function
def of_its_base(row: Other):
    return _second_of(row)


@device_function
def _second_of(row: Longer):
    return row.second


@device_function
def no_such_field(row: Other):
    return row.frist


@device_function
def of_a_float(row: Other):
    return first_of(row.first * 0.5)


@device_function
def takes_integer(n: int):
    return n


@device_function
def gives_float():
    return takes_integer(1.5)


@device_function
def takes_float(x: float):
    return x


@device_function
def gives_integer():
    return takes_float(1)


@device_function
def takes_float32(x: np.float32):
    return x


@device_function
def gives_float64():
    return takes_float32(1.5)


@device_function
def returns_a_float() -> int:
    return 0.5


@device_function
def returns_another(qp: VerbsQp) -> VerbsCq:
    return qp


@device_function
def returns_one_of_two() -> tuple[int, int]:
    return 1, 2.0


@device_function
def returns_nothing() -> int:
    takes_integer(1)


@device_function
def two_types(row: Other, n: int):
    found = row
    if n:
        found = 0
    return found


QP, OTHER = r"a structure \(VerbsQp\)", r"a structure \(Other\)"


@pytest.mark.parametrize("function, message", [
    (of_a_queue, rf"first_of\(\): row is {OTHER}, not {QP}"),
    (of_its_base, rf"_second_of\(\): row is a structure \(Longer\), not {OTHER}"),
    (no_such_field, "the structure Other has no field frist; it has first"),
    (of_a_float, rf"first_of\(\): row is {OTHER}, not a float"),
    (gives_float, r"takes_integer\(\): n is an integer, not a float: convert it with int\(\)"),
    (gives_integer, r"takes_float\(\): x is a float, not an integer: convert it with float\(\)"),
    (gives_float64, r"takes_float32\(\): x is a float32, not a float: convert it with np.float32\(\)"),
    (returns_a_float, r"returns_a_float\(\) returns an integer, as its annotation says, not a float"),
    (returns_another, rf"returns_another\(\) returns a structure \(VerbsCq\), as its annotation says, not {QP}"),
    (returns_one_of_two, r"returns an integer in a tuple, as its annotation says, not a tuple of 2"),
    (returns_nothing, r"returns an integer, as its annotation says, not nothing"),
    (two_types, rf"found is ({OTHER} or an integer|an integer or {OTHER}) here"),
], ids=lambda one: getattr(one, "__name__", ""))
def test_mistakes(function: DeviceFunction, message: str):
    with pytest.raises(CompileError, match=message):
        function.compile()


@kernel
def scaled(out: int, by: float) -> None:
    st64(out, int(by))


def test_a_launch_is_checked():
    with Gpu("host") as gpu, pytest.raises(CompileError, match=r"scaled\(\): by is a float, not an integer"):
        scaled[1, 1, gpu](0, 1)


def test_the_interpreter_refuses_another_record():
    with pytest.raises(TypeError, match=r"first_of\(\): row is a structure \(Other\), not VerbsRq"):
        first_of.interpret(VerbsRq(0))


# --- what decides about compiled code ---------------------------------------------------------------------------------

MODULE = """
from __future__ import annotations
from gpunetio.formats.layout import I64, Record
class Row(Record, size={size}):
    first: I64 = {offset}
def fn(row: {hint}):
    return row.first
"""


@pytest.mark.parametrize("hint", ["Row", "Row | None"])
def test_the_digest_changes_when_a_field_moves(hint):
    def digest(**places: int) -> str:
        space: dict[str, Any] = {"__name__": "digests"}
        exec(MODULE.format(hint=hint, **places), space)
        return Frozen(space["fn"]).digest

    assert digest(size=16, offset=0) == digest(size=16, offset=0)
    assert len({digest(size=16, offset=0), digest(size=16, offset=8), digest(size=24, offset=0)}) == 3


# --- type checkers ----------------------------------------------------------------------------------------------------

PROGRAM = """
import gpunetio as gn
from gpunetio import device as dev
from gpunetio.formats.layout import I64, Record

class Row(Record, size=16):
    first: I64 = 0

@gn.device_function
def total(row: Row, attr: dev.PacketAttr) -> int:
    row.first += Row.first + row + attr.flow_tag
    return row.first

@gn.kernel
def work(qp: dev.VerbsQp, address: int) -> None:
    total(Row(address), dev.PacketAttr(address))
    dev.wait(qp, qp.sq_num)
    dev.cq_of(qp).cqe_ci = Row(address).frist
    total(qp, dev.PacketAttr(address))
    dev.wait(dev.cq_of(qp), 0)
"""


def test_a_type_checker_finds_wrong_fields_and_records(tmp_path: Path):
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"include": ["*.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", tmp_path, "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True, text=True, timeout=100, check=False,
    )
    told = json.loads(done.stdout)["generalDiagnostics"]
    lines = PROGRAM.splitlines()
    wrong = dict.fromkeys(lines[one["range"]["start"]["line"]].strip() for one in told)
    assert list(wrong) == [line.strip() for line in lines[-3:]], told


def test_attributes_of_a_packet():
    """The exported records are those of the tables."""
    assert (PacketAttr.flow_tag, PacketAttr.size) == (12, 32)
