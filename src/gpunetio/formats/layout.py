"""Declare a format: one aligned table per structure, from which everything else is derived.

`BitStruct` is for command mailboxes and contexts, which the PRM describes by bit offsets (MSB first in big-endian
dwords), and for management datagrams, which the IBTA describes likewise. `Entry` is for queue entries and records of
the data path: it gives a NumPy dtype and byte offsets. A `Record` is a class with such an entry: the type of an address
that knows its fields.
"""

from __future__ import annotations

import ctypes
import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_origin

import numpy as np

if TYPE_CHECKING:
    from ..memory import BytesLike

# A structure by the names of its fields: ints, bytes, or such a dict for a nested structure (`BitStruct`).
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
        # Fields that lie in one dword are unpacked together: dword, right shift, mask. The others are unpacked one by
        # one.
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
        """Return the bits that a field has in the structure, taken as one big-endian number. `name` may be dotted."""
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
}


def field_type(kind: str) -> np.dtype:
    """Return the NumPy type of a field that an `Entry` declares as `kind`."""
    kind, _, count = kind.rstrip("]").partition("[")
    return np.dtype(f"V{count}" if kind == "raw" else (f"({count},)" if count else "") + _TYPES[kind])


# The beginning of inputs and outputs of commands.
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
    compiled code too: an entry is a named tuple of its offsets, which the compiler folds to constants.
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
            _fields=(*names, "size"),  # with _asdict, as in a named tuple
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


# --- fields in memory ------------------------------------------------------------------------------------------------


class FieldPlace(NamedTuple):
    """The place and form of a field in a structure; `size` is in bytes."""

    offset: int
    size: int
    big_endian: bool
    signed: bool

    def read(self, address: int) -> int:
        """Return the field of the structure at an address, as a signed integer of 64 bits."""
        contents = ctypes.string_at(address + self.offset, self.size)
        number = int.from_bytes(contents, _ORDER[self.big_endian], signed=self.signed)
        return number - (1 << 64) if number >> 63 > 0 else number

    def write(self, address: int, value: int) -> None:
        """Store the low bytes of a value as the field of the structure at an address."""
        contents = (int(value) & (1 << 8 * self.size) - 1).to_bytes(self.size, _ORDER[self.big_endian])
        ctypes.memmove(address + self.offset, contents, self.size)


_ORDER: tuple[Literal["little"], Literal["big"]] = ("little", "big")


def places_of(entry: Entry) -> Iterator[tuple[str, FieldPlace]]:
    """Yield the fields of an entry that are integers, with their names.

    raw[2] … raw[8], such as a MAC, are an integer that begins with the most significant byte. raw[16] has two halves,
    `NAME_high` and `NAME_low`. Other arrays are not integers.
    """
    for name, (kind, offset, *_) in (entry.dtype.fields or {}).items():
        if kind.kind in "iu":
            yield name, FieldPlace(offset, kind.itemsize, kind.byteorder == ">", kind.kind == "i")
        elif kind.kind == "V" and kind.subdtype is None and 2 <= kind.itemsize <= 8:
            yield name, FieldPlace(offset, kind.itemsize, True, False)
        elif kind.kind == "V" and kind.subdtype is None and kind.itemsize == 16:
            yield f"{name}_high", FieldPlace(offset, 8, True, False)
            yield f"{name}_low", FieldPlace(offset + 8, 8, True, False)


# --- records ---------------------------------------------------------------------------------------------------------

# Types of a record's fields. There are also Annotated[int, "raw[6]"] and Annotated[int, "u32[4]"].
U8 = Annotated[int, "u8"]
U16 = Annotated[int, "u16"]
U32 = Annotated[int, "u32"]
U64 = Annotated[int, "u64"]
I32 = Annotated[int, "i32"]
I64 = Annotated[int, "i64"]
BE16 = Annotated[int, "be16"]
BE32 = Annotated[int, "be32"]
BE64 = Annotated[int, "be64"]
_KINDS = {  # in whichever module a class is
    name: kind for name, kind in globals().items() if getattr(kind, "__metadata__", None) or kind is Annotated
}


