"""The control socket of a NIC, through which software NICs of one host lay links to each other.

These NICs belong to one user, in one network namespace. For each of its addresses, a NIC listens on a socket that
claims the address (claims.py). Other NICs ask there for links (links.py). Processes that look at the NIC ask there for
the memory of its tables, or for copies of its flow rules (discovery.py).

A request is a message (control_message.py) with `version` and `op`. The answer is a message with `version` and `ok`. A
refusal also has a `reason`, and `again` if the same request may succeed soon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from ..errors import InUseError, InvalidValueError
from ..service import ServiceThread
from .claims import MAX_PENDING, PATIENCE, PREFIX, RETRY, close_after_fork, new_socket
from .control_message import VERSION, BadMessage, Body, PartialMessage, credentials, send
from .link import DEFAULT_CAPACITY, IpAddress, Link
from .links import STOP_TIMEOUT, Callbacks, Links, Refusal

logger: logging.Logger = logging.getLogger("gpunetio.fabric")

MAX_REQUEST_FDS = 4  # descriptors per request; no valid request has that many


class _Caller:
    """A connection whose request has not arrived yet."""

    def __init__(self, pid: int):
        self.pid, self.message = pid, PartialMessage(MAX_REQUEST_FDS)
        self.deadline = time.monotonic() + PATIENCE


class ControlSocket:
    """The control socket of the NIC `name`: claims `addresses`, lays links to other NICs, and takes theirs.

    `claimed[address]` is False when another process has the address. Then other processes can only look at the NIC.
    `publication()` returns what they get: a description, and descriptors of memory. It must not block. `rules()`
    returns the same for copies of the flow rules, or None if that would take long. The control socket closes these
    descriptors.

    `on_link(link)` is called once for each link, whichever side laid it. `on_gone(link)` is called once when the link's
    peer hangs up or dies, but not when this side has closed the link. The calls come in order from a thread of the
    socket, so they may wait for a lock; `connect` does not wait for them. Without `on_link`, the socket takes no links.
    It never takes more than MAX_LINKS, or MAX_LINKS_OF_ONE from one process. A link joins NICs of one `medium`.

    `prepare(link)` is called for each link that is taken, before the other side knows of it. It must not block.

    `on_message(link, message, descriptors)` is called from the same thread for each message of a link's peer. It closes
    the descriptors. The link's next message is not read before it returns.
    """

    name: str
    addresses: tuple[IpAddress, ...]

    def __init__(
        self, addresses: Iterable[IpAddress | str], name: str,
        publication: Callable[[], tuple[Body, list[int]]] = lambda: ({}, []),
        on_link: Callable[[Link], None] | None = None, on_gone: Callable[[Link], None] = lambda link: None,
        capacity: int = DEFAULT_CAPACITY, medium: str = "ETHERNET",
        on_message: Callable[[Link, Body, list[int]], None] | None = None,
        prepare: Callable[[Link], None] = lambda link: None,
        rules: Callable[[], tuple[Body, list[int]] | None] = lambda: ({}, []),
    ):
        self.name = name
        self.addresses = tuple(ip_address(address) for address in addresses)
        if not self.addresses:
            raise InvalidValueError(f"{name} has no address: a control socket is found by its addresses")
        self.claimed: dict[IpAddress, bool] = {}
        self.listening: list[str] = []  # names, without the prefix
        self._publication, self._rules = publication, rules
        self._pid = os.getpid()
        told = Callbacks(on_link, prepare, on_gone, on_message)
        self._links = Links(name, self.claimed, capacity, medium, told, self._watch)
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
            self._thread = ServiceThread(f"gpunetio {name} control", self._serve)
            self._thread.start()
        except BaseException:
            self._close_all()
            raise

    def _listen(self, address: IpAddress) -> None:
        """Claim the address. If another process has it, listen under `address/pid`."""
        tries = [str(address), f"{address}/{self._pid}", *(f"{address}/{self._pid}.{n}" for n in range(1, 100))]
        listener = new_socket()
        name = tries[0]
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

    @property
    def links(self) -> list[Link]:
        """Return the links whose peers are alive."""
        return self._links.present

    def connect(self, ip: IpAddress | str, timeout: float = PATIENCE, source: IpAddress | None = None) -> Link | None:
        """Return the link to the NIC that has claimed `ip` (`Links.connect`)."""
        return self._links.connect(ip, timeout, source)

    def _watch(self, link: Link) -> None:
        """Have the service thread watch a link's connection."""
        self._new_links.append(link)
        os.eventfd_write(self._wake, 1)

    def _read_message(self, sock: socket.socket, link: Link) -> None:
        """Read part of a message from a link's socket, or notice the end of the link."""
        try:
            if not link.talks:
                raise EOFError
            if (message := link.message.read(sock)) is not None:
                self._selector.unregister(sock)  # until this message has been handled
                self._links.heard(link, message)
        except BlockingIOError:
            pass
        except (OSError, EOFError, BadMessage) as error:
            if isinstance(error, BadMessage):
                logger.warning("%s drops %s: %s", self.name, link, error)
            link.message.close()
            self._drop(sock)
            self._links.lose(link)

    # --- the service thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._links.closing:
            for key, _ in self._selector.select(self._time_left()):
                sock = key.fileobj
                if isinstance(sock, int):
                    self._woken()
                elif sock.fileno() < 0:  # type: ignore[union-attr]
                    continue  # an earlier event of this round closed it
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
            except (ValueError, KeyError):  # it was closed in the meantime
                self._links.lose(link)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # probably out of descriptors: some may be closed soon
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
        """Read part of a request."""
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
        except Exception as error:  # whatever one peer sends, the others must not suffer
            self._dismiss(sock, caller, f"{type(error).__name__}: {error}")

    def _answer(self, sock: socket.socket, caller: _Caller, request: Body) -> bool:
        """Carry out a request. Return whether the connection stays open."""
        if request.get("version") != VERSION:
            reason = f"{self.name} speaks version {VERSION}, not {request.get('version')!r}: use the same release"
        elif request.get("op") == "look":
            self._show(sock, *self._publication())
            return False
        elif request.get("op") == "rules":
            if (answer := self._rules()) is None:
                send(sock, {"version": VERSION, "ok": False, "again": True, "reason": f"{self.name} is busy"})
                return False
            try:
                self._show(sock, *answer)
            finally:
                for fd in answer[1]:
                    os.close(fd)
            return False
        elif request.get("op") == "connect":
            try:
                self._links.take(sock, caller.pid, request, caller.message.take_fds)
                return True
            except Refusal as refusal:
                reason = str(refusal)
        else:
            reason = f"{self.name} does not know the request {request.get('op')!r}"
        send(sock, {"version": VERSION, "ok": False, "reason": reason})
        return False

    def _show(self, sock: socket.socket, description: Body, fds: list[int]) -> None:
        """Answer with a description of this NIC, and with memory."""
        own = {"name": self.name, "addresses": [*map(str, self.addresses)], "listening": self.listening}
        send(sock, {**description, **own, "version": VERSION, "ok": True}, fds)

    # --- life cycle ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the addresses and hang up all links. Wait for a running callback; none begins afterwards.

        The memory of a link stays mapped until `link.close()`. Idempotent.
        """
        if self._pid != os.getpid():
            return
        with self._links.changed:
            if self._links.closing:
                return
            self._links.begin_to_close()
            os.eventfd_write(self._wake, 1)
        self._thread.join(STOP_TIMEOUT)
        self._links.end_callbacks()

    def _close_all(self) -> None:
        """Close every socket."""
        for link in [*self._links.present, *self._new_links]:
            link.hang_up()
            link.heartbeat.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Caller):
                key.data.message.close()
            elif isinstance(key.data, Link):
                key.data.hang_up()  # a link that was just closed
                key.data.message.close()
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        with self._links.changed:
            os.close(self._wake)

    def __enter__(self) -> ControlSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
