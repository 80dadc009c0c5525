"""The acceptor of the HTTP server without a NIC: frames from scapy, rules in a dictionary, and a clock of its own."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from gpunetio import Gpu, device
from gpunetio.errors import FullError
from gpunetio.packet_processing.acceptor import FREE, Acceptor, SlotTable
from gpunetio.packet_processing.connection import SLOT_BITS, SLOTS, STATE_SHIFT, Tables
from gpunetio.packet_processing.connection_rules import ConnectionRules
from gpunetio.packet_processing.handshake import HANDED_OVER, look_at_ends, take_frame
from gpunetio.packet_processing.station import Station
from gpunetio.packet_processing.tcp_frames import MOST_ANSWER

MAC, ADDRESS, PEER_MAC, PEER = "02:00:00:00:00:01", "192.0.2.1", "02:00:00:00:00:02", "192.0.2.2"
STATION = Station(0x020000000001, 0xC0000201, 1500)
LOOK_NS = 1_000_000_000  # longer than the time between two checks


class HandshakeBench:
    """The acceptor of queue `number`: its answers, its rules, and the time that it sees. Queues share a `table`."""

    def __init__(
        self, gpu: Gpu, undo: ExitStack, queues: int = 1, number: int = 0, table: SlotTable | None = None
    ):
        self.tables, self.table = Tables(gpu, queues, 1, 0, 0, undo), table or SlotTable()
        self.acceptor = Acceptor(self.tables, self.table, number, STATION)
        self.rules: dict[int, tuple[int, int, int]] = {}  # address and ports, by tag
        self.now, self.room, self.number = 100 * 10**9, True, number
        self.connection_rules = ConnectionRules(self.table, self.add)
        self._answer = np.zeros(MOST_ANSWER, np.uint8)

    def add(self, slot: int, source: int, sport: int, dport: int, tag: int) -> "Rule":
        """Add a rule. There cannot be two for the same client."""
        if not self.room:
            raise FullError("no room")
        assert tag & SLOTS - 1 == slot
        assert (source, sport, dport) not in self.rules.values()
        self.rules[tag] = source, sport, dport
        return Rule(self.rules, tag)

    def take(self, *frames: Packet | bytes) -> list[Packet]:
        """Give it frames. Return its answers, as scapy reads them."""
        answers = []
        for frame in frames:
            data = np.frombuffer(bytes(frame) or b" ", np.uint8)
            at = self._answer.ctypes.data
            nbytes = take_frame(self.acceptor.address, data.ctypes.data, len(bytes(frame)), at, self.now)
            if nbytes not in (0, HANDED_OVER):
                answers.append(Ether(self._answer[:nbytes].tobytes()))
        return answers

    def look(self) -> None:
        """Let it look at ends of connections."""
        self.now += LOOK_NS
        look_at_ends(self.acceptor.address, self.now)

    def say(self, tag: int, state: int) -> None:
        """Say as the server what has become of a connection."""
        self.tables.states[tag & SLOTS - 1] = tag >> SLOT_BITS << STATE_SHIFT | state

    def handed(self) -> np.ndarray | None:
        """Return the next segment that the server is given, and free its item; None if there is none."""
        ring = self.tables.from_cpu
        item = device.sem_next(ring.host_address, self.number)
        if item < 0:
            return None
        found = ring.read_info(item)
        device.sem_free(ring.host_address, self.number)
        return found

    def leave(self, slots: int) -> None:
        """Let it have only so many slots, the last ones."""
        self.acceptor.row["free"] = SLOTS - slots + 1
        self.table.slots["before"][SLOTS - slots] = 0

    @property
    def tags(self) -> set[int]:
        """Return the tags of its connections."""
        held = np.nonzero(self.table.slots["until"] != FREE)[0].tolist()
        return {int(self.table.slots["generation"][slot]) << SLOT_BITS | slot for slot in held}

    def count(self, name: str) -> int:
        """Return what it has counted."""
        return self.acceptor.counts()[name]


class Rule:
    """A rule, as `ConnectionRules` has it."""

    def __init__(self, rules: dict[int, tuple[int, int, int]], tag: int):
        self.rules, self.tag = rules, tag

    def close(self) -> None:
        del self.rules[self.tag]


def segment(
    flags: str, port: int = 5000, payload: bytes = b"", ip: dict[str, Any] | None = None, **fields: Any
) -> Packet:
    """A segment of a client, by default to the server."""
    tcp = TCP(sport=port, dport=80, flags=flags, **({"seq": 1000} | fields))
    return Ether(src=PEER_MAC, dst=MAC) / IP(**({"src": PEER, "dst": ADDRESS} | (ip or {}))) / tcp / payload
