"""A QP as kernels see it: the 296-byte structure in GPU memory, and what the host reads from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Unpack

from ..arguments import device_deadline, instance
from ..enums import NicHandler, QpState, RingMemory, SendDbrModeExt
from ..errors import BadStateError, InUseError, InvalidValueError, NotSupportedError
from ..formats.cqe import CQE_SIZE
from ..formats.device_structs import DEV_CQ, DEV_QP, DEV_RQ, DEV_SIDE
from ..formats.doorbell import PI_MASK
from ..jit.code import Launch
from ..verbs import CQ, QP, SRQ, Handle, QpEndpoint
from ..verbs.devx.ring import doorbells
from ..verbs.qp import ConnectOptions
from .completions import Completions, FailedWqe
from .device import GpuDevice
from .handlers import check, check_record, choose, mode_of, structure_kind
from .memory import LAUNCH_TIMEOUT, GpuMemory, RunningLaunches
from .proxy import Forwarding, ProxyService
from .qp_error import QpError
from .spans import cq_ring, qp_record
from .srq import ExportedSrq
from .structure import Place, images, places, receives, restart_cq, restart_sender

_UNCONNECTED = (QpState.RST, QpState.INIT, QpState.RTR)
MAX_SLOTS = 1 << 15  # the structure has 16 bits for the count


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export a queue pair (`Gpu.export_qp`). `why` is logged as the reason for a handler other than AUTO."""

    nic_handler: NicHandler
    send_dbr_mode: SendDbrModeExt | None
    cpu_gpu: bool
    proxy_service: bool
    timeout: float
    why: str = "as asked"


class Exporter(GpuDevice):
    """The part of a `Gpu` that its queues use."""

    @abstractmethod
    def export(self, qp: QP, options: ExportOptions, place: Place | None = None) -> ExportedQp:
        """Export a QP, with its structures at `place` or in memory of their own."""

    @abstractmethod
    def export_srq(self, srq: SRQ) -> ExportedSrq:
        """Export a contiguous SRQ, or count another user of its structure. `export_qp` does this for its queue."""

    @abstractmethod
    def forget_export(self, exported: ExportedQp) -> None:
        """Remove a closed export. The watchdog does not look at it after this returns."""

    @abstractmethod
    def own_service(self) -> ProxyService:
        """Return the service that this handle runs for its queues; start it if there is none."""


