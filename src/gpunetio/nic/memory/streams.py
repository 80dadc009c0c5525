"""DMA streams: copies to and from memory that the engine cannot access, made by a GPU's copy engines, many at a time.

Such memory is called device memory. Translated addresses in it carry the number of the DMA stream in their upper bits.
A DMA stream is a stream of the CUDA driver, called through the C function pointers in its row. Positions count all
bytes ever issued to the stream: bytes up to `issued` are issued, bytes up to `done` are copied. After each batch, a
CUDA event marks a position of the stream (`record`). Nothing waits for a single copy.

CUDA copies from and to pinned host memory directly. Other bytes go through the stream's staging ring. For copies to
device memory, the engine writes the bytes to the ring, and adjacent pieces are merged. Bytes from device memory land in
the ring, and the engine copies them out once their event has occurred.
"""

from __future__ import annotations

from ...formats.commands import ServiceType
from ...jit.compile import device_function, engine_function
from ...jit.ops import call_c, clock_ns, copy, ld32, on_host, pause
from ..state import refuse
from ..state.dma_stream import DMA_STREAM, FOR_EVER, LANDING, MARK, UNTIL_IDLE, DmaStream, Landing, Mark
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.worker import WorkerState
from .copies import copy_payload

DEVICE_SHIFT = 58  # above all addresses of a process, on every 64-bit platform of CUDA
DEVICE_ADDRESS = (1 << DEVICE_SHIFT) - 1
MAX_STREAMS = 31

STAGING = 8 << 20  # bytes of the ring
PIECE = 256 << 10  # bytes of one copy through it, at most
RECORD_EVERY = 4 << 20  # bytes between events, so that completions do not all wait for the end of the turn
MARKS, LANDINGS = 64, 1024

# Values of CUresult, CUpointer_attribute and CUmemorytype.
INVALID_VALUE, NOT_READY = 1, 600
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12
HOST, DEVICE = 1, 2
TIMED_OUT = -1  # in place of a CUresult: the stream's deadline has passed


@device_function
def on_gpu() -> bool:
    """Return whether the engine runs on a GPU. There it accesses all memory itself, without DMA streams."""
    return on_host() == 0


@device_function
def device_of(address: int) -> int:
    """Return the number of the stream that reaches an address, 0 for host memory."""
    return address >> DEVICE_SHIFT


@device_function
def stream_of(worker: WorkerState, number: int) -> DmaStream:
    """Return the row of a DMA stream."""
    return DmaStream(worker.streams + number * DMA_STREAM.size)


# --- issuing copies ------------------------------------------------------------------------------------------------


@engine_function
def _fail(stream: DmaStream, error: int) -> None:
    """Record a failed call. From now on, the outcome of the copies in flight is unknown."""
    stream.failures += 1
    stream.fail_from = stream.done
    stream.error = error
    stream.done = stream.issued
    stream.open_nbytes = 0
    stream.landing_tail = stream.landing_head


@engine_function
def _enter(worker: WorkerState, stream: DmaStream) -> int:
    """Make the stream's context current on the engine's thread. Return a CUresult."""
    if worker.context == stream.context:
        return 0
    error = call_c(stream.enter, stream.context, 0, 0, 0)
    worker.context = stream.context if error == 0 else 0
    return error


@engine_function
def _issue(worker: WorkerState, stream: DmaStream, target: int, source: int, nbytes: int) -> int:
    """Issue one copy to the stream. Return a CUresult."""
    error = _enter(worker, stream)
    if error != 0:
        return error
    function = stream.copy_between
    if device_of(source) == 0:
        function = stream.copy_in
    elif device_of(target) == 0:
        function = stream.copy_out
    elif device_of(target) == device_of(source):
        function = stream.copy_within
    return call_c(function, target & DEVICE_ADDRESS, source & DEVICE_ADDRESS, nbytes, stream.cu_stream)


