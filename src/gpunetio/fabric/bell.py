"""A bell, which wakes a sleeping engine: a pair of datagram sockets. The engine polls one; a datagram rings the bell.

Engines of two processes wake each other, and neither may be able to block the other. O_NONBLOCK is a flag of the open
file description (fcntl(2)), which two processes share once one has sent the other a descriptor. A neighbour could clear
the flag, and a write to an eventfd or a pipe would then wait for ever. MSG_DONTWAIT makes a single call on a socket
non-blocking, whatever the flag says.

The engine that sleeps makes the pair, keeps the end that it reads, and gives the other end, the rope, to its peer. No
neighbour has the reading end: reads of one socket take turns, so a neighbour's read could hold up ours. An end of a
pair takes datagrams only from its other end. Unlike a stream socket, it does not stay readable once the other end is
closed.
"""

from __future__ import annotations

import contextlib
import os
import socket

from ..errors import InvalidValueError


class Bell:
    """A bell of this process: a datagram to `rope`, from here or from another process, makes `fd` readable."""

    fd: int
    rope: int

    def __init__(self) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.fd, self.rope = (end.detach() for end in pair)

    def ring(self) -> None:
        """Wake the engine that sleeps on this bell. No other process may have the rope: it could block this call."""
        with contextlib.suppress(BlockingIOError):  # the queue is full, which wakes the engine as well
            os.write(self.rope, b"\0")

    def close(self) -> None:
        """Close both ends."""
        os.close(self.fd)
        os.close(self.rope)


def check_rope(fd: int) -> None:
    """Raise InvalidValueError unless `fd`, which a neighbour has sent, can be a rope.

    A call on another kind of file or socket might block for as long as the neighbour likes.
    """
    kind = None
    with contextlib.suppress(OSError):  # not a socket
        sock = socket.socket(fileno=fd)
        kind = sock.family, sock.type
        sock.detach()
    if kind != (socket.AF_UNIX, socket.SOCK_DGRAM):
        raise InvalidValueError(f"descriptor {fd} is not the rope of a bell: it is not a unix datagram socket")
