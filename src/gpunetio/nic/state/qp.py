"""Queue pairs: their rows, the WQEs in flight, and the READs and atomics accepted.

Inside the engine, PSNs count packets in 64 bits and never wrap; a packet carries the low 24 bits (IBTA 9.7.2). Indices
of WQEs count basic blocks of 64 bytes and never wrap, either. Times are in nanoseconds of the engine's clock.
"""

from __future__ import annotations

from typing import Annotated

from ...formats.layout import I64
from ...jit.compile import device_function
from .record import State, command, dma, engine, host, requester, responder

MAX_RD_ATOMIC = 16  # READs and atomics in flight in one direction of a QP
EXTENDED_ATOMICS = 1 << 8  # of QP_ROW.rights


class QpRow(State):
    """A queue pair: its set-up, and the state of its requester and its responder."""

    # set-up: from the creation on
    qpn: I64 = command("number of the QP; 0 in a free row")
    state: I64 = engine("formats.commands.QpState; commands ask for it, and a failure sets ERR")
    service: I64 = command("formats.commands.ServiceType; that of QP 1 is UD")
    pdn: I64 = command("number of its protection domain")
    sq_addr: I64 = command("address of the send queue's ring; 0 if it has none")
    sq_log: I64 = command("binary logarithm of its basic blocks")
    rq_addr: I64 = command("address of the receive queue's ring; 0 if it has none")
    rq_log: I64 = command("binary logarithm of its WQEs")
    rq_stride: I64 = command("bytes of a receive WQE")
    dbrec: I64 = command("address of the doorbell record")
    doorbell: I64 = command("address of the doorbell line, which a kernel or a poster writes")
    send_cq: I64 = command("address of the send queue's CQ_ROW")
    recv_cq: I64 = command("address of the receive queue's CQ_ROW")
    user_index: I64 = command("what CQEs carry to identify the QP")
    srq: I64 = command("address of the SRQ_ROW; 0 if receives have a queue of their own")
    flights: I64 = command("address of a FLIGHT for each basic block of the send queue")
    resources: I64 = command("address of MAX_RD_ATOMIC rows of RESOURCE (IBTA 9.7.4.1.3)")
    no_dbr: I64 = command("not 0: rings carry the index, and the doorbell record is not written")
    core_direct: I64 = command("not 0: the QP may wait for other QPs' completions (WAIT)")
    mmo: I64 = command("not 0: the QP may copy local memory (MMO)")
    cs_res: I64 = command("formats.commands.ScatterToCqe of small receives")
    cs_req: I64 = command("formats.commands.ResponsesToCqe of small READs and of atomics")
    kind: I64 = command("QueueKind of its send queue (state/work_queue.py)")
    worker: I64 = engine("address of the WORKER that serves it")
    work_queue: I64 = engine("address of its WORK_QUEUE")
    channel: I64 = host("address of the CHANNEL for its events; 0 without a subscriber")
    cookie: I64 = host("what events carry to identify the subscriber")
    events: I64 = host("a bit for each formats.events.EventType that `channel` receives")
    # set-up: the connection, which 2RST clears
    q_key: I64 = command("of UD: the Q_Key of what it takes (IBTA 10.2.5)", line=True)
    rights: I64 = command("remote rights, of enums.Access, and EXTENDED_ATOMICS if the atomic mode has those")
    remote_qpn: I64 = command("number of the peer")
    remote_row: I64 = command("address of the peer's QP_ROW if it is a QP of this NIC; else 0")
    wire: I64 = command("address of the WIRE to the peer; 0 inside a NIC")
    peer_high: I64 = command("first half of the peer's GID, as on the wire")
    peer_low: I64 = command("second half")
    source: I64 = command("index of its own GID, as the wire knows it")
    egress: I64 = command("`source` of its frames (fabric/frames.py)")
    dlid: I64 = command("LID of the peer, on InfiniBand")
    sl: I64 = command("service level, on InfiniBand")
    grh: I64 = command("not 0: packets have a GRH, on InfiniBand")
    mtu: I64 = command("bytes of payload in a packet, at most")
    msg_max: I64 = command("bytes of an incoming message, at most")
    sq_psn: I64 = command("PSN of the first request that it sends")
    rq_psn: I64 = command("PSN of the first request that it expects")
    max_rd: I64 = command("READs and atomics that it may have in flight")
    max_dest_rd: I64 = command("READs and atomics that the peer may have in flight")
    timeout_ns: I64 = command("time without an acknowledgement until a retry; 0: never")
    retry_cnt: I64 = command("retries without progress, at most")
    rnr_retry: I64 = command("retries after an RNR NAK, at most; 7 is any number")
    min_rnr: I64 = command("time that a peer waits after an RNR NAK")
    min_rnr_code: I64 = command("the same as IBTA encodes it (9.7.5.2.8)")
    drain: I64 = command("not 0: SQD is requested, and sq_pi stays where WQEs were started")
    peer_keys: I64 = command("address of the MKEY_ROWs of a peer that is reached without packets; 0: it is not")
    peer_tag: I64 = command("upper half of the keys there")
    peer_pdn: I64 = command("protection domain of that peer")
    peer_rights: I64 = command("its `rights`")
    peer_max: I64 = command("its `msg_max`")
    # requester: queue positions
    sq_ci: I64 = requester("index of the oldest WQE that is not complete", line=True)
    sq_next: I64 = requester("index of the next WQE to send or execute")
    sq_sent: I64 = requester("index after the WQEs that were started at least once")
    sq_pi: I64 = requester("index after the WQEs that were announced")
    db_seen: I64 = requester("value of the doorbell that was taken last")
    una_psn: I64 = requester("the oldest PSN that is not acknowledged")
    tx_psn: I64 = requester("the next PSN to send")
    end_psn: I64 = requester("the next PSN that no WQE has yet")
    # requester: retries
    high_psn: I64 = requester("tx_psn before it last went back", line=True)
    gap_psn: I64 = requester("1 + the PSN at which a missing response was last requested again")
    timer_at: I64 = requester("when to retry unless an acknowledgement comes; 0 if no timer runs")
    retry_at: I64 = requester("when to send again after an RNR NAK; 0 if it need not wait")
    retries: I64 = requester("retries since the last progress")
    rnr_retries: I64 = requester("retries after RNR NAKs since the last progress")
    fast_timer: I64 = requester("time of the shorter timer after a NAK; 0 if it does not run")
    window_cut: I64 = requester("packets by which losses have narrowed the window")
    # requester: READs and atomics, life, failures
    reads_head: I64 = requester("READs and atomics that were sent", line=True)
    reads_tail: I64 = requester("READs and atomics that were answered")
    life: I64 = requester("this QP's life as a requester, from RTS to its reset (fabric/frames.py)")
    ssn: I64 = requester("requests that were started")
    failed: I64 = engine("not 0: the QP has failed, and the cause was reported")
    told: I64 = requester("not 0: a CQE has reported the first error")
    late: I64 = requester("in SQD: 1 + the index that was announced since")
    sq_drained: I64 = requester("in SQD: not 0 once all started WQEs have completed")
    missing: I64 = requester("1 + the index of the WQE that was announced before it arrived")
    missing_since: I64 = requester("when the WQE was first found missing")
    copied: I64 = requester("bytes that earlier turns have copied of the MMO at sq_next")
    # responder
    rq_ci: I64 = responder("receives that were consumed from its own queue", line=True)
    expect_psn: I64 = responder("the next PSN of a request, 24 bits")
    msn: I64 = responder("requests that were completed (IBTA 9.7.5.1.3)")
    rx_kind: I64 = responder("the message that has begun but not ended (transport/responder.py)")
    rx_nbytes: I64 = responder("of a WRITE: its bytes")
    rx_done: I64 = responder("bytes of the message that have arrived")
    rx_addr: I64 = responder("of a WRITE: where it begins, a virtual address")
    rx_key: I64 = responder("of a WRITE: its rkey")
    rx_wqe: I64 = responder("address of the receive that was taken from the SRQ for the message; 0 is none")
    rx_index: I64 = responder("index of that receive")
    rx_from: I64 = responder("packets before this position on the wire are from before RTR")
    peer_life: I64 = responder("life of the peer whose packets it accepts; 0 before the first packet")
    nak_sent: I64 = responder("not 0: a NAK for the present gap was sent")
    established: I64 = responder("not 0: COMM_EST was raised")
    drained: I64 = responder("not 0: SRQ_LAST_WQE was raised")
    pending: I64 = responder("not 0: the QP is in WORKER.pending")
    ack_pending: I64 = responder("not 0: an acknowledgement is to be sent")
    ack_syndrome: I64 = responder("its AETH syndrome")
    ack_psn: I64 = responder("its PSN, 24 bits")
    res_head: I64 = responder("READs and atomics that were accepted")
    res_todo: I64 = responder("not 0: responses to some of them are left to send")
    # copies: payload in device memory
    stream: I64 = dma("address of the DMA_STREAM that carries bytes for the QP; 0 if none does", line=True)
    fence: I64 = dma("position of that stream after the QP's bytes")
    failures: I64 = dma("failures of that stream before these bytes")
    fence_psn: I64 = dma("on a wire: the first packet of these bytes")
    landing: I64 = dma("inside a NIC, not 0: the engine has to copy these bytes on to host memory")
    # requests in packets, which are not served on cached rows (gpu/row_cache.py)
    read_ends: Annotated[int, "i64[16]"] = requester(
        "the PSNs after READs and atomics in flight, from reads_tail to reads_head", line=True
    )


