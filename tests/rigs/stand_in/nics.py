"""The other side of stand_in.c: its table of functions, which call software NICs."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import shutil
import struct
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from ctypes import c_char_p, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunetio.enums import Access, AsyncEventType, UarAllocationType
from gpunetio.errors import (
    BadStateError,
    DocaError,
    DriverError,
    FullError,
    InUseError,
    InvalidValueError,
    NoMemoryError,
    NotFoundError,
    NotSupportedError,
    TimedOutError,
)
from gpunetio.formats.commands import OUT, Opcode, Status
from gpunetio.formats.events import EventType, PortSubtype
from gpunetio.nic.engine.port import Port, PortConfig
from gpunetio.nic.nic import SoftNic
from gpunetio.providers import soft
from gpunetio.providers.mlx5.structs import (
    IBV_REREG_MR_CHANGE_ACCESS,
    IBV_REREG_MR_CHANGE_PD,
    IBV_REREG_MR_CHANGE_TRANSLATION,
)
from gpunetio.providers.plain_verbs import Route
from gpunetio.providers.provider import UarPage

from .strict import SYNDROME, reserved_bits

_NOTHING = -1  # the context of calls that have none, and the object of subscriptions without one
_KNOWN_ACCESS = sum(Access.all()) | Access.RELAXED_ORDERING

# struct calls: the arguments of each function; all return a number, or a negative errno.
_i, _u, _text, _memory = c_int64, c_uint64, c_char_p, c_void_p
_COMMAND = (_memory, _u, _memory, _u)
_CALLS: dict[str, tuple[Any, ...]] = {
    "enter": (_text, _i), "complain": (_text, _text), "count_devices": (), "open": (_i,), "async_fd": (_i,),
    "close": (_i,), "query_device": (_i, _memory, _memory), "query_port": (_i, _i, _memory),
    "query_gid": (_i, _i, _i, _memory), "alloc_pd": (_i,), "dealloc_pd": (_i, _i), "reg_mr": (_i, _i, _u, _u, _u, _i),
    "reg_dmabuf_mr": (_i, _i, _i, _u, _u, _u, _i),
    "rereg_mr": (_i, _i, _i, _i, _u, _u, _i), "dereg_mr": (_i, _i), "resolve": (_i, _i, _i, _memory, _memory),
    "get_async_event": (_i, _memory), "obj_create": (_i, *_COMMAND), "obj_modify": (_i, _i, *_COMMAND),
    "obj_query": (_i, _i, *_COMMAND), "obj_destroy": (_i, _i), "general_cmd": (_i, *_COMMAND), "query_eqn": (_i, _i),
    "reg_umem": (_i, _u, _u, _i), "reg_dmabuf_umem": (_i, _i, _u, _u, _i), "dereg_umem": (_i, _i),
    "alloc_uar": (_i, _i, _memory), "free_uar": (_i, _i), "create_event_channel": (_i,), "event_fd": (_i, _i),
    "destroy_event_channel": (_i, _i), "subscribe": (_i, _i, _i, _memory, _i, _u), "get_event": (_i, _i, _memory),
    "attach_flow_table": (_i, _i), "detach_flow_table": (_i, _i), "open_kernel_path": (_i, _memory),
    "close_kernel_path": (_i, _i),
}
_DEVICE_VALUES = (
    "node_guid", "sys_image_guid", "max_mr_size", "vendor_id", "vendor_part_id", "hw_ver", "max_qp", "max_qp_wr",
    "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "max_qp_rd_atom", "max_qp_init_rd_atom", "max_ah", "max_srq",
    "max_srq_wr", "max_srq_sge", "max_pkeys", "phys_port_cnt",
)
_PORT_VALUES = ("state", "max_mtu", "active_mtu", "gid_tbl_len", "lid", "sm_lid", "lmc", "link_layer", "active_width",
                "active_speed")

CONNECTX_7 = {"vendor_id": 0x02C9, "vendor_part_id": 4129, "hw_ver": 0}
FW_VER, BOARD_ID = "28.43.1014", "GPN0000000001"

_GID_TYPE_IB, _GID_TYPE_ROCE_V2 = 0, 2  # enum ibv_gid_type

_ERRNO: tuple[tuple[type[Exception], int], ...] = (
    (InvalidValueError, errno.EINVAL), (NoMemoryError, errno.ENOMEM), (InUseError, errno.EBUSY),
    (NotSupportedError, errno.EOPNOTSUPP), (NotFoundError, errno.EHOSTUNREACH), (FullError, errno.EOVERFLOW),
    (TimedOutError, errno.ETIMEDOUT), (BadStateError, errno.EIO),
)
# cmd_status_to_err of Linux's mlx5_core.
_STATUS_ERRNO = {
    Status.INTERNAL_ERR: errno.EIO, Status.BAD_SYS_STATE: errno.EIO, Status.RESOURCE_BUSY: errno.EBUSY,
    Status.EXCEED_LIM: errno.ENOMEM, Status.NO_RESOURCES: errno.EAGAIN, Status.BAD_INPUT_LEN: errno.EIO,
    Status.BAD_OUTPUT_LEN: errno.EIO,
}
# The calls that a device that is gone still accepts.
_LAST_CALLS = (
    "ibv_close_device", "ibv_get_async_event", "mlx5dv_devx_get_event", "mlx5dv_devx_destroy_event_channel",
    "mlx5dv_devx_free_uar",
)
_OF_DEVICE = (EventType.PORT_CHANGE, EventType.INTERNAL_ERROR)


@dataclass
class _Subscription:
    """What a channel hears of an object, or of the device: for each type the caller's cookie.

    It outlives its object, as what has happened before is told.
    """

    channel: int
    handle: int
    cookies: dict[EventType, int] = field(default_factory=dict)


@dataclass
class _Context:
    """One open of a device. The software NIC's cookies are numbers of subscriptions."""

    device: int
    nic: soft.SoftProvider
    async_channel: int
    subscriptions: list[_Subscription] = field(default_factory=list)

    def subscription(self, channel: int, handle: int) -> int:
        """The number of a channel's subscription of an object, a new one if need be."""
        for number, known in enumerate(self.subscriptions):
            if (known.channel, known.handle) == (channel, handle):
                return number
        self.subscriptions.append(_Subscription(channel, handle))
        return len(self.subscriptions) - 1

    def is_told_elsewhere(self, channel: int, handle: int, kind: EventType) -> bool:
        """Whether the software NIC, which knows one subscriber of an object, tells this kind already."""
        completions = kind == EventType.COMPLETION  # completions have a subscriber of their own
        return any(
            (other.channel != channel and (known == EventType.COMPLETION) == completions) or known == kind
            for other in self.subscriptions
            for known in other.cookies
            if other.handle == handle != _NOTHING or (other.channel, other.handle) == (channel, handle)
        )


