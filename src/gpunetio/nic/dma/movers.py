"""Movers: copies to and from memory that the engine cannot touch, made by a GPU's copy engines, many at a time.

Such memory is called far. Translated addresses in far memory carry the number of its mover in their upper bits. A mover
is a stream of the CUDA driver, called through the C function pointers in its row. Positions count all bytes that the
mover was ever given: those up to `issued` are given to it, those up to `done` are in place. After each batch, an event
marks the position that is reached when it occurs (`record`). Nobody waits for a single copy.

CUDA copies from and to pinned host memory directly. Other bytes go through the mover's staging ring. On their way to
far memory, the engine copies them into the ring, and adjacent ones become one piece. From far memory, they land in the
ring, and the engine copies them out once their event has occurred.
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import call_c, clock_ns, copy, ld32, on_host, pause
from ...formats.commands import ServiceType
from ..observe import refuse
from ..observe.reasons import Reason
from ..state.mover import FOR_EVER, LANDING, MARK, MOVER, UNTIL_IDLE, landing_at, mark_at, mover_at
from ..state.nic import nic_at
from ..state.qp import qp_row_at

MOVER_SHIFT = 58  # above all addresses of a process, on every 64-bit platform of CUDA
FAR_ADDRESS = (1 << MOVER_SHIFT) - 1
MAX_MOVERS = 31

STAGING = 8 << 20  # bytes of the ring
PIECE = 256 << 10  # bytes of one copy through it, at most
RECORD_EVERY = 4 << 20  # bytes, so that completions do not all wait for the end of the turn
MARKS, LANDINGS = 64, 1024

# Values of CUresult, CUpointer_attribute and CUmemorytype.
INVALID_VALUE, NOT_READY = 1, 600
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12
HOST, DEVICE = 1, 2
TIMED_OUT = -1  # in place of a CUresult: the mover's deadline has passed


@device_function
def on_gpu():
    """Return whether the engine runs on a GPU. It reaches all memory by itself there, and movers fold away."""
    return on_host() == 0


@device_function
def far(address):
    """Return the number of the mover that reaches an address, 0 for host memory."""
    return address >> MOVER_SHIFT


@device_function
def mover_of(nic, number):
    """Return the address of a mover's row."""
    return nic_at(nic).movers + number * MOVER.size


# --- giving copies to the stream -----------------------------------------------------------------------------------


@engine_function
def _fail(mover, error):
    """Note a failed call. What became of the copies in flight is unknown from now on."""
    m = mover_at(mover)
    m.failures += 1
    m.fail_from = m.done
    m.error = error
    m.done = m.issued
    m.open_nbytes = 0
    m.landing_tail = m.landing_head


@engine_function
def _enter(nic, mover):
    """Make the mover's context current on the engine's thread. Return a CUresult."""
    m = mover_at(mover)
    if nic_at(nic).context == m.context:
        return 0
    error = call_c(m.enter, m.context, 0, 0, 0)
    nic_at(nic).context = m.context if error == 0 else 0
    return error


@engine_function
def _issue(nic, mover, target, source, nbytes):
    """Give one copy to the stream. Return a CUresult."""
    m = mover_at(mover)
    error = _enter(nic, mover)
    if error != 0:
        return error
    function = m.copy_between
    if far(source) == 0:
        function = m.copy_in
    elif far(target) == 0:
        function = m.copy_out
    elif far(target) == far(source):
        function = m.copy_within
    return call_c(function, target & FAR_ADDRESS, source & FAR_ADDRESS, nbytes, m.stream)


@engine_function
def _close_piece(nic, mover):
    """Give the piece that was growing to the stream. Return 0, or a CUresult, which is then noted."""
    m = mover_at(mover)
    if m.open_nbytes == 0:
        return 0
    error = _issue(nic, mover, m.open_target, m.open_source, m.open_nbytes)
    m.open_nbytes = 0
    if error != 0:
        _fail(mover, error)
    return error


