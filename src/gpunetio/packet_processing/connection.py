"""Connections of the HTTP server: the data that the CPU and the kernels share, and who writes which.

A connection has a slot, and the flow tag `generation << SLOT_BITS | slot`. Slot s belongs to lane s % lanes, and lane l
to queue l % queues. Only one thread of the CPU, one receive kernel and one warp of the server use the slots of a queue.
So no table has a lock.

    Connection   written by the CPU, before packets can carry its tag: the result of the handshake
    Served       written by the server, in its own memory: everything that happens to a connection later
    state word   written by the server, read by the CPU: whether the server has seen the connection, and its end
    Segment      written by receive kernels and the CPU, into the server's rings
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import numpy as np

from ..enums import MemType
from ..formats.layout import I64, U16, U32, Record
from ..gpu import Gpu
from ..gpu.semaphore import Semaphore

SLOT_BITS = 12
SLOTS = 1 << SLOT_BITS
LAST_GENERATION = (1 << 24 - SLOT_BITS) - 1  # flow tags have 24 bits, and 0 is no tag
REQUEST_BYTES = 2048  # the longest request, and the window that is advertised
RING_ITEMS = 1024  # of all lanes of a queue
HEADER_BYTES = 54  # Ethernet, IPv4 and TCP without options
TAG_ROOM = 8  # bytes for VLAN tags

# The state that the server publishes for a slot: `generation << 2`, and one of these.
UNKNOWN, OPEN, ENDED = 0, 1, 2
STATE_MASK, STATE_SHIFT = 3, 2


class Connection(Record, size=128):
    """The result of a handshake, for the server. The CPU writes it.

    `header` are the headers of a segment to the client: MACs, VLAN tags, addresses and ports are final. IP is at
    the same place however many bytes the tags have (`tags`). It is at 2 modulo 4, so that IP and TCP headers are
    aligned. The window is that of the SYN, which is not scaled (RFC 7323 2.2).
    """

    generation: U32 = 0
    first_sequence: U32 = 4
    peer_sequence: U32 = 8
    mss: U32 = 12
    window_shift: U32 = 16
    tags: U32 = 20
    header: Annotated[int, "raw[62]"] = 66


CONNECTION = Connection.entry


class Served(Record, size=320):
    """A connection, as the server alone sees it.

    TCP's variables are those of RFC 9293 3.3.1. Sequence numbers are below 2^32. Times are of the kernel's clock.

        snd_max     the highest snd_nxt so far: after a loss, snd_nxt goes back
        recover     duplicate acknowledgements below this have already led to a retransmission
        base        sequence number of the first byte of the response; `total` bytes follow
        head, body  addresses of its two parts
        progress    when the client last acknowledged something new, or the last response was complete
        sent        when the retransmission timer was started
        answered    when a segment that was not acceptable was last answered
        searched    of the `filled` bytes in the request buffer, how many are known to have no end of a request
        ahead_from  in the request buffer, the begin of bytes that arrived before their turn, after a gap
        ahead_to    the end of these bytes; 0: there are none
        checked     when the client's rate was last checked
        checked_una snd_una at that time
    """

    generation: I64 = 0
    flags: I64 = 8
    rcv_nxt: I64 = 16
    snd_una: I64 = 24
    snd_nxt: I64 = 32
    snd_max: I64 = 40
    window: I64 = 48
    recover: I64 = 56
    duplicates: I64 = 64
    retries: I64 = 72
    base: I64 = 80
    total: I64 = 88
    head: I64 = 96
    head_bytes: I64 = 104
    body: I64 = 112
    progress: I64 = 120
    sent: I64 = 128
    filled: I64 = 136
    searched: I64 = 144
    mss: I64 = 152
    window_shift: I64 = 160
    answered: I64 = 168
    ahead_from: I64 = 176
    ahead_to: I64 = 184
    checked: I64 = 192
    checked_una: I64 = 200
    tags: I64 = 208
    header: Annotated[int, "raw[62]"] = 218


SERVED = Served.entry
# Flags: a response is not acknowledged yet; a FIN follows what was sent so far; the client has sent its FIN.
RESPONDING, CLOSING, PEER_FIN = 1, 2, 4


class Segment(Record, size=1536):
    """A segment from a client, in the byte order of the machine.

    `payload` has room for the MSS that we announce.
    """

    tag: U32 = 0
    sequence: U32 = 4
    acknowledgement: U32 = 8
    window: U16 = 12
    flags: U16 = 14
    nbytes: U32 = 16
    payload: Annotated[int, "raw[1504]"] = 32


SEGMENT = Segment.entry
MOST_PAYLOAD = SEGMENT.size - SEGMENT.payload


class Lane(Record, size=128):
    """The counts of a lane of the server, and the negative status with which it has ended.

    Only that lane writes them, except `dropped`, which the receive kernel counts: segments for which the lane's ring
    had no room. `segments` are those that the lane has processed, and `busy_ns` is how long that took.
    """

    status: I64 = 0
    requests: I64 = 8
    ok: I64 = 16
    bad_request: I64 = 24
    not_found: I64 = 32
    not_allowed: I64 = 40
    too_large: I64 = 48
    opened: I64 = 56
    ended: I64 = 64
    retransmitted: I64 = 72
    nap: I64 = 80
    dropped: I64 = 88
    segments: I64 = 96
    busy_ns: I64 = 104


LANE = Lane.entry


class Http(Record, size=128):
    """The server's data for kernels. All except the counts are addresses for kernels."""

    connections: I64 = 0
    served: I64 = 8
    deadlines: I64 = 16
    states: I64 = 24
    buffers: I64 = 32
    from_kernels: I64 = 40
    from_cpu: I64 = 48
    lanes: I64 = 56
    pages: I64 = 64
    pages_lkey: U32 = 72
    lanes_num: U32 = 76
    queues_num: U32 = 80


