"""The software NIC as a provider: soft0, soft1, … in this process, joined by in-process wires."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass

from ..enums import Access, LinkLayer, UarAllocationType
from ..errors import BadStateError, DriverError, InvalidValueError, NotSupportedError
from ..formats import commands as cmd
from ..formats.commands import Opcode, Status
from ..formats.doorbell import UAR_REG_OFFSET
from ..nic.nic import MAX_CQ, MAX_GID, MAX_MR, MAX_PD, MAX_QP, SoftNic
from .provider import DeviceAttr, DeviceInfo, MrKeys, PortAttr, UarPage

DEVICES = 8
_MAX_WR, _MAX_SGE, _MAX_CQE = 1 << 15, 30, 1 << 22
_MAX_RD_ATOMIC = 16

_nics: dict[str, tuple[SoftNic, int]] = {}  # name → NIC, and how often it is open
_lock = threading.Lock()


def device_list() -> list[DeviceInfo]:
    """The software devices, whether open or not."""
    return [DeviceInfo(f"soft{n}", "soft", "software NIC (CPU engine)") for n in range(DEVICES)]


def open_device(name: str) -> SoftProvider:
    """Open a software device; every open of a name in one process shares one NIC."""
    if sys.platform != "linux":
        raise NotSupportedError(f"the software NIC runs on Linux, not on {sys.platform}")
    with _lock:
        nic, opened = _nics.get(name, (None, 0))
        if nic is not None and nic.pid != os.getpid():  # inherited by fork: it belongs to the parent
            _nics.clear()
            nic, opened = None, 0
        if nic is None:
            nic = SoftNic(name, f"127.0.0.{int(name.removeprefix('soft')) + 1}")
            for other, _ in _nics.values():
                nic.join(other)
        _nics[name] = nic, opened + 1
        return SoftProvider(nic)


@dataclass(frozen=True)
class _Object:
    """A DEVX object: how it is destroyed."""

    destroy: bytes


class SoftProvider:
    """One open of a software NIC; `nic` is the NIC itself, to look at."""

    def __init__(self, nic: SoftNic):
        self.nic, self.name = nic, nic.name
        self._objects: dict[int, _Object] = {}
        self._next_handle = 1
        self._pid = os.getpid()
        self._open = True

    def query_device(self) -> DeviceAttr:
        """See `Provider`."""
        guid = int.from_bytes(self.nic.mac[:3] + b"\xff\xfe" + self.nic.mac[3:], "big")
        return DeviceAttr(
            fw_ver="software", node_guid=guid, sys_image_guid=guid, vendor_id=0x02C9, vendor_part_id=0, hw_ver=0,
            board_id="gpunetio-soft", phys_port_cnt=1, max_mr_size=1 << 47, max_qp=MAX_QP - 1, max_qp_wr=_MAX_WR,
            max_sge=_MAX_SGE, max_cq=MAX_CQ - 1, max_cqe=_MAX_CQE, max_mr=MAX_MR - 1, max_pd=MAX_PD - 1, max_ah=0,
            max_srq=0, max_srq_wr=0, max_srq_sge=0, max_pkeys=1, max_qp_rd_atom=_MAX_RD_ATOMIC,
            max_qp_init_rd_atom=_MAX_RD_ATOMIC,
        )  # fmt: skip

    def query_port(self, port: int) -> PortAttr:
        """See `Provider`."""
        self._check_port(port)
        return PortAttr(
            state="PORT_ACTIVE", max_mtu=4096, active_mtu=4096, sm_lid=0, lid=0, lmc=0, link_layer=LinkLayer.ETHERNET,
            gid_tbl_len=MAX_GID,
        )  # fmt: skip

    def query_gid(self, port: int, index: int) -> bytes:
        """See `Provider`."""
        self._check_port(port)
        return self.nic.gid(index)

    def alloc_pd(self) -> int:
        """See `Provider`."""
        return self.nic.alloc_pd()

    def dealloc_pd(self, pdn: int) -> None:
        """See `Provider`."""
        self.nic.dealloc_pd(pdn)

    def reg_mr(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> MrKeys:
        """See `Provider`."""
        key = self.nic.reg_mr(pdn, address, nbytes, iova, access, cuda)
        return MrKeys(key, key, key)

    def dereg_mr(self, handle: int) -> None:
        """See `Provider`."""
        self.nic.dereg_mr(handle)

    def reg_umem(self, address: int, nbytes: int, access: Access) -> int:
        """See `Provider`."""
        return self.nic.reg_umem(address, nbytes, access)

    def dereg_umem(self, umem_id: int) -> None:
        """See `Provider`."""
        self.nic.dereg_umem(umem_id)

    def alloc_uar(self, kind: UarAllocationType) -> UarPage:
        """See `Provider`."""
        page_id, base = self.nic.alloc_uar(kind)
        return UarPage(page_id, base, base + UAR_REG_OFFSET)

    def free_uar(self, page_id: int) -> None:
        """See `Provider`."""
        self.nic.free_uar(page_id)

    def query_eqn(self, vector: int) -> int:
        """See `Provider`."""
        if vector != 0:
            raise InvalidValueError(f"completion vector {vector} does not exist: the software NIC has one, 0")
        return 1

    def resolve_mac(self, port: int, sgid_index: int, dgid: bytes) -> bytes:
        """See `Provider`."""
        self._check_port(port)
        return self.nic.mac_of(dgid)

    def devx_obj_create(self, mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        """See `Provider`."""
        out = self._execute(mailbox, out_size)
        match int.from_bytes(mailbox[:2], "big"):
            case Opcode.CREATE_CQ:
                destroy = cmd.DESTROY_CQ_IN.pack(opcode=Opcode.DESTROY_CQ, cqn=cmd.CREATE_CQ_OUT.get(out, "cqn"))
            case Opcode.CREATE_QP:
                destroy = cmd.DESTROY_QP_IN.pack(opcode=Opcode.DESTROY_QP, qpn=cmd.CREATE_QP_OUT.get(out, "qpn"))
            case opcode:
                raise InvalidValueError(f"opcode {opcode:#05x} creates no object")
        handle = self._next_handle
        self._next_handle += 1
        self._objects[handle] = _Object(bytes(destroy))
        return handle, out

    def devx_obj_modify(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        """See `Provider`."""
        self._object(handle)
        return self._execute(mailbox, out_size)

    def devx_obj_query(self, handle: int, mailbox: bytes, out_size: int) -> bytes:
        """See `Provider`."""
        self._object(handle)
        return self._execute(mailbox, out_size)

    def devx_obj_destroy(self, handle: int) -> None:
        """See `Provider`."""
        self._execute(self._object(handle).destroy, cmd.OUT.size)
        del self._objects[handle]

    def general_cmd(self, mailbox: bytes, out_size: int) -> bytes:
        """See `Provider`."""
        return self._execute(mailbox, out_size)

    def doorbell_register(self, uar: UarPage, qpn: int) -> int:
        """A line of the QP's own: two queues that ring one register in memory would overwrite each other."""
        return self.nic.doorbell_line(qpn)

    def close(self) -> None:
        """See `Provider`. The last close of a NIC stops its engine."""
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        for handle in reversed(list(self._objects)):
            with contextlib.suppress(DriverError, BadStateError):
                self.devx_obj_destroy(handle)
        with _lock:
            nic, opened = _nics[self.name]
            if opened > 1:
                _nics[self.name] = nic, opened - 1
                return
            del _nics[self.name]
        nic.close()

    def _object(self, handle: int) -> _Object:
        if handle not in self._objects:
            raise InvalidValueError(f"{self.name} has no DEVX object {handle}")
        return self._objects[handle]

    def _execute(self, mailbox: bytes, out_size: int) -> bytes:
        out, refusal = self.nic.execute(bytes(mailbox), out_size)
        status, syndrome = cmd.OUT.get(out, "status"), cmd.OUT.get(out, "syndrome")
        if status != Status.OK:
            number = int.from_bytes(mailbox[:2], "big")
            name = Opcode(number).name if number in list(Opcode) else f"opcode {number:#05x}"
            raise DriverError(
                f"{name} failed with status {Status(status).name} ({status:#04x}), syndrome {syndrome:#x}: {refusal}",
                status, syndrome,
            )  # fmt: skip
        return out

    @staticmethod
    def _check_port(port: int) -> None:
        if port != 1:
            raise InvalidValueError(f"port {port} does not exist: the software NIC has one, port 1")
