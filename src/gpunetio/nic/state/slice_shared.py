"""What a slice keeps in shared memory: copies of cached rows, and the words that its warps share."""

from __future__ import annotations

from typing import Annotated

from ...fabric.icrc import HEADER_ROOM
from ...formats.layout import I64
from ...jit.compile import device_function
from ...jit.ops import ld64
from ...jit.struct_view import View, struct_view
from .counters import COUNTERS
from .cq import CQ_ROW
from .message import MESSAGE
from .objects import MKEY_ROW
from .qp import QP_CACHED_BYTES, QP_ROW
from .record import State, engine
from .srq import SRQ_ROW
from .work_queue import WORK_QUEUE
from .worker import WORKER, WorkerState

KEYS = 64  # a power of two
LANES = 32
MOST = 256  # queue pairs of a worker that caches its rows, at most
_LEAST = 64  # queue pairs that always have room, so that queue pairs may be added during a slice
_GROUP_SHIFT = 5  # of LANES queue pairs


class SliceShared(State):
    """What a slice keeps in its block's shared memory.

    Each group begins on a cache line, so rows have the alignment that they have in their tables. `worker` comes first:
    the address of the whole is also that of the copy of the worker, so functions of the engine take it as `worker`.
    """

    worker: Annotated[int, f"raw[{WORKER.size}]"] = engine("copy of the WORKER")
    # copies of what belongs to it
    counters: Annotated[int, f"raw[{COUNTERS.size}]"] = engine("its COUNTERS", line=True)
    # its MESSAGE
    message: Annotated[int, f"raw[{MESSAGE.size}]"] = engine("room for a request", line=True)
    # headers
    scratch: Annotated[int, f"raw[{HEADER_ROOM}]"] = engine("room for a packet's headers", line=True)
    # keys
    keys: Annotated[int, f"raw[{KEYS * MKEY_ROW.size}]"] = engine(
        "the MKEY_ROWs that were used lately, each where its index says", line=True
    )
    # what is cached
    owner: I64 = engine("address of the WORKER itself", line=True)
    qps: I64 = engine("address of the copies of QP_ROWs, in the order of the list of work queues")
    cqs: I64 = engine("address of the copies of CQ_ROWs")
    srqs: I64 = engine("address of the first copy of an SRQ_ROW. The others are below it")
    cq_count: I64 = engine("CQs that are cached")
    srq_count: I64 = engine("SRQs that are cached")
    # bits for each LANES queue pairs
    batchable: Annotated[int, f"i64[{MOST // LANES}]"] = engine("BITS: those whose next WQEs may be a batch", line=True)
    single: Annotated[int, f"i64[{MOST // LANES}]"] = engine(
        "BITS: those whose next WQEs one thread executes in this turn"
    )
    # copies that many warps make together (memory/copies.py)
    targets: Annotated[int, f"i64[{LANES}]"] = engine("where to", line=True)
    sources: Annotated[int, f"i64[{LANES}]"] = engine("where from")
    sizes: Annotated[int, f"i64[{LANES}]"] = engine("how many bytes")
    ends: Annotated[int, f"i64[{LANES}]"] = engine("chunks of all copies up to this one")
    posted: I64 = engine("lists posted to the copy warps")
    jobs: I64 = engine("copies in the list")
    first: I64 = engine("number of the first copy warp among the warps that copy")
    warps: I64 = engine("how many warps copy")
    finished: I64 = engine("shares that copy warps have copied")
    list: I64 = engine("number of the last list for blocks that only copy (state/board.py)")
    # between the warps
    recalled: I64 = engine("not 0: the host requests something that needs the rows themselves", line=True)
    over: I64 = engine("not 0: the slice is over")


SLICE_SHARED = SliceShared.entry
shared_at: View = struct_view(SLICE_SHARED, shared=True)


class Bits(State, align=8):
    """A bit for each queue pair of a group of LANES."""

    bits: I64 = engine("one for each queue pair, the first of the group at the bottom")


BITS = Bits.entry
bits_at: View = struct_view(BITS, shared=True)

# A SLICE_SHARED is followed by the list of WORK_QUEUEs, then by copies of rows, each with the address of its row.
QP_COPY, CQ_COPY = QP_CACHED_BYTES + 16, CQ_ROW.size + 16
assert SRQ_ROW.size <= CQ_ROW.size

# Views of structures in shared memory.
shared_worker_at: View = struct_view(WORKER, shared=True)
shared_counters_at: View = struct_view(COUNTERS, shared=True)
shared_work_queue_at: View = struct_view(WORK_QUEUE, shared=True)
shared_qp_at: View = struct_view(QP_ROW, shared=True)
shared_cq_at: View = struct_view(CQ_ROW, shared=True)
shared_mkey_at: View = struct_view(MKEY_ROW, shared=True)


@device_function
def shared_queue(shared: int, number: int) -> int:
    """Return the address of an entry of the list of work queues."""
    return shared + SLICE_SHARED.size + number * WORK_QUEUE.size


@device_function
def queues_in(nbytes: int) -> int:
    """Return how many queue pairs fit in `nbytes` of shared memory, if each has a CQ of its own."""
    return min((nbytes - SLICE_SHARED.size) // (WORK_QUEUE.size + QP_COPY + CQ_COPY), MOST)


@device_function
def bytes_for(queues: int, most: int) -> int:
    """Return the bytes of shared memory for so many queue pairs, each with two CQs and an SRQ; `most` at most."""
    return min(SLICE_SHARED.size + max(queues, _LEAST) * (WORK_QUEUE.size + QP_COPY + 3 * CQ_COPY), most)


@device_function
def qp_copy(worker: WorkerState, i: int) -> int:
    """Return the address of the copy of a QP_ROW."""
    return shared_at(worker).qps + i * QP_COPY


@device_function
def cq_copy(worker: WorkerState, i: int) -> int:
    """Return the address of the copy of a CQ_ROW."""
    return shared_at(worker).cqs + i * CQ_COPY


@device_function
def srq_copy(worker: WorkerState, i: int) -> int:
    """Return the address of the copy of an SRQ_ROW."""
    return shared_at(worker).srqs - i * CQ_COPY


@device_function
def has_bit(words: int, number: int) -> int:
    """Return whether a bit is set for a queue pair."""
    return bits_at(words + BITS.size * (number >> _GROUP_SHIFT)).bits >> (number & LANES - 1) & 1


@device_function
def set_bits(words: int, base: int, bits: int) -> None:
    """Set the bits of a group of queue pairs, or those from `base` on in the group. One lane calls this."""
    group, shift = bits_at(words + BITS.size * (base >> _GROUP_SHIFT)), base & LANES - 1
    group.bits = (0 if shift == 0 else group.bits) | bits << shift


@device_function
def cached_cq(worker: WorkerState, row: int) -> int:
    """Return the address of the cached copy of a CQ, or `row` if there is none. One lane calls this.

    There can be one only if `worker` is in a SLICE_SHARED.
    """
    if worker.shared == worker:
        for i in range(shared_at(worker).cq_count):
            copy = cq_copy(worker, i)
            if ld64(copy + CQ_ROW.size) == row:
                return copy
    return row
