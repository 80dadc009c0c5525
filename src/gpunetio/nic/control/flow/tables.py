"""Flow tables: CREATE_FLOW_TABLE, MODIFY_FLOW_TABLE, QUERY_FLOW_TABLE, DESTROY_FLOW_TABLE, SET_FLOW_TABLE_ROOT."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ....formats import flow
from ....formats.commands import CapClass, Opcode, Status
from ....formats.flow import FlowTableType, MissAction, RootChange, TableModify
from ....formats.layout import BitStruct, Fields
from ....memory import HostMemory
from ...engine.hardware import Hardware
from ...state.flow import FLOW_CACHE_ENTRY, FLOW_TABLE_ROW, LOG_FLOW_CACHE, LOG_LOOKUP_SETS, LOG_MAX_TABLES, LOOKUP
from ...state.tables import Table
from ..command import DONE, Call, Capabilities, Command
from ..objects import MailboxObjects, log_of
from ..syndromes import CommandError, CommandSyndrome
from .counters import LOG_MAX_COUNTERS
from .match import FIELD_SUPPORT
from .rules import FlowRules

MAX_TABLES = 1 << LOG_MAX_TABLES
MAX_LEVEL, MAX_LOG_SIZE = 63, 16
ROOT = "the root of NIC_RX"
_NOT_SUPPORTED = "reformat_en", "decap_en", "sw_owner", "termination_table"


@dataclass
class FlowGroup:
    """A range of indices, from `start` to `end` inclusive, whose entries have the same mask."""

    number: int
    start: int
    end: int
    enable: int  # match_criteria_enable
    criteria: bytes
    words: np.ndarray  # the mask, as the words that the engine compares
    entries: int = 0


@dataclass
class FlowTable:
    """A flow table with its groups by number. `miss` is the number of the next table after a miss, or 0."""

    number: int
    level: int
    log: int
    miss: int
    rules: FlowRules
    groups: dict[int, FlowGroup] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"flow table {self.number:#x}"


class FlowTables(MailboxObjects):
    """The flow tables of a NIC, all of type NIC_RX. `known` contains them by number."""

    def __init__(self, hardware: Hardware):
        table = Table("flow table", FLOW_TABLE_ROW, MAX_TABLES, shared=False)
        super().__init__(table, CommandSyndrome.NO_SUCH_FLOW_TABLE)
        self._hardware, self._engine = hardware, hardware.engine
        self.known: dict[int, FlowTable] = {}
        self._root = 0
        # The kernel allocates the pages of these as frames arrive.
        self._lookups = HostMemory(2 * LOOKUP.size << LOG_LOOKUP_SETS)
        self._flow_cache = HostMemory(FLOW_CACHE_ENTRY.size << LOG_FLOW_CACHE)
        hardware.record["flow_tables"] = self.table.address
        hardware.record["lookups"], hardware.record["flow_cache"] = self._lookups.address, self._flow_cache.address

    def close(self) -> None:
        for table in self.known.values():
            table.rules.close()
        self._lookups.close()
        self._flow_cache.close()
        super().close()

    @property
    def root(self) -> int:
        """Return the number of the root table, where steering starts; 0 without one."""
        return self._root

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.CREATE,  Opcode.CREATE_FLOW_TABLE,   flow.CREATE_FLOW_TABLE_IN,   self._create),
            Command(Call.MODIFY,  Opcode.MODIFY_FLOW_TABLE,   flow.MODIFY_FLOW_TABLE_IN,   self._modify),
            Command(Call.QUERY,   Opcode.QUERY_FLOW_TABLE,    flow.QUERY_FLOW_TABLE_IN,    self._query,
                    flow.QUERY_FLOW_TABLE_OUT.size),
            Command(Call.DESTROY, Opcode.DESTROY_FLOW_TABLE,  flow.DESTROY_FLOW_TABLE_IN,  self._destroy),
            Command(Call.GENERAL, Opcode.SET_FLOW_TABLE_ROOT, flow.SET_FLOW_TABLE_ROOT_IN, self._set_root),
        )

    def capabilities(self) -> Capabilities:
        if self._hardware.port.no_ethernet:
            return {}
        return {
            CapClass.GENERAL: {"nic_flow_table": 1},
            CapClass.FLOW_TABLE: {"flow_table_properties_nic_receive": {
                "ft_support": 1, "flow_counter": 1, "modify_root": 1, "ignore_flow_level": 1,
                "log_max_ft_size": MAX_LOG_SIZE, "max_ft_level": MAX_LEVEL, "log_max_ft_num": log_of(MAX_TABLES),
                "log_max_flow_counter": LOG_MAX_COUNTERS, "log_max_destination": 0, "log_max_flow": MAX_LOG_SIZE,
                "ft_field_support": FIELD_SUPPORT,
            }},
        }

    def in_mailbox(self, struct: BitStruct, mailbox: bytes) -> FlowTable:
        """Return the table that a mailbox names. CommandError if there is no table of its type and number."""
        self._check_type(struct, mailbox)
        number = struct.get(mailbox, "table_id")
        self.need(number)
        return self.known[number]

    def need_next(self, level: int, number: int, what: str) -> FlowTable:
        """Return the next table for packets from a table of level `level`. CommandError unless its level is higher."""
        self.need(number)
        if self.known[number].level <= level:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_LEVEL,
                f"{what}: flow table {number:#x} has level {self.known[number].level}, which must be above {level}, or "
                "packets could go round in circles",
            )
        return self.known[number]

    def _check_type(self, struct: BitStruct, mailbox: bytes) -> None:
        kind = struct.get(mailbox, "table_type")
        if kind != FlowTableType.NIC_RX:
            name = FlowTableType(kind).name if kind in list(FlowTableType) else "unknown"
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE,
                f"table_type {kind} ({name}): the software NIC has tables of the type NIC_RX (0) only",
            )
        other = "other_vport" in struct.fields and struct.get(mailbox, "other_vport")
        if other or ("vport_number" in struct.fields and struct.get(mailbox, "vport_number")):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, "other_vport, vport_number: there is no other vport"
            )

    def _create(self, mailbox: bytes) -> bytes:
        self._check_type(flow.CREATE_FLOW_TABLE_IN, mailbox)
        if why := self._hardware.port.no_ethernet:
            raise CommandError(
                Status.BAD_SYS_STATE, CommandSyndrome.NO_ETHERNET, f"a flow table needs an Ethernet port: {why}"
            )
        context = flow.CREATE_FLOW_TABLE_IN.get(mailbox, "flow_table_context")
        _check_context(context)
        miss = self._miss_of(context, context["level"])
        number = self.free_number()
        address = self.table.row_address(number)
        rules = FlowRules(self._engine, address, number, context["level"], context["log_size"])
        rules.set_miss(self._address_of(miss))
        self.known[number] = FlowTable(number, context["level"], context["log_size"], miss, rules)
        if miss:
            self.hold(miss, self.name_of(number))
        return bytes(flow.CREATE_FLOW_TABLE_OUT.pack(table_id=number))

    def _modify(self, mailbox: bytes) -> bytes:
        get = flow.MODIFY_FLOW_TABLE_IN.get
        table, select = self.in_mailbox(flow.MODIFY_FLOW_TABLE_IN, mailbox), get(mailbox, "modify_field_select")
        if select != TableModify.MISS_TABLE_ID:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE,
                f"modify_field_select {select:#x}: only MISS_TABLE_ID (1) of a table can be changed",
            )
        miss = self._miss_of(get(mailbox, "flow_table_context"), table.level)
        table.rules.set_miss(self._address_of(miss))
        before, table.miss = table.miss, miss
        if miss:
            self.hold(miss, table.name)
        if before:
            self.release(before, table.name)
        return DONE

    def _query(self, mailbox: bytes) -> bytes:
        table = self.in_mailbox(flow.QUERY_FLOW_TABLE_IN, mailbox)
        return bytes(flow.QUERY_FLOW_TABLE_OUT.pack(flow_table_context={
            "table_miss_action": MissAction.FORWARD if table.miss else MissAction.DEFAULT,
            "level": table.level, "log_size": table.log, "table_miss_id": table.miss,
        }))

    def _destroy(self, mailbox: bytes) -> bytes:
        table = self.in_mailbox(flow.DESTROY_FLOW_TABLE_IN, mailbox)
        self.need_unused(table.number)
        if table.groups:
            raise CommandError(
                Status.RESOURCE_BUSY, CommandSyndrome.IN_USE,
                f"{table.name} has {len(table.groups)} group(s): destroy them first",
            )
        self._clear_row(table.number)
        del self.known[table.number]
        table.rules.close()
        if table.miss:
            self.release(table.miss, table.name)
        return DONE

    def _set_root(self, mailbox: bytes) -> bytes:
        """Set or remove the root table, where steering starts."""
        get = flow.SET_FLOW_TABLE_ROOT_IN.get
        change, qpn = get(mailbox, "op_mod"), get(mailbox, "underlay_qpn")
        if change not in list(RootChange):
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UNKNOWN_OP_MOD, f"op_mod {change}: 0 sets a root, 1 takes it away"
            )
        if qpn:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE,
                f"underlay_qpn {qpn:#x}: it must be 0, there is one root for the port",
            )
        root = 0
        if change == RootChange.SET:
            root = self.in_mailbox(flow.SET_FLOW_TABLE_ROOT_IN, mailbox).number
        else:
            self._check_type(flow.SET_FLOW_TABLE_ROOT_IN, mailbox)
        self._hardware.write(self.table.address + FLOW_TABLE_ROW.miss, self._address_of(root))
        before, self._root = self._root, root
        if root:
            self.hold(root, ROOT)
        if before:
            self.release(before, ROOT)
        return DONE

    def _miss_of(self, context: Fields, level: int) -> int:
        """Return the number of the next table after a miss that a context sets for a table of this level, or 0."""
        action = context["table_miss_action"]
        if action == MissAction.DEFAULT:
            return 0
        if action != MissAction.FORWARD:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE,
                f"table_miss_action {action}: NIC_RX tables have DEFAULT (0) and FORWARD (1)",
            )
        return self.need_next(level, context["table_miss_id"], "table_miss_id").number

    def _address_of(self, number: int) -> int:
        return self.table.row_address(number) if number else 0

    def _clear_row(self, number: int) -> None:
        """Clear a table's row, so that the engine no longer uses the table."""
        self._hardware.write(self.table.row_address(number), *[0] * (FLOW_TABLE_ROW.size // 8))


def _check_context(context: Fields) -> None:
    """Refuse a level or size that is too large, and unsupported features."""
    for name in _NOT_SUPPORTED:
        if context[name]:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE, f"{name} is not supported by the software NIC"
            )
    level, log = context["level"], context["log_size"]
    if level > MAX_LEVEL or log > MAX_LOG_SIZE:
        raise CommandError(
            Status.BAD_PARAM, CommandSyndrome.FLOW_TABLE,
            f"level {level}, log_size {log}: they can be up to {MAX_LEVEL} and {MAX_LOG_SIZE}",
        )
