"""Where a queue's ring and doorbell record lie: in host memory allocated for them, or in the user's UMEMs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from ... import compiler
from ...arguments import instance, whole
from ...enums import Access, RingMemory
from ...errors import InvalidValueError
from ...memory import HostMemory, round_up
from ..commands import command
from ..umem import UMEM

if TYPE_CHECKING:
    from ..context import Context

ALIGNMENT = 64  # of a ring, and of a record in the same memory
RECORD = 8  # size and alignment of a doorbell record, in bytes


@dataclass(frozen=True)
class Ring:
    """A ring and its doorbell record: UMEM ids and offsets for the device, addresses for this process.

    `memory` is set if gpunetio allocated it; `umems` are the user's UMEMs that hold it. `lies_in` and `dbr_lies_in` say
    which memory it is, and so whether CPU and GPU can access the addresses.
    """

    umem_id: int
    offset: int
    address: int
    dbr_umem_id: int
    dbr_offset: int
    dbr_address: int
    memory: HostMemory | None = None
    lies_in: RingMemory = RingMemory.HOST
    dbr_lies_in: RingMemory = RingMemory.HOST
    umems: tuple[UMEM, ...] = ()


def internal_ring(ctx: Context, undo: ExitStack, nbytes: int) -> Ring:
    """Allocate host memory for a ring of `nbytes`, followed by the doorbell record."""
    provider = ctx.provider
    dbr_offset = round_up(nbytes, ALIGNMENT)
    memory = HostMemory(dbr_offset + ALIGNMENT)
    with ExitStack() as failed:
        failed.callback(memory.close)
        with command("register a UMEM"):
            umem_id = provider.reg_umem(memory.address, memory.nbytes, Access.LOCAL_WRITE)
        failed.pop_all()

    def give_back() -> None:
        provider.dereg_umem(umem_id)
        memory.close()  # has no effect if the device failed to destroy the queue and still uses the memory

    undo.callback(give_back)
    return Ring(umem_id, 0, memory.address, umem_id, dbr_offset, memory.address + dbr_offset, memory)


def in_its_place(before: Ring, ring: Ring) -> Ring:
    """Return the new ring of a resized queue, with the doorbell record of its old ring."""
    return replace(before, umem_id=ring.umem_id, offset=ring.offset, address=ring.address, memory=ring.memory)


def external_ring(ring: tuple[UMEM, int], record: tuple[UMEM, int], nbytes: int) -> Ring:
    """Return a ring of `nbytes` and a doorbell record at offsets into the user's UMEMs."""
    (umem, offset), (dbr_umem, dbr_offset) = ring, record
    offset, dbr_offset = int(offset), int(dbr_offset)
    _check_place("external_umem", umem, offset, nbytes, ALIGNMENT)
    _check_place("external_dbr_umem", dbr_umem, dbr_offset, RECORD, RECORD)
    return Ring(
        umem.umem_id, offset, umem.address + offset,
        dbr_umem.umem_id, dbr_offset, dbr_umem.address + dbr_offset,
        None, umem.lies_in, dbr_umem.lies_in, (umem, dbr_umem),
    )


class Placed(Protocol):
    """Queue attributes that may give the places of ring and record, each as (UMEM, offset)."""

    @property
    def external_umem(self) -> tuple[UMEM, int] | None:
        """Return the place of the ring, or None."""
        ...

    @property
    def external_dbr_umem(self) -> tuple[UMEM, int] | None:
        """Return the place of the record, or None."""
        ...


def place_ring(ctx: Context, attr: Placed, undo: ExitStack, nbytes: int) -> Ring:
    """Place a queue's ring of `nbytes` and its record in the UMEMs of its attributes, or in new memory."""
    if attr.external_umem and attr.external_dbr_umem:
        return external_ring(attr.external_umem, attr.external_dbr_umem, nbytes)
    return internal_ring(ctx, undo, nbytes)


def doorbells() -> ModuleType:
    """Return `doorbell.py`, the CPU's access to a ring.

    The module is compiled on import, and not needed if only kernels use the rings.
    """
    with compiler.needed_for("the CPU cannot work at the rings of a queue"):
        from . import doorbell
    return doorbell


def check_places(external_umem: object, external_dbr_umem: object) -> None:
    """Raise InvalidValueError unless ring and doorbell record have a (UMEM, offset) each, or neither has."""
    for name, place in (("external_umem", external_umem), ("external_dbr_umem", external_dbr_umem)):
        if place is None:
            continue
        if not isinstance(place, tuple) or len(place) != 2:
            raise InvalidValueError(f"{name} = {place!r}: it must be a pair, (UMEM, offset in bytes)")
        instance(f"{name}[0]", place[0], UMEM)
        whole(f"{name}[1]", place[1])
    if (external_umem is None) != (external_dbr_umem is None):
        given, missing = "external_umem", "external_dbr_umem"
        if external_umem is None:
            given, missing = missing, given
        raise InvalidValueError(f"{given} without {missing}: give both, or neither")


def _check_place(what: str, umem: UMEM, offset: int, nbytes: int, alignment: int) -> None:
    if offset < 0 or offset % alignment:
        raise InvalidValueError(f"{what}: offset {offset} is no multiple of {alignment}")
    if offset + nbytes > umem.nbytes:
        raise InvalidValueError(
            f"{what}: {nbytes} bytes at offset {offset} do not fit in the {umem.nbytes} bytes of {umem}"
        )
