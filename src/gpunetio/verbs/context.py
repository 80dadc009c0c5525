"""An open device, from which all other objects are created."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property

from ..arguments import instance, member, text, whole
from ..dropped import Closable, Dropped, drop_root, hold, roots
from ..enums import Access, CqOverrun, GidType, UarAllocationType
from ..errors import DeviceFatalError, DocaError, InUseError, InvalidValueError, NotSupportedError
from ..formats.cqe import CQE_SIZE
from ..interrupts import uninterrupted
from ..providers import PortConfig, open_device
from ..providers.provider import ClockInfo, PortAttr, Provider
from .channel import CompChannel
from .cq import CQ, CqInitAttr
from .device_attr import DeviceAttributes, query_device
from .devx.objects import Devx, DevxObject
from .events import AsyncEvent, AsyncEvents
from .handle import Handle
from .ibv.device import needs_devx
from .kinds import DEVX, PLAIN, Kinds
from .mr import Dmabuf
from .pd import PD
from .uar import UAR
from .umem import UMEM

logger: logging.Logger = logging.getLogger("gpunetio.verbs")


def open(name: str | None = None, *, port: PortConfig | None = None) -> Context:
    """Open a device, a card or a software NIC (`ibv_open_device`).

    Without a name, open the first card with an active port, or else the first software NIC that no other process has
    open; the log names it (INFO). `port` configures the port of a software NIC: addresses, wire, MTU, link layer,
    faults, capture.
    """
    if name is not None:
        text("name", name)
    if port is not None:
        instance("port", port, PortConfig)
    return uninterrupted(_open_context, name, port)


def _open_context(name: str | None, port: PortConfig | None) -> Context:
    roots.close_all()
    try:
        ctx = Context(open_device(name, port))
    except (InUseError, InvalidValueError):  # a context that was dropped but not closed may still hold the device
        if not roots.found():
            raise
        ctx = Context(open_device(name, port))
    ctx._by_name = True
    hold(ctx)
    return ctx


def import_context(provider: Provider) -> Context:
    """Return a context on a device that the caller has opened (`doca_verbs_bridge_verbs_context_import`).

    Closing the context closes everything created from it. The caller closes the device, after the context.
    """
    return Context(provider, imported=True)


class Context(Handle):
    """An open device (`ibv_context`). Closing it closes everything created from it, and the device unless imported.

    `async_events` are the device's asynchronous events: use `fd`, or `async for`.
    """

    _rank = 4
    _closes_users = True
    name: str
    kinds: Kinds
    async_events: AsyncEvents
    _by_name = False  # whether `open` created the context; otherwise its creator closes it

    def __init__(self, provider: Provider, imported: bool = False):
        self.dropped: Dropped[Closable] = Dropped()
        self.kept: dict[Handle, None] = {}
        super().__init__(self)
        self.name = provider.name
        self._provider = provider
        self._imported = imported
        self.kinds = DEVX if provider.plain is None else PLAIN
        self._uars: dict[UarAllocationType, UAR] = {}
        with ExitStack() as undo:
            if not imported:
                undo.callback(provider.close)
            self.async_events = AsyncEvents(provider, undo)
            self._opened(f"context {self.name}", undo)

    def _details(self) -> Iterable[str]:
        return ("software NIC",) if self._provider.software else ()

    def when_dropped(self) -> None:
        if self._by_name:
            drop_root(self)

    def close_with_owner(self) -> None:
        """Close the device. First destroy the objects that users created with DEVX: they may use any other object.

        Flow-steering objects close even before those: they are DEVX objects as well, and close in their own order.
        """
        dropped = [what for what in self.dropped.take() if isinstance(what, Handle)]
        for what in dropped:
            what.know()  # if the collector found the context itself, it has already cleared these weak references
        with ExitStack() as steps:
            steps.callback(self._close_objects)
            for user in self.users:
                if user._rank < 0:
                    steps.callback(user.close_with_owner)

    def _close_objects(self) -> None:
        if self._undo is not None and not self._imported:
            ours = {user.devx_handle for user in self.users}
            for handle in reversed(self._provider.devx_objects()):
                if handle not in ours:
                    self._close_stray(handle)
            made = [user for user in reversed(self.users) if isinstance(user, DevxObject)]
            while sum(user.destroy_if_unused() for user in made):  # after a MODIFY, an object can use newer objects
                pass
        super().close_with_owner()

    def _close_stray(self, handle: int) -> None:
        try:
            self._provider.devx_obj_destroy(handle)
        except DocaError as error:
            logger.warning("%s: DEVX object %d stays: %s", self, handle, error)

    @property
    def provider(self) -> Provider:
        """Return the device behind this context."""
        self.check_open()
        return self._provider

    @property
    def has_devx(self) -> bool:
        """Return whether the device has DEVX, which lets kernels drive its queues and lets queues lie in your memory.

        Without DEVX, libibverbs creates the queues, and the CPU posts and polls. Everything else raises
        NotSupportedError.
        """
        return self.provider.plain is None

    @cached_property
    def devx(self) -> Devx:
        """Return DEVX: commands of the PRM, and the objects they create.

        NotSupportedError on a device without DEVX, and in SDK mode.
        """
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
        """Return the device's identity, limits and capabilities, queried only once (`doca_verbs_query_device`)."""
        self.check_open()
        return self._device

    def query_port(self, port: int = 1) -> PortAttr:
        """Return the state, MTUs and addresses of a port; ports count from 1 (`ibv_query_port`)."""
        self._check_port(port)
        return self.provider.query_port(port)

    def query_gid(self, port: int = 1, index: int = 0) -> bytes:
        """Return a GID of a port as 16 raw bytes, all zero for an empty entry (`ibv_query_gid`)."""
        self._check_port(port)
        size = self.query_device().gid_table_size
        if not 0 <= (index := whole("index", index)) < size:
            raise InvalidValueError(f"GID index {index}: the table of {self} has the indices 0 to {size - 1}")
        return self.provider.query_gid(port, index)

    def gid_type(self, port: int = 1, index: int = 0) -> GidType:
        """Return the type of packets sent from a GID: InfiniBand, RoCE v1 or RoCE v2 (`ibv_query_gid_ex`)."""
        self._check_port(port)
        return self.provider.gid_type(port, whole("index", index))

    def _check_port(self, port: int) -> None:
        count = self.query_device().phys_port_cnt
        if not 1 <= whole("port", port) <= count:
            raise InvalidValueError(f"port {port}: {self} has the ports 1 to {count}")

    def create_pd(self) -> PD:
        """Create a protection domain (`doca_verbs_pd_create`)."""
        return PD(self)

    def import_pd(self, pdn: int) -> PD:
        """Return a protection domain that the caller has created on this device (`doca_verbs_bridge_verbs_pd_import`).

        Closing it closes what was created from it here. The domain on the device stays allocated.
        """
        return PD(self, pdn)

    def create_comp_channel(self) -> CompChannel:
        """Create a completion channel (`doca_verbs_comp_channel_create`)."""
        return self.kinds.channel(self)

    def get_async_event(self, timeout: float) -> AsyncEvent | None:
        """Return the next event of an object, the port or the device, or None after `timeout` seconds without one.

        `doca_verbs_get_async_event`. Acknowledge each event with `event.ack()`.
        """
        self.check_open()
        return self.async_events.get(timeout)

    def query_clock(self) -> ClockInfo:
        """Return the data that converts a completion's `timestamp` to the time of day (`mlx5dv_get_clock_info`).

        Query it repeatedly, because the two clocks drift apart. NotSupportedError if completions have no timestamps.
        """
        return self.provider.query_clock()

    def raw_clock(self) -> int:
        """Return the current value of the device's clock, in the cycles of timestamps (`ibv_query_rt_values_ex`)."""
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
        context: object = None,
    ) -> CQ:
        """Create a completion queue of `cqe` entries of `cqe_size` bytes, 64 or 128 (`doca_verbs_cq_create`).

        `cqe` is rounded up to a power of two, or to what the device supports; `query()` returns the result. Kernels can
        read only 64-byte entries. `channel` reports completions after `req_notify()`; `comp_vector` selects the
        device's event queue for these reports. With `external_datapath`, something else, such as a kernel, reads the
        entries, and `poll()` raises an error. The same holds for a ring in your own UMEM.

        `external_umem` and `external_dbr_umem`, each (UMEM, byte offset), place the ring and its doorbell record in
        your UMEMs; you initialize the entries. Without them, both are allocated for you. `overrun` lets the device
        overwrite unread entries; a `collapsed` queue keeps only the last entry. `context` is an arbitrary object, kept
        as an attribute of the queue.
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
        """Allocate a page of doorbell registers (`doca_verbs_uar_create`)."""
        return UAR(self, kind)

    def shared_uar(self, kind: UarAllocationType, instead: UarAllocationType) -> UAR:
        """Return the page shared by queues that have no page of their own: of kind `kind`, or else of kind `instead`.

        The C library allocates a page per queue, but a device has only a few hundred pages.
        """
        kind, instead = (
            member(name, value, UarAllocationType) for name, value in (("kind", kind), ("instead", instead))
        )
        uar = self._uars.get(kind)
        if uar is None or uar.closed:
            try:
                uar = UAR(self, kind)
            except DeviceFatalError:
                raise
            except DocaError as error:
                logger.info("%s: doorbell page of kind %s, as there is none of kind %s (%s)",
                            self.name, instead.name, kind.name, error)
                uar = UAR(self, instead)
            self._uars[kind] = uar
        return uar

    def register_dmabuf_umem(
        self, fd: int, nbytes: int, access: Access = Access.LOCAL_WRITE, *, offset: int = 0, memory: object = None
    ) -> UMEM:
        """Register `nbytes` at `offset` of a dmabuf for queues (`doca_verbs_umem_create` with a dmabuf id).

        `memory` is the memory behind the dmabuf, from its start; the UMEM keeps it alive. Without `memory`, the queues
        have no address, and kernels cannot use them.
        """
        return UMEM(self, memory, access, Dmabuf(fd, offset, nbytes))

    def register_umem(self, obj: object, access: Access = Access.LOCAL_WRITE, *, nbytes: int | None = None) -> UMEM:
        """Register memory for queues (`doca_verbs_umem_create`): that of `obj`, or `nbytes` at the address `obj`."""
        return UMEM(self, obj, access, nbytes=nbytes)
