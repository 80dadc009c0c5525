"""Compiled functions with C's calling convention, for code that is not Numba's to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from .cache import cache_of


def c_function(function: Callable[..., None], argument_types: tuple[Any, ...], engine_function: Any) -> Any:
    """Return `function`, which does no more than to call an engine function, compiled for C; `address` has its place.

    Keep it as long as anything may call it.
    """
    compiled: Any = CFunc(function, normalize_signature(types.void(*argument_types)), {}, {})
    cache = cache_of(function, engine_function.units.watch.now().digest)
    if cache:
        compiled._cache = cache
    try:
        compiled.compile()
    finally:
        if cache:
            cache.end_turn()
    return compiled
