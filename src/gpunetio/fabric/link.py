"""A link: two pipes of frames in memory shared by two processes, and a socket that shows when the peer is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from ..errors import InvalidValueError
from ..memory import PAGE, HostMemory, MappedMemory, round_up
from .notifier import Notifier, check_notify_fd
from .frames import pipe_size
from .control_message import Body, PartialMessage, send

IpAddress = IPv4Address | IPv6Address

DEFAULT_CAPACITY = 1 << 20
_LEAST, _MOST = 1 << 13, 1 << 28
MAX_MESSAGE_FDS = 2  # descriptors per message over a link; our messages carry at most one


def check_capacity(capacity: object) -> int:
    """Return `capacity`, or raise InvalidValueError if no pipe can have that many bytes."""
    if isinstance(capacity, int) and _LEAST <= capacity <= _MOST and capacity & (capacity - 1) == 0:
        return capacity
    raise InvalidValueError(f"a pipe cannot have {capacity!r} bytes: give a power of two from {_LEAST} to {_MOST}")


def _pitch(capacity: int) -> int:
    """Return the bytes from one pipe to the next."""
    return round_up(pipe_size(capacity), PAGE)


@dataclass
class Parts:
    """The parts of a link: the memory, our notifier, and the descriptor that notifies the peer, once received."""

    memory: HostMemory
    capacity: int
    notifier: Notifier
    notify_fd: int | None = None

    @classmethod
    def new(cls, capacity: int) -> Parts:
        """Make the parts, in the process that lays the link."""
        memory = HostMemory(2 * _pitch(capacity), shared=True, sealed=False)
        try:
            return cls(memory, capacity, Notifier())
        except BaseException:
            memory.close()
            raise

    @property
    def fds(self) -> list[int]:
        """The descriptors of a new link that the other process needs."""
        assert self.memory.fd is not None
        return [self.memory.fd, self.notifier.notify_fd]

    @classmethod
    def received(cls, fds: list[int], capacity: int) -> Parts:
        """Make the parts from the `fds` of the other process, and take ownership of them.

        InvalidValueError says what is wrong with the descriptors. After an error, they still belong to the caller.
        """
        if len(fds) != 2:
            raise InvalidValueError(f"{len(fds)} descriptors came with the request, not 2")
        memory_fd, notify_fd = fds
        check_notify_fd(notify_fd)
        memory = MappedMemory(memory_fd, 2 * _pitch(capacity), writable=True)
        try:
            parts = cls(memory, capacity, Notifier(), notify_fd)
        except BaseException:
            memory.close()
            raise
        os.close(memory_fd)
        return parts

    def complete(self, fds: list[int]) -> None:
        """Take what the other process sent after it had mapped the memory; nobody else can map it from now on.

        InvalidValueError says what is wrong with `fds`, which then still belong to the caller.
        """
        if len(fds) != 1:
            raise InvalidValueError(f"{len(fds)} descriptors came with the answer, not 1")
        check_notify_fd(fds[0])
        self.memory.seal()
        self.notify_fd = fds[0]

    def close(self) -> None:
        """Unmap the memory and close the notifier and the peer's descriptor."""
        self.memory.close()
        self.notifier.close()
        if self.notify_fd is not None:
            os.close(self.notify_fd)


class Link:
    """One side of a link between two NICs of this host.

    `tx` and `rx` are the addresses of two PIPEs (frames.py) for `capacity` bytes of frames each. This side is the
    producer of `tx` and the consumer of `rx`, and makes its own PIPE_END for each. A datagram to `peer_notify_fd` wakes
    the peer's engine (notifier.py); this side's engine sleeps on the descriptor `event_fd`. `first` is set if this side
    laid the link.

    `talks` is set if both sides accept messages on the heartbeat's socket; `send` sends one.

    `gone` is set when the peer has closed the link or has died. The memory stays mapped until `close()`.
    """

    own_address: IpAddress
    peer_address: IpAddress
    peer_pid: int
    peer_name: str
    capacity: int
    event_fd: int
    peer_notify_fd: int
    first: bool
    tx: int
    rx: int
    talks: bool
    message: PartialMessage
    sending: threading.Lock
    closed: bool

    def __init__(
        self, own_address: IpAddress, peer_address: IpAddress, peer: tuple[int, str], parts: Parts, first: bool,
        heartbeat: socket.socket, forget: Callable[[Link], None], talks: bool,
    ):
        self.own_address, self.peer_address = own_address, peer_address
        self.peer_pid, self.peer_name = peer
        assert parts.notify_fd is not None
        self.capacity, self.first = parts.capacity, first
        self.event_fd, self.peer_notify_fd = parts.notifier.fd, parts.notify_fd
        pipes = parts.memory.address, parts.memory.address + _pitch(parts.capacity)
        self.tx, self.rx = pipes if first else pipes[::-1]
        self.gone = self.closed = False
        self.heartbeat = heartbeat
        self.talks, self.message = talks, PartialMessage(MAX_MESSAGE_FDS)
        self.sending = threading.Lock()
        self._parts, self._forget = parts, forget
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "gone" if self.gone else "alive"
        return f"Link({self.own_address} – {self.peer_address}, {self.peer_name} of process {self.peer_pid}, {state})"

    def is_dead(self) -> bool:
        """Return whether the peer has hung up, even if that has not been reported yet."""
        if self.gone or self.closed:
            return True
        try:
            return self.heartbeat.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, body: Body, fds: Sequence[int] = ()) -> None:
        """Send the peer a message, without waiting. OSError if the peer does not read its messages, or is gone."""
        with self.sending:
            send(self.heartbeat, body, fds)

    def hang_up(self) -> None:
        """Shut down the connection, which tells the peer that this side is gone. The memory stays mapped."""
        with contextlib.suppress(OSError):  # already disconnected
            self.heartbeat.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, unmap the memory and close the notifier. Idempotent. No engine may use them any more."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.hang_up()
        self._forget(self)
        self._parts.close()
