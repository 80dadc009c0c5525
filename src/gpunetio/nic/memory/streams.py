"""DMA streams: copies to and from memory that the engine cannot touch, made by a GPU's copy engines, many at a time.

Such memory is called device memory. Translated addresses there carry the number of the DMA stream in their upper bits.
A DMA stream is a stream of the CUDA driver, called through the C function pointers in its row. Positions count all
bytes that it was ever given: those up to `issued` are given to it, those up to `done` are in place. After each batch,
an event marks the position that is reached when it occurs (`record`). Nobody waits for a single copy.

CUDA copies from and to pinned host memory directly. Other bytes go through the stream's staging ring. On their way to
device memory, the engine copies them into the ring, and adjacent ones become one piece. From device memory, they land
in the ring, and the engine copies them out once their event has occurred.
"""

from __future__ import annotations

from ...formats.commands import ServiceType
from ...jit.compile import device_function, engine_function
from ...jit.ops import call_c, clock_ns, copy, ld32, on_host, pause
from ..state import refuse
from ..state.dma_stream import FOR_EVER, LANDING, MARK, DMA_STREAM, UNTIL_IDLE, landing_at, mark_at, dma_stream_at
from ..state.qp import qp_row_at
from ..state.reasons import Reason
from ..state.worker import worker_at
from .copies import copy_payload

DEVICE_SHIFT = 58  # above all addresses of a process, on every 64-bit platform of CUDA
DEVICE_ADDRESS = (1 << DEVICE_SHIFT) - 1
MAX_STREAMS = 31

STAGING = 8 << 20  # bytes of the ring
PIECE = 256 << 10  # bytes of one copy through it, at most
RECORD_EVERY = 4 << 20  # bytes, so that completions do not all wait for the end of the turn
MARKS, LANDINGS = 64, 1024

# Values of CUresult, CUpointer_attribute and CUmemorytype.
INVALID_VALUE, NOT_READY = 1, 600
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12
HOST, DEVICE = 1, 2
TIMED_OUT = -1  # in place of a CUresult: the stream's deadline has passed


@device_function
def on_gpu():
    """Return whether the engine runs on a GPU. It reaches all memory by itself there, and DMA streams fold away."""
    return on_host() == 0


@device_function
def device_of(address):
    """Return the number of the stream that reaches an address, 0 for host memory."""
    return address >> DEVICE_SHIFT


@device_function
def stream_of(nic, number):
    """Return the address of a DMA stream's row."""
    return worker_at(nic).streams + number * DMA_STREAM.size


# --- giving copies to the stream -----------------------------------------------------------------------------------


@engine_function
def _fail(stream, error):
    """Note a failed call. What became of the copies in flight is unknown from now on."""
    m = dma_stream_at(stream)
    m.failures += 1
    m.fail_from = m.done
    m.error = error
    m.done = m.issued
    m.open_nbytes = 0
    m.landing_tail = m.landing_head


@engine_function
def _enter(nic, stream):
    """Make the stream's context current on the engine's thread. Return a CUresult."""
    m = dma_stream_at(stream)
    if worker_at(nic).context == m.context:
        return 0
    error = call_c(m.enter, m.context, 0, 0, 0)
    worker_at(nic).context = m.context if error == 0 else 0
    return error


@engine_function
def _issue(nic, stream, target, source, nbytes):
    """Give one copy to the stream. Return a CUresult."""
    m = dma_stream_at(stream)
    error = _enter(nic, stream)
    if error != 0:
        return error
    function = m.copy_between
    if device_of(source) == 0:
        function = m.copy_in
    elif device_of(target) == 0:
        function = m.copy_out
    elif device_of(target) == device_of(source):
        function = m.copy_within
    return call_c(function, target & DEVICE_ADDRESS, source & DEVICE_ADDRESS, nbytes, m.cu_stream)


@engine_function
def _close_piece(nic, stream):
    """Give the piece that was growing to the stream. Return 0, or a CUresult, which is then noted."""
    m = dma_stream_at(stream)
    if m.open_nbytes == 0:
        return 0
    error = _issue(nic, stream, m.open_target, m.open_source, m.open_nbytes)
    m.open_nbytes = 0
    if error != 0:
        _fail(stream, error)
    return error


