"""A cable from a TAP device to a socket of Ethernet frames, in the form of QEMU's `-netdev stream`.

It loses, doubles and swaps frames in both directions.
"""

import fcntl
import os
import random
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from stream_end import frames_of, joined
from udp_rig import Namespace

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x4004_54CA, 0x0002, 0x1000  # linux/if_tun.h
MOST = 1 << 16  # bytes of a frame
HELD = 0.02  # seconds that a frame to be swapped waits for the next one


def open_tap(where: Namespace, name: str) -> int:
    """Make a TAP device in a namespace, without offloads: its descriptor. It goes when that is closed."""

    def make() -> int:
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        return fd

    return where.run(make)


@dataclass
class Side:
    """A way: where frames of it go, and one that is held back."""

    send: Callable[[bytes], None]
    held: bytes = b""
    done: Counter[str] = field(default_factory=Counter)


class Relay:
    """Carries frames between a TAP device and a connected stream socket until it is closed.

    Of all frames, a share `loss` is lost, `twice` comes twice, and `swapped` comes behind the next one.
    """

    def __init__(self, tap: int, sock: socket.socket, loss: float = 0, twice: float = 0, swapped: float = 0):
        self._tap, self._sock, self._draw = tap, sock, random.Random(5)
        self._loss, self._twice, self._swapped = loss, twice, swapped
        self._stop, self._stopped = os.pipe()
        self._rest = b""
        self.ways = Side(self._to_socket), Side(self._to_tap)
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join(10)
        for fd in (self._stop, self._stopped, self._tap):
            os.close(fd)

    def _to_socket(self, frame: bytes) -> None:
        self._sock.sendall(joined(frame))

    def _to_tap(self, frame: bytes) -> None:
        os.write(self._tap, frame)

    def _carry(self) -> None:
        with suppress(ConnectionResetError, BrokenPipeError):  # its other end closes with frames in it
            self._run()

    def _run(self) -> None:
        out, back = self.ways
        while True:
            held = out.held or back.held
            ready, _, _ = select.select([self._tap, self._sock, self._stop], [], [], HELD if held else None)
            if self._stop in ready:
                return
            if not ready:
                for way in self.ways:
                    self._release(way)
            if self._tap in ready:
                self._pass(out, os.read(self._tap, MOST))
            if self._sock in ready:
                new = self._sock.recv(MOST)
                if not new:
                    return
                found, self._rest = frames_of(self._rest + new)
                for frame in found:
                    self._pass(back, frame)

    def _pass(self, way: Side, frame: bytes) -> None:
        draw = self._draw.random()
        what = "passed"
        if draw < self._loss:
            what = "loss"
        elif (draw := draw - self._loss) < self._twice:
            what = "twice"
        elif draw - self._twice < self._swapped and not way.held:
            what = "swapped"
        way.done[what] += 1
        if what == "swapped":
            way.held = frame
            return
        for _ in range({"loss": 0, "passed": 1, "twice": 2}[what]):
            way.send(frame)
        self._release(way)

    def _release(self, way: Side) -> None:
        if way.held:
            frame, way.held = way.held, b""
            way.send(frame)
