"""Queue pairs: their rows, the WQEs in flight, and the READs and atomics accepted.

Inside the engine, PSNs count packets in 64 bits and never wrap; a packet carries the low 24 bits (IBTA 9.7.2). Indices
of WQEs count basic blocks of 64 bytes and never wrap, either. Times are in nanoseconds of the engine's clock.
"""

from __future__ import annotations


from ...jit.compile import device_function
from ...jit.struct_view import View, struct_view
from .record import record

MAX_RD_ATOMIC = 16  # READs and atomics in flight in one direction of a QP
EXTENDED_ATOMICS = 1 << 8  # of QP_ROW.rights

QP_FIELDS = """
    # set-up: from the creation on
    qpn            i64      command    number of the QP; 0 in a free row
    state          i64      engine     formats.commands.QpState; commands ask for it, and a failure sets ERR
    service        i64      command    formats.commands.ServiceType; that of QP 1 is UD
    pdn            i64      command    number of its protection domain
    sq_addr        i64      command    address of the send queue's ring; 0 if it has none
    sq_log         i64      command    binary logarithm of its basic blocks
    rq_addr        i64      command    address of the receive queue's ring; 0 if it has none
    rq_log         i64      command    binary logarithm of its WQEs
    rq_stride      i64      command    bytes of a receive WQE
    dbrec          i64      command    address of the doorbell record
    doorbell       i64      command    address of the doorbell line, which a kernel or a poster writes
    send_cq        i64      command    address of the send queue's CQ_ROW
    recv_cq        i64      command    address of the receive queue's CQ_ROW
    user_index     i64      command    what CQEs carry to identify the QP
    srq            i64      command    address of the SRQ_ROW; 0 if receives have a queue of their own
    flights        i64      command    address of a FLIGHT for each basic block of the send queue
    resources      i64      command    address of MAX_RD_ATOMIC rows of RESOURCE (IBTA 9.7.4.1.3)
    no_dbr         i64      command    not 0: rings carry the index, and the doorbell record is not written
    core_direct    i64      command    not 0: the QP may wait for other QPs' completions (WAIT)
    mmo            i64      command    not 0: the QP may copy local memory (MMO)
    cs_res         i64      command    formats.commands.ScatterToCqe of small receives
    cs_req         i64      command    formats.commands.ResponsesToCqe of small READs and of atomics
    kind           i64      command    QueueKind of its send queue (state/work_queue.py)
    worker         i64      engine     address of the WORKER that serves it
    work_queue     i64      engine     address of its WORK_QUEUE
    channel        i64      host       address of the CHANNEL for its events; 0 if nobody has subscribed
    cookie         i64      host       what events carry to identify the subscriber
    events         i64      host       a bit for each formats.events.EventType that `channel` receives
    # set-up: the connection, which 2RST clears
    q_key          i64      command    of UD: the Q_Key of what it takes (IBTA 10.2.5)
    rights         i64      command    remote rights, of enums.Access, and EXTENDED_ATOMICS if the atomic mode has those
    remote_qpn     i64      command    number of the peer
    remote_row     i64      command    address of the peer's QP_ROW if it is a QP of this NIC; else 0
    wire           i64      command    address of the WIRE to the peer; 0 inside a NIC
    peer_high      i64      command    first half of the peer's GID, as on the wire
    peer_low       i64      command    second half
    source         i64      command    index of its own GID, as the wire knows it
    egress         i64      command    `source` of its frames (fabric/frames.py)
    dlid           i64      command    LID of the peer, on InfiniBand
    sl             i64      command    service level, on InfiniBand
    grh            i64      command    not 0: packets have a GRH, on InfiniBand
    mtu            i64      command    bytes of payload in a packet, at most
    msg_max        i64      command    bytes of an incoming message, at most
    sq_psn         i64      command    PSN of the first request that it sends
    rq_psn         i64      command    PSN of the first request that it expects
    max_rd         i64      command    READs and atomics that it may have in flight
    max_dest_rd    i64      command    READs and atomics that the peer may have in flight
    timeout_ns     i64      command    time without an acknowledgement until a retry; 0 is for ever
    retry_cnt      i64      command    retries without progress, at most
    rnr_retry      i64      command    retries after an RNR NAK, at most; 7 is any number
    min_rnr        i64      command    time that a peer waits after an RNR NAK
    min_rnr_code   i64      command    the same as IBTA encodes it (9.7.5.2.8)
    drain          i64      command    not 0: SQD is requested, and sq_pi stays where WQEs were started
    peer_keys      i64      command    address of the MKEY_ROWs of a peer that is reached without packets; 0: it is not
    peer_tag       i64      command    upper half of the keys there
    peer_pdn       i64      command    protection domain of that peer
    peer_rights    i64      command    its `rights`
    peer_max       i64      command    its `msg_max`
    # requester: queue positions
    sq_ci          i64      requester  index of the oldest WQE that is not complete
    sq_next        i64      requester  index of the next WQE to send or execute
    sq_sent        i64      requester  index behind the WQEs that were started at least once
    sq_pi          i64      requester  index behind the WQEs that were announced
    db_seen        i64      requester  value of the doorbell that was taken last
    una_psn        i64      requester  the oldest PSN that is not acknowledged
    tx_psn         i64      requester  the next PSN to send
    end_psn        i64      requester  the next PSN that no WQE has yet
    # requester: retries
    high_psn       i64      requester  tx_psn before it last went back
    gap_psn        i64      requester  1 + the PSN at which a missing response was last requested again
    timer_at       i64      requester  when to retry unless an acknowledgement comes; 0 if no timer runs
    retry_at       i64      requester  when to send again after an RNR NAK; 0 if it need not wait
    retries        i64      requester  retries since the last progress
    rnr_retries    i64      requester  retries after RNR NAKs since the last progress
    fast_timer     i64      requester  time of the shorter timer after a NAK; 0 if it does not run
    window_cut     i64      requester  packets by which losses have narrowed the window
    # requester: READs and atomics, life, failures
    reads_head     i64      requester  READs and atomics that were sent
    reads_tail     i64      requester  READs and atomics that were answered
    life           i64      requester  this QP's life as a requester, from RTS to its reset (fabric/frames.py)
    ssn            i64      requester  requests that were started
    failed         i64      engine     not 0: the QP has failed, and the cause was reported
    told           i64      requester  not 0: a CQE has told of the first error
    late           i64      requester  in SQD: 1 + the index that was announced since
    sq_drained     i64      requester  in SQD: not 0 once all started WQEs have completed
    missing        i64      requester  1 + the index of the WQE that was announced before it came
    missing_since  i64      requester  when that was seen first
    copied         i64      requester  bytes that earlier turns have copied of the MMO at sq_next
    # responder
    rq_ci          i64      responder  receives that were consumed from its own queue
    expect_psn     i64      responder  the next PSN of a request, 24 bits
    msn            i64      responder  requests that were completed (IBTA 9.7.5.1.3)
    rx_kind        i64      responder  the message that has begun but not ended (transport/responder.py)
    rx_nbytes      i64      responder  of a WRITE: its bytes
    rx_done        i64      responder  bytes of the message that have arrived
    rx_addr        i64      responder  of a WRITE: where it begins, a virtual address
    rx_key         i64      responder  of a WRITE: its rkey
    rx_wqe         i64      responder  address of the receive that was taken from the SRQ for the message; 0 is none
    rx_index       i64      responder  index of that receive
    rx_from        i64      responder  packets before this position on the wire are from before RTR
    peer_life      i64      responder  life of the peer that it hears; 0 if it has not heard any
    nak_sent       i64      responder  not 0: a NAK for the present gap was sent
    established    i64      responder  not 0: COMM_EST was raised
    drained        i64      responder  not 0: SRQ_LAST_WQE was raised
    pending        i64      responder  not 0: the QP is in WORKER.pending
    ack_pending    i64      responder  not 0: an acknowledgement is to be sent
    ack_syndrome   i64      responder  its AETH syndrome
    ack_psn        i64      responder  its PSN, 24 bits
    res_head       i64      responder  READs and atomics that were accepted
    res_todo       i64      responder  not 0: responses to some of them are left to send
    # copies: payload in device memory
    stream         i64      dma        address of the DMA_STREAM that carries bytes for the QP; 0 if none does
    fence          i64      dma        position of that stream behind the QP's bytes
    failures       i64      dma        failures of that stream before these bytes
    fence_psn      i64      dma        on a wire: the first packet of these bytes
    landing        i64      dma        inside a NIC, not 0: the engine has to put these bytes into host memory
    # requests in packets, which are not served on borrowed rows (gpu/borrowed.py)
    read_ends      i64[16]  requester  the PSNs behind READs and atomics in flight, from reads_tail to reads_head"""
