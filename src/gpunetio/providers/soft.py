"""The software NIC as a provider: soft0, soft1, … in this process, connected by in-process wires."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from ..enums import Access, GidType, LinkLayer, PortState, UarAllocationType
from ..errors import DocaError, DriverError, InUseError, InvalidValueError, NotSupportedError
from ..fabric.claims import claimant
from ..formats import commands as cmd
from ..formats.commands import Opcode, Status
from ..formats.doorbell import UAR_REG_OFFSET
from ..formats.events import EventType
from ..formats.flow import CREATE_FLOW_TABLE_IN, CREATE_FLOW_TABLE_OUT, SET_FLOW_TABLE_ROOT_IN, RootChange
from ..formats.wqe import AV_GRH, AV_SEG, AV_SGID_SHIFT
from ..interrupts import allowed
from ..limits import within_limits
from ..memory import MappedMemory
from ..nic.control.command import Call, Command, Handlers, opcode_of
from ..nic.control.flow.tables import MAX_LEVEL, FlowTables
from ..nic.control.gids import UDP_SPORTS
from ..nic.control.guids import node_guid_of
from ..nic.control.links.paths import Destination
from ..nic.control.objects import EventSources
from ..nic.control.queues.cq import MAX_LOG_CQ
from ..nic.control.queues.eq import COMP_VECTORS
from ..nic.control.queues.qp import MAX_LOG_QUEUE
from ..nic.engine.port import CPU, MAX_GID, Port, PortConfig
from ..nic.host.engine import compile_engine
from ..nic.memory.cuda_driver import cuda_driver
from ..nic.nic import SoftNic, descriptors_of
from ..nic.queues.channels import EventChannel
from ..nic.state.extensions import ETHERNET_WIRES
from ..nic.state.path import MAX_PATHS
from ..nic.state.qp import MAX_RD_ATOMIC
from ..nic.state.reasons import Reason
from . import watch
from .plain_verbs import Route
from .provider import ClockInfo, DeviceAttr, DeviceInfo, Event, MrKeys, NewAh, PortAttr, UarPage

DEVICES = 8
_GPU = "gpu"
_SOFT = frozenset(f"soft{n}" for n in range(DEVICES))
ADDRESSES = 254  # in 127.0.0.0/24, for processes that choose no address
_MAX_WR, _MAX_SGE, _MAX_CQE = 1 << MAX_LOG_QUEUE, 30, 1 << MAX_LOG_CQ

_nics: dict[str, tuple[SoftNic, int]] = {}  # name → the NIC, and how often it is open
_asked: dict[str, PortConfig] = {}  # name → the port that the first open requested
_lock = threading.RLock()


def _after_fork() -> None:
    """Forget the parent's NICs in a forked child."""
    global _lock
    _lock = threading.RLock()
    _nics.clear()
    _asked.clear()


os.register_at_fork(after_in_child=_after_fork)


def device_list() -> list[DeviceInfo]:
    """Return the software devices, open or not: soft0, …, and gpu0, … for each GPU that can run a NIC's engine."""
    return [
        *(DeviceInfo(f"soft{n}", "soft", "software NIC (CPU engine)") for n in range(DEVICES)),
        *(DeviceInfo(f"gpu{n}", "soft", f"software NIC (engine on GPU {n})") for n in range(_gpus())),
    ]


def has(name: str) -> bool:
    """Return whether a software device has this name. CUDA is initialized only for names of GPU devices."""
    return name in _SOFT or (name.startswith(_GPU) and name in (device.name for device in device_list()))


def open_nics() -> list[SoftNic]:
    """Return the NICs that are open in this process."""
    with _lock:
        return [nic for nic, opened in _nics.values() if opened]


def _gpus() -> int:
    driver = cuda_driver()
    return min(driver.count(), DEVICES) if driver else 0


def _address(n: int) -> str:
    return f"127.0.0.{n + 1}"


def _address_of(name: str) -> str:
    """Return the default address of a device. The addresses of gpuN follow those of softN."""
    first, number = (DEVICES, name.removeprefix(_GPU)) if name.startswith(_GPU) else (0, name.removeprefix("soft"))
    return _address(first + int(number))


