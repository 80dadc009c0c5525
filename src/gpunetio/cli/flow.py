"""`gpunetio flow`: the flow tables of running software NICs, their rules, and the counts of these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from .click_types import Number
from .failures import guarded
from .running import console, nobody, print_table, selection, wide_option

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ..nic.observe.running import Observed
    from .flow_words import Compared

_LIMIT, _QUEUES = 100, 4  # rules of a table, and queues of a rule, that are shown
_COLUMNS = (
    ("order", True), ("match", False), ("to", False), ("tag", True), ("counter", True), ("packets", True),
    ("bytes", True), ("group", True),
)
_MATTER = 7  # columns that are shown unless more are wanted


@click.command()
@click.option("--table", "wanted", type=Number(), metavar="N", help="Only the table N (decimal, or 0x…).")
@click.option(
    "--limit", type=click.IntRange(0), metavar="N",
    help=f"Show at most N rules of each table.  [default: {_LIMIT}; with --json, all]",
)
@selection
@wide_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@guarded
def flow(
    wanted: int | None, limit: int | None, device: str | None, pid: int | None, wide: bool, as_json: bool
) -> None:
    """Show the flow tables of running software NICs: their rules in order, where these lead, and their counters."""
    nics = [Rules(nic) for nic in _ask(device, pid)]
    if wanted is not None and not any(wanted in nic.tables for nic in nics):
        _unknown(wanted, nics)
    if as_json:
        click.echo(json.dumps([nic.document(wanted, limit) for nic in nics], indent=2))
        return
    out = console()
    for nic in nics:
        nic.show(out, wanted, _LIMIT if limit is None else limit, len(_COLUMNS) if wide else _MATTER)


def _ask(device: str | None, pid: int | None) -> list[Observed]:
    """Return the selected NICs with their rules. NotFoundError without any, NotSupportedError without Ethernet."""
    from ..errors import NotFoundError, NotSupportedError
    from ..nic.observe.running import rules, running

    nics = rules(device, pid)
    if not nics:
        if silent := running(device, pid):
            who = ", ".join(f"{nic.name} in process {nic.pid}" for nic in silent)
            raise NotFoundError(f"{who}: no answer about flow rules; it is busy with a command, or another release")
        raise NotFoundError(nobody(device, pid))
    if all(nic.no_ethernet for nic in nics):
        why = "; ".join(f"{nic.name} in process {nic.pid}: {nic.no_ethernet}" for nic in nics)
        raise NotSupportedError(f"flow tables need an Ethernet port: {why}")
    return nics


def _unknown(wanted: int, nics: list[Rules]) -> None:
    from ..errors import NotFoundError

    known = "; ".join(
        f"{nic.name} in process {nic.pid} has {', '.join(map(hex, nic.tables)) or 'none'}" for nic in nics
    )
    raise NotFoundError(f"there is no flow table {wanted:#x}: {known}")


@dataclass(frozen=True)
class Target:
    """The target of a rule or a miss: its kind, its number, and the RQs among which a hash of `fields` chooses."""

    kind: str  # drop, table, tir, or kernel: a table that leaves everything to the NIC
    number: int = 0
    rqns: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "tir":
            rqns = [*dict.fromkeys(self.rqns)]
            queues = ", ".join(map(hex, rqns[:_QUEUES])) + (f", … ({len(rqns)})" if len(rqns) > _QUEUES else "")
            return f"TIR {self.number:#x}: RQ {queues}" + (f" by {', '.join(self.fields)}" if self.fields else "")
        if self.kind == "kernel":
            return f"kernel (table {self.number:#x})" if self.number else "kernel"
        return f"table {self.number:#x}" if self.kind == "table" else self.kind

    def document(self) -> dict[str, object]:
        """Return the document that --json prints."""
        return {"kind": self.kind, "number": self.number, "rqns": [*self.rqns], "hash": [*self.fields]}


def _masks(groups: list[np.void]) -> dict[int, bytes]:
    return {int(group["group_id"]): bytes(group["mask"]) for group in groups}


def _check(nic: Observed) -> None:
    """Refuse tables of another process that do not have the form of `observe.rules`, or that are inconsistent."""
    from ..errors import InvalidValueError
    from ..nic.observe.rules import TABLES

    others = [name for name, dtype in TABLES.items() if nic.tables[name].dtype != dtype]
    problem = f"other columns in {', '.join(others)}: use the same release" if others else _misfit(nic.tables)
    if problem:
        raise InvalidValueError(f"{nic.name} in process {nic.pid} sent rules that do not fit together: {problem}")


def _misfit(rows: Mapping[str, np.ndarray]) -> str:
    """Return what is inconsistent; "" if nothing is."""
    from ..nic.state.flow import Fate

    rules, groups = rows["flow_rules"], rows["flow_groups"]
    in_groups = {*zip(groups["table_id"].tolist(), groups["group_id"].tolist())}
    if not {*zip(rules["table_id"].tolist(), rules["group_id"].tolist())} <= in_groups:
        return "a rule belongs to no group"
    if not {*groups["table_id"].tolist()} <= {*rows["flow_tables"]["table_id"].tolist()}:
        return "a group belongs to no table"
    if not {*rules["fate"].tolist()} <= {Fate.TIR, Fate.DROP, Fate.JUMP}:
        return f"a rule's fate is none of {Fate.TIR:d}, {Fate.DROP:d} and {Fate.JUMP:d}"
    if not {*rules[rules["fate"] == Fate.TIR]["target"].tolist()} <= {*rows["tirs"]["tirn"].tolist()}:
        return "a rule leads to a TIR that is not there"
    return ""


class Rules:
    """The rules of a NIC at one moment. `tables` are its flow tables by number, in the order of packets' paths."""

    name: str
    pid: int
    tables: dict[int, np.void]

    def __init__(self, nic: Observed):
        self.name, self.pid, self._no_ethernet = nic.name, nic.pid, nic.no_ethernet
        _check(nic)
        rows = nic.tables
        tables = {int(row["table_id"]): row for row in rows["flow_tables"]}
        self._groups, self._rules = rows["flow_groups"], rows["flow_rules"]
        self._count = {number: int((self._rules["table_id"] == number).sum()) for number in tables}
        self._tirs = {int(row["tirn"]): row for row in rows["tirs"]}
        self._rqts: dict[int, list[int]] = {}
        for row in rows["rqts"]:
            self._rqts.setdefault(int(row["rqtn"]), []).append(int(row["rqn"]))
        self._root = next((number for number, row in tables.items() if row["root"]), 0)
        self._empty = {number for number, row in tables.items() if not row["miss"] and not self._count[number]}
        self.tables = {number: tables[number] for number in self._walk(tables)}

    def _walk(self, tables: dict[int, np.void]) -> Iterable[int]:
        """Return the numbers of all tables: the root, its miss table, the targets of its rules …; others last."""
        from ..nic.state.flow import Fate

        order: dict[int, None] = {}
        todo = [*sorted(tables, reverse=True), self._root]
        while todo:
            number = todo.pop()
            if number not in tables or number in order:
                continue
            order[number] = None
            jumps = self._rules[(self._rules["table_id"] == number) & (self._rules["fate"] == Fate.JUMP)]["target"]
            todo += [*reversed([*dict.fromkeys(jumps.tolist())]), int(tables[number]["miss"])]
        return order

    def _target(self, rule: np.void) -> Target:
        from ..formats.ethernet_queues import HashField
        from ..nic.state.flow import Fate

        fate, number = int(rule["fate"]), int(rule["target"])
        if fate == Fate.TIR:
            tir = self._tirs[number]
            rqns = self._rqts.get(int(tir["rqtn"]), [int(tir["rqn"])])
            hashed = tuple((bit.name or "").lower() for bit in HashField if tir["fields"] & bit)
            return Target("tir", number, tuple(rqns), hashed)
        return self._table(number) if fate == Fate.JUMP else Target("drop")

    def _table(self, number: int) -> Target:
        """Return a table as a target. If there is none, or an empty one, packets go where they go without rules."""
        return Target("kernel" if number == 0 or number in self._empty else "table", number)

    def _shown(self, wanted: int | None) -> list[int]:
        return [number for number in self.tables if wanted in (None, number)]

    def _some(self, number: int, limit: int | None) -> list[np.void]:
        """Return the first rules of a table, in the order of their precedence."""
        return [*self._rules[self._rules["table_id"] == number][:limit]]

    def _groups_of(self, number: int) -> list[np.void]:
        return [*self._groups[self._groups["table_id"] == number]]

    @staticmethod
    def _match(rule: np.void, masks: dict[int, bytes]) -> list[Compared]:
        from .flow_words import compared

        return compared(masks[int(rule["group_id"])], bytes(rule["value"]))

    @staticmethod
    def _mask(group: np.void) -> list[Compared]:
        from .flow_words import compared

        return compared(bytes(group["mask"]))

    # --- text ------------------------------------------------------------------------------------------------------

    def show(self, out: Console, wanted: int | None, limit: int, columns: int) -> None:
        """Print the tables with at most `limit` rules of each, and the first `columns` columns of these."""
        echo = out.print
        head = f"{self.name}, process {self.pid}: "
        if self._no_ethernet:
            echo(f"{head}no flow tables: {self._no_ethernet}")
            return
        shown = self._shown(wanted)
        begin = f"packets begin in table {self._root:#x}" if self._root else "no table is the root"
        echo(f"{head}{len(self.tables)} flow tables, {len(self._rules)} rules; {begin}")
        for number in shown:
            self._show_table(out, number, limit, columns)

    def _show_table(self, out: Console, number: int, limit: int, columns: int) -> None:
        echo = out.print
        row, groups = self.tables[number], self._groups_of(number)
        root = " (root)" if number == self._root else ""
        echo("")
        echo(
            f"table {number:#x}{root}: level {row['level']}, {self._count[number]} of {row['room']} rules; "
            f"no match: {self._table(int(row['miss']))}"
        )
        masks = _masks(groups)
        for group in groups:
            fields = ", ".join(field.field for field in self._mask(group)) or "nothing"
            echo(f"  group {group['group_id']} ({group['start']} … {group['end']}) compares {fields}")
        rules = self._some(number, limit)
        if rules:
            print_table(out, _COLUMNS[:columns], [self._cells(rule, masks)[:columns] for rule in rules])
        if left := self._count[number] - len(rules):
            echo(f"  {left} of {self._count[number]} rules left out: --limit {self._count[number]} shows all")

    def _cells(self, rule: np.void, masks: dict[int, bytes]) -> tuple[str, ...]:
        counter, tag = int(rule["counter"]), int(rule["tag"])
        counted = (f"{counter:#x}", str(rule["packets"]), str(rule["octets"])) if counter else ("", "", "")
        match = ", ".join(map(str, self._match(rule, masks))) or "all packets"
        return (
            str(rule["index"]), match, str(self._target(rule)), str(tag) if tag else "", *counted, str(rule["group_id"])
        )

    # --- JSON ------------------------------------------------------------------------------------------------------

    def document(self, wanted: int | None, limit: int | None) -> dict[str, object]:
        """Return the document that --json prints."""
        return {
            "device": self.name, "pid": self.pid, "no_ethernet": self._no_ethernet or None, "root": self._root or None,
            "tables": [self._table_document(number, limit) for number in self._shown(wanted)],
        }

    def _table_document(self, number: int, limit: int | None) -> dict[str, object]:
        row, groups, rules = self.tables[number], self._groups_of(number), self._some(number, limit)
        masks = _masks(groups)
        return {
            "table": number, "level": int(row["level"]), "room": int(row["room"]),
            "miss": self._table(int(row["miss"])).document(),
            "groups": [
                {"group": int(group["group_id"]), "first": int(group["start"]), "last": int(group["end"]),
                 "mask": {one.name: one.values[1] for one in self._mask(group)}}
                for group in groups
            ],
            "rules": [self._rule_document(rule, masks) for rule in rules],
            "rules_left_out": self._count[number] - len(rules),
        }

    def _rule_document(self, rule: np.void, masks: dict[int, bytes]) -> dict[str, object]:
        counter = int(rule["counter"])
        return {
            "order": int(rule["index"]), "group": int(rule["group_id"]),
            "match": {one.name: dict(zip(("value", "mask"), one.values)) for one in self._match(rule, masks)},
            "to": self._target(rule).document(), "tag": int(rule["tag"]),
            "counter": {"number": counter, "packets": int(rule["packets"]), "bytes": int(rule["octets"])}
            if counter else None,
        }
