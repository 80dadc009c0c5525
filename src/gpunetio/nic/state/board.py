"""The board, in GPU memory, where a slice posts copies to blocks on other SMs (memory/copies.py)."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .slice_shared import LANES
from .record import State, engine


class Board(State):
    """The jobs that a worker on a GPU gives to blocks that only copy (memory/copies.py)."""

    # the posted list
    posted: I64 = engine("number of the list")
    total: I64 = engine("units of all copies in it")
    over: I64 = engine("number of the slice that is over")
    # claims
    next: I64 = engine("number of the list << 32 | the next unit to take", line=True)
    # progress
    done: I64 = engine("units of the list that are copied", line=True)
    # the list
    targets: Annotated[int, f"i64[{LANES}]"] = engine("where to", line=True)
    sources: Annotated[int, f"i64[{LANES}]"] = engine("where from")
    sizes: Annotated[int, f"i64[{LANES}]"] = engine("how many bytes")
    ends: Annotated[int, f"i64[{LANES}]"] = engine("units of all copies up to this one")


BOARD = Board.entry
