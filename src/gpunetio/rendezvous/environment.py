"""Ranks that mpirun or torchrun has started: the environment has their rank and size."""

from __future__ import annotations

import os

from ..errors import NotFoundError, NotSupportedError
from .group import TIMEOUT, Rendezvous
from .mpi import MpiRendezvous
from .store import StoreRendezvous

# Variables of a started rank: Open MPI, MPICH and its relatives (PMI), Slurm's or PRRTE's PMIx.
_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def from_environment(*, timeout: float = TIMEOUT) -> Rendezvous:
    """Return the rendezvous of the ranks that `mpirun` or `torchrun` has started, including this process.

    NotFoundError if neither has started this process. Then use `TcpRendezvous` with rank, size and address.
    """
    if any(name in os.environ for name in _MPI):
        return MpiRendezvous(timeout=timeout)
    if all(name in os.environ for name in _TORCH):
        return _of_torchrun(timeout)
    raise NotFoundError(
        "neither mpirun nor torchrun has started this program, judging by its environment: start it with one, or "
        "give rank and size"
    )


def _of_torchrun(timeout: float) -> Rendezvous:
    try:
        from torch import distributed  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotSupportedError(f"torch is missing ({error}): pip install 'gpunetio[torch]'") from None
    store, rank, size = next(iter(distributed.rendezvous("env://")))
    return StoreRendezvous(distributed.PrefixStore("gpunetio", store), rank, size, timeout=timeout)
