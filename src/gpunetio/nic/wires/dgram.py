"""A wire over Unix datagram sockets, as in QEMU's `-netdev dgram`, to a virtual machine or to another NIC.

Each end has its own path, and sends to the path of the other end. Neither end connects: frames to an end that does not
exist are lost, and arrive again as soon as it does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct

from ...errors import InUseError, InvalidValueError, NotPermittedError
from ...fabric.ethernet_records import DATAGRAM_SOCKET
from .descriptor import Ethernet
from .unix import LONGEST_PATH

_BUFFER = 4 << 20  # bytes that one end has sent and the other has not read, if net.core.wmem_max allows
_SOCKADDR_UN = struct.Struct("H108s")  # unix(7)


class UnixDatagrams(Ethernet):
    """A cable between two socket paths."""

    reading: int = DATAGRAM_SOCKET

    def attach(self) -> socket.socket:
        self._bound: os.stat_result | None = None
        self._here, _, there = self.interface.partition(",")
        if not self._here or not there or "," in there or self._here == there:
            raise InvalidValueError(
                f"wire {self.name}: it needs two paths, this end's and the other end's: dgram:LOCAL,REMOTE"
            )
        for path in (self._here, there):
            if len(os.fsencode(path)) > LONGEST_PATH:
                raise InvalidValueError(
                    f"wire {self.name}: the path of a socket has at most {LONGEST_PATH} bytes, not "
                    f"{len(os.fsencode(path))}: {path}"
                )
        self.send_to = _SOCKADDR_UN.pack(socket.AF_UNIX, os.fsencode(there))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            self._bind(sock)
            self._bound = os.stat(self._here)
        except BaseException:
            sock.close()
            raise
        return sock

    def _bind(self, sock: socket.socket) -> None:
        """Bind to this end's path. Replace the socket that a killed program has left there."""
        try:
            if stat.S_ISSOCK(os.lstat(self._here).st_mode) and self._is_left_over():
                os.unlink(self._here)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self.os_error(error, f"look at {self._here}") from None
        try:
            sock.bind(self._here)
        except PermissionError:
            raise NotPermittedError(
                f"wire {self.name}: {self._here} cannot be made: choose a folder of yours"
            ) from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InUseError(
                    f"wire {self.name}: {self._here} exists: another program has it, or it is no socket. The first "
                    "path is this end's, the second the other end's"
                ) from None
            raise self.os_error(error, f"make {self._here}") from None

    def _is_left_over(self) -> bool:
        """Return whether the socket at this end's path is stale: no process has it open."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._here)
            except ConnectionRefusedError:
                return True
            except OSError:
                pass
        return False

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            if self._bound is not None and os.path.samestat(os.stat(self._here), self._bound):
                os.unlink(self._here)


make = UnixDatagrams
