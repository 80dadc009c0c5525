"""Memory keys: whether a PD may access these bytes, and where they are (IBTA 10.6, memory management)."""

from __future__ import annotations

from ...fabric.frames import GRANT_SHIFT
from ...jit.compile import device_function, engine_function
from ...jit.ops import on_host
from ..state import refuse
from ..state.nic import nic_at
from ..state.objects import MKEY_ROW, mkey_row_at
from ..state.wire import GRANT, GRANTS, grant_at, wire_at

@device_function
def find_in(row, key, pdn, addr, nbytes, right):
    """Do what `find` does, with the key's row at an address.

    A CPU predicts each check (a sum of all costs it a tenth of its rate), and a GPU waits at each.
    """
    m = mkey_row_at(row)
    offset, room = addr - m.iova, m.nbytes - nbytes
    if on_host():
        found = m.key == key and m.pdn == pdn and m.access & right == right and offset >= 0 and offset <= room
    else:
        refused = (m.key ^ key) | (m.pdn ^ pdn) | (m.access & right ^ right) | (offset | room | room - offset) >> 63
        found = refused == 0
    return addr + m.delta if found else -1


@device_function
def find(nic, key, pdn, addr, nbytes, right):
    """Return the translated address of [addr, addr + nbytes), or -1 if any check fails."""
    n = nic_at(nic)
    return find_in(n.mkeys + ((key >> 8) & n.mkey_mask) * MKEY_ROW.size, key, pdn, addr, nbytes, right)


@engine_function
def reference(nic, wire, key, address):
    """Return the reference to `address` in a region's memory on this wire, or 0 if the peer cannot read it there."""
    n = nic_at(nic)
    m = mkey_row_at(n.mkeys + ((key >> 8) & n.mkey_mask) * MKEY_ROW.size)
    if m.granted == 0 or m.key != key or n.capture != 0:
        return 0
    number = (address + m.granted) >> GRANT_SHIFT
    grant = grant_at(wire_at(wire).grants + (number & (GRANTS - 1)) * GRANT.size)
    return address + m.granted if grant.mapped == number else 0


@device_function
def translate(nic, key, pdn, addr, nbytes, right, unknown):
    """Return what `find` does, or minus the reason: `unknown`, which is Reason.?KEY_UNKNOWN, or one after it."""
    address = find(nic, key, pdn, addr, nbytes, right)
    return address if address >= 0 else _refuse(nic, key, pdn, addr, nbytes, right, unknown)


@engine_function
def _refuse(nic, key, pdn, addr, nbytes, right, unknown):
    """Return minus the reason for the check that failed."""
    n = nic_at(nic)
    m = mkey_row_at(n.mkeys + ((key >> 8) & n.mkey_mask) * MKEY_ROW.size)
    if key == 0 or m.key != key:
        return -refuse.unknown_key(nic, unknown, key, addr, nbytes)
    if m.pdn != pdn:
        return -refuse.key_of_other_pd(nic, unknown, key, addr, nbytes, m.pdn, pdn)
    if m.access & right != right:
        return -refuse.key_rights(nic, unknown, key, addr, nbytes, m.access, right)
    return -refuse.key_bounds(nic, unknown, key, addr, nbytes, m.iova, m.nbytes)
