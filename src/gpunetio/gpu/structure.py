"""The QP structure that kernels have a pointer to, and the side structure: their places, and their initial contents."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..enums import CqOverrun, NicHandler
from ..formats.cqe import CQE_SIZE
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_RQ, DEV_SIDE, MEM_TYPE_GPU
from ..formats.doorbell import QP_DBREC
from ..memory import round_up
from ..verbs import QP, SRQ
from .backend import Backend
from .completions import Completions
from .memory import GpuMemory
from .spans import Sender, cq_record, cq_ring, qp_record, receive_record, receive_ring, send_ring

_ALIGNMENT = 64  # of the side structures


@dataclass(frozen=True)
class Place:
    """Where a queue's two structures lie, as byte offsets in GPU memory."""

    memory: GpuMemory
    qp: int
    side: int

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_dev_verbs_qp *`."""
        return self.memory.device_address + self.qp

    def read(self) -> np.ndarray:
        """Return a copy of the QP's structure."""
        return self.memory.read(self.qp, DEV_QP.size)

    def read_side(self) -> np.ndarray:
        """Return a copy of the side structure."""
        return self.memory.read(self.side, DEV_SIDE.size)

    def write(self, image: np.ndarray, side: np.ndarray) -> None:
        """Replace both structures."""
        at = self.memory.device_address + self.side
        DEV_QP.at(image)["side"] = at
        if DEV_RQ.at(side, DEV_SIDE.own_rq)["wqe_num"]:
            DEV_SIDE.at(side)["rq"] = at + DEV_SIDE.own_rq
        self.memory.write(side, self.side)
        self.memory.write(image, self.qp)


def places(count: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that `count` queues need, and the two offsets of each.

    Side structures follow the QP structures.
    """
    sides = round_up(count * DEV_QP.size, _ALIGNMENT)
    offsets = [(i * DEV_QP.size, sides + i * DEV_SIDE.size) for i in range(count)]
    return sides + count * DEV_SIDE.size, offsets


def images(
    backend: Backend, qp: QP, sends: Completions, receives: Completions | None, handler: NicHandler, doorbell: int,
    timeout: float, shared_rq: int, undo: ExitStack,
) -> tuple[np.ndarray, np.ndarray]:
    """Return both structures of a queue pair that is in RST or has not been used since.

    `doorbell` is the device address that kernels ring; `timeout` ends a device wait, in seconds; `shared_rq` is the
    structure of the shared receive queue, or 0. Rings and records stay mapped until `undo` is closed.
    """
    image, side_image = np.zeros(DEV_QP.size, np.uint8), np.zeros(DEV_SIDE.size, np.uint8)
    fill_sender(image, side_image, backend, qp, sends, handler, doorbell, timeout, undo)
    side = DEV_SIDE.at(side_image)
    if receives:
        fill_cq(DEV_CQ.at(side_image, DEV_SIDE.cq_rq), backend, receives, undo)
        side["tells_cq"] = receives.cq.overrun != CqOverrun.ENABLE
        side["rq"] = shared_rq
    if qp.rq_entries:
        fill_rq(DEV_RQ.at(side_image, DEV_SIDE.own_rq), backend, qp, qp.rq_entries, qp.rq_stride, undo)
    return image, side_image


def fill_sender(
    image: np.ndarray, side: np.ndarray, backend: Backend, queue: Sender, sends: Completions, handler: NicHandler,
    doorbell: int, timeout: float, undo: ExitStack,
) -> None:
    """Fill the fields of both structures that describe a queue's sends. Arguments are as in `images`."""
    q = DEV_QP.at(image)
    q["sq_num"], q["sq_num_shift8"] = queue.qpn, queue.qpn << 8 & 0xFFFF_FFFF
    q["sq_num_shift8_be"] = _be32(queue.qpn << 8)
    for ds in range(1, 6):
        q[f"sq_num_shift8_be_{ds}ds"] = _be32(queue.qpn << 8 | ds)
    q["sq_wqe_num"], q["sq_wqe_mask"] = queue.sq_entries, queue.sq_entries - 1
    q["sq_wqe_daddr"] = send_ring(backend, queue).map(undo)
    q["sq_dbrec"] = qp_record(backend, queue).map(undo) + QP_DBREC.snd
    q["sq_db"], q["nic_handler"], q["mem_type"] = doorbell, handler, MEM_TYPE_GPU
    fill_cq(DEV_CQ.at(image, DEV_QP.cq_sq), backend, sends, undo)
    DEV_SIDE.at(side)["timeout_ns"] = int(timeout * 1e9)


def receives(qp: QP) -> bool:
    """Return whether kernels can receive on the QP, from its own receive queue or a shared one."""
    return qp.receive_cq is not None and bool(qp.rq_entries or qp.init_attr.srq)


def fill_rq(rq: np.ndarray, backend: Backend, queue: QP | SRQ, entries: int, stride: int, undo: ExitStack) -> None:
    """Fill the structure of a receive queue that has nothing posted."""
    rq["wqe_daddr"] = receive_ring(backend, queue).map(undo)
    rq["dbrec"] = receive_record(backend, queue).map(undo)
    rq["wqe_num"], rq["wqe_size"] = entries, stride


def fill_cq(c: np.ndarray, backend: Backend, completions: Completions, undo: ExitStack) -> None:
    """Fill a CQ's structure.

    Kernels add `cqe_rsvd`, the number of CQEs already written, to a WQE's index to find its CQE.
    """
    cq = completions.cq
    c["cqe_daddr"] = cq_ring(backend, cq).map(undo)
    c["cq_num"], c["cqe_num"], c["cqe_size"] = cq.cqn, cq.entries, CQE_SIZE
    c["cqe_mask"] = 0 if cq.collapsed else cq.entries - 1  # the ring of a collapsed CQ is one slot
    c["dbrec"], c["mem_type"] = cq_record(backend, cq).map(undo), MEM_TYPE_GPU
    c["cqe_rsvd"] = cq.consumer_index + completions.produced(cq.consumer_index, 0)


def restart_sender(image: np.ndarray, side_image: np.ndarray, backend: Backend, queue: Sender) -> None:
    """Reset both structures, so that sends count from 0 and there is no error, and clear the ring and the record."""
    q, side = DEV_QP.at(image), DEV_SIDE.at(side_image)
    for name in ("sq_rsvd_index", "sq_ready_index", "sq_wqe_pi", "sq_lock"):
        q[name] = 0
    for name in ("broken", "err_index", "err_syndrome", "err_vendor", "submit", "arrivals", "counting"):
        side[name] = 0
    send_ring(backend, queue).clear()
    qp_record(backend, queue).clear()


def restart_cq(completions: Completions, c: np.ndarray, least: int) -> None:
    """Restart the count of completions where the NIC is now: `least` or more CQEs since the last restart."""
    c["cqe_rsvd"] += completions.produced(int(c["cqe_rsvd"]), least)
    c["cqe_ci"] = 0
    completions.forget()


def _be32(value: int) -> int:
    return int.from_bytes((value & 0xFFFF_FFFF).to_bytes(4, "big"), "little")
