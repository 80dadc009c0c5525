"""Receive queues of Ethernet packets: CREATE_RQ, MODIFY_RQ, QUERY_RQ, DESTROY_RQ."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....errors import BadStateError
from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode, Status, WqType
from ....formats.ethernet_queues import ModifyRq, RqMemory, TimestampFormat, TimestampFormats
from ....formats.layout import BitStruct, Fields
from ....formats.wqe import MIN_STRIDE_LOG, MIN_STRIDES_LOG, SEGMENT, STRIDING_WQE
from ...engine.hardware import Hardware
from ...state.ethernet_queues import RQ_ROW
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command
from ..components import Components
from ..links.links import Links
from ..objects import MailboxObjects, Uses, log_of
from ..regions.pd import ProtectionDomains
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome
from .cq import CompletionQueues
from .ethernet_objects import check_mask, refuse_fields
from .ethernet_queue import HAIRPIN, EthernetQueues
from .q_counter import QCounters
from .qp import MAX_LOG_QUEUE
from .rmp import ReceivePools

MAX_RQ = 4096
_MAX_WQE_LOG = 9  # 512 bytes
_LEAST_STRIDES_LOG = 3  # with ext_stride_num_range; log_wqe_num_of_strides is then a negative number of 4 bits
_LONGEST_STRIDE_LOG = 13
_PADDING = 2  # bytes before each packet, with two_byte_shift_en
_STRIDING = WqType.LINKED_LIST_STRIDING, WqType.CYCLIC_STRIDING
_LINKED = WqType.LINKED_LIST, WqType.LINKED_LIST_STRIDING
_UNSUPPORTED = HAIRPIN | {
    "hairpin_peer_sq": "hairpin queues", "rlky": "reserved lkey", "delay_drop_en": "delayed drops",
    "scatter_fcs": "frame check sequences", "reservation_timeout": "header-data split",
}
_OF_STRIDES = "log_wqe_num_of_strides", "log_wqe_stride_size", "two_byte_shift_en"


class ReceiveQueues(EthernetQueues):
    """The RQs of a NIC. The WQEs of an RQ are in its own ring or in a receive memory pool."""

    struct: BitStruct = eth.RQC
    formats: tuple[TimestampFormat, ...] = (TimestampFormat.FREE_RUNNING, TimestampFormat.DEFAULT)

    def __init__(
        self, hardware: Hardware, components: Components, pds: ProtectionDomains, umems: Umems, cqs: CompletionQueues,
        pools: ReceivePools, counters: QCounters, links: Links,
    ):
        super().__init__(hardware, "RQ", RQ_ROW, MAX_RQ, CommandSyndrome.NO_SUCH_RQ, links)
        self._components = components
        self._pds, self._umems, self._cqs, self._pools, self._counters = pds, umems, cqs, pools, counters

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_RQ,  eth.CREATE_RQ_IN,  self._create, before=self.load),
            Command(Call.MODIFY,  Opcode.MODIFY_RQ,  eth.MODIFY_RQ_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_RQ,   eth.QUERY_RQ_IN,   self.query, eth.QUERY_RQ_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_RQ, eth.DESTROY_RQ_IN, self._destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {
                "log_max_rq": self.log_max, "log_max_wq_sz": MAX_LOG_QUEUE,
                "rq_ts_format": TimestampFormats.FREE_RUNNING, "striding_rq": 1, "ext_stride_num_range": 1,
                "log_min_stride_sz_rq": MIN_STRIDE_LOG, "log_max_stride_sz_rq": _LONGEST_STRIDE_LOG,
            },
        }

    def _create(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        context = eth.CREATE_RQ_IN.get(mailbox, "ctx")
        refuse_fields("rqc", context, _UNSUPPORTED)
        self.check_new(context)
        cq = self._cqs.need(context["cqn"])
        counter = self._counter_row(context["counter_set_id"])
        row = self.new_row()
        row["cq"], row["counter"] = cq, counter
        row["user_index"], row["keep_vlan"] = context["user_index"], context["vsd"]
        row["flush"] = context["flush_in_error_en"]
        match context["mem_rq_type"]:
            case RqMemory.INLINE:
                uses = self._set_own_ring(row, context["wq"])
            case RqMemory.RMP:
                uses = self._set_pool(row, context["rmpn"])
            case other:
                raise CommandError(
                    Status.BAD_PARAM, CommandSyndrome.RQ_TYPE,
                    f"mem_rq_type {other}: WQEs are in the RQ (0) or in an RMP (1)",
                )
        uses.named.append((self._cqs, context["cqn"]))
        uses.named.extend(self._counter_use(context["counter_set_id"]))
        row["rqn"] = rqn = self.free_number()
        queues = (int(row[queue]) for queue in ("cq", "srq"))
        self._components.add_ethernet(self.table.row_address(rqn), (queue for queue in queues if queue))
        return self.add(rqn, row, uses, mailbox)

    def _destroy(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        done = self.destroy(mailbox)
        self._components.remove(self.table.row_address(number))
        return done

    def _set_own_ring(self, row: np.ndarray, wq: Fields) -> Uses:
        """Set an RQ's own ring in its row. Return the objects that the ring uses."""
        _check_wqes(wq)
        self._pds.need(wq["pd"])
        counted = self.set_ring(row, wq, self._umems, ("addr", "log"))
        row["pdn"], row["wq_type"], row["stride"] = wq["pd"], wq["wq_type"], 1 << wq["log_wq_stride"]
        if wq["wq_type"] in _STRIDING:
            row["strides"] = 1 << _strides_log(wq)
            row["stride_bytes"] = 1 << MIN_STRIDE_LOG + wq["log_wqe_stride_size"]
            row["padding"] = _PADDING if wq["two_byte_shift_en"] else 0
        return Uses([*counted, (self._pds, wq["pd"])])

    def _set_pool(self, row: np.ndarray, rmpn: int) -> Uses:
        """Set the receive memory pool of an RQ in its row. The RQ gets the pool's PD. Return the pool as its use."""
        row["srq"] = self._pools.need(rmpn)
        pool = self._pools.table[rmpn]
        row["pdn"], row["stride"] = pool["pdn"], pool["stride"]
        row["wq_type"] = WqType.LINKED_LIST if pool["linked"] else WqType.CYCLIC
        return Uses(named=[(self._pools, rmpn)])

    def _counter_row(self, number: int) -> int:
        """Return the address of a Q counter's row; 0 if `number` is 0. CommandError if there is no such counter."""
        return self._counters.need(number) if number else 0

    def _counter_use(self, number: int) -> list[tuple[MailboxObjects, int]]:
        return [(self._counters, number)] if number else []

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        now, mask, context = (eth.MODIFY_RQ_IN.get(mailbox, field) for field in ("rq_state", "modify_bitmask", "ctx"))
        state = self.next_state(number, now, context["state"])
        check_mask(mask, ModifyRq.VSD | ModifyRq.COUNTER_SET_ID)
        row, changed, uses = self.table.copy(number), {}, None
        row["state"] = state
        if mask & ModifyRq.VSD:
            row["keep_vlan"] = changed["vsd"] = context["vsd"]
        if mask & ModifyRq.COUNTER_SET_ID:
            row["counter"] = self._counter_row(context["counter_set_id"])
            changed["counter_set_id"] = context["counter_set_id"]
            before = self._uses[number]
            others = [use for use in before.named if use[0] is not self._counters]
            uses = Uses(before.counted, others + self._counter_use(context["counter_set_id"]))
        try:
            self._engine.post(EngineCommand.MODIFY_RQ, self.table.row_address(number), row, state=now)
        except BadStateError:
            raise CommandError(
                Status.BAD_RES_STATE, CommandSyndrome.QUEUE_STATE, f"{self.name_of(number)} has failed meanwhile"
            ) from None
        if uses is not None:
            self.replace_uses(number, uses)
        eth.RQC.update(self.contexts[number], **changed)
        return DONE


