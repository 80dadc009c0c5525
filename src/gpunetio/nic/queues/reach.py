"""The engine's side of requests without packets (control/regions/reach.py).

Of wires, this is what matters to an engine on borrowed rows.
"""

from __future__ import annotations

from ...fabric.frames import PIPE, PIPE_END
from ...jit.compile import device_function, engine_function
from ...jit.ops import ld64, ld_relaxed64, st64, st_release64
from ..state.qp import QpRow
from ..state.wire import WIRE, WireState
from ..state.worker import WORKER, WorkerState

NOTHING, PACKETS, OTHER = range(3)  # what bars a worker from borrowing its rows


@device_function
def _pipe_in(wire: WireState) -> int:
    """Return the address of the pipe in which frames arrive; 0 if they arrive otherwise."""
    return ld_relaxed64(wire + WIRE.rx + PIPE_END.pipe)


@engine_function
def bars_of_wires(worker: WorkerState) -> int:
    """Return what on wires bars the worker from its rows: NOTHING, PACKETS that have arrived, or what is OTHER.

    The other end may be another process.
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
    """Tell peers that what they have withdrawn is not used any more. Rows are not borrowed."""
    for i in range(ld_relaxed64(worker + WORKER.wire_count)):
        wire = ld64(worker.wires + 8 * i)
        pipe = _pipe_in(wire)
        if pipe != 0:
            withdrawn = ld_relaxed64(pipe + PIPE.withdrawn)
            if withdrawn != ld64(wire + WIRE.answered):
                st64(wire + WIRE.answered, withdrawn)
                st_release64(pipe + PIPE.answered, withdrawn)


@device_function
def reaches(qp: QpRow) -> bool:
    """Return whether requests of a queue pair with a wire may go without packets, once all others are acknowledged.

    What is known of the peer must be what it has told last, and it must not have failed since.
    """
    if qp.peer_keys == 0:
        return False
    pipe = _pipe_in(qp.wire)
    changed = ld_relaxed64(pipe + PIPE.withdrawn) ^ ld_relaxed64(qp.wire + WIRE.withdrawn)
    changed |= ld_relaxed64(pipe + PIPE.failed) ^ ld_relaxed64(qp.wire + WIRE.failed)
    return changed == 0 and ld_relaxed64(qp.wire + WIRE.broken) == 0


@device_function
def is_acknowledged(qp: QpRow) -> bool:
    """Return whether no packet of a queue pair is on its way, or is to be sent."""
    return qp.una_psn == qp.tx_psn and qp.timer_at + qp.ack_pending + qp.res_todo + qp.pending == 0


@device_function
def tell_failure(qp: QpRow) -> None:
    """Tell the peer, if it is in another process, that a queue pair has failed."""
    if qp.wire != 0:
        pipe = ld64(qp.wire + WIRE.tx + PIPE_END.pipe)
        if pipe != 0:
            st_release64(pipe + PIPE.failed, ld64(pipe + PIPE.failed) + 1)