@engine_function
def record(nic, mover):
    """Record an event behind all copies that the mover was given so far."""
    if on_gpu():
        return
    m = mover_at(mover)
    _close_piece(nic, mover)
    if m.recorded == m.issued or m.mark_head - m.mark_tail == MARKS:
        return
    mark = m.marks + (m.mark_head & (MARKS - 1)) * MARK.size
    k = mark_at(mark)
    error = _enter(nic, mover)
    if error == 0:
        error = call_c(m.record, k.event, m.stream, 0, 0)
    if error != 0:
        _fail(mover, error)
        m.stuck = FOR_EVER
        m.mark_tail = m.mark_head
        return
    k.issued, k.landing, k.room = m.issued, m.landing_head, m.room_head
    if m.mark_head == m.mark_tail:
        m.progress_at = clock_ns()
    m.mark_head += 1
    m.recorded = m.issued


@device_function
def _given(nic, mover, nbytes):
    if on_gpu():
        return
    m = mover_at(mover)
    m.issued += nbytes
    if m.issued - m.recorded >= RECORD_EVERY:
        record(nic, mover)


# --- learning what has ended ---------------------------------------------------------------------------------------


@engine_function
def _land(mover, position):
    """Copy bytes that have landed in the staging ring to where they belong."""
    m = mover_at(mover)
    while m.landing_tail < position:
        d = landing_at(m.landings + (m.landing_tail & (LANDINGS - 1)) * LANDING.size)
        copy(d.target, d.source, d.nbytes)
        m.landing_tail += 1


@engine_function
def poll(mover):
    """Query the events. Return how many have occurred. If none does for `timeout_ns`, the mover has failed."""
    if on_gpu():
        return 0
    m = mover_at(mover)
    done = 0
    while m.mark_tail != m.mark_head:
        k = mark_at(m.marks + (m.mark_tail & (MARKS - 1)) * MARK.size)
        error = call_c(m.query, k.event, 0, 0, 0)
        if error == NOT_READY:
            if m.stuck == 0 and clock_ns() - m.progress_at > m.timeout_ns:
                m.stuck = UNTIL_IDLE
                _fail(mover, TIMED_OUT)
                done += 1
            return done
        if error != 0:
            _fail(mover, error)
            m.stuck = FOR_EVER
            m.mark_tail = m.mark_head
            return done + 1
        _land(mover, k.landing)
        m.done = max(m.done, k.issued)
        m.room_tail = k.room
        m.progress_at = clock_ns()
        m.mark_tail += 1
        done += 1
    if m.stuck == UNTIL_IDLE:
        m.stuck = 0
    return done


@device_function
def _advance(nic, mover):
    """Make progress with the mover's copies. A loop around this ends by the mover's deadline."""
    record(nic, mover)
    if poll(mover) == 0:
        pause()


@engine_function
def ended(mover, fence, failures):
    """Return what became of the copies up to `fence`: 1 done, 0 not yet, -1 failed.

    `failures` is the mover's count from when they began. `fail_from` belongs to the latest failure alone. After several
    failures, nobody knows which copies an earlier one gave up.
    """
    if on_gpu():
        return 1
    m = mover_at(mover)
    if m.done < fence:
        return 0
    if m.failures == failures:
        return 1
    return -1 if m.failures - failures > 1 or fence > m.fail_from else 1


@engine_function
def _await(nic, mover, fence):
    if on_gpu():
        return
    m = mover_at(mover)
    while m.done < fence:
        _advance(nic, mover)


@engine_function
def serve_movers(nic):
    """Query the events of all movers. Return how many have occurred."""
    if on_gpu():
        return 0
    n = nic_at(nic)
    done = 0
    for number in range(1, n.mover_count + 1):
        mover = mover_of(nic, number)
        if mover_at(mover).recorded != mover_at(mover).issued:  # all marks were in use
            record(nic, mover)
        if mover_at(mover).mark_tail != mover_at(mover).mark_head:
            done += poll(mover)
    return done


@engine_function
def start_movers(nic):
    """End the turn: what each mover was given in it becomes one batch."""
    if on_gpu():
        return
    n = nic_at(nic)
    for number in range(1, n.mover_count + 1):
        mover = mover_of(nic, number)
        if mover_at(mover).recorded != mover_at(mover).issued:
            record(nic, mover)


@engine_function
def at_work(nic):
    """Return whether copies are in flight. Those of a stuck mover do not count: nobody waits for them."""
    if on_gpu():
        return False
    n = nic_at(nic)
    for number in range(1, n.mover_count + 1):
        m = mover_at(mover_of(nic, number))
        on_its_way = m.mark_tail != m.mark_head or m.recorded != m.issued
        if m.done != m.issued or (on_its_way and m.stuck == 0):
            return True
    return False