HTTP = Http.entry


class Tables:
    """The memory of the server's connections, for `queues` queues of `width` lanes each. `undo` frees it.

    As a kernel's argument, it is its `device_address`, that of an Http.
    """

    queues: int
    lanes: int
    from_kernels: Semaphore
    from_cpu: Semaphore
    connections: np.ndarray
    states: np.ndarray
    lane_rows: np.ndarray

    def __init__(self, gpu: Gpu, queues: int, width: int, pages: int, pages_lkey: int, undo: ExitStack):
        self.queues, self.lanes = queues, queues * width

        def alloc(nbytes: int, kind: MemType = MemType.GPU):
            memory = undo.enter_context(gpu.alloc(nbytes, kind))
            memory.write(np.zeros(nbytes, np.uint8))
            return memory

        def ring(kind: MemType) -> Semaphore:
            items = max(RING_ITEMS // width, 16) * self.lanes
            return undo.enter_context(gpu.create_semaphore(items, memory=kind, info=SEGMENT.dtype, rings=self.lanes))

        served, deadlines = alloc(SLOTS * SERVED.size), alloc(SLOTS * 8)
        buffers = alloc(SLOTS * REQUEST_BYTES)
        shared, states = alloc(SLOTS * CONNECTION.size, MemType.CPU_GPU), alloc(SLOTS * 8, MemType.CPU_GPU)
        lanes = alloc(self.lanes * LANE.size, MemType.CPU_GPU)
        self.from_kernels, self.from_cpu = ring(MemType.GPU), ring(MemType.CPU_GPU)
        self.connections = shared.array.view(CONNECTION.dtype)
        self.states = states.array.view(np.int64)
        self.lane_rows = lanes.array.view(LANE.dtype)
        self._structure = alloc(HTTP.size)
        image = np.zeros(HTTP.size, np.uint8)
        row = HTTP.at(image)
        for name, memory in (
            ("connections", shared), ("served", served), ("deadlines", deadlines), ("states", states),
            ("buffers", buffers), ("from_kernels", self.from_kernels), ("from_cpu", self.from_cpu), ("lanes", lanes),
        ):
            row[name] = memory.device_address
        row["pages"], row["pages_lkey"] = pages, pages_lkey
        row["lanes_num"], row["queues_num"] = self.lanes, queues
        self._structure.write(image)

    @property
    def device_address(self) -> int:
        """Return the address of the Http for kernels."""
        return self._structure.device_address

    def counts(self) -> dict[str, int]:
        """Return the sums of all lanes' counts of requests and connections."""
        names = (name for name in LANE.offsets if name not in ("status", "nap", "segments", "busy_ns"))
        return {name: int(self.lane_rows[name].sum()) for name in names}

    def work(self) -> tuple[int, float]:
        """Return the segments that all lanes have processed, and how many seconds the busiest lane took."""
        return int(self.lane_rows["segments"].sum()), int(self.lane_rows["busy_ns"].max()) / 1e9


# --- for kernels -----------------------------------------------------------------------------------------------------