QP_ROW = record("qp_row", QP_FIELDS)
QP_SETUP_BYTES = QP_ROW.sq_ci  # what commands prepare, and the engine copies
QP_BORROWED_BYTES = QP_ROW.read_ends  # what slices copy
QP_CONNECTION = tuple(name for name, offset in QP_ROW.offsets.items() if QP_ROW.rights <= offset < QP_SETUP_BYTES)
qp_row_at: View = struct_view(QP_ROW)

# A started WQE, at the slot of its first block: its packets, for acknowledgements and retransmissions.
FLIGHT = record("flight", """
    first          i64      requester  its first PSN
    packets        i64      requester  how many PSNs it takes
    nbytes         i64      requester  bytes of payload
    opcode         i64      requester  formats.wqe.WqeOpcode
    ce             i64      requester  formats.wqe.CompletionMode
    ds             i64      requester  its size, in segments of 16 bytes
    blocks         i64      requester  its size, in basic blocks
    fence          i64      dma        inside a NIC: position of the stream behind its copies (transport/moving.py)
""")
flight_at: View = struct_view(FLIGHT)


@device_function
def flight_of(row, index):
    """Return the address of the FLIGHT of the WQE that starts at `index`."""
    q = qp_row_at(row)
    return q.flights + (index & ((1 << q.sq_log) - 1)) * FLIGHT.size


# A READ or atomic that the responder has accepted.
RESOURCE = record("resource", """
    opcode         i64      responder  formats.wqe.WqeOpcode
    first          i64      responder  PSN of the response's first packet, 24 bits
    packets        i64      responder  packets of the response
    va             i64      responder  of a READ: where it begins, a virtual address
    rkey           i64      responder  of a READ: its key
    nbytes         i64      responder  of a READ: its bytes; of an atomic: the value that it has found
    next           i64      responder  packets of the response that were sent
    todo           i64      responder  packets of the response that are left to send
    answered       i64      responder  not 0: all packets were sent at least once
    serial         i64      responder  number of the READ or atomic, unique to the QP
""")
resource_at: View = struct_view(RESOURCE)
