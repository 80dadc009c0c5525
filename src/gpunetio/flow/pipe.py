"""Pipes and their rules (`doca_flow_pipe`, `doca_flow_pipe_entry`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from enum import IntEnum

from ..arguments import instance, member, within
from ..errors import BadStateError, InUseError, InvalidValueError
from ..verbs import Handle
from ..verbs.handle import listed
from .counters import Counter, Counters, FlowCount
from .entry import Forward, change_entry, set_entry
from .matching import Match, name_of
from .table import FlowTable
from .targets import Stage, Target, To

_LAST_TAG = (1 << 24) - 1  # flow_context.flow_tag
_EVERYTHING = Match()


class PipeType(IntEnum):
    """enum doca_flow_pipe_type, limited to the types supported here. The numbers are gpunetio's."""

    BASIC   = 0
    CONTROL = 1


class FlowRule(Handle):
    """A rule: it sends the packets that `match` to the destination `to`. Closing it removes it. A context manager.

    Once `close()` has returned, no packet takes the rule any more. `priority` is its priority within the pipe, lowest
    first; `tag` is the flow tag in completions.
    """

    _rank = 0
    match: Match
    to: str
    priority: int
    tag: int
    decision: Forward | None
    pipe: FlowPipe

    def __init__(self, pipe: FlowPipe, match: Match, to: To, priority: int, tag: int, count: bool):
        super().__init__(pipe.ctx)
        self.pipe, self.match, self.priority = pipe, match, priority
        self.tag = within("tag", tag, 0, _LAST_TAG)
        self._counter: Counter | None = None
        port = pipe.port
        with port.lock, ExitStack() as undo:
            pipe.check_open()
            target = pipe.lead(to, undo)
            self.to = target.text
            self._use(port, *target.uses)
            forward = target.forward
            if forward is None and self.tag:
                raise InvalidValueError(f"tag = {self.tag}: a packet that is dropped gets no tag")
            if forward is not None:
                forward = Forward(forward.kind, forward.number, self.tag)
            self.decision = forward
            table = pipe.table(priority)
            table.check(match, forward)
            if count:
                self._counter = port.counters.take()
                undo.callback(port.counters.give_back, self._counter)
            place = table.reserve(match)
            undo.callback(table.free, place)
            number = self._counter.number if self._counter else None
            made = set_entry(self.ctx, table.number, place, match, forward, number)
            undo.callback(made.close)
            table.add(self)
            undo.callback(table.remove, self)
            pipe.rules[self] = None
            undo.callback(pipe.rules.pop, self)
            where = f", priority {priority}" if priority else ""
            self._opened(f"rule {match} → {self.to}{where}", undo)

    def _details(self) -> Iterable[str]:
        yield f"of {self.pipe}"
        if self.tag:
            yield f"tag {self.tag}"

    @property
    def counter(self) -> FlowCount:
        """Return the packets and octets that took the rule so far (`doca_flow_resource_query_entry`).

        BadStateError if the rule is closed, or was made with count=False.
        """
        with self.pipe.port.lock:
            self.check_open()
            if self._counter is None:
                raise BadStateError(f"{self} was made with count=False")
            return self._counter.read()

    def close_with_owner(self) -> None:
        """Remove the rule."""
        with self.pipe.port.lock:
            super().close_with_owner()


class Port(Handle, ABC):
    """A port, as its pipes use it.

    `lock` is held while rules are added and removed. Tables have 2^`log_size` entries and levels up to `top_level`.
    `rules` is the pipe that leads to the root pipe.
    """

    lock: threading.RLock
    counters: Counters
    log_size: int
    top_level: int
    rules: Stage

    @property
    @abstractmethod
    def default_miss(self) -> To:
        """Return the destination of packets that no rule takes."""

    @abstractmethod
    def target(self, to: To) -> Target:
        """Return a rule's destination in the form that its entry needs."""

    @abstractmethod
    def leave_root(self, pipe: FlowPipe) -> None:
        """Stop sending packets to a root pipe that is closing."""


