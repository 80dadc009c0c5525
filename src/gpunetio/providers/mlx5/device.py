"""The calls of libibverbs that all verbs devices have in common.

These are listing, identity, ports, protection domains, memory regions, addresses and asynchronous events.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import POINTER, byref, c_int
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ...enums import Access, LinkLayer, PortState
from ...errors import (
    DeviceFatalError,
    DocaError,
    DriverError,
    InvalidValueError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
)
from ...formats.events import PORT_SHIFT, EventType, PortSubtype
from ...memory import PAGE, is_accessible
from ..plain_verbs import PlainVerbs, Route
from ..provider import DeviceAttr, DeviceInfo, GidType, MrKeys, NewAh, PortAttr
from . import structs as s
from .cuda_dmabuf import dmabuf_of
from .errors import GONE, errno_of, refused
from .inline import ibv_query_port, ibv_query_rt_values_ex, ibv_reg_mr
from .libraries import Library, libibverbs, libmlx5

if TYPE_CHECKING:
    from .structs import Pointer

_Held = TypeVar("_Held")
logger: logging.Logger = logging.getLogger("gpunetio.providers")

_PORT_SUBTYPE = {s.IBV_EVENT_PORT_ACTIVE: PortSubtype.ACTIVE, s.IBV_EVENT_PORT_ERR: PortSubtype.DOWN}
_HOP_LIMIT = 255
HUNG_UP = select.POLLERR | select.POLLHUP | select.POLLRDHUP  # on an event descriptor: the device was removed
# hca_type in sysfs ("MT" and the PCI device id in decimal) → the card's name.
_CARDS = {
    "MT4115": "ConnectX-4", "MT4117": "ConnectX-4 Lx", "MT4119": "ConnectX-5", "MT4121": "ConnectX-5 Ex",
    "MT4123": "ConnectX-6", "MT4125": "ConnectX-6 Dx", "MT4127": "ConnectX-6 Lx", "MT4129": "ConnectX-7",
    "MT4131": "ConnectX-8", "MT41682": "BlueField", "MT41686": "BlueField-2", "MT41692": "BlueField-3",
}


@dataclass(frozen=True)
class FoundDevice:
    """A device that libibverbs lists. `mlx5`: libmlx5 drives it. `card`: it is a PCI function, not software."""

    name: str
    node: str
    sysfs: Path
    mlx5: bool
    card: bool

    @property
    def of_nvidia(self) -> bool:
        """Return whether libmlx5 should drive the device."""
        return _read(self.sysfs / "hca_type") in _CARDS

    @property
    def info(self) -> DeviceInfo:
        """Return the device's entry in `device_list`."""
        kind = _read(self.sysfs / "hca_type")
        known = [f"{_CARDS[kind]} ({kind})" if kind in _CARDS else kind] if kind else []
        firmware = _read(self.sysfs / "fw_ver")
        known += [f"firmware {firmware}"] if firmware else []
        what = "card" if self.card else "software device of the kernel"
        if not self.mlx5:
            what += ", libibverbs only"
        return DeviceInfo(self.name, "mlx5" if self.mlx5 else "ibverbs", ", ".join([what, *known]))