@engine_function
def _close_piece(worker: WorkerState, stream: DmaStream) -> int:
    """Issue the open piece, to which bytes were being added. Return 0, or a CUresult, which is recorded."""
    if stream.open_nbytes == 0:
        return 0
    error = _issue(worker, stream, stream.open_target, stream.open_source, stream.open_nbytes)
    stream.open_nbytes = 0
    if error != 0:
        _fail(stream, error)
    return error


@engine_function
def record(worker: WorkerState, stream: DmaStream) -> None:
    """Record an event after all copies issued so far."""
    if on_gpu():
        return
    _close_piece(worker, stream)
    if stream.recorded == stream.issued or stream.mark_head - stream.mark_tail == MARKS:
        return
    mark = Mark(stream.marks + (stream.mark_head & (MARKS - 1)) * MARK.size)
    error = _enter(worker, stream)
    if error == 0:
        error = call_c(stream.record, mark.event, stream.cu_stream, 0, 0)
    if error != 0:
        _fail(stream, error)
        stream.stuck = FOR_EVER
        stream.mark_tail = stream.mark_head
        return
    mark.issued, mark.landing, mark.room = stream.issued, stream.landing_head, stream.room_head
    if stream.mark_head == stream.mark_tail:
        stream.progress_at = clock_ns()
    stream.mark_head += 1
    stream.recorded = stream.issued


@device_function
def _count_issued(worker: WorkerState, stream: DmaStream, nbytes: int) -> None:
    if on_gpu():
        return
    stream.issued += nbytes
    if stream.issued - stream.recorded >= RECORD_EVERY:
        record(worker, stream)


# --- polling for completion ----------------------------------------------------------------------------------------


@engine_function
def _copy_landed(stream: DmaStream, position: int) -> None:
    """Copy bytes that have landed in the staging ring to their targets."""
    while stream.landing_tail < position:
        landing = Landing(stream.landings + (stream.landing_tail & (LANDINGS - 1)) * LANDING.size)
        copy(landing.target, landing.source, landing.nbytes)
        stream.landing_tail += 1


@engine_function
def poll(stream: DmaStream) -> int:
    """Query the events. Return how many have occurred. If none occurs for `timeout_ns`, the stream has failed."""
    if on_gpu():
        return 0
    done = 0
    while stream.mark_tail != stream.mark_head:
        mark = Mark(stream.marks + (stream.mark_tail & (MARKS - 1)) * MARK.size)
        error = call_c(stream.query, mark.event, 0, 0, 0)
        if error == NOT_READY:
            if stream.stuck == 0 and clock_ns() - stream.progress_at > stream.timeout_ns:
                stream.stuck = UNTIL_IDLE
                _fail(stream, TIMED_OUT)
                done += 1
            return done
        if error != 0:
            _fail(stream, error)
            stream.stuck = FOR_EVER
            stream.mark_tail = stream.mark_head
            return done + 1
        _copy_landed(stream, mark.landing)
        stream.done = max(stream.done, mark.issued)
        stream.room_tail = mark.room
        stream.progress_at = clock_ns()
        stream.mark_tail += 1
        done += 1
    if stream.stuck == UNTIL_IDLE:
        stream.stuck = 0
    return done


@device_function
def _advance(worker: WorkerState, stream: DmaStream) -> None:
    """Make progress with the stream's copies. The stream's deadline ends any loop around this."""
    record(worker, stream)
    if poll(stream) == 0:
        pause()


@engine_function
def copy_status(stream: DmaStream, fence: int, failures: int) -> int:
    """Return the status of the copies up to `fence`: 1 done, 0 in flight, -1 failed.

    `failures` is the stream's count of failures from before these copies. `fail_from` describes only the latest
    failure: after several failures, it is unknown which copies an earlier one gave up.
    """
    if on_gpu():
        return 1
    if stream.done < fence:
        return 0
    if stream.failures == failures:
        return 1
    return -1 if stream.failures - failures > 1 or fence > stream.fail_from else 1


