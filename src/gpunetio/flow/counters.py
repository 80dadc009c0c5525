"""Flow counters in bulks: one command allocates many, and one query reads them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from ..formats.commands import Opcode
from ..formats.flow import COUNTERS_PER_BULK_BIT, QUERY_FLOW_COUNTER_IN, QUERY_FLOW_COUNTER_OUT, TRAFFIC_COUNTER
from ..verbs import Context, DevxObject

_STATISTICS = QUERY_FLOW_COUNTER_OUT.offset("flow_statistics")


class FlowCount(NamedTuple):
    """The counts of a rule (`doca_flow_resource_query`): packets, and their bytes without check sequences."""

    packets: int
    octets: int


@dataclass
class _Bulk:
    """Counters with consecutive numbers, their values when last taken, and those given back since."""

    made: DevxObject
    size: int
    before: list[FlowCount]
    used: list[int] = field(default_factory=list)

    def read(self) -> list[FlowCount]:
        mailbox = QUERY_FLOW_COUNTER_IN.pack(
            opcode=Opcode.QUERY_FLOW_COUNTER, flow_counter_id=self.made.number, num_of_counters=self.size
        )
        out = self.made.query_raw(mailbox, _STATISTICS + self.size * TRAFFIC_COUNTER.size)
        places = range(_STATISTICS, len(out), TRAFFIC_COUNTER.size)
        return [FlowCount(*TRAFFIC_COUNTER.unpack(out, place).values()) for place in places]


@dataclass(frozen=True)
class Counter:
    """One counter of a bulk, for one rule at a time."""

    bulk: _Bulk
    place: int

    @property
    def number(self) -> int:
        """Return the flow_counter_id."""
        return self.bulk.made.number + self.place

    def read(self) -> FlowCount:
        """Return the counts since the counter was taken."""
        now, before = self.bulk.read()[self.place], self.bulk.before[self.place]
        return FlowCount(now.packets - before.packets, now.octets - before.octets)


class Counters:
    """The counters of a port's rules.

    The device never resets a counter, so a reused counter must be read before its next rule takes it. Half a bulk or
    more is read at once.
    """

    def __init__(self, ctx: Context, in_bulks: bool, undo: ExitStack):
        self._ctx = ctx
        self._made = undo.enter_context(ExitStack())
        self._size = COUNTERS_PER_BULK_BIT if in_bulks else 1
        self._bulks: list[_Bulk] = []
        self._free: list[Counter] = []  # free counters whose `before` is up to date

    def take(self) -> Counter:
        """Return a counter that reads as 0. NoMemoryError if the device has no more counters."""
        if not self._free:
            self._refill()
        return self._free.pop()

    def give_back(self, counter: Counter) -> None:
        """Take back the counter of a rule that no longer exists."""
        counter.bulk.used.append(counter.place)

    def _refill(self) -> None:
        for bulk in self._bulks:
            if len(bulk.used) * 2 >= bulk.size:
                now = bulk.read()
                for place in bulk.used:  # counters still in use keep their `before`
                    bulk.before[place] = now[place]
                self._free += [Counter(bulk, place) for place in bulk.used]
                bulk.used.clear()
                return
        made = self._ctx.devx.create(Opcode.ALLOC_FLOW_COUNTER, flow_counter_bulk=int(self._size > 1))
        self._made.callback(made.close)
        bulk = _Bulk(made, self._size, [FlowCount(0, 0)] * self._size)
        self._bulks.append(bulk)
        self._free += [Counter(bulk, place) for place in reversed(range(self._size))]
