"""Turn events of a NIC into messages to the program.

This is compiled and runs without the GIL: a program in Python may hold the GIL while it waits for an event, as pyverbs
does.

A pipe holds 16 messages, or fewer. When it is full, events stay in the ring of their channel until the program reads.
"""

from __future__ import annotations

import errno as codes
import select
from typing import Annotated

from ..enums import AsyncEventType
from ..fabric.ring import next_full, release
from ..fabric.udp_records import errno
from ..formats.events import EQE, PORT_BITS, PORT_SHIFT, EventType, PortSubtype
from ..formats.layout import I64, Record
from ..jit.compile import device_function, engine_function
from ..jit.ops import be32, ld8, ld16, ld32, ld64, ld_relaxed64, st8, st16, st32, st64
from ..jit.ops.calls import external
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


class PumpState(Record, size=192):
    """The pump of a program's events.

    `pollfds` are those of the channels' descriptors, or of pipes that are full; the first one only wakes the thread.
    `pipes` has a Pipe for each. `names` translates types of events to libibverbs' numbers. `message` is a buffer.
    `mutex`, a pthread_mutex_t, is held while messages are sent, and while others change the contents of pipes and
    rings.
    """

    stop: I64 = 0
    count: I64 = 8
    pollfds: I64 = 16
    pipes: I64 = 24
    names: I64 = 32
    message: Annotated[int, "raw[88]"] = 40
    mutex: Annotated[int, "raw[64]"] = 128


PUMP = PumpState.entry


class Pipe(Record, size=40):
    """A pipe to the program, and the channel whose events go into it.

    `ring` is that of the channel, `channel` its descriptor, `fd` the pipe to the program. `devx`: 1 for messages of
    DEVX, 2 if these include an EQE. `full`: an event that was read from the channel's descriptor waits for room in the
    pipe.
    """

    ring: I64 = 0
    fd: I64 = 8
    devx: I64 = 16
    channel: I64 = 24
    full: I64 = 32


PIPE = Pipe.entry


class Subscriber(Record, size=32):
    """The subject of events; its address is their cookie.

    `element` is the program's name of the object. `completions` and `others` count messages about it: of completions,
    and of other events. On channels of DEVX, `cookies` is the address of 256 cookies, by type of event; -1 is none.
    """

    element: I64 = 0
    completions: I64 = 8
    others: I64 = 16
    cookies: I64 = 24


SUBSCRIBER = Subscriber.entry


@device_function
def _fill_eqe(eqe: int, event: Event) -> None:
    """Fill an event queue entry, as `formats.events.eqe` does."""
    for at in range(0, EQE.size, 8):
        st64(eqe + at, 0)
    st8(eqe + EQE.type, event.type)
    if event.type == _CQ_ERROR:
        st32(eqe + EQE.cqn, be32(event.number))
        st8(eqe + EQE.syndrome, event.syndrome)
    elif event.type == _PORT_CHANGE:
        st8(eqe + EQE.port, event.number >> PORT_SHIFT << PORT_BITS)
        st8(eqe + EQE.sub_type, event.number & ((1 << PORT_SHIFT) - 1))
    else:
        st32(eqe + EQE.number, be32(event.number))
        st8(eqe + EQE.queue_type, event.syndrome)


@device_function
def _make_message(pump: PumpState, pipe: Pipe, event: Event) -> int:
    """Make the message about an event. Return its length, or 0 if the program has not subscribed to the event."""
    about = Subscriber(event.cookie)
    message = pump + PumpState.message
    if pipe.devx != 0:
        cookie = ld64(about.cookies + 8 * event.type)
        if cookie == -1:
            return 0
        st64(message, cookie)
        if pipe.devx == 1:
            return _COOKIE
        _fill_eqe(message + _COOKIE, event)
        return _COOKIE + EQE.size
    st64(message, about.element)
    if event.type == _COMPLETION:
        return _COOKIE
    kind = ld8(pump.names + event.type)
    if event.type == _PORT_CHANGE:
        st64(message, event.number >> PORT_SHIFT)
        kind = _PORT_ACTIVE if event.number & ((1 << PORT_SHIFT) - 1) == _ACTIVE else _PORT_ERR
    st64(message + 8, kind)
    return abi.ASYNC_EVENT.size


@engine_function
def _pass_on(pump: PumpState, pipe: Pipe, event: Event) -> int:
    """Send a message about an event. Return 0 if the pipe is full. Events whose object is gone have no cookie."""
    if event.cookie == 0:
        return 1
    nbytes = _make_message(pump, pipe, event)
    if nbytes == 0:
        return 1
    if _write(pipe.fd, pump + PumpState.message, nbytes) != nbytes:
        return errno() != _EAGAIN
    about = Subscriber(event.cookie)
    if event.type == _COMPLETION:
        about.completions += 1
    else:
        about.others += 1
    return 1


@engine_function
def _serve_pipe(pump: PumpState, pipe: Pipe, pollfd: int) -> None:
    """Pass on an event of a channel. Then wait for the next event or, if the pipe was full, for room in it."""
    if pipe.full == 0 and _read(pipe.channel, pump + PumpState.message, 8) != 8:
        return
    event = Event(next_full(pipe.ring))
    if event != 0 and _pass_on(pump, pipe, event) == 0:
        pipe.full = 1
        st32(pollfd + _FD, pipe.fd)
        st16(pollfd + _EVENTS, _POLLOUT)
        return
    if event != 0:
        release(pipe.ring)
    pipe.full = 0
    st32(pollfd + _FD, pipe.channel)
    st16(pollfd + _EVENTS, _POLLIN)


@engine_function
def serve(pump: PumpState) -> None:
    """Pass events on until `stop` is set."""
    while ld_relaxed64(pump + PumpState.stop) == 0:
        if _poll(pump.pollfds, ld_relaxed64(pump + PumpState.count), _PERIOD_MS) <= 0:
            continue
        if ld16(pump.pollfds + _REVENTS) != 0:
            _read(ld32(pump.pollfds + _FD), pump + PumpState.message, 8)
        _lock(pump + PumpState.mutex)
        for i in range(1, ld_relaxed64(pump + PumpState.count)):
            if ld16(pump.pollfds + _POLLFD * i + _REVENTS) != 0:
                _serve_pipe(pump, Pipe(pump.pipes + Pipe.size * i), pump.pollfds + _POLLFD * i)
        _unlock(pump + PumpState.mutex)


def compile_pump() -> None:
    """Compile `serve`, or load it from the cache."""
    serve.compile()