def _read(path: Path) -> str:
    """Return the text of a sysfs file, or an empty string if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def found_devices() -> list[FoundDevice]:
    """Return the devices that libibverbs lists.

    NotSupportedError without libibverbs. An empty list if the kernel's modules are not loaded.
    """
    with _listed() as devices:
        return [_describe(device.contents, _is_mlx5(device)) for device in devices]


@contextlib.contextmanager
def _listed():
    """Yield the pointers of `ibv_get_device_list`, which are valid inside the block."""
    library = libibverbs()
    count = c_int(0)
    devices = library.ibv_get_device_list(byref(count))
    if not devices:
        if (code := ctypes.get_errno()) not in (errno.ENOSYS, 0):  # ENOSYS: ib_uverbs is not loaded
            raise refused("ibv_get_device_list", code)
        yield []
        return
    try:
        yield [devices[i] for i in range(count.value)]
    finally:
        library.ibv_free_device_list(devices)


def _describe(device: s.ibv_device, mlx5: bool) -> FoundDevice:
    sysfs = Path(os.fsdecode(device.ibdev_path))
    return FoundDevice(
        os.fsdecode(device.name), os.fsdecode(device.dev_name), sysfs, mlx5, mlx5 or (sysfs / "device").exists()
    )


def _is_mlx5(device: Pointer[s.ibv_device]) -> bool:
    try:
        return bool(libmlx5().mlx5dv_is_supported(device))
    except NotSupportedError as error:  # in that case, libibverbs has no driver for such a card either
        logger.debug("listing devices without libmlx5: %s", error)
        return False


def open_context(name: str) -> Pointer[s.ibv_context]:
    """Open an `ibv_context *`. The caller closes it with `ibv_close_device`."""
    with _listed() as devices:
        for device in devices:
            if os.fsdecode(device.contents.name) == name:
                context = libibverbs().ibv_open_device(device)
                if not context:
                    raise _not_opened(_describe(device.contents, False), ctypes.get_errno())
                return context
    raise NotFoundError(f"libibverbs lists no device {name!r}")


def _not_opened(device: FoundDevice, code: int) -> DocaError:
    node = f"/dev/infiniband/{device.node}"
    if code in (errno.EACCES, errno.EPERM):
        return NotPermittedError(
            f"{device.name} cannot be opened: no permission for {node}: let a udev rule give it to a group or to all "
            "(mode 0666 is usual); a container needs --device=/dev/infiniband"
        )
    if code in (errno.ENOENT, errno.ENXIO):
        return NotFoundError(
            f"{device.name} cannot be opened: {node} does not exist: load ib_uverbs; a container needs "
            "--device=/dev/infiniband"
        )
    return refused(f"{device.name} cannot be opened", code)


class VerbsDevice:
    """One open of a device: the part of `Provider` that all verbs devices share.

    `borrowed` means that another owner closes the context.
    """

    software = has_dpa = carries_mailboxes = reaches_gpu_memory = False
    plain: PlainVerbs | None = None
    verbs: Library

    def __init__(self, name: str, context: Pointer[s.ibv_context], borrowed: bool = False):
        self.name = name
        self.context = context
        self.verbs = libibverbs()
        # What close() releases, in reverse order. The kind determines the pointer's type.
        self._held: dict[tuple[str, int], tuple[Callable[[Any], int | None], Any]] = {}
        self._numbering = itertools.count(1)  # for objects without a number of their own
        self._making = threading.Lock()
        self._own_pd: Pointer[s.ibv_pd] | None = None  # for address handles
        self._gone = False
        self._borrowed = borrowed
        self._pid = os.getpid()
        self._open = True

    def wake_at(self, cqn: int, word: int) -> bool:
        """Return False: a card does not wake threads."""
        return False

    @classmethod
    def open(cls, name: str) -> Self:
        """Open a device by name (`ibv_open_device`)."""
        context = open_context(name)
        with ExitStack() as undo:
            undo.callback(libibverbs().ibv_close_device, context)
            device = cls(name, context)
            undo.pop_all()
        return device

    @classmethod
    def adopt(cls, address: int) -> Self:
        """Return a device that uses the `ibv_context` at this address. Its owner opened it and closes it."""
        context = ctypes.cast(address, POINTER(s.ibv_context))
        return cls(os.fsdecode(context.contents.device.contents.name), context, borrowed=True)

    @property
    def ibv_context(self) -> int:
        """Return the address of the `ibv_context`."""
        return ctypes.cast(self.context, ctypes.c_void_p).value or 0

    def ibv_pd(self, pdn: int) -> int:
        """Return the address of a protection domain's `ibv_pd`."""
        return ctypes.cast(self.get("PD", pdn), ctypes.c_void_p).value or 0

    # --- identity and ports ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<device {self.name} of libibverbs>"

    def query_device(self) -> DeviceAttr:
        attr = s.ibv_device_attr()
        self._check("ibv_query_device", self.verbs.ibv_query_device(self.context, byref(attr)))
        sysfs = Path(os.fsdecode(self.context.contents.device.contents.ibdev_path))
        return DeviceAttr(
            fw_ver=os.fsdecode(attr.fw_ver), node_guid=_be64(attr.node_guid), sys_image_guid=_be64(attr.sys_image_guid),
            vendor_id=attr.vendor_id, vendor_part_id=attr.vendor_part_id, hw_ver=attr.hw_ver,
            board_id=_read(sysfs / "board_id"), phys_port_cnt=attr.phys_port_cnt, max_mr_size=attr.max_mr_size,
            max_qp=attr.max_qp, max_qp_wr=attr.max_qp_wr, max_sge=attr.max_sge, max_cq=attr.max_cq,
            max_cqe=attr.max_cqe, max_mr=attr.max_mr, max_pd=attr.max_pd, max_ah=attr.max_ah, max_srq=attr.max_srq,
            max_srq_wr=attr.max_srq_wr, max_srq_sge=attr.max_srq_sge, max_pkeys=attr.max_pkeys,
            max_qp_rd_atom=attr.max_qp_rd_atom, max_qp_init_rd_atom=attr.max_qp_init_rd_atom,
            num_comp_vectors=self.context.contents.num_comp_vectors,
            can_resize_srq=bool(attr.device_cap_flags & s.IBV_DEVICE_SRQ_RESIZE),
        )

    def query_port(self, port: int) -> PortAttr:
        attr = s.ibv_port_attr()
        self._check(f"ibv_query_port of port {port}", ibv_query_port(self.context, port, attr))
        ethernet = attr.link_layer == s.IBV_LINK_LAYER_ETHERNET
        return PortAttr(
            state=PortState(attr.state), max_mtu=_mtu_bytes(attr.max_mtu), active_mtu=_mtu_bytes(attr.active_mtu),
            sm_lid=attr.sm_lid, lid=attr.lid, lmc=attr.lmc,
            link_layer=LinkLayer.ETHERNET if ethernet else LinkLayer.INFINIBAND, gid_tbl_len=attr.gid_tbl_len,
            active_width=attr.active_width, active_speed=attr.active_speed,
        )

    def query_gid(self, port: int, index: int) -> bytes:
        gid = s.ibv_gid()
        what = f"ibv_query_gid of port {port}, index {index}"
        self._check(what, self.verbs.ibv_query_gid(self.context, port, index, byref(gid)))
        return bytes(gid.raw)

    def gid_type(self, port: int, index: int) -> GidType:
        """Return the type of packets sent from this GID. NotSupportedError before rdma-core 32."""
        entry = s.ibv_gid_entry()
        code = self.verbs._ibv_query_gid_ex(self.context, port, index, byref(entry), 0, ctypes.sizeof(entry))
        self._check(f"ibv_query_gid_ex of port {port}, index {index}", code)
        return GidType(entry.gid_type)

    # --- protection domains and memory -------------------------------------------------------------------------------

    def alloc_pd(self) -> int:
        pd = self.pointer("ibv_alloc_pd", self.verbs.ibv_alloc_pd(self.context))
        with contextlib.ExitStack() as undo:
            undo.callback(self.verbs.ibv_dealloc_pd, pd)
            number = self._pd_number(pd)
            undo.pop_all()
        return self.hold("PD", number, self.verbs.ibv_dealloc_pd, pd)

    def _pd_number(self, pd: Pointer[s.ibv_pd]) -> int:
        return pd.contents.handle

    def adopt_pd(self, address: int) -> int:
        """Return the number of the `ibv_pd` at this address. Its owner created it on this device and destroys it.

        This is for `Context.import_pd`.
        """
        pd = ctypes.cast(address, POINTER(s.ibv_pd))
        return self.hold("PD", self._pd_number(pd), lambda pd: 0, pd)

    def dealloc_pd(self, pdn: int) -> None:
        self.give_back("PD", pdn)

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        """Register memory. GPU memory is registered through a dmabuf, or else with nvidia-peermem by its address."""
        what = f"a region of {nbytes} bytes at {address:#x}"
        _check_iova(address, iova)
        if cuda := cuda and not is_accessible(address, nbytes, False):  # memory pinned by CUDA is CPU memory
            try:
                fd, offset = dmabuf_of(address, nbytes)
                try:
                    keys = self.reg_dmabuf_mr(pdn, fd, offset, nbytes, iova, access)
                finally:
                    os.close(fd)
                logger.info("%s: mapping %s with dmabuf mode", self.name, what)
                return keys
            except (DeviceFatalError, InvalidValueError):
                raise
            except DocaError as error:
                # Log the error as text: a stored log record would otherwise keep the caller's memory alive.
                logger.warning("%s: no dmabuf of %s (%s)", self.name, what, str(error))
                logger.info("%s: mapping %s with nvidia-peermem mode", self.name, what)
        mr = ibv_reg_mr(self.get("PD", pdn), address, nbytes, iova, int(access))
        if cuda and not mr and ctypes.get_errno() == errno.EFAULT:
            raise NotSupportedError(
                f"ibv_reg_mr of {what} on {self.name}: it is GPU memory, which the kernel cannot pin: load "
                "nvidia-peermem, or use the open kernel modules of the GPU's driver, which have dmabufs"
            )
        return self._mr(f"ibv_reg_mr of {what}", mr)

    def reg_dmabuf_mr(self, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: Access) -> MrKeys:
        """Register a range of a dmabuf. NotSupportedError before rdma-core 34."""
        _check_iova(offset, iova)
        mr = self.verbs.ibv_reg_dmabuf_mr(self.get("PD", pdn), offset, nbytes, iova, fd, int(access))
        return self._mr(f"ibv_reg_dmabuf_mr of {nbytes} bytes at offset {offset} of fd {fd}", mr)

    def _mr(self, what: str, mr: Pointer[s.ibv_mr]) -> MrKeys:
        self.pointer(what, mr)
        handle = self.hold("MR", self.new_handle(), self.verbs.ibv_dereg_mr, mr)
        return MrKeys(handle, mr.contents.lkey, mr.contents.rkey)

    def rereg_mr(
        self, handle: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> MrKeys:
        """Change a region. NotSupportedError if its new memory is GPU memory, which the CPU cannot pin."""
        mr, flags = self.get("MR", handle), 0
        pd, (address, nbytes, cuda) = None, place or (0, 0, False)
        if pdn is not None:
            flags, pd = s.IBV_REREG_MR_CHANGE_PD, self.get("PD", pdn)
        if access is not None:
            flags |= s.IBV_REREG_MR_CHANGE_ACCESS
        if place is not None:
            flags |= s.IBV_REREG_MR_CHANGE_TRANSLATION
        what = f"ibv_rereg_mr of region {mr.contents.lkey:#x}"
        if cuda and not is_accessible(address, nbytes, False):
            raise NotSupportedError(f"{what} to GPU memory on {self.name}: register a new region")
        if code := self.verbs.ibv_rereg_mr(mr, flags, pd, address, nbytes, int(access or 0)):
            error = self.refused(what, ctypes.get_errno())
            if code <= s.IBV_REREG_MR_ERR_CMD:
                error.args = (f"{error}; the region cannot be used any more: close it",)
            raise error
        return MrKeys(handle, mr.contents.lkey, mr.contents.rkey)

    def dereg_mr(self, handle: int) -> None:
        self.give_back("MR", handle)

    # --- addresses ---------------------------------------------------------------------------------------------------

    def ah_to(self, port: int, sgid_index: int, dgid: bytes) -> Pointer[s.ibv_ah]:
        """Create an `ibv_ah *` to a GID. The kernel looks up the MAC.

        The caller destroys it with `ibv_destroy_ah`.
        """
        with self._making:
            if self._own_pd is None:
                pd: Pointer[s.ibv_pd] = self.pointer("ibv_alloc_pd", self.verbs.ibv_alloc_pd(self.context))
                self.hold("PD of addresses", 0, self.verbs.ibv_dealloc_pd, pd)
                self._own_pd = pd
        return self._new_ah(self._own_pd, port, Route(dgid, 0, 0, sgid_index, 0, _HOP_LIMIT, 0, True, 0))

    def seek_mac(self, port: int, dgid: bytes) -> bool:
        """Return True: the kernel resolves addresses."""
        return True

    def create_ah(self, pdn: int, port: int, route: Route) -> NewAh:
        ah = self._new_ah(self.get("PD", pdn), port, route)
        try:
            return NewAh(self.hold("AH", self.new_handle(), self.verbs.ibv_destroy_ah, ah), self.address_vector(ah))
        except BaseException:
            self.verbs.ibv_destroy_ah(ah)
            raise

    def address_vector(self, ah: Pointer[s.ibv_ah]) -> bytes:
        """Return the address vector of an `ibv_ah *`, or b"" if libibverbs does not expose it."""
        return b""

    def destroy_ah(self, handle: int) -> None:
        self.give_back("AH", handle)

    def _new_ah(self, pd: Pointer[s.ibv_pd], port: int, route: Route) -> Pointer[s.ibv_ah]:
        attr = ah_attr_of(route, port)
        ah = self.verbs.ibv_create_ah(pd, byref(attr))
        if not ah:
            self._no_address(route.dgid, port, route.sgid_index, ctypes.get_errno())
        return ah

    def _no_address(self, dgid: bytes, port: int, sgid_index: int, code: int) -> None:
        error = self.refused(f"ibv_create_ah to {dgid.hex(':', 2)}", code)
        if isinstance(error, (DeviceFatalError, NotPermittedError)):
            raise error
        raise NotFoundError(
            f"the address {dgid.hex(':', 2)} is not reached from GID index {sgid_index} of port {port} of {self.name} "
            f"({os.strerror(code)}): check with a ping, and check that GID's address family"
        )

    # --- time --------------------------------------------------------------------------------------------------------

    def raw_clock(self) -> int:
        values = s.ibv_values_ex(comp_mask=s.IBV_VALUES_MASK_RAW_CLOCK)
        self._check("ibv_query_rt_values_ex", ibv_query_rt_values_ex(self.context, values))
        return values.raw_clock.tv_sec * 1_000_000_000 + values.raw_clock.tv_nsec

    # --- asynchronous events -----------------------------------------------------------------------------------------

    def async_event(self) -> s.ibv_async_event | None:
        """Return the oldest asynchronous event, or None. The caller acknowledges it with `ibv_ack_async_event`."""
        os.set_blocking(self.context.contents.async_fd, False)
        poll = select.poll()
        poll.register(self.context.contents.async_fd, select.POLLIN)
        if not (ready := poll.poll(0)):
            return None
        event = s.ibv_async_event()
        if self.verbs.ibv_get_async_event(self.context, byref(event)) != 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EINTR) and not ready[0][1] & HUNG_UP:
                return None
            raise self.refused("ibv_get_async_event", errno.ENODEV if ready[0][1] & HUNG_UP else code)
        if event.event_type == s.IBV_EVENT_DEVICE_FATAL:
            self._gone = True
        return event

    # --- held objects ------------------------------------------------------------------------------------------------

    def new_handle(self) -> int:
        """Return an unused number."""
        return next(self._numbering)

    def hold(self, kind: str, number: int, free: Callable[[_Held], int | None], pointer: _Held) -> int:
        """Record a created object and the function that destroys it. close() destroys it if nothing else has."""
        self._held[kind, number] = free, pointer
        return number

    def get(self, kind: str, number: int) -> Any:
        """Return the pointer for a number that `hold` returned. InvalidValueError if there is none."""
        if (kind, number) not in self._held:
            raise InvalidValueError(f"{self.name} has no {kind} {number:#x}")
        return self._held[kind, number][1]

    def give_back(self, kind: str, number: int) -> None:
        """Destroy an object. If the device is gone, the kernel has already destroyed it.

        Once the kernel has destroyed the object, another thread's new object may get the same number.
        """
        self.get(kind, number)
        held = free, pointer = self._held[kind, number]
        try:
            self._check(f"closing {kind} {number:#x}", free(pointer))
        except DeviceFatalError:
            logger.debug("%s is gone, and %s %#x with it", self.name, kind, number)
        if self._held.get((kind, number)) is held:
            del self._held[kind, number]

    def close(self) -> None:
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        for kind, number in reversed(list(self._held)):
            try:
                self.give_back(kind, number)
            except DocaError as error:
                logger.warning("%s: %s", self.name, error)
        if not self._borrowed:
            self.verbs.ibv_close_device(self.context)

    # --- errors ------------------------------------------------------------------------------------------------------

    def pointer(self, what: str, pointer: _Held) -> _Held:
        """Return the pointer, or raise the error in errno if it is NULL."""
        if not pointer:
            raise self.refused(what, ctypes.get_errno())
        return pointer

    def _check(self, what: str, code: int | None) -> None:
        """Raise an error for an errno, or for -1 with errno set. A function without a result always succeeds."""
        if code:
            raise self.refused(what, errno_of(code))

    def refused(self, what: str, code: int) -> DocaError:
        """Return the error for an errno. Record if the device is gone, which EIO of a single command does not imply."""
        what = f"{what} on {self.name}"
        if code == errno.EIO and not self._gone and self._answers():
            return DriverError(f"{what}: {os.strerror(code)} (EIO): the firmware or the kernel refuses it, see dmesg")
        if code in GONE and not self._gone:
            self._gone = True
            logger.error("%s is gone or has failed: %s", self.name, os.strerror(code))
        return refused(what, code)

    def _answers(self) -> bool:
        """Return whether the device answers a query that can only fail if it is gone."""
        return ibv_query_port(self.context, 1, s.ibv_port_attr()) == 0