@engine_function
def record(nic, stream):
    """Record an event behind all copies that the stream was given so far."""
    if on_gpu():
        return
    m = dma_stream_at(stream)
    _close_piece(nic, stream)
    if m.recorded == m.issued or m.mark_head - m.mark_tail == MARKS:
        return
    mark = m.marks + (m.mark_head & (MARKS - 1)) * MARK.size
    k = mark_at(mark)
    error = _enter(nic, stream)
    if error == 0:
        error = call_c(m.record, k.event, m.cu_stream, 0, 0)
    if error != 0:
        _fail(stream, error)
        m.stuck = FOR_EVER
        m.mark_tail = m.mark_head
        return
    k.issued, k.landing, k.room = m.issued, m.landing_head, m.room_head
    if m.mark_head == m.mark_tail:
        m.progress_at = clock_ns()
    m.mark_head += 1
    m.recorded = m.issued


@device_function
def _given(nic, stream, nbytes):
    if on_gpu():
        return
    m = dma_stream_at(stream)
    m.issued += nbytes
    if m.issued - m.recorded >= RECORD_EVERY:
        record(nic, stream)


# --- learning what has ended ---------------------------------------------------------------------------------------


@engine_function
def _land(stream, position):
    """Copy bytes that have landed in the staging ring to where they belong."""
    m = dma_stream_at(stream)
    while m.landing_tail < position:
        d = landing_at(m.landings + (m.landing_tail & (LANDINGS - 1)) * LANDING.size)
        copy(d.target, d.source, d.nbytes)
        m.landing_tail += 1


@engine_function
def poll(stream):
    """Query the events. Return how many have occurred. If none does for `timeout_ns`, the stream has failed."""
    if on_gpu():
        return 0
    m = dma_stream_at(stream)
    done = 0
    while m.mark_tail != m.mark_head:
        k = mark_at(m.marks + (m.mark_tail & (MARKS - 1)) * MARK.size)
        error = call_c(m.query, k.event, 0, 0, 0)
        if error == NOT_READY:
            if m.stuck == 0 and clock_ns() - m.progress_at > m.timeout_ns:
                m.stuck = UNTIL_IDLE
                _fail(stream, TIMED_OUT)
                done += 1
            return done
        if error != 0:
            _fail(stream, error)
            m.stuck = FOR_EVER
            m.mark_tail = m.mark_head
            return done + 1
        _land(stream, k.landing)
        m.done = max(m.done, k.issued)
        m.room_tail = k.room
        m.progress_at = clock_ns()
        m.mark_tail += 1
        done += 1
    if m.stuck == UNTIL_IDLE:
        m.stuck = 0
    return done


@device_function
def _advance(nic, stream):
    """Make progress with the stream's copies. A loop around this ends by the stream's deadline."""
    record(nic, stream)
    if poll(stream) == 0:
        pause()


@engine_function
def ended(stream, fence, failures):
    """Return what became of the copies up to `fence`: 1 done, 0 not yet, -1 failed.

    `failures` is the stream's count from when they began. `fail_from` belongs to the latest failure alone. After
    several failures, nobody knows which copies an earlier one gave up.
    """
    if on_gpu():
        return 1
    m = dma_stream_at(stream)
    if m.done < fence:
        return 0
    if m.failures == failures:
        return 1
    return -1 if m.failures - failures > 1 or fence > m.fail_from else 1


@engine_function
def _await(nic, stream, fence):
    if on_gpu():
        return
    m = dma_stream_at(stream)
    while m.done < fence:
        _advance(nic, stream)


@engine_function
def serve_streams(nic):
    """Query the events of all streams. Return how many have occurred."""
    if on_gpu():
        return 0
    n = worker_at(nic)
    done = 0
    for number in range(1, n.stream_count + 1):
        stream = stream_of(nic, number)
        if dma_stream_at(stream).recorded != dma_stream_at(stream).issued:  # all marks were in use
            record(nic, stream)
        if dma_stream_at(stream).mark_tail != dma_stream_at(stream).mark_head:
            done += poll(stream)
    return done


@engine_function
def start_streams(nic):
    """End the turn: what each stream was given in it becomes one batch."""
    if on_gpu():
        return
    n = worker_at(nic)
    for number in range(1, n.stream_count + 1):
        stream = stream_of(nic, number)
        if dma_stream_at(stream).recorded != dma_stream_at(stream).issued:
            record(nic, stream)


@engine_function
def at_work(nic):
    """Return whether copies are in flight. Those of a stuck stream do not count: nobody waits for them."""
    if on_gpu():
        return False
    n = worker_at(nic)
    for number in range(1, n.stream_count + 1):
        m = dma_stream_at(stream_of(nic, number))
        on_its_way = m.mark_tail != m.mark_head or m.recorded != m.issued
        if m.done != m.issued or (on_its_way and m.stuck == 0):
            return True
    return False


# --- the staging ring ----------------------------------------------------------------------------------------------


