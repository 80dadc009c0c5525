"""The interface of every rendezvous: gather the values of all ranks."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Self

from ..arguments import instance
from ..closing import end_block
from ..errors import BadStateError, InvalidValueError
from .link import PeerError

Value = Any  # the value of a rank: bytes, or what `json.loads` returns
_MOST_RANKS = 1 << 16
TIMEOUT = 120.0  # seconds: the other ranks may have to compile first

# The first byte of a rank's value gives its type. No pickle: a peer's bytes never become code.
_BYTES, _JSON, _NOTHING = b"b", b"j", b"-"


class Rendezvous(ABC):
    """`size` processes that exchange values before their kernels talk. This one is number `rank`.

    A value is `bytes`, or what JSON can express: None, booleans, numbers, strings, lists, and dictionaries with strings
    as keys. A tuple arrives as a list. All ranks make the same calls in the same order. Each call waits for the slowest
    rank, for at most `timeout` seconds.

    Errors: TimedOutError if a rank does not call in time, `PeerError` if a rank ends or sends invalid data,
    InvalidValueError for a value that cannot be sent.
    """

    rank: int
    size: int
    timeout: float

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT):
        if type(size) is not int or not 1 <= size <= _MOST_RANKS:
            raise InvalidValueError(f"size {size!r}: a rendezvous takes 1 to {_MOST_RANKS} ranks")
        if type(rank) is not int or not 0 <= rank < size:
            raise InvalidValueError(f"rank {rank!r}: the ranks of {size} processes are 0 to {size - 1}")
        if not 0 < instance("timeout", timeout, int, float) < float("inf"):
            raise InvalidValueError(f"timeout {timeout!r}: give a positive number of seconds")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._closed = False

    def allgather(self, value: object) -> list[Value]:
        """Return the values of all ranks, by rank."""
        return [self._decoded(rank, data) for rank, data in enumerate(self._exchange(_encoded(value)))]

    def broadcast(self, value: object = None, root: int = 0) -> Value:
        """Return the value of the rank `root`. The other ranks may omit theirs."""
        if type(root) is not int or not 0 <= root < self.size:
            raise InvalidValueError(f"root {root!r}: the ranks are 0 to {self.size - 1}")
        return self._decoded(root, self._exchange(_encoded(value) if self.rank == root else _NOTHING)[root])

    def barrier(self) -> None:
        """Return once all ranks have called this."""
        self._exchange(_NOTHING)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the rendezvous, and tell the other ranks about `error` if the transport can. Idempotent."""
        self._closed = True

    def _exchange(self, data: bytes) -> list[bytes]:
        if self._closed:
            raise BadStateError(f"rank {self.rank} has left this rendezvous: it is closed")
        return [data] if self.size == 1 else self._allgather(data)

    @staticmethod
    def _decoded(rank: int, data: bytes) -> Value:
        kind, body = data[:1], data[1:]
        if kind == _BYTES:
            return body
        if kind == _JSON:
            try:
                return json.loads(body)
            except (ValueError, RecursionError):
                raise PeerError(f"rank {rank} sent a value that is not JSON: {body[:40]!r}") from None
        if data == _NOTHING:
            raise PeerError(f"rank {rank} is in another call: all ranks must make the same calls in the same order")
        raise PeerError(f"rank {rank} sent a value of no known kind: {data[:40]!r}")

    @abstractmethod
    def _allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank. There are at least two ranks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        end_block(error, lambda: self.close(error))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}{', closed' if self._closed else ''}>"


def _encoded(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return _BYTES + bytes(value)
    try:
        return _JSON + json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"cannot send {value!r:.80}: {error}. Send bytes, or what JSON can express") from None
