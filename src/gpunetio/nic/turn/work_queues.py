"""The kinds of work queues, and the functions that serve each kind."""

from __future__ import annotations

from typing import NamedTuple

from ...jit.by_kind import by_kind
from ...jit.compile import DeviceFunction
from ..queues.doorbells import scan_record
from ..state.qp import QpRow
from ..state.work_queue import QueueKind, WorkQueue
from ..state.worker import WorkerState
from ..transport import connected, eth_send, send_queue, ud_send


class Kind(NamedTuple):
    """Functions of a kind of work queue."""

    # (worker, queue): execute announced WQEs, and set `awake` of the entry if work is left. Returns how much was done
    serve: DeviceFunction
    scan: DeviceFunction  # (worker, qp): look for a doorbell that was missed
    waits: DeviceFunction  # (qp): whether announced work is not complete
    in_flight: DeviceFunction  # (qp): whether some of it has begun


KINDS = {
    QueueKind.CONNECTED_SEND: Kind(connected.serve, scan_record, send_queue.waits, send_queue.in_flight),
    QueueKind.DATAGRAM_SEND:  Kind(ud_send.serve,   scan_record, send_queue.waits, send_queue.in_flight),
    QueueKind.ETHERNET_SEND:  Kind(eth_send.serve,  scan_record, eth_send.waits,   send_queue.in_flight),
}


@by_kind({kind: row.serve for kind, row in KINDS.items()})
def serve(kind: int, worker: WorkerState, queue: WorkQueue) -> int:
    """Execute announced WQEs of a work queue. Return how much was done."""
    ...


@by_kind({kind: row.scan for kind, row in KINDS.items()})
def scan(kind: int, worker: WorkerState, qp: QpRow) -> None:
    """Look for a doorbell of a work queue that was missed."""


@by_kind({kind: row.waits for kind, row in KINDS.items()})
def waits(kind: int, qp: QpRow) -> int:
    """Return whether announced work is not complete."""
    ...


@by_kind({kind: row.in_flight for kind, row in KINDS.items()})
def in_flight(kind: int, qp: QpRow) -> int:
    """Return whether some of it has begun."""
    ...
