"""A talk between two processes: framed JSON messages over TCP, and who is told of what.

    magic "GPNT" · version, 2 bytes · length of the body, 4 bytes · body: a JSON object with a "kind"

All big-endian. Each end sends a ping every second, so that a peer which hangs is told from one which computes. A thread
reads: whatever ends the talk (nonsense, silence, a closed connection, the peer's own error) becomes its `failure`,
which every call raises from then on, and which a launch looks at while its kernel runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
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
from typing import Any, NamedTuple

from ..enums import LinkLayer
from ..errors import DocaError, DocaErrorCode, OperatingSystemError, TimedOutError
from ..service import ServiceThread
from ..verbs import Context

logger: logging.Logger = logging.getLogger("gpunetio.rendezvous")

PORT = 18515
VERSION = 1
MAX_BODY = 1 << 24
STEP_SECONDS = 10.0  # for the peer to answer, and how long it may be silent
PING_SECONDS = 1.0
LINGER_SECONDS = 1.0  # for the last message to be read
WHY_SECONDS = 2.0  # for the reader to find out why something else has failed

_MAGIC = b"GPNT"
_MOST_CALLERS = 16  # that have not shown yet whether they are clients
_HEADER = struct.Struct(">4sHI")
_MOST_WAITING = 64  # messages that nobody has asked for yet
_LOOK_SECONDS = 0.1
_TEXT = 1000  # characters of a peer's error that are shown


class PeerError(DocaError):
    """The other end ended the talk, or said what makes no sense."""

    code = DocaErrorCode.CONNECTION_ABORTED


class PeerInterrupted(PeerError):
    """Somebody pressed Ctrl+C at the other end."""

    interrupted = True


# --- messages --------------------------------------------------------------------------------------------------------


class Message(dict[str, Any]):
    """The body of a message from `peer`. Its values are checked where they are read."""

    peer: str
    kind: str

    def __init__(self, peer: str, body: dict[str, Any]):
        super().__init__(body)
        self.peer, self.kind = peer, str(body["kind"])

    def wrong(self, name: str, needed: str) -> PeerError:
        """The error of a field that is not what it must be."""
        found = repr(self[name])[:80] if name in self else "missing"
        return PeerError(f"{self.peer} sent {self.kind!r} with {name} {found}: it must be {needed}")

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from `low` to `high`."""
        value = self.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.get(name)
        if type(value) is int or type(value) is float:
            if low <= value <= high:  # NaN is not
                return float(value)
        raise self.wrong(name, f"a number from {low:g} to {high:g}")

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def raw(self, name: str, most: int) -> bytes:
        """Bytes, which travel as hexadecimal digits."""
        try:
            value = bytes.fromhex(self.text(name))
        except ValueError:
            raise self.wrong(name, "hexadecimal digits") from None
        if len(value) > most:
            raise self.wrong(name, f"at most {most} bytes")
        return value

    def part(self, name: str) -> Message:
        """An object in this object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Message(self.peer, {**value, "kind": f"{self.kind}.{name}"})

    def parts(self, name: str, most: int) -> list[Message]:
        """A list of objects."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) > most or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, f"a list of at most {most} objects")
        return [Message(self.peer, {**item, "kind": f"{self.kind}.{name}"}) for item in value]


def encode(kind: str, **body: Any) -> bytes:
    """A message as it goes over the wire."""
    text = json.dumps({"kind": kind, **body}).encode()
    if len(text) > MAX_BODY:
        raise ValueError(f"a message of {len(text)} bytes: {MAX_BODY} is the limit")
    return _HEADER.pack(_MAGIC, VERSION, len(text)) + text


