"""Completion queues, event queues, and the channels in which events wait for their subscribers (PRM, event queues)."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

CQ_ROW = record("cq_row", """
    # set-up
    cqn            i64      command    number of the CQ; 0 in a free row
    addr           i64      command    address of the last 64 bytes of the first CQE, in which all its fields are
    log            i64      command    binary logarithm of the CQEs
    shift          i64      command    binary logarithm of the bytes of a CQE
    dbrec          i64      command    address of the doorbell record: consumer index and arm record
    overrun        i64      command    not 0: a CQE overwrites one that was not consumed (cqe overrun ignore)
    collapsed      i64      command    not 0: every CQE goes to the same slot
    eqn            i64      command    number of its event queue
    uar_page       i64      command    number of the UAR page with the register that arms it
    worker         i64      command    address of the WORKER that serves it
    channel        i64      host       address of the CHANNEL for its completions; 0 if nobody has subscribed
    cookie         i64      host       what these events carry to identify the subscriber
    error_channel  i64      host       the same for its errors
    error_cookie   i64      host       the same for its errors
    near           i64      command    not 0: its ring is in memory of the GPU that makes the NIC's turns
    wakeup         i64      host       address of the word at which a thread naps that waits for CQEs; 0 if none does
    # state
    pi             i64      engine     CQEs that were written
    error          i64      engine     not 0: it has overrun, and takes no more CQEs
    armed          i64      engine     1: a solicited completion raises an event; 2: any does (queues/events.py)
    arm_seen       i64      engine     the last request to arm it that was taken (formats/doorbell.py); -1 is none
    solicited_pi   i64      engine     CQEs up to the last solicited one
    told_pi        i64      engine     CQEs that were there when the last event was raised
    failed         i64      engine     not 0: an operation has failed since a queue of the CQ was last reset
    failed_from    i64      engine     index of the error CQE that was first then
    failed_to      i64      engine     CQEs up to the reset that ended this, while `failed` is 0
    waking         i64      engine     the next CQ_ROW whose thread is woken at the end of the turn (queues/wakeups.py)
""")
cq_row_at: View = struct_view(CQ_ROW)

# Event queues interrupt nobody. They count.
EQ_ROW = record("eq_row", """
    eqn            i64      nobody     number of the event queue; 0 in a free row
    pi             i64      engine     completion events of its CQs
""")

# `unheard` events are in the ring, but not counted in the descriptor yet.
CHANNEL = record("channel", """
    # both ends
    fd             i64      nobody     eventfd that counts the events in the ring
    unheard        i64      engine     events to add to it at the end of a turn
    lost           i64      engine     events that found the ring full
    # the ring
    ring           raw[192] engine     fabric.ring.RING of EVENTs; the reader moves its tail
""")
channel_at: View = struct_view(CHANNEL)

EVENT = record("event", """
    cookie         i64      engine     the subscriber's
    type           i64      engine     formats.events.EventType
    number         i64      engine     number of the object
    syndrome       i64      engine     of a CQ error: formats.events.CqErrorSyndrome
""", align=32)
event_at: View = struct_view(EVENT)
