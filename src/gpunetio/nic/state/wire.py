"""Wires of a NIC, and the memory that NICs lend each other across them."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

WIRE = record("wire", """
    kind           i64      command    a number of transport/wire_kinds.py; 0 in a free row
    broken         i64      engine     not 0: the peer is gone or broke the rules, and packets are lost. Commands set it
    window         i64      command    packets that a QP may have in flight
    infiniband     i64      command    not 0: packets begin with an LRH
    faults         i64      command    address of the FAULTS that change what is sent (fabric/injector.py); 0 is none
    medium         i64      command    address of the kind's own record: UDP_WIRE, ETHERNET_WIRE; 0 for pipes
    wake_fd        i64      command    wakes the peer's engine (fabric/notifier.py); 0 if none sleeps there
    woken          i64      engine     position in `tx` up to which the peer was woken
    # ends
    here_high      i64      command    first half of this end's GID, as on the wire
    here_low       i64      command    second half
    peer_high      i64      command    first half of the peer's GID; all 0 if the wire leads to any number of peers
    peer_low       i64      command    second half
    grants         i64      command    address of GRANTS rows of GRANT; 0 if the peer takes no part in lending
    whole_frames   i64      command    not 0: captures show what is on the wire, not what QPs send
    segments       i64      command    not 0: takes a TSO as one frame, with a VIRTIO_NET before it (fabric/frames.py)
    takes_frames   i64      command    address of the peer's PIPE.takes_frames; 0 if the wire is not of the LAN
    withdrawn      i64      command    PIPE.withdrawn of `rx` when the peer was heard of last (control/regions/reach.py)
    failed         i64      command    PIPE.failed of `rx` then
    answered       i64      engine     PIPE.answered of `rx`
    # pipes
    tx             raw[64]  engine     PIPE_END of what the NIC sends (fabric/frames.py)
    rx             raw[64]  engine     PIPE_END of what arrives; zeros if frames do not arrive in a pipe
""")
wire_at: View = struct_view(WIRE)

# The low bits of a grant's number select its row. Commands write `number`, `address` and `nbytes` together.
GRANT = record("grant", """
    number         i64      command    number of the grant of the peer's memory; 0 in a free row
    address        i64      command    where that memory is mapped here
    nbytes         i64      command    its size, in bytes
    mapped         i64      command    number of the grant of this NIC's memory that the peer has mapped; 0 is none
""", align=32)
GRANTS = 256
grant_at: View = struct_view(GRANT)
