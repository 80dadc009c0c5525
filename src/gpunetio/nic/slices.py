"""Slices: a worker's turns where queues and payload are in memory of a GPU, which threads of the CPU do not reach.

A slice is short. Between two of them, the worker's thread does what takes system calls: it moves packets to and from
descriptors, wakes threads and other NICs, and rings event channels. It touches no ring, record or payload.
"""

from __future__ import annotations

from ..jit.compile import device_function, engine_function
from ..jit.ops import clock_ns, ld_relaxed64, pause
from ..jit.twin import count_user
from .state.worker import WORKER, worker_at
from .step import scan_records, step

SLICE_NS = 1_000_000
_IDLE_TURNS = 64  # after so many, the thread decides what is next


@device_function
def _host_is_wanted(nic, done):
    """Return whether the worker's thread has to do something after a turn, which has done so much."""
    n = worker_at(nic)
    wires = n.wire_count != 0 and done != 0
    return wires or ld_relaxed64(nic + WORKER.awaited) + n.error_event + n.ringing_count + n.waking != 0


@engine_function
def take_slice(nic):
    """Make turns until the slice is over, there is nothing to do, or the host is wanted: return how much was done."""
    n = worker_at(nic)
    end = clock_ns() + n.slice_ns
    done = 0
    idle = 0
    while idle < _IDLE_TURNS:
        did = step(nic)
        done += did
        if did != 0:
            idle = 0
        else:
            idle += 1
            pause()
        if _host_is_wanted(nic, did) or clock_ns() >= end:
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
