"""Links to the NICs of other processes of this host that are on the LAN: each of these lays links to all others.

A NIC first says in its answers to those who look at it that it is on the LAN (`ON_LAN`), and then looks at the others.
So of two that enter, at least the later one sees the other.
"""

from __future__ import annotations

import logging
import os
import time
from ipaddress import ip_address

from ..errors import DocaError
from .claims import PATIENCE, names
from .control_message import Body
from .control_socket import ControlSocket
from .discovery import look_at_all
from .link import Link
from .link_limits import MAX_LINKS

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

ON_LAN = "lan"  # in the answer of a NIC


def link_to_lan(control: ControlSocket, timeout: float = PATIENCE) -> list[Link]:
    """Return links to the NICs of other processes on the LAN, each between the first addresses of both.

    NICs that do not answer in time are left out, as the log says: they are silent for `timeout` seconds, or do not give
    a link within another `timeout`, which all of them share.
    """
    own = control.addresses[0]
    if not control.claimed[own]:
        logger.warning(
            "%s reaches no Ethernet queue of another process: another process has its address %s; give one of the two "
            "NICs another address", control.name, own,
        )  # fmt: skip
        return []
    found = look_at_all((name for name in names() if _is_address(name) and name not in control.listening), timeout)
    for _, _, fds in found.values():
        for fd in fds:
            os.close(fd)
    members = [name for name, (pid, answer, _) in found.items() if pid != os.getpid() and _is_member(name, answer)]
    links: list[Link] = []
    end = time.monotonic() + timeout
    for name in members[:MAX_LINKS]:
        try:
            link = control.connect(name, max(0.0, end - time.monotonic()), own)
        except DocaError as error:
            logger.warning("%s: Ethernet frames do not reach the NIC at %s: %s", control.name, name, error)
        else:
            if link is None:
                logger.warning("%s: Ethernet frames do not reach the NIC at %s: it gives no link", control.name, name)
            else:
                links.append(link)
    return links


def _is_address(name: str) -> bool:
    """Return whether a NIC listens under this name as the one that has claimed an address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_member(name: str, answer: Body) -> bool:
    """Return whether a NIC that was asked under one of its addresses is on the LAN, and this is its first address."""
    addresses = answer.get("addresses")
    return answer.get(ON_LAN) is True and isinstance(addresses, list) and addresses[:1] == [name]
