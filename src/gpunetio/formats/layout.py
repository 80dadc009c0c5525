"""Declare a format: one aligned table per structure, from which everything else is derived.

`BitStruct` is for command mailboxes and contexts, which the PRM describes by bit offsets (MSB first in
big-endian dwords), and for management datagrams, which the IBTA describes likewise. `Entry` is for queue entries and
records of the data path: it gives a NumPy dtype and byte offsets.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..memory import BytesLike

# A structure by the names of its fields: ints, bytes, and such a dict for a structure inside (`BitStruct`).
Fields = dict[str, Any]

VARIABLE = 0  # width of a field that runs to the end of the mailbox


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a table: `offset` and `width` in bits; `struct` when the field is itself a structure."""

    name: str
    offset: int
    width: int
    struct: BitStruct | None = None


class BitStruct:
    """A mailbox or context of `size` bytes, declared by rows of `name  bit_offset  width  [STRUCT]`.

    Width `*` marks a field that runs to the end of the mailbox. A field wider than 64 bits is `bytes`, a nested
    structure a `dict`, anything else an `int`.
    """

    name: str
    size: int

    def __init__(self, name: str, size: int, table: str, **nested: BitStruct):
        self.name, self.size = name, size
        self.fields: dict[str, Field] = {}
        for row in table.strip().splitlines():
            field, offset, width, *struct = row.split()
            bits = VARIABLE if width == "*" else int(width)
            self.fields[field] = Field(field, int(offset, 16), bits, nested[struct[0]] if struct else None)
        self._ints = {  # the ordinary fields: first byte, end, right shift, mask
            name: self._place(field)
            for name, field in self.fields.items()
            if field.struct is None and field.width != VARIABLE and field.width <= 64
        }
        # Those that lie in one dword are unpacked together: dword, right shift, mask. The rest one by one.
        self._dwords = Struct(f">{size // 4}I")
        self._in_dwords = [
            (name, field.offset // 32, 32 - field.offset % 32 - field.width, (1 << field.width) - 1)
            for name, field in self.fields.items()
            if name in self._ints and field.offset % 32 + field.width <= 32 and field.offset // 32 < size // 4
        ]
        together = {name for name, *_ in self._in_dwords}
        self._others = [name for name in self.fields if name not in together]

    def __repr__(self) -> str:
        return f"BitStruct({self.name}, {self.size} bytes, {len(self.fields)} fields)"

    def pack(self, **values: object) -> bytearray:
        """Return a zeroed structure with `values` set. Nested structures are given as dicts."""
        buf = bytearray(self.size)
        self.update(buf, **values)
        return buf

    def update(self, buf: bytearray, base: int = 0, /, **values: Any) -> None:
        """Set `values` in `buf`, whose structure starts at byte `base`."""
        for name, value in values.items():
            if name in self._ints:
                self._set_int(buf, base, name, int(value))
                continue
            field = self._field(name)
            start = base + field.offset // 8
            if field.struct:
                field.struct.update(buf, start, **value)
            elif field.width == VARIABLE:
                buf[start:] = value
            else:
                if len(value) * 8 != field.width:
                    raise ValueError(f"{self.name}.{name} takes {field.width // 8} bytes, not {len(value)}")
                buf[start : start + field.width // 8] = value

    def unpack(self, buf: bytes | bytearray | memoryview, base: int = 0) -> Fields:
        """Return every field of the structure that starts at byte `base` of `buf`."""
        dwords = self._dwords.unpack_from(buf, base)
        values: Fields = {name: dwords[at] >> shift & mask for name, at, shift, mask in self._in_dwords}
        for name in self._others:
            values[name] = self.get(buf, name, base)
        return values

    def get(self, buf: bytes | bytearray | memoryview, name: str, base: int = 0) -> Any:
        """Return one field. `name` may be dotted ("qpc.primary_address_path.rlid")."""
        if name in self._ints:
            first, end, shift, mask = self._ints[name]
            return (int.from_bytes(buf[base + first : base + end], "big") >> shift) & mask
        name, _, rest = name.partition(".")
        field = self._field(name)
        start = base + field.offset // 8
        if field.struct:
            return field.struct.get(buf, rest, start) if rest else field.struct.unpack(buf, start)
        self._no_more(field, rest)
        if field.width == VARIABLE:
            return bytes(buf[start:])
        return bytes(buf[start : start + field.width // 8])

    def offset(self, name: str) -> int:
        """Return the byte offset of a field that starts on a byte boundary. `name` may be dotted."""
        name, _, rest = name.partition(".")
        field = self._field(name)
        if field.offset % 8:
            raise ValueError(f"{self.name}.{name} starts at bit 0x{field.offset:x}, not on a byte boundary")
        if field.struct and rest:
            return field.offset // 8 + field.struct.offset(rest)
        self._no_more(field, rest)
        return field.offset // 8

    def bits(self, name: str) -> int:
        """Return the bits of a field in the structure, which is one big-endian number. `name` may be dotted."""
        name, _, rest = name.partition(".")
        field = self._field(name)
        if field.struct and rest:
            return field.struct.bits(rest) << 8 * (self.size - field.struct.size) - field.offset
        self._no_more(field, rest)
        return ((1 << field.width) - 1) << 8 * self.size - field.offset - field.width

    def _no_more(self, field: Field, rest: str) -> None:
        if rest:
            raise ValueError(f"{self.name}.{field.name} is not a structure: it has no field {rest!r}")

    def _field(self, name: str) -> Field:
        try:
            return self.fields[name]
        except KeyError:
            raise ValueError(f"{self.name} has no field {name!r}; it has {', '.join(self.fields)}") from None

    @staticmethod
    def _place(field: Field) -> tuple[int, int, int, int]:
        """Return the big-endian integer that holds the field: first byte, end, right shift, mask."""
        end = field.offset + field.width
        last = (end + 7) // 8
        return field.offset // 8, last, last * 8 - end, (1 << field.width) - 1

    def _set_int(self, buf: bytearray, base: int, name: str, value: int) -> None:
        first, end, shift, mask = self._ints[name]
        if not 0 <= value <= mask:
            raise ValueError(f"{self.name}.{name} = {value:#x} does not fit in {mask.bit_length()} bits")
        at = slice(base + first, base + end)
        raw = int.from_bytes(buf[at], "big") & ~(mask << shift) | value << shift
        buf[at] = raw.to_bytes(end - first, "big")


_TYPES = {
    "u8": "u1", "be16": ">u2", "be32": ">u4", "be64": ">u8",
    "u16": "<u2", "u32": "<u4", "u64": "<u8", "i32": "<i4", "i64": "<i8",
}  # fmt: skip


def field_type(kind: str) -> np.dtype:
    """Return the NumPy type of a field that an `Entry` declares as `kind`."""
    kind, _, count = kind.rstrip("]").partition("[")
    return np.dtype(f"V{count}" if kind == "raw" else (f"({count},)" if count else "") + _TYPES[kind])


# What inputs and outputs of commands begin with.
_REQUEST = """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
"""
_ANSWER = """
    status                      0x000      8
    syndrome                    0x020     32
"""


def request(name: str, size: int, table: str = "", **nested: BitStruct) -> BitStruct:
    """Declare the input mailbox of a command: opcode, uid and op_mod, and the fields of `table`."""
    return BitStruct(name, size, _REQUEST + table.lstrip("\n"), **nested)


def answer(name: str, size: int, table: str = "", **nested: BitStruct) -> BitStruct:
    """Declare the output mailbox of a command: status and syndrome, and the fields of `table`."""
    return BitStruct(name, size, _ANSWER + table.lstrip("\n"), **nested)


class Entry(tuple):
    """A queue entry or record of `size` bytes, declared by rows of `name  byte_offset  type`.

    Types are be16/be32/be64, u8 … u64, i32/i64, T[N] for N of them, and raw[N] for N bytes. `dtype` is the NumPy
    structured type with exactly these offsets. Attribute access gives the byte offset (`CQE64.op_own == 63`), in
    compiled code too: an entry is a named tuple of its offsets, which Numba folds to constants.
    """

    dtype: np.dtype
    offsets: dict[str, int]
    size: int

    def __new__(cls, name: str, size: int, table: str) -> Entry:
        names, formats, offsets = [], [], []
        for row in table.strip().splitlines():
            field, offset, kind = row.split()
            names.append(field)
            formats.append(field_type(kind))
            offsets.append(int(offset))
        members: dict[str, object] = {
            field: property(operator.itemgetter(i)) for i, field in enumerate((*names, "size"))
        }
        members.update(
            _fields=(*names, "size"),  # with _asdict, this makes it a named tuple for Numba
            _asdict=lambda self: dict(zip(self._fields, self, strict=True)),
            dtype=np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}),
            offsets=dict(zip(names, offsets, strict=True)),
        )
        return tuple.__new__(type(name, (Entry,), members), (*offsets, size))

    if TYPE_CHECKING:

        def __getattr__(self, field: str) -> int: ...

    def __repr__(self) -> str:
        return f"Entry({type(self).__name__}, {self.size} bytes)"

    def pack(self, **values: int | bytes) -> bytes:
        """Return an entry with these fields, and 0 in the others."""
        row = np.zeros((), self.dtype)
        for name, value in values.items():
            row[name] = np.void(value) if isinstance(value, bytes) else value
        return row.tobytes()

    def at(self, buf: BytesLike, offset: int = 0) -> np.ndarray:
        """Return the entry at byte `offset` of `buf`, a zero-dimensional array that reads and writes in place."""
        return np.frombuffer(buf, self.dtype, 1, offset).reshape(())
