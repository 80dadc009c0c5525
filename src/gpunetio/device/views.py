"""Struct views: `qp_at(address)` is the C structure at that address, inside nopython code, at no cost.

Fields read and write like attributes. What other agents change at the same time is not read through a view but with
`ops`, at `address + DEV_QP.field`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from ..formats.device_structs import DEV_CQ, DEV_QP
from ..formats.layout import Entry


def struct_view(entry: Entry) -> Any:
    """An intrinsic that turns an address into a record with the fields of `entry` (raw bytes left out)."""
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
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), codegen

    return at


qp_at = struct_view(DEV_QP)
cq_at = struct_view(DEV_CQ)
