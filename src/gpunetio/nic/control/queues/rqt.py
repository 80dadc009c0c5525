"""Receive queue tables (RQT), in which a hash selects an RQ: CREATE_RQT, MODIFY_RQT, QUERY_RQT, DESTROY_RQT."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....formats import ethernet_queues as eth
from ....formats.commands import CapClass, Opcode, Status
from ....formats.ethernet_queues import ListQType, ModifyRqt, rqns_of
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.ethernet_queues import RQT_ROW
from ..command import DONE, Call, Capabilities, Command
from ..objects import Uses
from ..syndromes import CommandError, CommandSyndrome
from .ethernet_objects import EthernetObjects, check_mask, refuse_fields
from .rq import ReceiveQueues

MAX_RQT = 1024
MAX_LOG_RQT = 11
_ENTRY, _ADDRESS = 4, 8  # bytes of an entry in a mailbox, and in a row's list
_UNSUPPORTED = {"rq_vhca_id_format": "RQs of other functions"}


class ReceiveQueueTables(EthernetObjects):
    """The RQTs of a NIC."""

    def __init__(self, hardware: Hardware, rqs: ReceiveQueues):
        super().__init__(hardware, "RQT", RQT_ROW, MAX_RQT, CommandSyndrome.NO_SUCH_RQT)
        self._rqs = rqs
        self._lists: dict[int, HostMemory] = {}  # RQT number → addresses of RQ_ROWs
        self._rqns: dict[int, list[int]] = {}

    def close(self) -> None:
        for listed in self._lists.values():
            listed.close()
        super().close()

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_RQT,  eth.CREATE_RQT_IN,  self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_RQT,  eth.MODIFY_RQT_IN,  self._modify),
            Command(Call.QUERY,   Opcode.QUERY_RQT,   eth.QUERY_RQT_IN,   self.query, eth.QUERY_RQT_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_RQT, eth.DESTROY_RQT_IN, self._destroy),
        )

    def ethernet_capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_rqt": self.log_max, "log_max_rqt_size": MAX_LOG_RQT}}

    def _create(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        context = eth.CREATE_RQT_IN.get(mailbox, "ctx")
        refuse_fields("rqtc", context, _UNSUPPORTED)
        if context["list_q_type"] != ListQType.RQ:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RQ_TYPE, f"list_q_type {context['list_q_type']}: only RQs (0)"
            )
        most, count = context["rqt_max_size"], context["rqt_actual_size"]
        if not _is_power_of_two(most) or most > 1 << MAX_LOG_RQT:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RQT_SIZE,
                f"rqt_max_size {most}: it is a power of two, {1 << MAX_LOG_RQT} at most",
            )
        rqns = self._list_in(mailbox, count, most)
        number = self.free_number()
        self._replace(number, rqns, mailbox)
        return bytes(eth.CREATE_RQT_OUT.pack(rqtn=number))

    def _modify(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        mask, context = (eth.MODIFY_RQT_IN.get(mailbox, field) for field in ("bitmask", "ctx"))
        check_mask(mask, ModifyRqt.RQN_LIST)
        if mask & ModifyRqt.RQN_LIST:
            most = eth.RQTC.get(self.contexts[number], "rqt_max_size")
            self._replace(number, self._list_in(mailbox, context["rqt_actual_size"], most))
            eth.RQTC.update(self.contexts[number], rqt_actual_size=context["rqt_actual_size"])
        return DONE

    def _list_in(self, mailbox: bytes, count: int, most: int) -> list[int]:
        """Return the `count` RQNs of a mailbox. CommandError if `count` exceeds `most`, or if an RQ does not exist."""
        if not _is_power_of_two(count) or count > most:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.RQT_SIZE,
                f"rqt_actual_size {count}: it is a power of two, and rqt_max_size, {most}, at most",
            )
        start = eth.CREATE_RQT_IN.offset("rq_num")
        if len(mailbox) < start + _ENTRY * count:
            raise CommandError(
                Status.BAD_INPUT_LEN, CommandSyndrome.SHORT_INPUT,
                f"an RQT of {count} entries takes {start + _ENTRY * count} bytes, the input has {len(mailbox)}",
            )
        rqns = rqns_of(mailbox[start : start + _ENTRY * count])
        for rqn in dict.fromkeys(rqns):
            self._rqs.need(rqn)
        return rqns

    def _replace(self, number: int, rqns: list[int], mailbox: bytes | None = None) -> None:
        """Set the list of RQs of an existing RQT, or of a new RQT that `mailbox` creates."""
        listed = HostMemory(_ADDRESS * len(rqns))
        listed.view(np.int64, 0, len(rqns))[:] = [self._rqs.table.row_address(rqn) for rqn in rqns]
        row = self.new_row()
        row["rqtn"], row["count"], row["rqs"] = number, len(rqns), listed.address
        uses = Uses(named=[(self._rqs, rqn) for rqn in dict.fromkeys(rqns)])
        try:
            if mailbox is None:
                self.replace(number, row, uses)
            else:
                self.add(number, row, uses, mailbox)
        except BaseException:
            listed.close()
            raise
        if before := self._lists.get(number):
            before.close()
        self._lists[number], self._rqns[number] = listed, rqns

    def rqns_of(self, number: int) -> list[int]:
        """Return the numbers of the RQs in an RQT, in order."""
        return self._rqns[number]

    def context_of(self, number: int) -> bytearray:
        return super().context_of(number) + eth.rq_list(self._rqns[number])

    def _destroy(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        done = self.destroy(mailbox)
        self._lists.pop(number).close()
        del self._rqns[number]
        return done


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & count - 1 == 0
