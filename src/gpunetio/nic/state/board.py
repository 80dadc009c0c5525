"""Where a slice on a GPU asks blocks on other SMs for copies: in memory of that GPU (memory/copies.py)."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .near import LANES
from .record import State, engine


class Board(State):
    """The jobs that a worker on a GPU gives to blocks that only copy (memory/copies.py)."""

    # what is asked
    asked: I64 = engine("number of the list")
    total: I64 = engine("units of all copies in it")
    over: I64 = engine("number of the slice that is over")
    # who has what
    next: I64 = engine("number of the list << 32 | the unit that nobody has taken yet", line=True)
    # what is done
    done: I64 = engine("units of the list that are copied", line=True)
    # the list
    targets: Annotated[int, f"i64[{LANES}]"] = engine("where to", line=True)
    sources: Annotated[int, f"i64[{LANES}]"] = engine("where from")
    sizes: Annotated[int, f"i64[{LANES}]"] = engine("how many bytes")
    ends: Annotated[int, f"i64[{LANES}]"] = engine("units of all copies up to this one")


BOARD = Board.entry
