"""The queue of arrived messages that wait to be handled."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from .path import Path

Arrived: TypeAlias = "tuple[Path, bytes]"

MOST = 4096  # waiting messages: about a second's work for Python in a flood


class Arrivals:
    """A queue of messages by sender. Known peers come first; strangers take turns, so one that floods delays no other.

    A stranger's queue may only take half of the space that other messages leave. Further messages are dropped; their
    senders resend them.
    """

    def __init__(self, most: int = MOST):
        self._most, self._count = most, 0
        self._known: deque[Arrived] = deque()
        self._strangers: OrderedDict[bytes, deque[Arrived]] = OrderedDict()  # by GID; the next in turn comes first

    def __len__(self) -> int:
        return self._count

    def add(self, path: Path, mad: bytes, known: bool) -> None:
        """Add a message. `known` says that it is about a communication with its sender."""
        of = self._known if known else self._strangers.get(path.gid)
        if self._count + (len(of) if of is not None else 0) >= self._most:
            return
        if of is None:
            of = self._strangers[path.gid] = deque()
        of.append((path, mad))
        self._count += 1

    def take(self) -> Arrived:
        """Return the next message in turn. There must be one."""
        self._count -= 1
        if self._known:
            return self._known.popleft()
        gid, of = self._strangers.popitem(last=False)
        found = of.popleft()
        if of:
            self._strangers[gid] = of
        return found