@engine_function
def _await(worker: WorkerState, stream: DmaStream, fence: int) -> None:
    if on_gpu():
        return
    while stream.done < fence:
        _advance(worker, stream)


@engine_function
def poll_streams(worker: WorkerState) -> int:
    """Query the events of all streams. Return how many have occurred."""
    if on_gpu():
        return 0
    done = 0
    for number in range(1, worker.stream_count + 1):
        stream = stream_of(worker, number)
        if stream.recorded != stream.issued:  # all marks were in use
            record(worker, stream)
        if stream.mark_tail != stream.mark_head:
            done += poll(stream)
    return done


@engine_function
def record_streams(worker: WorkerState) -> None:
    """End the turn: the copies that the turn issued to a stream become one batch."""
    if on_gpu():
        return
    for number in range(1, worker.stream_count + 1):
        stream = stream_of(worker, number)
        if stream.recorded != stream.issued:
            record(worker, stream)


@engine_function
def copies_in_flight(worker: WorkerState) -> bool:
    """Return whether copies are in flight. Copies of a stuck stream do not count: nothing waits for them."""
    if on_gpu():
        return False
    for number in range(1, worker.stream_count + 1):
        stream = stream_of(worker, number)
        on_its_way = stream.mark_tail != stream.mark_head or stream.recorded != stream.issued
        if stream.done != stream.issued or (on_its_way and stream.stuck == 0):
            return True
    return False


# --- the staging ring ----------------------------------------------------------------------------------------------


@engine_function
def _reserve(worker: WorkerState, stream: DmaStream, nbytes: int) -> int:
    """Reserve room for a piece in the staging ring. Return its address, or 0 if the stream is stuck."""
    at = stream.room_head & (STAGING - 1)
    if at + nbytes > STAGING:
        stream.room_head += STAGING - at
        at = 0
    while stream.room_head + nbytes - stream.room_tail > STAGING:
        if stream.stuck != 0:
            return 0
        if stream.mark_head == stream.mark_tail and stream.recorded == stream.issued:
            stream.room_tail = stream.room_head  # the room was reserved for copies that CUDA has refused
        else:
            _advance(worker, stream)
    stream.room_head += nbytes
    return stream.staging + at


@engine_function
def is_pinned(worker: WorkerState, stream: DmaStream, address: int, nbytes: int) -> bool:
    """Ask the driver whether CUDA can access host memory. Memory may be pinned and unpinned at any time."""
    if on_gpu():
        return False
    if _enter(worker, stream) != 0 or call_c(stream.attributes, 3, stream.names, stream.answers, address) != 0:
        return False
    if ld32(stream + DMA_STREAM.memory_type) != HOST:
        return False
    if stream.range_size == 0:  # the driver does not say where this memory ends
        return True
    return address >= stream.range_start and address + nbytes <= stream.range_start + stream.range_size


@engine_function
def _stage_in(worker: WorkerState, stream: DmaStream, target: int, source: int, nbytes: int) -> int:
    """Copy unpinned host memory to device memory. Return a CUresult. The bytes are read at once."""
    while nbytes > 0:
        part = min(nbytes, PIECE)
        at = _reserve(worker, stream, part)
        if at == 0:
            return stream.error
        copy(at, source, part)
        if (
            stream.open_nbytes != 0
            and stream.open_target + stream.open_nbytes == target
            and stream.open_source + stream.open_nbytes == at
        ):
            stream.open_nbytes += part
        else:
            error = _close_piece(worker, stream)
            if error != 0:
                return error
            stream.open_target, stream.open_source, stream.open_nbytes = target, at, part
        _count_issued(worker, stream, part)
        if stream.open_nbytes >= PIECE:
            error = _close_piece(worker, stream)
            if error != 0:
                return error
        target += part
        source += part
        nbytes -= part
    return 0


