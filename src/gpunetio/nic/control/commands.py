"""The command interpreter: it answers mailboxes as the firmware of a ConnectX does.

A handler checks everything before it changes anything. It prepares a table row aside, and the engine puts the row in
place.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...enums import Access, PortState, QpAtomicType
from ...errors import BadStateError, FullError, InUseError, InvalidValueError, TimedOutError
from ...formats import commands as cmd
from ...formats.commands import (
    Opcode, OptParam, OptParam32, PhysicalState, PrmMtu, QpState, RmpState, RqType, ScatterToCqe,
    ServiceType, Status, WqType,
)  # fmt: skip
from ...formats.contexts import CMD_HCA_CAP, ROCE_ADDR_LAYOUT, RMPC
from ...formats.cqe import CQE_SIZE, CQE_SIZES
from ...formats.doorbell import QP_DBREC
from ...formats.layout import BitStruct
from ...formats.packet import PSN_MASK
from ...formats.wqe import MAX_TRANSFER_SHIFT, WQEBB
from .. import step
from ..transport.rnr import rnr_delay_ns
from .syndromes import CommandError, CommandSyndrome
from ..state.tables import EXTENDED_ATOMICS, SRQ_ROW, Table

if TYPE_CHECKING:
    from ..nic import SoftNic

OUT_BYTES: int = cmd.OUT.size
ACK_TIMEOUT_UNIT_NS = 4096  # IBTA 9.7.6.1.3: 4.096 µs · 2^code; code 0 never times out
_MAX_CQ_LOG = 22
_MAX_RQ_STRIDE_LOG = 5  # 512 bytes, in units of 16
_MAX_SRQ_LOG, _MIN_SRQ_STRIDE_LOG, _MAX_SRQ_STRIDE_LOG = 15, 4, 9  # strides of 16 to 512 bytes
_RING_ALIGNMENT, _RECORD_ALIGNMENT = 64, 8

_MODIFY = {
    Opcode.RST2INIT_QP:  (cmd.RST2INIT_QP_IN,  QpState.RST,  QpState.INIT),
    Opcode.INIT2INIT_QP: (cmd.INIT2INIT_QP_IN, QpState.INIT, QpState.INIT),
    Opcode.INIT2RTR_QP:  (cmd.INIT2RTR_QP_IN,  QpState.INIT, QpState.RTR),
    Opcode.RTR2RTS_QP:   (cmd.RTR2RTS_QP_IN,   QpState.RTR,  QpState.RTS),
    Opcode.RTS2RTS_QP:   (cmd.RTS2RTS_QP_IN,   QpState.RTS,  QpState.RTS),
    Opcode.RTS2SQD_QP:   (cmd.RTS2SQD_QP_IN,   QpState.RTS,  QpState.SQDRAINED),
    Opcode.SQD2RTS_QP:   (cmd.SQD2RTS_QP_IN,   QpState.SQDRAINED, QpState.RTS),
}  # fmt: skip

_DESTROYING = (Opcode.DESTROY_QP, Opcode.DESTROY_CQ, Opcode.DESTROY_RMP)

# Fields of the context that a transition always sets, and those that it sets when opt_param_mask names them.
_PATH = "primary_address_path"
_REQUIRED: dict[Opcode, tuple[str, ...]] = {
    Opcode.RST2INIT_QP: (
        "pm_state", "rwe", "rre", "rae", "atomic_mode", f"{_PATH}.vhca_port_num", f"{_PATH}.pkey_index"),
    Opcode.INIT2INIT_QP: (),
    Opcode.INIT2RTR_QP: (
        "next_rcv_psn", "remote_qpn", "log_msg_max", "mtu", "min_rnr_nak", "log_rra_max",
        *(f"{_PATH}.{f}" for f in (
            "tclass", "rlid", "sl", "stat_rate", "rgid_rip", "hop_limit", "src_addr_index", "rmac_47_32", "rmac_31_0",
            "grh", "udp_sport", "dscp")),
    ),
    Opcode.RTR2RTS_QP: (
        "next_send_psn", "retry_count", "rnr_retry", "log_sra_max", "log_ack_req_freq", f"{_PATH}.ack_timeout"),
    Opcode.RTS2RTS_QP: (),
    Opcode.RTS2SQD_QP: (),
    Opcode.SQD2RTS_QP: (),
}  # fmt: skip
_OPTIONAL: dict[OptParam, tuple[str, ...]] = {
    OptParam.RRE: ("rre",),
    OptParam.RWE: ("rwe",),
    OptParam.RAE: ("rae", "atomic_mode"),
    OptParam.PKEY_INDEX: (f"{_PATH}.pkey_index",),
    OptParam.PORT_NUM: (f"{_PATH}.vhca_port_num",),
    OptParam.MIN_RNR_NAK: ("min_rnr_nak",),
    OptParam.SGID_INDEX: (f"{_PATH}.src_addr_index",),
    OptParam.DSCP: (f"{_PATH}.dscp",),
}  # fmt: skip
_ALLOWED: dict[Opcode, OptParam] = {
    Opcode.RST2INIT_QP: OptParam(0),
    Opcode.INIT2INIT_QP: OptParam.RRE | OptParam.RWE | OptParam.RAE | OptParam.PKEY_INDEX | OptParam.PORT_NUM,
    Opcode.INIT2RTR_QP: OptParam.RRE | OptParam.RWE | OptParam.RAE | OptParam.PKEY_INDEX,
    Opcode.RTR2RTS_QP: OptParam.RWE | OptParam.RRE | OptParam.RAE | OptParam.MIN_RNR_NAK,
    Opcode.RTS2RTS_QP: OptParam.RRE | OptParam.RWE | OptParam.RAE | OptParam.MIN_RNR_NAK | OptParam.SGID_INDEX
    | OptParam.DSCP,
    Opcode.RTS2SQD_QP: OptParam(0),
    Opcode.SQD2RTS_QP: OptParam.RRE | OptParam.RWE | OptParam.RAE | OptParam.MIN_RNR_NAK,
}  # fmt: skip

# Fields of a QP's row that are set when it is connected, and cleared by 2RST.
_CONNECTION = (
    "rights", "remote_qpn", "remote_row", "wire", "peer_high", "peer_low", "source", "dlid", "sl", "grh", "rnr_retry",
    "retry_cnt", "timeout_ns", "min_rnr", "min_rnr_code", "mtu", "msg_max", "max_rd", "max_dest_rd", "sq_psn", "rq_psn",
    "drain", "egress",
)  # fmt: skip


def _get(context: bytes | bytearray, path: str) -> Any:
    return cmd.QPC.get(context, path)


def _set(context: bytearray, path: str, value: Any) -> None:
    outer, _, inner = path.partition(".")
    cmd.QPC.update(context, **{outer: {inner: value} if inner else value})


def _receives_announced(row: np.void) -> int:
    """Return the receive word of a QP's doorbell record; 0 if the QP has no receive ring."""
    if not row["rq_stride"]:
        return 0
    return int.from_bytes(ctypes.string_at(int(row["dbrec"]) + QP_DBREC.rcv, 4), "big")


