"""Send queues of Ethernet packets: CREATE_SQ, MODIFY_SQ, QUERY_SQ, DESTROY_SQ."""

from __future__ import annotations

from collections.abc import Iterable

from ....errors import BadStateError
from ....fabric.ethernet_records import FRAME_ROOM
from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode, QpState, Status, WqType
from ....formats.doorbell import REGISTER_BYTES
from ....formats.ethernet_queues import (
    InlineMode, InlineModeCap, ModifySq, QueueState, TimestampFormat, TimestampFormats,
)
from ....formats.layout import BitStruct, Fields
from ....formats.wqe import WQEBB_SHIFT
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.ethernet_queues import SQ_ROW
from ...state.work_queue import QueueKind
from ...transport.eth_segment import LOG_MAX_TSO
from ...turn.commands import EngineCommand
from ..command import DONE, Call, Capabilities, Command
from ..components import Components
from ..links.links import Links
from ..objects import Uses
from ..regions.pd import ProtectionDomains
from ..regions.umem import Umems
from ..syndromes import CommandError, CommandSyndrome
from ..uar import UarPages
from ..vport import mtu_of
from .cq import CompletionQueues
from .ethernet_objects import check_mask, refuse_fields
from .ethernet_queue import HAIRPIN, EthernetQueues
from .tis import SendInterfaces

MAX_SQ = 4096
# The engine uses the states of QPs for SQs.
_STATES = {QpState.RST: QueueState.RST, QpState.RTS: QueueState.RDY, QpState.ERR: QueueState.ERR}
_ENGINE_STATES = {state: engine for engine, state in _STATES.items()}
_UNSUPPORTED = HAIRPIN | {
    "hairpin_peer_rq": "hairpin queues", "rlky": "reserved lkey", "fre": "fast registration", "reg_umr": "UMR",
    "allow_swp": "software parser", "non_wire": "queues that send to no wire", "static_sq_wq": "static WQEs",
    "ts_cqe_to_dest_cqn": "second CQ for timestamps", "packet_pacing_rate_limit_index": "packet pacing",
    "qos_queue_group_id": "packet pacing",
}
_UNSUPPORTED_WQ = {
    "log_wqe_num_of_strides": "strides in send queues", "log_wqe_stride_size": "strides in send queues",
    "two_byte_shift_en": "padding in send queues",
}


