"""Struct views: `struct_view(ENTRY)(address)` is the structure at that address, inside nopython code, at no cost.

Fields are read and written as attributes. They are int64 in the order of the host, whatever their width and byte order
in memory: `ip.total_length` swaps the bytes of a be16. raw[2] … raw[8], such as a MAC, are an integer that begins with
the most significant byte; of raw[16], `NAME_high` and `NAME_low` are the halves. Other arrays are not attributes.

Fields that other agents change at the same time are not read through a view, but with `ops`, at
`address + ENTRY.field`.
"""

# pyright: reportReturnType=false

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from llvmlite import ir
from numba import types
from numba.core.cpu import CPUContext
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    lower_setattr_generic,
    register_model,
)  # fmt: skip

from ..formats.layout import Entry
from .ops.memory import swap_bytes

_ADDRESS: Any = ir.IntType(64)
_BYTE: Any = ir.IntType(8)
_SHARED = 3  # LLVM's address space of shared memory (NVVM IR specification)


class Struct:
    """A structure in memory, as compiled code sees it: its fields are attributes."""

    def __getattr__(self, field: str) -> int: ...

    def __setattr__(self, field: str, value: int) -> None: ...


View = Callable[[int], Struct]


class _Field(NamedTuple):
    offset: int
    size: int  # bytes
    big_endian: bool
    signed: bool


def _fields_of(entry: Entry) -> Iterator[tuple[str, _Field]]:
    for name, (kind, offset, *_) in (entry.dtype.fields or {}).items():
        if kind.kind in "iu":
            yield name, _Field(offset, kind.itemsize, kind.byteorder == ">", kind.kind == "i")
        elif kind.kind == "V" and kind.subdtype is None and 2 <= kind.itemsize <= 8:
            yield name, _Field(offset, kind.itemsize, True, False)
        elif kind.kind == "V" and kind.subdtype is None and kind.itemsize == 16:
            yield f"{name}_high", _Field(offset, 8, True, False)
            yield f"{name}_low", _Field(offset + 8, 8, True, False)


class StructType(types.Type):
    """The type of a structure in compiled code. Its value is an address, of which `alignment` divides every field's.

    `shared`: on a GPU it lies in the block's shared memory.
    """

    def __init__(self, name: str, fields: tuple[tuple[str, _Field], ...], alignment: int, shared: bool):
        self.fields, self.alignment, self.shared = fields, alignment, shared
        self.by_name = dict(fields)
        layout = zlib.crc32(repr((fields, alignment, shared)).encode())
        super().__init__(f"{name}_at#{layout:08x}")  # symbols have it: two structures may have the same name

    @property
    def key(self) -> object:
        """Return what makes two types the same."""
        return self.name, self.fields, self.alignment, self.shared


@register_model(StructType)
class _Model(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: StructType):
        super().__init__(dmm, fe_type, _ADDRESS)


@infer_getattr
class _Attributes(AttributeTemplate):
    key = StructType

    def generic_resolve(self, typ: StructType, attr: str) -> types.Type | None:
        return types.int64 if attr in typ.by_name else None


def _pieces(field: _Field) -> Iterator[tuple[int, int, int]]:
    """Yield offset, bits and shift of the loads or stores of a field: one, if its size is a power of two."""
    at = 0
    while at < field.size:
        size = 1 << (field.size - at).bit_length() - 1
        yield field.offset + at, 8 * size, 8 * (field.size - at - size if field.big_endian else at)
        at += size


def _in_order(context: Any, builder: Any, value: Any, field: _Field) -> Any:
    return swap_bytes(context, builder, value) if field.big_endian and value.type.width > 8 else value


def _place(context: Any, builder: Any, typ: StructType, address: Any, offset: int, bits: int) -> tuple[Any, int]:
    if typ.shared and not isinstance(context, CPUContext):  # the base first, so that offsets are part of instructions
        base = builder.addrspacecast(builder.inttoptr(address, _BYTE.as_pointer()), _BYTE.as_pointer(_SHARED))
        at = builder.bitcast(builder.gep(base, [_ADDRESS(offset)]), ir.IntType(bits).as_pointer(_SHARED))
    else:
        at = builder.inttoptr(builder.add(address, _ADDRESS(offset)), ir.IntType(bits).as_pointer())
    return at, min(bits // 8, typ.alignment)


@lower_getattr_generic(StructType)
def _read(context: Any, builder: Any, typ: StructType, address: Any, attr: str) -> Any:
    field = typ.by_name[attr]
    total = None
    for offset, bits, shift in _pieces(field):
        at, align = _place(context, builder, typ, address, offset, bits)
        value = _in_order(context, builder, builder.load(at, align=align), field)
        if bits < 64:
            value = (builder.sext if field.signed else builder.zext)(value, _ADDRESS)
        value = builder.shl(value, _ADDRESS(shift))
        total = value if total is None else builder.or_(total, value)
    return total


@lower_setattr_generic(StructType)
def _write(context: Any, builder: Any, signature: Any, args: Any, attr: str) -> None:
    typ, (address, value) = signature.args[0], args
    field = typ.by_name[attr]
    for offset, bits, shift in _pieces(field):
        at, align = _place(context, builder, typ, address, offset, bits)
        piece = builder.lshr(value, _ADDRESS(shift))
        if bits < 64:
            piece = builder.trunc(piece, ir.IntType(bits))
        builder.store(_in_order(context, builder, piece, field), at, align=align)


def struct_view(entry: Entry, alignment: int = 8, shared: bool = False) -> View:
    """Return an intrinsic that turns an address into a structure with the fields of `entry`.

    `alignment`: the address is a multiple of it, in bytes. A GPU does not load a word from an address that is not a
    multiple of its size, so headers in a packet, for example, need 2. `shared`: on a GPU it is an address of the
    block's shared memory, where a load takes one instruction instead of three.
    """
    kind = StructType(type(entry).__name__, tuple(_fields_of(entry)), alignment, shared)

    @intrinsic
    def at(typingctx, address):
        """Return the structure at `address`, whose fields are read and written in place."""
        return kind(types.int64), lambda context, builder, signature, args: args[0]

    return cast(View, at)  # Numba has no types for it
