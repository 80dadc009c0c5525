"""Where a slice on a GPU asks blocks on other SMs for copies: in memory of that GPU (memory/copies.py)."""

from __future__ import annotations

from ...jit.struct_view import View, struct_view
from .near import LANES
from .record import record

BOARD = record("board", f"""
    # what is asked
    asked          i64      engine     number of the list
    total          i64      engine     units of all copies in it
    over           i64      engine     number of the slice that is over
    # who has what
    next           i64      engine     number of the list << 32 | the unit that nobody has taken yet
    # what is done
    done           i64      engine     units of the list that are copied
    # the list
    targets        i64[{LANES}] engine  where to
    sources        i64[{LANES}] engine  where from
    sizes          i64[{LANES}] engine  how many bytes
    ends           i64[{LANES}] engine  units of all copies up to this one
""")
board_at: View = struct_view(BOARD)
