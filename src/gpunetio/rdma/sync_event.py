"""Sync events: 64-bit numbers with which programs on several hosts wait for each other."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import NoReturn

from ..arguments import deadline
from ..closing import Closing
from ..core import Buf, MemoryMap, RemoteMemory
from ..enums import Access
from ..errors import BadStateError, TimedOutError
from ..interrupts import Whole
from ..jit.compile import engine_function
from ..jit.ops import ld_acquire64, st_release64
from ..memory import HostMemory
from ..verbs import PD
from .connection import RdmaConnection
from .tasks import FetchAdd, Write, word

_WORD = 8  # bytes
_NAP = 50e-6  # seconds between two reads of the number


@engine_function
def _load(address):
    return ld_acquire64(address)


@engine_function
def _store(address, value):
    st_release64(address, value)


class SyncEvent(Closing, metaclass=Whole):
    """A 64-bit number in this process's memory (`doca_sync_event`), which peers set and read with tasks.

    `value` reads and sets it locally. `export` returns its description for a peer, whose tasks take the
    `RemoteMemory.from_export` of it as the event.
    """

    def __init__(self, pd: PD):
        with ExitStack() as undo:
            self._memory = HostMemory(_WORD)
            undo.callback(self._memory.close)
            self._map = MemoryMap(
                pd, self._memory.address, Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC, nbytes=_WORD
            )
            undo.callback(self._map.close)
            self._undo = undo.pop_all()

    @property
    def value(self) -> int:
        """Return the number (`doca_sync_event_get`). Everything a peer wrote before it is then visible as well."""
        self._map.check_open()
        return int(_load(self._memory.address)) % (1 << 64)

    @value.setter
    def value(self, value: int) -> None:
        """Set the number (`doca_sync_event_update_set`)."""
        self._map.check_open()
        _store(self._memory.address, word("value", value) - (value >> 63 << 64))

    def export(self) -> bytes:
        """Return a description for a peer (`doca_sync_event_export_to_remote_net`)."""
        return self._map.export_rdma()

    def wait_gt(self, value: int, timeout: float) -> int:
        """Wait until the number is greater than `value`, and return it (`doca_sync_event_wait_gt`).

        TimedOutError after `timeout` seconds. This polls the number every 50 µs.
        """
        end = deadline(timeout)
        while (found := self.value) <= value:
            if time.monotonic() > end:
                raise TimedOutError(f"the sync event is still {found:#x} after {timeout:g} s, not above {value:#x}")
            time.sleep(_NAP)
        return found

    def close(self) -> None:
        """Destroy the event. Idempotent. A peer that uses it afterwards gets an error."""
        self._undo.close()

    def __reduce__(self) -> NoReturn:
        raise BadStateError("a sync event cannot be pickled: give a peer what export() returns")


class SyncEventGet(FetchAdd):
    """Read a peer's sync event into `value` (`doca_rdma_task_remote_net_sync_event_get`)."""

    def __init__(self, connection: RdmaConnection, event: RemoteMemory | Buf, *, user_data: object = None):
        super().__init__(connection, event, 0, user_data=user_data)


class SyncEventSet(Write):
    """Set a peer's sync event (`doca_rdma_task_remote_net_sync_event_notify_set`).

    When the peer sees the number, everything sent and written earlier on the connection has arrived.
    """

    def __init__(self, connection: RdmaConnection, event: RemoteMemory | Buf, value: int, *, user_data: object = None):
        super().__init__(connection, word("value", value).to_bytes(_WORD, sys.byteorder), event, user_data=user_data)
