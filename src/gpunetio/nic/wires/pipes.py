"""A wire of two pipes in memory, to one NIC of this or another process of this host."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from ...fabric.frames import PIPE, pipe_end
from ...fabric.inprocess import LinkEnd
from ...fabric.link import Link
from ..transport.wire_kinds import PIPES
from .wire import Wire

WINDOW = 128


class Pipes(Wire):
    """One end of two pipes. `release` is called when the wire is closed.

    `on_lan`: the wire belongs to the LAN, and may carry Ethernet frames. `takes_frames` is then the address of the word
    that announces that this end accepts frames.
    """

    kind: int = PIPES
    window: int = WINDOW
    peer: Hashable
    gids: tuple[bytes, bytes]
    events: tuple[int, ...]
    notify_fd: int
    on_lan: bool
    takes_frames: int

    def __init__(
        self, end: LinkEnd, peer: Hashable, gids: tuple[bytes, bytes], infiniband: bool, on_lan: bool,
        release: Callable[[], None],
    ):
        self.peer, self.gids, self.notify_fd = peer, gids, end.peer_notify_fd
        self.events = (peer.event_fd,) if isinstance(peer, Link) else ()
        self._end, self._infiniband, self._release = end, infiniband, release
        self.on_lan, self.takes_frames = on_lan, end.rx + PIPE.takes_frames

    def open(self, row: np.ndarray) -> np.ndarray:
        row["rx"] = np.void(pipe_end(self._end.rx, self._end.capacity).tobytes())
        row["infiniband"] = self._infiniband
        if self.on_lan:
            row["takes_frames"] = self._end.tx + PIPE.takes_frames
        return pipe_end(self._end.tx, self._end.capacity)

    def close(self) -> None:
        self._release()
