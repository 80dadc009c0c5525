"""For tests of the UDP wire: a wire with both ends of its pipe, and network namespaces for it."""

import concurrent.futures
import ctypes
import itertools
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import numpy as np
import pytest

from gpunetio.fabric import frames
from gpunetio.fabric.udp import UdpWire, check, gid_of, receive, transmit
from gpunetio.fabric.udp_receive import found_empty
from gpunetio.fabric.udp_records import DATAGRAM, ICRC_WRONG
from gpunetio.memory import HostMemory

PIPE_CAPACITY = 1 << 20
_count = itertools.count(1)


def own_address() -> str:
    """An address of the loopback interface that no other test, nor another run of them, uses.

    Its last 16 bits are a unicast LID, so that it does for InfiniBand, too.
    """
    pid, n = os.getpid(), next(_count)
    return f"127.{64 + pid // 192 % 128}.{pid % 192}.{1 + n % 250}"


@dataclass
class Arrived:
    """A DATAGRAM whose ICRC fits, copied."""

    packet: bytes
    peer: IPv4Address | IPv6Address
    source: int
    status: int


def address_of_gid(high: int, low: int) -> IPv4Address | IPv6Address:
    address = IPv6Address(np.array([high, low], np.int64).tobytes())
    return address.ipv4_mapped or address


class Node:
    """A wire, a pipe to it, and the producer's end of that pipe."""

    def __init__(self, *addresses: str, **options: Any):
        self.memory = HostMemory(frames.pipe_size(PIPE_CAPACITY) + 4096)
        self.pipe, self.producer, self.consumer = (self.memory.address + offset for offset in (4096, 0, 64))
        self.memory.view(frames.PIPE_END.dtype, 0, 2)[:] = frames.pipe_end(self.pipe, PIPE_CAPACITY)
        self.wire = UdpWire([ip_address(a) for a in addresses], self.consumer, **options)
        self.poll = select.poll()
        for fd in self.wire.fds:
            self.poll.register(fd, select.POLLIN)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *exc: object) -> None:
        self.wire.close()
        self.memory.close()

    def __getitem__(self, field: str) -> int:
        return int(self.wire.record[field])

    def put(self, packet: bytes, to: str, source: int = 0, corrupt: int = 0) -> None:
        """Fill a frame. It is published with those before it by `transmit`."""
        at = frames.reserve(self.producer, len(packet))
        assert at, "the pipe is full"
        frame = self.memory.view(frames.FRAME.dtype, at - self.memory.address)[0]
        frame["nbytes"], frame["source"], frame["corrupt"] = len(packet), source, corrupt
        frame["peer_high"], frame["peer_low"] = gid_of(ip_address(to))
        start = at - self.memory.address + frames.PACKET
        self.memory.array[start : start + len(packet)] = np.frombuffer(packet, np.uint8)
        frames.commit(self.producer)

    def transmit(self) -> int:
        """Send all that can be sent now."""
        frames.publish(self.producer)
        sent = 0
        while True:
            before = self["tx_dropped"]
            now = transmit(self.wire.address)
            assert now >= 0
            sent += now
            if now == 0 and self["tx_dropped"] == before:
                return sent

    def send(self, packets: list[bytes], to: str, source: int = 0) -> None:
        for packet in packets:
            self.put(packet, to, source)
        assert self.transmit() == len(packets)

    def receive(self, count: int, until: Callable[[], bool] = lambda: False, timeout: float = 10.0) -> list[Arrived]:
        """At least `count` datagrams, or those until `until()`."""
        got: list[Arrived] = []
        end = time.monotonic() + timeout
        while len(got) < count and not until():
            assert time.monotonic() < end, f"{len(got)} of {count} datagrams arrived: {self.wire.record}"
            n = self.turn(got)
            if n == 0:
                self.poll.poll(10)
        return got

    def turn(self, got: list[Arrived]) -> int:
        """Take a batch from each socket, as an engine does in a turn: how many datagrams that was."""
        taken = [(self._take(got, i), self["rx_more"]) for i in range(len(self.wire.fds))]
        if not any(more for _, more in taken):
            found_empty(self.wire.address)
        return sum(n for n, _ in taken)

    def _take(self, got: list[Arrived], index: int) -> int:
        """Take a batch from a socket: how many datagrams that was."""
        n = receive(self.wire.address, index)
        for i, d in enumerate(self.wire.datagrams[:n]):
            status = check(self.wire.address, int(self.wire.record["datagrams"]) + i * DATAGRAM.size)
            if status != ICRC_WRONG:
                got.append(Arrived(
                    ctypes.string_at(int(d["packet"]), int(d["nbytes"])),
                    address_of_gid(int(d["peer_high"]), int(d["peer_low"])), int(d["source"]), int(status),
                ))
        return n

    def wait_for(self, field: str, value: int) -> None:
        """Receive until a counter has a value; nothing may arrive meanwhile."""
        assert self.receive(1, lambda: self[field] == value) == []


class Namespace:
    """A network namespace of its own, entered by one thread; sockets opened there stay there."""

    def __init__(self):
        if shutil.which("ip") is None:
            pytest.skip("needs ip (iproute2)")
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.path = self.run(self._enter)
        self.ip("link set lo up")

    def _enter(self) -> str:
        clone_newnet = 0x40000000
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(clone_newnet) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function inside."""
        return self._thread.submit(function, *args, **options).result(30)

    def ip(self, command: str) -> None:
        """Run ip(8) inside."""
        self.run(subprocess.run, ["ip", *command.split()], check=True, capture_output=True, timeout=20)

    def connect(self, other: "Namespace") -> None:
        """A pair of interfaces: `here` in this namespace, `there` in the other."""
        self.ip(f"link add here type veth peer name there netns {other.path}")
        self.ip("link set here up")
        other.ip("link set there up")

    def close(self) -> None:
        os.close(self._fd)
        self._thread.shutdown()
