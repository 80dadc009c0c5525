"""DMA streams, which copy payload to, from and between GPUs (memory/streams.py), and staging slots.

Positions count the bytes that were issued to a DMA stream, and never wrap.
"""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .record import State, dma, nobody

UNTIL_IDLE, FOR_EVER = 1, 2  # DMA_STREAM.stuck


class DmaStream(State):
    """A CUDA stream on which a DMA engine of a GPU copies payload (memory/streams.py)."""

    # functions of the CUDA driver
    copy_in: I64 = nobody("cuMemcpyHtoDAsync")
    copy_out: I64 = nobody("cuMemcpyDtoHAsync")
    copy_within: I64 = nobody("cuMemcpyDtoDAsync")
    copy_between: I64 = nobody("cuMemcpyAsync, between GPUs only: it takes unknown memory for host memory")
    record: I64 = nobody("cuEventRecord")
    query: I64 = nobody("cuEventQuery")
    attributes: I64 = nobody("cuPointerGetAttributes")
    enter: I64 = nobody("cuCtxSetCurrent")
    # set-up
    context: I64 = nobody("CUDA context of the device", line=True)
    cu_stream: I64 = nobody("its stream for copies")
    marks: I64 = nobody("address of MARKS rows of MARK")
    landings: I64 = nobody("address of LANDINGS rows of LANDING")
    staging: I64 = nobody("address of pinned memory, through which copies to memory that is not pinned go")
    names: I64 = nobody("address of `asked`")
    answers: I64 = nobody("address of `where`")
    timeout_ns: I64 = nobody("time without progress until copies are given up")
    # progress
    issued: I64 = dma("position after the last byte that was issued", line=True)
    done: I64 = dma("position after the last byte that is known to be copied")
    recorded: I64 = dma("position of the last event")
    mark_head: I64 = dma("events that were recorded")
    mark_tail: I64 = dma("events that have occurred")
    landing_head: I64 = dma("landings that were begun")
    landing_tail: I64 = dma("landings that were finished")
    room_head: I64 = dma("bytes of `staging` that were taken")
    room_tail: I64 = dma("bytes of `staging` that were given back")
    open_target: I64 = dma("the piece that is still growing: where it goes")
    open_source: I64 = dma("where it comes from")
    open_nbytes: I64 = dma("its bytes; 0 if no piece grows")
    progress_at: I64 = dma("when there was progress last, in ns")
    failures: I64 = dma("failures, of calls and by the deadline")
    fail_from: I64 = dma("the latest failure gave up the bytes after this position")
    error: I64 = dma("its CUresult; TIMED_OUT after the deadline")
    stuck: I64 = dma("not 0: it accepts no copies, UNTIL_IDLE (its late events occur) or FOR_EVER")
    # attributes of an address, from the driver
    asked: Annotated[int, "raw[16]"] = nobody("numbers of the attributes", line=True)
    where: Annotated[int, "raw[32]"] = nobody("addresses of the words that take them; the last is 0")
    memory_type: I64 = dma("HOST or DEVICE")
    range_start: I64 = dma("where the allocation begins")
    range_size: I64 = dma("its bytes")


DMA_STREAM = DmaStream.entry


class Mark(State, align=32):
    """A CUDA event in a DMA stream. When it occurs, the copies up to its positions are done."""

    event: I64 = nobody("CUevent")
    issued: I64 = dma("position of the stream")
    landing: I64 = dma("landings that were begun")
    room: I64 = dma("bytes of `staging` that were taken")


MARK = Mark.entry


class Landing(State, align=32):
    """Bytes in staging memory that the engine copies to host memory that is not pinned."""

    target: I64 = dma("where they go")
    source: I64 = dma("where in `staging` they are")
    nbytes: I64 = dma("how many")


LANDING = Landing.entry


class Slot(State):
    """Pinned memory that holds bytes [begin, end) of a message in device memory, for packets or for an atomic."""

    row: I64 = dma("address of the QP_ROW; 0 if the slot is free")
    tag: I64 = dma("which of its messages; ABANDONED if the bytes are no longer needed (memory/staging.py)")
    begin: I64 = dma("first byte")
    end: I64 = dma("offset after the last byte")
    address: I64 = nobody("address of the pinned memory")
    stream: I64 = dma("address of the DMA_STREAM that fills the slot; 0 if host memory does")
    fence: I64 = dma("position of that stream after the bytes")
    failures: I64 = dma("failures of that stream before the bytes")
    filled: I64 = dma("not 0: the stream has reached `fence`")
    used_at: I64 = dma("when the slot was used last, in ns")


SLOT = Slot.entry
