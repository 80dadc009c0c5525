"""An opened device, from which everything else is made."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from ..enums import Access, CqOverrun, GidType, UarAllocationType
from ..errors import DeviceFatalError, DocaError, InvalidValueError, NotSupportedError
from ..formats.cqe import CQE_SIZE
from ..interrupts import uninterrupted
from ..providers import PortConfig, open_device
from ..providers.provider import ClockInfo, PortAttr, Provider
from .arguments import instance, whole
from .channel import CompChannel
from .cq import CQ, CqInitAttr
from .device_attr import DeviceAttributes, query_device
from .devx import Devx
from .events import AsyncEvent, AsyncEvents
from .handle import Handle
from .kinds import DEVX, PLAIN, Kinds
from .mr import Dmabuf
from .pd import PD
from .plain import needs_devx
from .uar import UAR
from .umem import UMEM

logger: logging.Logger = logging.getLogger("gpunetio.verbs")

_open: set[Context] = set()  # a device goes on until it is closed: so must the memory behind its regions


def open(name: str | None = None, *, port: PortConfig | None = None) -> Context:
    """Open a device (`ibv_open_device`): a card or a software NIC.

    Without a name it is the first card with an active port, or else the first software NIC that no other process has;
    the log says which (INFO). `port` says how a software NIC is attached to the world: addresses, wire, MTU, link
    layer, faults, capture.
    """
    if port is not None:
        instance("port", port, PortConfig)
    return uninterrupted(lambda: Context(open_device(name, port)))


def import_context(provider: Provider) -> Context:
    """A context on a device that somebody else has opened (`doca_verbs_bridge_verbs_context_import`).

    Closing it closes what was made from it. The device stays the caller's, and open until then.
    """
    return Context(provider, imported=True)


class Context(Handle):
    """An opened device (`ibv_context`). It closes all that was made from it, and the device unless that was imported.

    `async_events` are its asynchronous events: a `fd`, and `async for`.
    """

    _rank = 4
    _closes_users = True
    name: str
    kinds: Kinds
    async_events: AsyncEvents

    def __init__(self, provider: Provider, imported: bool = False):
        super().__init__(self)
        self.name = provider.name
        self._provider = provider
        self._imported = imported
        self.kinds = DEVX if provider.plain is None else PLAIN
        self._uars: dict[UarAllocationType, UAR] = {}
        with ExitStack() as undo:
            _open.add(self)
            undo.callback(_open.discard, self)
            if not imported:
                undo.callback(provider.close)
            self.async_events = AsyncEvents(provider, undo)
            self._opened(f"context {self.name}", undo)

    def _details(self) -> Iterable[str]:
        return ("software NIC",) if self._provider.software else ()

    def _close(self) -> None:
        """See `Handle`. What somebody has made of mailboxes by the provider goes first: it may use all the rest."""
        if self._undo is not None and not self._imported:
            ours = {user._handle for user in self.users}
            for handle in reversed(self._provider.devx_objects()):
                if handle not in ours:
                    self._close_stray(handle)
        super()._close()

    def _close_stray(self, handle: int) -> None:
        try:
            self._provider.devx_obj_destroy(handle)
        except DocaError as error:
            logger.warning("%s: DEVX object %d stays: %s", self, handle, error)

    @property
    def provider(self) -> Provider:
        """The device behind this context."""
        self.check_open()
        return self._provider

    @property
    def has_devx(self) -> bool:
        """Whether kernels can drive queues of this device, and memory of yours can hold them: by DEVX, as mlx5 has it.

        Without it libibverbs alone makes the queues, and the CPU posts and polls: NotSupportedError for all else.
        """
        return self.provider.plain is None

    @cached_property
    def devx(self) -> Devx:
        """DEVX: commands of the PRM, and objects that they make. NotSupportedError without DEVX, and in SDK mode."""
        if not self.has_devx:
            raise needs_devx(self, "Context.devx")
        if not self.provider.carries_mailboxes:
            raise NotSupportedError(
                f"Context.devx: the DOCA SDK drives {self.name}, and takes no mailboxes; unset DOCA_SDK_LIB_PATH"
            )
        return Devx(self)

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

    def gid_type(self, port: int = 1, index: int = 0) -> GidType:
        """What packets from a GID look like (`ibv_query_gid_ex`)."""
        self._check_port(port)
        return self.provider.gid_type(port, whole("index", index))

    def _check_port(self, port: int) -> None:
        count = self.query_device().phys_port_cnt
        if not 1 <= whole("port", port) <= count:
            raise InvalidValueError(f"port {port}: {self} has the ports 1 to {count}")

    def create_pd(self) -> PD:
        """A protection domain (`doca_verbs_pd_create`)."""
        return PD(self)

    def import_pd(self, pdn: int) -> PD:
        """A protection domain that somebody else has made on this device (`doca_verbs_bridge_verbs_pd_import`).

        Closing it closes what was made from it here, and leaves the domain itself alone.
        """
        return PD(self, pdn)

    def create_comp_channel(self) -> CompChannel:
        """A completion channel (`doca_verbs_comp_channel_create`)."""
        return self.kinds.channel(self)

    def get_async_event(self, timeout: float) -> AsyncEvent | None:
        """What happened to an object, the port or the device; None when nothing does within `timeout` seconds.

        `doca_verbs_get_async_event`. Each event must be acknowledged: `event.ack()`.
        """
        self.check_open()
        return self.async_events.get(timeout)

    def query_clock(self) -> ClockInfo:
        """How the `timestamp` of a completion is converted to the time of day (`mlx5dv_get_clock_info`).

        Ask now and then: the two clocks drift apart. NotSupportedError where completions have no timestamps.
        """
        return self.provider.query_clock()

    def raw_clock(self) -> int:
        """The device's clock now, in the cycles of timestamps (`ibv_query_rt_values_ex`)."""
        return self.provider.raw_clock()

    def create_cq(
        self,
        cqe: int,
        *,
        cqe_size: int = CQE_SIZE,
        channel: CompChannel | None = None,
        comp_vector: int = 0,
        external_datapath: bool = False,
        overrun: CqOverrun = CqOverrun.DISABLE,
        collapsed: bool = False,
        external_umem: tuple[UMEM, int] | None = None,
        external_dbr_umem: tuple[UMEM, int] | None = None,
        external_uar: UAR | None = None,
        context: Any = None,
    ) -> CQ:
        """A completion queue of `cqe` entries of `cqe_size` bytes, 64 or 128 (`doca_verbs_cq_create`).

        `cqe` is rounded up to what the device can have, which is a power of two; `query()` tells. Kernels read entries
        of 64 bytes only. `channel` tells of completions when `req_notify()` has asked for that, and `comp_vector` says
        which of the device's event queues that goes by. With `external_datapath` somebody else
        reads the entries, a kernel for one, and `poll()` refuses; so it is with a ring in memory of yours.

        `external_umem` and `external_dbr_umem`, each (UMEM, byte offset), place the ring and its doorbell record in
        memory of yours, whose entries you preset; without them both are made here. `overrun` lets the device write
        over entries nobody read; a `collapsed` queue keeps only the last entry. `context` is any object of yours.
        """
        attr = CqInitAttr(
            cqe=cqe,
            cqe_size=cqe_size,
            channel=channel,
            comp_vector=comp_vector,
            external_datapath=external_datapath,
            overrun=overrun,
            collapsed=collapsed,
            external_umem=external_umem,
            external_dbr_umem=external_dbr_umem,
            external_uar=external_uar,
            context=context,
        )
        return self.kinds.cq(self, attr)

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
            except DeviceFatalError:
                raise
            except DocaError as error:
                logger.info("%s: doorbell page of kind %s, as there is none of kind %s (%s)",
                            self.name, instead.name, kind.name, error)  # fmt: skip
                uar = UAR(self, instead)
            self._uars[kind] = uar
        return uar

    def register_dmabuf_umem(
        self, fd: int, nbytes: int, access: Access = Access.LOCAL_WRITE, *, offset: int = 0, memory: Any = None
    ) -> UMEM:
        """`nbytes` at `offset` of a dmabuf for queues (`doca_verbs_umem_create` with a dmabuf id).

        `memory` is what lies there, from its start, and stays alive: without its address no kernel finds the queues.
        """
        return UMEM(self, memory, access, Dmabuf(fd, offset, nbytes))

    def register_umem(self, obj: Any, access: Access = Access.LOCAL_WRITE, *, nbytes: int | None = None) -> UMEM:
        """Memory that queues can be placed in (`doca_verbs_umem_create`): an object's, or `nbytes` from an address."""
        return UMEM(self, obj, access, nbytes=nbytes)