class Record(int):
    """An address that knows the fields of the structure there.

        class VerbsCq(Record, size=64):
            cqe_daddr: I64 = 0
            cq_num: U32 = 8

        VerbsCq.cq_num              8: where the field lies, in bytes
        VerbsCq(address).cq_num     what it contains; assigning changes memory
        VerbsCq.entry               the `Entry` with these fields

    In all other respects, it is an integer: `cq + VerbsCq.cq_num` is the address of a field. A record that is derived
    from another one begins with its fields, and can be passed in its place. The address must be a multiple of
    `alignment`. Arrays have an offset only, unless `places_of` says that they are integers.
    """

    entry: ClassVar[Entry]
    size: ClassVar[int]
    alignment: ClassVar[int]
    _rows: ClassVar[dict[str, tuple[str, int]]] = {}  # type and offset of each field
    _places: ClassVar[dict[str, FieldPlace]] = {}  # of those that are integers

    def __init_subclass__(cls, size: int, alignment: int = 8) -> None:
        own = _declared(cls)
        again = own.keys() & cls._rows.keys()
        if again:
            raise TypeError(f"{cls.__name__}.{min(again)} is a field of {cls.__mro__[1].__name__}, too")
        rows = cls._rows | own
        _check_places(cls.__name__, rows, size)
        table = "\n".join(f"{name} {offset} {kind}" for name, (kind, offset) in rows.items())
        cls.entry, cls.size, cls.alignment = Entry(cls.__name__, size, table), size, alignment
        cls._rows, cls._places = rows, dict(places_of(cls.entry))
        for name, (_, offset) in own.items():
            setattr(cls, name, _RecordField(offset, cls._places.get(name)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self):#x})"

    if not TYPE_CHECKING:  # type checkers know the fields

        def __getattr__(self, name: str) -> int:
            if name in self._places:  # a half of raw[16]
                return self._places[name].read(self)
            kind = type(self).__name__
            if name in self._rows:
                raise AttributeError(f"{kind}.{name} is no integer: it lies at the address + {kind}.{name}")
            raise AttributeError(f"{kind} has no field {name}; it has {', '.join(self._places)}")

        def __setattr__(self, name: str, value: int) -> None:
            if name not in self._places:
                self.__getattr__(name)
            self._places[name].write(self, value)


class _RecordField:
    """A field of a record: its offset in the class, its contents in an instance."""

    def __init__(self, offset: int, place: FieldPlace | None):
        self._offset, self._place = offset, place

    def __get__(self, record: Record | None, owner: type[Record]) -> int:
        if record is None:
            return self._offset
        if self._place is None:
            raise AttributeError  # Record.__getattr__ raises it again, with an explanation
        return self._place.read(record)


def kinds_of(record: type[Record]) -> dict[str, str]:
    """Return the types of the fields that a class declares, by name. TypeError if one has none."""
    try:
        annotations = inspect.get_annotations(record, locals=_KINDS, eval_str=True)
    except NameError as error:
        raise TypeError(f"{record.__name__}: {error}; types of fields are I64, U32, BE16 …") from None
    kinds: dict[str, str] = {}
    for name, annotation in annotations.items():
        if get_origin(annotation) is ClassVar:  # of all records of a class, and no field
            continue
        where = f"{record.__name__}.{name}"
        kind = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, str)), None)
        if kind is None:
            raise TypeError(f"{where} is declared as {annotation!r}: types of fields are I64, U32, BE16 …")
        try:
            field_type(kind)
        except (KeyError, TypeError, ValueError):
            raise TypeError(f"{where}: there is no type {kind}; types are {', '.join(_TYPES)}, raw[N]") from None
        kinds[name] = kind
    return kinds


def _declared(record: type[Record]) -> dict[str, tuple[str, int]]:
    """Return the fields that a class declares: type and offset, by name."""
    rows: dict[str, tuple[str, int]] = {}
    for name, kind in kinds_of(record).items():
        where = f"{record.__name__}.{name}"
        offset = vars(record).get(name)
        if not isinstance(offset, int) or offset < 0:
            raise TypeError(f"{where} needs its offset in bytes, such as {name}: I64 = 0")
        if hasattr(Record, name) or name in Record.__annotations__:
            raise TypeError(f"{where}: every record has something of this name, so no field can have it")
        rows[name] = kind, offset
    return rows


def _check_places(record: str, rows: dict[str, tuple[str, int]], size: int) -> None:
    """Raise TypeError unless all fields lie in the record, and no two in the same bytes."""
    spans = sorted((offset, offset + field_type(kind).itemsize, name) for name, (kind, offset) in rows.items())
    for _, end, name in spans:
        if end > size:
            raise TypeError(f"{record}.{name} ends at byte {end}, and the record has {size} bytes")
    for (_, end, name), (start, _, following) in pairwise(spans):
        if start < end:
            raise TypeError(f"{record}.{following} begins at byte {start}, inside {name}, which ends at byte {end}")
