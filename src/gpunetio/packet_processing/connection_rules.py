"""Flow rules of connections that have sent some segments. Each leads to the receive queue of its slot, with its tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ipaddress import IPv4Address
from typing import Protocol

import numpy as np

from ..errors import FullError
from ..eth import CyclicRxq
from ..flow import FlowPipe, FlowRule, match
from ..flow.matching import Match
from ..verbs.devx.tir import create_tir
from .acceptor import WANTED, SlotTable

_WORD = (1 << 64) - 1


class Rule(Protocol):
    """A flow rule of a connection."""

    def close(self) -> None:
        """Remove the rule."""
        ...


# Make the rule for a slot, the address and port of its client, a port of the server, and a flow tag.
AddRule = Callable[[int, int, int, int, int], Rule]


class Rules:
    """Makes flow rules in a pipe.

    The TIRs of the queues are created once. Otherwise the first rule to a queue would create one, and the last close
    it.
    """

    def __init__(self, pipe: FlowPipe, queues: Sequence[CyclicRxq], address: IPv4Address, undo: ExitStack):
        self._pipe = pipe
        self._ways = [create_tir(pipe.ctx, (queue,), inline_rqn=queue.rqn) for queue in queues]
        for way in self._ways:
            undo.callback(way.close)
        to_us = match.ipv4(src="0.0.0.0", dst=address) & match.tcp(src=0, dst=0)
        self._mask, self._value = to_us.mask, to_us.value
        ones = match.ipv4(src="0.0.0.1"), match.tcp(src=1), match.tcp(dst=1)
        self._units = [one.value & to_us.mask & ~to_us.value for one in ones]

    def add(self, slot: int, source: int, sport: int, dport: int, tag: int) -> FlowRule:
        """Add the rule of a connection. The result equals a match of addresses and ports, but is computed faster."""
        value = self._value
        for unit, number in zip(self._units, (source, sport, dport), strict=True):
            value |= unit * number
        return self._pipe.add(
            Match(self._mask, value, text=f"HTTP connection {tag:#x}"), self._ways[slot % len(self._ways)], tag=tag,
            count=False,
        )


class ConnectionRules:
    """The rules of all slots. The thread that calls `follow` makes and removes them."""

    def __init__(self, table: SlotTable, add: AddRule):
        self._table, self._add = table, add
        self._rules: dict[int, Rule] = {}

    def follow(self) -> None:
        """Make the rules that are wanted now, and remove those that are no longer wanted."""
        # A client may have moved from one slot to another. If the first copy shows the new slot, the second one also
        # shows that the client has left the old slot, whose rule is removed first.
        wanted, made = self._table.wanted.copy(), self._table.made
        later = self._table.wanted.copy()
        for slot in np.nonzero(later != made)[0].tolist():
            self._remove(slot)
        for slot in np.nonzero((wanted == later) & (wanted != made))[0].tolist():
            word = int(wanted[slot])
            if word & WANTED:
                self._make(slot, word >> 1)
            made[slot] = word

    def _make(self, slot: int, tag: int) -> None:
        key = int(self._table.slots["key"][slot]) & _WORD
        try:
            self._rules[slot] = self._add(slot, key >> 32, key >> 16 & 0xFFFF, key & 0xFFFF, tag)
        except FullError:
            pass  # the CPU continues to hand its segments over

    def _remove(self, slot: int) -> None:
        if rule := self._rules.pop(slot, None):
            rule.close()

    def close(self) -> None:
        """Remove all rules."""
        for slot in list(self._rules):
            self._remove(slot)
