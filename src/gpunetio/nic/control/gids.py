"""The GID table, and QUERY_ROCE_ADDRESS."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import InvalidValueError
from ...formats import commands as cmd
from ...formats.commands import ROCE_VERSION_2, CapClass, Opcode, Status
from ...formats.contexts import ROCE_ADDR_LAYOUT
from ...formats.packet import IPV4_MAPPED, ROCE_UDP_PORT
from ..engine.hardware import Hardware
from ..engine.port import MAX_GID
from ..state.objects import GID_ROW
from ..state.tables import Table
from .command import DONE, OUT_BYTES, Call, Capabilities, Command
from .objects import Objects
from .syndromes import CommandError, CommandSyndrome

UDP_SPORTS = 0xC000, 0xFFFF  # the lowest and the highest UDP source port of a QP (IBTA annex A17.4.3)
_GID_TABLE_CODE = (MAX_GID // 8).bit_length() - 1  # as the capability encodes it: 8 << code entries


class Gids(Objects):
    """The GID table of a NIC's port."""

    def __init__(self, hardware: Hardware):
        port = hardware.port
        super().__init__(Table("GID", GID_ROW, MAX_GID), CommandSyndrome.NO_SUCH_GID)
        for index, gid in enumerate(port.gids):
            row = self.table.rows[index]
            row["index"], row["gid"] = index, np.void(gid)
            row["version"] = 0 if port.infiniband else ROCE_VERSION_2
            row["mac"] = np.void(port.mac + b"\0\0")
        hardware.record["gids"] = self.table.address

    def commands(self) -> Iterable[Command]:
        return (
            Command(Call.GENERAL, Opcode.QUERY_ROCE_ADDRESS, cmd.QUERY_ROCE_ADDRESS_IN,
                    self._query, OUT_BYTES + ROCE_ADDR_LAYOUT.size),
        )

    def capabilities(self) -> Capabilities:
        return {
            CapClass.GENERAL: {"gid_table_size": _GID_TABLE_CODE},
            CapClass.ROCE: {
                "roce_version": 1 << ROCE_VERSION_2, "roce_address_table_size": MAX_GID,
                "r_roce_min_src_udp_port": UDP_SPORTS[0], "r_roce_max_src_udp_port": UDP_SPORTS[1],
                "r_roce_dest_udp_port": ROCE_UDP_PORT,
            },
        }

    def gid(self, index: int) -> bytes:
        """Return entry `index` of the table; zeros if it is empty."""
        if not 0 <= index < MAX_GID:
            raise InvalidValueError(f"GID index {index} is outside the table of {MAX_GID}")
        return bytes(self.table.rows[index]["gid"])

    def has(self, gid: bytes) -> bool:
        """Return whether the table contains `gid`."""
        return any(gid) and any(bytes(row["gid"]) == gid for row in self.table.rows)

    def need_index(self, index: int) -> None:
        """Refuse a source GID index whose entry is empty."""
        rows = self.table.rows
        if index >= len(rows) or not any(bytes(rows[index]["gid"])):
            raise CommandError(
                Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID,
                f"src_addr_index {index}: the GID table has no such entry",
            )

    def _query(self, mailbox: bytes) -> bytes:
        index = cmd.QUERY_ROCE_ADDRESS_IN.get(mailbox, "roce_address_index")
        if index >= len(self.table.rows):
            raise CommandError(Status.BAD_INDEX, CommandSyndrome.NO_SUCH_GID, f"the GID table has no entry {index}")
        row = self.table.rows[index]
        mac = int.from_bytes(bytes(row["mac"])[:6], "big")
        layout = ROCE_ADDR_LAYOUT.pack(
            source_l3_address=bytes(row["gid"]), source_mac_47_32=mac >> 32, source_mac_31_0=mac & 0xFFFF_FFFF,
            roce_version=int(row["version"]), roce_l3_type=int(not bytes(row["gid"]).startswith(IPV4_MAPPED)),
        )
        return DONE + bytes(layout)
