"""The talk between the two processes of a benchmark: framed JSON messages over TCP, and who is told of what.

    magic "GPNT" · version, 2 bytes · length of the body, 4 bytes · body: a JSON object with a "kind"

All big-endian. Each end sends a ping every second, so that a peer which hangs is told from one which computes. A thread
reads: whatever ends the talk (nonsense, silence, a closed connection, the peer's own error) becomes its `failure`,
which every call raises from then on, and which a launch looks at while its kernel runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import threading
import time
from collections import deque
from ipaddress import IPv6Address
from typing import Any

from ..enums import LinkLayer
from ..errors import DocaError, DocaErrorCode, OperatingSystemError, TimedOutError
from ..verbs import Context

PORT = 18515
VERSION = 1
MAX_BODY = 1 << 20
STEP_SECONDS = 10.0  # for the peer to answer, and how long it may be silent
PING_SECONDS = 1.0
LINGER_SECONDS = 1.0  # for the last message to be read
WHY_SECONDS = 2.0  # for the reader to find out why something else has failed

_MAGIC = b"GPNT"
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
            raise PeerError(f"{self._peer} is no gpunetio benchmark: it sent {start!r} where {_MAGIC!r} was due")
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
        self._reader = threading.Thread(target=self._read, name="gpunetio-exchange", daemon=True)
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

    def close(self, error: BaseException | None = None) -> None:
        """End the talk; the peer is told of this end's error, unless it has gone already. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._reader.join()
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


def own_address(ctx: Context, sgid_index: int) -> str:
    """The address that a server on this NIC listens on: the NIC's own.

    Where it has none to call, that is this host's loopback for a software NIC, and for a card any of the host.
    """
    without = "127.0.0.1" if ctx.provider.software else "0.0.0.0"
    if ctx.query_port(1).link_layer == LinkLayer.INFINIBAND:
        return without
    address = IPv6Address(bytes(ctx.query_gid(1, sgid_index)))
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return without if address.is_link_local or int(address) == 0 else str(address)


def listen(address: str, port: int) -> socket.socket:
    """A socket on which one client may call."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)
    except OSError as error:
        listener.close()
        cure = "is another server running? Choose another --port" if error.errno == errno.EADDRINUSE else "see --port"
        raise OperatingSystemError(f"cannot listen on {address} port {port}: {error.strerror} ({cure})") from None
    return listener


def accept(listener: socket.socket, timeout: float | None = None) -> tuple[socket.socket, str]:
    """Wait for the client: its socket and its address. The only wait without a deadline, unless `timeout` sets one.

    Nobody else can call afterwards.
    """
    with listener:
        listener.settimeout(timeout)
        try:
            sock, address = listener.accept()
        except TimeoutError:
            raise TimedOutError(f"no client called within {timeout:g} s") from None
        return sock, str(address[0])


def dial(host: str, port: int, timeout: float = STEP_SECONDS) -> socket.socket:
    """Call the server."""
    try:
        return socket.create_connection((host, port), timeout)
    except TimeoutError:
        raise TimedOutError(f"{host} port {port} did not answer within {timeout:g} s") from None
    except socket.gaierror as error:
        raise OperatingSystemError(f"{host!r} is no address: {error.strerror}") from None
    except OSError as error:
        raise OperatingSystemError(
            f"no server at {host} port {port}: {error.strerror}. Start the same command there, as the server, first"
        ) from None
    except UnicodeError:
        raise OperatingSystemError(f"{host!r} is no address: it is no host name") from None
