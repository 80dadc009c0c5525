"""How the software NICs of one host find each other: those of one user, in one network namespace.

For each of its addresses, a NIC listens on an abstract unix socket named after the address. Such a name belongs to the
network namespace, is unique there, and vanishes with the process: it is the claim on the address. Through this socket,
another NIC asks for a link (link.py), and a process that looks at the NIC asks for the memory of its tables.

A request is a letter (mail.py) with `version` and `op`. The answer is a letter with `version` and `ok`, and if it
refuses, a `reason`. After "connect" the socket stays open as long as both sides keep the link. If both have said
`letters`, they may send each other letters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Any

from ..errors import BadStateError, InUseError, InvalidValueError, TimedOutError
from ..service import ServiceThread
from .link import DEFAULT_CAPACITY, MAX_LETTER_FDS, IpAddress, Link, Parts, check_capacity
from .mail import BadLetter, PartialLetter, credentials, receive, send

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

VERSION = 2
PATIENCE = 1.0  # seconds that a peer has for its request
MAX_VISITORS = 64  # pending requests
MAX_REQUEST_FDS = 4  # descriptors of a request; no valid request has as many
MAX_LINKS = 64  # of a NIC
MAX_LINKS_OF_ONE = 32  # that one process may lay to it
STOP_TIMEOUT = 5.0
_PREFIX = "gpunetio/"
_LATER = "not now: there is such a link, or one is being laid"  # the peer finds it, or asks again
_RETRY = 0.01  # seconds
# A line of /proc/net/unix for a listening socket (flag SO_ACCEPTCON): address, references, protocol, flags, type,
# state, inode, name. Names may have any bytes, even line feeds; ours are printable.
_LISTENER = re.compile(rb"\S+: [0-9A-F]{8} [0-9A-F]{8} 00010000 [0-9A-F]{4} [0-9A-F]{2} +\d+ @gpunetio/([!-~]+)")

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _after_fork() -> None:
    """Close all sockets in a forked child: names and links are the parent's, and must end with it."""
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_after_fork)


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _sockets.add(sock)
    return sock


def names() -> list[str]:
    """Return the names under which NICs of this network namespace listen: their addresses, or `address/pid`."""
    with open("/proc/net/unix", "rb") as table:
        lines = table.read().split(b"\n")
    return sorted({match[1].decode() for line in lines if (match := _LISTENER.fullmatch(line))})


def owner_of(ip: IpAddress | str, timeout: float = PATIENCE) -> int | None:
    """Return the process that claimed an address, or None when none did. TimedOutError when it does not answer."""
    sock = _call(str(ip_address(ip)), time.monotonic() + timeout)
    if sock is None:
        return None
    with sock:
        return credentials(sock)[0]


def claimant(ip: IpAddress | str) -> str | None:
    """Return in words who claimed an address, or None when nobody did. Does not wait for an answer."""
    try:
        pid = owner_of(ip, timeout=0)
    except TimedOutError:
        return "a process that does not answer"
    return None if pid is None else f"process {pid}"


def look(name: str, timeout: float = PATIENCE) -> tuple[int, dict[str, Any], list[int]] | None:
    """Ask one NIC for its tables, as `look_at_all` does. Return None when it does not show them."""
    return look_at_all([name], timeout).get(name)


def look_at_all(
    wanted: Iterable[str], timeout: float = PATIENCE
) -> dict[str, tuple[int, dict[str, Any], list[int]]]:
    """Ask the NICs that listen under these names for their tables. Return (pid, description, descriptors) by name.

    All NICs are asked at the same time, and have `timeout` seconds together. The caller closes the descriptors. A NIC
    of another user, or one that does not answer in time or sensibly, is left out.
    """
    end = time.monotonic() + timeout
    found: dict[str, tuple[int, dict[str, Any], list[int]]] = {}
    todo = deque(dict.fromkeys(wanted))
    with selectors.DefaultSelector() as asked:
        try:
            while todo or asked.get_map():
                for _ in range(min(len(todo), MAX_VISITORS - len(asked.get_map()))):
                    name = todo.popleft()
                    try:
                        if (sock := _ask_to_look(name)) is not None:
                            asked.register(sock, selectors.EVENT_READ, data=(name, PartialLetter()))
                    except BlockingIOError:  # its listen queue is full
                        todo.append(name)
                left = end - time.monotonic()
                if left <= 0:
                    silent = [*todo, *(key.data[0] for key in asked.get_map().values())]
                    logger.info("cannot look at the NICs at %s: they do not answer", ", ".join(silent))
                    break
                for key, _ in asked.select(min(left, _RETRY) if todo else left):
                    _hear_answer(asked, key, found)
        finally:
            for key in list(asked.get_map().values()):
                key.data[1].close()
                key.fileobj.close()  # type: ignore[union-attr]
    return found


