"""DMA streams, which copy payload to, from and between GPUs (memory/streams.py), and staging slots.

Positions count the bytes that a DMA stream was given, and never wrap.
"""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

UNTIL_IDLE, FOR_EVER = 1, 2  # DMA_STREAM.stuck

DMA_STREAM = record("dma_stream", """
    # functions of the CUDA driver
    copy_in        i64      nobody     cuMemcpyHtoDAsync
    copy_out       i64      nobody     cuMemcpyDtoHAsync
    copy_within    i64      nobody     cuMemcpyDtoDAsync
    copy_between   i64      nobody     cuMemcpyAsync, between GPUs only: it takes unknown memory for host memory
    record         i64      nobody     cuEventRecord
    query          i64      nobody     cuEventQuery
    attributes     i64      nobody     cuPointerGetAttributes
    enter          i64      nobody     cuCtxSetCurrent
    # set-up
    context        i64      nobody     CUDA context of the device
    cu_stream      i64      nobody     its stream for copies
    marks          i64      nobody     address of MARKS rows of MARK
    landings       i64      nobody     address of LANDINGS rows of LANDING
    staging        i64      nobody     address of pinned memory, through which copies to memory that is not pinned go
    names          i64      nobody     address of `asked`
    answers        i64      nobody     address of `where`
    timeout_ns     i64      nobody     time without progress until copies are given up
    # progress
    issued         i64      dma        position behind what the stream was given
    done           i64      dma        position behind what is known to be in place
    recorded       i64      dma        position of the last event
    mark_head      i64      dma        events that were recorded
    mark_tail      i64      dma        events that have occurred
    landing_head   i64      dma        landings that were begun
    landing_tail   i64      dma        landings that were finished
    room_head      i64      dma        bytes of `staging` that were taken
    room_tail      i64      dma        bytes of `staging` that were given back
    open_target    i64      dma        the piece that is still growing: where it goes
    open_source    i64      dma        where it comes from
    open_nbytes    i64      dma        its bytes; 0 if no piece grows
    progress_at    i64      dma        when there was progress last, in ns
    failures       i64      dma        failures, of calls and by the deadline
    fail_from      i64      dma        the latest failure gave up what is behind this position
    error          i64      dma        its CUresult; TIMED_OUT after the deadline
    stuck          i64      dma        given nothing more: UNTIL_IDLE, until its events occur after all, or FOR_EVER
    # what the driver tells of an address
    asked          raw[16]  nobody     numbers of the attributes
    where          raw[32]  nobody     addresses of the words that take them; the last is 0
    memory_type    i64      dma        HOST or DEVICE
    range_start    i64      dma        where the allocation begins
    range_size     i64      dma        its bytes
""")
dma_stream_at: View = struct_view(DMA_STREAM)

# An event in the stream: what has been done once it has occurred.
MARK = record("mark", """
    event          i64      nobody     CUevent
    issued         i64      dma        position of the stream
    landing        i64      dma        landings that were begun
    room           i64      dma        bytes of `staging` that were taken
""", align=32)
mark_at: View = struct_view(MARK)

# Bytes in `staging` that the engine copies to host memory that is not pinned.
LANDING = record("landing", """
    target         i64      dma        where they go
    source         i64      dma        where in `staging` they are
    nbytes         i64      dma        how many
""", align=32)
landing_at: View = struct_view(LANDING)

# Pinned memory that holds bytes [begin, end) of a message in device memory, for packets or for an atomic.
SLOT = record("slot", """
    row            i64      dma        address of the QP_ROW; 0 if the slot is free
    tag            i64      dma        which of its messages; ABANDONED if nobody needs the bytes (memory/staging.py)
    begin          i64      dma        first byte
    end            i64      dma        behind the last byte
    address        i64      nobody     address of the pinned memory
    stream         i64      dma        address of the DMA_STREAM that fills the slot; 0 if host memory does
    fence          i64      dma        position of that stream behind the bytes
    failures       i64      dma        failures of that stream before the bytes
    filled         i64      dma        not 0: the stream has reached `fence`
    used_at        i64      dma        when the slot was used last, in ns
""")
slot_at: View = struct_view(SLOT)