# --- the staging ring ----------------------------------------------------------------------------------------------


@engine_function
def _room(nic, mover, nbytes):
    """Reserve room for a piece in the staging ring. Return its address, or 0 if the mover is stuck."""
    m = mover_at(mover)
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
            _advance(nic, mover)
    m.room_head += nbytes
    return m.staging + at


@engine_function
def is_pinned(nic, mover, address, nbytes):
    """Return whether CUDA reaches host memory by itself. Ask the driver: memory is pinned and unpinned at any time."""
    if on_gpu():
        return False
    m = mover_at(mover)
    if _enter(nic, mover) != 0 or call_c(m.attributes, 3, m.names, m.answers, address) != 0:
        return False
    if ld32(mover + MOVER.memory_type) != HOST:
        return False
    if m.range_size == 0:  # the driver does not say where this memory ends
        return True
    return address >= m.range_start and address + nbytes <= m.range_start + m.range_size


@engine_function
def _carry_in(nic, mover, target, source, nbytes):
    """Copy unpinned host memory to far memory. Return a CUresult. The bytes are read at once."""
    m = mover_at(mover)
    while nbytes > 0:
        part = min(nbytes, PIECE)
        at = _room(nic, mover, part)
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
            error = _close_piece(nic, mover)
            if error != 0:
                return error
            m.open_target, m.open_source, m.open_nbytes = target, at, part
        _given(nic, mover, part)
        if m.open_nbytes >= PIECE:
            error = _close_piece(nic, mover)
            if error != 0:
                return error
        target += part
        source += part
        nbytes -= part
    return 0


@engine_function
def _carry_out(nic, mover, target, source, nbytes):
    """Copy far memory to unpinned host memory. Return a CUresult."""
    m = mover_at(mover)
    error = _close_piece(nic, mover)
    while nbytes > 0 and error == 0:
        part = min(nbytes, PIECE)
        at = _room(nic, mover, part)
        while m.landing_head - m.landing_tail == LANDINGS and m.stuck == 0:
            _advance(nic, mover)
        if at == 0 or m.stuck != 0:
            return m.error
        error = _issue(nic, mover, at, source, part)
        if error == 0:
            d = landing_at(m.landings + (m.landing_head & (LANDINGS - 1)) * LANDING.size)
            d.target, d.source, d.nbytes = target, at, part
            m.landing_head += 1
            _given(nic, mover, part)
        target += part
        source += part
        nbytes -= part
    return error


@device_function
def _carry_through(nic, mover, target, source, nbytes):
    """Copy between memories that CUDA reaches by itself. Return a CUresult."""
    error = _close_piece(nic, mover)
    if error == 0:
        error = _issue(nic, mover, target, source, nbytes)
    if error == 0:
        _given(nic, mover, nbytes)
    return error


# --- moving bytes --------------------------------------------------------------------------------------------------


@engine_function
def copy_failed(nic, mover, address, nbytes):
    """Refuse what a mover did not copy: leave its latest failure for the error record, and return the reason."""
    m = mover_at(mover)
    return refuse.copy_failed(nic, address & FAR_ADDRESS, nbytes, m.error, m.timeout_ns)


@engine_function
def _refuse(nic, mover, address, nbytes, error):
    """Report a copy that CUDA has refused, and return the reason.

    Earlier copies end first: nothing touches a request's memory after its error.
    """
    mover_at(mover).error = error
    _await(nic, mover, mover_at(mover).issued)
    mover_at(mover).error = error
    return copy_failed(nic, mover, address, nbytes)