def _ask_to_look(name: str) -> socket.socket | None:
    """Ask the NIC that listens under `name`. Return the connection, or None if the NIC is gone, or another user's.

    BlockingIOError when its listen queue is full.
    """
    sock = _new_socket()
    try:
        sock.setblocking(False)
        sock.connect(f"\0{_PREFIX}{name}")
        if credentials(sock)[1] == os.geteuid():
            send(sock, {"version": VERSION, "op": "look"})
            return sock
    except BlockingIOError:
        sock.close()
        raise
    except OSError as error:
        logger.info("cannot look at the NIC at %s: %s", name, error)
    sock.close()
    return None


def _hear_answer(
    asked: selectors.BaseSelector, key: selectors.SelectorKey,
    found: dict[str, tuple[int, dict[str, Any], list[int]]],
) -> None:  # fmt: skip
    """Read a piece of the answer of a NIC that was asked for its tables."""
    sock: Any = key.fileobj
    (name, letter), (pid, _) = key.data, credentials(sock)
    try:
        answer = letter.read(sock)
        if answer is None:
            return
        if answer.get("version") == VERSION and answer.get("ok") is True:
            found[name] = pid, answer, letter.take_fds()
        else:
            reason = answer.get("reason", answer)
            logger.info("cannot look at the NIC at %s (process %d): %s", name, pid, reason)
    except BlockingIOError:
        return
    except (OSError, EOFError, BadLetter) as error:
        logger.info("cannot look at the NIC at %s (process %d): %s", name, pid, error)
    asked.unregister(sock)
    letter.close()
    sock.close()


def _call(name: str, end: float) -> socket.socket | None:
    """Return a connection to the process that listens under `name`, or None when none does. TimedOutError at `end`."""
    sock = _new_socket()
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(f"\0{_PREFIX}{name}")
                return sock
            except ConnectionRefusedError:
                sock.close()
                return None
            except BlockingIOError:  # its listen queue is full
                if time.monotonic() >= end:
                    raise TimedOutError(
                        f"the NIC at {name} does not answer: its process is stopped or busy, or another user's that "
                        "has taken the name"
                    ) from None
                time.sleep(_RETRY)
    except BaseException:
        sock.close()
        raise


class _Visitor:
    """A connection whose request has not arrived yet."""

    def __init__(self, pid: int):
        self.pid, self.letter = pid, PartialLetter(MAX_REQUEST_FDS)
        self.deadline = time.monotonic() + PATIENCE


