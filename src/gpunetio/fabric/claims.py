"""Claims on addresses: abstract unix sockets that are named after them.

Such a name belongs to the network namespace, is unique there, and vanishes with the process.
"""

from __future__ import annotations

import os
import re
import socket
import time
import weakref
from io import FileIO
from ipaddress import ip_address

from ..errors import TimedOutError
from .control_message import credentials
from .link import IpAddress

PATIENCE = 1.0  # seconds that a peer has to answer
RETRY = 0.01  # seconds
PREFIX = "gpunetio/"
MAX_PENDING = 64  # connections that wait for an answer at a time
# A line of /proc/net/unix for a listening socket (flag SO_ACCEPTCON): address, references, protocol, flags, type,
# state, inode, name. Names may contain any bytes, even line feeds; ours are printable.
_LISTENER = re.compile(rb"\S+: [0-9A-F]{8} [0-9A-F]{8} 00010000 [0-9A-F]{4} [0-9A-F]{2} +\d+ @gpunetio/([!-~]+)")

_sockets: weakref.WeakSet[socket.socket | FileIO] = weakref.WeakSet()


def _after_fork() -> None:
    """Close all sockets in a forked child: names and links are the parent's, and must end with it."""
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_after_fork)


def close_after_fork(sock: socket.socket | FileIO) -> None:
    """Close a socket, or a file of frames, in forked children."""
    _sockets.add(sock)


def new_socket() -> socket.socket:
    """Return a unix stream socket of this process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(sock)
    return sock


def names() -> list[str]:
    """Return the names under which NICs of this network namespace listen: their addresses, or `address/pid`."""
    with open("/proc/net/unix", "rb") as table:
        lines = table.read().split(b"\n")
    return sorted({match[1].decode() for line in lines if (match := _LISTENER.fullmatch(line))})


def owner_of(ip: IpAddress | str, timeout: float = PATIENCE) -> int | None:
    """Return the process that claimed an address, or None if none did. TimedOutError if it does not answer."""
    sock = dial(str(ip_address(ip)), time.monotonic() + timeout)
    if sock is None:
        return None
    with sock:
        return credentials(sock)[0]


def claimant(ip: IpAddress | str) -> str | None:
    """Say in words who claimed an address, or return None if nobody did. Does not wait for an answer."""
    try:
        pid = owner_of(ip, timeout=0)
    except TimedOutError:
        return "a process that does not answer"
    return None if pid is None else f"process {pid}"


def dial(name: str, end: float) -> socket.socket | None:
    """Return a connection to the process that listens under `name`, or None if none does. TimedOutError at `end`."""
    sock = new_socket()
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(f"\0{PREFIX}{name}")
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
                time.sleep(RETRY)
    except BaseException:
        sock.close()
        raise
