"""Messages that have arrived and wait for their turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from .path import Path

Arrived: TypeAlias = "tuple[Path, bytes]"

MOST = 4096  # messages that wait: a flood, at the rate at which Python handles it, is a second of it


class Arrivals:
    """Messages by sender. Known peers come first; strangers take turns, so a flood of one keeps no other waiting.

    A stranger may have as many messages here as there is room for others. More than that are dropped: who has sent
    them sends them again.
    """

    def __init__(self, most: int = MOST):
        self._most, self._count = most, 0
        self._known: deque[Arrived] = deque()
        self._strangers: OrderedDict[bytes, deque[Arrived]] = OrderedDict()  # by GID; whose turn it is comes first

    def __len__(self) -> int:
        return self._count

    def add(self, path: Path, mad: bytes, known: bool) -> None:
        """Add a message. `known`: it is about a communication with its sender."""
        of = self._known if known else self._strangers.get(path.gid)
        if self._count + (len(of) if of is not None else 0) >= self._most:
            return
        if of is None:
            of = self._strangers[path.gid] = deque()
        of.append((path, mad))
        self._count += 1

    def take(self) -> Arrived:
        """Return the message whose turn it is. There must be one."""
        self._count -= 1
        if self._known:
            return self._known.popleft()
        gid, of = self._strangers.popitem(last=False)
        found = of.popleft()
        if of:
            self._strangers[gid] = of
        return found
