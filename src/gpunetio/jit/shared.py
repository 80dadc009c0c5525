"""Arrays in the shared memory of a block (`__shared__`): `shared_array(shape, dtype)` in a kernel.

On the host, each block has such memory next to the records of its threads (host_threads.py).
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np

from .kinds import ELEMENTS, INT, MOST_DIMS, ArrayType
from .ops.threads import GROUP_SHARED, block_group, thread_record
from .targets import Cuda
from .values import Array, Mistake, Several, Word, texts_of, thing_in_words

ALIGNMENT = 128


def shared_array(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Return an array that the threads of a block share, with indeterminate contents (`__shared__`).

    `shape` and `dtype`, a NumPy type, are constants. Each call in the source is one array. Threads that read what other
    threads have written must wait for them first: `block_sync()`.
    """
    caller = sys._getframe(1)  # only an interpreted kernel gets here
    if thread_record() == 0:
        raise RuntimeError("shared_array() is for kernels: this thread belongs to no block")
    key = block_group(), caller.f_code.co_filename, caller.f_lineno
    with _making:
        return _interpreted.setdefault(key, np.zeros(shape, dtype))


_interpreted: dict[tuple[int, str, int], np.ndarray] = {}
_making = threading.Lock()


def forget(group: int) -> None:
    """Drop the arrays of an interpreted block, which is given by the address of its group."""
    with _making:
        for key in [key for key in _interpreted if key[0] == group]:
            del _interpreted[key]


def emit(e: Any, given: list[Any]) -> Array:
    """Compile a call."""
    if len(given) != 2:
        raise Mistake(f"shared_array() takes a shape and a dtype, not {len(given)} arguments")
    shape = given[0].values if isinstance(given[0], Several) else (given[0],)
    if not all(isinstance(one, int) and one > 0 for one in shape) or not 1 <= len(shape) <= MOST_DIMS:
        raise Mistake(f"the shape of a shared array is 1 to {MOST_DIMS} positive constants")
    try:
        name = np.dtype(given[1]).name
    except TypeError:
        raise Mistake(f"the dtype of a shared array is a type of NumPy's, not {thing_in_words(given[1])}") from None
    if name not in ELEMENTS:
        raise Mistake(f"a shared array has elements of {', '.join(ELEMENTS)}, not {name}")
    kind = ArrayType(name, len(shape), contiguous=True)
    place = e.unit.shared(math.prod(shape) * kind.element.size)
    if isinstance(e.unit.target, Cuda):
        near = f"addrspacecast (ptr addrspace(3) {place} to ptr)"
        address = e.word(INT, f"ptrtoint ptr {near} to i64")
    else:
        group = texts_of(e.unit.call(e, block_group, [], {}))[0]
        at = e.let(f"inttoptr i64 {e.let(f'add i64 {group}, {8 * GROUP_SHARED}')} to ptr")
        address = Word(INT, e.let(f"add i64 {e.let(f'load i64, ptr {at}')}, {place}"))
    return e.whole(Array(kind, address, tuple(shape), ()))
