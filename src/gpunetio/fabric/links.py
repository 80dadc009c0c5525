"""The links of a NIC to other NICs of its host: those that it lays, and those that it takes.

A link begins with a request on the peer's control socket (control_socket.py), whose connection stays open as long as
both sides keep the link. If both have said `letters`, they may send each other messages.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from ..errors import BadStateError, InUseError, InvalidValueError, TimedOutError
from ..service import ServiceThread
from .claims import PATIENCE, RETRY, claimant, dial, owner_of
from .control_message import VERSION, BadMessage, Body, PartialMessage, credentials, receive, send
from .link import MAX_MESSAGE_FDS, IpAddress, Link, Parts, check_capacity
from .link_limits import excess

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

STOP_TIMEOUT = 5.0
_LATER = "not now: there is such a link, or one is being laid"  # the peer finds the other link, or asks again


class Refusal(Exception):
    """A link is not taken; the message says why."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks that tell a NIC about its links. One thread makes the calls (`ControlSocket`).

    Another thread calls `prepare` for a link that is taken, before the other side knows of the link.
    """

    on_link: Callable[[Link], None] | None
    prepare: Callable[[Link], None]
    on_gone: Callable[[Link], None]
    on_message: Callable[[Link, Body, list[int]], None] | None


class Links:
    """The links of the NIC `name`, whose addresses are those in `claimed` (`ControlSocket`).

    `watch(link)` lets a link's connection be watched. It is called once for each link, and after each message, but not
    after `begin_to_close`: `changed` guards `closing` and the calls of `watch`.
    """

    name: str
    capacity: int
    medium: str
    changed: threading.Condition
    closing: bool

    def __init__(
        self, name: str, claimed: Mapping[IpAddress, bool], capacity: int, medium: str, tell: Callbacks,
        watch: Callable[[Link], None],
    ):
        self.name, self.capacity, self.medium = name, check_capacity(capacity), medium
        self._claimed, self._callbacks, self._watch = claimed, tell, watch
        self._pid = os.getpid()
        self._links: dict[tuple[IpAddress, IpAddress], Link] = {}
        self._laying: set[tuple[IpAddress, IpAddress]] = set()  # pairs that a call of `connect` is working on
        self._untold: set[Link] = set()  # links for which `on_link` has not returned
        self.changed = threading.Condition()  # guards these three as well
        self.closing = False
        self._events: queue.SimpleQueue[tuple[Callable[[Link], None], Link, Body | None] | None] = queue.SimpleQueue()
        self._teller: ServiceThread | None = None

    @property
    def present(self) -> list[Link]:
        """Return the links whose peers are alive."""
        with self.changed:
            return list(self._links.values())

    # --- links from here -------------------------------------------------------------------------------------------

    def connect(self, ip: IpAddress | str, timeout: float = PATIENCE, source: IpAddress | None = None) -> Link | None:
        """Return the link to the NIC that has claimed `ip`. Lay it unless there is one.

        Return None if no link can be laid: nobody has that address, another user has it, or its NIC refuses (the log
        says why). TimedOutError if its process does not answer, InUseError if another process has our own address.
        `source` is our address that the link is for, by default the first of the same family.
        """
        peer = ip_address(ip)
        own = source or next((a for a in self._claimed if a.version == peer.version), next(iter(self._claimed)))
        if peer in self._claimed or own not in self._claimed:
            raise InvalidValueError(
                f"{self.name} cannot lay a link from {own} to {peer}: its own addresses are "
                f"{', '.join(map(str, self._claimed))}, and a link leads from one of them to another NIC's"
            )
        if not self._claimed[own]:
            raise InUseError(
                f"{self.name} cannot lay a link from {own}: {claimant(own) or 'another process'} has claimed that "
                "address; close the NIC there, or give one of the two another address"
            )
        key, end = (own, peer), time.monotonic() + timeout
        with self.changed:
            while True:
                self._check_open()
                if (link := self._alive(key)) is not None:
                    return link
                if key not in self._laying:
                    break
                self._wait(key, end)
            self._laying.add(key)
        try:
            while True:
                answer = self._lay(key, end)
                if not isinstance(answer, str):
                    return answer
                with self.changed:
                    self._check_open()
                    if self._alive(key) is None:
                        self._wait(key, end, RETRY)
                    if (link := self._alive(key)) is not None:
                        return link
        finally:
            with self.changed:
                self._laying.discard(key)
                self.changed.notify_all()

    def _alive(self, key: tuple[IpAddress, IpAddress]) -> Link | None:
        link = self._links.get(key)
        return None if link is None or link.is_dead() else link

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise BadStateError(f"{self.name} belongs to the parent process: open the device anew in this one")
        if self.closing:
            raise BadStateError(f"{self.name} is closed")

    def _wait(self, key: tuple[IpAddress, IpAddress], end: float, most: float = PATIENCE) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimedOutError(f"{self.name} got no link to {key[1]}: the NIC there does not answer")
        self.changed.wait(min(left, most))

    def _lay(self, key: tuple[IpAddress, IpAddress], end: float) -> Link | str | None:
        """Ask once for a link. Return the link, None if it is refused, or _LATER."""
        own, peer = key
        sock = dial(str(peer), end)
        if sock is None:
            return None
        pid, uid = credentials(sock)
        if uid != os.geteuid():
            logger.info("%s lays no link to %s: process %d there belongs to user %d", self.name, peer, pid, uid)
            sock.close()
            return None
        parts = Parts.new(self.capacity)
        fds: list[int] = []
        keep = False
        try:
            request = {
                "version": VERSION, "op": "connect", "name": self.name, "from": str(own), "to": str(peer),
                "capacity": self.capacity, "medium": self.medium, "letters": self._callbacks.on_message is not None,
            }
            send(sock, request, parts.fds)
            answer, fds = receive(sock, end)
            if answer.get("version") == VERSION and answer.get("ok") is True:
                parts.complete(fds)
                fds.clear()
                name, talks = str(answer.get("name")), self._talks(answer)
                link = Link(own, peer, (pid, name), parts, True, sock, self._forget, talks)
                keep = self._register(link)
                return link if keep else _LATER
            if answer.get("reason") == _LATER:
                return _LATER
            logger.info("%s gets no link to %s: %s", self.name, peer, answer.get("reason", answer))
            return None
        except TimeoutError:
            raise TimedOutError(f"{self.name} got no link to {peer}: process {pid} there does not answer") from None
        except (OSError, EOFError):  # it has closed, or had no room: the next attempt shows which of them
            time.sleep(RETRY)
            return _LATER
        except (BadMessage, InvalidValueError) as error:
            logger.warning("%s gets no link to %s: process %d answers nonsense: %s", self.name, peer, pid, error)
            return None
        finally:
            for fd in fds:
                os.close(fd)
            if not keep:
                sock.close()
                parts.close()

    def _talks(self, message: Body) -> bool:
        """Return whether messages may follow this one."""
        return self._callbacks.on_message is not None and message.get("letters") is True

    # --- links from elsewhere --------------------------------------------------------------------------------------

    def take(self, sock: socket.socket, pid: int, request: Body, take_fds: Callable[[], list[int]]) -> None:
        """Take the link that process `pid` lays, or raise `Refusal`. `take_fds` returns the request's descriptors."""
        try:
            own, peer = ip_address(str(request.get("to"))), ip_address(str(request.get("from")))
            capacity = check_capacity(request.get("capacity"))
        except ValueError as error:
            raise Refusal(error) from None
        if self._callbacks.on_link is None:
            raise Refusal(f"{self.name} takes no links")
        if request.get("medium") != self.medium:
            raise Refusal(f"{self.name} is on {self.medium}, not on {request.get('medium')}")
        if not self._claimed.get(own) or peer in self._claimed:
            raise Refusal(f"{self.name} has no link from {own} to {peer} to offer")
        with self.changed:
            links = {*self._links.values(), *self._untold}
        if (why := excess(links, pid)) is not None:
            raise Refusal(f"{self.name} has {why}")
        try:
            if owner_of(peer, timeout=0) != pid:
                raise Refusal(f"{peer} is not claimed by process {pid}")
        except TimedOutError:
            raise Refusal(_LATER) from None
        fds = take_fds()
        try:
            parts = Parts.received(fds, capacity)
        except (InvalidValueError, OSError) as error:
            for fd in fds:
                os.close(fd)
            raise Refusal(error) from None
        talks = self._talks(request)
        link = Link(own, peer, (pid, str(request.get("name"))), parts, False, sock, self._forget, talks)
        # When both sides lay a link at the same time, the one from the lower address counts.
        with link.sending:  # no message may precede the answer
            if not self._register(link, unless_laying=(own.version, own) < (peer.version, peer)):
                link.closed = True
                parts.close()
                raise Refusal(_LATER)
            letters = self._callbacks.on_message is not None
            self._callbacks.prepare(link)
            answer = {"version": VERSION, "ok": True, "name": self.name, "letters": letters}
            try:
                send(sock, answer, [parts.notifier.notify_fd])
            except OSError:
                link.hang_up()  # the heartbeat will show it

    # --- the table -------------------------------------------------------------------------------------------------

    def _register(self, link: Link, unless_laying: bool = False) -> bool:
        """Add a link to the table. Return False if there is one or, with `unless_laying`, if this side is laying one.
        """
        key = link.own_address, link.peer_address
        with self.changed:
            old = self._links.get(key)
            if old is not None and old.peer_pid == link.peer_pid and not old.is_dead():
                return False
            if self.closing or (unless_laying and key in self._laying):
                return False
            if old is not None:  # dead, which has not been noticed yet
                self.lose(old)
            self._links[key] = link
            if self._callbacks.on_link is not None:
                self._untold.add(link)
            link.heartbeat.setblocking(False)
            self._tell(self._callbacks.on_link, link)
            self._watch(link)
            self.changed.notify_all()
        return True

    def _forget(self, link: Link) -> None:
        """Forget a link that is being closed."""
        if self._pid != os.getpid():
            return
        with self.changed:
            key = link.own_address, link.peer_address
            if self._links.get(key) is link:
                del self._links[key]

    def lose(self, link: Link) -> None:
        """Note that the peer of a link is gone."""
        with self.changed:
            if not link.gone:
                link.gone = True
                self._forget(link)
                if not link.closed:
                    self._tell(self._callbacks.on_gone, link)

    # --- callbacks -------------------------------------------------------------------------------------------------

    def _tell(self, callback: Callable[[Link], None] | None, link: Link, message: Body | None = None) -> None:
        if callback is None:
            return
        if self._teller is None:
            teller = ServiceThread(f"gpunetio {self.name} links", self._call_back)
            teller.start()
            self._teller = teller
        self._events.put((callback, link, message))

    def _call_back(self) -> None:
        while (event := self._events.get()) is not None:
            callback, link, message = event
            try:
                if not self.closing and not link.closed:
                    callback(link)
            except Exception:
                logger.exception("%s: %s failed", self.name, link)
            with self.changed:
                if callback is self._callbacks.on_link:
                    self._untold.discard(link)
            if message is not None:
                self._await_message(link)

    def heard(self, link: Link, message: Body) -> None:
        """Pass on a message of a link's peer. The link is not watched until the message has been handled."""
        on_message = self._callbacks.on_message
        assert on_message is not None
        self._tell(lambda link: on_message(link, message, link.message.take_fds()), link, message)

    def _await_message(self, link: Link) -> None:
        """Wait for a link's next message. The last one has been handled."""
        link.message.close()
        link.message = PartialMessage(MAX_MESSAGE_FDS)
        with self.changed:
            if self.closing:
                link.heartbeat.close()
            else:
                self._watch(link)

    # --- life cycle ------------------------------------------------------------------------------------------------

    def begin_to_close(self) -> None:
        """Stop taking and laying links."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def end_callbacks(self) -> None:
        """Wait for a running callback. None begins afterwards."""
        self._events.put(None)
        if self._teller is not None and not self._teller.is_current:
            if not self._teller.join(STOP_TIMEOUT):
                logger.warning("%s: a callback has not returned for %g s", self.name, STOP_TIMEOUT)
