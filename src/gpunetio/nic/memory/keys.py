"""Memory keys: check whether a PD may access a range, and translate its address (IBTA 10.6, memory management)."""

from __future__ import annotations

from ...fabric.frames import GRANT_SHIFT
from ...jit.compile import device_function, engine_function
from ...jit.ops import on_host
from ..state import refuse
from ..state.objects import MKEY_ROW, MkeyRow
from ..state.wire import GRANT, GRANTS, Grant, WireState
from ..state.worker import WorkerState


@device_function
def key_row(keys: int, mask: int, key: int) -> MkeyRow:
    """Return the row for a key in the table at `keys`. `mask` selects a row by the upper 24 bits of the key."""
    return MkeyRow(keys + ((key >> 8) & mask) * MKEY_ROW.size)


@device_function
def find_in(mkey: MkeyRow, key: int, pdn: int, addr: int, nbytes: int, right: int) -> int:
    """Do what `find` does, given the key's row.

    A CPU predicts each check, and one combined check would cost it a tenth of its message rate. A GPU waits at each
    check, so there the checks are combined.
    """
    offset, room = addr - mkey.iova, mkey.nbytes - nbytes
    if on_host():
        found = mkey.key == key and mkey.pdn == pdn and mkey.access & right == right and offset >= 0 and offset <= room
    else:
        refused = (mkey.key ^ key) | (mkey.pdn ^ pdn) | (mkey.access & right ^ right)
        refused |= (offset | room | room - offset) >> 63
        found = refused == 0
    return addr + mkey.delta if found else -1


@device_function
def find(worker: WorkerState, key: int, pdn: int, addr: int, nbytes: int, right: int) -> int:
    """Return the translated address of [addr, addr + nbytes), or -1 if any check fails."""
    mkey = key_row(worker.mkeys, worker.mkey_mask, key)
    return find_in(mkey, key, pdn, addr, nbytes, right)


@engine_function
def reference(worker: WorkerState, wire: WireState, key: int, address: int) -> int:
    """Return the reference to `address` in a granted region on this wire, or 0 if the peer has not mapped the grant."""
    mkey = key_row(worker.mkeys, worker.mkey_mask, key)
    if mkey.granted == 0 or mkey.key != key or worker.capture != 0:
        return 0
    number = (address + mkey.granted) >> GRANT_SHIFT
    grant = Grant(wire.grants + (number & (GRANTS - 1)) * GRANT.size)
    return address + mkey.granted if grant.mapped == number else 0


@device_function
def translate(worker: WorkerState, key: int, pdn: int, addr: int, nbytes: int, right: int, unknown: int) -> int:
    """Return what `find` returns, or minus the reason: `unknown`, which is Reason.?KEY_UNKNOWN, or one after it."""
    address = find(worker, key, pdn, addr, nbytes, right)
    return address if address >= 0 else _refuse(worker, key, pdn, addr, nbytes, right, unknown)


@engine_function
def _refuse(worker: WorkerState, key: int, pdn: int, addr: int, nbytes: int, right: int, unknown: int) -> int:
    """Return minus the reason for the check that failed."""
    mkey = key_row(worker.mkeys, worker.mkey_mask, key)
    if key == 0 or mkey.key != key:
        return -refuse.unknown_key(worker, unknown, key, addr, nbytes)
    if mkey.pdn != pdn:
        return -refuse.key_of_other_pd(worker, unknown, key, addr, nbytes, mkey.pdn, pdn)
    if mkey.access & right != right:
        return -refuse.key_rights(worker, unknown, key, addr, nbytes, mkey.access, right)
    return -refuse.key_bounds(worker, unknown, key, addr, nbytes, mkey.iova, mkey.nbytes)
