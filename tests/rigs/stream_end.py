"""The other end of a wire by a Unix stream socket, made by hand: it speaks as QEMU's `-netdev stream` does."""

import contextlib
import socket
from pathlib import Path
from typing import Any


class StreamEnd:
    """An end that connects to a NIC, which listens. It waits `timeout` seconds for a frame, or for ever."""

    def __init__(self, path: Path, timeout: float | None = None):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout)
        self.sock.connect(str(path))

    def send(self, *frames: Any) -> None:
        """Send frames one behind the other, each behind its length."""
        self.sock.sendall(b"".join(len(bytes(f)).to_bytes(4, "big") + bytes(f) for f in frames))

    def hear(self) -> bytes:
        """Return the next frame that the NIC has sent."""
        return self._take(int.from_bytes(self._take(4), "big"))

    def _take(self, nbytes: int) -> bytes:
        data = self.sock.recv(nbytes, socket.MSG_WAITALL)
        assert len(data) == nbytes, "the NIC has closed the connection"
        return data

    def drop(self) -> None:
        """Drop what the NIC has sent."""
        with contextlib.suppress(BlockingIOError):
            while self.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                pass

    def hang_up(self) -> None:
        """End the stream: whoever waits for more gets nothing."""
        self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
