"""A connection between two processes: framed JSON messages over TCP, with keep-alive and error reports.

    magic "GPNT" · version, 2 bytes · length of the body, 4 bytes · body: a JSON object with a "kind"

All integers are big-endian. Each end sends a ping every second, which distinguishes a peer that computes from one that
hangs. A thread reads. The first event that ends the connection (invalid data, silence, a closed connection, the peer's
own error) becomes its `failure`: every later call raises it, and a launch checks it while its kernel runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import reprlib
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from ..enums import LinkLayer
from ..errors import DocaError, DocaErrorCode, OperatingSystemError, TimedOutError, again
from ..interrupts import deferred
from ..service import ServiceThread
from ..verbs import Context

logger: logging.Logger = logging.getLogger("gpunetio.rendezvous")

PORT = 18515
VERSION = 1
MAX_BODY = 1 << 24
STEP_SECONDS = 10.0  # time for the peer to answer, and longest silence
PING_SECONDS = 1.0
LINGER_SECONDS = 1.0  # time for the peer to read the last message
WHY_SECONDS = 2.0  # time for the reader to learn why something else has failed

_MAGIC = b"GPNT"
_ANY = "0.0.0.0"
MOST_CALLERS = 16  # callers that have not greeted yet
_HEADER = struct.Struct(">4sHI")
_MOST_WAITING = 64  # received messages that no call has taken yet
_LOOK_SECONDS = 0.1
_TEXT = 1000  # characters of a peer's error that are shown


class PeerError(DocaError):
    """The peer ended the connection or sent invalid data."""

    code = DocaErrorCode.CONNECTION_ABORTED


class PeerInterrupted(PeerError):
    """The peer was interrupted by Ctrl+C."""

    interrupted = True


# --- messages --------------------------------------------------------------------------------------------------------


class Message(dict[str, object]):
    """The body of a message from `peer`. Its values are checked when they are read."""

    peer: str
    kind: str

    def __init__(self, peer: str, body: dict[str, object]):
        super().__init__(body)
        self.peer, self.kind = peer, str(body["kind"])

    def wrong(self, name: str, needed: str) -> PeerError:
        """Return the error for a field with a wrong value."""
        found = reprlib.repr(self[name])[:80] if name in self else "missing"  # whatever is nested in it
        return PeerError(f"{self.peer} sent {self.kind!r} with {name} {found}: it must be {needed}")

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer from `low` to `high`."""
        value = self.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Return a number from `low` to `high`."""
        value = self.get(name)
        if type(value) is int or type(value) is float:
            if low <= value <= high:  # false for NaN
                return float(value)
        raise self.wrong(name, f"a number from {low:g} to {high:g}")

    def text(self, name: str) -> str:
        """Return a string that can be encoded: JSON may have halves of surrogate pairs (RFC 8259 8.2)."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, "a string without lone surrogates") from None
        return value

    def raw(self, name: str, most: int) -> bytes:
        """Return bytes, which are sent as hexadecimal digits."""
        try:
            value = bytes.fromhex(self.text(name))
        except ValueError:
            raise self.wrong(name, "hexadecimal digits") from None
        if len(value) > most:
            raise self.wrong(name, f"at most {most} bytes")
        return value

    def part(self, name: str) -> Message:
        """Return the object in this field."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Message(self.peer, {**value, "kind": f"{self.kind}.{name}"})

    def parts(self, name: str, most: int) -> list[Message]:
        """Return the list of objects in this field."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) > most or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, f"a list of at most {most} objects")
        return [Message(self.peer, {**item, "kind": f"{self.kind}.{name}"}) for item in value]


def encode(kind: str, **body: object) -> bytes:
    """Return a message in its wire format."""
    text = json.dumps({"kind": kind, **body}).encode()
    if len(text) > MAX_BODY:
        raise ValueError(f"a message of {len(text)} bytes: {MAX_BODY} is the limit")
    return _HEADER.pack(_MAGIC, VERSION, len(text)) + text


