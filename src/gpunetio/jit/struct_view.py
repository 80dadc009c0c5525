"""Struct views: `struct_view(ENTRY)(address)` is the structure at that address, inside nopython code, at no cost.

Fields are read and written as attributes. Fields that other agents change at the same time are not read through a view,
but with `ops`, at `address + ENTRY.field`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from ..formats.layout import Entry


class Struct:
    """A structure in memory, as compiled code sees it: its fields are attributes."""

    def __getattr__(self, field: str) -> int: ...

    def __setattr__(self, field: str, value: int) -> None: ...


View = Callable[[int], Struct]


def struct_view(entry: Entry) -> View:
    """Return an intrinsic that turns an address into a record with the fields of `entry`, except raw bytes."""
    fields = entry.dtype.fields or {}
    scalars = {name: field for name, field in fields.items() if field[0].kind in "iu"}
    dtype = np.dtype({
        "names": list(scalars),
        "formats": [field[0] for field in scalars.values()],
        "offsets": [field[1] for field in scalars.values()],
        "itemsize": entry.size,
    })  # fmt: skip
    record = from_dtype(dtype)

    @intrinsic
    def at(typingctx, address):
        """Return the structure at `address`, a record whose fields are read and written in place."""

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), codegen

    return cast(View, at)  # Numba has no types for it

