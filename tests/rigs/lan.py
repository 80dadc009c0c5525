"""For tests of wires that carry Ethernet: software NICs in a network namespace, and a hand-made station."""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from scapy.layers.l2 import Ether

from gpunetio import PortConfig, verbs
from gpunetio.fabric.ethernet_wire import EthernetWire
from gpunetio.nic.host.engine import compile_engine, compile_extensions
from gpunetio.nic.nic import SoftNic
from nic_rig import CS, FA, READ, REQ, RESP_SEND, SEND, SIZE, WRITE, Buffer, Queue, atomic, connect
from udp_rig import Namespace

ETH_P_ALL = 3


class End:
    """A NIC with a queue pair and two buffers."""

    def __init__(self, ctx: verbs.Context, fill: int):
        self.ctx, self.pd = ctx, ctx.create_pd()
        self.queue = Queue(self.pd)
        self.here, self.there = Buffer(self.pd, SIZE, fill=fill), Buffer(self.pd, SIZE)

    @property
    def nic(self) -> Any:
        return self.ctx.provider.nic  # type: ignore[attr-defined]

    def count(self, name: str) -> int:
        return int(self.nic.counters[name])


def ethernet_wire(nic: SoftNic) -> EthernetWire:
    """Return the NIC's end of its cable."""
    return nic.wire_to_others()._wire  # type: ignore[attr-defined]


def learned(wire: EthernetWire) -> list[bytes]:
    """Return the GIDs of the neighbours whose MAC addresses the NIC has learned."""
    return list(wire.neighbours._known)


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """A network namespace for a test."""
    opened = Namespace()
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def cabled() -> Iterator[Namespace]:
    """A namespace with a cable from `here` to `there`. The kernel sends nothing by itself."""
    with namespace() as where:
        where.ip("link add here type veth peer name there")
        for name in ("here", "there"):
            where.ip(f"link set {name} addrgenmode none")
            where.ip(f"link set {name} up")
        yield where


@contextlib.contextmanager
def nics(where: Namespace, *ports: dict[str, Any]) -> Iterator[list[End]]:
    """Software NICs with these ports, opened in a namespace."""
    compile_engine()  # may take longer than `Namespace.run` waits
    compile_extensions()
    with contextlib.ExitStack() as undo:
        ends = []
        for i, port in enumerate(ports):
            ctx = undo.enter_context(where.run(verbs.open, f"soft{i}", port=PortConfig(**port)))
            ends.append(End(ctx, fill=i))
        yield ends


def exchange(a: End, b: End) -> None:
    """Every operation, from `a` to `b`, whose queue pairs are connected."""
    q = a.queue
    q.post(WRITE, b.there.remote(), a.here.at())
    assert q.done.next().opcode == REQ
    assert (b.there.bytes == a.here.bytes).all()
    q.post(READ, b.here.remote(), a.there.at())
    assert q.done.next().opcode == REQ
    assert (a.there.bytes == b.here.bytes).all()
    b.there.bytes[:] = 0
    b.queue.receive(b.there.at())
    q.post(SEND, a.here.at(0, 1000))
    assert q.done.next().opcode == REQ
    assert b.queue.arrived.next()[0] == RESP_SEND
    assert (b.there.bytes[:1000] == a.here.bytes[:1000]).all()
    b.there.set_word(8, 40)
    q.post(FA, b.there.remote(8), atomic(2), a.there.at(0, 8))
    q.post(CS, b.there.remote(8), atomic(7, 42), a.there.at(8, 8))
    assert [cqe.opcode for cqe in q.done.take(2)] == [REQ, REQ]
    assert (a.there.word(0), a.there.word(8), b.there.word(8)) == (40, 42, 7)


def join(a: End, b: End, **attributes: Any) -> None:
    """Connect the queue pairs of two NICs."""
    connect(a.queue, b.queue, retry_cnt=7, **attributes)


class Station:
    """A station made by hand: a packet socket on an interface."""

    def __init__(self, where: Namespace, interface: str):
        self.sock = where.run(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        where.run(self.sock.bind, (interface, ETH_P_ALL))

    def send(self, frame: Any) -> None:
        self.sock.send(bytes(frame))

    def hear(self, wanted: Callable[[Any], Any], timeout: float = 10.0) -> Any:
        """The first frame that is wanted, as scapy sees it. What comes before that is dropped."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            if select.select([self.sock], [], [], left)[0]:
                frame = Ether(self.sock.recv(1 << 16))
                if wanted(frame):
                    return frame
        raise AssertionError(f"no such frame within {timeout} s")

    def close(self) -> None:
        self.sock.close()


def mac_text(mac: bytes) -> str:
    return mac.hex(":")
