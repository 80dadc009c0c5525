"""The task of the DMA library: a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from ..core import Buf, Task
from ..core.operand import destinations, sources
from ..core.task import TaskOwner
from ..errors import DocaError, InvalidValueError
from ..verbs import PD, Sge
from .caps import DmaCaps


class Copying(TaskOwner, Protocol):
    """The interface of a context that copies."""

    pd: PD
    caps: DmaCaps

    def post(self, task: MemcpyTask, copies: Sequence[tuple[Sge, Sge]]) -> None:
        """Post pairs of source and target. FullError if there is no room for all of them."""


class MemcpyTask(Task):
    """A copy of the bytes of `source` to `destination` (`doca_dma_task_memcpy`), created by `Dma.memcpy`.

    Both attributes may be changed between two submissions.
    """

    source: object
    destination: object

    def __init__(self, dma: Copying, source: object, destination: object, user_data: object = None):
        super().__init__(dma, user_data)
        self._dma, self.source, self.destination = dma, source, destination

    def _post(self, held: ExitStack) -> None:
        pd, caps = self._dma.pd, self._dma.caps
        read = _list("source", sources(pd, self.source, held), caps)
        written = _list("destination", destinations(pd, self.destination, held), caps)
        self._nbytes = sum(sge.length for sge in read)
        room = sum(sge.length for sge in written)
        if not self._nbytes:
            raise InvalidValueError("a source of 0 bytes: there is nothing to copy")
        if self._nbytes > room:
            raise InvalidValueError(f"{self._nbytes} bytes do not fit in a destination of {room}")
        self._dma.post(self, list(pieces(read, written)))

    def end(self, error: DocaError | None, callback: Callable[..., None] | None) -> None:
        if error is None and isinstance(self.destination, Buf):
            self.destination.fill(self._nbytes)
        super().end(error, callback)


def _list(what: str, entries: Sequence[Sge], caps: DmaCaps) -> Sequence[Sge]:
    """Return a list's entries. InvalidValueError if the device does not accept such a list."""
    if len(entries) > caps.max_buf_list_len:
        raise InvalidValueError(f"the {what} is a list of {len(entries)} buffers: {caps.max_buf_list_len} are possible")
    longest = max(sge.length for sge in entries)
    if longest > caps.max_buf_size:
        raise InvalidValueError(
            f"a buffer of the {what} has {longest} bytes, and {caps.max_buf_size} are possible (max_buf_size): make "
            "several tasks, or a list of buffers"
        )
    return [sge for sge in entries if sge.length]


def pieces(read: Sequence[Sge], written: Sequence[Sge]) -> Iterator[tuple[Sge, Sge]]:
    """Cut two lists at each other's borders. Return pairs of source and target of equal length."""
    at, left = 0, iter(written)
    target = next(left)
    for source in read:
        done = 0
        while done < source.length:
            if at == target.length:
                target, at = next(left), 0
            nbytes = min(source.length - done, target.length - at)
            yield (
                Sge(source.address + done, nbytes, source.lkey), Sge(target.address + at, nbytes, target.lkey)
            )
            done += nbytes
            at += nbytes