def _sequence_numbers(row: np.void) -> dict[str, int]:
    """Return the sequence numbers that QUERY_QP reports.

    Those of received packets exist once the QP has been in RTR, those of sent packets once it has been in RTS. Between
    QPs of one NIC, everything that was sent is already acknowledged.
    """
    numbers = {}
    if row["mtu"]:
        numbers |= {"next_rcv_psn": row["expect_psn"], "rmsn": row["msn"]}
    if row["life"]:
        unacknowledged = row["una_psn"] if row["wire"] else row["tx_psn"]
        numbers |= {"next_send_psn": row["tx_psn"], "last_acked_psn": unacknowledged - 1, "ssn": row["ssn"]}
    return {name: int(value) & PSN_MASK for name, value in numbers.items()}


class CommandInterpreter:
    """Executes mailboxes on a NIC."""

    def __init__(self, nic: SoftNic):
        self._nic = nic
        self.failed = False  # the device has failed: only commands that destroy are executed
        self.contexts: dict[int, bytearray] = {}  # QPN → its qpc, as QUERY_QP returns it
        self._created: dict[int, bytes] = {}  # QPN → the qpc of CREATE_QP, to which 2RST returns
        self._sports: dict[int, int] = {}  # QPN → the UDP source port set for it
        self._cq_umems: dict[int, list[int]] = {}
        self._qp_uses: dict[int, dict[str, list[int]]] = {}
        self._pools: dict[int, bytearray] = {}  # SRQ number → its rmpc
        self._handlers: dict[Opcode, tuple[BitStruct, int, Callable[[bytes], bytes]]] = {
            Opcode.QUERY_HCA_CAP:      (cmd.QUERY_HCA_CAP_IN,      OUT_BYTES + CMD_HCA_CAP.size, self._query_hca_cap),
            Opcode.QUERY_ROCE_ADDRESS: (cmd.QUERY_ROCE_ADDRESS_IN, OUT_BYTES + ROCE_ADDR_LAYOUT.size, self._query_roce),
            Opcode.QUERY_HCA_VPORT_CONTEXT: (
                cmd.QUERY_HCA_VPORT_CONTEXT_IN, cmd.QUERY_HCA_VPORT_CONTEXT_OUT.size, self._query_vport),
            Opcode.CREATE_CQ:          (cmd.CREATE_CQ_IN,          OUT_BYTES, self._create_cq),
            Opcode.MODIFY_CQ:          (cmd.MODIFY_CQ_IN,          OUT_BYTES, self._modify_cq),
            Opcode.DESTROY_CQ:         (cmd.DESTROY_CQ_IN,         OUT_BYTES, self._destroy_cq),
            Opcode.CREATE_QP:          (cmd.CREATE_QP_IN,          OUT_BYTES, self._create_qp),
            Opcode.DESTROY_QP:         (cmd.DESTROY_QP_IN,         OUT_BYTES, self._destroy_qp),
            Opcode.QUERY_QP:           (cmd.QUERY_QP_IN,           cmd.QUERY_QP_OUT.size, self._query_qp),
            Opcode.CREATE_RMP:         (cmd.CREATE_RMP_IN,         OUT_BYTES, self._create_rmp),
            Opcode.MODIFY_RMP:         (cmd.MODIFY_RMP_IN,         OUT_BYTES, self._modify_rmp),
            Opcode.DESTROY_RMP:        (cmd.DESTROY_RMP_IN,        OUT_BYTES, self._destroy_rmp),
            Opcode.QUERY_RMP:          (cmd.QUERY_RMP_IN,          cmd.QUERY_RMP_OUT.size, self._query_rmp),
            Opcode.QP_2ERR:            (cmd.QP_2ERR_IN,            OUT_BYTES, self._to_error),
            Opcode.QP_2RST:            (cmd.QP_2RST_IN,            OUT_BYTES, self._to_reset),
            **{
                opcode: (mailbox, OUT_BYTES, self._modify_qp)
                for opcode, (mailbox, _, _) in _MODIFY.items()
            },
        }  # fmt: skip

    def execute(self, mailbox: bytes, out_size: int) -> tuple[bytes, str]:
        """Execute a command. Return the output mailbox, and in words why the command was refused ("" if it was not).

        A refusal has 16 bytes, whatever `out_size` is. Any other answer is cut or padded to `out_size`.
        """
        try:
            return self._dispatch(mailbox, out_size).ljust(out_size, b"\0")[:out_size], ""
        except CommandError as error:
            return bytes(cmd.OUT.pack(status=error.status, syndrome=error.syndrome)), error.detail
        except TimedOutError as error:
            out = cmd.OUT.pack(status=Status.INTERNAL_ERR, syndrome=CommandSyndrome.ENGINE_TIMEOUT)
            return bytes(out), str(error)

    def _dispatch(self, mailbox: bytes, out_size: int) -> bytes:
        number = int.from_bytes(mailbox[:2], "big")
        if number not in self._handlers:
            raise CommandError(
                Status.BAD_OP, CommandSyndrome.UNKNOWN_OPCODE,
                f"opcode {number:#05x} is not supported by the software NIC",
            )  # fmt: skip
        if self.failed and Opcode(number) not in _DESTROYING:
            raise CommandError(Status.INTERNAL_ERR, CommandSyndrome.DEVICE_FAILED, "the device has failed: close it")
        struct, needed, handler = self._handlers[Opcode(number)]
        if len(mailbox) < struct.size:
            raise CommandError(
                Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
                f"{Opcode(number).name} takes {struct.size} bytes, the input has {len(mailbox)}",
            )  # fmt: skip
        if out_size < needed:
            raise CommandError(
                Status.BAD_OUTPUT_LEN, CommandSyndrome.SHORT_OUTPUT,
                f"{Opcode(number).name} answers {needed} bytes, the output has room for {out_size}",
            )  # fmt: skip
        return handler(mailbox)

    # --- capabilities ----------------------------------------------------------------------------------------------

    def _query_hca_cap(self, mailbox: bytes) -> bytes:
        op_mod = cmd.QUERY_HCA_CAP_IN.get(mailbox, "op_mod")
        capability = self._nic.capabilities.get(op_mod >> 1)
        if capability is None:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD, f"capability class {op_mod >> 1:#x} does not exist"
            )
        return bytes(cmd.QUERY_HCA_CAP_OUT.pack()[:OUT_BYTES]) + capability

    def _query_vport(self, mailbox: bytes) -> bytes:
        nic, get = self._nic, cmd.QUERY_HCA_VPORT_CONTEXT_IN.get
        other, port = get(mailbox, "other_vport"), get(mailbox, "port_num")
        if other or port > 1:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER,
                f"other_vport {other}, port {port}: there is one port, 1, and no other vport",
            )  # fmt: skip
        state = PortState.ACTIVE if nic.link_up else PortState.DOWN
        return bytes(cmd.QUERY_HCA_VPORT_CONTEXT_OUT.pack(hca_vport_context={
            "port_physical_state": PhysicalState.LINK_UP if nic.link_up else PhysicalState.POLLING,
            "port_state": state, "vport_state": state, "lid": nic.port.lid,
            "system_image_guid": nic.guid, "port_guid": nic.guid, "node_guid": nic.guid,
        }))  # fmt: skip

    def _query_roce(self, mailbox: bytes) -> bytes:
        index = cmd.QUERY_ROCE_ADDRESS_IN.get(mailbox, "roce_address_index")
        if index >= len(self._nic.gids.rows):
            raise CommandError(Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID, f"the GID table has no entry {index}")
        row = self._nic.gids.rows[index]
        mac = int.from_bytes(bytes(row["mac"])[:6], "big")
        layout = ROCE_ADDR_LAYOUT.pack(
            source_l3_address=bytes(row["gid"]), source_mac_47_32=mac >> 32, source_mac_31_0=mac & 0xFFFF_FFFF,
            roce_version=int(row["version"]),
            roce_l3_type=int(not bytes(row["gid"]).startswith(bytes(10) + b"\xff\xff")),
        )  # fmt: skip
        return bytes(OUT_BYTES) + bytes(layout)

    # --- completion queues -----------------------------------------------------------------------------------------

    def _create_cq(self, mailbox: bytes) -> bytes:
        nic = self._nic
        get = cmd.CREATE_CQ_IN.get
        context = get(mailbox, "cq_context")
        self._cq_size(context)
        if context["c_eqn"] not in nic.eqs:
            raise CommandError(Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_EQ, f"there is no EQ {context['c_eqn']}")
        self._uar(context["uar_page"])
        self._need_umems(get(mailbox, "cq_umem_valid") and context["dbr_umem_valid"], "cq_umem_valid")
        record_umem = context["dbr_umem_id"]
        row = np.zeros((), nic.cqs.entry.dtype)
        ring_umem = self._place_cq(cmd.CREATE_CQ_IN, mailbox, row)
        record = self._umem(record_umem, context["dbr_addr"], 8, "the CQ doorbell record", _RECORD_ALIGNMENT)
        cqn = self._free(nic.cqs, "CQ")
        row["cqn"], row["dbrec"] = cqn, record
        row["overrun"], row["collapsed"], row["arm_seen"] = context["oi"], context["cc"], -1
        row["eqn"], row["uar_page"] = context["c_eqn"], context["uar_page"]
        nic.engine.post(step.WRITE_ROW, nic.cqs.row_address(cqn), row)
        self._cq_umems[cqn] = [ring_umem, record_umem]
        self._hold(nic.umems, self._cq_umems[cqn], +1)
        self._hold(nic.uar_pages, [context["uar_page"]], +1)
        return bytes(cmd.CREATE_CQ_OUT.pack(cqn=cqn))

    @staticmethod
    def _cq_size(context: dict[str, Any]) -> None:
        """Refuse a CQ size or a CQE size that is not supported."""
        if (log := context["log_cq_size"]) > _MAX_CQ_LOG:
            raise CommandError(Status.BAD_PARAM, CommandSyndrome.CQ_SIZE, f"log_cq_size {log} is above {_MAX_CQ_LOG}")
        if context["cqe_sz"] >= len(CQE_SIZES):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.CQ_SIZE,
                f"cqe_sz {context['cqe_sz']} is not supported: only CQEs of 64 bytes (0) and of 128 bytes (1)",
            )  # fmt: skip

    def _place_cq(self, struct: BitStruct, mailbox: bytes, row: np.ndarray) -> int:
        """Enter the ring that a mailbox names into a row. Return the ring's UMEM."""
        umem, context = struct.get(mailbox, "cq_umem_id"), struct.get(mailbox, "cq_context")
        size, log = CQE_SIZES[context["cqe_sz"]], context["log_cq_size"]
        ring = self._umem(umem, struct.get(mailbox, "cq_umem_offset"), size << log, "the CQE ring", _RING_ALIGNMENT)
        if not int(self._nic.umems[umem]["access"]) & Access.LOCAL_WRITE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_RIGHTS,
                f"UMEM {umem:#x} was registered without LOCAL_WRITE: the NIC cannot write CQEs there",
            )  # fmt: skip
        row["addr"], row["log"], row["shift"] = ring + size - CQE_SIZE, log, size.bit_length() - 1
        return umem

    def _modify_cq(self, mailbox: bytes) -> bytes:
        """Move a CQ to another ring, the only modification that is supported."""
        nic, get = self._nic, cmd.MODIFY_CQ_IN.get
        cqn, op_mod, context = get(mailbox, "cqn"), get(mailbox, "op_mod"), get(mailbox, "cq_context")
        row_address = self._row(nic.cqs, cqn, CommandSyndrome.NO_SUCH_CQ, "CQ")
        if op_mod != cmd.CQ_RESIZE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD,
                f"op_mod {op_mod} is not supported: the software NIC only resizes CQs (1)",
            )  # fmt: skip
        self._cq_size(context)
        row = nic.cqs[cqn].copy()
        if row["collapsed"] or CQE_SIZES[context["cqe_sz"]] != 1 << int(row["shift"]):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.CQ_SIZE,
                f"CQ {cqn:#x}, collapsed {row['collapsed']}, CQEs of {1 << int(row['shift'])} bytes: a collapsed CQ "
                "cannot be resized, and the size of CQEs cannot change",
            )  # fmt: skip
        self._need_umems(get(mailbox, "cq_umem_valid"), "cq_umem_valid")
        umem = self._place_cq(cmd.MODIFY_CQ_IN, mailbox, row)
        try:
            nic.engine.post(step.RESIZE_CQ, row_address, row)
        except FullError as error:
            raise CommandError(
                Status.BAD_OUTS_CQES, CommandSyndrome.CQ_SIZE,
                f"CQ {cqn:#x} cannot be resized to {1 << int(row['log'])} entries: {error}",
            ) from None
        before, self._cq_umems[cqn][0] = self._cq_umems[cqn][0], umem
        self._hold(nic.umems, [umem], +1)
        self._hold(nic.umems, [before], -1)
        return bytes(OUT_BYTES)

    def _destroy_cq(self, mailbox: bytes) -> bytes:
        nic = self._nic
        cqn = cmd.DESTROY_CQ_IN.get(mailbox, "cqn")
        row_address = self._row(nic.cqs, cqn, CommandSyndrome.NO_SUCH_CQ, "CQ")
        self._need_unused("cqs", cqn, "CQ")
        uar_page = int(nic.cqs[cqn]["uar_page"])
        nic.forget_armable(row_address)
        nic.engine.post(step.WRITE_ROW, row_address, np.zeros((), nic.cqs.entry.dtype))
        self._hold(nic.umems, self._cq_umems.pop(cqn), -1)
        self._hold(nic.uar_pages, [uar_page], -1)
        return bytes(OUT_BYTES)

    # --- queue pairs -----------------------------------------------------------------------------------------------

    def _create_qp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        context = cmd.CREATE_QP_IN.get(mailbox, "qpc")
        if context["st"] not in (ServiceType.RC, ServiceType.UC):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.SERVICE_TYPE,
                f"service type {context['st']} is not supported: only RC (0) and UC (1)",
            )  # fmt: skip
        if context["cs_req"] != ScatterToCqe.NONE or context["cs_res"] not in (ScatterToCqe.NONE, ScatterToCqe.DATA_32):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.SCATTER_TO_CQE,
                f"cs_req {context['cs_req']:#x}, cs_res {context['cs_res']:#x}: CQEs carry up to 32 bytes of received "
                "SENDs (cs_res 1), and no data of READs and atomics",
            )  # fmt: skip
        if context["pd"] not in nic.pds:
            raise CommandError(Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_PD, f"there is no PD {context['pd']:#x}")
        self._uar(context["uar_page"])
        sq_bytes, rq_bytes = self._queue_sizes(context)
        shared = context["rq_type"] == RqType.SRQ_RMP
        cqs = [context["cqn_snd"]] * (sq_bytes > 0) + [context["cqn_rcv"]] * (rq_bytes > 0 or shared)
        for cqn in cqs:
            self._row(nic.cqs, cqn, CommandSyndrome.NO_SUCH_CQ, "CQ")
        srqn = context["srqn_rmpn_xrqn"]
        if shared:
            self._row(nic.srqs, srqn, CommandSyndrome.NO_SUCH_SRQ, "SRQ")
        self._need_umems(cmd.CREATE_QP_IN.get(mailbox, "wq_umem_valid") and context["dbr_umem_valid"], "wq_umem_valid")
        ring_umem, record_umem = cmd.CREATE_QP_IN.get(mailbox, "wq_umem_id"), context["dbr_umem_id"]
        offset = cmd.CREATE_QP_IN.get(mailbox, "wq_umem_offset")
        ring = self._umem(ring_umem, offset, sq_bytes + rq_bytes, "the work queues", _RING_ALIGNMENT)
        record = self._umem(record_umem, context["dbr_addr"], 8, "the QP doorbell record", _RECORD_ALIGNMENT)

        qpn = self._free(nic.qps, "QP", spread=True)
        row = np.zeros((), nic.qps.entry.dtype)
        row["qpn"], row["state"], row["pdn"], row["user_index"] = qpn, QpState.RST, context["pd"], context["user_index"]
        row["service"], row["core_direct"] = context["st"], context["cd_master"]
        row["cs_res"] = context["cs_res"]
        row["flights"], row["resources"] = nic.queue_memory(qpn, sq_bytes // WQEBB)
        row["dbrec"], row["doorbell"], row["no_dbr"] = record, nic.doorbell_line(qpn), context["send_dbr_mode"]
        if rq_bytes:
            row["rq_addr"], row["rq_log"] = ring, context["log_rq_size"]
            row["rq_stride"] = 16 << context["log_rq_stride"]
        if rq_bytes or shared:
            row["recv_cq"] = nic.cqs.row_address(context["cqn_rcv"])
        if shared:
            row["srq"] = nic.srqs.row_address(srqn)
        if sq_bytes:
            row["sq_addr"], row["sq_log"] = ring + rq_bytes, context["log_sq_size"]
            row["send_cq"] = nic.cqs.row_address(context["cqn_snd"])
        nic.engine.post(step.ADD_QP, nic.qps.row_address(qpn), row)

        start = cmd.CREATE_QP_IN.offset("qpc")
        self._created[qpn] = bytes(mailbox[start : start + cmd.QPC.size])
        self.contexts[qpn] = bytearray(self._created[qpn])
        uses = {"cqs": cqs, "umems": [ring_umem, record_umem], "pds": [context["pd"]], "uars": [context["uar_page"]],
                "srqs": [srqn] if shared else []}  # fmt: skip
        self._qp_uses[qpn] = uses
        self._hold_all(uses, +1)
        return bytes(cmd.CREATE_QP_OUT.pack(qpn=qpn))

    def _queue_sizes(self, context: dict[str, Any]) -> tuple[int, int]:
        """Return the sizes of the send ring and of the receive ring in bytes."""
        sq_bytes = 0 if context["no_sq"] else WQEBB << context["log_sq_size"]
        match context["rq_type"]:
            case RqType.REGULAR:
                if context["log_rq_stride"] > _MAX_RQ_STRIDE_LOG:
                    raise CommandError(
                        Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                        f"log_rq_stride {context['log_rq_stride']} is above {_MAX_RQ_STRIDE_LOG} (512 bytes)",
                    )  # fmt: skip
                return sq_bytes, 16 << context["log_rq_stride"] << context["log_rq_size"]
            case RqType.ZERO_SIZE | RqType.SRQ_RMP:
                return sq_bytes, 0
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.RQ_TYPE, f"rq_type {context['rq_type']} is not supported: only 0, 1 and 3"
        )

    def _destroy_qp(self, mailbox: bytes) -> bytes:
        qpn = cmd.DESTROY_QP_IN.get(mailbox, "qpn")
        row_address = self._row(self._nic.qps, qpn, CommandSyndrome.NO_SUCH_QP, "QP")
        self._nic.engine.post(step.REMOVE_QP, row_address)
        self._nic.free_queue_memory(qpn)
        del self.contexts[qpn], self._created[qpn]
        self._sports.pop(qpn, None)
        self._hold_all(self._qp_uses.pop(qpn), -1)
        return bytes(OUT_BYTES)

    # --- shared receive queues -------------------------------------------------------------------------------------

    def _create_rmp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        context = cmd.CREATE_RMP_IN.get(mailbox, "ctx")
        wq = context["wq"]
        if context["state"] != RmpState.RDY:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RMP_STATE, f"state {context['state']}: a pool is created in RDY (1)"
            )
        if wq["wq_type"] not in list(WqType) or context["basic_cyclic_rcv_wqe"] != (wq["wq_type"] == WqType.CYCLIC):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RQ_TYPE,
                f"wq_type {wq['wq_type']} with basic_cyclic_rcv_wqe {context['basic_cyclic_rcv_wqe']}: only a linked "
                "list (0, 0) and a cyclic queue (1, 1) are supported",
            )  # fmt: skip
        log, stride_log = wq["log_wq_sz"], wq["log_wq_stride"]
        least = _MIN_SRQ_STRIDE_LOG + (wq["wq_type"] == WqType.LINKED_LIST)
        if log > _MAX_SRQ_LOG or not least <= stride_log <= _MAX_SRQ_STRIDE_LOG:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                f"log_wq_sz {log}, log_wq_stride {stride_log}: log_wq_sz can be up to {_MAX_SRQ_LOG}, log_wq_stride "
                f"from {least} to {_MAX_SRQ_STRIDE_LOG}",
            )  # fmt: skip
        if wq["pd"] not in nic.pds:
            raise CommandError(Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_PD, f"there is no PD {wq['pd']:#x}")
        self._need_umems(wq["wq_umem_valid"] and wq["dbr_umem_valid"], "wq_umem_valid")
        ring_umem, record_umem = wq["wq_umem_id"], wq["dbr_umem_id"]
        nbytes = 1 << log + stride_log
        ring = self._umem(ring_umem, wq["wq_umem_offset"], nbytes, "the receive pool", _RING_ALIGNMENT)
        record = self._umem(record_umem, wq["dbr_addr"], 8, "its doorbell record", _RECORD_ALIGNMENT)
        srqn = self._free(nic.srqs, "SRQ")
        row = np.zeros((), nic.srqs.entry.dtype)
        row["srqn"], row["pdn"], row["addr"], row["dbrec"] = srqn, wq["pd"], ring, record
        row["log"], row["stride"], row["linked"] = log, 1 << stride_log, wq["wq_type"] == WqType.LINKED_LIST
        row["returned"], row["limit"] = nic.shared_queue_memory(srqn, 1 << log), wq["lwm"]
        nic.engine.post(step.WRITE_ROW, nic.srqs.row_address(srqn), row)
        start = cmd.CREATE_RMP_IN.offset("ctx")
        self._pools[srqn] = bytearray(mailbox[start : start + RMPC.size])
        self._hold(nic.umems, [ring_umem, record_umem], +1)
        self._hold(nic.pds, [wq["pd"]], +1)
        return bytes(cmd.CREATE_RMP_OUT.pack(rmpn=srqn))

    def _modify_rmp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        srqn = cmd.MODIFY_RMP_IN.get(mailbox, "rmpn")
        row_address = self._row(nic.srqs, srqn, CommandSyndrome.NO_SUCH_SRQ, "SRQ")
        now, wanted = (cmd.MODIFY_RMP_IN.get(mailbox, field) for field in ("rmp_state", "ctx.state"))
        if (now, wanted) != (RmpState.RDY, RmpState.RDY):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RMP_STATE, f"from state {now} to {wanted}: a pool stays in RDY (1)"
            )
        if cmd.MODIFY_RMP_IN.get(mailbox, "modify_size"):
            self._resize_rmp(srqn, cmd.MODIFY_RMP_IN.get(mailbox, "ctx"))
        if cmd.MODIFY_RMP_IN.get(mailbox, "modify_lwm"):
            limit = cmd.MODIFY_RMP_IN.get(mailbox, "ctx")["wq"]["lwm"]
            if limit > 1 << int(nic.srqs[srqn]["log"]):
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                    f"lwm {limit} is above the {1 << int(nic.srqs[srqn]['log'])} WQEs of SRQ {srqn:#x}",
                )  # fmt: skip
            nic.engine.post(step.WRITE_ROW, row_address + SRQ_ROW.limit, np.array([limit], np.int64))
        return bytes(OUT_BYTES)

    def _resize_rmp(self, srqn: int, context: dict[str, Any]) -> None:
        """Move a pool to a larger ring, which begins with the WQEs of the old ring."""
        nic, wq = self._nic, context["wq"]
        row, log = nic.srqs[srqn].copy(), wq["log_wq_sz"]
        if not row["log"] < log <= _MAX_SRQ_LOG:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                f"log_wq_sz {log}: SRQ {srqn:#x} has {row['log']} and can only grow, to {_MAX_SRQ_LOG} at most",
            )  # fmt: skip
        self._need_umems(wq["wq_umem_valid"], "wq_umem_valid")
        umem, nbytes = wq["wq_umem_id"], int(row["stride"]) << log
        row["addr"] = self._umem(umem, wq["wq_umem_offset"], nbytes, "the receive pool", _RING_ALIGNMENT)
        with nic.larger_shared_queue_memory(srqn, 1 << log) as returned:
            row["log"], row["returned"] = log, returned
            nic.engine.post(step.RESIZE_SRQ, nic.srqs.row_address(srqn), row)
        pool = self._pools[srqn]
        before = RMPC.get(pool, "wq.wq_umem_id")
        RMPC.update(pool, wq={"log_wq_sz": log, "wq_umem_id": umem, "wq_umem_offset": wq["wq_umem_offset"]})
        self._hold(nic.umems, [umem], +1)
        self._hold(nic.umems, [before], -1)

    def _destroy_rmp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        srqn = cmd.DESTROY_RMP_IN.get(mailbox, "rmpn")
        row_address = self._row(nic.srqs, srqn, CommandSyndrome.NO_SUCH_SRQ, "SRQ")
        self._need_unused("srqs", srqn, "SRQ")
        wq = RMPC.get(self._pools.pop(srqn), "wq")
        nic.engine.post(step.WRITE_ROW, row_address, np.zeros((), nic.srqs.entry.dtype))
        nic.free_shared_queue_memory(srqn)
        self._hold(nic.umems, [wq["wq_umem_id"], wq["dbr_umem_id"]], -1)
        self._hold(nic.pds, [wq["pd"]], -1)
        return bytes(OUT_BYTES)

    def _query_rmp(self, mailbox: bytes) -> bytes:
        srqn = cmd.QUERY_RMP_IN.get(mailbox, "rmpn")
        self._row(self._nic.srqs, srqn, CommandSyndrome.NO_SUCH_SRQ, "SRQ")
        context = bytearray(self._pools[srqn])
        RMPC.update(context, wq={"lwm": int(self._nic.srqs[srqn]["limit"])})
        out = cmd.QUERY_RMP_OUT.pack()
        start = cmd.QUERY_RMP_OUT.offset("ctx")
        out[start : start + RMPC.size] = context
        return bytes(out)

    # --- queue pairs: states ---------------------------------------------------------------------------------------

    def _modify_qp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        opcode = Opcode(int.from_bytes(mailbox[:2], "big"))
        struct, before, after = _MODIFY[opcode]
        qpn = struct.get(mailbox, "qpn")
        self._row(nic.qps, qpn, CommandSyndrome.NO_SUCH_QP, "QP")
        state = self._state(qpn)
        if state != before:
            raise self._bad_state(opcode, qpn, state, before)
        wanted = mailbox[struct.offset("qpc") : struct.offset("qpc") + cmd.QPC.size]
        optional: int = struct.get(mailbox, "opt_param_mask")
        refused = optional & ~int(_ALLOWED[opcode])  # plain ints: ~ of a flag loses unknown bits
        further: int = struct.get(mailbox, "opt_param_mask_95_32") if "opt_param_mask_95_32" in struct.fields else 0
        sport = None
        if opcode is Opcode.RTS2RTS_QP and further & OptParam32.UDP_SPORT:  # with qpc_ext or, as libmlx5 does, without
            sport = self._check_sport(_get(wanted, f"{_PATH}.udp_sport"))
            further &= ~int(OptParam32.UDP_SPORT)
        if further and struct.get(mailbox, "qpc_ext"):
            refused |= further << 32
        if refused:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.OPT_PARAM,
                f"{opcode.name} cannot carry optional parameters {refused:#x} ({OptParam(refused & 0xFFFF_FFFF)!r})",
            )  # fmt: skip
        context = bytearray(self.contexts[qpn])
        fields = _REQUIRED[opcode] + tuple(f for bit, names in _OPTIONAL.items() if bit & optional for f in names)
        for path in fields:
            _set(context, path, _get(wanted, path))
        if sport is not None:
            _set(context, f"{_PATH}.udp_sport", sport)
        self._check_context(opcode, context)
        cmd.QPC.update(context, state=int(after))
        row = self._prepare(qpn, context, after, self._sports.get(qpn, 0) if sport is None else sport)
        try:
            # For the engine, SQD is RTS in which no WQE begins.
            expected = QpState.RTS if before is QpState.SQDRAINED else before
            nic.engine.post(step.MODIFY_QP, nic.qps.row_address(qpn), row, state=int(expected))
        except BadStateError:
            raise self._bad_state(opcode, qpn, int(nic.qps[qpn]["state"]), before) from None
        self.contexts[qpn] = context
        if sport is not None:
            self._sports[qpn] = sport
        if after is QpState.RTR:
            nic.links.drain(int(row["wire"]))
        return bytes(OUT_BYTES)

    def _state(self, qpn: int) -> QpState:
        """Return a QP's state. The engine's row has RTS and `drain` in place of SQD."""
        row = self._nic.qps[qpn]
        if row["state"] == QpState.RTS and row["drain"]:
            return QpState.SQDRAINED if row["sq_drained"] else QpState.SQ_DRAINING
        return QpState(int(row["state"]))

    def _check_sport(self, port: int) -> int:
        least, most = self._nic.udp_sports
        if self._nic.port.infiniband or not least <= port <= most:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UDP_SPORT,
                f"udp_sport {port}: an Ethernet port accepts {least} to {most}, an InfiniBand port accepts none",
            )  # fmt: skip
        return port

    @staticmethod
    def _bad_state(opcode: Opcode, qpn: int, state: int, before: QpState) -> CommandError:
        return CommandError(
            Status.BAD_QP_STATE, CommandSyndrome.QP_STATE,
            f"{opcode.name}: QP {qpn:#x} is in {QpState(state).name}, not in {before.name}",
        )  # fmt: skip

    def _check_context(self, opcode: Opcode, context: bytearray) -> None:
        port, pkey = _get(context, f"{_PATH}.vhca_port_num"), _get(context, f"{_PATH}.pkey_index")
        if port != 1:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.PORT_NUMBER, f"port {port} does not exist: only port 1"
            )
        if pkey != 0:
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.PKEY_INDEX, f"pkey_index {pkey} is outside the table of 1"
            )
        if opcode is Opcode.INIT2RTR_QP:
            mtu = _get(context, "mtu")
            if not PrmMtu.MTU_256 <= mtu <= PrmMtu.MTU_4K:
                raise CommandError(Status.BAD_PARAM, CommandSyndrome.MTU, f"MTU code {mtu} is not 1 (256) to 5 (4096)")
            if (log := _get(context, "log_msg_max")) > MAX_TRANSFER_SHIFT:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.MSG_MAX,
                    f"log_msg_max {log} is above {MAX_TRANSFER_SHIFT} (1 GiB)",
                )  # fmt: skip
        if opcode in (Opcode.INIT2RTR_QP, Opcode.RTS2RTS_QP):
            index, gids = _get(context, f"{_PATH}.src_addr_index"), self._nic.gids.rows
            if index >= len(gids) or not any(bytes(gids[index]["gid"])):
                raise CommandError(
                    Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID,
                    f"src_addr_index {index}: the GID table has no such entry",
                )  # fmt: skip

    def _prepare(self, qpn: int, context: bytearray, state: QpState, sport: int) -> np.ndarray:
        """Return the QP's row for a context and a state. `sport` is the UDP source port set for the QP, or 0."""
        row = self._nic.qps[qpn].copy()
        row["drain"] = state is QpState.SQDRAINED
        if state is QpState.SQDRAINED:
            return row
        row["state"] = state
        atomics = _get(context, "atomic_mode") if _get(context, "rae") else QpAtomicType.NONE
        row["rights"] = (
            Access.REMOTE_WRITE * _get(context, "rwe")
            | Access.REMOTE_READ * _get(context, "rre")
            | Access.REMOTE_ATOMIC * (atomics != QpAtomicType.NONE)
            | EXTENDED_ATOMICS * (atomics == QpAtomicType.UP_TO_8BYTES)
        )
        row["min_rnr_code"] = _get(context, "min_rnr_nak")
        row["min_rnr"] = rnr_delay_ns.py_func(int(row["min_rnr_code"]))
        if state in (QpState.RTR, QpState.RTS):
            row["remote_qpn"], row["rq_psn"] = _get(context, "remote_qpn"), _get(context, "next_rcv_psn")
            row["mtu"], row["msg_max"] = 128 << _get(context, "mtu"), 1 << _get(context, "log_msg_max")
            gid, lid = _get(context, f"{_PATH}.rgid_rip"), _get(context, f"{_PATH}.rlid")
            row["remote_row"], row["wire"], gid, row["source"] = self._nic.route(
                gid, lid, _get(context, f"{_PATH}.src_addr_index"), int(row["remote_qpn"])
            )
            row["peer_high"], row["peer_low"] = np.frombuffer(gid, np.int64)
            row["egress"] = self._egress(qpn, int(row["wire"]), int(row["source"]), sport)
            row["dlid"], row["sl"], row["grh"] = lid, _get(context, f"{_PATH}.sl"), _get(context, f"{_PATH}.grh")
            row["max_dest_rd"] = 1 << _get(context, "log_rra_max")
        if state is QpState.RTS:
            code = _get(context, f"{_PATH}.ack_timeout")
            row["timeout_ns"] = ACK_TIMEOUT_UNIT_NS << code if code else 0
            row["retry_cnt"], row["rnr_retry"] = _get(context, "retry_count"), _get(context, "rnr_retry")
            row["sq_psn"] = _get(context, "next_send_psn")
            row["max_rd"] = 1 << _get(context, "log_sra_max")
        return row

    def _egress(self, qpn: int, wire: int, source: int, port: int) -> int:
        """Return the egress of a QP's packets (`Links.egress`)."""
        qps = self._nic.qps.given
        try:
            return self._nic.links.egress(wire, source, port, set(qps["egress"][qps["qpn"] != qpn].tolist()))
        except (InUseError, InvalidValueError) as error:
            raise CommandError(Status.RESOURCE_BUSY, CommandSyndrome.UDP_SPORT, str(error)) from None

    def _to_error(self, mailbox: bytes) -> bytes:
        nic = self._nic
        qpn = cmd.QP_2ERR_IN.get(mailbox, "qpn")
        row_address = self._row(nic.qps, qpn, CommandSyndrome.NO_SUCH_QP, "QP")
        state = int(nic.qps[qpn]["state"])
        if state == QpState.ERR:
            return bytes(OUT_BYTES)
        row = nic.qps[qpn].copy()
        row["state"] = QpState.ERR
        nic.engine.post(step.MODIFY_QP, row_address, row, state=state)
        return bytes(OUT_BYTES)

    def _to_reset(self, mailbox: bytes) -> bytes:
        nic = self._nic
        qpn = cmd.QP_2RST_IN.get(mailbox, "qpn")
        row_address = self._row(nic.qps, qpn, CommandSyndrome.NO_SUCH_QP, "QP")
        row = nic.qps[qpn].copy()
        for field in _CONNECTION:
            row[field] = 0
        row["state"] = QpState.RST
        nic.engine.post(step.RESET_QP, row_address, row)
        self._sports.pop(qpn, None)
        self.contexts[qpn] = bytearray(self._created[qpn])
        return bytes(OUT_BYTES)

    def _query_qp(self, mailbox: bytes) -> bytes:
        nic = self._nic
        qpn = cmd.QUERY_QP_IN.get(mailbox, "qpn")
        self._row(nic.qps, qpn, CommandSyndrome.NO_SUCH_QP, "QP")
        row = nic.qps[qpn].copy()
        context = bytearray(self.contexts[qpn])
        cmd.QPC.update(
            context, state=int(self._state(qpn)),
            hw_sq_wqebb_counter=int(row["sq_ci"]) & 0xFFFF, sw_sq_wqebb_counter=int(row["sq_pi"]) & 0xFFFF,
            hw_rq_counter=int(row["rq_ci"]) & 0xFFFF_FFFF, sw_rq_counter=_receives_announced(row),
            **_sequence_numbers(row),
        )  # fmt: skip
        out = cmd.QUERY_QP_OUT.pack()
        start = cmd.QUERY_QP_OUT.offset("qpc")
        out[start : start + cmd.QPC.size] = context
        return bytes(out)

    # --- what a command refers to ----------------------------------------------------------------------------------

    @staticmethod
    def _row(table: Table, number: int, syndrome: CommandSyndrome, what: str) -> int:
        if number not in table:
            raise CommandError(Status.BAD_RESOURCE, syndrome, f"there is no {what} {number:#x}")
        return table.row_address(number)

    def _need_unused(self, kind: str, number: int, what: str) -> None:
        users = [qpn for qpn, uses in self._qp_uses.items() if number in uses[kind]]
        if users:
            raise CommandError(
                Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
                f"{what} {number:#x} is used by QP {', '.join(map(hex, users))}",
            )  # fmt: skip

    @staticmethod
    def _need_umems(valid: int, ring_field: str) -> None:
        """Refuse a queue whose ring or record does not lie in a UMEM: physical addresses are not supported."""
        if not valid:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, f"{ring_field} and dbr_umem_valid must be set"
            )

    def _uar(self, page_id: int) -> None:
        if page_id not in self._nic.uar_pages:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UAR, f"there is no UAR page {page_id:#x}"
            )

    def _umem(self, umem_id: int, offset: int, nbytes: int, what: str, alignment: int) -> int:
        """Return the address of [offset, offset + nbytes) in a UMEM."""
        if umem_id not in self._nic.umems:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, f"there is no UMEM {umem_id:#x} for {what}"
            )
        umem = self._nic.umems[umem_id]
        address, size = int(umem["addr"]) + offset, int(umem["nbytes"])
        if offset + nbytes > size:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE,
                f"{what}: [{offset:#x}, +{nbytes:#x}) is outside UMEM {umem_id:#x}, which has {size:#x} bytes",
            )  # fmt: skip
        if address % alignment:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT,
                f"{what}: offset {offset:#x} of UMEM {umem_id:#x} is address {address:#x}, not a multiple "
                f"of {alignment}",
            )  # fmt: skip
        return address

    @staticmethod
    def _free(table: Table, what: str, spread: bool = False) -> int:
        """Return a free number. With `spread`, its upper bits are random, so that a stale QPN names no new QP."""
        slot = table.free_slot()
        if slot is None:
            raise CommandError(Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL, f"all {table.mask} {what}s are in use")
        if not spread:
            return slot
        rows = table.mask + 1
        return slot + rows * (1 + secrets.randbelow((1 << 24) // rows - 2))  # never QP 0, 1 or 0xffffff

    @staticmethod
    def _hold(table: Table, numbers: list[int], change: int) -> None:
        for number in numbers:
            table[number]["users"] += change

    def _hold_all(self, uses: dict[str, list[int]], change: int) -> None:
        self._hold(self._nic.umems, uses["umems"], change)
        self._hold(self._nic.pds, uses["pds"], change)
        self._hold(self._nic.uar_pages, uses["uars"], change)
