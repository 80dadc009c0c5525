"""A wire over a Unix stream socket, as in QEMU's `-netdev stream`, to a virtual machine or to another NIC.

The first end listens at the path, and the second connects. If the connected end goes away, the listening end waits for
another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import threading
import time

import numpy as np

from ...errors import DocaError, InUseError, InvalidValueError, NotFoundError, NotPermittedError, TimedOutError
from ...fabric.claims import close_after_fork
from ...fabric.ethernet_records import STREAM
from ...service import ServiceThread
from .descriptor import Ethernet, logger

PATIENCE = 1.0  # seconds that the other end has to accept a connection
_RETRY = 0.02  # seconds
_REFUSAL = 0.1  # seconds within which a listening end that already has a peer closes a new connection
LONGEST_PATH = 107  # bytes (unix(7))


class UnixStream(Ethernet):
    """A cable to the other end of a Unix stream socket."""

    reading: int = STREAM

    def attach(self) -> socket.socket:
        self._listener: socket.socket | None = None
        self._listens = False
        self._free = threading.Event()  # set while no peer is connected
        path, end = self.interface, time.monotonic() + PATIENCE
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise InvalidValueError(f"wire {self.name}: the path of a socket has at most {LONGEST_PATH} bytes")
        while True:
            try:
                if not stat.S_ISSOCK(os.stat(path).st_mode):
                    raise InvalidValueError(f"wire {self.name}: {path} exists, and is no socket: choose another path")
            except FileNotFoundError:
                if self._listen(path):
                    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # a placeholder until a peer connects
                continue
            except OSError as error:
                raise self.os_error(error, f"look at {path}") from None
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                if (why := self._connect(sock, path)) is None:
                    return sock
                if time.monotonic() > end:
                    raise why
            except BaseException:
                sock.close()
                raise
            sock.close()
            time.sleep(_RETRY)

    def _connect(self, sock: socket.socket, path: str) -> DocaError | None:
        """Connect to the listening end. Return None, or the error if a retry may succeed."""
        sock.setblocking(False)
        try:
            sock.connect(path)
        except BlockingIOError:
            return TimedOutError(f"wire {self.name}: who listens at {path} takes no connection")
        except (ConnectionRefusedError, FileNotFoundError):
            return NotFoundError(
                f"wire {self.name}: nobody listens at {path} any more. Remove the file, or start who makes it first"
            )
        except PermissionError:
            raise NotPermittedError(
                f"wire {self.name}: {path} belongs to another user, who does not let you in"
            ) from None
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                raise InvalidValueError(
                    f"wire {self.name}: {path} is a socket for datagrams; a stream is needed (`-netdev stream`)"
                ) from None
            raise self.os_error(error, f"connect to {path}") from None
        if select.select([sock], [], [], _REFUSAL)[0]:
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    return InUseError(
                        f"wire {self.name}: who listens at {path} has its peer already. A socket joins two ends: "
                        "choose another path"
                    )
        return None

    def _listen(self, path: str) -> bool:
        """Listen at the path. Return False if another process has just begun to listen there."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(1)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise self.os_error(error, f"listen at {path}") from None
        close_after_fork(listener)
        self._listener, self._listens = listener, True
        return True

    def open(self, row: np.ndarray) -> np.ndarray:
        try:
            tx = super().open(row)
        except BaseException:
            self._stop_listening()
            raise
        if self._listener is not None:
            self._wire.record["gone"] = 1
            self._free.set()
            self._stop, self._stopped = socket.socketpair()
            self._thread = ServiceThread(f"gpunetio {self.name} listener", self._accept)
            try:
                self._thread.start()
            except BaseException:
                self.close()
                raise
        return tx

    def _accept(self) -> None:
        """Accept connections: keep one as the peer while there is none, and close all others."""
        assert self._listener is not None
        while self._stopped not in select.select([self._listener, self._stopped], [], [])[0]:
            connection, _ = self._listener.accept()
            with connection:
                if self._free.is_set():
                    self._free.clear()
                    self._wire.plug(connection.fileno())

    def on_peer_gone(self) -> None:
        if not self._listens:
            super().on_peer_gone()
            return
        logger.info("%s: the other end is gone; the NIC waits for another", self.name)
        self._free.set()

    def close(self) -> None:
        if self._listener is not None:
            self._stop.close()
            self._thread.join()
            self._stopped.close()
        self._stop_listening()
        super().close()

    def _stop_listening(self) -> None:
        """Stop listening, and remove the path."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                os.unlink(self.interface)


make = UnixStream
