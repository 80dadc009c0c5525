"""NVIDIA devices as a provider: ConnectX and BlueField, driven through libmlx5's DEVX."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from ctypes import byref, c_uint16, c_uint32, sizeof
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...enums import Access, UarAllocationType
from ...errors import DeviceFatalError, DocaError, FullError, InvalidValueError, NotSupportedError
from ...formats import commands as cmd
from ...formats.commands import Status
from ...formats.events import EventType, eqe
from ...formats.wqe import AV_SEG
from ...memory import PAGE
from ..event_queue import EventQueue
from ..provider import ClockInfo, Event, UarPage
from ..sdk.provider import through_sdk
from . import flow
from . import structs as s
from .device import HUNG_UP, VerbsDevice, of_port_or_device
from .errors import GONE, command_name, command_refused, errno_of, refused
from .libraries import Library, libmlx5

if TYPE_CHECKING:
    from .structs import Pointer

logger: logging.Logger = logging.getLogger("gpunetio.providers")

_UAR = {
    UarAllocationType.BLUEFLAME:          s.MLX5DV_UAR_ALLOC_TYPE_BF,
    UarAllocationType.NONCACHE:           s.MLX5DV_UAR_ALLOC_TYPE_NC,
    UarAllocationType.NONCACHE_DEDICATED: s.MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED,
}
_NUMBER = slice(cmd.CREATE_QP_OUT.offset("qpn"), cmd.CREATE_QP_OUT.offset("qpn") + 3)  # same offset for all objects
_EQE_BYTES = 64
_OF_DEVICE = (EventType.PORT_CHANGE, EventType.INTERNAL_ERROR)


@dataclass
class _Channel:
    """A DEVX event channel. `told` maps our cookies to the subscriber's cookie, event type and object number.

    The context reports events of the port and the device, for all channels; they wait in `queue`.
    """

    pointer: Pointer[s.mlx5dv_devx_event_channel]
    queue: EventQueue[Event]
    told: dict[int, tuple[int, EventType, int]] = field(default_factory=dict)
    device_cookie: int | None = None  # of the subscription to the port and the device


def open_device(name: str) -> Mlx5Provider:
    """Open a device by name (`ibv_open_device`), with DEVX."""
    libmlx5()
    return through_sdk(Mlx5Provider.open(name))


def adopt_context(address: int) -> Mlx5Provider:
    """Return a provider that uses the `ibv_context` at this address. Its owner opened it and closes it.

    For `verbs.import_context` (`doca_verbs_bridge_verbs_context_import`): pyverbs and C++ programs have such contexts.
    The owner keeps reading asynchronous events of the port and the device.
    """
    libmlx5()
    return through_sdk(Mlx5Provider.adopt(address))


class Mlx5Provider(VerbsDevice):
    """One open of a card."""

    carries_mailboxes = True
    reaches_gpu_memory = True  # over PCIe, once the memory is registered
    mlx5: Library

    def __init__(self, name: str, context: Pointer[s.ibv_context], borrowed: bool = False):
        super().__init__(name, context, borrowed)
        self.mlx5 = libmlx5()
        self._numbers: dict[int, int] = {}  # handle of a DEVX object → its number
        self._channels: list[_Channel] = []
        self._cookies: dict[int, list[tuple[_Channel, int]]] = {}  # handle of a DEVX object → its subscribers
        self._counting_uars = threading.Lock()
        self._uar_users: Counter[int] = Counter()  # register → allocations; all non-cached UARs share a register
        attr = s.mlx5dv_context()
        self._check("mlx5dv_query_device", self.mlx5.mlx5dv_query_device(context, byref(attr)))
        if not attr.flags & s.MLX5DV_CONTEXT_FLAGS_CQE_V1:
            logger.warning("%s writes completions of version 0, like cards before ConnectX-4: not supported", name)

    # --- protection domains, addresses -------------------------------------------------------------------------------

    def _pd_number(self, pd: Pointer[s.ibv_pd]) -> int:
        """Return the number by which commands name a protection domain."""
        found = s.mlx5dv_pd()
        obj = s.mlx5dv_obj()
        setattr(obj.pd, "in", pd)
        obj.pd.out = ctypes.pointer(found)
        self._check("mlx5dv_init_obj of a PD", self.mlx5.mlx5dv_init_obj(byref(obj), s.MLX5DV_OBJ_PD))
        return found.pdn

    def resolve_mac(self, port: int, sgid_index: int, dgid: bytes) -> bytes:
        """Return the MAC of a RoCE GID, taken from the address vector of an `ibv_ah`."""
        ah = self.ah_to(port, sgid_index, dgid)
        try:
            return self.address_vector(ah)[AV_SEG.rmac : AV_SEG.tclass]
        finally:
            self.verbs.ibv_destroy_ah(ah)

    def address_vector(self, ah: Pointer[s.ibv_ah]) -> bytes:
        found = s.mlx5dv_ah()
        obj = s.mlx5dv_obj()
        setattr(obj.ah, "in", ah)
        obj.ah.out = ctypes.pointer(found)
        self._check("mlx5dv_init_obj of an AH", self.mlx5.mlx5dv_init_obj(byref(obj), s.MLX5DV_OBJ_AH))
        return bytes(found.av.contents)

    # --- memory and doorbells of queues ------------------------------------------------------------------------------

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        """Register a UMEM. Unlike `reg_dmabuf_umem`, this needs nvidia-peermem for GPU memory."""
        what = f"mlx5dv_devx_umem_reg of {nbytes} bytes at {address:#x}"
        if not self.mlx5.has("mlx5dv_devx_umem_reg_ex"):
            return self._umem(what, self.mlx5.mlx5dv_devx_umem_reg(self.context, address, nbytes, int(access)))
        wanted = s.mlx5dv_devx_umem_in(addr=address, size=nbytes, access=int(access), pgsz_bitmap=PAGE)
        umem = self.mlx5.mlx5dv_devx_umem_reg_ex(self.context, byref(wanted))
        if not umem and ctypes.get_errno() == errno.EPROTONOSUPPORT:  # Linux before 5.11 does not take page sizes
            umem = self.mlx5.mlx5dv_devx_umem_reg(self.context, address, nbytes, int(access))
        return self._umem(what, umem)

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        wanted = s.mlx5dv_devx_umem_in(
            addr=offset, size=nbytes, access=int(access), pgsz_bitmap=PAGE,
            comp_mask=s.MLX5DV_UMEM_MASK_DMABUF, dmabuf_fd=fd,
        )
        umem = self.mlx5.mlx5dv_devx_umem_reg_ex(self.context, byref(wanted))
        return self._umem(f"mlx5dv_devx_umem_reg_ex of {nbytes} bytes at offset {offset} of dmabuf {fd}", umem)

    def _umem(self, what: str, umem: Pointer[s.mlx5dv_devx_umem]) -> int:
        if not umem and ctypes.get_errno() == errno.EINVAL:
            what += " (or the context has no DEVX, because the firmware does not grant it to users)"
        if not umem and ctypes.get_errno() == errno.EFAULT:
            what += " (if this is GPU memory, the kernel cannot pin it: load nvidia-peermem)"
        self.pointer(what, umem)
        return self.hold("UMEM", umem.contents.umem_id, self.mlx5.mlx5dv_devx_umem_dereg, umem)

    def dereg_umem(self, umem_id: int) -> None:
        self.give_back("UMEM", umem_id)

    def alloc_uar(self, kind: UarAllocationType) -> UarPage:
        uar = self.mlx5.mlx5dv_devx_alloc_uar(self.context, _UAR[kind])
        if not uar and ctypes.get_errno() in (errno.EINVAL, errno.EOPNOTSUPP):
            raise NotSupportedError(
                f"mlx5dv_devx_alloc_uar of kind {kind.name} on {self.name}: this kernel or libmlx5 has no such pages"
            )
        found = self.pointer(f"mlx5dv_devx_alloc_uar of kind {kind.name}", uar).contents
        with self._counting_uars:
            self._uar_users[found.reg_addr] += 1
            self.hold("UAR", found.reg_addr, self.mlx5.mlx5dv_devx_free_uar, uar)
        return UarPage(found.page_id, found.base_addr, found.reg_addr)

    def free_uar(self, page: UarPage) -> None:
        """Free a UAR. A page has several BlueFlame registers, and is allocated once for each."""
        with self._counting_uars:
            self.get("UAR", page.reg_addr)
            self._uar_users[page.reg_addr] -= 1
            if self._uar_users[page.reg_addr] == 0:
                self.give_back("UAR", page.reg_addr)

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        """Return the UAR's own register: a card identifies the queue by the value written."""
        return uar.reg_addr

    def near_register(self, register: int, engine: str) -> int | None:
        """Return None: a card's registers are never in GPU memory."""
        return None

    def doorbell_rung(self) -> None:
        """Do nothing: a card notices its doorbells."""

    def query_eqn(self, vector: int) -> int:
        eqn = c_uint32()
        code = self.mlx5.mlx5dv_devx_query_eqn(self.context, vector, byref(eqn))
        self._check(f"mlx5dv_devx_query_eqn of completion vector {vector}", code)
        return eqn.value

    def query_clock(self) -> ClockInfo:
        info = s.mlx5dv_clock_info()
        self._check("mlx5dv_get_clock_info", self.mlx5.mlx5dv_get_clock_info(self.context, byref(info)))
        return ClockInfo(info.nsec, info.last_cycles, info.frac, info.mult, info.shift, info.mask)

    # --- mailboxes ---------------------------------------------------------------------------------------------------

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        out = ctypes.create_string_buffer(out_size)
        made = self.mlx5.mlx5dv_devx_obj_create(self.context, mailbox, len(mailbox), out, out_size)
        if not made:
            raise self._command_refused(mailbox, out.raw, ctypes.get_errno())
        handle = self.hold("DEVX object", self.new_handle(), self.mlx5.mlx5dv_devx_obj_destroy, made)
        self._numbers[handle] = int.from_bytes(out.raw[_NUMBER], "big")
        return handle, out.raw

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        return self._command(self.mlx5.mlx5dv_devx_obj_modify, self.get("DEVX object", handle), mailbox, out_size)

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        return self._command(self.mlx5.mlx5dv_devx_obj_query, self.get("DEVX object", handle), mailbox, out_size)

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes:
        return self._command(self.mlx5.mlx5dv_devx_general_cmd, self.context, mailbox, out_size)

    def devx_objects(self) -> list[int]:
        return list(self._numbers)

    def devx_obj_destroy(self, handle: int) -> None:
        self.give_back("DEVX object", handle)
        del self._numbers[handle]
        for channel, ours in self._cookies.pop(handle, ()):
            channel.told.pop(ours, None)

    def _command(self, function: Callable[..., int], target: object, mailbox: bytes, out_size: int) -> bytes:
        out = ctypes.create_string_buffer(out_size)
        if code := function(target, mailbox, len(mailbox), out, out_size):
            raise self._command_refused(mailbox, out.raw, errno_of(code))
        return out.raw

    def _command_refused(self, mailbox: bytes, out: bytes, code: int) -> DocaError:
        if cmd.OUT.get(out, "status") == Status.OK and code == errno.EOPNOTSUPP:
            return NotSupportedError(
                f"{self.name} takes no DEVX commands ({os.strerror(code)}): they need the driver mlx5_ib with "
                "CONFIG_MLX5_INFINIBAND's user access, and firmware that allows it (UCTX_EN)"
            )
        if code in GONE:
            error = self.refused(command_name(mailbox), code)
            if isinstance(error, DeviceFatalError):
                return error
        return command_refused(self.name, mailbox, out, code)

    # --- steering ----------------------------------------------------------------------------------------------------

    def attach_flow_table(self, table: int) -> int:
        attached = flow.attach(self, self.mlx5, self.get("DEVX object", table))
        return self.hold("rule to a flow table", self.new_handle(), flow.detach, attached)

    def detach_flow_table(self, handle: int) -> None:
        self.give_back("rule to a flow table", handle)

    def open_kernel_path(self) -> tuple[int, int]:
        anchor = flow.open_anchor(self, self.mlx5)
        handle = self.hold(
            "steering anchor", self.new_handle(), self.mlx5.mlx5dv_destroy_steering_anchor, anchor
        )
        return handle, anchor.contents.id

    def close_kernel_path(self, handle: int) -> None:
        self.give_back("steering anchor", handle)

    # --- events ------------------------------------------------------------------------------------------------------

    def create_event_channel(self) -> int:
        pointer = self.mlx5.mlx5dv_devx_create_event_channel(self.context, 0)
        self.pointer("mlx5dv_devx_create_event_channel", pointer)
        with ExitStack() as undo:
            undo.callback(self.mlx5.mlx5dv_devx_destroy_event_channel, pointer)
            fd = pointer.contents.fd
            os.set_blocking(fd, False)
            try:
                channel = _Channel(pointer, EventQueue(fd))
            except OSError as error:
                raise refused(f"an event channel of {self.name}", error.errno or 0) from error
            undo.pop_all()
        self._channels.append(channel)
        return self.hold("event channel", self.new_handle(), self._destroy_channel, channel)

    def _destroy_channel(self, channel: _Channel) -> None:
        self._channels.remove(channel)
        channel.queue.close()
        self.mlx5.mlx5dv_devx_destroy_event_channel(channel.pointer)

    def event_fd(self, channel: int) -> int:
        """Return the channel's descriptor. It is also readable for events of the context."""
        return self.get("event channel", channel).queue.fd

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        """Subscribe to events. Each type gets its own cookie, so that event queue entries need not be read.

        The context, not DEVX, reports events of port and device. Event types that the firmware does not report to users
        are skipped, except completions.
        """
        into = self.get("event channel", channel)
        if handle is None:
            if unknown := set(types) - set(_OF_DEVICE):
                raise InvalidValueError(f"{unknown} concern objects: name one")
            if into.device_cookie is None and not self._borrowed:
                into.queue.watch(self.context.contents.async_fd)
                into.device_cookie = cookie
            return
        target = self.get("DEVX object", handle)
        for kind in types:
            ours = self.new_handle()
            into.told[ours] = cookie, kind, self._numbers[handle]
            numbers = (c_uint16 * 1)(kind)
            code = self.mlx5.mlx5dv_devx_subscribe_devx_event(into.pointer, target, sizeof(numbers), numbers, ours)
            if not code:
                self._cookies.setdefault(handle, []).append((into, ours))
                continue
            del into.told[ours]
            error = self.refused(f"mlx5dv_devx_subscribe_devx_event of {kind.name}", errno_of(code))
            if errno_of(code) not in (errno.EINVAL, errno.EOPNOTSUPP) or kind is EventType.COMPLETION:
                raise error
            logger.debug("%s", error)

    def get_event(self, channel: int) -> Event | None:
        """Return the next event. DeviceFatalError if the device was removed, after which no events come."""
        source = self.get("event channel", channel)
        self._take_device_events()
        return source.queue.get() or self._object_event(source)

    def _object_event(self, channel: _Channel) -> Event | None:
        room = ctypes.create_string_buffer(sizeof(s.mlx5dv_devx_async_event_hdr) + _EQE_BYTES)
        while self.mlx5.mlx5dv_devx_get_event(channel.pointer, room, len(room)) >= 0:
            told = channel.told.get(s.mlx5dv_devx_async_event_hdr.from_buffer(room).cookie)
            if told:
                return Event(*told, room.raw[sizeof(s.mlx5dv_devx_async_event_hdr) :])
        if (code := ctypes.get_errno()) == errno.EOVERFLOW:
            raise FullError(f"events of {self.name} were lost: the channel was full; read it more often")
        if code not in (errno.EAGAIN, errno.EINTR):
            raise self.refused("mlx5dv_devx_get_event", code)
        poll = select.poll()
        poll.register(channel.pointer.contents.fd, select.POLLRDHUP)
        if any(ready & HUNG_UP for _, ready in poll.poll(0)):
            raise self.refused("mlx5dv_devx_get_event", errno.ENODEV)
        return None

    def _take_device_events(self) -> None:
        """Pass events of the context on to every channel that subscribed to them."""
        hearing = [channel for channel in self._channels if channel.device_cookie is not None]
        while hearing and (event := self.async_event()):
            told = of_port_or_device(event)
            self.verbs.ibv_ack_async_event(byref(event))
            if told is None:  # an event of GIDs, LIDs or partitions, to which nothing subscribes
                continue
            for channel in hearing:
                channel.queue.put(Event(channel.device_cookie or 0, *told, eqe(*told)))

    def destroy_event_channel(self, channel: int) -> None:
        self.give_back("event channel", channel)

    def explain(self, qpn: int, vendor_syndrome: int | None) -> str | None:
        """Return None: a card gives no explanations."""
        return None
