"""The flow rules of a NIC as other processes see them: copies of the control path's rules, all from one moment.

Unlike the tables that a NIC publishes, rules lie in memory that is allocated and freed with their flow tables.
Therefore a process requests the rules, and gets a copy of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..state.flow import MATCHED, Fate
from ..state.tables import Table

if TYPE_CHECKING:
    from ..control.control_path import ControlPath
    from ..control.flow.tables import FlowTable

RULES = "flow_rules"
_MATCH = f"V{sum(size for _, size in MATCHED)}"  # the compared words, in the byte order of mailboxes


def _dtype(numbers: str, match: str = "") -> np.dtype:
    return np.dtype([(name, "<i8") for name in numbers.split()] + ([(match, _MATCH)] if match else []))


# The first field of each row is not 0. `room` is a table's capacity in entries, `miss` the table after a miss, or 0.
TABLE = _dtype("table_id root level room miss")
GROUP = _dtype("table_id group_id start end", "mask")
# `fate` (state.flow.Fate) says whether `target` is the number of a TIR or of a table. `counter` is 0 without a counter.
RULE = _dtype("table_id group_id index fate target tag counter packets octets", "value")
# Either `rqn` or `rqtn` is 0. `fields` are formats.ethernet_queues.HashField, 0 without a hash.
TIR = _dtype("tirn rqn rqtn fields symmetric")
RQT = _dtype("rqtn rqn")  # one row per entry of an RQT, in order
TABLES = {"flow_tables": TABLE, "flow_groups": GROUP, RULES: RULE, "tirs": TIR, "rqts": RQT}


def rules_of(control: ControlPath) -> dict[str, np.ndarray]:
    """Return copies of a NIC's flow tables, rules, counters, TIRs and RQTs. The caller holds the NIC's lock."""
    flows = control.flow_tables
    groups = [
        (table.number, number, group.start, group.end, np.void(group.words.tobytes()))
        for table in flows.known.values() for number, group in table.groups.items()
    ]
    tirs = [
        (row["tirn"], _number(control.rqs.table, row["rq"]), _number(control.rqts.table, row["rqt"]), row["fields"],
         row["symmetric"])
        for row in control.tirs.table
    ]
    rows = {
        "flow_tables": [
            (table.number, table.number == flows.root, table.level, 1 << table.log, table.miss)
            for table in flows.known.values()
        ],
        "flow_groups": groups, "tirs": tirs,
        "rqts": [
            (int(row["rqtn"]), rqn)
            for row in control.rqts.table for rqn in control.rqts.rqns_of(int(row["rqtn"]))
        ],
    }
    rules = [np.zeros(0, RULE), *(_rules_in(table, control) for table in flows.known.values())]
    return {name: np.array(listed, TABLES[name]) for name, listed in rows.items()} | {RULES: np.concatenate(rules)}


def _rules_in(table: FlowTable, control: ControlPath) -> np.ndarray:
    """Return the rules of a flow table, ordered by index."""
    entries, words = table.rules.read()
    rules = np.zeros(len(entries), RULE)
    if not len(entries):
        return rules
    for name in ("index", "fate", "tag"):
        rules[name] = entries[name]
    starts, numbers = zip(*sorted((group.start, number) for number, group in table.groups.items()))
    rules["table_id"] = table.number
    rules["group_id"] = np.array(numbers)[np.searchsorted(starts, entries["index"], side="right") - 1]
    for fate, objects in ((Fate.TIR, control.tirs.table), (Fate.JUMP, control.flow_tables.table)):
        some = entries["fate"] == fate
        rules["target"][some] = _numbers(objects, entries["target"][some])
    counted, counters = entries["counter"] != 0, control.flow_counters
    counts = counters.read(_numbers(counters.table, entries["counter"][counted]))
    rules["counter"][counted], rules["packets"][counted], rules["octets"][counted] = counts
    rules["value"] = words.view(_MATCH).reshape(-1)
    return rules


def _numbers(table: Table, addresses: np.ndarray) -> np.ndarray:
    """Return the numbers of the rows at these addresses."""
    return table.rows[table.entry.dtype.names[0]][(addresses - table.address) // table.entry.size]  # type: ignore[index]


def _number(table: Table, address: int) -> int:
    """Return the number of the row at an address; 0 for 0."""
    return int(_numbers(table, np.array([address]))[0]) if address else 0
