"""Notices that the process of a connection's peer has ended.

Linux disconnects what a program leaves when it is killed. A software NIC, and the connection manager on it, end with
their program, which then says nothing. But a NIC of this host holds its address while it lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from ..cm.address import text_of
from ..cm.agent import Agent
from ..cm.communication import Communication, State
from ..errors import DocaError, TimedOutError
from ..fabric.claims import owner_of
from ..service import ServiceThread

_PERIOD = 1.0  # seconds
_CONNECTED = State.REP_SENT, State.MRA_REP_RECEIVED, State.ESTABLISHED, State.DREQ_SENT


class PeerWatch:
    """A thread that looks after connections, which `connections` returns, once a second."""

    def __init__(self, connections: Callable[[], list[tuple[Agent, Communication]]]):
        self._connections = connections
        self._owners: WeakKeyDictionary[Communication, int] = WeakKeyDictionary()  # the peer's process
        self._stopping = threading.Event()
        self._thread = ServiceThread("gpunetio CM peers", self._serve)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._look()

    def _look(self) -> None:
        seen: dict[bytes, int | None] = {}  # who has an address
        for agent, communication in self._connections():
            gid = communication.path.gid
            if communication.state not in _CONNECTED:
                continue
            with suppress(TimedOutError):  # it lives, but is busy
                if gid not in seen:
                    seen[gid] = owner_of(text_of(gid), timeout=0)
                before = self._owners.get(communication)
                if before is None and seen[gid] is not None:
                    self._owners[communication] = seen[gid] or 0
                elif before is not None and seen[gid] != before:
                    with suppress(DocaError), agent.machine() as machine:
                        machine.peer_gone(communication)
