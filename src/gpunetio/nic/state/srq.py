"""Shared receive queues, which the PRM calls receive memory pools."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

# WQEs are taken first from `returned`, an array of those whose QP ended before it used them, and then at `next`.
SRQ_ROW = record("srq_row", """
    # set-up
    srqn           i64      command    number of the queue; 0 in a free row
    pdn            i64      command    number of its protection domain
    addr           i64      command    address of the ring
    log            i64      command    binary logarithm of its WQEs
    stride         i64      command    bytes of a WQE
    dbrec          i64      command    address of the doorbell record
    linked         i64      command    not 0: the segment at a WQE's start says which is the next
    header         i64      command    bytes at a WQE's start before its data segments
    returned       i64      command    address of an array of indices, one for each WQE
    channel        i64      host       address of the CHANNEL for its events; 0 if nobody has subscribed
    cookie         i64      host       what events carry to identify the subscriber
    limit          i64      responder  an event is raised when fewer WQEs are left; 0 is none. Commands set it
    # state
    taken          i64      responder  WQEs that were taken at `next`
    next           i64      responder  index of the next WQE
    returned_count i64      responder  indices in `returned`
""")
srq_row_at: View = struct_view(SRQ_ROW)
