"""Ethernet queues, and what decides which packets they send and receive.

The control path keeps these rows up to date.
"""

from __future__ import annotations

from ...jit.struct_view import View, struct_view
from .qp import QP_FIELDS
from .record import record

TRANSPORT_DOMAIN_ROW = record("transport_domain_row", """
    transport_domain i64    command    number of the transport domain; 0 in a free row
""")

Q_COUNTER_ROW = record("q_counter_row", """
    # set-up
    counter_set_id i64      command    number of the Q counter; 0 in a free row
    # state
    out_of_buffer  i64      engine     packets that found no receive WQE. Commands set it to 0
""")

TIS_ROW = record("tis_row", """
    tisn           i64      command    number of the TIS; 0 in a free row
    transport_domain i64    command    number of its transport domain
    prio           i64      command    priority of its packets
""")

# The engine serves an SQ as the send queue of a QP that has no transport: a row begins with the fields of QP_ROW. Of
# these an SQ has those of the set-up that send queues have, `wire` (0: the NICs of this host), `mtu` (bytes of the
# link's), and of the requester the queue positions and `failed`, `told`, `missing`. Its `state` is RST, RTS, which is
# RDY, or ERR.
SQ_ROW = record("sq_row", QP_FIELDS + """
    # set-up of an SQ
    tis            i64      command    address of its TIS_ROW
    inline_mode    i64      command    formats.ethernet_queues.InlineMode: the headers that its WQEs must contain
    multi_packet   i64      command    not 0: a WQE may hold several packets (ENHANCED_MPSW)
    flush          i64      command    not 0: in ERR, its WQEs complete with flush errors
    real_time      i64      command    not 0: its times are of day: in CQEs, and to wait for
    # state of an SQ, which RST clears
    packets        i64      requester  packets of the WQE at hand that were sent
    wait_until     i64      requester  when the WAIT at hand ends, in ns of the engine's clock; 0: it is for no time
    # counts of an SQ since it was created
    frames         i64      requester  frames that it has sent
    frame_bytes    i64      requester  bytes of frames that it has sent
""")
SQ_STATE, SQ_COUNTS = SQ_ROW.packets, SQ_ROW.frames  # where the state and the counts of an SQ begin

RQ_ROW = record("rq_row", """
    # set-up
    rqn            i64      command    number of the RQ; 0 in a free row
    state          i64      engine     formats.ethernet_queues.QueueState; commands ask for it, and a failure sets ERR
    user_index     i64      command    what CQEs carry to identify the RQ
    pdn            i64      command    number of its protection domain
    cq             i64      command    address of its CQ_ROW
    srq            i64      command    address of the SRQ_ROW with its WQEs; 0 if it has a ring of its own
    wq_type        i64      command    formats.commands.WqType
    addr           i64      command    address of the ring
    log            i64      command    binary logarithm of its WQEs
    stride         i64      command    bytes of a WQE
    dbrec          i64      command    address of the doorbell record
    strides        i64      command    of a striding queue: strides in the buffer of a WQE, else 0
    stride_bytes   i64      command    of a striding queue: bytes of a stride
    padding        i64      command    bytes that stay free before each packet: 0 or 2
    keep_vlan      i64      command    not 0: a VLAN tag stays in the packet
    flush          i64      command    not 0: in ERR, its WQEs complete with flush errors
    counter        i64      command    address of the Q_COUNTER_ROW that counts its drops; 0 is none
    channel        i64      host       address of the CHANNEL for its events; 0 if nobody has subscribed
    cookie         i64      host       what events carry to identify the subscriber
    events         i64      host       a bit for each formats.events.EventType that `channel` receives
    # state, which RST clears, and from `frames` on counts since the RQ was created
    consumed       i64      responder  WQEs of its own ring that were consumed
    next           i64      responder  of linked WQEs: index of the next one
    used           i64      responder  strides of the next WQE that were used
    frames         i64      responder  frames that were placed
    frame_bytes    i64      responder  bytes of frames that were placed, without VLAN tags that were taken out
    no_buffer      i64      responder  frames dropped: no receive was posted
    too_long       i64      responder  frames dropped: longer than their receive
    not_ready      i64      responder  frames dropped: the RQ was not in RDY, or they failed it
""")
RQ_SETUP_BYTES = RQ_ROW.consumed  # what commands prepare, and the engine copies
RQ_COUNTS = RQ_ROW.frames  # where the counts begin

RQT_ROW = record("rqt_row", """
    rqtn           i64      command    number of the RQT; 0 in a free row
    count          i64      command    entries in use, a power of two
    rqs            i64      command    address of the entries: addresses of RQ_ROWs
""")

# The hash takes source and destination address, then source and destination port, as far as they are selected.
TIR_ROW = record("tir_row", """
    tirn           i64      command    number of the TIR; 0 in a free row
    transport_domain i64    command    number of its transport domain
    rq             i64      command    address of the RQ_ROW that gets the packets; 0 if a hash selects it
    rqt            i64      command    address of the RQT_ROW in which the hash selects; 0 if it has one RQ
    hash_fn        i64      command    formats.ethernet_queues.RxHashFn; NONE is a hash of 0
    symmetric      i64      command    not 0: both directions of a connection have the same hash
    l3_prot        i64      command    formats.ethernet_queues.L3Prot of the packets that it hashes
    l4_prot        i64      command    formats.ethernet_queues.L4Prot of the packets whose ports it hashes
    fields         i64      command    formats.ethernet_queues.HashField: what is hashed
    self_lb_block  i64      command    formats.ethernet_queues.SelfLbBlock: packets of its own transport domain to drop
    toeplitz       i64      command    address of the table of the key (steering/rss.py); 0 if there is no hash
    key            raw[40]  command    of TOEPLITZ: the key
""")
q_counter_row_at: View = struct_view(Q_COUNTER_ROW)
rq_row_at: View = struct_view(RQ_ROW)
rqt_row_at: View = struct_view(RQT_ROW)
sq_row_at: View = struct_view(SQ_ROW)
tir_row_at: View = struct_view(TIR_ROW)
tis_row_at: View = struct_view(TIS_ROW)
