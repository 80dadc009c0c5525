"""Flow counters: ALLOC_FLOW_COUNTER, DEALLOC_FLOW_COUNTER, QUERY_FLOW_COUNTER."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....formats import flow
from ....formats.commands import CapClass, Opcode, Status
from ....formats.flow import COUNTERS_PER_BULK_BIT, TRAFFIC_COUNTER
from ...engine.hardware import Hardware
from ...state.flow import FLOW_COUNTER
from ...state.tables import Table
from ..command import DONE, Call, Capabilities, Command
from ..objects import MailboxObjects
from ..syndromes import CommandError, CommandSyndrome

LOG_MAX_COUNTERS = 16
_BULKS = 0xFF  # flow_counter_bulk_alloc: up to 16384 counters at once


class FlowCounters(MailboxObjects):
    """The flow counters of a NIC. Counters of a bulk have consecutive numbers, and are deallocated together.

    While an entry may use a counter, only the engine writes its counts. Therefore a query that clears a counter only
    remembers the counts, and later queries subtract them.
    """

    def __init__(self, hardware: Hardware):
        table = Table("flow counter", FLOW_COUNTER, 1 << LOG_MAX_COUNTERS, shared=False)
        super().__init__(table, CommandSyndrome.NO_SUCH_FLOW_COUNTER)
        self._hardware = hardware
        self._bulks: dict[int, int] = {}  # first number → number of counters
        self._cleared: dict[int, tuple[int, int]] = {}  # number → packets and octets at the time of the last clear

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.ALLOC_FLOW_COUNTER,   flow.ALLOC_FLOW_COUNTER_IN,   self._alloc),
            Command(Call.QUERY,   Opcode.QUERY_FLOW_COUNTER,   flow.QUERY_FLOW_COUNTER_IN,   self._query,
                    flow.QUERY_FLOW_COUNTER_OUT.size),
            Command(Call.DESTROY, Opcode.DEALLOC_FLOW_COUNTER, flow.DEALLOC_FLOW_COUNTER_IN, self._dealloc),
        )

    def capabilities(self) -> Capabilities:
        return {} if self._hardware.port.no_ethernet else {CapClass.GENERAL: {"flow_counter_bulk_alloc": _BULKS}}

    def _alloc(self, mailbox: bytes) -> bytes:
        get = flow.ALLOC_FLOW_COUNTER_IN.get
        bulk, log = get(mailbox, "flow_counter_bulk"), get(mailbox, "flow_counter_bulk_log_size")
        if log or bulk & (bulk - 1):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_COUNTER,
                f"flow_counter_bulk {bulk:#x}, flow_counter_bulk_log_size {log}: the first may have one bit, and the "
                "second must be 0",
            )
        if why := self._hardware.port.no_ethernet:
            raise CommandError(
                Status.BAD_SYS_STATE, CommandSyndrome.NO_ETHERNET, f"a flow counter needs an Ethernet port: {why}"
            )
        count = bulk * COUNTERS_PER_BULK_BIT or 1
        first = self._free_run(count) if bulk else self.free_number()
        rows = self.table.rows[first : first + count]
        rows["packets"] = rows["octets"] = 0
        rows["counter_id"] = np.arange(first, first + count)
        self._bulks[first] = count
        return bytes(flow.ALLOC_FLOW_COUNTER_OUT.pack(flow_counter_id=first))

    def _free_run(self, count: int) -> int:
        """Return the first of `count` consecutive free numbers. CommandError if there are not so many."""
        taken = np.flatnonzero(self.table.rows["counter_id"][1:]) + 1
        edges = np.concatenate(([0], taken, [self.table.mask + 1]))
        gaps = np.flatnonzero(np.diff(edges) > count)
        if not len(gaps):
            raise CommandError(
                Status.NO_RESOURCES, CommandSyndrome.TABLE_FULL,
                f"there are no {count} free flow counters that follow each other; {len(taken)} are in use",
            )
        return int(edges[gaps[0]]) + 1

    def _dealloc(self, mailbox: bytes) -> bytes:
        first = flow.DEALLOC_FLOW_COUNTER_IN.get(mailbox, "flow_counter_id")
        self.need(first)
        if first not in self._bulks:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_FLOW_COUNTER,
                f"flow counter {first:#x} is inside a bulk: deallocate the first of the bulk",
            )
        numbers = range(first, first + self._bulks[first])
        for number in numbers:
            self.need_unused(number)
        del self._bulks[first]
        for number in numbers:
            self._cleared.pop(number, None)
        self.table.rows["counter_id"][numbers.start : numbers.stop] = 0
        return DONE

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of counters, and their packets and octets as QUERY_FLOW_COUNTER reports them."""
        rows = self.table.rows[numbers]
        cleared = np.array([self._cleared.get(number, (0, 0)) for number in numbers.tolist()], np.int64).reshape(-1, 2)
        return rows["counter_id"], rows["packets"] - cleared[:, 0], rows["octets"] - cleared[:, 1]

    def _query(self, mailbox: bytes) -> bytes:
        get = flow.QUERY_FLOW_COUNTER_IN.get
        first, count = get(mailbox, "flow_counter_id"), get(mailbox, "num_of_counters") or 1
        numbers = range(first, first + count)
        for number in numbers:
            self.need(number)
        answer = bytearray(DONE)
        for number in numbers:
            row, (packets, octets) = self.table[number], self._cleared.get(number, (0, 0))
            now = int(row["packets"]), int(row["octets"])
            answer += TRAFFIC_COUNTER.pack(packets=now[0] - packets, octets=now[1] - octets)
            if get(mailbox, "clear"):
                self._cleared[number] = now
        return bytes(answer)