class Decoder:
    """Turns the bytes from `peer` into messages. PeerError for bytes that are not messages."""

    def __init__(self, peer: str):
        self._peer, self._bytes = peer, bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are now complete."""
        self._bytes += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    @property
    def within(self) -> bool:
        """Return whether a message is incomplete."""
        return bool(self._bytes)

    def _next(self) -> Message | None:
        start = bytes(self._bytes[: len(_MAGIC)])
        if start != _MAGIC[: len(start)]:
            raise PeerError(f"{self._peer} is not a gpunetio program: it sent {start!r} instead of {_MAGIC!r}")
        if len(self._bytes) < _HEADER.size:
            return None
        _, version, length = _HEADER.unpack_from(self._bytes)
        if version != VERSION:
            raise PeerError(
                f"{self._peer} speaks version {version} of the protocol and this end version {VERSION}: "
                "run the same gpunetio at both ends"
            )
        if length > MAX_BODY:
            raise PeerError(f"{self._peer} announced a message of {length} bytes: {MAX_BODY} is the limit")
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict) or not isinstance(parsed.get("kind"), str):
            raise PeerError(f"{self._peer} sent a message that is not a JSON object with a kind: {body[:40]!r}")
        return Message(self._peer, parsed)


# --- the connection --------------------------------------------------------------------------------------------------


class Link:
    """A connection to `peer` ("the server 10.0.0.1"), which may be silent for at most `patience` seconds."""

    peer: str
    patience: float

    def __init__(self, sock: socket.socket, peer: str, patience: float = STEP_SECONDS):
        self.peer, self.patience = peer, patience
        self._socket, self._decoder = sock, Decoder(peer)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._messages: deque[Message] = deque()
        self._failure: DocaError | None = None
        self._closing = self._gone = self._left = False
        sock.settimeout(patience)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ping()  # a server recognizes its client by this message
        self._reader = ServiceThread("gpunetio-exchange", self._read)
        try:
            self._reader.start()
        except BaseException:
            sock.close()
            raise

    @property
    def failure(self) -> DocaError | None:
        """Return what has ended the connection, or None."""
        return again(self._failure) if self._failure else None

    @property
    def left(self) -> bool:
        """Return whether the peer has said that it no longer needs the connection (`leave`)."""
        return self._left

    def failure_soon(self) -> DocaError | None:
        """Return `failure` after something else has failed. Wait briefly, because the reader may just be learning why.

        A dying process stops its threads and unmaps its memory before its connections are closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, WHY_SECONDS)
            return self.failure

    def send(self, kind: str, **body: object) -> None:
        """Send a message to the peer."""
        data = encode(kind, **body)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise self.failure_soon() or self._fail(self._lost(error)) from None

    def leave(self) -> None:
        """Tell the peer that the connection is about to end because this end no longer needs it."""
        self.send("leave")

    def expect(self, *kinds: str, timeout: float | None = None) -> Message:
        """Return the next message.

        It must be one of these kinds and come within `timeout` seconds, by default `patience`.
        """
        seconds = self.patience if timeout is None else timeout
        wanted = " or ".join(map(repr, kinds))
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._failure is not None, seconds)
            if self._messages:
                message = self._messages.popleft()
                if message.kind in kinds:
                    return message
                raise PeerError(f"{self.peer} sent {message.kind[:40]!r} instead of {wanted}")
            if self._failure is not None:
                raise again(self._failure)
        raise TimedOutError(f"{self.peer} did not send {wanted} within {seconds:g} s")

    def wait_for_news(self, seconds: float) -> None:
        """Wait until there is a message or the connection has ended, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._failure is not None, seconds)

    @deferred()  # a second Ctrl+C must not leave the peer uninformed
    def close(self, error: BaseException | None = None) -> None:
        """End the connection, and send the peer this end's error, unless the peer has already ended it. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._reader.join()  # the reader checks `_closing` often, and a hung socket is shut down below
        with contextlib.suppress(OSError):  # the peer has ended
            if error is not None and not self._gone:
                kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
                text = " ".join(str(error).split())[:_TEXT] or type(error).__name__
                self._socket.sendall(encode(kind, text=text))
            self._socket.shutdown(socket.SHUT_WR)
            # Closing a socket with unread bytes sends a reset, and the peer would lose the last message.
            end = time.monotonic() + LINGER_SECONDS
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()
        self._fail(PeerError(f"the connection to {self.peer} is closed"))  # for other threads that are still waiting

    # --- the reader's thread

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        heard = pinged = time.monotonic()
        while not self._closing and self._failure is None:
            now = time.monotonic()
            if now - pinged >= PING_SECONDS:
                pinged = now
                self._ping()
            try:
                if poll.poll(_LOOK_SECONDS * 1000):
                    self._take(self._socket.recv(1 << 16))
                    heard = time.monotonic()
                elif now - heard > self.patience:
                    self._fail(TimedOutError(f"{self.peer} has been silent for {self.patience:g} s: it hangs"))
            except OSError as error:
                self._gone = True
                self._fail(self._lost(error))
            except PeerError as error:
                self._fail(error)

    def _ping(self) -> None:
        if not self._sending.acquire(blocking=False):
            return  # a message is on its way and serves as a ping
        try:
            self._socket.sendall(encode("ping"))
        except OSError:
            pass  # the reader finds out why
        finally:
            self._sending.release()

    def _take(self, data: bytes) -> None:
        if not data:
            self._gone = True
            where = " in the middle of a message" if self._decoder.within else ""
            raise PeerError(f"{self.peer} closed the connection{where}: it died or was killed")
        for message in self._decoder.feed(data):
            if message.kind == "ping":
                continue
            if message.kind == "leave":
                self._left = True
                continue
            if message.kind in ("interrupted", "error"):
                self._gone = True
                if message.kind == "interrupted":
                    raise PeerInterrupted(f"{self.peer} was interrupted (Ctrl+C)")
                text = "".join(c if c.isprintable() else "?" for c in str(message.get("text"))[:_TEXT])
                raise PeerError(f"{self.peer} ended with an error: {text}")
            with self._changed:
                if len(self._messages) >= _MOST_WAITING:
                    raise PeerError(f"{self.peer} sent {_MOST_WAITING} messages that this end did not ask for")
                self._messages.append(message)
                self._changed.notify_all()

    def _lost(self, error: OSError) -> DocaError:
        if isinstance(error, TimeoutError):
            return TimedOutError(f"{self.peer} has not read for {self.patience:g} s: it hangs")
        return PeerError(f"the connection to {self.peer} was lost: {error.strerror or error}")

    def _fail(self, error: DocaError) -> DocaError:
        """Keep the first failure, and return it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            return self._failure


# --- how it begins ---------------------------------------------------------------------------------------------------


def own_address(ctx: Context, sgid_index: int = 0) -> str:
    """Return the address on which a server on this NIC listens: the NIC's own address.

    If TCP cannot connect to that address, the server listens on loopback for a software NIC, and on any of the host's
    addresses for a card. If the address is not the host's, as on an Ethernet of its own, the server listens on any of
    the host's addresses.
    """
    without = "127.0.0.1" if ctx.provider.software else _ANY
    if ctx.query_port(1).link_layer == LinkLayer.INFINIBAND:
        return without
    address = IPv6Address(bytes(ctx.query_gid(1, sgid_index)))
    own = address.ipv4_mapped or address
    if own.version == 6 and (own.is_link_local or int(own) == 0):
        return without
    return str(own) if _is_of_this_host(str(own)) else _ANY


def _is_of_this_host(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens for clients."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(MOST_CALLERS)
    except OSError as error:
        listener.close()
        cure = "is another server running? Choose another --port" if error.errno == errno.EADDRINUSE else "see --port"
        raise OperatingSystemError(f"cannot listen on {address} port {port}: {error.strerror} ({cure})") from None
    return listener


class Greeting(NamedTuple):
    """The first `nbytes` bytes that a client sends."""

    nbytes: int
    pattern: re.Pattern[bytes]


GREETING = Greeting(len(_MAGIC), re.compile(re.escape(_MAGIC)))


def accept(
    listener: socket.socket, greeting: Greeting = GREETING, timeout: float | None = None
) -> tuple[socket.socket, str]:
    """Wait for the client, and return its socket and address.

    Without `timeout`, this is the only wait without a deadline. The client is the first caller that greets as a client.
    Other callers (port scanners, health checks) are disconnected, and the wait continues. Nobody else can connect
    afterwards.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with listener, contextlib.ExitStack() as undo:
        callers = undo.enter_context(Callers(listener, greeting))
        while (client := callers.look(end)) is None:
            if end is not None and time.monotonic() >= end:
                raise TimedOutError(f"no client connected within {timeout:g} s")
        return client