@engine_function
def move_far(nic, target, source, nbytes, pinned):
    """Have a mover copy bytes from or to far memory. Return 0, or a reason. `pinned`: the host side is known to be."""
    if on_gpu():
        return Reason.COPY_FAILED
    n = nic_at(nic)
    into, out_of = far(target), far(source)
    mover = mover_of(nic, into if into != 0 else out_of)
    m = mover_at(mover)
    address = target if into != 0 else source
    if m.stuck != 0:
        return _refuse(nic, mover, address, nbytes, m.error)
    if n.touched != mover:
        if n.touched != 0:  # a request for two GPUs: its fence covers the second mover alone
            fence = mover_at(n.touched).issued
            _await(nic, n.touched, fence)
            if ended(n.touched, fence, n.failures) < 0:
                return copy_failed(nic, n.touched, address, nbytes)
        n.touched, n.failures = mover, m.failures
    error = INVALID_VALUE
    if into != 0 and out_of != 0:
        error = _carry_through(nic, mover, target, source, nbytes)
        return 0 if error == 0 else _refuse(nic, mover, address, nbytes, error)
    if pinned != 0 or is_pinned(nic, mover, source if into != 0 else target, nbytes):
        error = _carry_through(nic, mover, target, source, nbytes)
    if error == INVALID_VALUE:  # not all of it is pinned
        if into != 0:
            error = _carry_in(nic, mover, target, source, nbytes)
        else:
            error = _carry_out(nic, mover, target, source, nbytes)
            n.landed = 1
    return 0 if error == 0 else _refuse(nic, mover, address, nbytes, error)


@device_function
def move(nic, target, source, nbytes):
    """Copy bytes, in host memory at once, else by a mover, which `NIC.touched` then names. Return 0, or a reason."""
    if (target | source) >> MOVER_SHIFT == 0:
        copy(target, source, nbytes)
        return 0
    return move_far(nic, target, source, nbytes, 0)


@engine_function
def _move_far_now(nic, target, source, nbytes):
    if on_gpu():
        return Reason.COPY_FAILED
    n = nic_at(nic)
    n.touched = 0
    reason = move_far(nic, target, source, nbytes, 0)
    mover, n.touched = n.touched, 0
    if reason != 0:
        return reason
    fence = mover_at(mover).issued
    _await(nic, mover, fence)
    if ended(mover, fence, n.failures) > 0:
        return 0
    return copy_failed(nic, mover, source, nbytes)


@device_function
def move_now(nic, target, source, nbytes):
    """Copy bytes as `move` does, and wait until they are in place. Return 0, or a reason."""
    if (target | source) >> MOVER_SHIFT == 0:
        copy(target, source, nbytes)
        return 0
    return _move_far_now(nic, target, source, nbytes)


# --- bytes that come over a wire -----------------------------------------------------------------------------------


@engine_function
def await_moved(nic, row):
    """Wait for a QP's copies in flight, so that something may follow them. Return 0, or a reason.

    An RC QP whose copies have failed keeps its mover until it has told its peer (receiver.py).
    """
    if on_gpu():
        return 0
    q = qp_row_at(row)
    mover = q.mover
    _await(nic, mover, q.fence)
    moved = ended(mover, q.fence, q.failures) > 0
    if moved or q.service != ServiceType.RC:
        q.mover = 0
    if moved:
        return 0
    return copy_failed(nic, mover, 0, 0)


@engine_function
def let_arrive(nic, row):
    """Wait for copies in flight of a message that fails: nothing touches its memory after the error."""
    if on_gpu():
        return
    n = nic_at(nic)
    q = qp_row_at(row)
    if q.wire == 0 and n.touched != 0:
        _await(nic, n.touched, mover_at(n.touched).issued)
    elif q.wire != 0 and q.mover != 0:
        _await(nic, q.mover, q.fence)


@engine_function
def _place_far(nic, row, target, source, nbytes):
    if on_gpu():
        return Reason.COPY_FAILED
    n = nic_at(nic)
    q = qp_row_at(row)
    if q.mover != 0 and (far(target) == 0 or mover_of(nic, far(target)) != q.mover):
        reason = await_moved(nic, row)
        if reason != 0:
            return reason
    if far(target) == 0:
        copy(target, source, nbytes)
        return 0
    n.touched = 0
    reason = move_far(nic, target, source, nbytes, 0)
    if reason == 0:
        if q.mover == 0:
            q.mover, q.failures, q.fence_psn = n.touched, n.failures, q.expect_psn
        q.fence = mover_at(q.mover).issued
    return reason


@device_function
def place(nic, row, target, source, nbytes):
    """Copy bytes of a packet to where they belong, after all earlier bytes for the QP. Return 0, or a reason."""
    if qp_row_at(row).mover == 0 and far(target) == 0:
        copy(target, source, nbytes)
        return 0
    return _place_far(nic, row, target, source, nbytes)