class Decoder:
    """Messages from bytes as they come from `peer`; PeerError for bytes that are none."""

    def __init__(self, peer: str):
        self._peer, self._bytes = peer, bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now."""
        self._bytes += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    @property
    def within(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._bytes)

    def _next(self) -> Message | None:
        start = bytes(self._bytes[: len(_MAGIC)])
        if start != _MAGIC[: len(start)]:
            raise PeerError(f"{self._peer} is no program of gpunetio: it sent {start!r} where {_MAGIC!r} was due")
        if len(self._bytes) < _HEADER.size:
            return None
        _, version, length = _HEADER.unpack_from(self._bytes)
        if version != VERSION:
            raise PeerError(
                f"{self._peer} speaks version {version} of the exchange and this end version {VERSION}: "
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
            raise PeerError(f"{self._peer} sent a message that is no JSON object with a kind: {body[:40]!r}")
        return Message(self._peer, parsed)


# --- the connection --------------------------------------------------------------------------------------------------


class Link:
    """A connection to `peer` ("the server 10.0.0.1"), which may be silent for `patience` seconds."""

    peer: str
    patience: float

    def __init__(self, sock: socket.socket, peer: str, patience: float = STEP_SECONDS):
        self.peer, self.patience = peer, patience
        self._socket, self._decoder = sock, Decoder(peer)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._messages: deque[Message] = deque()
        self._failure: DocaError | None = None
        self._closing = self._gone = False
        sock.settimeout(patience)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ping()  # by which a server knows its client
        self._reader = ServiceThread("gpunetio-exchange", self._read)
        self._reader.start()

    @property
    def failure(self) -> DocaError | None:
        """What has ended the talk, if it has."""
        return self._failure

    def failure_soon(self) -> DocaError | None:
        """The same when something else has failed: the reader may be about to find out why.

        A process that dies stops its threads and unmaps its memory first, and closes its connections then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, WHY_SECONDS)
            return self._failure

    def send(self, kind: str, **body: Any) -> None:
        """Tell the peer."""
        data = encode(kind, **body)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise self.failure_soon() or self._fail(self._lost(error)) from None

    def expect(self, *kinds: str, timeout: float | None = None) -> Message:
        """The next message, which must be one of these kinds; the deadline is `patience` unless another is given."""
        seconds = self.patience if timeout is None else timeout
        wanted = " or ".join(map(repr, kinds))
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._failure is not None, seconds)
            if self._messages:
                message = self._messages.popleft()
                if message.kind in kinds:
                    return message
                raise PeerError(f"{self.peer} sent {message.kind[:40]!r} where {wanted} was due")
            if self._failure is not None:
                raise self._failure
        raise TimedOutError(f"{self.peer} did not send {wanted} within {seconds:g} s")

    def wait_for_news(self, seconds: float) -> None:
        """Wait until there is a message, or the talk has ended, for some seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._failure is not None, seconds)

    def close(self, error: BaseException | None = None) -> None:
        """End the talk; the peer is told of this end's error, unless it has gone already. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._reader.join()  # it looks at `_closing` often, and a socket that hangs is shut down below
        with contextlib.suppress(OSError):  # it has gone: there is nobody to tell
            if error is not None and not self._gone:
                kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
                text = " ".join(str(error).split())[:_TEXT] or type(error).__name__
                self._socket.sendall(encode(kind, text=text))
            self._socket.shutdown(socket.SHUT_WR)
            # Closing with unread bytes would be a reset, which takes the last message away from the peer.
            end = time.monotonic() + LINGER_SECONDS
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()
        self._fail(PeerError(f"the talk with {self.peer} is over"))  # for other threads that still wait

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
            return  # a message is on its way, which tells as much
        try:
            self._socket.sendall(encode("ping"))
        except OSError:
            pass  # reading will tell why
        finally:
            self._sending.release()

    def _take(self, data: bytes) -> None:
        if not data:
            self._gone = True
            where = " in the middle of a message" if self._decoder.within else ""
            raise PeerError(f"{self.peer} closed the connection{where}: it died, or it was ended")
        for message in self._decoder.feed(data):
            if message.kind == "ping":
                continue
            if message.kind in ("interrupted", "error"):
                self._gone = True
                if message.kind == "interrupted":
                    raise PeerInterrupted(f"{self.peer} was interrupted (Ctrl+C)")
                text = "".join(c if c.isprintable() else "?" for c in str(message.get("text"))[:_TEXT])
                raise PeerError(f"{self.peer} ended with an error: {text}")
            with self._changed:
                if len(self._messages) >= _MOST_WAITING:
                    raise PeerError(f"{self.peer} sent {_MOST_WAITING} messages that nobody asked for")
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
    """Return the address on which a server on this NIC listens: the NIC's own.

    Where that is none to call, it is this host's loopback for a software NIC, and any of the host's for a card.
    """
    without = "127.0.0.1" if ctx.provider.software else "0.0.0.0"
    if ctx.query_port(1).link_layer == LinkLayer.INFINIBAND:
        return without
    address = IPv6Address(bytes(ctx.query_gid(1, sgid_index)))
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return without if address.is_link_local or int(address) == 0 else str(address)


