"""Receive memory pools, the shared receive queues of verbs: CREATE_RMP, MODIFY_RMP, QUERY_RMP, DESTROY_RMP."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....formats import commands as cmd
from ....formats.commands import CapClass, Opcode, RmpState, Status, WqType
from ....formats.contexts import RMPC
from ....formats.layout import Fields
from ....formats.wqe import SRQ_NEXT_SEG
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.srq import SRQ_ROW
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command
from ..components import Components
from ..objects import QueueObjects
from ..regions.pd import ProtectionDomains
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome

MAX_SRQ = 1024
MAX_LOG_SRQ = 15
_TYPES = (WqType.LINKED_LIST, 0), (WqType.CYCLIC, 1), (WqType.CYCLIC, 0)  # wq_type, basic_cyclic_rcv_wqe
_MIN_STRIDE_LOG, _MAX_STRIDE_LOG = 4, 9  # strides of 16 to 512 bytes


class ReceivePools(QueueObjects):
    """The receive memory pools of a NIC. Their numbers are SRQ numbers."""

    def __init__(self, hardware: Hardware, components: Components, umems: Umems, pds: ProtectionDomains):
        super().__init__("SRQ", SRQ_ROW, MAX_SRQ, CommandSyndrome.NO_SUCH_SRQ)
        self._engine, self._components, self._umems, self._pds = hardware.engine, components, umems, pds
        self._contexts: dict[int, bytearray] = {}  # SRQ number → its rmpc, as QUERY_RMP returns it
        self._returned: dict[int, HostMemory] = {}  # SRQ number → memory for the indices of WQEs returned unused

    def close(self) -> None:
        for returned in self._returned.values():
            returned.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_RMP,  cmd.CREATE_RMP_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_RMP,  cmd.MODIFY_RMP_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_RMP,   cmd.QUERY_RMP_IN,   self._query, cmd.QUERY_RMP_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_RMP, cmd.DESTROY_RMP_IN, self._destroy),
        )

    def capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {
                "log_max_srq": self.log_max, "log_max_srq_sz": MAX_LOG_SRQ, "log_max_rmp": self.log_max,
                "basic_cyclic_rcv_wqe": 1,
            },
        }

    def _create(self, mailbox: bytes) -> bytes:
        context = cmd.CREATE_RMP_IN.get(mailbox, "ctx")
        wq = context["wq"]
        _check_context(context)
        self._pds.need(wq["pd"])
        self._umems.need_valid(wq["wq_umem_valid"] and wq["dbr_umem_valid"], "wq_umem_valid")
        log, stride_log = wq["log_wq_sz"], wq["log_wq_stride"]
        ring_umem, record_umem = wq["wq_umem_id"], wq["dbr_umem_id"]
        ring = self._umems.ring(ring_umem, wq["wq_umem_offset"], 1 << log + stride_log, "the receive pool")
        record = self._umems.record(record_umem, wq["dbr_addr"], "its doorbell record")
        srqn = self.free_number()
        returned = self._returned[srqn] = HostMemory(8 << log)
        row = self.new_row()
        row["srqn"], row["pdn"], row["addr"], row["dbrec"] = srqn, wq["pd"], ring, record
        row["log"], row["stride"], row["linked"] = log, 1 << stride_log, wq["wq_type"] == WqType.LINKED_LIST
        row["header"] = _header(context)
        row["returned"], row["limit"] = returned.address, wq["lwm"]
        self._engine.post(EngineCommand.WRITE_ROW, self.table.row_address(srqn), row)
        start = cmd.CREATE_RMP_IN.offset("ctx")
        self._contexts[srqn] = bytearray(mailbox[start : start + RMPC.size])
        self._umems.hold(ring_umem, record_umem)
        self._pds.hold(wq["pd"])
        return bytes(cmd.CREATE_RMP_OUT.pack(rmpn=srqn))

    def _modify(self, mailbox: bytes) -> bytes:
        get = cmd.MODIFY_RMP_IN.get
        srqn = get(mailbox, "rmpn")
        row_address = self.need(srqn)
        now, wanted = (get(mailbox, field) for field in ("rmp_state", "ctx.state"))
        if (now, wanted) != (RmpState.RDY, RmpState.RDY):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RMP_STATE, f"from state {now} to {wanted}: a pool stays in RDY (1)"
            )
        if get(mailbox, "modify_size"):
            self._resize(srqn, get(mailbox, "ctx")["wq"])
        if get(mailbox, "modify_lwm"):
            limit, entries = get(mailbox, "ctx")["wq"]["lwm"], 1 << int(self.table[srqn]["log"])
            if limit > entries:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                    f"lwm {limit} is above the {entries} WQEs of SRQ {srqn:#x}",
                )
            worker = self._components.worker_of(row_address)
            self._engine.post(
                EngineCommand.WRITE_ROW, row_address + SRQ_ROW.limit, np.array([limit], np.int64), worker=worker
            )
        return DONE

    def _resize(self, srqn: int, wq: Fields) -> None:
        """Move a pool to a larger ring. The ring must start with the WQEs of the old ring."""
        row, log = self.table.copy(srqn), wq["log_wq_sz"]
        if not row["log"] < log <= MAX_LOG_SRQ:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
                f"log_wq_sz {log}: SRQ {srqn:#x} has {row['log']} and can only grow, to {MAX_LOG_SRQ} at most",
            )
        self._umems.need_valid(wq["wq_umem_valid"], "wq_umem_valid")
        umem, nbytes = wq["wq_umem_id"], int(row["stride"]) << log
        row["addr"] = self._umems.ring(umem, wq["wq_umem_offset"], nbytes, "the receive pool")
        larger = HostMemory(8 << log)
        row["log"], row["returned"] = log, larger.address
        address = self.table.row_address(srqn)
        try:
            self._engine.post(EngineCommand.RESIZE_SRQ, address, row, worker=self._components.worker_of(address))
        except BaseException:
            larger.close()
            raise
        self._returned[srqn].close()
        self._returned[srqn] = larger
        context = self._contexts[srqn]
        before = RMPC.get(context, "wq.wq_umem_id")
        RMPC.update(context, wq={"log_wq_sz": log, "wq_umem_id": umem, "wq_umem_offset": wq["wq_umem_offset"]})
        self._umems.hold(umem)
        self._umems.release(before)

    def _query(self, mailbox: bytes) -> bytes:
        srqn = cmd.QUERY_RMP_IN.get(mailbox, "rmpn")
        self.need(srqn)
        context = bytearray(self._contexts[srqn])
        RMPC.update(context, wq={"lwm": int(self.table[srqn]["limit"])})
        out = cmd.QUERY_RMP_OUT.pack()
        start = cmd.QUERY_RMP_OUT.offset("ctx")
        out[start : start + RMPC.size] = context
        return bytes(out)

    def _destroy(self, mailbox: bytes) -> bytes:
        srqn = cmd.DESTROY_RMP_IN.get(mailbox, "rmpn")
        row_address = self.need(srqn)
        self.need_unused(srqn)
        self._engine.post(EngineCommand.WRITE_ROW, row_address, self.new_row())
        self._returned.pop(srqn).close()
        wq = RMPC.get(self._contexts.pop(srqn), "wq")
        self._umems.release(wq["wq_umem_id"], wq["dbr_umem_id"])
        self._pds.release(wq["pd"])
        return DONE


def _header(context: Fields) -> int:
    """Return the number of bytes before a WQE's data segments: the next segment, even if a cyclic queue ignores it."""
    return 0 if context["basic_cyclic_rcv_wqe"] else SRQ_NEXT_SEG.size


def _check_context(context: Fields) -> None:
    """Refuse an unsupported state, type or size of a pool."""
    wq = context["wq"]
    if context["state"] != RmpState.RDY:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.RMP_STATE, f"state {context['state']}: a pool is created in RDY (1)"
        )
    if (wq["wq_type"], context["basic_cyclic_rcv_wqe"]) not in _TYPES:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.RQ_TYPE,
            f"wq_type {wq['wq_type']} with basic_cyclic_rcv_wqe {context['basic_cyclic_rcv_wqe']}: only a linked "
            "list (0, 0) and a cyclic queue (1, 1; 1, 0) are supported",
        )
    log, stride_log = wq["log_wq_sz"], wq["log_wq_stride"]
    least = _MIN_STRIDE_LOG + (_header(context) > 0)
    if log > MAX_LOG_SRQ or not least <= stride_log <= _MAX_STRIDE_LOG:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.QP_SIZE,
            f"log_wq_sz {log}, log_wq_stride {stride_log}: log_wq_sz can be up to {MAX_LOG_SRQ}, log_wq_stride "
            f"from {least} to {_MAX_STRIDE_LOG}",
        )
