"""What commands create beside queues: memory keys, protection domains, UMEMs, UAR pages; and the port's GIDs."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

# An access to virtual address `va` is one to address `va + delta`, which tells host from device memory
# (memory/keys.py).
MKEY_ROW = record("mkey_row", """
    key            i64      command    lkey and rkey; 0 in a free row
    pdn            i64      command    number of its protection domain
    access         i64      command    rights, of enums.Access
    iova           i64      command    first virtual address
    nbytes         i64      command    size, in bytes
    delta          i64      command    what makes an address from a virtual address
    granted        i64      command    what makes a reference from an address (control/regions/grants.py), or 0
    near           i64      command    not 0: it is memory of the GPU that makes the NIC's turns
""")

PD_ROW = record("pd_row", """
    pdn            i64      host       number of the protection domain; 0 in a free row
    users          i64      host       objects in it
""")

UMEM_ROW = record("umem_row", """
    umem_id        i64      host       number of the UMEM; 0 in a free row
    addr           i64      host       its first address
    nbytes         i64      host       size, in bytes
    access         i64      host       rights, of enums.Access
    users          i64      host       queues that lie in it
""")

UAR_ROW = record("uar_row", """
    page_id        i64      host       number of the UAR page; 0 in a free row
    addr           i64      host       its address
    kind           i64      host       enums.UarAllocationType
    users          i64      host       queues that ring in it
""")

GID_ROW = record("gid_row", """
    index          i64      nobody     place in the GID table
    gid            raw[16]  nobody     the GID, as on the wire; 0 in a free row
    version        i64      nobody     formats.commands.ROCE_VERSION_2; 0 on InfiniBand
    mac            raw[8]   nobody     the port's MAC, and two bytes of 0
""")

mkey_row_at: View = struct_view(MKEY_ROW)
