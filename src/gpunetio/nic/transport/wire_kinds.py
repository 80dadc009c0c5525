"""The kinds of wires, and how the engine serves each. Nothing else in compiled code tells kinds apart.

Every wire has a pipe of frames for what the NIC sends, `tx`. A wire of the kind PIPES also has a pipe for what arrives,
`rx`. Somebody else fills it, and empties `tx`: a NIC of this host, or a thread. The engine does not care who. For other
kinds, the engine moves packets between the wire and file descriptors, by system calls before and after each turn.
"""

from __future__ import annotations

from typing import NamedTuple

from ...fabric.frames import PIPE, PipeEnd, publish, recall
from ...fabric.injector import FaultInjector, inject, recall_injected
from ...jit.by_kind import by_kind
from ...jit.compile import DeviceFunction, device_function, engine_function
from ...jit.ops import fence_sys, ld64, ld_relaxed64
from ..state.qp import QpRow
from ..state.wire import WIRE, WireState
from ..state.worker import WorkerState
from . import datagrams, frame_sorting as ethernet, lan, pipes
from .packets import link_bytes
from .pipes import take_frames

PIPES, UDP, ETHERNET = 1, 2, 3  # WIRE.kind


class Kind(NamedTuple):
    """Functions of a kind of wire. None does nothing, and returns 0."""

    # (worker, wire): take what has arrived at file descriptors, by system calls. Returns how many packets
    take_in: DeviceFunction | None
    # (worker, wire): send frames that wait in `tx` for file descriptors, by system calls
    send_out: DeviceFunction | None
    # (wire): the position on the wire where packets that arrive from now on begin
    arrivals: DeviceFunction
    # (wire): the end of `tx` that this engine reads: what has not left through it can be taken back
    unsent: DeviceFunction | None
    # (worker, wire, nbytes, mac): the address for the bytes of an Ethernet frame to this MAC; 0 if there is no room
    frame_room: DeviceFunction | None
    # (worker, wire, nbytes): send the frame that was written there. Returns whether it may arrive
    send_frame: DeviceFunction | None


KINDS = {
    PIPES: Kind(None, None, pipes.arrivals, None, lan.frame_room, lan.send_frame),
    UDP: Kind(datagrams.take_datagrams, datagrams.send_out, datagrams.arrivals, datagrams.unsent, None, None),
    ETHERNET: Kind(
        ethernet.take_in, ethernet.send_out, ethernet.arrivals, ethernet.unsent, ethernet.frame_room,
        ethernet.send_frame,
    ),
}


@by_kind({kind: row.take_in for kind, row in KINDS.items()})
def _take_in(kind: int, worker: WorkerState, wire: WireState) -> int: ...


@by_kind({kind: row.send_out for kind, row in KINDS.items()})
def _send_out(kind: int, worker: WorkerState, wire: WireState) -> int: ...


@by_kind({kind: row.arrivals for kind, row in KINDS.items()})
def _arrivals(kind: int, wire: WireState) -> int: ...


@by_kind({kind: row.unsent for kind, row in KINDS.items()})
def _unsent(kind: int, wire: WireState) -> int: ...


@by_kind({kind: row.frame_room for kind, row in KINDS.items()})
def _frame_room(kind: int, worker: WorkerState, wire: WireState, nbytes: int, mac: int) -> int: ...


@by_kind({kind: row.send_frame for kind, row in KINDS.items()})
def _send_frame(kind: int, worker: WorkerState, wire: WireState, nbytes: int) -> int: ...


# --- system calls: only for an engine on a CPU ---------------------------------------------------------------------


@engine_function
def pump_in(worker: WorkerState) -> int:
    """Take the packets that have arrived at the wires' file descriptors. Return how many."""
    done = 0
    if worker.paused or worker.holding or worker.hold:
        return done
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        done += _take_in(wire.kind, worker, wire)
    return done


@engine_function
def pump_out(worker: WorkerState) -> None:
    """Send the frames that wait for the wires' file descriptors."""
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        _send_out(wire.kind, worker, wire)


# --- memory only ---------------------------------------------------------------------------------------------------


@engine_function
def arrivals(qp: QpRow) -> int:
    """Return the position on the QP's wire where packets that arrive from now on begin."""
    wire = WireState(qp.wire)
    return _arrivals(wire.kind, wire) if wire != 0 else 0


@device_function
def has_pipe_in(wire: WireState) -> bool:
    """Return whether somebody else puts what arrives on this wire into a pipe."""
    return PipeEnd(wire + WIRE.rx).pipe != 0


@engine_function
def serve_wires(worker: WorkerState) -> int:
    """Take packets from every pipe: return how many."""
    done = 0
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        if has_pipe_in(wire):
            done += take_frames(worker, wire)
    return done


@device_function
def is_to_wake(wire: WireState) -> bool:
    """Return whether the other end sleeps, and has not been woken, while frames wait for it."""
    end = PipeEnd(wire + WIRE.tx)
    return wire.wake_fd != 0 and wire.woken != end.position and ld_relaxed64(end.pipe + PIPE.asleep) != 0


@engine_function
def is_any_to_wake(worker: WorkerState) -> bool:
    """Return whether frames that were just published wait for another end that sleeps."""
    fence_sys()  # the other end says that it sleeps, and then looks for frames
    for i in range(worker.wire_count):
        if is_to_wake(WireState(ld64(worker.wires + 8 * i))):
            return True
    return False


@device_function
def _kind_of(wire: WireState) -> int:
    """Return the kind of a wire. 0 stands for all wires to NICs of this host, over which frames go."""
    return wire.kind if wire != 0 else PIPES


@engine_function
def frame_room(worker: WorkerState, wire: WireState, nbytes: int, mac: int) -> int:
    """Return the address for the bytes of an Ethernet frame, or 0 if the wire is full. Asking again gives it again.

    `mac` is the frame's destination, a load of its 6 bytes. Nothing is sent before `send_frame`.
    """
    return _frame_room(_kind_of(wire), worker, wire, nbytes, mac)


@engine_function
def send_frame(worker: WorkerState, wire: WireState, nbytes: int) -> None:
    """Send the frame of `nbytes` that was written to where `frame_room` said. It leaves after this turn."""
    _send_frame(_kind_of(wire), worker, wire, nbytes)


@engine_function
def recall_sent(qp: QpRow) -> None:
    """Take back packets of the QP that have not left this NIC: those in a fault injector or queued for a descriptor."""
    if qp.wire == 0:
        return
    wire = WireState(qp.wire)
    if wire.faults != 0:
        recall_injected(FaultInjector(wire.faults), link_bytes(qp), qp.remote_qpn, qp.peer_high, qp.peer_low)
    unsent = PipeEnd(_unsent(wire.kind, qp.wire))
    if unsent != 0:
        recall(unsent, link_bytes(qp), qp.remote_qpn, qp.peer_high, qp.peer_low)


@engine_function
def flush_wires(worker: WorkerState) -> None:
    """Publish what was sent in this turn to the other ends."""
    for i in range(worker.wire_count):
        wire = WireState(ld64(worker.wires + 8 * i))
        publish(PipeEnd(wire + WIRE.tx))
        if wire.faults != 0:
            inject(FaultInjector(wire.faults), worker.now)
        if wire.broken:  # nobody reads the pipe any more: packets sent are lost
            PipeEnd(wire + WIRE.tx).seen = PipeEnd(wire + WIRE.tx).position