QP_ROW = QpRow.entry
QP_SETUP_BYTES = QP_ROW.sq_ci  # what commands prepare, and the engine copies
QP_CACHED_BYTES = QP_ROW.read_ends  # what slices copy
QP_CONNECTION = tuple(name for name, offset in QP_ROW.offsets.items() if QP_ROW.rights <= offset < QP_SETUP_BYTES)


class Flight(State):
    """A WQE that has begun: its packets, for acknowledgements and retransmissions. It lies at the slot of its first
    block.
    """

    first: I64 = requester("its first PSN")
    packets: I64 = requester("how many PSNs it takes")
    nbytes: I64 = requester("bytes of payload")
    opcode: I64 = requester("formats.wqe.WqeOpcode")
    ce: I64 = requester("formats.wqe.CompletionMode")
    ds: I64 = requester("its size, in segments of 16 bytes")
    blocks: I64 = requester("its size, in basic blocks")
    fence: I64 = dma("inside a NIC: position of the stream behind its copies (transport/moving.py)")


FLIGHT = Flight.entry


@device_function
def flight_of(qp: QpRow, index: int) -> Flight:
    """Return the FLIGHT of the WQE that starts at `index`."""
    return Flight(qp.flights + (index & ((1 << qp.sq_log) - 1)) * FLIGHT.size)


class Resource(State):
    """A READ or atomic that the responder has accepted."""

    opcode: I64 = responder("formats.wqe.WqeOpcode")
    first: I64 = responder("PSN of the response's first packet, 24 bits")
    packets: I64 = responder("packets of the response")
    va: I64 = responder("of a READ: where it begins, a virtual address")
    rkey: I64 = responder("of a READ: its key")
    nbytes: I64 = responder("of a READ: its bytes; of an atomic: the value that it has found")
    next: I64 = responder("packets of the response that were sent")
    todo: I64 = responder("packets of the response that are left to send")
    answered: I64 = responder("not 0: all packets were sent at least once")
    serial: I64 = responder("number of the READ or atomic, unique to the QP")


RESOURCE = Resource.entry