class FlowPipe(Stage):
    """A pipe: rules, and a destination for packets that match none of them (`doca_flow_pipe_create`).

    All rules of a BASIC pipe compare the same bits; each rule of a CONTROL pipe has its own match and priority. Packets
    enter a pipe through a rule or miss that leads to it, or because it is its port's root pipe. Closing a pipe closes
    its rules; InUseError while another pipe leads to it.
    """

    _rank = 1
    port: Port
    name: str
    kind: PipeType
    match: Match

    def __init__(
        self, port: Port, name: str, kind: PipeType, match: Match | None, to: To | None, miss: To | None
    ):
        super().__init__(port.ctx)
        self.port, self.name = port, name
        self.kind = member("kind", kind, PipeType)
        if (match is None) != (self.kind is PipeType.CONTROL):
            raise InvalidValueError(
                f"match = {match}: a BASIC pipe takes a match, a CONTROL pipe none: each of its rules has its own"
            )
        self.match = instance("match", _EVERYTHING if match is None else match, Match)
        self._to = to
        self.rules: dict[FlowRule, None] = {}
        self._tables: dict[int, FlowTable] = {}  # by priority
        self._leads: list[FlowPipe] = []  # pipes that this one leads to, one entry per rule
        with port.lock, ExitStack() as undo:
            self._use(port)
            self._counter = port.counters.take()
            undo.callback(port.counters.give_back, self._counter)
            self._undo_miss = ExitStack()
            undo.callback(lambda: self._undo_miss.close())
            target = self.lead(port.default_miss if miss is None else miss, self._undo_miss)
            self._miss_uses = target.uses
            self._use(*target.uses)
            self._last = FlowTable(self.ctx, f"pipe {name}", port.top_level - 1, 0, undo)
            self._place = self._last.reserve(_EVERYTHING)
            self._entry = set_entry(
                self.ctx, self._last.number, self._place, _EVERYTHING, target.forward, self._counter.number
            )
            undo.callback(self._entry.close)
            self._tables_undo = undo.enter_context(ExitStack())
            self.table(0)
            self._opened(f"pipe {name}", undo)

    def _details(self) -> Iterable[str]:
        yield self.kind.name
        if self.kind is PipeType.BASIC:
            yield str(self.match)
        yield f"{len(self.rules)} rules"

    @property
    def number(self) -> int:
        return self._tables[0].number

    @property
    def entrance(self) -> int:
        """Return the provider's handle of the table where packets enter the pipe."""
        return self._tables[0].made.devx_handle

    @property
    def leads_on(self) -> bool:
        """Return whether packets can go from this pipe to other pipes."""
        return bool(self._leads)

    @property
    def missed(self) -> FlowCount:
        """Return the packets and octets so far that matched no rule (`doca_flow_resource_query_pipe_miss`)."""
        with self.port.lock:
            self.check_open()
            return self._counter.read()

    # --- rules -------------------------------------------------------------------------------------------------------

    def add(
        self, match: Match | None = None, to: To | None = None, *, priority: int = 0, tag: int = 0, count: bool = True
    ) -> FlowRule:
        """Add a rule (`doca_flow_pipe_basic_add_entry`, `doca_flow_pipe_control_add_entry`). It is active on return.

        In a BASIC pipe, `match` gives the values for the pipe's PER_ENTRY fields, and `to` defaults to the pipe's own.
        In a CONTROL pipe, each rule has both, and the rule with the lowest `priority` decides. `count=False` saves a
        counter. InvalidValueError for a match that does not fit the pipe, or that contradicts another rule of the same
        priority; FullError if there is no room.
        """
        self.check_open()
        to = self._to if to is None else to
        if to is None:
            raise InvalidValueError(f"to = None: {self} has no target of its own, so each rule has one")
        if self.kind is PipeType.BASIC:
            if priority:
                raise InvalidValueError(f"priority = {priority}: only rules of a CONTROL pipe have one")
            match = self._filled(match)
        else:
            if instance("match", match, Match).open:  # type: ignore[arg-type]
                raise InvalidValueError(f"{match}: PER_ENTRY belongs into the match of a BASIC pipe")
            priority = within("priority", priority, 0, self.port.top_level - 2)
        assert match is not None
        return FlowRule(self, match, to, priority, tag, count)

    def _filled(self, match: Match | None) -> Match:
        """Return the pipe's match, filled with a rule's values."""
        ours, given = self.match, _EVERYTHING if match is None else instance("match", match, Match)
        if given.open:
            raise InvalidValueError(f"{given}: a rule has values, not PER_ENTRY")
        if others := given.mask & ~ours.mask:
            raise InvalidValueError(f"{given}: {self} does not compare {_field(others)}: it matches {ours}")
        if missing := ours.open & ~given.mask:
            raise InvalidValueError(f"{given}: {self} matches {ours}: give {_field(missing)}")
        if wrong := (given.value ^ ours.value) & given.mask & ~ours.open:
            raise InvalidValueError(f"{given}: {_field(wrong)} is not that of {self}, which matches {ours}")
        return Match(ours.mask, ours.value | given.value & ours.open, text=given.text if given.mask else ours.text)

    def lead(self, to: To, undo: ExitStack) -> Target:
        """Return the target of a rule or of this pipe's miss. `undo` releases it."""
        target = self.port.target(to)
        undo.callback(target.release)
        for pipe in (used for used in target.uses if isinstance(used, FlowPipe)):
            if pipe not in self._leads and pipe.reaches(self):
                raise InvalidValueError(f"{self} cannot lead to {pipe}, which leads back to it: packets would go round")
            self._leads.append(pipe)
            undo.callback(self._leads.remove, pipe)
        return target

    def reaches(self, other: FlowPipe) -> bool:
        """Return whether packets can get from this pipe to `other`."""
        seen: set[FlowPipe] = {self}
        left: list[FlowPipe] = [self]
        while left:
            pipe = left.pop()
            if pipe is other:
                return True
            new = set(pipe._leads) - seen
            seen |= new
            left.extend(new)
        return False

    def table(self, priority: int) -> FlowTable:
        """Return the table for rules of a priority. The first such rule creates the table, which then stays."""
        if priority not in self._tables:
            later = min((p for p in self._tables if p > priority), default=None)
            behind = self._last if later is None else self._tables[later]
            with ExitStack() as undo:
                name = f"priority {priority} of pipe {self.name}"
                made = FlowTable(self.ctx, name, priority, self.port.log_size, undo, miss=behind)
                before = max((p for p in self._tables if p < priority), default=None)
                if before is not None:
                    self._tables[before].set_miss(made)
                    undo.callback(self._tables[before].set_miss, behind)
                self._tables[priority] = made
                undo.callback(self._tables.pop, priority)
                self._tables_undo.push(undo.pop_all())
        return self._tables[priority]

    # --- the miss ----------------------------------------------------------------------------------------------------

    def update_miss(self, to: To) -> None:
        """Change the destination of packets that match no rule, atomically (`doca_flow_pipe_update_miss`)."""
        with self.port.lock, ExitStack() as undo:
            self.check_open()
            target = self.lead(to, undo)
            change_entry(
                self._entry, self._last.number, self._place, _EVERYTHING, target.forward, self._counter.number
            )
            before, self._undo_miss = self._undo_miss, undo.pop_all()
            self._exchange(self._miss_uses, target.uses)
            self._miss_uses = target.uses
            before.close()

    # --- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the pipe and its rules. InUseError while another pipe leads to it."""
        with self.port.lock:
            if self.closed:
                return
            if others := [user for user in self.users if user is not self.port.rules]:
                raise InUseError(f"{self} is still used by {listed(others)}: close that first")
            if self.users:
                self.port.leave_root(self)
            super().close()

    def close_with_owner(self) -> None:
        """Close the pipe and its rules without checks."""
        with self.port.lock, ExitStack() as steps:
            steps.callback(super().close_with_owner)
            for rule in reversed(list(self.rules)):
                steps.callback(rule.close_with_owner)


def _field(bits: int) -> str:
    return name_of(bits).rpartition(".")[2]
