"""Shared receive queues, which the PRM calls receive memory pools."""

from __future__ import annotations

from ...formats.layout import I64
from .record import State, command, host, responder


class SrqRow(State):
    """A shared receive queue.

    WQEs are taken first from `returned`, an array of those whose QP ended before it used them, and then at `next`.
    """

    # set-up
    srqn: I64 = command("number of the queue; 0 in a free row")
    pdn: I64 = command("number of its protection domain")
    addr: I64 = command("address of the ring")
    log: I64 = command("binary logarithm of its WQEs")
    stride: I64 = command("bytes of a WQE")
    dbrec: I64 = command("address of the doorbell record")
    linked: I64 = command("not 0: the segment at a WQE's start says which is the next")
    header: I64 = command("bytes at a WQE's start before its data segments")
    returned: I64 = command("address of an array of indices, one for each WQE")
    channel: I64 = host("address of the CHANNEL for its events; 0 without a subscriber")
    cookie: I64 = host("what events carry to identify the subscriber")
    limit: I64 = responder("an event is raised when fewer WQEs are left; 0 is none. Commands set it")
    # state
    taken: I64 = responder("WQEs that were taken at `next`", line=True)
    next: I64 = responder("index of the next WQE")
    returned_count: I64 = responder("indices in `returned`")


SRQ_ROW = SrqRow.entry
