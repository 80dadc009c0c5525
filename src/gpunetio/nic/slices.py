"""Slices: a worker's turns where queues and payload are in memory of a GPU, which threads of the CPU do not reach.

A slice is short. Between two of them, the worker's thread does what takes system calls: it wakes threads and other
NICs, and rings event channels. It touches no ring, record or payload.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import clock_ns, ld_relaxed64, pause
from ..jit.twin import count_user
from .borrowed import borrow, give_back, is_recalled, may_borrow
from .state.worker import WORKER, worker_at
from .step import scan_records, select_first, serve_queues, step

SLICE_NS = 1_000_000
_IDLE_TURNS = 64  # after so many, the thread decides what is next
_NEAR_TURNS = 256  # on borrowed rows, before registers and commands have their turn


@device_function
def _is_told(nic):
    """Return whether the worker's thread has to tell others what a turn has done."""
    n = worker_at(nic)
    return n.error_event + n.ringing_count + n.waking != 0


@engine_function
def _borrowed_turns(nic, end):
    """Make turns on copies of the worker's rows, as long as that is all that is to do: return how much was done."""
    near = borrow(nic)
    done = 0
    idle = 0
    for _ in range(_NEAR_TURNS):
        now = clock_ns()
        worker_at(near).now = now
        did = serve_queues(near)
        done += did
        if did != 0:
            select_first(near)
            idle = 0
        else:
            idle += 1
            pause()
        if idle == _IDLE_TURNS or is_recalled(nic) or _is_told(near) or now >= end:
            break
    give_back(nic)
    return done


@engine_function
def take_slice(nic):
    """Make turns until the slice is over, there is nothing to do, or the host is wanted: return how much was done."""
    n = worker_at(nic)
    end = clock_ns() + n.slice_ns
    done = 0
    idle = 0
    while idle < _IDLE_TURNS:
        did = step(nic)
        if may_borrow(nic):
            did += _borrowed_turns(nic, end)
        done += did
        if did != 0:
            idle = 0
        else:
            idle += 1
            pause()
        wires = n.wire_count != 0 and did != 0  # whose other ends wait
        if wires or ld_relaxed64(nic + WORKER.awaited) != 0 or _is_told(nic) or clock_ns() >= end:
            break
    return done


@engine_function
def turn(nic):
    """Make one turn, or a slice of turns where the NIC's engine is on a GPU: return how much was done."""
    twin = worker_at(nic).twin
    if twin == 0:
        return step(nic)
    count_user(twin, 1)
    done = take_slice(nic)
    count_user(twin, -1)
    return done


@engine_function
def scan(nic):
    """Scan doorbell records for missed rings (`scan_records`)."""
    twin = worker_at(nic).twin
    if twin == 0:
        scan_records(nic)
        return
    count_user(twin, 1)
    scan_records(nic)
    count_user(twin, -1)
