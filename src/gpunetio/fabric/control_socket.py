"""The control socket of a NIC, by which the software NICs of one host lay links to each other.

They are those of one user, in one network namespace. For each of its addresses, a NIC listens on a socket that claims
the address (claims.py). There, another NIC asks for a link (link.py), and a process that looks at the NIC asks for the
memory of its tables (discovery.py).

A request is a message (control_message.py) with `version` and `op`. The answer is a message with `version` and `ok`,
and if it refuses, a `reason`. After "connect" the socket stays open as long as both sides keep the link. If both have
said `letters`, they may send each other messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Any

from ..errors import BadStateError, InUseError, InvalidValueError, TimedOutError
from ..service import ServiceThread
from .claims import MAX_PENDING, PATIENCE, PREFIX, RETRY, claimant, close_after_fork, dial, new_socket, owner_of
from .control_message import VERSION, BadMessage, Body, PartialMessage, credentials, receive, send
from .link import DEFAULT_CAPACITY, MAX_MESSAGE_FDS, IpAddress, Link, Parts, check_capacity
from .link_limits import excess

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

MAX_REQUEST_FDS = 4  # descriptors of a request; no valid request has as many
STOP_TIMEOUT = 5.0
_LATER = "not now: there is such a link, or one is being laid"  # the peer finds it, or asks again


class _Caller:
    """A connection whose request has not arrived yet."""

    def __init__(self, pid: int):
        self.pid, self.message = pid, PartialMessage(MAX_REQUEST_FDS)
        self.deadline = time.monotonic() + PATIENCE


class ControlSocket:
    """The control socket of the NIC `name`: claims `addresses`, lays links to other NICs, and takes theirs.

    `claimed[address]` is False when another process has the address. Then other processes can only look at the NIC.
    `publication()` returns what they get: a description, and descriptors of memory. It must not wait for anything.

    `on_link(link)` is called once for each link, whichever side laid it. `on_gone(link)` is called once when the link's
    peer hangs up or dies, but not when this side has closed the link. The calls come in order from a thread of
    the socket, so they may wait for a lock; `connect` does not wait for them. Without `on_link`, it takes no links. It
    never takes more than MAX_LINKS, or MAX_LINKS_OF_ONE from one process. A link joins NICs of one `medium`.

    `on_message(link, message, descriptors)` is called from the same thread for each message of a link's peer. It closes
    the descriptors. The link's next message is not read before it returns.
    """

    name: str
    capacity: int
    medium: str
    addresses: tuple[IpAddress, ...]

    def __init__(
        self, addresses: Iterable[IpAddress | str], name: str,
        publication: Callable[[], tuple[Body, list[int]]] = lambda: ({}, []),
        on_link: Callable[[Link], None] | None = None, on_gone: Callable[[Link], None] = lambda link: None,
        capacity: int = DEFAULT_CAPACITY, medium: str = "ETHERNET",
        on_message: Callable[[Link, Body, list[int]], None] | None = None,
    ):  # fmt: skip
        self.name, self.capacity, self.medium = name, check_capacity(capacity), medium
        self.addresses = tuple(ip_address(address) for address in addresses)
        if not self.addresses:
            raise InvalidValueError(f"{name} has no address: a control socket is found by its addresses")
        self.claimed: dict[IpAddress, bool] = {}
        self.listening: list[str] = []  # names, without the prefix
        self._publication, self._on_link, self._on_gone = publication, on_link, on_gone
        self._on_message = on_message
        self._pid = os.getpid()
        self._links: dict[tuple[IpAddress, IpAddress], Link] = {}
        self._laying: set[tuple[IpAddress, IpAddress]] = set()  # pairs for which `connect` is at work
        self._untold: set[Link] = set()  # for which `on_link` has not returned
        self._changed = threading.Condition()  # guards those three
        self._closing = False
        self._events: queue.SimpleQueue[tuple[Callable[[Link], None], Link, Any] | None] = queue.SimpleQueue()
        self._teller: ServiceThread | None = None
        self._new_links: deque[Link] = deque()  # whose heartbeat is to be watched
        self._selector = selectors.DefaultSelector()
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._selector.close()
            raise
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            for address in self.addresses:
                self._listen(address)
        except BaseException:
            self._close_all()
            raise
        self._thread = ServiceThread(f"gpunetio {name} control", self._serve)
        self._thread.start()

    def _listen(self, address: IpAddress) -> None:
        """Claim the address. If another process has it, listen under `address/pid`."""
        tries = [str(address), f"{address}/{self._pid}", *(f"{address}/{self._pid}.{n}" for n in range(1, 100))]
        listener = new_socket()
        for name in tries:
            try:
                listener.bind(f"\0{PREFIX}{name}")
                break
            except OSError as error:  # EADDRINUSE
                if name == tries[-1]:
                    listener.close()
                    raise InUseError(f"cannot listen for {address}: {error}") from error
        listener.listen(MAX_PENDING)
        listener.setblocking(False)
        self.claimed[address] = name == tries[0]
        self.listening.append(name)
        self._selector.register(listener, selectors.EVENT_READ, data=self)

    # --- links from here -------------------------------------------------------------------------------------------

    def connect(self, ip: IpAddress | str, timeout: float = PATIENCE, source: IpAddress | None = None) -> Link | None:
        """Return the link to the NIC that has claimed `ip`. Lay it unless there is one.

        None when no link can be laid: nobody has that address, another user has it, or its NIC refuses (the log says
        why). TimedOutError when its process does not answer, InUseError when another process has our own address.
        `source` is our address that the link is for, by default the first of the same family.
        """
        peer = ip_address(ip)
        own = source or next((a for a in self.addresses if a.version == peer.version), self.addresses[0])
        if peer in self.addresses or own not in self.addresses:
            raise InvalidValueError(
                f"{self.name} cannot lay a link from {own} to {peer}: its own addresses are "
                f"{', '.join(map(str, self.addresses))}, and a link leads from one of them to another NIC's"
            )
        if not self.claimed[own]:
            raise InUseError(
                f"{self.name} cannot lay a link from {own}: {claimant(own) or 'another process'} has claimed that "
                "address; close the NIC there, or give one of the two another address"
            )
        key, end = (own, peer), time.monotonic() + timeout
        with self._changed:
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
                with self._changed:
                    self._check_open()
                    if self._alive(key) is None:
                        self._wait(key, end, RETRY)
                    if (link := self._alive(key)) is not None:
                        return link
        finally:
            with self._changed:
                self._laying.discard(key)
                self._changed.notify_all()

    def _alive(self, key: tuple[IpAddress, IpAddress]) -> Link | None:
        link = self._links.get(key)
        return None if link is None or link.is_dead() else link

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise BadStateError(f"{self.name} belongs to the parent process: open the device anew in this one")
        if self._closing:
            raise BadStateError(f"{self.name} is closed")

    def _wait(self, key: tuple[IpAddress, IpAddress], end: float, most: float = PATIENCE) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimedOutError(f"{self.name} got no link to {key[1]}: the NIC there does not answer")
        self._changed.wait(min(left, most))

    def _lay(self, key: tuple[IpAddress, IpAddress], end: float) -> Link | str | None:
        """Ask once for a link. Return the link, None when it is refused, or _LATER."""
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
                "capacity": self.capacity, "medium": self.medium, "letters": self._on_message is not None,
            }  # fmt: skip
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
        except (OSError, EOFError):  # it has closed, or had no room: the next attempt shows which
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
        return self._on_message is not None and message.get("letters") is True

    def _register(self, link: Link, unless_laying: bool = False) -> bool:
        """Take a link in. Return False if there is one or, with `unless_laying`, if one is being laid from here."""
        key = link.own_address, link.peer_address
        with self._changed:
            old = self._links.get(key)
            if old is not None and old.peer_pid == link.peer_pid and not old.is_dead():
                return False
            if self._closing or (unless_laying and key in self._laying):
                return False
            if old is not None:  # it is dead, but this has not been noticed yet
                self._lose(old)
            self._links[key] = link
            if self._on_link is not None:
                self._untold.add(link)
            link.heartbeat.setblocking(False)
            self._tell(self._on_link, link)
            self._new_links.append(link)
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
        return True

    def _forget(self, link: Link) -> None:
        """Forget a link that is being closed."""
        if self._pid != os.getpid():
            return
        with self._changed:
            key = link.own_address, link.peer_address
            if self._links.get(key) is link:
                del self._links[key]

    def _lose(self, link: Link) -> None:
        """Note that the peer of a link is gone."""
        with self._changed:
            if not link.gone:
                link.gone = True
                self._forget(link)
                if not link.closed:
                    self._tell(self._on_gone, link)

    @property
    def links(self) -> list[Link]:
        """The links whose peers are alive."""
        with self._changed:
            return list(self._links.values())

    # --- callbacks -------------------------------------------------------------------------------------------------

    def _tell(self, callback: Callable[[Link], None] | None, link: Link, message: Body | None = None) -> None:
        if callback is None:
            return
        if self._teller is None:
            self._teller = ServiceThread(f"gpunetio {self.name} links", self._call_back)
            self._teller.start()
        self._events.put((callback, link, message))

    def _call_back(self) -> None:
        while (event := self._events.get()) is not None:
            callback, link, message = event
            try:
                if not self._closing and not link.closed:
                    callback(link)
            except Exception:
                logger.exception("%s: %s failed", self.name, link)
            with self._changed:
                if callback is self._on_link:
                    self._untold.discard(link)
            if message is not None:
                self._await_message(link)

    def _read_message(self, sock: socket.socket, link: Link) -> None:
        """Read a piece of a message from a link's socket, or the end of the link."""
        try:
            if not link.talks:
                raise EOFError
            if (message := link.message.read(sock)) is not None:
                self._selector.unregister(sock)  # until this message has been dealt with
                on_message = self._on_message
                assert on_message is not None
                self._tell(lambda link: on_message(link, message, link.message.take_fds()), link, message)
        except BlockingIOError:
            pass
        except (OSError, EOFError, BadMessage) as error:
            if isinstance(error, BadMessage):
                logger.warning("%s drops %s: %s", self.name, link, error)
            link.message.close()
            self._drop(sock)
            self._lose(link)

    def _await_message(self, link: Link) -> None:
        """Wait for a link's next message. The last one has been dealt with."""
        link.message.close()
        link.message = PartialMessage(MAX_MESSAGE_FDS)
        with self._changed:
            if self._closing:
                link.heartbeat.close()
            else:
                self._new_links.append(link)
                os.eventfd_write(self._wake, 1)

    # --- the service thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._time_left()):
                sock = key.fileobj
                if isinstance(sock, int):
                    self._woken()
                elif sock.fileno() < 0:  # type: ignore[union-attr]
                    continue  # an earlier event of this round has closed it
                elif key.data is self:
                    self._accept(sock)  # type: ignore[arg-type]
                elif isinstance(key.data, Link):
                    self._read_message(sock, key.data)  # type: ignore[arg-type]
                else:
                    self._read_request(sock, key.data)  # type: ignore[arg-type]
            now = time.monotonic()
            for sock, caller in self._callers():
                if caller.deadline <= now:
                    self._dismiss(sock, caller, f"it has sent no request within {PATIENCE:g} s")
        self._close_all()

    def _time_left(self) -> float | None:
        deadlines = [caller.deadline for _, caller in self._callers()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _callers(self) -> list[tuple[socket.socket, _Caller]]:
        keys = list(self._selector.get_map().values())
        return [(key.fileobj, key.data) for key in keys if isinstance(key.data, _Caller)]  # type: ignore[misc]

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._new_links:
            link = self._new_links.popleft()
            try:
                self._selector.register(link.heartbeat, selectors.EVENT_READ, data=link)
            except (ValueError, KeyError):  # it was closed meanwhile
                self._lose(link)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, most likely: they may be closed soon
            logger.warning("%s cannot accept a connection: %s", self.name, error)
            time.sleep(RETRY)
            return
        close_after_fork(sock)
        sock.setblocking(False)
        pid, uid = credentials(sock)
        callers = self._callers()
        if uid != os.geteuid():
            logger.info("%s refuses process %d: it belongs to user %d", self.name, pid, uid)
            sock.close()
            return
        if len(callers) >= MAX_PENDING:
            self._dismiss(*callers[0], "too many processes ask at the same time")
        self._selector.register(sock, selectors.EVENT_READ, data=_Caller(pid))

    def _drop(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _dismiss(self, sock: socket.socket, caller: _Caller, why: object) -> None:
        logger.info("%s dismisses process %d: %s", self.name, caller.pid, why)
        caller.message.close()
        self._drop(sock)

    def _read_request(self, sock: socket.socket, caller: _Caller) -> None:
        """Read a piece of a request."""
        try:
            request = caller.message.read(sock)
            if request is not None:
                self._selector.unregister(sock)
                if not self._answer(sock, caller, request):
                    sock.close()
                caller.message.close()
        except BlockingIOError:
            pass
        except EOFError:
            caller.message.close()
            self._drop(sock)
        except Exception as error:  # whatever a peer sends, the others must not suffer
            self._dismiss(sock, caller, f"{type(error).__name__}: {error}")

    def _answer(self, sock: socket.socket, caller: _Caller, request: Body) -> bool:
        """Do what a request asks for. Return whether the connection stays open."""
        if request.get("version") != VERSION:
            reason = f"{self.name} speaks version {VERSION}, not {request.get('version')!r}: use the same release"
        elif request.get("op") == "look":
            description, fds = self._publication()
            own = {"name": self.name, "addresses": [*map(str, self.addresses)], "listening": self.listening}
            send(sock, {**description, **own, "version": VERSION, "ok": True}, fds)
            return False
        elif request.get("op") == "connect":
            try:
                self._take_link(sock, caller, request)
                return True
            except _Refusal as refusal:
                reason = str(refusal)
        else:
            reason = f"{self.name} does not know the request {request.get('op')!r}"
        send(sock, {"version": VERSION, "ok": False, "reason": reason})
        return False

    def _take_link(self, sock: socket.socket, caller: _Caller, request: Body) -> None:
        """Take the link that a peer lays, or raise `_Refusal`."""
        try:
            own, peer = ip_address(str(request.get("to"))), ip_address(str(request.get("from")))
            capacity = check_capacity(request.get("capacity"))
        except ValueError as error:
            raise _Refusal(error) from None
        if self._on_link is None:
            raise _Refusal(f"{self.name} takes no links")
        if request.get("medium") != self.medium:
            raise _Refusal(f"{self.name} is on {self.medium}, not on {request.get('medium')}")
        if not self.claimed.get(own) or peer in self.addresses:
            raise _Refusal(f"{self.name} has no link from {own} to {peer} to offer")
        with self._changed:
            links = {*self._links.values(), *self._untold}
        if (why := excess(links, caller.pid)) is not None:
            raise _Refusal(f"{self.name} has {why}")
        try:
            if owner_of(peer, timeout=0) != caller.pid:
                raise _Refusal(f"{peer} is not claimed by process {caller.pid}")
        except TimedOutError:
            raise _Refusal(_LATER) from None
        fds = caller.message.take_fds()
        try:
            parts = Parts.received(fds, capacity)
        except (InvalidValueError, OSError) as error:
            for fd in fds:
                os.close(fd)
            raise _Refusal(error) from None
        talks = self._talks(request)
        link = Link(own, peer, (caller.pid, str(request.get("name"))), parts, False, sock, self._forget, talks)
        # When both sides lay a link at the same time, that of the lower address counts.
        with link.sending:  # no message before the answer
            if not self._register(link, unless_laying=(own.version, own) < (peer.version, peer)):
                link.closed = True
                parts.close()
                raise _Refusal(_LATER)
            answer = {"version": VERSION, "ok": True, "name": self.name, "letters": self._on_message is not None}
            try:
                send(sock, answer, [parts.notifier.notify_fd])
            except OSError:
                link.hang_up()  # the heartbeat will show it

    # --- life cycle ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the addresses back and hang up all links. Wait for a running callback; none begins afterwards.

        The memory of a link stays mapped until `link.close()`. Idempotent.
        """
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            os.eventfd_write(self._wake, 1)
        self._thread.join(STOP_TIMEOUT)
        self._events.put(None)
        if self._teller is not None and not self._teller.is_current:
            if not self._teller.join(STOP_TIMEOUT):
                logger.warning("%s: a callback has not returned for %g s", self.name, STOP_TIMEOUT)

    def _close_all(self) -> None:
        """Close every socket."""
        for link in [*self._links.values(), *self._new_links]:
            link.hang_up()
            link.heartbeat.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Caller):
                key.data.message.close()
            elif isinstance(key.data, Link):
                key.data.hang_up()  # a link that was closed just now
                key.data.message.close()
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        with self._changed:
            os.close(self._wake)

    def __enter__(self) -> ControlSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Refusal(Exception):
    """Why a link is not taken."""
