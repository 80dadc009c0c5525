"""Control when garbage is collected."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@contextmanager
def garbage(finalizer: Callable[..., object], *arguments: object) -> Iterator[None]:
    """Leave an object with this finalizer to the next `gc.collect()`. Nobody else collects garbage during the block."""
    gc.collect()
    gc.disable()
    try:
        weakref.finalize(_Cycle(), finalizer, *arguments)
        yield
    finally:
        gc.enable()
