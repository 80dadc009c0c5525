"""A QP as kernels see it: the 296-byte structure in GPU memory, and what the host can learn from it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..enums import MemType, NicHandler
from ..errors import BadStateError, InvalidValueError, NotSupportedError
from ..formats.cqe import CQE64, CQE_SIZE, OWNER_MASK, Syndrome
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from ..formats.doorbell import CQ_DBREC, QP_DBREC
from ..formats.wqe import WQEBB
from ..memory import round_up
from ..verbs import CQ, QP, QpEndpoint
from .memory import LAUNCH_TIMEOUT, RunningLaunches

if TYPE_CHECKING:
    from .gpu import Gpu

_SIDE_OFFSET = round_up(DEV_QP.size, 64)
_DB_BYTES = 8


@dataclass(frozen=True)
class QpError:
    """Why a device wait returned EIO: the first error CQE of the queue, which is that of a send or of a receive."""

    index: int
    syndrome: int
    vendor_syndrome: int

    def __str__(self) -> str:
        name = Syndrome(self.syndrome).name if self.syndrome in list(Syndrome) else "unknown"
        return f"WQE {self.index} failed: {name} (syndrome {self.syndrome:#04x}, vendor {self.vendor_syndrome:#04x})"


def _be32(value: int) -> int:
    return int.from_bytes((value & 0xFFFF_FFFF).to_bytes(4, "big"), "little")


def _position(cq: CQ) -> int:
    """How many CQEs the NIC has written, modulo two laps: as much as ring and owner bits tell."""
    ring = np.ctypeslib.as_array((ctypes.c_uint8 * (cq.entries * CQE_SIZE)).from_address(cq.ring_address))
    owners = ring.view(CQE64.dtype)["op_own"] & OWNER_MASK
    behind = np.flatnonzero(owners != owners[0])  # slots of the lap before
    if len(behind):
        return int(owners[0]) * cq.entries + int(behind[0])
    return 0 if owners[0] else cq.entries


class ExportedQp:
    """A QP that kernels can use; pass it to a kernel as it is, or its `device_address`.

    The structure is in GPU memory, rings, records and the doorbell register are in memory that the NIC sees, which is
    registered with CUDA where it is not pinned already.
    """

    def __init__(self, gpu: Gpu, qp: QP, nic_handler: NicHandler, timeout: float):
        cq = qp.send_cq
        if cq is None or qp.sq_entries == 0:
            raise InvalidValueError(f"QP {qp.qpn:#x} has no send queue to export: create it with sq_wr and send_cq")
        if nic_handler not in (NicHandler.AUTO, NicHandler.GPU_SM_DB):
            raise NotSupportedError(f"NIC handler {nic_handler.name} is not supported yet: use AUTO or GPU_SM_DB")
        if timeout <= 0:
            raise InvalidValueError(f"timeout {timeout:g} s: a device wait needs a positive deadline")
        self.gpu, self.qp, self.cq = gpu, qp, cq
        self.owned: tuple[Any, ...] = ()
        self._launches, self._timeout = RunningLaunches(), timeout
        self._open = True
        self._mapped: list[tuple[int, int]] = []
        try:
            image = self._image(qp, cq, timeout)
            self._memory = gpu.alloc(len(image), MemType.GPU)
            self._memory.write(self._place(image))
        except BaseException:
            self._unmap()
            raise

    def _map(self, address: int, nbytes: int) -> int:
        device_address = self.gpu.backend.map(address, nbytes)
        self._mapped.append((address, nbytes))
        return device_address

    def _unmap(self) -> None:
        for address, nbytes in self._mapped:
            self.gpu.backend.unmap(address, nbytes)
        self._mapped.clear()

    def _image(self, qp: QP, cq: CQ, timeout: float) -> np.ndarray:
        image = np.zeros(_SIDE_OFFSET + DEV_SIDE.size, np.uint8)
        q, c, side = DEV_QP.at(image), DEV_CQ.at(image, DEV_QP.cq_sq), DEV_SIDE.at(image, _SIDE_OFFSET)
        q["sq_num"], q["sq_num_shift8"] = qp.qpn, qp.qpn << 8 & 0xFFFF_FFFF
        q["sq_num_shift8_be"] = _be32(qp.qpn << 8)
        for ds in range(1, 6):
            q[f"sq_num_shift8_be_{ds}ds"] = _be32(qp.qpn << 8 | ds)
        q["sq_wqe_num"], q["sq_wqe_mask"] = qp.sq_entries, qp.sq_entries - 1
        q["sq_wqe_daddr"] = self._map(qp.sq_address, qp.sq_entries * WQEBB)
        q["sq_dbrec"] = self._map(qp.dbr_address, QP_DBREC.size) + QP_DBREC.snd
        q["sq_db"] = self._map(qp.doorbell_register, _DB_BYTES)
        q["nic_handler"] = NicHandler.GPU_SM_DB
        side["timeout_ns"] = int(timeout * 1e9)
        self._fill_cq(c, cq)
        if qp.receive_cq and qp.rq_entries:
            side["rq_wqe_daddr"] = self._map(qp.rq_address, qp.rq_entries * qp.rq_stride)
            side["rq_dbrec"] = self._map(qp.dbr_address, QP_DBREC.size) + QP_DBREC.rcv
            side["rq_wqe_num"], side["rq_wqe_size"] = qp.rq_entries, qp.rq_stride
            self._fill_cq(DEV_CQ.at(image, _SIDE_OFFSET + DEV_SIDE.cq_rq), qp.receive_cq)
        return image

    def _fill_cq(self, c: np.ndarray, cq: CQ) -> None:
        c["cqe_daddr"] = self._map(cq.ring_address, cq.entries * CQE_SIZE)
        c["cq_num"], c["cqe_num"], c["cqe_mask"], c["cqe_size"] = cq.cqn, cq.entries, cq.entries - 1, CQE_SIZE
        c["dbrec"] = self._map(cq.dbr_address, CQ_DBREC.size)

    def _place(self, image: np.ndarray) -> np.ndarray:
        DEV_QP.at(image)["side"] = self._memory.device_address + _SIDE_OFFSET
        return image

    @property
    def device_address(self) -> int:
        """The `struct doca_gpu_dev_verbs_qp *` that kernels take."""
        self._check()
        return self._memory.device_address

    @property
    def qpn(self) -> int:
        """The QP's number."""
        return self.qp.qpn

    def connect(self, remote: ExportedQp | QP | QpEndpoint, **options: Any) -> None:
        """`QP.connect` of the QP behind it."""
        self.qp.connect(remote.qp if isinstance(remote, ExportedQp) else remote, **options)

    def indices(self) -> dict[str, int]:
        """The queue's indices as they are in GPU memory now: reserved, ready, submitted, completed."""
        self._check()
        image = self._memory.read()
        q, c = DEV_QP.at(image), DEV_CQ.at(image, DEV_QP.cq_sq)
        return {
            "reserved": int(q["sq_rsvd_index"]), "ready": int(q["sq_ready_index"]),
            "submitted": int(q["sq_wqe_pi"]), "completed": int(c["cqe_ci"]),
        }  # fmt: skip

    def restart(self) -> None:
        """With the QP in RST: indices count from 0 again, and completions from where their CQs are; errors go.

        Kernels must not use the queue meanwhile.
        """
        self._check()
        image = self._memory.read()
        q, side = DEV_QP.at(image), DEV_SIDE.at(image, _SIDE_OFFSET)
        for name in ("sq_rsvd_index", "sq_ready_index", "sq_wqe_pi", "sq_lock"):
            q[name] = 0
        for name in ("broken", "err_index", "err_syndrome", "err_vendor", "rq_wqe_pi"):
            side[name] = 0
        for cq, offset in ((self.cq, DEV_QP.cq_sq), (self.qp.receive_cq, _SIDE_OFFSET + DEV_SIDE.cq_rq)):
            if cq is not None:
                c = DEV_CQ.at(image, offset)
                c["cqe_ci"], c["cqe_rsvd"] = 0, _position(cq)
        self._memory.write(image)

    def last_error(self) -> QpError | None:
        """The first error completion that a kernel has seen (`doca_gpu_verbs_query_last_error`), or None."""
        self._check()
        side = DEV_SIDE.at(self._memory.read(), _SIDE_OFFSET)
        if side["err_syndrome"] == 0:
            return None
        return QpError(int(side["err_index"]), int(side["err_syndrome"]), int(side["err_vendor"]))

    def close(self) -> None:
        """`doca_gpu_verbs_unexport_qp`; closes QP and CQ if `Gpu.create_qp` made them. Idempotent.

        Waits for kernels that were given the queue, whose waits end by its timeout.
        """
        if not self._open or self.gpu._pid != os.getpid():
            return
        self._launches.wait(self._timeout + LAUNCH_TIMEOUT, f"QP {self.qpn:#x}")
        self._open = False
        self.gpu.forget_export(self)
        self._memory.close()
        self._unmap()
        for part in self.owned:
            part.close()

    def used_by(self, launch: Any) -> None:
        """Called when a kernel is launched with this queue as an argument."""
        self._launches.add(launch)

    def _check(self) -> None:
        if not self._open:
            raise BadStateError("this exported QP is closed")

    def __enter__(self) -> ExportedQp:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self):
        raise BadStateError("an exported QP cannot be pickled: export it in the other process")
