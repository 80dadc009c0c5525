"""Connections of the HTTP server: the data that the CPU and the kernels share, and who writes which.

A connection has a slot, and the flow tag `generation << SLOT_BITS | slot`. Slot s belongs to lane s % lanes, and lane l
to queue l % queues. Only one thread of the CPU, one receive kernel and one warp of the server use the slots of a queue.
So no table has a lock.

    CONNECTION   written by the CPU, before packets can carry its tag: the result of the handshake
    SERVED       written by the server, in its own memory: everything that happens to a connection later
    state word   written by the server, read by the CPU: whether the server has seen the connection, and its end
    SEGMENT      written by receive kernels and the CPU, into the server's rings
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..enums import MemType
from ..formats.layout import Entry
from ..gpu import Gpu
from ..gpu.semaphore import Semaphore
from ..jit.struct_view import View, struct_view

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

# `header` are the headers of a segment to the client: MACs, VLAN tags, addresses and ports are final. IP is at the same
# place however many bytes the tags have (`tags`). It is at 2 modulo 4, so that IP and TCP headers are aligned. The
# window is that of the SYN, which is not scaled (RFC 7323 2.2).
CONNECTION = Entry("connection", 128, """
    generation       0  u32
    first_sequence   4  u32
    peer_sequence    8  u32
    mss             12  u32
    window_shift    16  u32
    tags            20  u32
    header          66  raw[62]
""")

# TCP's variables are those of RFC 9293 3.3.1. Sequence numbers are below 2^32. Times are of the kernel's clock.
#
#     snd_max     the highest snd_nxt so far: after a loss, snd_nxt goes back
#     recover     duplicate acknowledgements below this have already led to a retransmission
#     base        sequence number of the first byte of the response; `total` bytes follow
#     head, body  addresses of its two parts
#     progress    when the client last acknowledged something new, or the last response was complete
#     sent        when the retransmission timer was started
#     answered    when a segment that was not acceptable was last answered
#     searched    of the `filled` bytes in the request buffer, how many are known to have no end of a request
#     ahead_from  in the request buffer, the begin of bytes that arrived before their turn, after a gap
#     ahead_to    the end of these bytes; 0: there are none
#     checked     when the client's rate was last checked
#     checked_una snd_una at that time
SERVED = Entry("served", 320, """
    generation       0  i64
    flags            8  i64
    rcv_nxt         16  i64
    snd_una         24  i64
    snd_nxt         32  i64
    snd_max         40  i64
    window          48  i64
    recover         56  i64
    duplicates      64  i64
    retries         72  i64
    base            80  i64
    total           88  i64
    head            96  i64
    head_bytes     104  i64
    body           112  i64
    progress       120  i64
    sent           128  i64
    filled         136  i64
    searched       144  i64
    mss            152  i64
    window_shift   160  i64
    answered       168  i64
    ahead_from     176  i64
    ahead_to       184  i64
    checked        192  i64
    checked_una    200  i64
    tags           208  i64
    header         218  raw[62]
""")
# Flags: a response is not acknowledged yet; a FIN follows what was sent so far; the client has sent its FIN.
RESPONDING, CLOSING, PEER_FIN = 1, 2, 4

# A segment from a client, in the byte order of the machine. `payload` has room for the MSS that we announce.
SEGMENT = Entry("segment", 1536, """
    tag              0  u32
    sequence         4  u32
    acknowledgement  8  u32
    window          12  u16
    flags           14  u16
    nbytes          16  u32
    payload         32  raw[1504]
""")
MOST_PAYLOAD = SEGMENT.size - SEGMENT.payload

# The counts of a lane of the server, and the negative status with which it has ended. Only that lane writes them,
# except `dropped`, which the receive kernel counts: segments for which the lane's ring had no room. `segments` are
# those that the lane has processed, and `busy_ns` is how long that took.
LANE = Entry("http_lane", 128, """
    status           0  i64
    requests         8  i64
    ok              16  i64
    bad_request     24  i64
    not_found       32  i64
    not_allowed     40  i64
    too_large       48  i64
    opened          56  i64
    ended           64  i64
    retransmitted   72  i64
    nap             80  i64
    dropped         88  i64
    segments        96  i64
    busy_ns        104  i64
""")

# The server's data for kernels. All except the counts are addresses for kernels.
HTTP = Entry("http", 128, """
    connections      0  i64
    served           8  i64
    deadlines       16  i64
    states          24  i64
    buffers         32  i64
    from_kernels    40  i64
    from_cpu        48  i64
    lanes           56  i64
    pages           64  i64
    pages_lkey      72  u32
    lanes_num       76  u32
    queues_num      80  u32
""")


class Tables:
    """The memory of the server's connections, for `queues` queues of `width` lanes each. `undo` frees it.

    As a kernel's argument, it is its `device_address`, that of an HTTP.
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
        """Return the address of the HTTP structure for kernels."""
        return self._structure.device_address

    def counts(self) -> dict[str, int]:
        """Return the sums of all lanes' counts of requests and connections."""
        names = (name for name in LANE.offsets if name not in ("status", "nap", "segments", "busy_ns"))
        return {name: int(self.lane_rows[name].sum()) for name in names}

    def work(self) -> tuple[int, float]:
        """Return the segments that all lanes have processed, and how many seconds the busiest lane took."""
        return int(self.lane_rows["segments"].sum()), int(self.lane_rows["busy_ns"].max()) / 1e9


# --- for kernels -----------------------------------------------------------------------------------------------------

connection_at: View = struct_view(CONNECTION)
served_at: View = struct_view(SERVED)
segment_at: View = struct_view(SEGMENT)
lane_at: View = struct_view(LANE)
