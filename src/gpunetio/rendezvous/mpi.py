"""Ranks of an MPI program that uses mpi4py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..errors import NotSupportedError, TimedOutError
from .group import TIMEOUT, Rendezvous

_LOOK_SECONDS = 0.001

_left: list[object] = []  # abandoned collective calls, and the memory that MPI may still write to


class MpiRendezvous(Rendezvous):
    """The ranks of an MPI communicator: `comm`, one of mpi4py's, or MPI.COMM_WORLD.

    Needs mpi4py (the extra 'mpi'). `timeout` is that of `Rendezvous`. After a TimedOutError the communicator cannot be
    used any more, because MPI cannot cancel a collective call.
    """

    def __init__(self, comm: Any = None, *, timeout: float = TIMEOUT):
        try:
            from mpi4py import MPI  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise NotSupportedError(f"mpi4py is missing ({error}): pip install 'gpunetio[mpi]'") from None
        self._comm, self._bytes = MPI.COMM_WORLD if comm is None else comm, MPI.BYTE
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout)

    def _allgather(self, data: bytes) -> list[bytes]:
        end = time.monotonic() + self.timeout
        lengths = np.zeros(self.size, np.int64)
        own = np.array([len(data)])
        self._finish(self._comm.Iallgather(own, lengths), end, own, lengths)
        ends = np.cumsum(lengths)
        found = np.zeros(int(ends[-1]), np.uint8)
        layout = [found, lengths.tolist(), (ends - lengths).tolist(), self._bytes]
        self._finish(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), layout), end, data, found)
        return [found[stop - length : stop].tobytes() for length, stop in zip(lengths, ends)]

    def _finish(self, request: Any, end: float, *buffers: object) -> None:
        try:
            while not request.Test():
                if time.monotonic() > end:
                    raise TimedOutError(f"rank {self.rank}: not all {self.size} ranks came within {self.timeout:g} s")
                time.sleep(_LOOK_SECONDS)
        except BaseException:  # including Ctrl+C
            _left.append((request, buffers))
            raise
