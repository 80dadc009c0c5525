"""The kinds of wires, and how the engine serves each. Nothing else in compiled code tells kinds apart.

Every wire has a pipe of frames for what the NIC sends, `tx`. A wire of the kind PIPES also has a pipe for what arrives,
`rx`. Somebody else fills it, and empties `tx`: a NIC of this host, or a thread. The engine does not care who. For other
kinds, the engine moves packets between the wire and file descriptors, by system calls before and after each turn.
"""

from __future__ import annotations

from typing import NamedTuple

from ...fabric.frames import PIPE, pipe_end_at, publish, recall
from ...fabric.injector import inject, recall_injected
from ...jit.by_kind import by_kind
from ...jit.compile import DeviceFunction, device_function, engine_function
from ...jit.ops import fence_sys, ld64, ld_relaxed64
from ..state.qp import qp_row_at
from ..state.wire import WIRE, wire_at
from ..state.worker import worker_at
from . import datagrams, frame_sorting as ethernet, lan, pipes
from .packets import link_bytes
from .pipes import take_frames

PIPES, UDP, ETHERNET = 1, 2, 3  # WIRE.kind


class Kind(NamedTuple):
    """Functions of a kind of wire. None does nothing, and returns 0."""

    # (nic, wire): take what has arrived at file descriptors, by system calls. Returns how many packets
    take_in: DeviceFunction | None
    # (nic, wire): send frames that wait in `tx` for file descriptors, by system calls
    send_out: DeviceFunction | None
    # (wire): the position on the wire where packets that arrive from now on begin
    arrivals: DeviceFunction
    # (wire): the end of `tx` that this engine reads: what has not left through it can be taken back
    unsent: DeviceFunction | None
    # (nic, wire, nbytes, mac): the address for the bytes of an Ethernet frame to this MAC; 0 if there is no room
    frame_room: DeviceFunction | None
    # (nic, wire, nbytes): send the frame that was written there. Returns whether it may arrive
    send_frame: DeviceFunction | None


KINDS = {
    PIPES: Kind(None, None, pipes.arrivals, None, lan.frame_room, lan.send_frame),
    UDP: Kind(datagrams.take_datagrams, datagrams.send_out, datagrams.arrivals, datagrams.unsent, None, None),
    ETHERNET: Kind(
        ethernet.take_in, ethernet.send_out, ethernet.arrivals, ethernet.unsent, ethernet.frame_room,
        ethernet.send_frame,
    ),
}  # fmt: skip


@by_kind({kind: row.take_in for kind, row in KINDS.items()})
def _take_in(kind, nic, wire): ...


@by_kind({kind: row.send_out for kind, row in KINDS.items()})
def _send_out(kind, nic, wire): ...


@by_kind({kind: row.arrivals for kind, row in KINDS.items()})
def _arrivals(kind, wire): ...


@by_kind({kind: row.unsent for kind, row in KINDS.items()})
def _unsent(kind, wire): ...


@by_kind({kind: row.frame_room for kind, row in KINDS.items()})
def _frame_room(kind, nic, wire, nbytes, mac): ...


@by_kind({kind: row.send_frame for kind, row in KINDS.items()})
def _send_frame(kind, nic, wire, nbytes): ...


# --- system calls: only for an engine on a CPU ---------------------------------------------------------------------


@engine_function
def pump_in(nic):
    """Take the packets that have arrived at the wires' file descriptors. Return how many."""
    n = worker_at(nic)
    done = 0
    if n.paused or n.holding or n.hold:
        return done
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        done += _take_in(wire_at(wire).kind, nic, wire)
    return done


@engine_function
def pump_out(nic):
    """Send the frames that wait for the wires' file descriptors."""
    n = worker_at(nic)
    for i in range(n.wire_count):
        wire = ld64(n.wires + 8 * i)
        _send_out(wire_at(wire).kind, nic, wire)


# --- memory only ---------------------------------------------------------------------------------------------------


@engine_function
def arrivals(row):
    """Return the position on the QP's wire where packets that arrive from now on begin."""
    wire = qp_row_at(row).wire
    return _arrivals(wire_at(wire).kind, wire) if wire != 0 else 0


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


@device_function
def is_to_wake(wire):
    """Return whether the other end sleeps, and has not been woken, while frames wait for it."""
    w = wire_at(wire)
    e = pipe_end_at(wire + WIRE.tx)
    return w.wake_fd != 0 and w.woken != e.position and ld_relaxed64(e.pipe + PIPE.asleep) != 0


@engine_function
def is_any_to_wake(nic):
    """Return whether frames that were just published wait for another end that sleeps."""
    n = worker_at(nic)
    fence_sys()  # the other end says that it sleeps, and then looks for frames
    for i in range(n.wire_count):
        if is_to_wake(ld64(n.wires + 8 * i)):
            return True
    return False


@device_function
def _kind_of(wire):
    """Return the kind of a wire. 0 stands for all wires to NICs of this host, over which frames go."""
    return wire_at(wire).kind if wire != 0 else PIPES


@engine_function
def frame_room(nic, wire, nbytes, mac):
    """Return the address for the bytes of an Ethernet frame, or 0 if the wire is full. Asking again gives it again.

    `mac` is the frame's destination, a load of its 6 bytes. Nothing is sent before `send_frame`.
    """
    return _frame_room(_kind_of(wire), nic, wire, nbytes, mac)


@engine_function
def send_frame(nic, wire, nbytes):
    """Send the frame of `nbytes` that was written to where `frame_room` said. It leaves after this turn."""
    _send_frame(_kind_of(wire), nic, wire, nbytes)


@engine_function
def recall_sent(row):
    """Take back packets of the QP that have not left this NIC: those in a fault injector or queued for a descriptor."""
    q = qp_row_at(row)
    if q.wire == 0:
        return
    w = wire_at(q.wire)
    if w.faults != 0:
        recall_injected(w.faults, link_bytes(row), q.remote_qpn, q.peer_high, q.peer_low)
    unsent = _unsent(w.kind, q.wire)
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
