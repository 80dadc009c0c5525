"""Struct views: `struct_view(ENTRY)(address)` is the structure at that address, in compiled code, at no cost.

Fields are read and written as attributes. They are integers in host byte order, whatever their width and byte order in
memory: `ip.total_length` swaps the bytes of a be16. raw[2] … raw[8], such as a MAC, are an integer that begins with the
most significant byte. The halves of raw[16] are `NAME_high` and `NAME_low`. Other arrays are not attributes.

Fields that other agents change at the same time are not read through a view, but with `ops`, at
`address + ENTRY.field`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from ..formats.layout import Entry, Record, places_of
from .kinds import StructType


class Struct:
    """A structure in memory, as compiled code sees it: its fields are attributes."""

    def __getattr__(self, field: str) -> int: ...

    def __setattr__(self, field: str, value: int) -> None: ...


View = Callable[[int], Struct]


_struct = functools.cache(StructType)  # two views of the same structure have the same type


def struct_view(entry: Entry, alignment: int = 8, shared: bool = False) -> View:
    """Return a function that turns an address into a structure with the fields of `entry`, in compiled code.

    `alignment`: the address is a multiple of this many bytes. A GPU does not load a word from an address that is not a
    multiple of its size, so headers in a packet, for example, need 2. `shared`: on a GPU, the address is in the block's
    shared memory, where a load takes one instruction instead of three.
    """
    return cast(View, _struct(type(entry).__name__, tuple(places_of(entry)), alignment, shared))


@functools.cache
def kind_of_record(record: type[Record]) -> StructType:
    """Return the type of a record in compiled code: that of a view of its entry."""
    kind: Any = struct_view(record.entry, record.alignment)
    if (base := record.__base__) is not Record:
        kind.base = kind_of_record(cast(type[Record], base))
    return kind
