"""The types of compiled code, and how LLVM represents their values.

    INT                 an integer of 64 bits, which wraps; also a boolean, 0 or 1, and a member of an enumeration
    FLOAT64, FLOAT32    floating-point numbers (IEEE 754)
    NOTHING             the result of a function that returns nothing
    StructType          a structure in memory, by its address
    ArrayType           an array in memory: its address, shape and strides
    TupleType           several values, perhaps with names

A value is one or more *words* of LLVM: `words_of(kind)` lists their types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..formats.layout import FieldPlace


@dataclass(frozen=True)
class Scalar:
    """A number. `words`: its description in messages to the author of a program."""

    name: str
    llvm: str
    words: str


INT = Scalar("int64", "i64", "an integer")
FLOAT64 = Scalar("float64", "double", "a float")
FLOAT32 = Scalar("float32", "float", "a float32")
NOTHING = Scalar("nothing", "void", "nothing")


class StructType:
    """A structure: its fields by name. `alignment` divides the address; `shared`: it is in shared memory of a block.

    `base`: the structure whose fields this one begins with, if it can be passed in its place (formats.layout.Record).
    """

    base: StructType | None = None

    name: str
    fields: dict[str, FieldPlace]
    alignment: int
    shared: bool

    def __init__(self, name: str, fields: tuple[tuple[str, FieldPlace], ...], alignment: int, shared: bool):
        self.name, self.fields, self.alignment, self.shared = name, dict(fields), alignment, shared

    def __repr__(self) -> str:
        return f"{self.name}{tuple(self.fields)}"

    def is_a(self, other: StructType) -> bool:
        """Return whether this structure can be passed in place of another one."""
        return self is other or (self.base is not None and self.base.is_a(other))

    def __call__(self, address: int) -> StructInMemory:
        """Return the structure at an address, for code that is not compiled."""
        return StructInMemory(self, address)


class StructInMemory(int):
    """A structure as plain Python sees it: an address. Reading and writing its fields reads and writes memory."""

    kind: StructType

    def __new__(cls, kind: StructType, address: int) -> StructInMemory:
        made = int.__new__(cls, address)
        object.__setattr__(made, "kind", kind)
        return made

    def __getattr__(self, name: str) -> int:
        return self._field(name).read(self)

    def __setattr__(self, name: str, value: int) -> None:
        self._field(name).write(self, value)

    def _field(self, name: str) -> FieldPlace:
        try:
            return self.kind.fields[name]
        except KeyError:
            raise AttributeError(f"the structure {self.kind.name} has no field {name}") from None


@dataclass(frozen=True)
class TupleType:
    """Several values. `names`: the fields of a named tuple."""

    kinds: tuple[Any, ...]
    names: tuple[str, ...] = ()


class Element(NamedTuple):
    """How an array's elements are stored in memory, and the type that they are read as."""

    llvm: str
    size: int
    signed: bool
    read_as: Scalar


ELEMENTS: dict[str, Element] = {
    "bool": Element("i8", 1, False, INT),
    "int8": Element("i8", 1, True, INT),
    "int16": Element("i16", 2, True, INT),
    "int32": Element("i32", 4, True, INT),
    "int64": Element("i64", 8, True, INT),
    "uint8": Element("i8", 1, False, INT),
    "uint16": Element("i16", 2, False, INT),
    "uint32": Element("i32", 4, False, INT),
    "uint64": Element("i64", 8, False, INT),
    "float32": Element("float", 4, True, FLOAT32),
    "float64": Element("double", 8, True, FLOAT64),
}


@dataclass(frozen=True)
class ArrayType:
    """An array of a NumPy type, by its name. `contiguous`: the last index varies fastest, without gaps."""

    dtype: str
    dims: int
    contiguous: bool

    @property
    def element(self) -> Element:
        """Return how an element is stored in memory."""
        return ELEMENTS[self.dtype]


MOST_DIMS = 3


def words_of(kind: Any) -> tuple[str, ...]:
    """Return the LLVM types that a value of a type consists of."""
    if isinstance(kind, Scalar):
        return () if kind is NOTHING else (kind.llvm,)
    if isinstance(kind, TupleType):
        return tuple(word for part in kind.kinds for word in words_of(part))
    if isinstance(kind, ArrayType):  # address, shape, and strides in bytes unless they follow from the shape
        return ("i64",) * (1 + kind.dims * (1 if kind.contiguous else 2))
    return ("i64",)


def llvm_of(kind: Any) -> str:
    """Return the LLVM type of a function's result."""
    words = words_of(kind)
    return "void" if not words else words[0] if len(words) == 1 else f"{{ {', '.join(words)} }}"


def in_words(kind: Any) -> str:
    """Describe a type to the author of a program."""
    if isinstance(kind, Scalar):
        return kind.words
    if isinstance(kind, TupleType):
        return f"a tuple of {len(kind.kinds)}"
    if isinstance(kind, ArrayType):
        return f"an array of {kind.dtype}"
    return f"a structure ({kind.name})"
