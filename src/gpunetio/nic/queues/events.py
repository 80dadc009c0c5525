"""Events: the engine puts them into the channels that subscribed, and arms CQs to raise them (PRM, event queues)."""

from __future__ import annotations

from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, be64, exchange64, ld64, ld_acquire32, ld_relaxed64, st64
from ...fabric.ring import next_free, publish
from ...formats.cqe import CI_MASK
from ...formats.doorbell import CQ_ARM_SOLICITED, CQ_DBREC, UAR_CQ_OFFSET
from ...formats.events import EventType
from ..state.cq import CHANNEL, CQ_ROW, channel_at, cq_row_at, event_at
from ..state.nic import nic_at
from ..state.worker import worker_at
from ..state.qp import qp_row_at

_ANY, _SOLICITED = 2, 1  # CQ_ROW.armed: the larger value includes the smaller


@engine_function
def raise_event(nic, channel, cookie, kind, number, syndrome):
    """Put an event into a channel, if there is one. The channel's descriptor is written at the end of the turn."""
    if channel == 0:
        return
    c = channel_at(channel)
    slot = next_free(channel + CHANNEL.ring)
    if slot == 0:
        c.lost += 1
        return
    e = event_at(slot)
    e.cookie, e.type, e.number, e.syndrome = cookie, kind, number, syndrome
    publish(channel + CHANNEL.ring)
    if c.unheard == 0:
        n = worker_at(nic)
        st64(n.ringing + 8 * n.ringing_count, channel)
        n.ringing_count += 1
    c.unheard += 1


@device_function
def tell(nic, row, kind):
    """Raise an event of a QP if its channel has subscribed to this type."""
    q = qp_row_at(row)
    if q.events >> kind & 1:
        raise_event(nic, q.channel, q.cookie, kind, q.qpn, 0)


@device_function
def notify(nic, cq, solicited):
    """Raise an event for a CQE that was just written, if the CQ is armed for it. This disarms the CQ."""
    c = cq_row_at(cq)
    if solicited:
        c.solicited_pi = c.pi
    if c.armed == _ANY or (solicited and c.armed == _SOLICITED):
        c.armed = 0
        raise_event(nic, c.channel, c.cookie, EventType.COMPLETION, c.cqn, 0)


@engine_function
def _arm(nic, cq):
    """Arm a CQ as its arm record requests. If the CQE that it asks for is already there, raise the event at once.

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
    if 0 < unseen <= CI_MASK >> 1:
        c.armed = 0
        raise_event(nic, c.channel, c.cookie, EventType.COMPLETION, c.cqn, 0)
    elif c.armed < wanted:
        c.armed = wanted


@engine_function
def serve_arm_register(nic, page):
    """Serve the register of a UAR page that arms CQs. Return 1 if it was rung.

    The register says which CQ to arm. The request itself is read from the arm record, which may ask for more meanwhile.
    """
    register = page + UAR_CQ_OFFSET
    if ld_relaxed64(register) == 0:
        return 0
    cqn = be64(exchange64(register, 0)) & 0xFFFFFF
    n = nic_at(nic)
    cq = n.cqs + (cqn & n.cq_mask) * CQ_ROW.size
    if cqn != 0 and cq_row_at(cq).cqn == cqn:
        _arm(nic, cq)
    return 1


@engine_function
def scan_arm_records(nic):
    """Check the arm record of every CQ with a channel: concurrent writes to one register overwrite each other."""
    n = worker_at(nic)
    for i in range(n.armable_count):
        cq = ld64(n.armable + 8 * i)
        if ld_acquire32(cq_row_at(cq).dbrec + CQ_DBREC.arm) != 0:  # it was written
            _arm(nic, cq)