def _on_gpu(name: str, port: PortConfig) -> PortConfig:
    """Return the port of device gpuN, with the engine on that GPU."""
    if port.engine not in (CPU, name):
        raise InvalidValueError(f"engine = {port.engine!r}: {name} makes its turns on that GPU; open soft0 instead")
    return replace(port, engine=name)


def compile_for(port: PortConfig | None) -> None:
    """Compile what a NIC with this port needs before it can be opened."""
    compile_engine()
    if port is not None and port.wire_kind.ethernet:
        ETHERNET_WIRES.load()


def open_device(name: str, port: PortConfig | None = None) -> SoftProvider:
    """Open a software device. All opens of a name in one process share one NIC, with the port of the first open."""
    _prepare(port)
    return _open(name, port)


def _prepare(port: PortConfig | None) -> None:
    """Do the part that may take a minute, before `_lock` is taken."""
    if sys.platform != "linux":
        raise NotSupportedError(f"the software NIC runs on Linux, not on {sys.platform}")
    with allowed():
        compile_for(port)


def _open(name: str, port: PortConfig | None) -> SoftProvider:
    if name.startswith(_GPU):
        port = _on_gpu(name, port or PortConfig())
    with _lock, within_limits(name, descriptors_of(port or PortConfig())):
        nic, opened = _nics.get(name, (None, 0))
        if nic is not None and not opened:
            nic.close()  # its engine did not stop in time before
            nic = None
        if nic is None:
            asked = port or PortConfig()
            nic = SoftNic(name, Port(watch.opening(name, asked), _address_of(name)))
            _asked[name] = asked
            try:
                for other, users in _nics.values():
                    if users:
                        nic.join(other)
            except BaseException:
                nic.close()
                raise
        elif port not in (None, nic.port.config, _asked[name]):
            raise InvalidValueError(f"{name} is open already, with {nic.port.config}: close it to change its port")
        _nics[name] = nic, opened + 1
        return SoftProvider(nic)


def open_first(port: PortConfig | None = None) -> SoftProvider:
    """Open the first software NIC that is open in this process, or that no other process has open.

    If other processes have them all, open soft0 with the first free address. If `port` has addresses, open soft0 as
    well, because default addresses are then not needed.
    """
    _prepare(port)
    with_addresses = port is not None and bool(port.addresses)
    with _lock:  # a NIC that another thread is opening already has its address
        for n in range(DEVICES):
            if with_addresses or f"soft{n}" in _nics:
                return _open(f"soft{n}", port)
            if (opened := _open_unclaimed(f"soft{n}", _address(n), port)) is not None:
                return opened
        return _open_with_free_address("soft0", port or PortConfig())


def open_beside_others(name: str, port: PortConfig) -> SoftProvider:
    """Open a device. If it would get its default address and another process has that, use the first free address."""
    _prepare(port)
    with _lock:  # as in `open_first`
        if port.addresses or name in _nics:
            return _open(name, port)
        if opened := _open_unclaimed(name, _address_of(name), port):
            return opened
        opened = _open_with_free_address(name, port)
        _asked[name] = port
        return opened


def _open_with_free_address(name: str, port: PortConfig) -> SoftProvider:
    """Open a device with the first free address that is no device's default."""
    for n in range(DEVICES, ADDRESSES):
        if (opened := _open_unclaimed(name, _address(n), replace(port, addresses=(_address(n),)))) is not None:
            return opened
    raise InUseError(
        f"the addresses {_address(0)} to {_address(ADDRESSES - 1)} belong to NICs in other processes: give the NIC "
        "another address"
    )


def _open_unclaimed(name: str, address: str, port: PortConfig | None) -> SoftProvider | None:
    """Open a device. Return None if another process has its address."""
    if claimant(address) is not None:
        return None
    opened = _open(name, port)
    if all(opened.nic.control_socket.claimed.values()):
        return opened
    opened.close()  # another process was faster, or cannot be found by that name
    return None


@dataclass(frozen=True)
class _DevxObject:
    """An object created with a mailbox: its kind, and the fields that name it, such as its number."""

    kind: Handlers
    named: dict[str, int]

    def __str__(self) -> str:
        return _words(self.named)

    @property
    def number(self) -> int:
        """Return the number of an object that is named by a single field."""
        (number,) = self.named.values()
        return number

    @property
    def destroy_mailbox(self) -> bytes:
        return self.kind.command(Call.DESTROY).input_for(self.named)