@engine_function
def _room(nic, stream, nbytes):
    """Reserve room for a piece in the staging ring. Return its address, or 0 if the stream is stuck."""
    m = dma_stream_at(stream)
    at = m.room_head & (STAGING - 1)
    if at + nbytes > STAGING:
        m.room_head += STAGING - at
        at = 0
    while m.room_head + nbytes - m.room_tail > STAGING:
        if m.stuck != 0:
            return 0
        if m.mark_head == m.mark_tail and m.recorded == m.issued:
            m.room_tail = m.room_head  # taken by copies that CUDA has refused
        else:
            _advance(nic, stream)
    m.room_head += nbytes
    return m.staging + at


@engine_function
def is_pinned(nic, stream, address, nbytes):
    """Return whether CUDA reaches host memory by itself. Ask the driver: memory is pinned and unpinned at any time."""
    if on_gpu():
        return False
    m = dma_stream_at(stream)
    if _enter(nic, stream) != 0 or call_c(m.attributes, 3, m.names, m.answers, address) != 0:
        return False
    if ld32(stream + DMA_STREAM.memory_type) != HOST:
        return False
    if m.range_size == 0:  # the driver does not say where this memory ends
        return True
    return address >= m.range_start and address + nbytes <= m.range_start + m.range_size


@engine_function
def _carry_in(nic, stream, target, source, nbytes):
    """Copy unpinned host memory to device memory. Return a CUresult. The bytes are read at once."""
    m = dma_stream_at(stream)
    while nbytes > 0:
        part = min(nbytes, PIECE)
        at = _room(nic, stream, part)
        if at == 0:
            return m.error
        copy(at, source, part)
        if (
            m.open_nbytes != 0
            and m.open_target + m.open_nbytes == target
            and m.open_source + m.open_nbytes == at
        ):  # fmt: skip
            m.open_nbytes += part
        else:
            error = _close_piece(nic, stream)
            if error != 0:
                return error
            m.open_target, m.open_source, m.open_nbytes = target, at, part
        _given(nic, stream, part)
        if m.open_nbytes >= PIECE:
            error = _close_piece(nic, stream)
            if error != 0:
                return error
        target += part
        source += part
        nbytes -= part
    return 0


@engine_function
def _carry_out(nic, stream, target, source, nbytes):
    """Copy device memory to unpinned host memory. Return a CUresult."""
    m = dma_stream_at(stream)
    error = _close_piece(nic, stream)
    while nbytes > 0 and error == 0:
        part = min(nbytes, PIECE)
        at = _room(nic, stream, part)
        while m.landing_head - m.landing_tail == LANDINGS and m.stuck == 0:
            _advance(nic, stream)
        if at == 0 or m.stuck != 0:
            return m.error
        error = _issue(nic, stream, at, source, part)
        if error == 0:
            d = landing_at(m.landings + (m.landing_head & (LANDINGS - 1)) * LANDING.size)
            d.target, d.source, d.nbytes = target, at, part
            m.landing_head += 1
            _given(nic, stream, part)
        target += part
        source += part
        nbytes -= part
    return error


@device_function
def _carry_through(nic, stream, target, source, nbytes):
    """Copy between memories that CUDA reaches by itself. Return a CUresult."""
    error = _close_piece(nic, stream)
    if error == 0:
        error = _issue(nic, stream, target, source, nbytes)
    if error == 0:
        _given(nic, stream, nbytes)
    return error


# --- moving bytes --------------------------------------------------------------------------------------------------


@engine_function
def copy_failed(nic, stream, address, nbytes):
    """Refuse what a DMA stream did not copy: leave its latest failure for the error record, and return the reason."""
    m = dma_stream_at(stream)
    return refuse.copy_failed(nic, address & DEVICE_ADDRESS, nbytes, m.error, m.timeout_ns)


@engine_function
def _refuse(nic, stream, address, nbytes, error):
    """Report a copy that CUDA has refused, and return the reason.

    Earlier copies end first: nothing touches a request's memory after its error.
    """
    dma_stream_at(stream).error = error
    _await(nic, stream, dma_stream_at(stream).issued)
    dma_stream_at(stream).error = error
    return copy_failed(nic, stream, address, nbytes)


