"""User memory (UMEM): registered ranges that contain queues and doorbell records."""

from __future__ import annotations

from ....enums import Access
from ....errors import InvalidValueError
from ....formats.commands import Status
from ....memory import is_accessible
from ...engine.hardware import Hardware
from ...state.objects import UMEM_ROW
from ...state.tables import Table
from ..objects import CountedObjects
from ..syndromes import CommandError, CommandSyndrome

MAX_UMEM = 32768
_RING_ALIGNMENT, _RECORD_BYTES = 64, 8


def inaccessible(address: int, nbytes: int, access: Access) -> InvalidValueError:
    """Return the error for a range that this process cannot access with these rights."""
    what = "readable and writable" if access & Access.LOCAL_WRITE else "readable"
    return InvalidValueError(f"[{address:#x}, +{nbytes}) is not {what} memory of this process")


def new_table() -> Table:
    """Create the table of UMEMs. The engine needs its address from the start."""
    return Table("UMEM", UMEM_ROW, MAX_UMEM)


class Umems(CountedObjects):
    """The UMEMs of a NIC."""

    def __init__(self, hardware: Hardware, table: Table):
        super().__init__(hardware.name, table, CommandSyndrome.NO_SUCH_UMEM)
        self._engine = hardware.engine

    def register(self, address: int, nbytes: int, access: Access) -> int:
        """Register a range and return the UMEM's id."""
        reachable = self._engine.reaches(address, nbytes)
        if not reachable and not is_accessible(address, nbytes, bool(access & Access.LOCAL_WRITE)):
            raise inaccessible(address, nbytes, access)
        umem_id = self.free_row()
        self._engine.map(address, nbytes)
        row = self.table.rows[umem_id]
        row["umem_id"], row["addr"], row["nbytes"], row["access"] = umem_id, address, nbytes, int(access)
        return umem_id

    def deregister(self, umem_id: int) -> None:
        """Deregister a UMEM. InUseError while a queue lies in it."""
        row = self.unused(umem_id)
        self._engine.unmap(int(row["addr"]), int(row["nbytes"]))
        row["umem_id"] = 0

    @staticmethod
    def need_valid(valid: int, ring_field: str) -> None:
        """Refuse a queue whose ring or doorbell record is not in a UMEM. Physical addresses are not supported."""
        if not valid:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_REQUIRED, f"{ring_field} and dbr_umem_valid must be set"
            )

    def ring(self, umem_id: int, offset: int, nbytes: int, what: str) -> int:
        """Return the address of a ring in a UMEM. CommandError if the ring is outside the UMEM or not aligned."""
        return self._range(umem_id, offset, nbytes, what, _RING_ALIGNMENT)

    def record(self, umem_id: int, offset: int, what: str) -> int:
        """Return the address of a doorbell record in a UMEM. CommandError as in `ring`."""
        return self._range(umem_id, offset, _RECORD_BYTES, what, _RECORD_BYTES)

    def _range(self, umem_id: int, offset: int, nbytes: int, what: str, alignment: int) -> int:
        """Return the address of [offset, offset + nbytes) in a UMEM."""
        if umem_id not in self.table:
            raise CommandError(
                Status.BAD_RESOURCE, CommandSyndrome.NO_SUCH_UMEM, f"there is no UMEM {umem_id:#x} for {what}"
            )
        umem = self.table[umem_id]
        address, size = int(umem["addr"]) + offset, int(umem["nbytes"])
        if offset + nbytes > size:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_RANGE,
                f"{what}: [{offset:#x}, +{nbytes:#x}) is outside UMEM {umem_id:#x}, which has {size:#x} bytes",
            )
        if address % alignment:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_ALIGNMENT,
                f"{what}: offset {offset:#x} of UMEM {umem_id:#x} is address {address:#x}, not a multiple "
                f"of {alignment}",
            )
        return address

    def need_writable(self, umem_id: int) -> None:
        """Refuse a CQ ring in a UMEM that the NIC cannot write."""
        if not int(self.table[umem_id]["access"]) & Access.LOCAL_WRITE:
            raise CommandError(
                Status.BAD_PARAM, CommandSyndrome.UMEM_RIGHTS,
                f"UMEM {umem_id:#x} was registered without LOCAL_WRITE: the NIC cannot write CQEs there",
            )
