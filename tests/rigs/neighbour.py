"""A process with a control socket, for test_neighbours: it obeys lines on its stdin, and answers in JSON.

    python neighbour.py ADDRESS

This module also has what both sides need to send frames over a link.
"""

import contextlib
import ctypes
import itertools
import json
import os
import queue
import random
import socket
import sys
import time
from typing import Any

from gpunetio.fabric import frames
from gpunetio.fabric.control_socket import ControlSocket
from gpunetio.fabric.link import Link
from gpunetio.memory import HostMemory

TIMEOUT = 20.0


def address() -> str:
    """A loopback address that nobody else uses, most likely."""
    return ".".join(map(str, (127, *(random.SystemRandom().randrange(16, 250) for _ in range(3)))))


def ring(link: Link) -> None:
    """Wake the peer, as an engine does."""
    with socket.socket(fileno=os.dup(link.peer_notify_fd)) as notify_fd, contextlib.suppress(BlockingIOError):
        notify_fd.send(b"\0", socket.MSG_DONTWAIT)


def rings(link: Link) -> int:
    """Take the notifications that wait for us."""
    with socket.socket(fileno=os.dup(link.event_fd)) as notifier:
        for count in itertools.count():
            try:
                notifier.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return count
    raise AssertionError


class Frames:
    """Packets, as bytes, over a link."""

    def __init__(self, link: Link):
        self.link, self._memory = link, HostMemory(2 * frames.PIPE_END.size)
        self._out, self._in = self._memory.address, self._memory.address + frames.PIPE_END.size
        ends = self._memory.view(frames.PIPE_END.dtype, 0, 2)
        ends[0], ends[1] = frames.pipe_end(link.tx, link.capacity), frames.pipe_end(link.rx, link.capacity)

    def send(self, packet: bytes) -> None:
        """Wait for room, and wake the peer."""
        end = time.monotonic() + TIMEOUT
        while (frame := frames.reserve(self._out, len(packet))) == 0:
            assert time.monotonic() < end, "the pipe stays full"
            time.sleep(1e-4)
        ctypes.c_int64.from_address(frame + frames.FRAME.nbytes).value = len(packet)
        ctypes.memmove(frame + frames.PACKET, packet, len(packet))
        frames.commit(self._out)
        frames.publish(self._out)
        ring(self.link)

    def receive(self) -> bytes:
        """Wait for the next packet."""
        end = time.monotonic() + TIMEOUT
        while (frame := frames.next_frame(self._in)) == 0:
            assert time.monotonic() < end, "nothing arrives"
            time.sleep(1e-4)
        assert frame > 0, "the peer has written nonsense"
        nbytes = ctypes.c_int64.from_address(frame + frames.FRAME.nbytes).value
        packet = ctypes.string_at(frame + frames.PACKET, nbytes)
        frames.consume(self._in)
        frames.release(self._in)
        return packet


class Heard:
    """What a control socket has told: queues of links."""

    def __init__(self):
        self.laid: queue.Queue[Link] = queue.Queue()
        self.gone: queue.Queue[Link] = queue.Queue()

    def open(self, *addresses: str, name: str = "soft0", **options: Any) -> ControlSocket:
        """A control socket that tells."""
        return ControlSocket(addresses, name, on_link=self.laid.put, on_gone=self.gone.put, **options)


def main() -> None:
    """Serve until stdin ends."""
    heard = Heard()
    door = heard.open(sys.argv[1], name="child", capacity=1 << 16)

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    say(pid=os.getpid(), claimed=[*door.claimed.values()])
    link = None
    for line in sys.stdin:
        command, *args = line.split()
        match command:
            case "connect":
                link = door.connect(args[0], TIMEOUT)
                say(link=repr(link))
            case "link":
                link = heard.laid.get(timeout=TIMEOUT)
                say(capacity=link.capacity, peer=link.peer_pid)
            case "echo":
                assert link is not None
                wire = Frames(link)
                for _ in range(int(args[0])):
                    wire.send(wire.receive()[::-1])
                say(echoed=True)
            case "close":
                assert link is not None
                link.close()
                say(links=len(door.links))
            case "gone":
                lost = heard.gone.get(timeout=TIMEOUT)
                lost.close()
                say(links=len(door.links))
    door.close()


if __name__ == "__main__":
    main()
