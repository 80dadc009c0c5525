"""The engine's side of requests without packets (control/regions/reach.py): the state of wires that they depend on."""

from __future__ import annotations

from ...fabric.frames import PIPE, PIPE_END
from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, ld_relaxed64, st64, st_release64
from ..state.qp import QpRow
from ..state.wire import WIRE, WireState
from ..state.worker import WORKER, WorkerState

NOTHING, PACKETS, OTHER = range(3)  # what keeps a worker from caching its rows


@device_function
def _pipe_in(wire: WireState) -> int:
    """Return the address of the pipe in which frames arrive; 0 if they arrive otherwise."""
    return ld_relaxed64(wire + WIRE.rx + PIPE_END.pipe)


@engine_function
def wires_obstacle(worker: WorkerState) -> int:
    """Return what on the wires keeps the worker from caching its rows: NOTHING, PACKETS that have arrived, or OTHER.

    The other end may be in another process.
    """
    frames, withdrawn = 0, 0
    for i in range(ld_relaxed64(worker + WORKER.wire_count)):
        wire = ld_relaxed64(worker.wires + 8 * i)
        pipe = _pipe_in(wire)
        if pipe == 0 or ld_relaxed64(wire + WIRE.faults) != 0:  # sockets; packets that are delayed
            return OTHER
        if ld_relaxed64(wire + WIRE.broken) == 0:
            frames |= ld_relaxed64(pipe + PIPE.head) ^ ld_relaxed64(wire + WIRE.rx + PIPE_END.position)
        withdrawn |= ld_relaxed64(pipe + PIPE.withdrawn) ^ ld_relaxed64(wire + WIRE.answered)
    return OTHER if withdrawn != 0 else PACKETS if frames != 0 else NOTHING


@engine_function
def answer_withdrawals(worker: WorkerState) -> None:
    """Confirm to peers that what they have withdrawn is no longer used. The caller's rows are not cached."""
    for i in range(ld_relaxed64(worker + WORKER.wire_count)):
        wire = ld64(worker.wires + 8 * i)
        pipe = _pipe_in(wire)
        if pipe != 0:
            withdrawn = ld_relaxed64(pipe + PIPE.withdrawn)
            if withdrawn != ld64(wire + WIRE.answered):
                st64(wire + WIRE.answered, withdrawn)
                st_release64(pipe + PIPE.answered, withdrawn)


@device_function
def needs_no_packets(qp: QpRow) -> bool:
    """Return whether requests of a queue pair with a wire need no packets, once all earlier ones are acknowledged.

    The peer must not have withdrawn anything since its last message, and must not have failed.
    """
    if qp.peer_keys == 0:
        return False
    pipe = _pipe_in(qp.wire)
    changed = ld_relaxed64(pipe + PIPE.withdrawn) ^ ld_relaxed64(qp.wire + WIRE.withdrawn)
    changed |= ld_relaxed64(pipe + PIPE.failed) ^ ld_relaxed64(qp.wire + WIRE.failed)
    return changed == 0 and ld_relaxed64(qp.wire + WIRE.broken) == 0


@device_function
def is_acknowledged(qp: QpRow) -> bool:
    """Return whether a queue pair has no packet in flight and none to send."""
    return qp.una_psn == qp.tx_psn and qp.timer_at + qp.ack_pending + qp.res_todo + qp.pending == 0


@device_function
def signal_failure(qp: QpRow) -> None:
    """Signal to a peer in another process that a queue pair has failed."""
    if qp.wire != 0:
        pipe = ld64(qp.wire + WIRE.tx + PIPE_END.pipe)
        if pipe != 0:
            st_release64(pipe + PIPE.failed, ld64(pipe + PIPE.failed) + 1)
