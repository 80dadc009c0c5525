"""Events: the engine puts them into the channels that subscribed, and arms CQs to raise them (PRM, event queues)."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import (
    be32, be64, exchange_gpu64, fetch_add_acq_rel_gpu64, ld_acquire32, ld_acquire64, ld_relaxed64, st64, st_release64,
)  # fmt: skip
from ...fabric.ring import lock, next_free, publish, unlock
from ...formats.cqe import CI_MASK
from ...formats.doorbell import CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ...formats.events import EventQueueType, EventType
from ..state.cq import CHANNEL, CQ_ROW, channel_at, cq_row_at, event_at
from ..state.nic import nic_at
from ..state.work_queue import QueueKind
from ..state.worker import WORKER, worker_at
from ..state.qp import qp_row_at

_ANY, _SOLICITED = 2, 1  # CQ_ROW.armed: the larger value includes the smaller


@engine_function
def raise_event(nic, channel, cookie, kind, number, syndrome):
    """Put an event into a channel, if there is one. The channel's descriptor is written at the end of the turn."""
    if channel == 0:
        return
    lock(channel + CHANNEL.ring)  # other workers may raise events in it, too
    slot = next_free(channel + CHANNEL.ring)
    if slot == 0:
        channel_at(channel).lost += 1
    else:
        e = event_at(slot)
        e.cookie, e.type, e.number, e.syndrome = cookie, kind, number, syndrome
        publish(channel + CHANNEL.ring)
    unlock(channel + CHANNEL.ring)
    if slot != 0 and fetch_add_acq_rel_gpu64(channel + CHANNEL.unheard, 1) == 0:
        n = worker_at(nic)
        st64(n.ringing + 8 * n.ringing_count, channel)
        n.ringing_count += 1


@device_function
def tell(nic, row, kind):
    """Raise an event of a QP or SQ if its channel has subscribed to this type."""
    q = qp_row_at(row)
    if q.events >> kind & 1:
        of = EventQueueType.SQ if q.kind == QueueKind.ETHERNET_SEND else EventQueueType.QP
        raise_event(nic, q.channel, q.cookie, kind, q.qpn, of)


@device_function
def _complete(nic, cq):
    """Raise the event that a CQ is armed for, which tells of all CQEs that are there."""
    c = cq_row_at(cq)
    c.armed = 0
    c.told_pi = c.pi
    raise_event(nic, c.channel, c.cookie, EventType.COMPLETION, c.cqn, 0)


@device_function
def notify(nic, cq, solicited):
    """Raise an event for a CQE that was just written, if the CQ is armed for it. This disarms the CQ."""
    c = cq_row_at(cq)
    if solicited:
        c.solicited_pi = c.pi
    if c.armed == _ANY or (solicited and c.armed == _SOLICITED):
        _complete(nic, cq)


@engine_function
def _arm(nic, cq):
    """Arm a CQ as its arm record requests. If the CQE that it asks for is already there, raise the event at once.

    But not for CQEs that the last event has told of: a program asks for the next event before it polls (as the man page
    of ibv_get_cq_event recommends), so its consumer index is from before.

    The same word again is the same request. A request for any completion stays in force when one for solicited
    completions follows (IBTA 11.4.2.2).
    """
    c = cq_row_at(cq)
    word = be32(ld_acquire32(c.dbrec + CQ_DBREC.arm))
    if word == c.arm_seen:
        return
    c.arm_seen = word
    wanted = _SOLICITED if word & CQ_ARM_SOLICITED else _ANY
    written = c.solicited_pi if wanted == _SOLICITED else c.pi
    unseen = (written - word) & CI_MASK
    if 0 < unseen <= CI_MASK >> 1 and written > c.told_pi:
        _complete(nic, cq)
    elif c.armed < wanted:
        c.armed = wanted


@engine_function
def serve_arm_register(nic, page):
    """Serve the register of a UAR page that arms CQs. Return 1 if it was rung.

    The register says which CQ to arm. The request itself is read from the arm record, which may ask for more meanwhile.
    If another worker serves the CQ, the others look at their arm records.
    """
    register = page + UAR_CQ_OFFSET
    if ld_relaxed64(register) == 0:
        return 0
    cqn = be64(exchange_gpu64(register, 0)) & 0xFFFFFF
    n = nic_at(nic)
    cq = n.cqs + (cqn & n.cq_mask) * CQ_ROW.size
    if cqn == 0 or cq_row_at(cq).cqn != cqn:
        return 1
    if cq_row_at(cq).worker == nic:
        _arm(nic, cq)
        return 1
    other = worker_at(nic).next
    while other != 0:
        st_release64(other + WORKER.arms_rung, worker_at(other).arms_rung + 1)
        other = worker_at(other).next
    return 1


@engine_function
def hear_arm_registers(nic):
    """Look at the arm records if the first worker has served a register for a CQ of another worker."""
    n = worker_at(nic)
    rung = ld_acquire64(nic + WORKER.arms_rung)
    if rung != n.arms_seen:
        n.arms_seen = rung
        scan_arm_records(nic)


@engine_function
def scan_arm_records(nic):
    """Check the arm records of this worker's CQs: concurrent writes to one register overwrite each other.

    A record that always was 0 was not written.
    """
    n = nic_at(nic)
    for i in range(ld_relaxed64(n.armable)):
        cq = ld_relaxed64(n.armable + 8 + 8 * i)
        c = cq_row_at(cq)
        if c.worker == nic and (c.arm_seen > 0 or ld_acquire32(c.dbrec + CQ_DBREC.arm) != 0):
            _arm(nic, cq)
