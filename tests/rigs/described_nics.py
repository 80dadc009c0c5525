"""Descriptions of NICs that run in other processes, with the memory of their tables, and everything shown of them."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from gpunetio.cli.flow import Rules
from gpunetio.cli.prometheus import exposition
from gpunetio.cli.stat import _Sample
from gpunetio.memory import sealed_memory
from gpunetio.nic.observe import rules
from gpunetio.nic.observe.kinds import KINDS
from gpunetio.nic.observe.publish import copies
from gpunetio.nic.observe.running import Observed
from gpunetio.nic.observe.words import cells, columns, details, document, number_of
from gpunetio.nic.state import cq, objects, qp, srq, wire
from gpunetio.nic.state import ethernet_queues as ethernet
from gpunetio.nic.state.counters import COUNTERS
from gpunetio.nic.state.flow import Fate

_ROWS = {
    "qps": qp.QP_ROW, "cqs": cq.CQ_ROW, "srqs": srq.SRQ_ROW, "mkeys": objects.MKEY_ROW, "pds": objects.PD_ROW,
    "umems": objects.UMEM_ROW, "uar_pages": objects.UAR_ROW, "eqs": cq.EQ_ROW, "gids": objects.GID_ROW,
    "sqs": ethernet.SQ_ROW, "rqs": ethernet.RQ_ROW, "wires": wire.WIRE, "counters": COUNTERS,
}
_ROOM = 1 << 14


def _with_memory(tables: dict[str, np.ndarray], **more: object) -> bytes:
    described, (fd,) = copies(tables)
    memory = os.pread(fd, sum(rows.nbytes for rows in tables.values()), 0)
    os.close(fd)
    return json.dumps({
        "name": "soft0", "addresses": ["127.0.0.1"], "listening": ["127.0.0.1"], **described, **more,
        "memory": memory.hex(),
    }).encode()


def nic() -> bytes:
    """A NIC with one object of each kind."""
    tables = {name: np.zeros(1, row.dtype) for name, row in _ROWS.items()}
    for name, rows in tables.items():
        rows[next(iter(_ROWS[name].offsets))] = 1  # its number
        if name == "gids":
            rows["gid"] = np.void(bytes(range(16)))
    return _with_memory(tables)


def flow_rules() -> bytes:
    """A NIC with two flow tables, and rules of all fates."""
    words = int(rules.GROUP["mask"].itemsize)
    mask, value = np.void(b"\xff" * words), np.void(bytes(words))
    return _with_memory({
        "flow_tables": np.array([(1, 1, 0, 8, 2), (2, 0, 1, 8, 0)], rules.TABLE),
        "flow_groups": np.array([(1, 1, 0, 3, mask), (1, 2, 4, 7, value)], rules.GROUP),
        rules.RULES: np.array([
            (1, 1, 0, Fate.TIR, 5, 7, 1, 10, 1000, value), (1, 1, 1, Fate.JUMP, 2, 0, 0, 0, 0, value),
            (1, 2, 4, Fate.DROP, 0, 0, 0, 0, 0, value), (1, 2, 5, Fate.TIR, 6, 0, 0, 0, 0, value),
        ], rules.RULE),
        "tirs": np.array([(5, 0, 3, 0xF, 0), (6, 9, 0, 0, 0)], rules.TIR),
        "rqts": np.array([(3, 8), (3, 9)], rules.RQT),
    }, no_ethernet="")


class _Screen:
    """What rich's console is to `gpunetio flow`, without the work of laying out tables."""

    width = 80

    def print(self, shown: object) -> None:
        str(shown).encode()


class Reader:
    """Maps what a description describes, and reads it as the command line does."""

    def __init__(self) -> None:
        self._fd = sealed_memory(_ROOM, "a NIC")

    def _observed(self, data: bytes) -> Observed:
        try:
            described: dict[str, Any] = json.loads(data)
            memory = bytes.fromhex(described.pop("memory"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # not under test here
            described, memory = {}, b""
        os.pwrite(self._fd, memory[:_ROOM].ljust(_ROOM, b"\0"), 0)
        return Observed(9, described, [self._fd])

    def nic(self, data: bytes) -> None:
        """Show all objects of a NIC, and its counters."""
        with self._observed(data) as found:
            f"{found} {found.name}".encode()
            exposition([found]).encode()
            sample = _Sample.of(found, None)
            str([sample.addresses, *sample.rows(True)]).encode()
            for kind, table in KINDS.items():
                fields = columns(kind, found)
                for row in found.tables[table]:
                    shown = [hex(number_of(found, kind, row)), *cells(kind, found, row, fields)]
                    "".join([*shown, details(kind, found, row), *(heading for heading, _ in fields)]).encode()
                    json.dumps(document(kind, found, row), ensure_ascii=False).encode()

    def flow_rules(self, data: bytes) -> None:
        """Show the flow tables of a NIC."""
        with self._observed(data) as found:
            rules = Rules(found)
            rules.show(_Screen(), None, 100, 8)  # type: ignore[arg-type]
            json.dumps(rules.document(None, None), ensure_ascii=False).encode()
