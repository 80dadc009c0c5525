"""Limits on the links of a NIC: each link holds descriptors and memory of its process."""

from __future__ import annotations

from collections.abc import Iterable

from .link import Link

MAX_LINKS = 64  # links per NIC
MAX_LINKS_OF_ONE = 32  # links to a NIC from one process


def excess(links: Iterable[Link], pid: int) -> str | None:
    """Return why process `pid` may not lay another link to a NIC with these links, or None if it may."""
    there = set(links)
    laid = sum(not link.first and link.peer_pid == pid for link in there)
    if len(there) < MAX_LINKS and laid < MAX_LINKS_OF_ONE:
        return None
    return (
        f"{len(there)} links, of which process {pid} has laid {laid}: the limits are {MAX_LINKS} in all and "
        f"{MAX_LINKS_OF_ONE} from one process"
    )