class SendQueues(EthernetQueues):
    """The SQs of a NIC. SQNs are below MAX_QP, so that no QP has the number of an SQ: both ring the same registers."""

    struct: BitStruct = eth.SQC
    formats: tuple[TimestampFormat, ...] = tuple(TimestampFormat)
    put_op: int = EngineCommand.ADD_SQ
    remove_op: int = EngineCommand.REMOVE_SQ

    def __init__(
        self, hardware: Hardware, components: Components, pds: ProtectionDomains, umems: Umems, uars: UarPages,
        cqs: CompletionQueues, tiss: SendInterfaces, links: Links,
    ):
        super().__init__(hardware, "SQ", SQ_ROW, MAX_SQ, CommandSyndrome.NO_SUCH_SQ, links)
        self._components = components
        self._pds, self._umems, self._uars, self._cqs, self._tiss = pds, umems, uars, cqs, tiss
        self._lines, self._frame = HostMemory(MAX_SQ * REGISTER_BYTES), HostMemory(FRAME_ROOM)
        hardware.record["sqs"], hardware.record["sq_mask"] = self.table.address, self.table.mask
        hardware.record["frame"] = self._frame.address

    def close(self) -> None:
        self._lines.close()
        self._frame.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_SQ,  eth.CREATE_SQ_IN,  self._create, before=self.load),
            Command(Call.MODIFY,  Opcode.MODIFY_SQ,  eth.MODIFY_SQ_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_SQ,   eth.QUERY_SQ_IN,   self.query, eth.QUERY_SQ_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_SQ, eth.DESTROY_SQ_IN, self._destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {
                "eth_net_offloads": 1, "log_max_sq": self.log_max, "log_max_tis_per_sq": 0,
                "sq_ts_format": TimestampFormats.BOTH, "wait_on_time": int(self._port.config.send_scheduling),
            },
            CapClass.ETHERNET_OFFLOADS: {
                "wqe_inline_mode": InlineModeCap.NOT_REQUIRED, "csum_cap": 1, "wqe_vlan_insert": 1,
                "max_lso_cap": LOG_MAX_TSO, "enhanced_multi_pkt_send_wqe": 1,
            },
        }

    def free_number(self) -> int:
        return super().free_number() + self.table.mask + 1

    def doorbell_line(self, sqn: int) -> int:
        """Return the address of the SQ's own doorbell register, which has a cache line to itself."""
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
        counted = self.set_ring(row, wq, self._umems, ("sq_addr", "sq_log"))
        sqn = self.free_number()
        row["qpn"], row["user_index"], row["pdn"], row["send_cq"] = sqn, context["user_index"], wq["pd"], cq
        row["kind"], row["mtu"] = QueueKind.ETHERNET_SEND, mtu_of(self._port)
        if self._port.config.wire_kind.ethernet:
            row["wire"] = self._links.wire_to_others().address
        row["tis"], row["doorbell"] = self._tiss.table.row_address(context["tis_num_0"]), self.doorbell_line(sqn)
        row["inline_mode"], row["flush"] = context["min_wqe_inline_mode"], context["flush_in_error_en"]
        row["multi_packet"], row["core_direct"] = context["allow_multi_pkt_send_wqe"], context["cd_master"]
        row["real_time"] = context["ts_format"] != TimestampFormat.FREE_RUNNING
        uses = Uses(
            [*counted, (self._pds, wq["pd"]), (self._uars, wq["uar_page"])],
            [(self._cqs, context["cqn"]), (self._tiss, context["tis_num_0"])],
        )
        address = self.table.row_address(sqn)
        if context["cd_master"]:
            self._components.gather()  # the SQ may wait for any CQ, so one worker must serve all
        self._components.add_ethernet(address, [cq])
        try:
            return self.add(sqn, row, uses, mailbox)
        except BaseException:
            self._components.remove(address)
            raise

    def _destroy(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        done = self.destroy(mailbox)
        self._components.remove(self.table.row_address(number))
        return done

    def state_of(self, number: int) -> QueueState:
        return _STATES[QpState(int(self.table[number]["state"]))]

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        now, mask, context = (eth.MODIFY_SQ_IN.get(mailbox, field) for field in ("sq_state", "modify_bitmask", "ctx"))
        state = self.next_state(number, now, context["state"])
        check_mask(mask, ModifySq(0))
        row = self.table.copy(number)
        row["state"] = _ENGINE_STATES[state]
        try:
            before = _ENGINE_STATES[QueueState(now)]
            self._engine.post(EngineCommand.MODIFY_SQ, self.table.row_address(number), row, state=before)
        except BadStateError:
            raise CommandError(
                Status.BAD_RES_STATE, CommandSyndrome.QUEUE_STATE, f"{self.name_of(number)} has failed meanwhile"
            ) from None
        return DONE


def _check_context(context: Fields) -> None:
    """Refuse a context that requests unsupported features."""
    wq = context["wq"]
    refuse_fields("sqc", context, _UNSUPPORTED)
    refuse_fields("wq", wq, _UNSUPPORTED_WQ)
    if context["min_wqe_inline_mode"] not in list(InlineMode):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.INLINE_MODE,
            f"min_wqe_inline_mode {context['min_wqe_inline_mode']} is above {int(max(InlineMode))}",
        )
    if context["tis_lst_sz"] != 1:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.TIS_LIST, f"tis_lst_sz {context['tis_lst_sz']}: an SQ has one TIS"
        )
    if (wq["wq_type"], wq["log_wq_stride"]) != (WqType.CYCLIC, WQEBB_SHIFT):
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.WQ_TYPE,
            f"wq_type {wq['wq_type']}, log_wq_stride {wq['log_wq_stride']}: the ring of an SQ is cyclic (1), and its "
            f"log_wq_stride is {WQEBB_SHIFT}",
        )
