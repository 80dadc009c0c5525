"""Objects other than queues: memory keys, protection domains, UMEMs, UAR pages, and the port's GIDs."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .record import State, command, host, nobody


class MkeyRow(State):
    """A memory key.

    An access to virtual address `va` goes to address `va + delta`, which tells host from device memory
    (memory/keys.py).
    """

    key: I64 = command("lkey and rkey; 0 in a free row")
    pdn: I64 = command("number of its protection domain")
    access: I64 = command("rights, of enums.Access")
    iova: I64 = command("first virtual address")
    nbytes: I64 = command("size, in bytes")
    delta: I64 = command("what to add to a virtual address to get an address")
    granted: I64 = command("what to add to an address to get a reference (control/regions/grants.py), or 0")
    near: I64 = command("not 0: it is memory of the GPU that makes the NIC's turns")


MKEY_ROW = MkeyRow.entry


class PdRow(State):
    """A protection domain."""

    pdn: I64 = host("number of the protection domain; 0 in a free row")
    users: I64 = host("objects in it")


PD_ROW = PdRow.entry


class UmemRow(State):
    """User memory that is registered for queues."""

    umem_id: I64 = host("number of the UMEM; 0 in a free row")
    addr: I64 = host("its first address")
    nbytes: I64 = host("size, in bytes")
    access: I64 = host("rights, of enums.Access")
    users: I64 = host("queues that lie in it")


UMEM_ROW = UmemRow.entry


class UarRow(State):
    """A page of doorbell registers."""

    page_id: I64 = host("number of the UAR page; 0 in a free row")
    addr: I64 = host("its address")
    kind: I64 = host("enums.UarAllocationType")
    users: I64 = host("queues that ring in it")


UAR_ROW = UarRow.entry


class GidRow(State):
    """An entry of the port's GID table."""

    index: I64 = nobody("place in the GID table")
    gid: Annotated[int, "raw[16]"] = nobody("the GID, as on the wire; 0 in a free row")
    version: I64 = nobody("formats.commands.ROCE_VERSION_2; 0 on InfiniBand")
    mac: Annotated[int, "raw[8]"] = nobody("the port's MAC, and two bytes of 0")


GID_ROW = GidRow.entry

