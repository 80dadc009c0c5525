"""The memory of a peer that is reached without packets: the one check of a request that names it (IBTA 9.7.4.1).

Plain writes inside a NIC (loopback.py), requests to a peer in another process (direct.py) and requests that a warp
executes together (gpu/) make this check. A request that fails it takes the general path, which finds out why.
"""

from __future__ import annotations

from ...jit.compile import device_function
from ...jit.ops import on_host
from ..memory.keys import find_in
from ..state.objects import MkeyRow
from ..state.qp import EXTENDED_ATOMICS


@device_function
def peer_range(
    mkey: MkeyRow, key: int, pdn: int, rights: int, longest: int, addr: int, nbytes: int, right: int
) -> int:
    """Return where [addr, addr + nbytes) of a peer's memory lies, or -1 if any check fails.

    `mkey` is the row of `key`. The peer's queue pair grants `rights`, takes messages of up to `longest` bytes, and
    belongs to the protection domain `pdn`. `right` is what the request needs.
    """
    if on_host():
        if rights & right != right or nbytes > longest:
            return -1
        return find_in(mkey, key, pdn, addr, nbytes, right & ~EXTENDED_ATOMICS)
    address = find_in(mkey, key, pdn, addr, nbytes, right & ~EXTENDED_ATOMICS)
    refused = (right & ~rights) | (longest - nbytes) >> 63
    return address if refused == 0 else -1
