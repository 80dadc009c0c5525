"""Notice when the process of a connection's peer has ended.

Linux disconnects the connections of a program that is killed. A software NIC, and the connection manager on it, end
with their program, and then send nothing. But a NIC of this host holds its address as long as it lives.
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
    """A thread that checks the connections that `connections` returns, once a second."""

    def __init__(self, connections: Callable[[], list[tuple[Agent, Communication]]]):
        self._connections = connections
        self._owners: WeakKeyDictionary[Communication, int] = WeakKeyDictionary()  # the peer's process
        self._stopping = threading.Event()
        self._thread = ServiceThread("gpunetio CM peers", self._serve)
        self._thread.start()

    def begin(self, communication: Communication) -> None:
        """Note which process has the peer's address. If no process of this host has it, nothing is watched."""
        with suppress(TimedOutError):  # it is alive, but busy
            if (owner := _owner(communication)) is not None:
                self._owners[communication] = owner

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self.look()

    def look(self) -> None:
        """End the connections whose peers' processes have ended."""
        for agent, communication in self._connections():
            if communication.state in _CONNECTED and communication in self._owners:
                with suppress(TimedOutError, DocaError):
                    if _owner(communication) != self._owners[communication]:
                        with agent.machine() as machine:
                            machine.peer_gone(communication)


def _owner(communication: Communication) -> int | None:
    """Return the process that has the peer's address. TimedOutError if it does not answer."""
    return owner_of(text_of(communication.path.gid), timeout=0)