@engine_function
def _stage_out(worker: WorkerState, stream: DmaStream, target: int, source: int, nbytes: int) -> int:
    """Copy device memory to unpinned host memory. Return a CUresult."""
    error = _close_piece(worker, stream)
    while nbytes > 0 and error == 0:
        part = min(nbytes, PIECE)
        at = _reserve(worker, stream, part)
        while stream.landing_head - stream.landing_tail == LANDINGS and stream.stuck == 0:
            _advance(worker, stream)
        if at == 0 or stream.stuck != 0:
            return stream.error
        error = _issue(worker, stream, at, source, part)
        if error == 0:
            landing = Landing(stream.landings + (stream.landing_head & (LANDINGS - 1)) * LANDING.size)
            landing.target, landing.source, landing.nbytes = target, at, part
            stream.landing_head += 1
            _count_issued(worker, stream, part)
        target += part
        source += part
        nbytes -= part
    return error


@device_function
def _copy_direct(worker: WorkerState, stream: DmaStream, target: int, source: int, nbytes: int) -> int:
    """Copy between memories that CUDA can access. Return a CUresult."""
    error = _close_piece(worker, stream)
    if error == 0:
        error = _issue(worker, stream, target, source, nbytes)
    if error == 0:
        _count_issued(worker, stream, nbytes)
    return error


# --- moving bytes --------------------------------------------------------------------------------------------------


@engine_function
def copy_failed(worker: WorkerState, stream: DmaStream, address: int, nbytes: int) -> int:
    """Refuse a request that a DMA stream failed to copy: save the failure for the error record, return the reason."""
    return refuse.copy_failed(worker, address & DEVICE_ADDRESS, nbytes, stream.error, stream.timeout_ns)


@engine_function
def _refuse(worker: WorkerState, stream: DmaStream, address: int, nbytes: int, error: int) -> int:
    """Report a copy that CUDA has refused, and return the reason.

    Earlier copies end first: no copy accesses a request's memory after its error.
    """
    stream.error = error
    _await(worker, stream, stream.issued)
    stream.error = error
    return copy_failed(worker, stream, address, nbytes)


@engine_function
def start_device_copy(worker: WorkerState, target: int, source: int, nbytes: int, pinned: int) -> int:
    """Have a DMA stream copy from or to device memory. Return 0, or a reason. `pinned`: the host side is pinned."""
    if on_gpu():
        return Reason.COPY_FAILED
    into, out_of = device_of(target), device_of(source)
    stream = stream_of(worker, into if into != 0 else out_of)
    m = DmaStream(stream)
    address = target if into != 0 else source
    if m.stuck != 0:
        return _refuse(worker, DmaStream(stream), address, nbytes, m.error)
    if worker.touched != stream:
        if worker.touched != 0:  # a request for two GPUs: its fence covers the second stream alone
            fence = DmaStream(worker.touched).issued
            _await(worker, DmaStream(worker.touched), fence)
            if copy_status(DmaStream(worker.touched), fence, worker.failures) < 0:
                return copy_failed(worker, DmaStream(worker.touched), address, nbytes)
        worker.touched, worker.failures = stream, m.failures
    error = INVALID_VALUE
    if into != 0 and out_of != 0:
        error = _copy_direct(worker, DmaStream(stream), target, source, nbytes)
        return 0 if error == 0 else _refuse(worker, DmaStream(stream), address, nbytes, error)
    if pinned != 0 or is_pinned(worker, DmaStream(stream), source if into != 0 else target, nbytes):
        error = _copy_direct(worker, DmaStream(stream), target, source, nbytes)
    if error == INVALID_VALUE:  # not all of it is pinned
        if into != 0:
            error = _stage_in(worker, DmaStream(stream), target, source, nbytes)
        else:
            error = _stage_out(worker, DmaStream(stream), target, source, nbytes)
            worker.landed = 1
    return 0 if error == 0 else _refuse(worker, DmaStream(stream), address, nbytes, error)


