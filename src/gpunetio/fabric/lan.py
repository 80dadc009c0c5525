"""Links to the NICs of other processes of this host that are on the LAN: each of them lays links to all others.

A NIC first announces that it is on the LAN (`ON_LAN`), in its answers to those that look at it, and then looks at the
others. So when two NICs join, at least the later one sees the other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from ipaddress import ip_address

from ..errors import BadStateError, DocaError, TimedOutError
from ..service import ServiceThread
from .claims import PATIENCE, names
from .control_message import Body
from .control_socket import ControlSocket
from .discovery import look_at_all
from .link import Link
from .link_limits import MAX_LINKS

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

ON_LAN = "lan"  # in the answer of a NIC
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0  # seconds between two questions to a silent NIC


class LanSearch:
    """Lays links from the NIC of `control` to those of other processes on the LAN, between the first addresses of both.

    A NIC whose process is stopped does not answer. A thread asks it again, less and less often, until the NIC answers
    or is gone. The NIC of `control` learns of links that the thread lays only through `on_link` (`ControlSocket`).
    """

    def __init__(self, control: ControlSocket):
        self._control = control
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._silent: set[str] = set()  # names of the NICs that the thread asks
        self._asking = False
        self._thread = ServiceThread(f"gpunetio {control.name} LAN", self._ask_again)

    def link(self) -> list[Link]:
        """Return links to all NICs that answer. They have PATIENCE when looked at, and again when asked for links."""
        control, own = self._control, self._control.addresses[0]
        if not control.claimed[own]:
            logger.warning(
                "%s reaches no Ethernet queue of another process: another process has its address %s; give one of the "
                "two NICs another address", control.name, own,
            )
            return []
        links, silent = self._ask(name for name in names() if _is_address(name) and name not in control.listening)
        if silent:
            logger.warning(
                "%s: Ethernet frames do not reach the NICs at %s before these answer: their processes are stopped or "
                "busy", control.name, ", ".join(sorted(silent)),
            )
            with self._lock:
                self._silent |= silent
                begin, self._asking = not self._asking, True
            if begin and self._thread.join():
                self._begin_asking()
        return links

    def _begin_asking(self) -> None:
        try:
            self._thread.start()
        except BaseException:
            with self._lock:
                self._asking = False
            raise

    def _ask(self, wanted: Iterable[str]) -> tuple[list[Link], set[str]]:
        """Ask NICs whether they are on the LAN, and members for links. Return the links, and the silent NICs."""
        silent: set[str] = set()
        try:
            found = look_at_all(wanted, silent=silent)
        except OSError as error:  # probably out of descriptors
            logger.warning("%s: Ethernet frames reach no other process: %s", self._control.name, error)
            return [], silent
        for _, _, fds in found.values():
            for fd in fds:
                os.close(fd)
        members = [name for name, (pid, answer, _) in found.items() if pid != os.getpid() and _is_member(name, answer)]
        links: list[Link] = []
        end = time.monotonic() + PATIENCE
        for name in members[:MAX_LINKS]:
            try:
                link = self._control.connect(name, max(0.0, end - time.monotonic()), self._control.addresses[0])
            except TimedOutError:
                silent.add(name)
            except BadStateError:  # this NIC is being closed
                break
            except (DocaError, OSError) as error:
                logger.warning("%s: Ethernet frames do not reach the NIC at %s: %s", self._control.name, name, error)
            else:
                if link is not None:
                    links.append(link)
                else:
                    logger.warning("%s: Ethernet frames do not reach the NIC at %s: it gives no link",
                                   self._control.name, name)
        return links, silent

    def _ask_again(self) -> None:
        delay = _FIRST_DELAY
        while not self._closed.wait(delay):
            delay = min(2 * delay, _LONGEST_DELAY)
            with self._lock:
                wanted = set(self._silent)
            _, silent = self._ask(wanted)
            with self._lock:
                self._silent -= wanted - silent
                self._asking = bool(self._silent)
                if not self._asking:
                    break

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()


def _is_address(name: str) -> bool:
    """Return whether this name is an address that a NIC has claimed, not `address/pid`."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_member(name: str, answer: Body) -> bool:
    """Return whether the NIC that was asked under `name` is on the LAN, and `name` is its first address."""
    addresses = answer.get("addresses")
    return answer.get(ON_LAN) is True and isinstance(addresses, list) and addresses[:1] == [name]