@dataclass
class _Refusal:
    status: Status
    syndrome: int
    opcode: Opcode | None


class StandIn:
    """The library, and what tests want of it.

    `calls` counts calls by function; `complaints` is what would have crashed a real library; `refused` is why commands
    were refused. `devices`: how many there are, named `prefix` and a number; `ports`: how they are attached, by
    number, until they are closed.

    `tells_status`: the kernel hands out the device's answer to a refused command (EREMOTEIO, as since Linux 5.18), or
    only an errno. `dedicated_uars`: rdma-core 45 or later. `has_gids`: the GID table is not empty.
    """

    def __init__(self, path: Path, prefix: str = "mlx5_"):
        self.path, self._prefix = path, prefix
        self.calls: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.refused: list[str] = []
        self.ports: dict[int, PortConfig] = {}
        self.reset()
        self._contexts: dict[int, _Context] = {}
        self._next = 1
        self._library = ctypes.CDLL(str(path))
        self._functions = [
            ctypes.CFUNCTYPE(c_int64, *arguments)(self._guarded(getattr(self, f"_{name}")))
            for name, arguments in _CALLS.items()
        ]
        table = (c_void_p * len(_CALLS))(*(ctypes.cast(function, c_void_p) for function in self._functions))
        self._library.stand_in_install(table, str(self._sysfs()).encode(), prefix.encode())

    # --- what tests ask for ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """As new, but for what is open and what has gone wrong."""
        self.devices, self.tells_status, self.dedicated_uars, self.has_gids = soft.DEVICES, True, True, True
        self.calls.clear()
        self._failures: dict[str, list[int]] = {}
        self._refusals: list[_Refusal] = []
        self._fatal: set[int] = set()

    def fail(self, function: str, code: int, times: int = 1) -> None:
        """Let the next calls of an exported function fail with an errno."""
        self._failures.setdefault(function, []).extend([code] * times)

    def refuse(self, status: Status, syndrome: int, opcode: Opcode | None = None) -> None:
        """Let the device refuse the next command, or the next with this opcode."""
        self._refusals.append(_Refusal(status, syndrome, opcode))

    def nic(self, name: str) -> SoftNic:
        """The software NIC behind an open device."""
        number = self._number(name)
        return next(context.nic.nic for context in self._contexts.values() if context.device == number)

    def _number(self, name: str) -> int:
        return int(name.removeprefix(self._prefix))

    def attach(self, name: str, port: PortConfig) -> bool:
        """Attach a device so when it is opened the next time: whether there is such a device."""
        number = name.removeprefix(self._prefix)
        if not number.isdecimal() or int(number) >= self.devices:
            return False
        self.ports[int(number)] = port
        return True

    def break_down(self, name: str) -> None:
        """The device fails: everyone is told (IBV_EVENT_DEVICE_FATAL), and from then on calls fail with EIO."""
        self.nic(name).fail()
        self._fatal.add(self._number(name))

    @property
    def open_contexts(self) -> int:
        """How many are open."""
        return len(self._contexts)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _guarded(self, method: Callable[..., int | None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return int(method(*arguments) or 0)
            except DocaError as error:
                return -_errno_of(error)
            except Exception:
                self.complaints.append(traceback.format_exc())
                return -errno.EIO

        return call

    def _sysfs(self) -> Path:
        """What the kernel tells of devices in files."""
        folder = Path(tempfile.mkdtemp(prefix="gpunetio-stand-in-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for number in range(soft.DEVICES):
            device = folder / f"infiniband/{self._prefix}{number}"
            device.mkdir(parents=True)
            mac = Port(self.ports.get(number) or PortConfig(), f"127.0.0.{number + 1}").mac
            guid = (mac[:3] + b"\xff\xfe" + mac[3:]).hex(":", 2)
            files = {
                "board_id": BOARD_ID, "fw_ver": FW_VER, "hca_type": "MT4129", "hw_rev": "0", "node_guid": guid,
                "node_type": "1: CA", "sys_image_guid": guid,
            }
            for name, text in files.items():
                (device / name).write_text(f"{text}\n")
        return folder

    def _enter(self, function: bytes, context: int) -> int:
        name = function.decode()
        self.calls[name] += 1
        if waiting := self._failures.get(name):
            return waiting.pop(0)
        gone = context != _NOTHING and self._contexts[context].device in self._fatal
        return errno.EIO if gone and name not in _LAST_CALLS else 0

    def _complain(self, function: bytes, what: bytes) -> None:
        self.complaints.append(f"{function.decode()}: {what.decode()}")

    def _count_devices(self) -> int:
        return self.devices

    def _open(self, device: int) -> int:
        nic = soft.open_device(f"soft{device}", self.ports.get(device))
        channel = nic.create_event_channel()
        nic.subscribe(channel, None, _OF_DEVICE, 0)
        self._next += 1
        self._contexts[self._next] = _Context(device, nic, channel)
        return self._next

    def _async_fd(self, context: int) -> int:
        opened = self._contexts[context]
        return opened.nic.event_fd(opened.async_channel)

    def _close(self, context: int) -> None:
        closed = self._contexts.pop(context)
        closed.nic.close()
        if all(other.device != closed.device for other in self._contexts.values()):
            self._fatal.discard(closed.device)
            self.ports.pop(closed.device, None)

    def _nic(self, context: int) -> soft.SoftProvider:
        return self._contexts[context].nic

    def _query_device(self, context: int, fw_ver: int, values: int) -> None:
        known = {**vars(self._nic(context).query_device()), **CONNECTX_7}
        _fill(fw_ver, FW_VER.encode() + b"\0")
        _fill(values, _words(known[name] for name in _DEVICE_VALUES))

    def _query_port(self, context: int, port: int, values: int) -> None:
        known = vars(self._nic(context).query_port(port))
        _fill(values, _words(known[name] for name in _PORT_VALUES))

    def _query_gid(self, context: int, port: int, index: int, room: int) -> int:
        nic = self._nic(context)
        gid = nic.query_gid(port, index)
        if not (self.has_gids and any(gid)):
            return -errno.ENODATA
        _fill(room, gid)
        return _GID_TYPE_IB if nic.nic.port.infiniband else _GID_TYPE_ROCE_V2

    def _alloc_pd(self, context: int) -> int:
        return self._nic(context).alloc_pd()

    def _dealloc_pd(self, context: int, pdn: int) -> None:
        self._nic(context).dealloc_pd(pdn)

    def _reg_mr(self, context: int, pdn: int, address: int, nbytes: int, iova: int, access: int) -> int:
        try:
            return self._nic(context).reg_mr(pdn, address, nbytes, iova, _access(access), False).lkey
        except InvalidValueError:
            return -errno.EFAULT  # the library and the kernel have checked everything else

    def _reg_dmabuf_mr(
        self, context: int, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: int
    ) -> int:
        return self._nic(context).reg_dmabuf_mr(pdn, fd, offset, nbytes, iova, _access(access)).lkey

    def _rereg_mr(
        self, context: int, key: int, changes: int, pdn: int, address: int, nbytes: int, access: int
    ) -> int:
        place = (address, nbytes, False) if changes & IBV_REREG_MR_CHANGE_TRANSLATION else None
        rights = _access(access) if changes & IBV_REREG_MR_CHANGE_ACCESS else None
        return self._nic(context).rereg_mr(key, pdn if changes & IBV_REREG_MR_CHANGE_PD else None, place, rights).lkey

    def _dereg_mr(self, context: int, key: int) -> None:
        self._nic(context).dereg_mr(key)

    def _resolve(self, context: int, port: int, sgid_index: int, dgid: int, mac: int) -> None:
        nic = self._nic(context)
        if not any(nic.query_gid(port, sgid_index)):
            raise InvalidValueError(f"GID {sgid_index} is empty")
        gid = ctypes.string_at(dgid, 16)
        _fill(mac, nic.resolve_mac(port, sgid_index, gid))
        with contextlib.suppress(DocaError):  # so that the software NIC knows the path, as a card does by the MAC
            nic.create_ah(0, port, Route(gid, 0, 0, sgid_index, 0, 64, 0, True, 0))

    def _get_async_event(self, context: int, port: int) -> int:
        opened = self._contexts[context]
        event = opened.nic.get_event(opened.async_channel)
        if event is None:
            return -errno.EAGAIN
        if event.type != EventType.PORT_CHANGE:
            return AsyncEventType.DEVICE_FATAL
        _fill(port, _words([event.number >> 8]))
        up = event.number & 0xFF == PortSubtype.ACTIVE
        return AsyncEventType.PORT_ACTIVE if up else AsyncEventType.PORT_ERR

    # --- DEVX --------------------------------------------------------------------------------------------------------

    def _command(
        self, carry_out: Callable[[bytes, int], tuple[int, bytes]], where: int, size: int, out: int, out_size: int
    ) -> int:
        """Have the device carry out a mailbox, or refuse it."""
        mailbox = ctypes.string_at(where, size)
        try:
            self._look_at(mailbox)
            number, answer = carry_out(mailbox, out_size)
        except DriverError as error:
            self.refused.append(str(error))
            if not self.tells_status:
                return -_STATUS_ERRNO.get(Status(error.status), errno.EINVAL)
            _fill(out, bytes(OUT.pack(status=error.status, syndrome=error.syndrome)).ljust(out_size, b"\0"))
            return -errno.EREMOTEIO
        _fill(out, answer)
        return number

    def _look_at(self, mailbox: bytes) -> None:
        """Raise DriverError if the device refuses it, other than the software NIC would."""
        opcode = int.from_bytes(mailbox[:2], "big")
        for refusal in self._refusals:
            if refusal.opcode in (None, opcode):
                self._refusals.remove(refusal)
                raise DriverError("refused because a test wants it", refusal.status, refusal.syndrome)
        if wrong := reserved_bits(mailbox):
            raise DriverError(wrong, Status.BAD_PARAM, SYNDROME)

    def _obj_create(self, context: int, *command: int) -> int:
        return self._command(self._nic(context).devx_obj_create, *command)

    def _obj_modify(self, context: int, handle: int, *command: int) -> int:
        return self._command(lambda *box: (0, self._nic(context).devx_obj_modify(handle, *box)), *command)

    def _obj_query(self, context: int, handle: int, *command: int) -> int:
        return self._command(lambda *box: (0, self._nic(context).devx_obj_query(handle, *box)), *command)

    def _general_cmd(self, context: int, *command: int) -> int:
        return self._command(lambda *box: (0, self._nic(context).general_cmd(*box)), *command)

    def _obj_destroy(self, context: int, handle: int) -> int:
        try:
            self._nic(context).devx_obj_destroy(handle)
        except DriverError as error:
            self.refused.append(str(error))
            return -_STATUS_ERRNO.get(Status(error.status), errno.EINVAL)
        return 0

    def _query_eqn(self, context: int, vector: int) -> int:
        return self._nic(context).query_eqn(vector)

    def _reg_umem(self, context: int, address: int, nbytes: int, access: int) -> int:
        try:
            return self._nic(context).reg_umem(address, nbytes, _access(access))
        except InvalidValueError:
            return -errno.EFAULT

    def _reg_dmabuf_umem(self, context: int, fd: int, offset: int, nbytes: int, access: int) -> int:
        return self._nic(context).reg_dmabuf_umem(fd, offset, nbytes, _access(access))

    def _dereg_umem(self, context: int, umem: int) -> None:
        self._nic(context).dereg_umem(umem)

    def _alloc_uar(self, context: int, kind: int, base: int) -> int:
        if kind == UarAllocationType.NONCACHE_DEDICATED and not self.dedicated_uars:
            return -errno.EOPNOTSUPP
        page = self._nic(context).alloc_uar(UarAllocationType(kind))
        _fill(base, _words([page.base_addr]))
        return page.page_id

    def _free_uar(self, context: int, page: int) -> None:
        self._nic(context).free_uar(UarPage(page, 0, 0))

    # --- steering ----------------------------------------------------------------------------------------------------

    def _attach_flow_table(self, context: int, handle: int) -> int:
        return self._nic(context).attach_flow_table(handle)

    def _detach_flow_table(self, context: int, handle: int) -> None:
        self._nic(context).detach_flow_table(handle)

    def _open_kernel_path(self, context: int, room: int) -> int:
        handle, table = self._nic(context).open_kernel_path()
        _fill(room, _words([table]))
        return handle

    def _close_kernel_path(self, context: int, handle: int) -> None:
        self._nic(context).close_kernel_path(handle)

    # --- DEVX events -------------------------------------------------------------------------------------------------

    def _create_event_channel(self, context: int) -> int:
        return self._nic(context).create_event_channel()

    def _event_fd(self, context: int, channel: int) -> int:
        return self._nic(context).event_fd(channel)

    def _destroy_event_channel(self, context: int, channel: int) -> None:
        opened = self._contexts[context]
        opened.nic.destroy_event_channel(channel)
        for known in opened.subscriptions:
            if known.channel == channel:
                known.cookies.clear()

    def _subscribe(self, context: int, channel: int, handle: int, types: int, count: int, cookie: int) -> int:
        opened = self._contexts[context]
        numbers = struct.unpack(f"={count}H", ctypes.string_at(types, 2 * count))
        if any(number not in list(EventType) for number in numbers):
            return -errno.EINVAL
        wanted = [EventType(number) for number in numbers]
        if any((kind in _OF_DEVICE) != (handle == _NOTHING) for kind in wanted):
            return -errno.EINVAL
        if any(opened.is_told_elsewhere(channel, handle, kind) for kind in wanted):
            return -errno.EOPNOTSUPP
        number = opened.subscription(channel, handle)
        for kind in wanted:
            opened.nic.subscribe(channel, None if handle == _NOTHING else handle, [kind], number)
            opened.subscriptions[number].cookies[kind] = cookie
        return 0

    def _get_event(self, context: int, channel: int, room: int) -> int:
        opened = self._contexts[context]
        while event := opened.nic.get_event(channel):
            cookie = opened.subscriptions[event.cookie].cookies.get(event.type)
            if cookie is not None:
                _fill(room, _words([cookie, event.type, event.number]))
                return 0
        return -errno.EAGAIN


def _errno_of(error: DocaError) -> int:
    return next((code for kind, code in _ERRNO if isinstance(error, kind)), errno.EIO)


def _access(bits: int) -> Access:
    return Access(bits & _KNOWN_ACCESS)


def _words(values: Any) -> bytes:
    numbers = [int(value) for value in values]
    return struct.pack(f"={len(numbers)}Q", *numbers)


def _fill(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