@device_function
def start_copy(worker: WorkerState, target: int, source: int, nbytes: int) -> int:
    """Copy host memory at once, or start a copy by a DMA stream and set `WORKER.touched`. Return 0, or a reason."""
    if (target | source) >> DEVICE_SHIFT == 0:
        copy_payload(worker, target, source, nbytes)
        return 0
    return start_device_copy(worker, target, source, nbytes, 0)


@engine_function
def _copy_device_and_wait(worker: WorkerState, target: int, source: int, nbytes: int) -> int:
    if on_gpu():
        return Reason.COPY_FAILED
    worker.touched = 0
    reason = start_device_copy(worker, target, source, nbytes, 0)
    stream, worker.touched = worker.touched, 0
    if reason != 0:
        return reason
    fence = DmaStream(stream).issued
    _await(worker, DmaStream(stream), fence)
    if copy_status(DmaStream(stream), fence, worker.failures) > 0:
        return 0
    return copy_failed(worker, DmaStream(stream), source, nbytes)


@device_function
def copy_and_wait(worker: WorkerState, target: int, source: int, nbytes: int) -> int:
    """Copy bytes as `start_copy` does, and wait until the copy is done. Return 0, or a reason."""
    if (target | source) >> DEVICE_SHIFT == 0:
        copy_payload(worker, target, source, nbytes)
        return 0
    return _copy_device_and_wait(worker, target, source, nbytes)


# --- bytes that come over a wire -----------------------------------------------------------------------------------


@engine_function
def await_copies(worker: WorkerState, qp: QpRow) -> int:
    """Wait for a QP's copies in flight, so that later bytes may follow. Return 0, or a reason.

    An RC QP whose copies have failed keeps its stream until it has sent the NAK to its peer (transport/responder.py).
    """
    if on_gpu():
        return 0
    stream = DmaStream(qp.stream)
    _await(worker, stream, qp.fence)
    moved = copy_status(stream, qp.fence, qp.failures) > 0
    if moved or qp.service != ServiceType.RC:
        qp.stream = 0
    if moved:
        return 0
    return copy_failed(worker, stream, 0, 0)


@engine_function
def drain_copies(worker: WorkerState, qp: QpRow) -> None:
    """Wait for the copies in flight of a message that fails: no copy accesses its memory after the error."""
    if on_gpu():
        return
    if qp.wire == 0 and worker.touched != 0:
        _await(worker, DmaStream(worker.touched), DmaStream(worker.touched).issued)
    elif qp.wire != 0 and qp.stream != 0:
        _await(worker, DmaStream(qp.stream), qp.fence)


@engine_function
def _write_payload_device(worker: WorkerState, qp: QpRow, target: int, source: int, nbytes: int) -> int:
    if on_gpu():
        return Reason.COPY_FAILED
    if qp.stream != 0 and (device_of(target) == 0 or stream_of(worker, device_of(target)) != qp.stream):
        reason = await_copies(worker, qp)
        if reason != 0:
            return reason
    if device_of(target) == 0:
        copy(target, source, nbytes)
        return 0
    worker.touched = 0
    reason = start_device_copy(worker, target, source, nbytes, 0)
    if reason == 0:
        if qp.stream == 0:
            qp.stream, qp.failures, qp.fence_psn = worker.touched, worker.failures, qp.expect_psn
        qp.fence = DmaStream(qp.stream).issued
    return reason


@device_function
def write_payload(worker: WorkerState, qp: QpRow, target: int, source: int, nbytes: int) -> int:
    """Write payload of a packet to its target, after all earlier payload for the QP. Return 0, or a reason."""
    if qp.stream == 0 and device_of(target) == 0:
        copy_payload(worker, target, source, nbytes)
        return 0
    return _write_payload_device(worker, qp, target, source, nbytes)