class ExportedQp(Handle):
    """A QP that kernels can use. Pass it to a kernel as an argument, or pass its `device_address`.

    The QP stays open until the export is closed. The structure is in GPU memory. Rings, records and the doorbell
    register are in memory that the NIC sees; it is registered with CUDA unless it is GPU memory or already pinned.

    `qp`, `cq`                 the queue pair and its send CQ
    `sends`, `receives`        completions of its sends, and of its receives if kernels can receive on it
    `nic_handler`              how its doorbells reach the NIC
    `send_dbr_mode`            which side keeps its doorbell record
    `timeout`                  seconds after which a device wait ends
    `may_lose_rings`           whether its doorbells can be lost, so that the watchdog rings again: its register is
                               memory and it has no record
    """

    _rank = -1
    gpu: Exporter
    qp: QP
    cq: CQ
    sends: Completions
    receives: Completions | None
    send_dbr_mode: SendDbrModeExt
    timeout: float
    nic_handler: NicHandler
    may_lose_rings: bool

    def __init__(self, gpu: Exporter, qp: QP, options: ExportOptions, place: Place | None = None):
        super().__init__(instance("qp", qp, QP).ctx)
        self._use(qp)
        cq = _check_queue(gpu, qp, options.timeout)
        self.gpu, self.qp, self.cq = gpu, qp, cq
        self.sends, self.receives = Completions(cq, cq_ring(gpu.backend, cq)), None
        if qp.receive_cq and receives(qp):
            self.receives = Completions(qp.receive_cq, cq_ring(gpu.backend, qp.receive_cq))
        self.send_dbr_mode = mode = mode_of(qp, options.send_dbr_mode)
        check(gpu, qp, options.nic_handler, mode, options.cpu_gpu)
        self._launches, self.timeout = RunningLaunches(), options.timeout
        self._forwarding: Forwarding | None = None
        self._memory: GpuMemory | None = None
        self._srq: ExportedSrq | None = None
        with ExitStack() as undo:
            self.nic_handler, register = choose(gpu, qp, options.nic_handler, mode, options.cpu_gpu, options.why)
            if register is not None:
                undo.callback(gpu.registers.unexport, register)
            check_record(qp, self.nic_handler, mode)
            if register is None:
                self._forwarding = Forwarding(gpu, qp, mode)
                undo.callback(self._forwarding.close)
                register = self._forwarding.device_address
            shared_rq = 0
            if qp.init_attr.srq:
                self._srq = gpu.export_srq(qp.init_attr.srq)
                undo.callback(self._srq.release)
                shared_rq = self._srq.device_address
            image, side = images(
                gpu.backend, qp, self.sends, self.receives, self.nic_handler, register, options.timeout, shared_rq, undo
            )
            DEV_SIDE.at(side)["near"] = gpu.registers.is_near(register)
            self.sends.forget()
            if place is None:
                nbytes, (offsets,) = places(1)
                self._memory = gpu.alloc(nbytes, structure_kind([mode], options.cpu_gpu))
                undo.callback(self._step(ExportedQp.free_own))
                place = Place(self._memory, *offsets)
            self._place = place
            place.write(image, side)
            if mode is SendDbrModeExt.NO_DBR_SW_EMULATED and self.nic_handler is NicHandler.GPU_SM_NO_DBR:
                self._forwarding = Forwarding(gpu, qp, mode, self._index_address())
                undo.callback(self._forwarding.close)
            if self._forwarding and options.proxy_service:
                gpu.own_service().add(self._forwarding)
            # A card consumes every store to its register. A software NIC's register is memory and holds only the last
            # store: a late store of one thread hides a newer one for good, unless a record holds the newer index.
            kernels_ring = self._forwarding is None and mode is SendDbrModeExt.NO_DBR_HW
            self.may_lose_rings = kernels_ring and qp.ctx.provider.software
            self._opened(f"the export of {qp} to GPU {gpu.name}", undo)

    def free_own(self) -> None:
        """Free the memory that this export allocated for its structures. They have moved, or are about to."""
        if self._memory:
            self._memory.close()
            self._memory = None

    def _index_address(self) -> int:
        """Return the CPU address of the index that kernels raise when they ring."""
        return int(self._place.memory.array.ctypes.data) + self._place.qp + DEV_QP.sq_wqe_pi

    # --- what kernels are given --------------------------------------------------------------------------------------

    @property
    def device_address(self) -> int:
        """Return the `struct doca_gpu_dev_verbs_qp *` that kernels take."""
        self.check_open()
        return self._place.device_address

    @property
    def qpn(self) -> int:
        """Return the QP's number."""
        return self.qp.qpn

    @property
    def ring_memory(self) -> RingMemory:
        """Return the kind of memory that holds the queue pair's rings, and how it was registered with the device."""
        return self.qp.ring.lies_in

    def connect(self, remote: ExportedQp | QP | QpEndpoint, **options: Unpack[ConnectOptions]) -> None:
        """Connect the exported QP (`QP.connect`)."""
        self.qp.connect(remote.qp if isinstance(remote, ExportedQp) else remote, **options)

    @property
    def place(self) -> Place:
        """Return where the structures lie."""
        return self._place

    def move(self, place: Place) -> None:
        """Move the structures. InUseError while a kernel that was given the queue runs."""
        self.check_open()
        if self._launches.running:
            raise InUseError(f"{self.qp} cannot move into an array: a kernel still uses it at its present address")
        place.write(self._place.read(), self._place.read_side())
        with self._out_of_service():
            self._place = place
            if self._forwarding and self.nic_handler is not NicHandler.CPU_PROXY:
                self._forwarding.watch(self._index_address())

    # --- the CPU proxy -----------------------------------------------------------------------------------------------

    @property
    def forwarding(self) -> Forwarding:
        """Return the CPU's part of this queue's doorbells. NotSupportedError when kernels ring them themselves."""
        self.check_open()
        if self._forwarding is None:
            raise NotSupportedError(
                f"{self.qp} has NIC handler {self.nic_handler.name}, which needs no CPU: export it with CPU_PROXY"
            )
        return self._forwarding

    @property
    def service(self) -> ProxyService | None:
        """Return the service that forwards this queue's doorbells, or None."""
        return self._forwarding.service if self._forwarding else None

    def progress(self) -> bool:
        """Forward what kernels have announced (`doca_gpu_verbs_cpu_proxy_progress`). Return whether anything was new.

        Only for a queue with `proxy_service=False`; one thread at a time may call this. BadStateError while a service
        forwards the queue.
        """
        forwarding = self.forwarding
        if forwarding.service:
            raise BadStateError(
                f"a service forwards the doorbells of {self.qp}: export it with proxy_service=False, or take it from "
                "the service by forget()"
            )
        return forwarding.progress()

    def _leave_service(self) -> ProxyService | None:
        """Take the queue out of its service and return the service. Nothing forwards the queue afterwards."""
        service = self.service
        if self._forwarding and service:
            service.drop(self._forwarding)
        return service

    @contextmanager
    def _out_of_service(self) -> Iterator[None]:
        """Stop forwarding inside the block. The queue's service resumes afterwards, even after an exception."""
        service = self._leave_service()
        try:
            yield
        finally:
            if self._forwarding and service:
                service.add(self._forwarding)

    # --- rings that the register has lost -----------------------------------------------------------------------------

    def ring_again(self, producer: int) -> None:
        """Ring the doorbell for `producer`, in place of the kernels that submitted up to there.

        Kernels raise the submitted index before they ring, and do not raise it for WQEs that they leave unannounced.
        """
        doorbells().ring_register(self.qp.doorbell_register, producer & PI_MASK, self.qpn)

    # --- what the host learns ----------------------------------------------------------------------------------------

    def indices(self) -> dict[str, int]:
        """Return the queue's present indices in GPU memory: reserved, ready, submitted, completed.

        With a CPU proxy, also `forwarded`. With receives, also `receives_posted` (by all users of a shared queue) and
        `receives_completed`.
        """
        self.check_open()
        image = self._place.read()
        q, c = DEV_QP.at(image), DEV_CQ.at(image, DEV_QP.cq_sq)
        found = {
            "reserved": int(q["sq_rsvd_index"]), "ready": int(q["sq_ready_index"]),
            "submitted": int(q["sq_wqe_pi"]), "completed": int(c["cqe_ci"]),
        }
        if self._forwarding:  # kernels may leave that index unchanged
            found["submitted"] = max(found["submitted"], self._forwarding.announced)
            found["forwarded"] = self._forwarding.forwarded
        if self.receives:
            side = self._place.read_side()
            rq = self._srq.read() if self._srq else DEV_RQ.at(side, DEV_SIDE.own_rq)
            found["receives_posted"] = int(rq["ready"])
            found["receives_completed"] = int(DEV_CQ.at(side, DEV_SIDE.cq_rq)["cqe_ci"])
        return found

    def cqe_offset(self, receives: bool = False) -> int:
        """Return how many CQEs the NIC had written when the count of WQEs was last 0: `cqe_rsvd` of the CQ's structure.

        The CQE of WQE i has the 64-bit number i + this offset. A WAIT request names that number.
        """
        self.check_open()
        if receives:
            return int(DEV_CQ.at(self._place.read_side(), DEV_SIDE.cq_rq)["cqe_rsvd"])
        return int(DEV_CQ.at(self._place.read(), DEV_QP.cq_sq)["cqe_rsvd"])

    @property
    def in_use(self) -> bool:
        """Return whether a kernel that was given the queue is running."""
        return self._launches.running

    def last_error(self) -> QpError | None:
        """Return why the queue pair has failed, or None (`doca_gpu_verbs_query_last_error`).

        The error is the first error completion that a kernel has seen. If there is none and the queue pair is in ERR,
        it is the first error completion in the ring. Requests that wait because the queue pair is not connected also
        count as an error, although connecting it may still help.
        """
        self.check_open()
        side = DEV_SIDE.at(self._place.read_side())
        state = self.qp.state
        if side["err_syndrome"]:
            failed = FailedWqe(int(side["err_index"]), int(side["err_syndrome"]), int(side["err_vendor"]))
            return QpError.of(self.qp, state, failed)
        indices = self.indices()
        if state in _UNCONNECTED and indices["submitted"] > indices["completed"]:
            return QpError.unconnected(self.qp, state, indices["completed"])
        if state is not QpState.ERR:
            return None
        failed = self.sends.first_error(self.cqe_offset(), indices["completed"])
        if failed is None and self.receives:
            failed = self.receives.first_error(
                self.cqe_offset(receives=True), indices["receives_completed"], not self._srq
            )
        return QpError.of(self.qp, state, failed)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Restart the queue of a QP in RST: count WQEs from 0, forget errors, and clear the ring and the record.

        `doca_gpu_verbs_reset_tracking_and_memory`. The NIC's count of CQEs continues; `cqe_offset()` returns the
        difference. No kernel may use the queue meanwhile. Connect it again afterwards. BadStateError unless the QP is
        in RST.
        """
        self.check_open()
        if (state := self.qp.state) is not QpState.RST:
            raise BadStateError(f"{self.qp} is in {state.name}: move it to RST first, with QP.reset()")
        with self._out_of_service():
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Set the counts of kernels and of the CPU proxy to 0."""
        indices = self.indices()
        image, side_image = self._place.read(), self._place.read_side()
        sent = max(indices["completed"], indices["submitted"] - self.qp.sq_entries)
        restart_cq(self.sends, DEV_CQ.at(image, DEV_QP.cq_sq), sent)
        if self.receives:
            self._give_up_messages()
            received = DEV_CQ.at(side_image, DEV_SIDE.cq_rq)
            restart_cq(self.receives, received, indices["receives_completed"])
        restart_sender(image, side_image, self.gpu.backend, self.qp)
        own_rq = DEV_RQ.at(side_image, DEV_SIDE.own_rq)
        own_rq["rsvd"] = own_rq["ready"] = 0
        self._place.write(image, side_image)
        if self._forwarding:
            self._forwarding.reset()

    def _give_up_messages(self) -> None:
        """Free the shared receives of messages that no kernel has taken."""
        if self._srq and self.receives:
            before, first = self.cqe_offset(receives=True), self.indices()["receives_completed"]
            self._srq.give_up(self.receives, before, first, self.receives.produced(before, first))

    def own(self, parts: ExitStack) -> None:
        """Close `parts`, which were made for this export, when the export has closed."""
        assert self._undo is not None
        parts.push(self._undo)
        self._undo = parts

    def close(self) -> None:
        """Close the export (`doca_gpu_verbs_unexport_qp`). Idempotent.

        If `Gpu.create_qp` made the QP, its CQs and their memory, close these as well. Wait for kernels that were given
        the queue; their waits on the queue end after its timeout. TimedOutError if a kernel does not end.
        """
        super().close()

    def wait_idle(self) -> None:
        self._launches.wait(self.timeout + LAUNCH_TIMEOUT, str(self.qp))

    def close_with_owner(self) -> None:
        if self.closed:
            return
        with ExitStack() as steps:  # in reverse order; every step runs, even if others raise
            steps.callback(super().close_with_owner)
            steps.callback(self.gpu.forget_export, self)
            steps.callback(self._give_up_messages)
            steps.callback(self._leave_service)

    def when_dropped(self) -> None:
        super().when_dropped()
        self.gpu.dropped.note(self)  # the first of its owners to close dropped objects closes it

    def check_launch(self) -> None:
        """Raise BadStateError if the queue is not connected. Called before a launch with the queue as an argument.

        The device is queried only if this process has not moved the queue pair out of RST.
        """
        self.check_open()
        if self.qp.asked_state is QpState.RST and self.qp.state is QpState.RST:
            raise BadStateError(f"{self.qp} is in RST, where nothing can be posted: connect() it before the launch")

    def used_by(self, launch: Launch) -> None:
        """Keep the queue open while `launch`, which has it as an argument, runs."""
        self._launches.add(launch)

    def __repr__(self) -> str:
        return f"<{self}{', closed' if self.closed else ''}, its rings in {self.ring_memory.text}>"


