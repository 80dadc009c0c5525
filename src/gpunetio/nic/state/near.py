"""What a slice has near its turns: copies of the rows that it has borrowed, and what its warps tell each other."""

from __future__ import annotations

from ...fabric.icrc import HEADER_ROOM
from ...jit.compile import device_function
from ...jit.ops import ld64
from ...jit.struct_view import View, struct_view
from .counters import COUNTERS
from .cq import CQ_ROW
from .message import MESSAGE
from .objects import MKEY_ROW
from .qp import QP_ROW
from .record import record
from .srq import SRQ_ROW
from .work_queue import WORK_QUEUE
from .worker import WORKER, worker_at

MOST = 64  # queue pairs of a worker that borrows, and SRQs; there are at most twice as many CQs
KEYS = 64  # a power of two
LANES = 32

# Each group begins on a cache line, so rows are as aligned as they are in their tables. `worker` comes first: the
# address of all is that of the copy of WORKER, which functions of the engine take as `nic`.
NEAR = record("near", f"""
    worker         raw[{WORKER.size}] engine  copy of the WORKER
    # copies of what belongs to it
    counters       raw[{COUNTERS.size}] engine  its COUNTERS
    # its MESSAGE
    message        raw[{MESSAGE.size}] engine  room for a request
    # headers
    scratch        raw[{HEADER_ROOM}] engine  room for a packet's headers
    # the list of work queues
    active         raw[{MOST * WORK_QUEUE.size}] engine  its WORK_QUEUEs
    # the rows
    qps            raw[{MOST * QP_ROW.size}] engine  its QP_ROWs, in the order of the list
    # CQs
    cqs            raw[{2 * MOST * CQ_ROW.size}] engine  their CQ_ROWs
    # SRQs
    srqs           raw[{MOST * SRQ_ROW.size}] engine  their SRQ_ROWs
    # keys
    keys           raw[{KEYS * MKEY_ROW.size}] engine  the MKEY_ROWs that were used lately, each where its index says
    # where the rows were copied from
    qp_rows        i64[{MOST}] engine  addresses of the QP_ROWs
    cq_rows        i64[{2 * MOST}] engine  addresses of the CQ_ROWs
    srq_rows       i64[{MOST}] engine  addresses of the SRQ_ROWs
    # counts
    owner          i64      engine     address of the WORKER itself
    cq_count       i64      engine     CQs that are borrowed
    srq_count      i64      engine     SRQs that are borrowed
    ready          i64      engine     bits of the queue pairs whose next WQEs may be a run
    # copies that many warps make together (copies.py)
    targets        i64[{LANES}] engine  where to
    sources        i64[{LANES}] engine  where from
    sizes          i64[{LANES}] engine  how many bytes
    ends           i64[{LANES}] engine  chunks of all copies up to this one
    asked          i64      engine     how often helpers were asked
    jobs           i64      engine     copies in the list
    first          i64      engine     number of the first helper among the warps that copy
    warps          i64      engine     how many warps copy
    answers        i64      engine     how often a helper has made its part
    list           i64      engine     number of the last list for blocks that only copy (state/board.py)
    # between the warps
    recalled       i64      engine     not 0: the host asks for what is done on the rows themselves
    over           i64      engine     not 0: the slice is over
""")
near_at: View = struct_view(NEAR, shared=True)

# Views of what lies in NEAR.
near_worker_at: View = struct_view(WORKER, shared=True)
near_counters_at: View = struct_view(COUNTERS, shared=True)
near_work_queue_at: View = struct_view(WORK_QUEUE, shared=True)
near_qp_at: View = struct_view(QP_ROW, shared=True)
near_cq_at: View = struct_view(CQ_ROW, shared=True)
near_mkey_at: View = struct_view(MKEY_ROW, shared=True)


@device_function
def near_queue(near, number):
    """Return the address of an entry of the list of work queues."""
    return near + NEAR.active + number * WORK_QUEUE.size


@device_function
def cq_where_it_is(nic, row):
    """Return the address of the copy of a CQ_ROW if `nic` is a NEAR that has one; else `row`. One lane calls this."""
    if worker_at(nic).near == nic:
        for i in range(near_at(nic).cq_count):
            if ld64(nic + NEAR.cq_rows + 8 * i) == row:
                return nic + NEAR.cqs + i * CQ_ROW.size
    return row
