"""Transport interfaces receive (TIR), which forward packets to RQs: CREATE_TIR, MODIFY_TIR, QUERY_TIR, DESTROY_TIR."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode, Status
from ....formats.ethernet_queues import TIRC, DispType, HashField, ModifyTir, RxHashFn
from ....formats.layout import Fields
from ...engine.hardware import Hardware
from ...state.ethernet_queues import TIR_ROW
from ..command import DONE, Call, Capabilities, Command
from ..objects import MailboxObjects, Uses
from ..syndromes import CommandError, CommandSyndrome
from .ethernet_objects import EthernetObjects, check_mask, refuse_fields
from .rq import ReceiveQueues
from .rqt import ReceiveQueueTables
from .toeplitz import ToeplitzTables
from .transport_domain import TransportDomains

MAX_TIR = 4096
_UNSUPPORTED = {
    "tls_en": "TLS", "lro_timeout_period_usecs": "LRO", "packet_merge_mask": "LRO", "lro_max_ip_payload_size": "LRO",
    "tunneled_offload_en": "tunnels", "rx_hash_field_selector_inner": "tunnels",
}
_HASHED = HashField.SRC_IP | HashField.DST_IP | HashField.L4_SPORT | HashField.L4_DPORT
_PAIRS = HashField.SRC_IP | HashField.DST_IP, HashField.L4_SPORT | HashField.L4_DPORT
_OF_BIT = {  # the context fields that each bit of a MODIFY bitmask selects
    ModifyTir.INDIRECT_TABLE: ("indirect_table",),
    ModifyTir.HASH: ("rx_hash_fn", "rx_hash_symmetric", "rx_hash_toeplitz_key", "rx_hash_field_selector_outer",
                     "rx_hash_field_selector_inner"),
    ModifyTir.SELF_LB_EN: ("self_lb_block",),
}


class ReceiveInterfaces(EthernetObjects):
    """The TIRs of a NIC. Flow table entries forward packets to them."""

    def __init__(self, hardware: Hardware, tds: TransportDomains, rqs: ReceiveQueues, rqts: ReceiveQueueTables):
        super().__init__(hardware, "TIR", TIR_ROW, MAX_TIR, CommandSyndrome.NO_SUCH_TIR)
        self._tds, self._rqs, self._rqts = tds, rqs, rqts
        self._toeplitz = ToeplitzTables()
        self._keys: dict[int, bytes] = {}  # number → Toeplitz key, for TIRs that hash

    def close(self) -> None:
        self._toeplitz.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_TIR,  eth.CREATE_TIR_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_TIR,  eth.MODIFY_TIR_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_TIR,   eth.QUERY_TIR_IN,   self.query, eth.QUERY_TIR_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_TIR, eth.DESTROY_TIR_IN, self._destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {"log_max_tir": self.log_max}, CapClass.ETHERNET_OFFLOADS: {"self_lb_en_modifiable": 1},
        }

    def _create(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        context = eth.CREATE_TIR_IN.get(mailbox, "ctx")
        row, uses = self._prepare(context)
        row["tirn"] = number = self.free_number()
        self._hold_hash_table(row)
        answer = self.add(number, row, uses, mailbox)
        self._keep_key(number, row)
        return answer

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        mask, given = (eth.MODIFY_TIR_IN.get(mailbox, field) for field in ("bitmask", "ctx"))
        check_mask(mask, ModifyTir.INDIRECT_TABLE | ModifyTir.HASH | ModifyTir.SELF_LB_EN)
        changed = {field: given[field] for bit, fields in _OF_BIT.items() if mask & bit for field in fields}
        row, uses = self._prepare(TIRC.unpack(self.contexts[number]) | changed)
        row["tirn"] = number
        self._hold_hash_table(row)
        self.replace(number, row, uses)
        self._keep_key(number, row)
        TIRC.update(self.contexts[number], **changed)
        return DONE

    def _destroy(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        answer = self.destroy(mailbox)
        self._keep_key(number, self.new_row())
        return answer

    def _hold_hash_table(self, row: np.ndarray) -> None:
        """Set the hash table of a row's Toeplitz key in the row, and hold the table."""
        if row["hash_fn"] == RxHashFn.TOEPLITZ:
            row["toeplitz"] = self._toeplitz.hold(bytes(row["key"]))

    def _keep_key(self, number: int, row: np.ndarray) -> None:
        """Release the hash table of a TIR's previous key, and record the key of its new row."""
        before = self._keys.pop(number, None)
        if row["toeplitz"]:
            self._keys[number] = bytes(row["key"])
        if before is not None:
            self._toeplitz.release(before)

    def _prepare(self, context: Fields) -> tuple[np.ndarray, Uses]:
        """Check a context. Return a row that lacks only its number, and the objects that the TIR uses."""
        refuse_fields("tirc", context, _UNSUPPORTED)
        self._tds.need(context["transport_domain"])
        row = self.new_row()
        kind, rqn, rqtn = context["disp_type"], context["inline_rqn"], context["indirect_table"]
        target: tuple[MailboxObjects, int]
        if kind == DispType.DIRECT and not rqtn:
            row["rq"], target = self._rqs.need(rqn), (self._rqs, rqn)
        elif kind == DispType.INDIRECT and not rqn:
            row["rqt"], target = self._rqts.need(rqtn), (self._rqts, rqtn)
        else:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.DISP_TYPE,
                f"disp_type {kind}, inline_rqn {rqn:#x}, indirect_table {rqtn:#x}: DIRECT (0) takes an RQ, "
                "INDIRECT (1) an RQT, and the other number is 0",
            )
        _check_hash(context)
        selector = context["rx_hash_field_selector_outer"]
        row["transport_domain"], row["self_lb_block"] = context["transport_domain"], context["self_lb_block"]
        row["hash_fn"], row["symmetric"] = context["rx_hash_fn"], context["rx_hash_symmetric"]
        row["key"] = np.void(context["rx_hash_toeplitz_key"])
        row["l3_prot"], row["l4_prot"] = selector["l3_prot_type"], selector["l4_prot_type"]
        row["fields"] = selector["selected_fields"]
        return row, Uses(named=[(self._tds, context["transport_domain"]), target])


def _check_hash(context: Fields) -> None:
    """Refuse hash settings that are unsupported or contradictory."""
    function, symmetric = context["rx_hash_fn"], context["rx_hash_symmetric"]
    fields = context["rx_hash_field_selector_outer"]["selected_fields"]
    if function not in (RxHashFn.NONE, RxHashFn.TOEPLITZ):
        problem = f"rx_hash_fn {function}: only NONE (0) and TOEPLITZ (2) are supported"
    elif fields & ~int(_HASHED):
        problem = f"selected_fields {fields:#x}: addresses (1, 2) and ports (4, 8) can be hashed"
    elif function == RxHashFn.NONE and (fields or symmetric):
        problem = f"selected_fields {fields:#x}, rx_hash_symmetric {symmetric}: without a hash function both are 0"
    elif function != RxHashFn.NONE and context["disp_type"] == DispType.DIRECT:
        problem = f"rx_hash_fn {function}: a DIRECT TIR has one RQ and no hash, so it must be 0"
    elif fields and not any(context["rx_hash_toeplitz_key"]):
        problem = "rx_hash_toeplitz_key is all zeros: every packet would have hash 0"
    elif symmetric and any(0 < fields & pair < pair for pair in _PAIRS):
        problem = f"selected_fields {fields:#x}: a symmetric hash takes both addresses, both ports, or both pairs"
    else:
        return
    raise CommandError(Status.BAD_PARAM, CommandSyndrome.RX_HASH, problem)
