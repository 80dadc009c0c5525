"""What the DOCA SDK makes on a device: memory and doorbell pages for queues, and queues with an external data path.

Rings and doorbell records always are in memory that the caller gives; so kernels and the CPU data path use them as
they use those of gpunetio's own control path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ctypes import byref, c_int, c_uint8, c_uint32, c_void_p
from dataclasses import dataclass, field
from typing import Any

from ...enums import Access, QpAttrMask, QpState, UarAllocationType
from ...errors import InvalidValueError, NotSupportedError, UnexpectedError
from ...formats.cqe import CQE_SIZE
from ...formats.doorbell import CQ_DBREC, UAR_REG_OFFSET
from ...memory import round_up
from ..provider import UarPage
from .libraries import Sdk, not_bound
from .signatures import Gid

_NO_FLAGS = 0  # DOCA_VERBS_CONTEXT_CREATE_FLAGS_NONE
_ON = 1
_RECORD_ALIGNMENT = 64  # of the record behind the ring of a CQ or SRQ, in the same UMEM
# The bits of doca_access_flag besides the first have names that are known and no values; all of them together have one.
_ACCESS = {Access.LOCAL_READ: 0, Access.LOCAL_WRITE: 1, Access.all(): 0xF}


@dataclass(frozen=True)
class Ring:
    """Where a ring and its doorbell record lie: UMEM, offset in it, and the address that this process sees."""

    umem_id: int
    offset: int
    address: int
    dbr_umem_id: int
    dbr_offset: int
    dbr_address: int


@dataclass
class _Made:
    """An object of the SDK's, and what takes it away."""

    pointer: int
    undo: ExitStack


class SdkDevice:
    """A device that libibverbs has opened, as the SDK sees it. Objects are known by the numbers that the device gives.

    It must be closed before the `ibv_pd` and the `ibv_context`.
    """

    def __init__(self, sdk: Sdk, ibv_context: int, ibv_pd: int):
        self.sdk = sdk
        self._made: dict[tuple[str, int], _Made] = {}  # by what it is, and its number
        with ExitStack() as undo:
            self._dev = self._make(undo, "doca_rdma_bridge_open_dev_from_pd", ibv_pd, by="doca_dev_close")
            self._context = self._make(
                undo, "doca_verbs_bridge_verbs_context_import", ibv_context, _NO_FLAGS, by="doca_verbs_context_destroy"
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Give the device back, whose objects are gone."""
        self._undo.close()
