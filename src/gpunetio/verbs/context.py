"""An opened device, from which everything else is made."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import Any

from ..enums import Access, CqOverrun, UarAllocationType
from ..errors import DocaError, InvalidValueError
from ..providers import PortConfig, open_device
from ..providers.provider import PortAttr, Provider
from .arguments import instance, whole
from .cq import CQ
from .device_attr import DeviceAttributes, query_device
from .handle import Handle
from .pd import PD
from .uar import UAR
from .umem import UMEM

_open: set[Context] = set()  # a device goes on until it is closed: so must the memory behind its regions


def open(name: str | None = None, *, port: PortConfig | None = None) -> Context:
    """Open a device (`ibv_open_device`); without a name the first software NIC that no other process has.

    `port` says how a software NIC is attached to the world: addresses, wire, MTU, link layer, faults, capture.
    """
    if port is not None:
        instance("port", port, PortConfig)
    return Context(open_device(name, port))


class Context(Handle):
    """An opened device (`ibv_context`). It takes the provider over, and closes all that was made from it."""

    _rank = 4
    _closes_users = True

    def __init__(self, provider: Provider):
        super().__init__(self)
        self.name = provider.name
        self._provider = provider
        self._uars: dict[UarAllocationType, UAR] = {}
        with ExitStack() as undo:
            _open.add(self)
            undo.callback(_open.discard, self)
            undo.callback(provider.close)
            self._opened(f"context {self.name}", undo)

    @property
    def provider(self) -> Provider:
        """The device behind this context."""
        self.check_open()
        return self._provider

    @cached_property
    def _device(self) -> DeviceAttributes:
        return query_device(self.provider)

    def query_device(self) -> DeviceAttributes:
        """What the device is and can do (`doca_verbs_query_device`). It is asked once."""
        self.check_open()
        return self._device

    def query_port(self, port: int = 1) -> PortAttr:
        """State, MTUs and addresses of a port, numbered from 1 (`ibv_query_port`)."""
        self._check_port(port)
        return self.provider.query_port(port)

    def query_gid(self, port: int = 1, index: int = 0) -> bytes:
        """16 raw bytes of a port's GID; all zero for an empty entry (`ibv_query_gid`)."""
        self._check_port(port)
        size = self.query_device().gid_table_size
        if not 0 <= whole("index", index) < size:
            raise InvalidValueError(f"GID index {index}: the table of {self} has the indices 0 to {size - 1}")
        return self.provider.query_gid(port, index)

    def _check_port(self, port: int) -> None:
        count = self.query_device().phys_port_cnt
        if not 1 <= whole("port", port) <= count:
            raise InvalidValueError(f"port {port}: {self} has the ports 1 to {count}")

    def create_pd(self) -> PD:
        """A protection domain (`ibv_alloc_pd`)."""
        return PD(self)

    def create_cq(
        self,
        cqe: int,
        *,
        overrun: CqOverrun = CqOverrun.DISABLE,
        collapsed: bool = False,
        external_umem: tuple[UMEM, int] | None = None,
        external_dbr_umem: tuple[UMEM, int] | None = None,
        external_uar: UAR | None = None,
        context: Any = None,
    ) -> CQ:
        """A completion queue of `cqe` entries, a power of two (`doca_verbs_cq_create`).

        `external_umem` and `external_dbr_umem`, each (UMEM, byte offset), place the ring and its doorbell record in
        memory of yours, whose entries you preset; without them both are made here. `overrun` lets the device write
        over entries nobody read; a `collapsed` queue keeps only the last entry. `context` is any object of yours.
        """
        return CQ(
            self,
            cqe,
            overrun=overrun,
            collapsed=collapsed,
            external_umem=external_umem,
            external_dbr_umem=external_dbr_umem,
            external_uar=external_uar,
            context=context,
        )

    def create_uar(self, kind: UarAllocationType = UarAllocationType.NONCACHE) -> UAR:
        """A page of doorbell registers (`doca_verbs_uar_create`)."""
        return UAR(self, kind)

    def shared_uar(self, kind: UarAllocationType, instead: UarAllocationType) -> UAR:
        """The page that queues without one of their own share: of the kind that is wanted, or else of the other.

        The original allocates a page a queue; a device has few hundred of them.
        """
        uar = self._uars.get(kind)
        if uar is None or uar.closed:
            try:
                uar = UAR(self, kind)
            except DocaError:
                uar = UAR(self, instead)
            self._uars[kind] = uar
        return uar

    def register_umem(self, obj: Any, access: Access = Access.LOCAL_WRITE) -> UMEM:
        """Memory that queues can be placed in (`doca_verbs_umem_create`)."""
        return UMEM(self, obj, access)
