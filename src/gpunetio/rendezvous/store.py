"""Ranks that share a key-value store of torch.distributed."""

from __future__ import annotations

import datetime
from typing import Any

from ..errors import TimedOutError
from .group import TIMEOUT, Rendezvous


class StoreRendezvous(Rendezvous):
    """Ranks that share `store`, a store of torch.distributed: TCPStore, FileStore, PrefixStore, …

    Keys begin with "gpunetio/". For two rendezvous in one store, wrap it in a PrefixStore for each. `timeout` is that
    of `Rendezvous`.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float = TIMEOUT):
        super().__init__(rank, size, timeout)
        self._store, self._turn = store, 0

    def _allgather(self, data: bytes) -> list[bytes]:
        self._turn += 1
        self._store.set(self._key(self._turn, self.rank), data)
        keys = [self._key(self._turn, rank) for rank in range(self.size)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:  # torch.distributed.DistStoreError is one
            raise TimedOutError(f"not all {self.size} ranks came within {self.timeout:g} s: {error}") from None
        found = [bytes(self._store.get(key)) for key in keys]
        if self._turn > 1:  # all ranks are in this round, so they have read the values of the previous one
            self._store.delete_key(self._key(self._turn - 1, self.rank))
        return found

    @staticmethod
    def _key(turn: int, rank: int) -> str:
        return f"gpunetio/{turn}/{rank}"
