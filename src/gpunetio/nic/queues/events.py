"""Events: the engine raises them in the channels that have subscribed, and arms CQs (PRM, event queues)."""

from __future__ import annotations

from ...fabric.ring import RingState, lock, next_free, publish, unlock
from ...formats.cqe import CI_MASK
from ...formats.doorbell import CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ...formats.events import EventQueueType, EventType
from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be32, be64, exchange_gpu64, fetch_add_acq_rel_gpu64, ld_acquire32, ld_acquire64, ld_relaxed64, st64, st_release64,
)
from ..state.cq import CHANNEL, CQ_ROW, Channel, CqRow, Event
from ..state.qp import QpRow
from ..state.work_queue import QueueKind
from ..state.worker import WORKER, WorkerState

_ANY, _SOLICITED = 2, 1  # CQ_ROW.armed: the larger value includes the smaller


@engine_function
def raise_event(worker: WorkerState, channel: Channel, cookie: int, kind: int, number: int, syndrome: int) -> None:
    """Put an event into a channel, if there is one. The channel's descriptor is written at the end of the turn."""
    if channel == 0:
        return
    lock(channel + CHANNEL.ring)  # other workers may raise events in it, too
    slot = Event(next_free(RingState(channel + CHANNEL.ring)))
    if slot == 0:
        channel.lost += 1
    else:
        slot.cookie, slot.type, slot.number, slot.syndrome = cookie, kind, number, syndrome
        publish(channel + CHANNEL.ring)
    unlock(channel + CHANNEL.ring)
    if slot != 0 and fetch_add_acq_rel_gpu64(channel + CHANNEL.unheard, 1) == 0:
        st64(worker.ringing + 8 * worker.ringing_count, channel)
        worker.ringing_count += 1


@device_function
def raise_qp_event(worker: WorkerState, qp: QpRow, kind: int) -> None:
    """Raise an event of a QP or SQ if its channel has subscribed to this type."""
    if qp.events >> kind & 1:
        of = EventQueueType.SQ if qp.kind == QueueKind.ETHERNET_SEND else EventQueueType.QP
        raise_event(worker, Channel(qp.channel), qp.cookie, kind, qp.qpn, of)


@device_function
def _raise_completion(worker: WorkerState, cq: CqRow) -> None:
    """Raise the event that a CQ is armed for. The event reports all CQEs written so far."""
    cq.armed = 0
    cq.told_pi = cq.pi
    raise_event(worker, Channel(cq.channel), cq.cookie, EventType.COMPLETION, cq.cqn, 0)


@device_function
def notify(worker: WorkerState, cq: CqRow, solicited: int) -> None:
    """Raise an event for a CQE that was just written, if the CQ is armed for it. This disarms the CQ."""
    if solicited:
        cq.solicited_pi = cq.pi
    if cq.armed == _ANY or (solicited and cq.armed == _SOLICITED):
        _raise_completion(worker, cq)


@engine_function
def _arm(worker: WorkerState, cq: CqRow) -> None:
    """Arm a CQ as its arm record requests. If the requested CQE is already there, raise the event at once.

    CQEs that the last event has reported don't count: a program arms the CQ before it polls (as the man page of
    ibv_get_cq_event recommends), so its consumer index is older than these CQEs.

    The same word again is the same request. A request for any completion stays in force when a request for solicited
    completions follows (IBTA 11.4.2.2).
    """
    word = be32(ld_acquire32(cq.dbrec + CQ_DBREC.arm))
    if word == cq.arm_seen:
        return
    cq.arm_seen = word
    wanted = _SOLICITED if word & CQ_ARM_SOLICITED else _ANY
    written = cq.solicited_pi if wanted == _SOLICITED else cq.pi
    unseen = (written - word) & CI_MASK
    if 0 < unseen <= CI_MASK >> 1 and written > cq.told_pi:
        _raise_completion(worker, cq)
    elif cq.armed < wanted:
        cq.armed = wanted


@engine_function
def serve_arm_register(worker: WorkerState, page: int) -> int:
    """Serve the register of a UAR page that arms CQs. Return 1 if it was rung.

    The register says which CQ to arm. The request itself is read from the arm record, which may ask for more meanwhile.
    If another worker serves the CQ, the others look at their arm records.
    """
    register = page + UAR_CQ_OFFSET
    if ld_relaxed64(register) == 0:
        return 0
    cqn = be64(exchange_gpu64(register, 0)) & 0xFFFFFF
    cq = CqRow(worker.cqs + (cqn & worker.cq_mask) * CQ_ROW.size)
    if cqn == 0 or cq.cqn != cqn:
        return 1
    if cq.worker == worker:
        _arm(worker, cq)
        return 1
    other = worker.next
    while other != 0:
        st_release64(other + WORKER.arms_rung, WorkerState(other).arms_rung + 1)
        other = WorkerState(other).next
    return 1


@engine_function
def poll_arm_registers(worker: WorkerState) -> None:
    """Scan the arm records if the first worker has served a register for a CQ of another worker."""
    rung = ld_acquire64(worker + WORKER.arms_rung)
    if rung != worker.arms_seen:
        worker.arms_seen = rung
        scan_arm_records(worker)


@engine_function
def scan_arm_records(worker: WorkerState) -> None:
    """Check the arm records of this worker's CQs: concurrent writes to one register overwrite each other.

    A record that always was 0 was not written.
    """
    for i in range(ld_relaxed64(worker.armable)):
        cq = CqRow(ld_relaxed64(worker.armable + 8 + 8 * i))
        if cq.worker == worker and (cq.arm_seen > 0 or ld_acquire32(cq.dbrec + CQ_DBREC.arm) != 0):
            _arm(worker, cq)