class ControlSocket:
    """The control socket of the NIC `name`: claims `addresses`, lays links to other NICs, and takes theirs.

    `claimed[address]` is False when another process has the address. Then other processes can only look at the NIC.
    `publication()` returns what they get: a description, and descriptors of memory. It must not wait for anything.

    `on_link(link)` is called once for each link, whichever side laid it. `on_gone(link)` is called once when the link's
    peer hangs up or dies, but not when this side has closed the link. The calls come in order from a thread of the
    socket, so they may wait for a lock; `connect` does not wait for them. Without `on_link`, it takes no links. It
    never takes more than MAX_LINKS, or MAX_LINKS_OF_ONE from one process. A link joins NICs of one `medium`.

    `on_letter(link, letter, descriptors)` is called from the same thread for each letter of a link's peer, and closes
    the descriptors. The link's next letter is not read before it returns.
    """

    name: str
    capacity: int
    medium: str
    addresses: tuple[IpAddress, ...]

    def __init__(
        self, addresses: Iterable[IpAddress | str], name: str,
        publication: Callable[[], tuple[dict[str, Any], list[int]]] = lambda: ({}, []),
        on_link: Callable[[Link], None] | None = None, on_gone: Callable[[Link], None] = lambda link: None,
        capacity: int = DEFAULT_CAPACITY, medium: str = "ETHERNET",
        on_letter: Callable[[Link, dict[str, Any], list[int]], None] | None = None,
    ):  # fmt: skip
        self.name, self.capacity, self.medium = name, check_capacity(capacity), medium
        self.addresses = tuple(ip_address(address) for address in addresses)
        if not self.addresses:
            raise InvalidValueError(f"{name} has no address: a control socket is found by its addresses")
        self.claimed: dict[IpAddress, bool] = {}
        self.listening: list[str] = []  # names, without the prefix
        self._publication, self._on_link, self._on_gone = publication, on_link, on_gone
        self._on_letter = on_letter
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
        listener = _new_socket()
        for name in tries:
            try:
                listener.bind(f"\0{_PREFIX}{name}")
                break
            except OSError as error:  # EADDRINUSE
                if name == tries[-1]:
                    listener.close()
                    raise InUseError(f"cannot listen for {address}: {error}") from error
        listener.listen(MAX_VISITORS)
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
                        self._wait(key, end, _RETRY)
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
        sock = _call(str(peer), end)
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
                "capacity": self.capacity, "medium": self.medium, "letters": self._on_letter is not None,
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
            time.sleep(_RETRY)
            return _LATER
        except (BadLetter, InvalidValueError) as error:
            logger.warning("%s gets no link to %s: process %d answers nonsense: %s", self.name, peer, pid, error)
            return None
        finally:
            for fd in fds:
                os.close(fd)
            if not keep:
                sock.close()
                parts.close()

    def _talks(self, letter: dict[str, Any]) -> bool:
        """Return whether letters may follow this one."""
        return self._on_letter is not None and letter.get("letters") is True

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

    def _tell(self, callback: Callable[[Link], None] | None, link: Link, letter: dict[str, Any] | None = None) -> None:
        if callback is None:
            return
        if self._teller is None:
            self._teller = ServiceThread(f"gpunetio {self.name} links", self._call_back)
            self._teller.start()
        self._events.put((callback, link, letter))

    def _call_back(self) -> None:
        while (event := self._events.get()) is not None:
            callback, link, letter = event
            try:
                if not self._closing and not link.closed:
                    callback(link)
            except Exception:
                logger.exception("%s: %s failed", self.name, link)
            with self._changed:
                if callback is self._on_link:
                    self._untold.discard(link)
            if letter is not None:
                self._await_letter(link)

    def _read_letter(self, sock: socket.socket, link: Link) -> None:
        """Read a piece of a letter from a link's socket, or the end of the link."""
        try:
            if not link.talks:
                raise EOFError
            if (letter := link.letter.read(sock)) is not None:
                self._selector.unregister(sock)  # until this letter has been dealt with
                on_letter = self._on_letter
                assert on_letter is not None
                self._tell(lambda link: on_letter(link, letter, link.letter.take_fds()), link, letter)
        except BlockingIOError:
            pass
        except (OSError, EOFError, BadLetter) as error:
            if isinstance(error, BadLetter):
                logger.warning("%s drops %s: %s", self.name, link, error)
            link.letter.close()
            self._drop(sock)
            self._lose(link)

    def _await_letter(self, link: Link) -> None:
        """Wait for a link's next letter. The last one has been dealt with."""
        link.letter.close()
        link.letter = PartialLetter(MAX_LETTER_FDS)
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
                    self._welcome(sock)  # type: ignore[arg-type]
                elif isinstance(key.data, Link):
                    self._read_letter(sock, key.data)  # type: ignore[arg-type]
                else:
                    self._hear(sock, key.data)  # type: ignore[arg-type]
            now = time.monotonic()
            for sock, visitor in self._visitors():
                if visitor.deadline <= now:
                    self._dismiss(sock, visitor, f"it has sent no request within {PATIENCE:g} s")
        self._close_all()

    def _time_left(self) -> float | None:
        deadlines = [visitor.deadline for _, visitor in self._visitors()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _visitors(self) -> list[tuple[socket.socket, _Visitor]]:
        keys = list(self._selector.get_map().values())
        return [(key.fileobj, key.data) for key in keys if isinstance(key.data, _Visitor)]  # type: ignore[misc]

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._new_links:
            link = self._new_links.popleft()
            try:
                self._selector.register(link.heartbeat, selectors.EVENT_READ, data=link)
            except (ValueError, KeyError):  # it was closed meanwhile
                self._lose(link)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, most likely: they may be closed soon
            logger.warning("%s cannot accept a connection: %s", self.name, error)
            time.sleep(_RETRY)
            return
        _sockets.add(sock)
        sock.setblocking(False)
        pid, uid = credentials(sock)
        visitors = self._visitors()
        if uid != os.geteuid():
            logger.info("%s refuses process %d: it belongs to user %d", self.name, pid, uid)
            sock.close()
            return
        if len(visitors) >= MAX_VISITORS:
            self._dismiss(*visitors[0], "too many processes ask at the same time")
        self._selector.register(sock, selectors.EVENT_READ, data=_Visitor(pid))

    def _drop(self, sock: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _dismiss(self, sock: socket.socket, visitor: _Visitor, why: object) -> None:
        logger.info("%s dismisses process %d: %s", self.name, visitor.pid, why)
        visitor.letter.close()
        self._drop(sock)

    def _hear(self, sock: socket.socket, visitor: _Visitor) -> None:
        """Read a piece of a request."""
        try:
            request = visitor.letter.read(sock)
            if request is not None:
                self._selector.unregister(sock)
                if not self._answer(sock, visitor, request):
                    sock.close()
                visitor.letter.close()
        except BlockingIOError:
            pass
        except EOFError:
            visitor.letter.close()
            self._drop(sock)
        except Exception as error:  # whatever a peer sends, the others must not suffer
            self._dismiss(sock, visitor, f"{type(error).__name__}: {error}")

    def _answer(self, sock: socket.socket, visitor: _Visitor, request: dict[str, Any]) -> bool:
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
                self._take_link(sock, visitor, request)
                return True
            except _Refusal as refusal:
                reason = str(refusal)
        else:
            reason = f"{self.name} does not know the request {request.get('op')!r}"
        send(sock, {"version": VERSION, "ok": False, "reason": reason})
        return False

    def _take_link(self, sock: socket.socket, visitor: _Visitor, request: dict[str, Any]) -> None:
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
        self._check_room(visitor.pid)
        try:
            if owner_of(peer, timeout=0) != visitor.pid:
                raise _Refusal(f"{peer} is not claimed by process {visitor.pid}")
        except TimedOutError:
            raise _Refusal(_LATER) from None
        fds = visitor.letter.take_fds()
        try:
            parts = Parts.received(fds, capacity)
        except (InvalidValueError, OSError) as error:
            for fd in fds:
                os.close(fd)
            raise _Refusal(error) from None
        talks = self._talks(request)
        link = Link(own, peer, (visitor.pid, str(request.get("name"))), parts, False, sock, self._forget, talks)
        # When both sides lay a link at the same time, that of the lower address counts.
        with link.sending:  # no letter before the answer
            if not self._register(link, unless_laying=(own.version, own) < (peer.version, peer)):
                link.closed = True
                parts.close()
                raise _Refusal(_LATER)
            answer = {"version": VERSION, "ok": True, "name": self.name, "letters": self._on_letter is not None}
            try:
                send(sock, answer, [parts.bell.rope])
            except OSError:
                link.hang_up()  # the heartbeat will show it

    def _check_room(self, pid: int) -> None:
        """Refuse a link that `pid` lays if there are too many: each holds descriptors and memory of ours."""
        with self._changed:
            links = {*self._links.values(), *self._untold}
        laid = sum(not link.first and link.peer_pid == pid for link in links)
        if len(links) >= MAX_LINKS or laid >= MAX_LINKS_OF_ONE:
            raise _Refusal(
                f"{self.name} has {len(links)} links, of which process {pid} has laid {laid}: the limits are "
                f"{MAX_LINKS} in all and {MAX_LINKS_OF_ONE} from one process"
            )

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
            if isinstance(key.data, _Visitor):
                key.data.letter.close()
            elif isinstance(key.data, Link):
                key.data.hang_up()  # a link that was closed just now
                key.data.letter.close()
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