class Callers:
    """Connections to a listener. Each must greet within `STEP_SECONDS`."""

    def __init__(self, listener: socket.socket, greeting: Greeting = GREETING):
        self._listener, self._greeting = listener, greeting
        self._deadlines: dict[socket.socket, tuple[float, str]] = {}  # sockets and addresses in the order of arrival
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._selector.close()
        for sock in self._deadlines:
            sock.close()

    def look(self, end: float | None) -> tuple[socket.socket, str] | None:
        """Wait for the next event, but not after `end`. Return the client and its address if it has greeted."""
        soonest = min((deadline for deadline, _ in self._deadlines.values()), default=None)
        ends = [each for each in (end, soonest) if each is not None]
        ready = self._selector.select(max(0.0, min(ends) - time.monotonic()) if ends else None)
        for key, _ in ready:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._take()  # this may disconnect one of the others
            elif sock in self._deadlines and self._greets(sock):
                return self._leave(sock)
        for sock, (deadline, _) in list(self._deadlines.items()):
            if time.monotonic() >= deadline:
                self._hang_up(sock, "has sent nothing")
        return None

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # it disconnected first
            sock, address = self._listener.accept()
            if len(self._deadlines) == MOST_CALLERS:
                self._hang_up(next(iter(self._deadlines)), "has sent nothing, and many others are connecting")
            # From now on, readable means that the greeting is complete or the caller has disconnected.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._greeting.nbytes)
            sock.setblocking(False)
            self._deadlines[sock] = time.monotonic() + STEP_SECONDS, str(address[0])
            self._selector.register(sock, selectors.EVENT_READ)

    def _greets(self, sock: socket.socket) -> bool:
        try:
            said = sock.recv(self._greeting.nbytes, socket.MSG_PEEK)
        except OSError:
            said = b""
        if self._greeting.pattern.fullmatch(said):
            return True
        self._hang_up(sock, f"has sent {said!r}" if said else "has disconnected")
        return False

    def _hang_up(self, sock: socket.socket, what: str) -> None:
        _, address = self._leave(sock)
        sock.close()
        logger.warning("%s connected and %s: it is not a client; still waiting for one", address, what)

    def _leave(self, sock: socket.socket) -> tuple[socket.socket, str]:
        self._selector.unregister(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return sock, self._deadlines.pop(sock)[1]


def dial(host: str, port: int, timeout: float = STEP_SECONDS) -> socket.socket:
    """Connect to the server and return the socket."""
    try:
        return socket.create_connection((host, port), timeout)
    except TimeoutError:
        raise TimedOutError(f"{host} port {port} did not answer within {timeout:g} s") from None
    except socket.gaierror as error:
        raise OperatingSystemError(f"{host!r} is not an address: {error.strerror}") from None
    except OSError as error:
        here = [address for address in listening(port) if address != host]
        cure = f"A server on this host listens at {' and at '.join(here)}: use that address" if here else (
            "Start the same command there, as the server, first"
        )
        raise OperatingSystemError(f"no server at {host} port {port}: {error.strerror}. {cure}") from None
    except UnicodeError:
        raise OperatingSystemError(f"{host!r} is not an address: it is not a host name either") from None


_TCP_LISTEN = "0A"  # of /proc/net/tcp, as in the kernel's net/tcp_states.h


def listening(port: int) -> list[str]:
    """Return this host's addresses, in this network namespace, that listen on a TCP port."""
    found = []
    for table in (Path("/proc/thread-self/net/tcp"), Path("/proc/thread-self/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            digits, _, number = local.partition(":")
            if state == _TCP_LISTEN and int(number, 16) == port:
                found.append(str(_address(bytes.fromhex(digits))))
    return found


def _address(words: bytes) -> IPv4Address | IPv6Address:
    """Return an address of the kernel's table, which stores 32-bit words in host order."""
    if sys.byteorder == "little":
        words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return ip_address(words)
