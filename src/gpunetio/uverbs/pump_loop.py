"""Turn events of a NIC into messages to the program.

This is compiled and runs without the GIL: a program in Python may hold the GIL while it waits for an event, as pyverbs
does.

A pipe holds 16 messages, or fewer. When it is full, events stay in the ring of their channel until the program reads.
"""

from __future__ import annotations

import errno as codes
import select

from ..enums import AsyncEventType
from ..fabric.ring import next_full, release
from ..fabric.udp_records import errno
from ..formats.events import EQE, PORT_BITS, PORT_SHIFT, EventType, PortSubtype
from ..formats.layout import Entry
from ..jit.compile import device_function, engine_function
from ..jit.ops import be32, ld8, ld16, ld32, ld64, ld_relaxed64, st8, st16, st32, st64
from ..jit.ops.calls import external
from ..jit.struct_view import View, struct_view
from ..nic.state.cq import Event
from . import abi

_poll = external("poll", 64, 64, 32, ret=32)
_read = external("read", 32, 64, 64, ret=64)
_write = external("write", 32, 64, 64, ret=64)
_lock = external("pthread_mutex_lock", 64, ret=32)
_unlock = external("pthread_mutex_unlock", 64, ret=32)

MOST_PIPES = 1024
_PERIOD_MS = 1000
_COOKIE = 8  # bytes
_EAGAIN, _POLLIN, _POLLOUT = codes.EAGAIN, select.POLLIN, select.POLLOUT
_FD, _EVENTS, _REVENTS, _POLLFD = 0, 4, 6, 8  # offsets in struct pollfd, and its size
_COMPLETION, _CQ_ERROR, _PORT_CHANGE, _ACTIVE, _PORT_ACTIVE, _PORT_ERR = map(
    int,
    (
        EventType.COMPLETION, EventType.CQ_ERROR, EventType.PORT_CHANGE, PortSubtype.ACTIVE,
        AsyncEventType.PORT_ACTIVE, AsyncEventType.PORT_ERR,
    ),
)

# `pollfds` are those of the channels' descriptors, or of pipes that are full; the first one only wakes the thread.
# `pipes` has a PIPE for each. `names` translates types of events to libibverbs' numbers. `message` is a buffer.
# `mutex`, a pthread_mutex_t, is held while messages are sent, and while others change the contents of pipes and rings.
PUMP = Entry("pump", 192, """
    stop      0  i64
    count     8  i64
    pollfds  16  i64
    pipes    24  i64
    names    32  i64
    message  40  raw[88]
    mutex   128  raw[64]
""")
pump_at: View = struct_view(PUMP)

# `ring` is that of the channel, `channel` its descriptor, `fd` the pipe to the program. `devx`: 1 for messages of DEVX,
# 2 if these include an EQE. `full`: an event that was read from the channel's descriptor waits for room in the pipe.
PIPE = Entry("pump_pipe", 40, """
    ring     0  i64
    fd       8  i64
    devx    16  i64
    channel 24  i64
    full    32  i64
""")
pipe_at: View = struct_view(PIPE)

# The subject of events; its address is their cookie. `element` is the program's name of the object. The others count
# messages about it: of completions, and of other events. On channels of DEVX, `cookies` is the address of 256 cookies,
# by type of event; -1 is none.
SUBSCRIBER = Entry("subscriber", 32, """
    element      0  i64
    completions  8  i64
    others      16  i64
    cookies     24  i64
""")
subscriber_at: View = struct_view(SUBSCRIBER)


@device_function
def _fill_eqe(eqe, event):
    """Fill an event queue entry, as `formats.events.eqe` does."""
    e = Event(event)
    for at in range(0, EQE.size, 8):
        st64(eqe + at, 0)
    st8(eqe + EQE.type, e.type)
    if e.type == _CQ_ERROR:
        st32(eqe + EQE.cqn, be32(e.number))
        st8(eqe + EQE.syndrome, e.syndrome)
    elif e.type == _PORT_CHANGE:
        st8(eqe + EQE.port, e.number >> PORT_SHIFT << PORT_BITS)
        st8(eqe + EQE.sub_type, e.number & ((1 << PORT_SHIFT) - 1))
    else:
        st32(eqe + EQE.number, be32(e.number))
        st8(eqe + EQE.queue_type, e.syndrome)


@device_function
def _make_message(pump, pipe, event):
    """Make the message about an event. Return its length, or 0 if the program has not subscribed to the event."""
    e = Event(event)
    about = subscriber_at(e.cookie)
    message = pump + PUMP.message
    if pipe_at(pipe).devx != 0:
        cookie = ld64(about.cookies + 8 * e.type)
        if cookie == -1:
            return 0
        st64(message, cookie)
        if pipe_at(pipe).devx == 1:
            return _COOKIE
        _fill_eqe(message + _COOKIE, event)
        return _COOKIE + EQE.size
    st64(message, about.element)
    if e.type == _COMPLETION:
        return _COOKIE
    kind = ld8(pump_at(pump).names + e.type)
    if e.type == _PORT_CHANGE:
        st64(message, e.number >> PORT_SHIFT)
        kind = _PORT_ACTIVE if e.number & ((1 << PORT_SHIFT) - 1) == _ACTIVE else _PORT_ERR
    st64(message + 8, kind)
    return abi.ASYNC_EVENT.size


@engine_function
def _pass_on(pump, pipe, event):
    """Send a message about an event. Return 0 if the pipe is full. Events whose object is gone have no cookie."""
    if Event(event).cookie == 0:
        return 1
    nbytes = _make_message(pump, pipe, event)
    if nbytes == 0:
        return 1
    if _write(pipe_at(pipe).fd, pump + PUMP.message, nbytes) != nbytes:
        return errno() != _EAGAIN
    about = subscriber_at(Event(event).cookie)
    if Event(event).type == _COMPLETION:
        about.completions += 1
    else:
        about.others += 1
    return 1


@engine_function
def _serve_pipe(pump, pipe, pollfd):
    """Pass on an event of a channel. Then wait for the next event or, if the pipe was full, for room in it."""
    p = pipe_at(pipe)
    if p.full == 0 and _read(p.channel, pump + PUMP.message, 8) != 8:
        return
    event = next_full(p.ring)
    if event != 0 and _pass_on(pump, pipe, event) == 0:
        p.full = 1
        st32(pollfd + _FD, p.fd)
        st16(pollfd + _EVENTS, _POLLOUT)
        return
    if event != 0:
        release(p.ring)
    p.full = 0
    st32(pollfd + _FD, p.channel)
    st16(pollfd + _EVENTS, _POLLIN)


@engine_function
def serve(pump):
    """Pass events on until `stop` is set."""
    p = pump_at(pump)
    while ld_relaxed64(pump + PUMP.stop) == 0:
        if _poll(p.pollfds, ld_relaxed64(pump + PUMP.count), _PERIOD_MS) <= 0:
            continue
        if ld16(p.pollfds + _REVENTS) != 0:
            _read(ld32(p.pollfds + _FD), pump + PUMP.message, 8)
        _lock(pump + PUMP.mutex)
        for i in range(1, ld_relaxed64(pump + PUMP.count)):
            if ld16(p.pollfds + _POLLFD * i + _REVENTS) != 0:
                _serve_pipe(pump, p.pipes + PIPE.size * i, p.pollfds + _POLLFD * i)
        _unlock(pump + PUMP.mutex)


def compile_pump() -> None:
    """Compile `serve`, or load it from the cache."""
    serve.compile()