@engine_function
def move_device(nic, target, source, nbytes, pinned):
    """Have a DMA stream copy from or to device memory. Return 0, or a reason. `pinned`: the host side surely is."""
    if on_gpu():
        return Reason.COPY_FAILED
    n = worker_at(nic)
    into, out_of = device_of(target), device_of(source)
    stream = stream_of(nic, into if into != 0 else out_of)
    m = dma_stream_at(stream)
    address = target if into != 0 else source
    if m.stuck != 0:
        return _refuse(nic, stream, address, nbytes, m.error)
    if n.touched != stream:
        if n.touched != 0:  # a request for two GPUs: its fence covers the second stream alone
            fence = dma_stream_at(n.touched).issued
            _await(nic, n.touched, fence)
            if ended(n.touched, fence, n.failures) < 0:
                return copy_failed(nic, n.touched, address, nbytes)
        n.touched, n.failures = stream, m.failures
    error = INVALID_VALUE
    if into != 0 and out_of != 0:
        error = _carry_through(nic, stream, target, source, nbytes)
        return 0 if error == 0 else _refuse(nic, stream, address, nbytes, error)
    if pinned != 0 or is_pinned(nic, stream, source if into != 0 else target, nbytes):
        error = _carry_through(nic, stream, target, source, nbytes)
    if error == INVALID_VALUE:  # not all of it is pinned
        if into != 0:
            error = _carry_in(nic, stream, target, source, nbytes)
        else:
            error = _carry_out(nic, stream, target, source, nbytes)
            n.landed = 1
    return 0 if error == 0 else _refuse(nic, stream, address, nbytes, error)


@device_function
def move(nic, target, source, nbytes):
    """Copy bytes: in host memory at once, else by a DMA stream, then in `WORKER.touched`. Return 0, or a reason."""
    if (target | source) >> DEVICE_SHIFT == 0:
        copy_payload(nic, target, source, nbytes)
        return 0
    return move_device(nic, target, source, nbytes, 0)


@engine_function
def _move_device_now(nic, target, source, nbytes):
    if on_gpu():
        return Reason.COPY_FAILED
    n = worker_at(nic)
    n.touched = 0
    reason = move_device(nic, target, source, nbytes, 0)
    stream, n.touched = n.touched, 0
    if reason != 0:
        return reason
    fence = dma_stream_at(stream).issued
    _await(nic, stream, fence)
    if ended(stream, fence, n.failures) > 0:
        return 0
    return copy_failed(nic, stream, source, nbytes)


@device_function
def move_now(nic, target, source, nbytes):
    """Copy bytes as `move` does, and wait until they are in place. Return 0, or a reason."""
    if (target | source) >> DEVICE_SHIFT == 0:
        copy_payload(nic, target, source, nbytes)
        return 0
    return _move_device_now(nic, target, source, nbytes)


# --- bytes that come over a wire -----------------------------------------------------------------------------------


@engine_function
def await_moved(nic, row):
    """Wait for a QP's copies in flight, so that something may follow them. Return 0, or a reason.

    An RC QP whose copies have failed keeps its stream until it has told its peer (transport/responder.py).
    """
    if on_gpu():
        return 0
    q = qp_row_at(row)
    stream = q.stream
    _await(nic, stream, q.fence)
    moved = ended(stream, q.fence, q.failures) > 0
    if moved or q.service != ServiceType.RC:
        q.stream = 0
    if moved:
        return 0
    return copy_failed(nic, stream, 0, 0)


@engine_function
def let_arrive(nic, row):
    """Wait for copies in flight of a message that fails: nothing touches its memory after the error."""
    if on_gpu():
        return
    n = worker_at(nic)
    q = qp_row_at(row)
    if q.wire == 0 and n.touched != 0:
        _await(nic, n.touched, dma_stream_at(n.touched).issued)
    elif q.wire != 0 and q.stream != 0:
        _await(nic, q.stream, q.fence)


@engine_function
def _place_device(nic, row, target, source, nbytes):
    if on_gpu():
        return Reason.COPY_FAILED
    n = worker_at(nic)
    q = qp_row_at(row)
    if q.stream != 0 and (device_of(target) == 0 or stream_of(nic, device_of(target)) != q.stream):
        reason = await_moved(nic, row)
        if reason != 0:
            return reason
    if device_of(target) == 0:
        copy(target, source, nbytes)
        return 0
    n.touched = 0
    reason = move_device(nic, target, source, nbytes, 0)
    if reason == 0:
        if q.stream == 0:
            q.stream, q.failures, q.fence_psn = n.touched, n.failures, q.expect_psn
        q.fence = dma_stream_at(q.stream).issued
    return reason


@device_function
def place(nic, row, target, source, nbytes):
    """Copy bytes of a packet to where they belong, after all earlier bytes for the QP. Return 0, or a reason."""
    if qp_row_at(row).stream == 0 and device_of(target) == 0:
        copy_payload(nic, target, source, nbytes)
        return 0
    return _place_device(nic, row, target, source, nbytes)
