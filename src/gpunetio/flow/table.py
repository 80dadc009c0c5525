"""A flow table: groups of rules with the same mask, places for their entries, and checks for contradictions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import FullError, InvalidValueError, NoMemoryError
from ..formats.commands import Opcode
from ..formats.flow import FTE_MATCH_PARAM, MissAction
from ..verbs import Context, DevxObject
from .matching import Match

_FIRST_RANGE = 64
_LARGEST_RANGE = 1 << 14


class Placed(Protocol):
    """A rule in a table: its match, and its decision. Rules with different decisions must not overlap."""

    @property
    def match(self) -> Match: ...

    @property
    def decision(self) -> Hashable: ...


# Rules by the common bits of their value, by decision, and by their whole value.
_View = dict[int, dict[Hashable, dict[int, Placed]]]


@dataclass
class _Group:
    """A flow group and its range of indices, from `start` up to but not including `end`."""

    start: int
    end: int
    mask: int
    made: DevxObject
    next: int  # the first index not used so far
    free: list[int] = field(default_factory=list)
    used: int = 0


@dataclass(frozen=True)
class Place:
    """The place of an entry: its group and its index."""

    group: _Group
    index: int

    @property
    def group_id(self) -> int:
        return self.group.made.number


class _Overlaps:
    """An index of a table's rules, by the bits that all their packets share.

    It is keyed by mask and value, and for each pair of masks by the bits they have in common. So finding the rules that
    overlap a new one takes as many look-ups as there are masks.
    """

    def __init__(self) -> None:
        self._rules: dict[int, dict[int, Placed]] = {}  # by mask and value
        self._views: dict[int, dict[int, _View]] = {}  # by mask and common bits

    def check(self, match: Match, decision: Hashable) -> None:
        """Raise InvalidValueError if another rule decides differently about packets that both match."""
        ours, value = match.certain
        if same := self._rules.get(ours, {}).get(value):
            raise InvalidValueError(f"{match}: {same} matches just that already: close it first")
        for mask in self._rules:
            if mask != ours:
                common = mask & ours
                for other, rules in self._view(mask, common).get(value & common, {}).items():
                    if other != decision:
                        raise InvalidValueError(
                            f"{match} overlaps with {next(iter(rules.values()))}, which does something else with "
                            "packets that both match: give one of them another priority (lower numbers come first)"
                        )

    def _view(self, mask: int, common: int) -> _View:
        views = self._views.setdefault(mask, {})
        if common not in views:
            view: _View = {}
            for value, rule in self._rules[mask].items():
                view.setdefault(value & common, {}).setdefault(rule.decision, {})[value] = rule
            views[common] = view
        return views[common]

    def add(self, rule: Placed) -> None:
        mask, value = rule.match.certain
        self._rules.setdefault(mask, {})[value] = rule
        for common, view in self._views.get(mask, {}).items():
            view.setdefault(value & common, {}).setdefault(rule.decision, {})[value] = rule

    def remove(self, rule: Placed) -> None:
        mask, value = rule.match.certain
        del self._rules[mask][value]
        for common, view in self._views.get(mask, {}).items():
            decisions = view[value & common]
            del decisions[rule.decision][value]
            if not decisions[rule.decision]:
                del decisions[rule.decision]
            if not decisions:
                del view[value & common]
        if not self._rules[mask]:
            del self._rules[mask]
            self._views.pop(mask, None)


class FlowTable:
    """A flow table of 2^`log` entries at a level. `name` is for error messages, `miss` is the table that follows it.

    The first group of a mask has `first_range` entries; each further group has as many as all earlier ones together.
    """

    name: str
    level: int
    made: DevxObject

    def __init__(
        self, ctx: Context, name: str, level: int, log: int, undo: ExitStack, *, miss: FlowTable | None = None,
        first_range: int = _FIRST_RANGE,
    ):
        self._ctx, self.name, self.level, self._size = ctx, name, level, 1 << log
        self._first_range = first_range
        self._groups: list[_Group] = []  # in the order of their indices
        self._overlaps = _Overlaps()
        fields = {"level": level, "log_size": log}
        if miss is not None:
            fields |= {"table_miss_action": MissAction.FORWARD, "table_miss_id": miss.number}
        self.made = ctx.devx.create(Opcode.CREATE_FLOW_TABLE, flow_table_context=fields)
        undo.callback(self._close)

    def _close(self) -> None:
        with ExitStack() as steps:
            steps.callback(self.made.close)
            for group in self._groups:
                steps.callback(group.made.close)

    @property
    def number(self) -> int:
        """Return the table_id."""
        return self.made.number

    def set_miss(self, miss: FlowTable) -> None:
        """Send packets that match no entry to another table."""
        context = {"table_miss_action": MissAction.FORWARD, "table_miss_id": miss.number}
        self.made.modify(Opcode.MODIFY_FLOW_TABLE, modify_field_select=1, flow_table_context=context)

    def check(self, match: Match, decision: Hashable) -> None:
        """Raise InvalidValueError if another rule decides differently about packets that both match."""
        self._overlaps.check(match, decision)

    def add(self, rule: Placed) -> None:
        """Add a rule, against which later ones are checked."""
        self._overlaps.add(rule)

    def remove(self, rule: Placed) -> None:
        """Remove a rule from the checks."""
        self._overlaps.remove(rule)

    # --- places ------------------------------------------------------------------------------------------------------

    def reserve(self, match: Match) -> Place:
        """Reserve a free place for an entry. FullError if there is none."""
        group = next((group for group in self._groups if group.mask == match.mask and self._has_room(group)), None)
        if group is None:
            group = self._new_group(match)
        if group.free:
            index = group.free.pop()
        else:
            index = group.next
            group.next += 1
        group.used += 1
        return Place(group, index)

    def free(self, place: Place) -> None:
        """Take back the place of an entry that was removed."""
        place.group.used -= 1
        place.group.free.append(place.index)

    @staticmethod
    def _has_room(group: _Group) -> bool:
        return bool(group.free) or group.next < group.end

    def _new_group(self, match: Match) -> _Group:
        start, end = self._largest_gap()
        if start == end:
            self._drop_empty_groups()
            start, end = self._largest_gap()
        if start == end:
            raise FullError(f"{self.name} is full: it has {self._size} entries, all in use or of other masks' groups")
        has = sum(group.end - group.start for group in self._groups if group.mask == match.mask)
        end = min(end, start + min(max(self._first_range, has), _LARGEST_RANGE))
        try:
            made = self._create_group(match, start, end)
        except NoMemoryError:  # too many groups: those without rules make room
            if not self._drop_empty_groups():
                raise
            made = self._create_group(match, start, end)
        group = _Group(start, end, match.mask, made, next=start)
        self._groups.append(group)
        self._groups.sort(key=lambda group: group.start)
        return group

    def _create_group(self, match: Match, start: int, end: int) -> DevxObject:
        return self._ctx.devx.create(
            Opcode.CREATE_FLOW_GROUP, table_id=self.number, start_flow_index=start, end_flow_index=end - 1,
            match_criteria_enable=match.enable, match_criteria=FTE_MATCH_PARAM.unpack(match.criteria),
        )

    def _largest_gap(self) -> tuple[int, int]:
        return max(self._gaps(), key=lambda gap: gap[1] - gap[0])

    def _gaps(self) -> Iterator[tuple[int, int]]:
        at = 0
        for group in self._groups:
            yield at, group.start
            at = group.end
        yield at, self._size

    def _drop_empty_groups(self) -> bool:
        """Destroy groups without entries. Return whether there were any."""
        empty = [group for group in self._groups if not group.used]
        for group in empty:
            group.made.close()
            self._groups.remove(group)
        return bool(empty)
