"""Q counters, which count packets that receive queues drop: ALLOC_Q_COUNTER, QUERY_Q_COUNTER, DEALLOC_Q_COUNTER."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....formats import ethernet_queues as eth
from ....formats.commands import Opcode
from ...engine.hardware import Hardware
from ...state.ethernet_queues import Q_COUNTER_ROW
from ...turn.commands import EngineCommand
from ..command import Call, Command
from ..objects import Uses
from ..syndromes import CommandSyndrome
from .ethernet_objects import EthernetObjects

MAX_Q_COUNTER = 256  # a counter_set_id has 8 bits


class QCounters(EthernetObjects):
    """The Q counters of a NIC. Number 0 means no counter."""

    def __init__(self, hardware: Hardware):
        super().__init__(hardware, "Q counter", Q_COUNTER_ROW, MAX_Q_COUNTER, CommandSyndrome.NO_SUCH_Q_COUNTER)

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.ALLOC_Q_COUNTER,   eth.ALLOC_Q_COUNTER_IN,   self._alloc),
            Command(Call.QUERY,   Opcode.QUERY_Q_COUNTER,   eth.QUERY_Q_COUNTER_IN,   self._query,
                    eth.QUERY_Q_COUNTER_OUT.size),
            Command(Call.DESTROY, Opcode.DEALLOC_Q_COUNTER, eth.DEALLOC_Q_COUNTER_IN, self.destroy),
        )

    def _alloc(self, mailbox: bytes) -> bytes:
        self.need_ethernet()
        number = self.free_number()
        row = self.new_row()
        row["counter_set_id"] = number
        return self.add(number, row, Uses(), mailbox)

    def _query(self, mailbox: bytes) -> bytes:
        number = self.number_in(mailbox)
        out = eth.QUERY_Q_COUNTER_OUT.pack(out_of_buffer=int(self.table[number]["out_of_buffer"]) & 0xFFFF_FFFF)
        if eth.QUERY_Q_COUNTER_IN.get(mailbox, "clear"):
            counter = self.table.row_address(number) + Q_COUNTER_ROW.out_of_buffer
            self._engine.post(EngineCommand.WRITE_ROW, counter, np.zeros(1, np.int64))
        return bytes(out)
