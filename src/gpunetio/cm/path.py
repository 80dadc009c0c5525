"""The path to a peer, for management datagrams and for queue pairs."""

from dataclasses import dataclass

HOP_LIMIT = 64  # for an ordinary route, as in Linux (IBTA 8.3.6)


@dataclass(frozen=True)
class Path:
    """A path to a peer: its GID, and the other attributes of an address handle (`AhAttr`).

    `gid` is 16 raw bytes. `sgid_index` is the index of this port's GID that the peer knows.
    """

    gid: bytes
    sgid_index: int = 0
    hop_limit: int = HOP_LIMIT
    traffic_class: int = 0
    sl: int = 0
    flow_label: int = 0
