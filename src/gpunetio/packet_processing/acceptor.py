"""The CPU's view of the HTTP server's connections: which client has which slot, and which slots are free.

A slot may be in one of two lists: it is free, or its client has not answered the SYN-ACK, and the connection is
half-open. Slots in no list have a connection that the server has begun. Clients are found by a hash of their address
and ports, whose key is secret, so nobody can choose clients that collide.

Each queue has a thread of the CPU, which runs `accept_tcp`, and has slots and memory of its own. That thread tells the
thread that makes flow rules which connections should have one, and is told which connections have:

    wanted[slot]   tag << 1 | 1: this connection should have a rule. tag << 1: it no longer should
    made[slot]     the last word of `wanted` that was processed; a slot is not reused until that is the current one
"""

from __future__ import annotations

import secrets
from typing import Annotated

import numpy as np

from .. import device as dev
from ..formats.layout import I64, Record
from ..formats.packet import IPV4, TCP
from ..jit.compile import device_function
from ..jit.ops import ld_fixed64
from .connection import MOST_PAYLOAD, SLOTS, Tables
from .counts import TCP_COUNTS
from .siphash import siphash
from .station import Station

HALF_OPEN = SLOTS // 4  # half-open connections of all queues: their clients have not answered the SYN-ACK
CLIENT_SLOTS = SLOTS // 4  # connections of one client in all queues, except half-open ones
_CLIENTS = 4 * SLOTS  # size of the table that counts clients' connections by a hash
_ADDRESS_MASK = (1 << 32) - 1
WANTED = 1  # of a word of `wanted`
ANSWERED, FREE = 0, -1


class Held(Record, size=64):
    """A slot of an acceptor.

    Slots in `chained`, `before` and `after` are numbers from 1 on; 0 is none.

        key           address and port of the client and port of the server, of this connection or the last one
        generation    of this connection, or the last one
        chained       the next slot whose key has the same hash
        before, after the neighbours in the list
        until         when a half-open connection is given up; ANSWERED by its client; or FREE
        segments      that were handed over since then
        scales        whether the client has offered to scale windows
    """

    key: I64 = 0
    generation: I64 = 8
    chained: I64 = 16
    before: I64 = 24
    after: I64 = 32
    until: I64 = 40
    segments: I64 = 48
    scales: I64 = 56


HELD = Held.entry


class AcceptorState(Record, size=320):
    """The data of an acceptor's queue.

    `mac`, `address` and `mtu` are the station's, `mss` is what we announce; `key_low` and `key_high` are the secret of
    the hash. Addresses follow, then lists: the first and the last slot of each. Counts are

        syns      connections that clients have begun
        refused   connections for which there was no slot, or whose client has its share
        expired   half-open connections that were given up
        dropped   segments for which the server had no room
        resets    RSTs that were sent
        sums      TCP_COUNTS of the segments that were handed over
    """

    number: I64 = 0
    queues: I64 = 8
    lanes_num: I64 = 16
    mac: I64 = 24
    address: I64 = 32
    mtu: I64 = 40
    mss: I64 = 48
    key_low: I64 = 56
    key_high: I64 = 64
    slots: I64 = 72
    clients: I64 = 80
    buckets: I64 = 88
    connections: I64 = 96
    states: I64 = 104
    wanted: I64 = 112
    made: I64 = 120
    ring: I64 = 128
    lanes: I64 = 136
    free: I64 = 144
    free_last: I64 = 152
    waiting: I64 = 160
    waiting_last: I64 = 168
    half_open: I64 = 176
    most: I64 = 184
    look_at: I64 = 192
    syns: I64 = 200
    refused: I64 = 208
    expired: I64 = 216
    dropped: I64 = 224
    resets: I64 = 232
    sums: Annotated[int, "raw[72]"] = 240


ACCEPTOR = AcceptorState.entry
COUNTS = ("syns", "refused", "expired", "dropped", "resets")


class SlotTable:
    """The slots of all queues, the words that ask for flow rules, and the number of connections per client.

    `clients` are counts by a hash of the client's address, whose key is `secret`. All queues add to them.
    """

    slots: np.ndarray
    clients: np.ndarray
    wanted: np.ndarray
    made: np.ndarray
    secret: np.ndarray

    def __init__(self) -> None:
        self.slots = np.zeros(SLOTS, HELD.dtype)
        self.slots["until"] = FREE
        self.clients = np.zeros(_CLIENTS, np.int64)
        self.wanted, self.made = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
        self.secret = np.frombuffer(secrets.token_bytes(16), np.int64)


