"""The flow rules of a NIC, as another process gets them: copies of what the control path has, all of one moment.

Unlike the tables that a NIC publishes, rules are in memory that comes and goes with their flow tables. So whoever wants
them asks, and gets memory of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..state.flow import MATCHED, Fate
from ..state.tables import Table

if TYPE_CHECKING:
    from ..control.control_path import ControlPath

RULES = "flow_rules"  # the table that an answer has if, and only if, the NIC can be asked for rules
_MATCH = f"V{sum(size for _, size in MATCHED)}"  # the words that are compared, in the byte order of mailboxes


def _dtype(numbers: str, match: str = "") -> np.dtype:
    return np.dtype([(name, "<i8") for name in numbers.split()] + ([(match, _MATCH)] if match else []))


# The first field of each is not 0. `room` is how many entries a table can have; `miss` is the table behind it, or 0.
TABLE = _dtype("table_id root level room miss")
GROUP = _dtype("table_id group_id start end", "mask")
# `target` is the number of a TIR or a table, as `fate` (state.flow.Fate) says. `counter` is 0 without one.
RULE = _dtype("table_id group_id index fate target tag counter packets octets", "value")
# Either `rqn` or `rqtn` is 0. `fields` are formats.ethernet.HashField, 0 without a hash.
TIR = _dtype("tirn rqn rqtn fields symmetric")
RQT = _dtype("rqtn rqn")  # a row for each entry, in order


def rules_of(control: ControlPath) -> dict[str, np.ndarray]:
    """Return the rules of a NIC, and what leads to them and where they lead. The caller holds the NIC's lock."""
    flows = control.flow_tables
    tables, groups, rules = [], [], []
    for table in flows.known.values():
        tables.append((table.number, table.number == flows.root, table.level, 1 << table.log, table.miss))
        starts = sorted((group.start, number) for number, group in table.groups.items())
        groups += [
            (table.number, number, start, table.groups[number].end, np.void(table.groups[number].words.tobytes()))
            for start, number in starts
        ]
        rows, words = table.rules.read()
        made = np.zeros(len(rows), RULE)
        made["table_id"], made["index"], made["tag"] = table.number, rows["index"], rows["tag"]
        if len(rows):
            owner = np.searchsorted([start for start, _ in starts], rows["index"], side="right") - 1
            made["group_id"] = np.array([number for _, number in starts])[owner]
        made["fate"] = rows["fate"]
        for fate, objects in ((Fate.TIR, control.tirs.table), (Fate.JUMP, flows.table)):
            some = rows["fate"] == fate
            made["target"][some] = _numbers(objects, rows["target"][some])
        counted = rows["counter"] != 0
        counts = control.flow_counters.read(_numbers(control.flow_counters.table, rows["counter"][counted]))
        made["counter"][counted], made["packets"][counted], made["octets"][counted] = counts
        made["value"] = words.view(_MATCH).reshape(-1) if len(rows) else []
        rules.append(made)
    tirs = [
        (row["tirn"], _number(control.rqs.table, row["rq"]), _number(control.rqts.table, row["rqt"]), row["fields"],
         row["symmetric"])
        for row in control.tirs.table
    ]  # fmt: skip
    rqts = [(int(row["rqtn"]), rqn) for row in control.rqts.table for rqn in control.rqts.rqns_of(int(row["rqtn"]))]
    return {
        "flow_tables": np.array(tables, TABLE), "flow_groups": np.array(groups, GROUP),
        RULES: np.concatenate(rules) if rules else np.zeros(0, RULE),
        "tirs": np.array(tirs, TIR), "rqts": np.array(rqts, RQT),
    }  # fmt: skip


def _numbers(table: Table, addresses: np.ndarray) -> np.ndarray:
    """Return the numbers of the rows at these addresses."""
    return table.rows[table.entry.dtype.names[0]][(addresses - table.address) // table.entry.size]  # type: ignore[index]


def _number(table: Table, address: int) -> int:
    """Return the number of the row at an address; 0 for 0."""
    return int(_numbers(table, np.array([address]))[0]) if address else 0
