"""Queue pairs: CREATE_QP, QUERY_QP, DESTROY_QP. For their state transitions, see qp_transitions.py."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ....formats import commands as cmd
from ....formats.commands import (
    AtomicOperation, CapClass, Opcode, QpState, ResponsesToCqe, RqType, ScatterToCqe, ServiceType, Status,
)
from ....formats.cqe import WIDE_CQE_SIZE
from ....formats.doorbell import QP_DBREC, REGISTER_BYTES
from ....formats.layout import Fields
from ....formats.packet import GSI_QPN, PSN_MASK
from ....formats.wqe import MAX_MMO_SHIFT, MAX_TRANSFER_SHIFT, WQEBB
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.qp import FLIGHT, MAX_RD_ATOMIC, QP_ROW, RESOURCE
from ...state.work_queue import QueueKind
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command
from ..components import Components
from ..objects import ChosenEvents, MailboxObjects, QueueObjects, Uses, log_of
from ..regions.pd import ProtectionDomains
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome
from ..uar import UarPages
from .cq import CompletionQueues
from .qp_extension import mmo_of
from .rmp import ReceivePools

MAX_QP = 16384
MAX_LOG_QUEUE = 15
_MAX_RQ_STRIDE_LOG = 5  # 512 bytes, in units of 16
_ATOMIC_BYTES = 8
_ATOMIC_SIZES = 4 | 8  # each bit stands for words of that many bytes
SERVICES = {  # by qpc.st: the service, and the type of the send queue
    ServiceType.RC:  (ServiceType.RC, QueueKind.CONNECTED_SEND),
    ServiceType.UC:  (ServiceType.UC, QueueKind.CONNECTED_SEND),
    ServiceType.UD:  (ServiceType.UD, QueueKind.DATAGRAM_SEND),
    ServiceType.QP1: (ServiceType.UD, QueueKind.DATAGRAM_SEND),  # IBTA 3.9.4
}


@dataclass
class QueuePair:
    """The control path's record of a queue pair.

    `created` is the qpc of CREATE_QP, and `mmo` a field of its extension; QP_2RST restores both. `context` is the qpc
    as QUERY_QP returns it. `uses` are the objects that the QP uses. `udp_sport` is the UDP source port that was set for
    the QP, or 0.
    """

    created: bytes
    mmo: int
    context: bytearray
    uses: Uses
    udp_sport: int = 0


class QueuePairs(ChosenEvents, QueueObjects):
    """The queue pairs of a NIC. `known` contains the control path's records by QPN."""

    known: dict[int, QueuePair]

    def __init__(
        self, hardware: Hardware, components: Components, pds: ProtectionDomains, umems: Umems, uars: UarPages,
        cqs: CompletionQueues, pools: ReceivePools,
    ):
        super().__init__("QP", QP_ROW, MAX_QP, CommandSyndrome.NO_SUCH_QP)
        self._engine, self._components = hardware.engine, components
        self._pds, self._umems, self._uars, self._cqs, self._pools = pds, umems, uars, cqs, pools
        self._lines = HostMemory(MAX_QP * REGISTER_BYTES)
        self._near_lines = self._engine.doorbell_lines(self._lines)
        hardware.record["lines_away"] = self._near_lines - self._lines.address
        self._memory: dict[int, HostMemory] = {}  # QPN → its flights, then its READ and atomic resources
        self.known = {}
        hardware.record["qps"], hardware.record["qp_mask"] = self.table.address, self.table.mask

    def close(self) -> None:
        for memory in self._memory.values():
            memory.close()
        self._lines.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_QP,  cmd.CREATE_QP_IN,  self._create),
            Command(Call.QUERY,   Opcode.QUERY_QP,   cmd.QUERY_QP_IN,   self._query, cmd.QUERY_QP_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_QP, cmd.DESTROY_QP_IN, self._destroy),
        )

    def capabilities(self) -> Capabilities:
        # Results of atomics are in host byte order. There are no DC QPs, but NVSHMEM reads their atomic capabilities.
        return {
            CapClass.GENERAL: {
                "rc": 1, "uc": 1, "ud": 1, "log_max_qp": self.log_max, "log_max_qp_sz": MAX_LOG_QUEUE,
                "max_wqe_sz_sq": 1024, "max_wqe_sz_rq": 512, "log_max_msg": MAX_TRANSFER_SHIFT, "cd": 1,
                "sctr_data_cqe": 1, "atomic": 1, "log_max_atomic_size_qp": log_of(_ATOMIC_BYTES),
                "log_max_ra_req_qp": log_of(MAX_RD_ATOMIC), "log_max_ra_res_qp": log_of(MAX_RD_ATOMIC),
                "qpc_extension": 1, "dma_mmo_qp": 1, "log_dma_mmo_max_size": MAX_MMO_SHIFT,
            },
            CapClass.ATOMIC: {
                "atomic_operations": sum(AtomicOperation), "atomic_size_qp": _ATOMIC_SIZES,
                "atomic_size_dc": _ATOMIC_SIZES, "atomic_req_8B_endianness_mode": 1,
                "supported_atomic_req_8B_endianness_mode_1": 1,
            },
            CapClass.GENERAL_2: {"send_dbr_mode_no_dbr_ext": 1},
        }

    def free_number(self) -> int:
        """Return a free QPN. Its upper bits are random, so that a stale QPN does not name a new QP."""
        rows = self.table.mask + 1
        slot = super().free_number()
        if slot == GSI_QPN:  # QP 1 needs this row, so use it only if no other row is free
            slot = super().free_number()
        return slot + rows * (1 + secrets.randbelow((1 << 24) // rows - 2))  # never QP 0, 1 or 0xffffff

    def doorbell_line(self, qpn: int) -> int:
        """Return the address of the QP's own doorbell register, which has a cache line to itself."""
        return self._lines.address + (qpn & self.table.mask) * REGISTER_BYTES

    def near_register(self, register: int) -> int | None:
        """Return the GPU address at which the engine polls a QP's doorbell register. None if it polls `register`."""
        away = self._near_lines - self._lines.address
        of_qp = self._lines.address <= register < self._lines.address + self._lines.nbytes
        return register + away if away and of_qp else None

    # --- commands --------------------------------------------------------------------------------------------------

    def _create(self, mailbox: bytes) -> bytes:
        get = cmd.CREATE_QP_IN.get
        context = get(mailbox, "qpc")
        _check_context(context)
        mmo = mmo_of(mailbox)
        self._pds.need(context["pd"])
        self._uars.need(context["uar_page"])
        sq_bytes, rq_bytes = _queue_sizes(context)
        shared = context["rq_type"] == RqType.SRQ_RMP
        queues: list[tuple[MailboxObjects, int]] = []
        if sq_bytes:
            queues.append((self._cqs, context["cqn_snd"]))
        if rq_bytes or shared:
            queues.append((self._cqs, context["cqn_rcv"]))
        if shared:
            queues.append((self._pools, context["srqn_rmpn_xrqn"]))
        for objects, number in queues:
            objects.need(number)
        if sq_bytes and context["cs_req"] == ResponsesToCqe.DATA_64:
            self._need_wide_cqe("cs_req 0x22", context["cqn_snd"])
        if (rq_bytes or shared) and context["cs_res"] == ScatterToCqe.DATA_64:
            self._need_wide_cqe("cs_res 0x2", context["cqn_rcv"])
        self._umems.need_valid(get(mailbox, "wq_umem_valid") and context["dbr_umem_valid"], "wq_umem_valid")
        ring_umem, record_umem = get(mailbox, "wq_umem_id"), context["dbr_umem_id"]
        ring = self._umems.ring(ring_umem, get(mailbox, "wq_umem_offset"), sq_bytes + rq_bytes, "the work queues")
        record = self._umems.record(record_umem, context["dbr_addr"], "the QP doorbell record")

        qpn = self._gsi_number() if context["st"] == ServiceType.QP1 else self.free_number()
        row = self.new_row()
        row["qpn"], row["state"], row["pdn"], row["user_index"] = qpn, QpState.RST, context["pd"], context["user_index"]
        row["service"], row["kind"] = SERVICES[context["st"]]
        row["core_direct"], row["mmo"] = _may_wait(context), mmo
        row["cs_res"], row["cs_req"] = context["cs_res"], context["cs_req"]
        flights = sq_bytes // WQEBB * FLIGHT.size
        memory = self._memory[qpn] = HostMemory(flights + MAX_RD_ATOMIC * RESOURCE.size)
        row["flights"], row["resources"] = memory.address, memory.address + flights
        line = self.doorbell_line(qpn)
        row["dbrec"], row["no_dbr"] = record, context["send_dbr_mode"]
        row["doorbell"] = self.near_register(line) or line
        if rq_bytes:
            row["rq_addr"], row["rq_log"] = ring, context["log_rq_size"]
            row["rq_stride"] = 16 << context["log_rq_stride"]
        if rq_bytes or shared:
            row["recv_cq"] = self._cqs.table.row_address(context["cqn_rcv"])
        if shared:
            row["srq"] = self._pools.table.row_address(context["srqn_rmpn_xrqn"])
        if sq_bytes:
            row["sq_addr"], row["sq_log"] = ring + rq_bytes, context["log_sq_size"]
            row["send_cq"] = self._cqs.table.row_address(context["cqn_snd"])
        self._serve(qpn, row)

        start = cmd.CREATE_QP_IN.offset("qpc")
        created = bytes(mailbox[start : start + cmd.QPC.size])
        uses = Uses([
            (self._umems, ring_umem), (self._umems, record_umem), (self._pds, context["pd"]),
            (self._uars, context["uar_page"]),
        ], queues)
        uses.hold(self.name_of(qpn))
        self.known[qpn] = QueuePair(created, mmo, bytearray(created), uses)
        return bytes(cmd.CREATE_QP_OUT.pack(qpn=qpn))

    def _serve(self, qpn: int, row: np.ndarray) -> None:
        """Assign a new QP to a worker, and start to serve it."""
        address, queues = self.table.row_address(qpn), (row["send_cq"], row["recv_cq"], row["srq"])
        if row["core_direct"]:
            self._components.gather()  # the QP may wait for any CQ, so one worker must serve all
        worker = self._components.add_qp(address, [int(queue) for queue in queues if queue])
        try:
            self._engine.post(EngineCommand.ADD_QP, address, row, worker=worker)
        except BaseException:
            self._components.remove(address)
            raise

    def _need_wide_cqe(self, setting: str, cqn: int) -> None:
        """Refuse a setting that puts 64 bytes of payload before a 64-byte CQE, unless the CQ has 128-byte entries."""
        size = 1 << int(self._cqs.table[cqn]["shift"])
        if size != WIDE_CQE_SIZE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.SCATTER_TO_CQE,
                f"{setting} puts 64 bytes of payload before a CQE: CQ {cqn:#x} has entries of {size} bytes, and needs "
                f"those of {WIDE_CQE_SIZE}",
            )

    def _gsi_number(self) -> int:
        """Return the QPN of the general services interface, QP 1. CommandError if QP 1 exists or its row is in use."""
        if GSI_QPN in self.table:
            raise CommandError(
                Status.RESOURCE_BUSY, CommandSyndrome.IN_USE, "the port has QP 1 already: each port has only one"
            )
        if self.table.rows[GSI_QPN]["qpn"]:
            raise CommandError(
                Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL,
                f"QP {int(self.table.rows[GSI_QPN]['qpn']):#x} has the row of QP 1, because all others were in use",
            )
        return GSI_QPN

    def _query(self, mailbox: bytes) -> bytes:
        qpn = cmd.QUERY_QP_IN.get(mailbox, "qpn")
        self.need(qpn)
        row = self.table.copy(qpn)
        context = bytearray(self.known[qpn].context)
        cmd.QPC.update(
            context, state=int(state_of(row)),
            # Before INIT2RTR, report a valid MTU: DOCA queries a QP that it has just created, and refuses other codes.
            mtu=cmd.QPC.get(context, "mtu") or cmd.PrmMtu.MTU_256,
            hw_sq_wqebb_counter=int(row["sq_ci"]) & 0xFFFF, sw_sq_wqebb_counter=int(row["sq_pi"]) & 0xFFFF,
            hw_rq_counter=int(row["rq_ci"]) & 0xFFFF_FFFF, sw_rq_counter=self._receive_doorbell(row),
            **_sequence_numbers(row),
        )
        out = cmd.QUERY_QP_OUT.pack()
        start = cmd.QUERY_QP_OUT.offset("qpc")
        out[start : start + cmd.QPC.size] = context
        return bytes(out)

    def _receive_doorbell(self, row: np.void) -> int:
        """Return the receive word of a QP's doorbell record; 0 if the QP has no receive ring."""
        if not row["rq_stride"]:
            return 0
        return int.from_bytes(self._engine.read(int(row["dbrec"]) + QP_DBREC.rcv, 4), "big")

    def _destroy(self, mailbox: bytes) -> bytes:
        qpn = cmd.DESTROY_QP_IN.get(mailbox, "qpn")
        address = self.need(qpn)
        self._engine.post(EngineCommand.REMOVE_QP, address, worker=self._components.worker_of(address))
        self._components.remove(address)
        self._memory.pop(qpn).close()
        self.known.pop(qpn).uses.release(self.name_of(qpn))
        return DONE


def state_of(row: np.void) -> QpState:
    """Return a QP's state. In the engine's row, SQD is RTS with `drain` set."""
    if row["state"] == QpState.RTS and row["drain"]:
        return QpState.SQDRAINED if row["sq_drained"] else QpState.SQ_DRAINING
    return QpState(int(row["state"]))


def _check_context(context: Fields) -> None:
    """Refuse unsupported types of QPs, and invalid settings for data in CQEs."""
    if context["st"] not in SERVICES:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.SERVICE_TYPE,
            f"service type {context['st']} is not supported: only RC (0), UC (1), UD (2) and QP1 (8)",
        )
    for field, kind in (("cs_req", ResponsesToCqe), ("cs_res", ScatterToCqe)):
        values = list(map(int, kind))
        if context[field] not in values:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.SCATTER_TO_CQE,
                f"{field} {context[field]:#x} is not supported: only {', '.join(map(hex, values))}",
            )


