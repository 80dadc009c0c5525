"""The HTTP server's side of a connection without a client: hand-made segments, a clock of its own, and a send queue."""

import ctypes
from contextlib import ExitStack

import numpy as np
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

import gpunetio as gn
from gpunetio.eth import EthTxq
from gpunetio.packet_processing.connection import ENDED, HTTP, SEGMENT, SERVED, SLOT_BITS, STATE_MASK, TAG_ROOM, Tables
from gpunetio.packet_processing.http_server import look_at_deadlines, take_segment
from gpunetio.packet_processing.pages import Page, Pages

SECOND = 10**9
FIRST, PEER_FIRST = 7000, 1000  # sequence numbers of the SYN-ACK and the SYN
_HEADER = Ether(dst="02:00:00:00:00:02") / IP(src="192.0.2.1", dst="192.0.2.2") / TCP(sport=80, dport=5000)


class ServerBench:
    """A server with one lane, whose time is `now`."""

    def __init__(self, pages: dict[bytes, bytes], undo: ExitStack):
        ctx = undo.enter_context(gn.open("soft0"))
        gpu, pd = undo.enter_context(gn.Gpu("host")), ctx.create_pd()
        self._pages = Pages(gpu, pd, {path: Page(body) for path, body in pages.items()}, undo)
        self.tables = Tables(gpu, 1, 1, self._pages.device_address, self._pages.lkey, undo)
        self._txq = undo.enter_context(EthTxq(gpu, pd, 4096, checksum=True))
        self.http, self.txq = self.tables.device_address, self._txq.device_address
        self.row = np.frombuffer(ctypes.string_at(self.http, HTTP.size), HTTP.dtype)[0]
        self.lane = int(self.row["lanes"])
        self.now = 100 * SECOND

    def client(self, slot: int, window: int = 65535) -> "ServerClient":
        """Return a client whose connection is open."""
        return ServerClient(self, slot, window)

    def count(self, name: str) -> int:
        """Return what the server has counted."""
        return self.tables.counts()[name]

    def look(self, seconds: float) -> None:
        """Let time pass, and timers come."""
        self.now += int(seconds * SECOND)
        look_at_deadlines(self.http, self.txq, 0, self.lane, self.now)


class ServerClient:
    """The client in a slot."""

    def __init__(self, bench: ServerBench, slot: int, window: int):
        self.bench, self.slot, self.window = bench, slot, window
        shared = bench.tables.connections[slot]
        shared["generation"] = self.generation = int(shared["generation"]) + 1
        shared["first_sequence"], shared["peer_sequence"] = FIRST, PEER_FIRST
        shared["mss"], shared["window_shift"] = 1460, 0
        shared["header"] = np.void(bytes(TAG_ROOM) + bytes(_HEADER))
        self.next, self.acked = PEER_FIRST + 1, FIRST + 1
        self.send()

    def send(self, payload: bytes = b"", flags: str = "A") -> None:
        """Send a segment."""
        segment = np.zeros(SEGMENT.size, np.uint8)
        row = SEGMENT.at(segment)
        row["tag"] = self.generation << SLOT_BITS | self.slot
        row["sequence"], row["acknowledgement"], row["window"] = self.next, self.acked, self.window
        row["flags"], row["nbytes"] = int(TCP(flags=flags).flags), len(payload)
        segment[SEGMENT.payload : SEGMENT.payload + len(payload)] = np.frombuffer(payload, np.uint8)
        self.next += len(payload)
        take_segment(self.bench.http, self.bench.txq, self.bench.lane, segment.ctypes.data, self.bench.now)

    def acknowledge(self, nbytes: int | None = None) -> None:
        """Acknowledge so many bytes more, or all that was sent."""
        left = int(self.served["snd_max"]) - self.acked
        self.acked += left if nbytes is None else min(left, nbytes)
        self.send()

    @property
    def served(self) -> np.ndarray:
        """Return the server's row of the connection."""
        at = int(self.bench.row["served"]) + self.slot * SERVED.size
        return np.frombuffer(ctypes.string_at(at, SERVED.size), SERVED.dtype)[0]

    @property
    def ended(self) -> bool:
        """Return whether the server has ended the connection."""
        return int(self.bench.tables.states[self.slot]) & STATE_MASK == ENDED