def _check_queue(gpu: Exporter, qp: QP, timeout: float) -> CQ:
    """Return the send CQ, or raise the error that says why kernels cannot use this queue pair in its present state."""
    if qp.type.datagrams:
        raise NotSupportedError(f"{qp} is {qp.type.name}: kernels send over RC and UC; post datagrams on the CPU")
    if qp.send_cq is None or qp.sq_entries == 0:
        raise InvalidValueError(f"QP {qp.qpn:#x} has no send queue to export: create it with sq_wr and send_cq")
    if qp.sq_entries > MAX_SLOTS:
        raise InvalidValueError(f"the send queue of {qp} has {qp.sq_entries} slots: kernels take at most {MAX_SLOTS}")
    if receives(qp) and qp.receive_cq and qp.receive_cq.collapsed:
        raise NotSupportedError(f"{qp} has a collapsed receive CQ, which keeps the last message only: give it a ring")
    device_deadline(timeout)
    _check_cqs(qp, qp.send_cq)
    _check_memory(gpu, qp)
    for user in qp.users:
        raise InUseError(f"{qp} is exported already: use {user}, or close that first")
    if qp.state is not QpState.RST and (qp.used or qp_record(gpu.backend, qp).read().any()):
        raise BadStateError(f"{qp} has been used, but kernels count requests from 0: reset() and connect() it first")
    return qp.send_cq


