"""How the engine serves wires of each kind. Nothing else in compiled code tells kinds apart.

Every wire has a pipe of frames for what the NIC sends, `tx`. A wire of the kind PIPES also has a pipe for what arrives,
`rx`. Somebody else fills it, and empties `tx`: a NIC of this host, or a thread. The engine does not care who.

For other kinds, the engine moves packets between the wire and file descriptors, by system calls before and after each
turn. A kind is a line in each of these functions:

| kind | `pump_in`        | `pump_out` | `arrivals` | `_unsent`                         |
|------|------------------|------------|------------|-----------------------------------|
| UDP  | `take_datagrams` | `transmit` | `mark`     | frames that wait for the sockets  |
"""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, ld_acquire64
from ...fabric.frames import PIPE, pipe_end_at, publish, recall
from ...fabric.injector import inject, recall_injected
from ...fabric.udp_records import mark, udp_wire_at
from ...fabric.udp_transmit import transmit
from .datagrams import take_datagrams
from .packets import link_bytes
from .pipes import take_frames
from ..state.worker import worker_at
from ..state.qp import qp_row_at
from ..state.wire import WIRE, wire_at

PIPES, UDP = 1, 2  # WIRE.kind


# --- system calls: only for an engine on a CPU ---------------------------------------------------------------------


@engine_function
def pump_in(nic):
    """Take the packets that have arrived at the wires' file descriptors. Return how many."""
    n = worker_at(nic)
    done = 0
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        w = wire_at(wire)
        if w.kind == UDP and not n.paused and not n.holding:
            done += take_datagrams(nic, wire)
    return done


@engine_function
def pump_out(nic):
    """Send the frames that wait for the wires' file descriptors."""
    n = worker_at(nic)
    for i in range(n.wire_count):
        w = wire_at(ld64(n.wires + 8 * i))
        if w.kind == UDP:
            transmit(w.udp)


# --- memory only ---------------------------------------------------------------------------------------------------


@device_function
def arrivals(row):
    """Return the position on the QP's wire where packets that arrive from now on begin."""
    q = qp_row_at(row)
    if q.wire == 0:
        return 0
    w = wire_at(q.wire)
    if w.kind == UDP:
        return mark(w.udp)
    return ld_acquire64(pipe_end_at(q.wire + WIRE.rx).pipe + PIPE.head)


@device_function
def _unsent(wire):
    """Return the end of `tx` that this engine reads, or 0: what has not left through it can be taken back."""
    w = wire_at(wire)
    if w.kind == UDP:
        return udp_wire_at(w.udp).tx
    return 0


@device_function
def has_pipe_in(wire):
    """Return whether somebody else puts what arrives on this wire into a pipe."""
    return pipe_end_at(wire + WIRE.rx).pipe != 0


@engine_function
def serve_wires(nic):
    """Take packets from every pipe: return how many."""
    n = worker_at(nic)
    done = 0
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        if has_pipe_in(wire):
            done += take_frames(nic, wire)
    return done


@engine_function
def recall_sent(row):
    """Take back packets of the QP that have not left this NIC: those in a fault injector or queued for a descriptor."""
    q = qp_row_at(row)
    if q.wire == 0:
        return
    w = wire_at(q.wire)
    if w.faults != 0:
        recall_injected(w.faults, link_bytes(row), q.remote_qpn, q.peer_high, q.peer_low)
    unsent = _unsent(q.wire)
    if unsent != 0:
        recall(unsent, link_bytes(row), q.remote_qpn, q.peer_high, q.peer_low)


@engine_function
def flush_wires(nic):
    """Publish what was sent in this turn to the other ends."""
    n = worker_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        w = wire_at(wire)
        publish(wire + WIRE.tx)
        if w.faults != 0:
            inject(w.faults, n.now)
        if w.broken:  # nobody reads the pipe any more: packets sent are lost
            pipe_end_at(wire + WIRE.tx).seen = pipe_end_at(wire + WIRE.tx).position
