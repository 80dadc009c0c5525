"""A peer's memory, as the peer has described it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arguments import octets
from ..enums import Access
from ..errors import InvalidValueError
from ..formats.core_device import MEMORY_EXPORT, MEMORY_EXPORT_MAGIC, MEMORY_EXPORT_VERSION
from ..memory import BytesLike

REMOTE = Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC


@dataclass(frozen=True)
class RemoteMemory:
    """`nbytes` at `address` of a peer's memory, with its key and the rights granted (`doca_mmap` from an export).

    Create it with `from_export`, or from values that you know.
    """

    address: int
    nbytes: int
    rkey: int
    access: Access = REMOTE

    @classmethod
    def from_export(cls, description: BytesLike) -> RemoteMemory:
        """Return the memory that a peer's `MemoryMap.export_rdma` describes (`doca_mmap_create_from_export`).

        InvalidValueError for any other bytes. The description's contents are not verified: the peer's NIC checks each
        access.
        """
        raw = octets("description", description)
        if len(raw) != MEMORY_EXPORT.size:
            raise InvalidValueError(f"{len(raw)} bytes describe no memory: an export has {MEMORY_EXPORT.size}")
        row = MEMORY_EXPORT.at(raw)
        address, nbytes = int(row["address"]), int(row["nbytes"])
        if row["magic"] != MEMORY_EXPORT_MAGIC:
            raise InvalidValueError(f"these bytes describe no memory: they begin with {raw[:4].hex()}")
        if row["version"] != MEMORY_EXPORT_VERSION:
            raise InvalidValueError(
                f"an export of version {row['version']}: this gpunetio reads version {MEMORY_EXPORT_VERSION}; use the "
                "same gpunetio at both ends"
            )
        if not nbytes or address + nbytes > 1 << 64:
            raise InvalidValueError(f"an export of {nbytes} bytes at {address:#x}: that is no range of memory")
        access = int(row["access"])
        if not access or access & ~int(REMOTE):
            raise InvalidValueError(f"an export with rights {access:#x}: its bits are {int(REMOTE):#x}")
        return cls(address, nbytes, int(row["rkey"]), Access(access))

    def part(self, offset: int, nbytes: int | None = None) -> RemoteMemory:
        """Return `nbytes` from `offset` on, or up to the end. InvalidValueError for bytes outside the memory."""
        count = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or count < 1 or offset + count > self.nbytes:
            raise InvalidValueError(f"[{offset}, +{count}) is outside the peer's {self.nbytes} bytes")
        return replace(self, address=self.address + offset, nbytes=count)

    def export(self) -> bytes:
        """Return the description, to pass it on to another process."""
        return MEMORY_EXPORT.pack(
            magic=MEMORY_EXPORT_MAGIC, version=MEMORY_EXPORT_VERSION, address=self.address, nbytes=self.nbytes,
            rkey=self.rkey, access=int(self.access),
        )
