"""A hand-made other end of a wire over a Unix stream socket, which speaks as QEMU's `-netdev stream` does."""

import contextlib
import socket
from pathlib import Path
from typing import Any

PREFIX = 4  # bytes of the length before a frame


def joined(*frames: Any) -> bytes:
    """Frames as the stream has them, each behind its length."""
    return b"".join(len(bytes(frame)).to_bytes(PREFIX, "big") + bytes(frame) for frame in frames)


def frames_of(stream: bytes) -> tuple[list[bytes], bytes]:
    """The frames in a part of the stream that begins with one, and what is left of an incomplete one."""
    found = []
    while len(stream) >= PREFIX:
        end = PREFIX + int.from_bytes(stream[:PREFIX], "big")
        if len(stream) < end:
            break
        found.append(stream[PREFIX:end])
        stream = stream[end:]
    return found, stream


class StreamEnd:
    """An end that connects to a NIC, which listens. It waits `timeout` seconds for a frame, or for ever."""

    def __init__(self, path: Path, timeout: float | None = None):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout)
        self.sock.connect(str(path))

    def send(self, *frames: Any) -> None:
        """Send frames one behind the other, each behind its length."""
        self.sock.sendall(joined(*frames))

    def hear(self) -> bytes:
        """Return the next frame that the NIC has sent."""
        return self._take(int.from_bytes(self._take(PREFIX), "big"))

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