def _check_cqs(qp: QP, send_cq: CQ) -> None:
    """Check that no other queue uses the same CQs: kernels find a CQE by the index of its request."""
    cqs = [send_cq]
    if receives(qp) and qp.receive_cq:
        if qp.receive_cq is send_cq:
            raise InvalidValueError(f"{qp} uses {send_cq} for both sends and receives: create it with a CQ for each")
        cqs.append(qp.receive_cq)
    for cq in cqs:
        if cq.cqe_size != CQE_SIZE:
            raise NotSupportedError(f"{cq} has entries of {cq.cqe_size} bytes: kernels read those of {CQE_SIZE}")
        for other in cq.users:
            if isinstance(other, QP) and other is not qp and other.users:
                raise InvalidValueError(f"{cq} of {qp} is also used by {other}, which is exported: give each its own")


def _check_memory(gpu: Exporter, qp: QP) -> None:
    """Check that kernels of this GPU reach all rings and records."""
    for queue in (qp, qp.send_cq, qp.receive_cq, qp.init_attr.srq):
        for lies_in in (queue.ring.lies_in, queue.ring.dbr_lies_in) if queue else ():
            if lies_in is RingMemory.DMABUF:
                raise InvalidValueError(
                    f"{queue} lies in a dmabuf whose address is not known here: give memory= to register_dmabuf_umem()"
                )
            if lies_in.in_gpu and not gpu.backend.has_memory:
                raise InvalidValueError(f"{queue} lies in GPU memory, which host threads do not reach")