class Acceptor:
    """The slots of queue `number`, in memory of the CPU at `address`."""

    address: int
    row: np.ndarray

    def __init__(self, tables: Tables, table: SlotTable, number: int, station: Station):
        self._image, self._buckets = np.zeros(ACCEPTOR.size, np.uint8), np.zeros(SLOTS, np.int64)
        self._uses = tables, table
        self.address, self.row = int(self._image.ctypes.data), ACCEPTOR.at(self._image)
        row = self.row
        row["number"], row["queues"], row["lanes_num"] = number, tables.queues, tables.lanes
        row["mac"], row["address"], row["mtu"] = station.mac, station.address, station.mtu
        row["mss"] = min(station.mtu - IPV4.size - TCP.size, MOST_PAYLOAD)
        row["key_low"], row["key_high"] = table.secret
        row["most"] = HALF_OPEN // tables.queues
        for name, array in (
            ("slots", table.slots), ("clients", table.clients), ("wanted", table.wanted), ("made", table.made),
            ("buckets", self._buckets), ("connections", tables.connections), ("states", tables.states),
            ("lanes", tables.lane_rows),
        ):
            row[name] = array.ctypes.data
        row["ring"] = tables.from_cpu.host_address
        for slot in range(number, SLOTS, tables.queues):
            append(self.address, ACCEPTOR.free, slot)

    def counts(self) -> dict[str, int]:
        """Return the counts so far. `half_open` are connections at this moment."""
        return {name: int(self.row[name]) for name in (*COUNTS, "half_open")}

    def tcp_counts(self) -> dict[str, int]:
        """Return the counts of the segments that were handed over."""
        sums = TCP_COUNTS.at(self._image[ACCEPTOR.sums :])
        return {name: int(sums[name]) for name in TCP_COUNTS.offsets}


# --- for the thread of the queue -------------------------------------------------------------------------------------


@device_function
def held_row(acceptor: AcceptorState, slot: int) -> Held:
    """Return a slot's row."""
    return Held(ld_fixed64(acceptor + ACCEPTOR.slots) + slot * HELD.size)


@device_function
def hash_of(acceptor: AcceptorState, key: int) -> int:
    """Return 64 bits that nobody can predict without the secret."""
    return siphash(ld_fixed64(acceptor + ACCEPTOR.key_low), ld_fixed64(acceptor + ACCEPTOR.key_high), key)


@device_function
def _bucket(acceptor: AcceptorState, key: int) -> int:
    """Return the address of the first slot in the chain of a key. It uses the upper bits of the hash.

    Sequence numbers reveal the lower bits.
    """
    return ld_fixed64(acceptor + ACCEPTOR.buckets) + 8 * (hash_of(acceptor, key) >> 32 & SLOTS - 1)


@device_function
def find(acceptor: AcceptorState, key: int) -> int:
    """Return the slot of a client, or -1."""
    slot = dev.ld64(_bucket(acceptor, key)) - 1
    while slot >= 0 and held_row(acceptor, slot).key != key:
        slot = held_row(acceptor, slot).chained - 1
    return slot


@device_function
def bind(acceptor: AcceptorState, slot: int, key: int) -> None:
    """Give a slot to a client."""
    h, bucket = held_row(acceptor, slot), _bucket(acceptor, key)
    h.key, h.chained = key, dev.ld64(bucket)
    dev.st64(bucket, slot + 1)


@device_function
def unbind(acceptor: AcceptorState, slot: int) -> None:
    """Remove a client from the hash. Its key stays, because its flow rule may be under construction."""
    h = held_row(acceptor, slot)
    link = _bucket(acceptor, h.key)
    while dev.ld64(link) != slot + 1:
        link = held_row(acceptor, dev.ld64(link) - 1) + HELD.chained
    dev.st64(link, h.chained)


@device_function
def _client(acceptor: AcceptorState, key: int) -> int:
    """Return the address of the number of a client's connections."""
    client = hash_of(acceptor, key >> 32 & _ADDRESS_MASK) >> 32 & _CLIENTS - 1
    return ld_fixed64(acceptor + ACCEPTOR.clients) + 8 * client


@device_function
def has_share(acceptor: AcceptorState, key: int) -> bool:
    """Return whether a client has reached the limit of connections per client."""
    return dev.ld_relaxed64(_client(acceptor, key)) >= CLIENT_SLOTS


@device_function
def count_connection(acceptor: AcceptorState, slot: int, count: int) -> None:
    """Add `count` to a client's connections: 1 when a connection is no longer half-open, -1 when it ends."""
    dev.fetch_add_sys64(_client(acceptor, held_row(acceptor, slot).key), count)


@device_function
def append(acceptor: AcceptorState, ends: int, slot: int) -> None:
    """Append a slot to a list. `ends` is the offset in ACCEPTOR of the list's first and last slot."""
    h, last = held_row(acceptor, slot), dev.ld64(acceptor + ends + 8)
    h.before, h.after = last, 0
    if last == 0:
        dev.st64(acceptor + ends, slot + 1)
    else:
        held_row(acceptor, last - 1).after = slot + 1
    dev.st64(acceptor + ends + 8, slot + 1)


@device_function
def remove(acceptor: AcceptorState, ends: int, slot: int) -> None:
    """Remove a slot from a list."""
    h = held_row(acceptor, slot)
    if h.before == 0:
        dev.st64(acceptor + ends, h.after)
    else:
        held_row(acceptor, h.before - 1).after = h.after
    if h.after == 0:
        dev.st64(acceptor + ends + 8, h.before)
    else:
        held_row(acceptor, h.after - 1).before = h.before
