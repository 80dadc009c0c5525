"""Messages between processes of one host: JSON objects, with file descriptors, over a unix stream socket.

On the socket, a message is its length, four bytes big-endian, followed by its text. Its descriptors travel with the
first byte. The reader trusts neither: a message that is too long, carries too many descriptors or is not a JSON object
raises `BadMessage`.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import time
from collections.abc import Sequence

Body = dict[str, object]  # of a message; its reader checks the values
VERSION = 2  # of requests and answers
MAX_BYTES = 1 << 16
MAX_FDS = 32
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred


class BadMessage(Exception):
    """A message that breaks the rules of this module."""


def send(sock: socket.socket, body: Body, fds: Sequence[int] = ()) -> None:
    """Send a message. The caller's descriptors stay open."""
    text = json.dumps(body).encode()
    if len(text) > MAX_BYTES or len(fds) > MAX_FDS:
        raise BadMessage(f"{len(text)} bytes and {len(fds)} descriptors do not fit: {MAX_BYTES} and {MAX_FDS} do")
    data = _LENGTH.pack(len(text)) + text
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket, end: float) -> tuple[Body, list[int]]:
    """Return the next message and its descriptors, which the caller closes.

    TimeoutError at `end` of time.monotonic(), EOFError if the peer hangs up.
    """
    message = PartialMessage()
    try:
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            sock.settimeout(left)
            if (body := message.read(sock)) is not None:
                return body, message.take_fds()
    finally:
        message.close()


class PartialMessage:
    """A message that arrives in pieces, with up to `max_fds` descriptors."""

    def __init__(self, max_fds: int = MAX_FDS) -> None:
        self._data, self._fds, self._max_fds = bytearray(), array.array("i"), max_fds

    def read(self, sock: socket.socket) -> Body | None:
        """Receive once. Return the message when it is complete, and None before that. Never read beyond the message."""
        room = socket.CMSG_SPACE((self._max_fds + 1) * self._fds.itemsize)
        data, messages, flags, _ = sock.recvmsg(self._missing(), room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.frombytes(payload[: len(payload) - len(payload) % self._fds.itemsize])
        if flags & socket.MSG_CTRUNC or len(self._fds) > self._max_fds:
            raise BadMessage(f"it carries more than {self._max_fds} descriptors")
        if not data:
            raise EOFError("the peer has hung up")
        self._data += data
        if self._missing():
            return None
        try:
            body = json.loads(self._data[_LENGTH.size :])
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"it is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadMessage(f"it is a {type(body).__name__}, not an object")
        return body

    def _missing(self) -> int:
        """Return how many bytes are still missing, as far as is known."""
        if len(self._data) < _LENGTH.size:
            return _LENGTH.size - len(self._data)
        (length,) = _LENGTH.unpack_from(self._data)
        if not 0 < length <= MAX_BYTES:
            raise BadMessage(f"it announces {length} bytes; 1 to {MAX_BYTES} are allowed")
        return _LENGTH.size + length - len(self._data)

    def take_fds(self) -> list[int]:
        """Return the descriptors, which the caller owns from now on."""
        fds, self._fds = list(self._fds), array.array("i")
        return fds

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        for fd in self.take_fds():
            os.close(fd)


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process that connected to us, or that listens where we connected."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