def _may_wait(context: Fields) -> int:
    """Return whether WAIT WQEs may be posted to a QP.

    DOCA's open library, which NCCL and NVSHMEM also use, sets cd_master with its macro for 64-bit words. The 1 thus
    ends up at the end of the word, in next_rcv_psn, which CREATE_QP does not use. Cards seem to accept WAITs anyway.
    """
    return int(bool(context["cd_master"] or context["next_rcv_psn"] & 1))


def _queue_sizes(context: Fields) -> tuple[int, int]:
    """Return the sizes of the send ring and of the receive ring in bytes."""
    sq_bytes = 0 if context["no_sq"] else WQEBB << context["log_sq_size"]
    match context["rq_type"]:
        case RqType.REGULAR:
            if context["log_rq_stride"] > _MAX_RQ_STRIDE_LOG:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                    f"log_rq_stride {context['log_rq_stride']} is above {_MAX_RQ_STRIDE_LOG} (512 bytes)",
                )
            return sq_bytes, 16 << context["log_rq_stride"] << context["log_rq_size"]
        case RqType.ZERO_SIZE | RqType.SRQ_RMP:
            return sq_bytes, 0
    raise CommandError(
        Status.BAD_PARAM, CommandSyndrome.RQ_TYPE, f"rq_type {context['rq_type']} is not supported: only 0, 1 and 3"
    )


def _sequence_numbers(row: np.void) -> dict[str, int]:
    """Return the PSNs that QUERY_QP reports.

    Receive PSNs are valid once the QP has been in RTR, send PSNs once it has been in RTS. Between QPs of the same NIC,
    everything sent is already acknowledged.
    """
    numbers = {}
    if row["mtu"]:
        numbers |= {"next_rcv_psn": row["expect_psn"], "rmsn": row["msn"]}
    if row["life"]:
        unacknowledged = row["una_psn"] if row["wire"] else row["tx_psn"]
        numbers |= {"next_send_psn": row["tx_psn"], "last_acked_psn": unacknowledged - 1, "ssn": row["ssn"]}
    return {name: int(value) & PSN_MASK for name, value in numbers.items()}
