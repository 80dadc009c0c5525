"""Event notification between engines: a pair of datagram sockets. An engine sleeps on one; a datagram wakes it.

Engines of two processes wake each other, and neither may be able to block the other. O_NONBLOCK is a flag of the open
file description (fcntl(2)), which two processes share once one has sent the other a descriptor. A neighbour could clear
the flag, and a write to an eventfd or a pipe would then block for ever. MSG_DONTWAIT makes a single call on a socket
non-blocking, whatever the flag says.

The engine that sleeps creates the pair, keeps the end that it reads, and gives the other end to its peer. No neighbour
has the reading end: reads of one socket take turns, so a neighbour's read could hold up ours. An end of a pair accepts
datagrams only from its other end. Unlike a stream socket, it does not stay readable once the other end is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ..errors import InvalidValueError


class Notifier:
    """A pair of sockets of this process: a datagram to `notify_fd`, from this or another process, makes `fd` readable.
    """

    fd: int
    notify_fd: int

    def __init__(self) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.fd, self.notify_fd = (end.detach() for end in pair)

    def notify(self) -> None:
        """Wake the engine that sleeps on `fd`. No other process may have `notify_fd`: it could block this call."""
        with contextlib.suppress(BlockingIOError):  # the queue is full, which wakes the engine as well
            os.write(self.notify_fd, b"\0")

    def close(self) -> None:
        """Close both ends."""
        os.close(self.fd)
        os.close(self.notify_fd)


def check_notify_fd(fd: int) -> None:
    """Raise InvalidValueError unless `fd`, which a neighbour has sent, can be a notifier's `notify_fd`.

    A call on another kind of file or socket might block for as long as the neighbour likes.
    """
    kind = None
    with contextlib.suppress(OSError):  # not a socket
        sock = socket.socket(fileno=fd)
        kind = sock.family, sock.type
        sock.detach()
    if kind != (socket.AF_UNIX, socket.SOCK_DGRAM):
        raise InvalidValueError(f"descriptor {fd} cannot notify an engine: it is not a unix datagram socket")