def listen(address: str, port: int) -> socket.socket:
    """A socket on which clients may call."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_MOST_CALLERS)
    except OSError as error:
        listener.close()
        cure = "is another server running? Choose another --port" if error.errno == errno.EADDRINUSE else "see --port"
        raise OperatingSystemError(f"cannot listen on {address} port {port}: {error.strerror} ({cure})") from None
    return listener


class Greeting(NamedTuple):
    """How the first `nbytes` bytes of a client look."""

    nbytes: int
    pattern: re.Pattern[bytes]


GREETING = Greeting(len(_MAGIC), re.compile(re.escape(_MAGIC)))


def accept(
    listener: socket.socket, greeting: Greeting = GREETING, timeout: float | None = None
) -> tuple[socket.socket, str]:
    """Wait for the client: its socket and its address. The only wait without a deadline, unless `timeout` sets one.

    The client is the first caller that greets as one. Other callers (port scanners, health checks) are hung up on, and
    the wait goes on. Nobody else can call afterwards.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with listener, contextlib.ExitStack() as undo:
        callers = undo.enter_context(Callers(listener, greeting))
        while (client := callers.look(end)) is None:
            if end is not None and time.monotonic() >= end:
                raise TimedOutError(f"no client called within {timeout:g} s")
        return client


class Callers:
    """Connections to a listener; each has `STEP_SECONDS` to greet."""

    def __init__(self, listener: socket.socket, greeting: Greeting = GREETING):
        self._listener, self._greeting = listener, greeting
        self._deadlines: dict[socket.socket, tuple[float, str]] = {}  # in the order of their calls; and their addresses
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
        """Wait for the next event, until `end` at most: the client and its address, if it has greeted."""
        soonest = min((deadline for deadline, _ in self._deadlines.values()), default=None)
        ends = [each for each in (end, soonest) if each is not None]
        ready = self._selector.select(max(0.0, min(ends) - time.monotonic()) if ends else None)
        for key, _ in ready:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._take()
            elif self._greets(sock):
                return self._leave(sock)
        for sock, (deadline, _) in list(self._deadlines.items()):
            if time.monotonic() >= deadline:
                self._hang_up(sock, "has said nothing")
        return None

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # it has gone before we looked
            sock, address = self._listener.accept()
            if len(self._deadlines) == _MOST_CALLERS:
                self._hang_up(next(iter(self._deadlines)), "has said nothing, and many others call")
            # Readable from then on means: the greeting is complete, or the caller has hung up.
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
        self._hang_up(sock, f"has said {said!r}" if said else "has hung up")
        return False

    def _hang_up(self, sock: socket.socket, what: str) -> None:
        _, address = self._leave(sock)
        sock.close()
        logger.warning("%s called and %s: that is no client; still waiting for one", address, what)

    def _leave(self, sock: socket.socket) -> tuple[socket.socket, str]:
        self._selector.unregister(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return sock, self._deadlines.pop(sock)[1]


def dial(host: str, port: int, timeout: float = STEP_SECONDS) -> socket.socket:
    """Call the server."""
    try:
        return socket.create_connection((host, port), timeout)
    except TimeoutError:
        raise TimedOutError(f"{host} port {port} did not answer within {timeout:g} s") from None
    except socket.gaierror as error:
        raise OperatingSystemError(f"{host!r} is no address: {error.strerror}") from None
    except OSError as error:
        here = [address for address in listening(port) if address != host]
        cure = f"A server of this host waits at {' and at '.join(here)}: call that address" if here else (
            "Start the same command there, as the server, first"
        )
        raise OperatingSystemError(f"no server at {host} port {port}: {error.strerror}. {cure}") from None
    except UnicodeError:
        raise OperatingSystemError(f"{host!r} is no address: it is no host name") from None


_TCP_LISTEN = "0A"  # of /proc/net/tcp, as in the kernel's net/tcp_states.h


def listening(port: int) -> list[str]:
    """The addresses of this host, in this network namespace, where somebody listens on a TCP port."""
    found = []
    for table in (Path("/proc/thread-self/net/tcp"), Path("/proc/thread-self/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            digits, _, number = local.partition(":")
            if state == _TCP_LISTEN and int(number, 16) == port:
                found.append(str(_address(bytes.fromhex(digits))))
    return found


def _address(words: bytes) -> IPv4Address | IPv6Address:
    """An address from the kernel's table, which has words of 32 bits in the host's order."""
    if sys.byteorder == "little":
        words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return ip_address(words)