class SoftProvider:
    """One open of a software NIC. `nic` is the NIC itself, for inspection. Its DPA is threads of this process."""

    software = has_dpa = carries_mailboxes = True
    plain = None
    nic: SoftNic
    name: str

    def __init__(self, nic: SoftNic):
        self.nic, self.name = nic, nic.name
        self._objects: dict[int, _DevxObject] = {}  # by handle
        self._handles = itertools.count(1)
        self._held: dict[tuple[Callable[[int], None], int], None] = {}  # what close() releases, in reverse order
        self._mapped: dict[tuple[Callable[[int], None], int], MappedMemory] = {}  # dmabufs, by release function
        self._channels: dict[int, EventChannel] = {}
        self._paths: dict[int, Destination] = {}  # by handle of the address handle
        self._address_handles = itertools.count(1)
        self._pid = os.getpid()
        self._open = True

    @property
    def reaches_gpu_memory(self) -> bool:
        """Return whether queues may lie in GPU memory, which is so if the engine runs on the GPU."""
        return self.nic.port.config.on_gpu

    def __repr__(self) -> str:
        return f"<software NIC {self.name}{'' if self._open else ', closed'}>"

    def query_device(self) -> DeviceAttr:
        nic, guid = self.nic, node_guid_of(self.nic.port)
        # A linked list of receives always keeps one entry, so an SRQ holds one receive less than its ring has entries.
        return DeviceAttr(
            fw_ver="software", node_guid=guid, sys_image_guid=guid, vendor_id=0x02C9,
            vendor_part_id=nic.port.config.part_id, hw_ver=0,
            board_id="gpunetio-soft", phys_port_cnt=1, max_mr_size=1 << 47, max_qp=nic.qps.mask, max_qp_wr=_MAX_WR,
            max_sge=_MAX_SGE, max_cq=nic.cqs.mask, max_cqe=_MAX_CQE, max_mr=nic.mkeys.mask, max_pd=nic.pds.mask,
            max_ah=MAX_PATHS, max_srq=nic.srqs.mask, max_srq_wr=_MAX_WR - 1, max_srq_sge=_MAX_SGE, max_pkeys=1,
            max_qp_rd_atom=MAX_RD_ATOMIC, max_qp_init_rd_atom=MAX_RD_ATOMIC, num_comp_vectors=COMP_VECTORS,
            can_resize_srq=True,
        )

    def query_port(self, port: int) -> PortAttr:
        self._check_port(port)
        return PortAttr(
            state=PortState.ACTIVE if self.nic.control.hca.link_up else PortState.DOWN,
            max_mtu=4096, active_mtu=self.nic.port.active_mtu, sm_lid=0,
            lid=self.nic.port.lid, lmc=0, link_layer=self.nic.port.link_layer, gid_tbl_len=MAX_GID,
            **dict(zip(("active_width", "active_speed"), self.nic.port.rate, strict=True)),
        )

    def query_gid(self, port: int, index: int) -> bytes:
        self._check_port(port)
        return self.nic.control.gids.gid(index)

    def gid_type(self, port: int, index: int) -> GidType:
        self._check_port(port)
        return GidType.ROCE_V2 if self.nic.port.link_layer == LinkLayer.ETHERNET else GidType.IB

    def alloc_pd(self) -> int:
        return self._hold(self.nic.dealloc_pd, self.nic.alloc_pd())

    def dealloc_pd(self, pdn: int) -> None:
        self._give_back(self.nic.dealloc_pd, pdn)

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        key = self._hold(self.nic.dereg_mr, self.nic.reg_mr(pdn, address, nbytes, iova, access, cuda))
        return MrKeys(key, key, key)

    def rereg_mr(
        self, handle: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> MrKeys:
        """Change a region. Its keys stay the same."""
        self.nic.rereg_mr(handle, pdn, place, access)
        return MrKeys(handle, handle, handle)

    def dereg_mr(self, handle: int) -> None:
        self._give_back(self.nic.dereg_mr, handle)

    def reg_dmabuf_mr(self, pdn: int, fd: int, offset: int, nbytes: int, iova: int, access: Access) -> MrKeys:
        """Register a range of a dmabuf. The CPU must be able to map it."""
        key = self._map_for(
            self.nic.dereg_mr, fd, offset, nbytes,
            lambda address: self.reg_mr(pdn, address, nbytes, iova, access, False).handle,
        )
        return MrKeys(key, key, key)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        return self._hold(self.nic.dereg_umem, self.nic.reg_umem(address, nbytes, access))

    def reg_dmabuf_umem(self, fd: int, offset: int, nbytes: int, access: Access) -> int:
        """Register a range of a dmabuf as a UMEM. The CPU must be able to map it."""
        return self._map_for(
            self.nic.dereg_umem, fd, offset, nbytes, lambda address: self.reg_umem(address, nbytes, access)
        )

    def dereg_umem(self, umem_id: int) -> None:
        self._give_back(self.nic.dereg_umem, umem_id)

    def alloc_uar(self, kind: UarAllocationType) -> UarPage:
        page_id, base = self.nic.alloc_uar(kind)
        self._hold(self.nic.free_uar, page_id)
        return UarPage(page_id, base, base + UAR_REG_OFFSET)

    def free_uar(self, page: UarPage) -> None:
        self._give_back(self.nic.free_uar, page.page_id)

    def query_eqn(self, vector: int) -> int:
        if not 0 <= vector < COMP_VECTORS:
            raise InvalidValueError(f"completion vector {vector}: the software NIC has 0 to {COMP_VECTORS - 1}")
        return vector + 1

    def query_clock(self) -> ClockInfo:
        """Return the conversion of the engine's clock, which is CLOCK_MONOTONIC in nanoseconds."""
        self._need_own_clock()
        return ClockInfo(time.time_ns(), time.monotonic_ns(), frac=0, mult=1, shift=0, mask=(1 << 64) - 1)

    def raw_clock(self) -> int:
        self._need_own_clock()
        return time.monotonic_ns()

    def _need_own_clock(self) -> None:
        if self.nic.port.config.on_cuda:
            raise NotSupportedError(f"{self.name} makes its turns on a GPU, whose clock the CPU does not read")

    def resolve_mac(self, port: int, sgid_index: int, dgid: bytes) -> bytes:
        self._check_port(port)
        return self.nic.control.routes.mac_of(dgid)

    def seek_mac(self, port: int, dgid: bytes) -> bool:
        self._check_port(port)
        return self.nic.control.routes.seek_mac(dgid)

    def create_ah(self, pdn: int, port: int, route: Route) -> NewAh:
        self._check_port(port)
        ethernet = self.nic.port.link_layer == LinkLayer.ETHERNET
        mac = self.nic.control.routes.mac_of(route.dgid) if ethernet else bytes(6)
        handle = next(self._address_handles)
        self._paths[handle] = self.nic.open_path(route.dgid, route.dlid, route.sgid_index)
        self._hold(self._release_path, handle)
        return NewAh(handle, _address_vector(route, ethernet, mac))

    def destroy_ah(self, handle: int) -> None:
        self._give_back(self._release_path, handle)

    def _release_path(self, handle: int) -> None:
        self.nic.release_path(self._paths.pop(handle))

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        command = self.nic.control.interpreter.find(mailbox)
        if command is not None and command.call is not Call.CREATE:
            raise InvalidValueError(f"{_name(mailbox)} creates no object")
        out = self._execute(mailbox, out_size, command)  # raises an error if there is no such command
        assert command is not None
        handle = next(self._handles)
        self._objects[handle] = _DevxObject(self.nic.control.kinds[command.opcode], command.named(mailbox, out))
        self._hold(self._destroy, handle)
        return handle, out

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        return self._execute(mailbox, out_size, self._for_object(handle, mailbox, Call.MODIFY))

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        return self._execute(mailbox, out_size, self._for_object(handle, mailbox, Call.QUERY))

    def devx_objects(self) -> list[int]:
        return list(self._objects)

    def devx_obj_destroy(self, handle: int) -> None:
        self._object(handle)
        self._give_back(self._destroy, handle)

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes:
        command = self.nic.control.interpreter.find(mailbox)
        if command is not None and command.call is not Call.GENERAL:
            raise InvalidValueError(f"{_name(mailbox)} concerns an object: use a devx_obj_… call")
        return self._execute(mailbox, out_size, command)

    def attach_flow_table(self, table: int) -> int:
        if root := self.nic.control.flow_tables.root:
            raise InUseError(
                f"{self.name} steers by flow table {root:#x} already, which another FlowPort or program has made its "
                "root: close that first"
            )
        made = self._object(table)
        if not isinstance(made.kind, FlowTables):
            raise InvalidValueError(f"object {table} of {self.name} is no flow table, but {made}")
        self._set_root(RootChange.SET, made.number)
        return self._hold(self._reset_root, table)

    def detach_flow_table(self, handle: int) -> None:
        self._give_back(self._reset_root, handle)

    def _reset_root(self, handle: int) -> None:
        self._set_root(RootChange.RESET, 0)

    def _set_root(self, change: RootChange, table: int) -> None:
        box = SET_FLOW_TABLE_ROOT_IN.pack(opcode=Opcode.SET_FLOW_TABLE_ROOT, op_mod=change, table_id=table)
        self.general_cmd(bytes(box), cmd.OUT.size)

    def open_kernel_path(self) -> tuple[int, int]:
        """Create a table without entries: packets that no entry takes continue as without tables."""
        create = CREATE_FLOW_TABLE_IN.pack(
            opcode=Opcode.CREATE_FLOW_TABLE, flow_table_context={"level": MAX_LEVEL, "log_size": 0}
        )
        handle, _ = self.devx_obj_create(bytes(create), CREATE_FLOW_TABLE_OUT.size)
        return handle, self._object(handle).number

    def close_kernel_path(self, handle: int) -> None:
        self.devx_obj_destroy(handle)

    def create_event_channel(self) -> int:
        handle = next(self._handles)
        with within_limits(f"an event channel of {self.name}", 1):
            self._channels[handle] = self.nic.create_event_channel()
        return self._hold(self._destroy_channel, handle)

    def event_fd(self, channel: int) -> int:
        return self.event_channel(channel).fd

    def subscribe(self, channel: int, handle: int | None, types: Iterable[EventType], cookie: int) -> None:
        target = None
        if handle is not None:
            made = self._object(handle)
            if not isinstance(made.kind, EventSources):
                raise NotSupportedError(f"{self.name}: {made} raises no events on the software NIC")
            target = made.kind, made.number
        self.nic.subscribe(self.event_channel(channel), target, types, cookie)

    def get_event(self, channel: int) -> Event | None:
        event = self.event_channel(channel).get()
        return None if event is None else Event(*event)

    def destroy_event_channel(self, channel: int) -> None:
        self.event_channel(channel)
        self._give_back(self._destroy_channel, channel)

    def _destroy_channel(self, handle: int) -> None:
        self.nic.destroy_event_channel(self._channels[handle])
        del self._channels[handle]

    def event_channel(self, handle: int) -> EventChannel:
        """Return the channel with this handle."""
        if handle not in self._channels:
            raise InvalidValueError(f"{self.name} has no event channel {handle}")
        return self._channels[handle]

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        """Return a register in the QP's own cache line: queues that share a register in memory overwrite each other."""
        return self.nic.doorbell_line(qpn)

    def near_register(self, register: int, engine: str) -> int | None:
        return self.nic.control.qps.near_register(register) if engine == self.nic.port.config.engine_name else None

    def doorbell_rung(self) -> None:
        """Wake the engine, which cannot see a doorbell while it sleeps."""
        self.nic.engine.doorbell_rung()

    def wake_at(self, cqn: int, word: int) -> bool:
        self.nic.wake_at(cqn, word)
        return True

    def explain(self, qpn: int, vendor_syndrome: int | None) -> str | None:
        for report in reversed(self.nic.reports):
            wanted = report.reason is not Reason.FLUSH if vendor_syndrome is None else report.reason == vendor_syndrome
            if report.qpn == qpn and wanted:
                return report.message
        return None

    def close(self) -> None:
        """Release what this open created. The last close stops the NIC's engine; TimedOutError if it does not stop."""
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        freed = True
        while freed:  # an object that an earlier one uses is released in the next round
            freed = False
            for free, number in reversed(list(self._held)):
                with contextlib.suppress(DocaError):
                    self._give_back(free, number)
                    freed = True
        with _lock:
            nic, opened = _nics[self.name]
            _nics[self.name] = nic, opened - 1
            if opened == 1:
                watch.closing(nic)
                nic.close()  # if this fails, the next open tries again
                del _nics[self.name]

    def _map_for(
        self, free: Callable[[int], None], fd: int, offset: int, nbytes: int, register: Callable[[int], int]
    ) -> int:
        """Map a dmabuf and register it. Return the number; `free` releases it together with the mapping."""
        memory = _map(fd, offset, nbytes)
        with ExitStack() as undo:
            undo.callback(memory.close)
            number = register(memory.address + offset)
            undo.pop_all()
        self._mapped[free, number] = memory
        return number

    def _hold(self, free: Callable[[int], None], number: int) -> int:
        """Record a created object, so that close() releases it as a kernel driver cleans up after a process."""
        self._held[free, number] = None
        return number

    def _give_back(self, free: Callable[[int], None], number: int) -> None:
        free(number)
        self._held.pop((free, number), None)
        if memory := self._mapped.pop((free, number), None):
            memory.close()

    def _destroy(self, handle: int) -> None:
        self._execute(self._objects[handle].destroy_mailbox, cmd.OUT.size)
        del self._objects[handle]

    def _object(self, handle: int) -> _DevxObject:
        if handle not in self._objects:
            raise InvalidValueError(f"{self.name} has no DEVX object {handle}")
        return self._objects[handle]

    def _for_object(self, handle: int, mailbox: bytes, call: Call) -> Command | None:
        """Return the command of a mailbox, None if the NIC has no such command.

        InvalidValueError unless the mailbox is for this call and names this object, as DEVX requires.
        """
        named, command = self._object(handle), self.nic.control.interpreter.find(mailbox)
        if command is None:
            return None  # the device itself refuses it
        if command.call is not call:
            raise InvalidValueError(f"{_name(mailbox)} is not for this call: use another devx_obj_… call")
        if (other := command.named(mailbox)) != named.named:
            raise InvalidValueError(f"the mailbox names {_words(other)}, but object {handle} is {named}")
        return command

    def _execute(self, mailbox: bytes, out_size: int, command: Command | None = None) -> bytes:
        out, refusal = self.nic.execute(bytes(mailbox), out_size, command)
        status, syndrome = cmd.OUT.get(out, "status"), cmd.OUT.get(out, "syndrome")
        if status != Status.OK:
            name = _name(mailbox)
            raise DriverError(
                f"{name} failed with status {Status(status).name} ({status:#04x}), syndrome {syndrome:#x}: {refusal}",
                status, syndrome,
            )
        return out

    @staticmethod
    def _check_port(port: int) -> None:
        if port != 1:
            raise InvalidValueError(f"port {port} does not exist: the software NIC has one, port 1")


def _map(fd: int, offset: int, nbytes: int) -> MappedMemory:
    """Map the memory of a dmabuf, or of a memory file whose size is sealed."""
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        if offset < 0 or nbytes <= 0 or offset + nbytes > size:
            raise InvalidValueError(f"{nbytes} bytes at offset {offset} do not lie in the {size} bytes of fd {fd}")
        return MappedMemory(fd, size, writable=True)
    except (OSError, OverflowError) as error:  # OverflowError: fd does not fit in a C int
        raise NotSupportedError(
            f"the software NIC cannot map dmabuf fd {fd} into this process ({error}): its exporter must allow mmap, "
            "which GPU drivers do not"
        ) from error


def _words(named: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:#x}" for name, number in named.items())


def _name(mailbox: bytes) -> str:
    opcode = opcode_of(mailbox)
    return Opcode(opcode).name if opcode in list(Opcode) else f"opcode {opcode:#05x}"


def _address_vector(route: Route, ethernet: bool, mac: bytes) -> bytes:
    """Return the address vector of a WQE, as `mlx5_create_ah` builds it. The software NIC takes any UDP source port."""
    av = np.zeros((), AV_SEG.dtype)
    av["stat_rate_sl"] = route.static_rate << 4 | ((route.sl & 7) << 1 if ethernet else route.sl)
    av["rlid"] = UDP_SPORTS[0] if ethernet else route.dlid
    av["rmac"] = np.void(mac)
    if route.is_global:
        av["tclass"], av["hop_limit"], av["rgid"] = route.traffic_class, route.hop_limit, np.void(route.dgid)
        av["grh_gid_fl"] = (0 if ethernet else AV_GRH) | route.sgid_index << AV_SGID_SHIFT | route.flow_label
    return av.tobytes()