def of_port_or_device(event: s.ibv_async_event) -> tuple[EventType, int] | None:
    """Return type and number of an event of the port or device, as in `provider.Event`, or None for any other event."""
    if event.event_type == s.IBV_EVENT_DEVICE_FATAL:
        return EventType.INTERNAL_ERROR, 0
    if (subtype := _PORT_SUBTYPE.get(event.event_type)) is None:
        return None
    return EventType.PORT_CHANGE, event.element.port_num << PORT_SHIFT | subtype


def _be64(value: int) -> int:
    """Convert a big-endian number that ctypes has read in host byte order."""
    return int.from_bytes(bytes(ctypes.c_uint64(value)), "big")


def _check_iova(start: int, iova: int) -> None:
    """Raise InvalidValueError unless both have the same offset in a page, as the kernel's ib_uverbs_reg_mr does."""
    if (start ^ iova) % PAGE:
        raise InvalidValueError(
            f"iova = {iova:#x} for memory at {start:#x}: a card maps whole pages, so both must have the same "
            f"offset in a page of {PAGE} bytes: register from {iova % PAGE:#x} of a page on, or choose another iova"
        )


def _mtu_bytes(code: int) -> int:
    """Convert an enum ibv_mtu to bytes."""
    return 128 << code


def ah_attr_of(route: Route, port: int) -> s.ibv_ah_attr:
    """Return the `ibv_ah_attr` for a route from a port."""
    attr = s.ibv_ah_attr(
        dlid=route.dlid, sl=route.sl, static_rate=route.static_rate, is_global=route.is_global, port_num=port
    )
    grh = attr.grh
    grh.sgid_index, grh.hop_limit, grh.traffic_class = route.sgid_index, route.hop_limit, route.traffic_class
    grh.flow_label = route.flow_label
    grh.dgid.raw[:] = route.dgid
    return attr
