"""Completion queues, event queues, and the channels in which events wait for their subscribers (PRM, event queues)."""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from .record import State, command, engine, host, nobody


class CqRow(State):
    """A completion queue."""

    # set-up
    cqn: I64 = command("number of the CQ; 0 in a free row")
    addr: I64 = command("address of the last 64 bytes of the first CQE, in which all its fields are")
    log: I64 = command("binary logarithm of the CQEs")
    shift: I64 = command("binary logarithm of the bytes of a CQE")
    dbrec: I64 = command("address of the doorbell record: consumer index and arm record")
    overrun: I64 = command("not 0: a CQE overwrites one that was not consumed (cqe overrun ignore)")
    collapsed: I64 = command("not 0: every CQE goes to the same slot")
    eqn: I64 = command("number of its event queue")
    uar_page: I64 = command("number of the UAR page with the register that arms it")
    worker: I64 = command("address of the WORKER that serves it")
    channel: I64 = host("address of the CHANNEL for its completions; 0 without a subscriber")
    cookie: I64 = host("what these events carry to identify the subscriber")
    error_channel: I64 = host("the same for its errors")
    error_cookie: I64 = host("the same for its errors")
    near: I64 = command("not 0: its ring is in memory of the GPU that makes the NIC's turns")
    wakeup: I64 = host("address of the word on which a thread sleeps until CQEs arrive; 0 if none does")
    # state
    pi: I64 = engine("CQEs that were written", line=True)
    error: I64 = engine("not 0: it has overrun, and takes no more CQEs")
    armed: I64 = engine("1: a solicited completion raises an event; 2: any does (queues/events.py)")
    arm_seen: I64 = engine("the last arm request that was served (formats/doorbell.py); -1 is none")
    solicited_pi: I64 = engine("CQEs up to the last solicited one")
    told_pi: I64 = engine("CQEs that were there when the last event was raised")
    failed: I64 = engine("not 0: an operation has failed since a queue of the CQ was last reset")
    failed_from: I64 = engine("index of the error CQE that was first then")
    failed_to: I64 = engine("CQEs up to the reset that ended this, while `failed` is 0")
    waking: I64 = engine("the next CQ_ROW whose thread is woken at the end of the turn (queues/wakeups.py)")


CQ_ROW = CqRow.entry


class EqRow(State):
    """An event queue. It raises no interrupts: it counts."""

    eqn: I64 = nobody("number of the event queue; 0 in a free row")
    pi: I64 = engine("completion events of its CQs")


EQ_ROW = EqRow.entry


class Channel(State):
    """A ring of events, and the descriptor that a subscriber waits for.

    `unheard` events are in the ring, but not counted in the descriptor yet.
    """

    # both ends
    fd: I64 = nobody("eventfd that counts the events in the ring")
    unheard: I64 = engine("events to add to it at the end of a turn")
    lost: I64 = engine("events that found the ring full")
    # the ring
    ring: Annotated[int, "raw[192]"] = engine("fabric.ring.RING of EVENTs; the reader moves its tail", line=True)


CHANNEL = Channel.entry


class Event(State, align=32):
    """An event in a channel."""

    cookie: I64 = engine("the subscriber's")
    type: I64 = engine("formats.events.EventType")
    number: I64 = engine("number of the object")
    syndrome: I64 = engine("of a CQ error: formats.events.CqErrorSyndrome")


EVENT = Event.entry
