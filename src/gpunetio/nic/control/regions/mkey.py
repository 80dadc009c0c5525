"""Memory keys: registered regions of memory, which work requests and peers name by key."""

from __future__ import annotations

import secrets

import numpy as np

from ....enums import Access
from ....errors import NoMemoryError, NotSupportedError
from ....formats.commands import CapClass
from ....memory import is_accessible
from ...engine.hardware import Hardware
from ...memory.streams import DEVICE_SHIFT
from ...state.objects import MKEY_ROW
from ...state.tables import MkeyTable
from ...turn.commands import EngineCommand
from ..command import Capabilities
from ..objects import Objects
from ..syndromes import CommandSyndrome
from .device_memory import DeviceMemory
from .grants import Grants, start_of
from .indirect_mkey import IndirectKeys
from .pd import ProtectionDomains
from .reach import signed
from .umem import inaccessible

MAX_MR = 65536
_LOG_ADDRESSES = 47  # the largest region: all that a process can address


def new_table() -> MkeyTable:
    """Create the table of memory keys. The engine needs its address from the start."""
    return MkeyTable("key", MKEY_ROW, MAX_MR)


class MemoryKeys(Objects):
    """The memory keys of a NIC, which drivers register with calls, not mailboxes."""

    def __init__(
        self, hardware: Hardware, table: MkeyTable, pds: ProtectionDomains, indirect: IndirectKeys, grants: Grants,
        device_memory: DeviceMemory,
    ):
        super().__init__(table, CommandSyndrome.NONE)
        self._owner, self._engine = hardware.name, hardware.engine
        self._pds, self._indirect, self._grants, self._device_memory = pds, indirect, grants, device_memory
        hardware.record["mkeys"], hardware.record["mkey_mask"] = table.address, table.mask

    def capabilities(self) -> Capabilities:
        return {CapClass.GENERAL: {"log_max_mkey": self.log_max, "log_max_mrw_sz": _LOG_ADDRESSES}}

    def register(self, pdn: int, address: int, nbytes: int, iova: int, access: Access, cuda: bool) -> int:
        """Register memory. Return its key, which is both lkey and rkey."""
        self._pds.table[pdn]  # it exists
        engine_address = self._engine_address(address, nbytes, access, cuda)
        # Index and tag are random, so that no key can be guessed from another.
        index = self.table.free_slot(1 + secrets.randbelow(self.table.mask))
        if index is None:
            raise NoMemoryError(
                f"{self._owner} has no free memory key: all {self.table.mask} are in use; close one first"
            )
        key = index << 8 | 1 + secrets.randbelow(255)  # never 0x100, which ends a scatter list
        self._engine.map(address, nbytes)
        row = self.new_row()
        row["key"], row["pdn"], row["access"], row["iova"] = key, pdn, int(access), signed(iova)
        row["nbytes"], row["delta"] = nbytes, signed(engine_address - iova)
        row["granted"], row["near"] = self._grants.grant(address, nbytes), self._engine.is_near(address, nbytes)
        self._engine.post_alone((EngineCommand.WRITE_ROW, self.table.row_address(key), row))
        self._grants.announce(row)
        self._pds.hold(pdn)
        return key

    def _engine_address(self, address: int, nbytes: int, access: Access, cuda: bool) -> int:
        """Return the address that the engine uses for a range.

        The CUDA driver decides whether the range is device memory; `cuda`, from the caller, is only a hint.
        """
        if self._engine.reaches(address, nbytes):
            return address
        device_address = self._device_memory.device_address(address, nbytes) if cuda else None
        if device_address is None and is_accessible(address, nbytes, bool(access & Access.LOCAL_WRITE)):
            return address
        if device_address is None and not cuda:
            device_address = self._device_memory.device_address(address, nbytes)
        if device_address is not None:
            return device_address
        if cuda:
            raise NotSupportedError(
                f"[{address:#x}, +{nbytes}) is neither memory of this process's CPU nor, according to its CUDA "
                "driver, of one GPU: register an allocation of this process"
            )
        raise inaccessible(address, nbytes, access)

    def reregister(
        self, key: int, pdn: int | None, place: tuple[int, int, bool] | None, access: Access | None
    ) -> None:
        """Change a region between two WQEs, and keep its key (`Provider.rereg_mr`).

        After this returns, the NIC no longer touches memory that is not in the region any more.
        """
        row, was = self.table.copy(key), self.table.copy(key)
        before, granted, left = int(row["pdn"]), int(row["granted"]), _range_of(row)
        after = before if pdn is None else pdn
        self._pds.table[after]  # it exists
        rights = Access(int(row["access"])) if access is None else access
        if place is None:
            at, nbytes = left
            reachable = at >> DEVICE_SHIFT or self._engine.reaches(at, nbytes)
            if not reachable and not is_accessible(at, nbytes, bool(rights & Access.LOCAL_WRITE)):
                raise inaccessible(at, nbytes, rights)
        else:
            address, nbytes, cuda = place
            row["delta"] = signed(self._engine_address(address, nbytes, rights, cuda) - address)
            self._engine.map(address, nbytes)
            row["iova"], row["nbytes"] = signed(address), nbytes
            row["granted"], row["near"] = self._grants.grant(address, nbytes), self._engine.is_near(address, nbytes)
        row["pdn"], row["access"] = after, int(rights)
        self._engine.post_alone(
            (EngineCommand.WRITE_ROW, self.table.row_address(key), row), *self._indirect.disable(key)
        )
        self._grants.withdraw(was)
        self._grants.announce(row)
        self._pds.release(before)
        self._pds.hold(after)
        if place is not None:
            self._engine.unmap(*left)
        if granted and place is not None:
            self._grants.revoke(granted)

    def deregister(self, key: int) -> None:
        """Deregister a region. After this returns, the NIC no longer touches its memory."""
        row = self.table.copy(key)
        pdn, granted, left = int(row["pdn"]), int(row["granted"]), _range_of(row)
        self._engine.post_alone(
            (EngineCommand.WRITE_ROW, self.table.row_address(key), self.new_row()), *self._indirect.disable(key)
        )
        self._grants.withdraw(row)
        self._pds.release(pdn)
        self._engine.unmap(*left)
        if granted:
            self._grants.revoke(granted)


def _range_of(row: np.void) -> tuple[int, int]:
    """Return the engine's address of a region, and the region's size in bytes."""
    return start_of(row), int(row["nbytes"])