def _strides_log(wq: Fields) -> int:
    """Return the base-2 logarithm of the strides per WQE, which the context encodes as a signed 4-bit number."""
    code = wq["log_wqe_num_of_strides"]
    return MIN_STRIDES_LOG + (code ^ 8) - 8


def _check_wqes(wq: Fields) -> None:
    """Refuse a ring with unsupported WQEs."""
    kind, log = wq["wq_type"], wq["log_wq_stride"]
    if kind not in list(WqType):
        raise CommandError(Status.BAD_PARAM, CommandSyndrome.WQ_TYPE, f"wq_type {kind} is above {int(max(WqType))}")
    if kind in _STRIDING:
        least = most = log_of(STRIDING_WQE)
    else:
        least, most = log_of(SEGMENT) + (kind in _LINKED), _MAX_WQE_LOG
    if not least <= log <= most:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.WQ_SIZE,
            f"log_wq_stride {log}: with wq_type {WqType(kind).name} it can be from {least} to {most}",
        )
    if kind not in _STRIDING and any(wq[field] for field in _OF_STRIDES):
        told = ", ".join(f"{field} {wq[field]}" for field in _OF_STRIDES)
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.STRIDES,
            f"{told}: they must be 0 with wq_type {WqType(kind).name}, which has no strides",
        )
    if kind in _STRIDING and _strides_log(wq) < _LEAST_STRIDES_LOG:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.STRIDES,
            f"log_wqe_num_of_strides {wq['log_wqe_num_of_strides']:#x} is 2^{_strides_log(wq)} strides: a WQE has "
            f"{1 << _LEAST_STRIDES_LOG} strides at least",
        )
