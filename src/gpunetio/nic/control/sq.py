"""Send queues of Ethernet packets: CREATE_SQ, MODIFY_SQ, QUERY_SQ, DESTROY_SQ."""

from __future__ import annotations

from collections.abc import Iterable

from ...formats import ethernet as eth
from ...formats.commands import CapClass, Opcode, Status, WqType
from ...formats.doorbell import REGISTER_BYTES
from ...formats.ethernet import InlineMode, InlineModeCap, ModifySq, TimestampFormats
from ...formats.layout import BitStruct, Fields
from ...formats.wqe import WQEBB_SHIFT
from ...memory import HostMemory
from ..hardware import Hardware
from ..state.ethernet import SQ_ROW
from .command import DONE, Call, Capabilities, Command
from .cq import CompletionQueues
from .ethernet import check_mask, refuse_fields
from .ethernet_queue import HAIRPIN, EthernetQueues
from .links import Links
from .objects import Uses
from .pd import ProtectionDomains
from .syndromes import CommandError, CommandSyndrome
from .tis import SendInterfaces
from .uar import UarPages
from .umem import Umems

MAX_SQ = 4096
_UNSUPPORTED = HAIRPIN | {
    "hairpin_peer_rq": "hairpin queues", "rlky": "reserved lkey", "fre": "fast registration", "reg_umr": "UMR",
    "allow_swp": "software parser", "non_wire": "queues that send to no wire", "static_sq_wq": "static WQEs",
    "ts_cqe_to_dest_cqn": "second CQ for timestamps", "packet_pacing_rate_limit_index": "packet pacing",
    "qos_queue_group_id": "packet pacing",
}  # fmt: skip
_UNSUPPORTED_WQ = {
    "log_wqe_num_of_strides": "strides in send queues", "log_wqe_stride_size": "strides in send queues",
    "two_byte_shift_en": "padding in send queues",
}  # fmt: skip


class SendQueues(EthernetQueues):
    """The SQs of a NIC. No QP has the number of an SQ, because both ring the same registers: SQNs lie below MAX_QP."""

    struct: BitStruct = eth.SQC

    def __init__(
        self, hardware: Hardware, pds: ProtectionDomains, umems: Umems, uars: UarPages, cqs: CompletionQueues,
        tiss: SendInterfaces, links: Links,
    ):  # fmt: skip
        super().__init__(hardware, "SQ", SQ_ROW, MAX_SQ, CommandSyndrome.NO_SUCH_SQ, links)
        self._pds, self._umems, self._uars, self._cqs, self._tiss = pds, umems, uars, cqs, tiss
        self._lines = HostMemory(MAX_SQ * REGISTER_BYTES)

    def close(self) -> None:
        self._lines.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_SQ,  eth.CREATE_SQ_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_SQ,  eth.MODIFY_SQ_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_SQ,   eth.QUERY_SQ_IN,   self.query, eth.QUERY_SQ_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_SQ, eth.DESTROY_SQ_IN, self.destroy),
        )  # fmt: skip

    def announced(self) -> Capabilities:
        return {
            CapClass.GENERAL: {
                "eth_net_offloads": 1, "log_max_sq": self.log_max, "log_max_tis_per_sq": 0,
                "sq_ts_format": TimestampFormats.FREE_RUNNING,
            },
            CapClass.ETHERNET_OFFLOADS: {"wqe_inline_mode": InlineModeCap.NOT_REQUIRED},
        }  # fmt: skip

    def free_number(self) -> int:
        return super().free_number() + self.table.mask + 1

    def doorbell_line(self, sqn: int) -> int:
        """Return the address of the SQ's own doorbell register, a cache line."""
        return self._lines.address + (sqn & self.table.mask) * REGISTER_BYTES

    def _create(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        context = eth.CREATE_SQ_IN.get(mailbox, "ctx")
        wq = context["wq"]
        _check_context(context)
        self.check_new(context)
        self._tiss.need(context["tis_num_0"])
        cq = self._cqs.need(context["cqn"])
        self._pds.need(wq["pd"])
        self._uars.need(wq["uar_page"])
        row = self.new_row()
        counted = self.place(row, wq, self._umems)
        sqn = self.free_number()
        row["sqn"], row["user_index"], row["pdn"], row["cq"] = sqn, context["user_index"], wq["pd"], cq
        row["tis"], row["doorbell"] = self._tiss.table.row_address(context["tis_num_0"]), self.doorbell_line(sqn)
        row["inline_mode"], row["flush"] = context["min_wqe_inline_mode"], context["flush_in_error_en"]
        row["multi_packet"], row["core_direct"] = context["allow_multi_pkt_send_wqe"], context["cd_master"]
        uses = Uses(
            [*counted, (self._pds, wq["pd"]), (self._uars, wq["uar_page"])],
            [(self._cqs, context["cqn"]), (self._tiss, context["tis_num_0"])],
        )
        return self.add(sqn, row, uses, mailbox)

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        now, mask, context = (eth.MODIFY_SQ_IN.get(mailbox, field) for field in ("sq_state", "modify_bitmask", "ctx"))
        state = self.next_state(number, now, context["state"])
        check_mask(mask, ModifySq(0))
        row = self.table.copy(number)
        row["state"] = state
        self.replace(number, row)
        return DONE


def _check_context(context: Fields) -> None:
    """Refuse what the context asks for and the software NIC does not have."""
    wq = context["wq"]
    refuse_fields("sqc", context, _UNSUPPORTED)
    refuse_fields("wq", wq, _UNSUPPORTED_WQ)
    if context["min_wqe_inline_mode"] not in list(InlineMode):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.INLINE_MODE,
            f"min_wqe_inline_mode {context['min_wqe_inline_mode']} is above {int(max(InlineMode))}",
        )  # fmt: skip
    if context["tis_lst_sz"] != 1:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.TIS_LIST, f"tis_lst_sz {context['tis_lst_sz']}: an SQ has one TIS"
        )
    if (wq["wq_type"], wq["log_wq_stride"]) != (WqType.CYCLIC, WQEBB_SHIFT):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.WQ_TYPE,
            f"wq_type {wq['wq_type']}, log_wq_stride {wq['log_wq_stride']}: the ring of an SQ is cyclic (1), and its "
            f"log_wq_stride is {WQEBB_SHIFT}",
        )  # fmt: skip
