"""How a management datagram came here, and how the answer goes back."""

from dataclasses import dataclass

HOP_LIMIT = 64  # of an ordinary route, as Linux has it (IBTA 8.3.6)


@dataclass(frozen=True)
class Path:
    """A way to a peer: its GID, and what an address handle needs besides (`AhAttr`).

    `gid` is 16 raw bytes. `sgid_index` is the entry of this port's GID table that the peer knows.
    """

    gid: bytes
    sgid_index: int = 0
    hop_limit: int = HOP_LIMIT
    traffic_class: int = 0
    sl: int = 0
    flow_label: int = 0
