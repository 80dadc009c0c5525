"""End a `with` block: close the object, and keep an error of the block as the error that is raised."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Self

from .errors import DocaError


def end_block(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close the object of a `with` block. `error` is the exception that the block raised, or None.

    After such an exception, the object often cannot close, because other objects of the block are still open. So if the
    block failed, the refusal to close becomes a note of its exception (PEP 678) instead of hiding it.
    """
    try:
        close()
    except DocaError as refusal:
        if error is None:
            raise
        note = f"Then close() failed: {type(refusal).__name__}: {refusal}"
        if str(refusal) != str(error) and note not in getattr(error, "__notes__", ()):  # nested objects refuse alike
            error.add_note(note)


class Closing:
    """An object that the end of a `with` block closes."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_block(error, self.close)
