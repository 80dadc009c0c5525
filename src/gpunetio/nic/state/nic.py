"""The NIC's record, which says where everything is, and the records of what the NIC has refused."""

from __future__ import annotations

from ...formats.layout import I64
from .record import State, engine, nobody

# What the workers of a NIC share: set up before they start, and the same in all of them. A WORKER begins with a copy.

class NicState(State):
    """What the workers of a NIC share. It is set up before they start; each worker begins with a copy."""

    # tables
    qps: I64 = nobody("address of the QP_ROWs")
    qp_mask: I64 = nobody("selects a row by number")
    sqs: I64 = nobody("address of the SQ_ROWs")
    sq_mask: I64 = nobody("selects a row by number")
    cqs: I64 = nobody("address of the CQ_ROWs")
    cq_mask: I64 = nobody("selects a row by number")
    mkeys: I64 = nobody("address of the MKEY_ROWs")
    mkey_mask: I64 = nobody("selects a row by the upper 24 bits of a key")
    eqs: I64 = nobody("address of the EQ_ROWs")
    gids: I64 = nobody("address of the GID_ROWs")
    paths: I64 = nobody("address of the PATHs (path.py)")
    flow_tables: I64 = nobody("address of the FLOW_TABLE_ROWs (flow.py)")
    lookups: I64 = nobody("address of the sets of LOOKUPs (flow.py)")
    flow_cache: I64 = nobody("address of the FLOW_CACHE_ENTRYs (flow.py)")
    syndromes: I64 = nobody("address of a byte for each Reason: formats.cqe.Syndrome")
    errors: I64 = nobody("address of the RING of ERROR_RECORDs, which workers fill in turn")
    armable: I64 = nobody("address of a list of CQ_ROWs with a channel: how many, then their addresses")
    lives: I64 = nobody("address of the count of lives of QPs that have begun")
    # set-up
    lid: I64 = nobody("the port's LID, on InfiniBand", line=True)
    mac: I64 = nobody("the port's MAC, a load of its 6 bytes")
    wait_on_time: I64 = nobody("not 0: SQs may wait for a time")
    longest_frame: I64 = nobody("bytes of the longest Ethernet frame that the port takes, without VLAN tags")
    budget: I64 = nobody("WQEs of one work queue before the next one's turn")
    min_timeout: I64 = nobody("the shortest time until a retry, in ns")
    spin_ns: I64 = nobody("how long an idle worker spins before it sleeps, in ns")
    sleep_ms: I64 = nobody("how long it sleeps at most, in ms")
    yield_every: I64 = nobody("idle turns before it yields the core")
    nap_ns: I64 = nobody("how long it naps instead, in ns, while other threads may make turns; 0: it yields")
    twin: I64 = nobody("address of the TWIN on which turns are made (jit/twin.py); 0: threads make them")
    twin_slice: I64 = nobody("address of the function of C that makes a slice of turns there (gpu/slices.py)")
    slice_ns: I64 = nobody("how long turns are made there at a time, in ns")
    lines_away: I64 = nobody("distance from QPs' doorbell lines in host memory to those on a GPU; 0 is none")
    service_fd: I64 = nobody("eventfd that wakes the report thread")
    capture: I64 = nobody("address of the CAPTURE of packets (fabric/capture.py); 0 is none")
    lan: I64 = nobody("address of the LAN (lan.py); 0 if the port's wire has none")


NIC = NicState.entry


class ErrorRecord(State):
    """A failure, which the report thread logs (observe/reports.py)."""

    reason: I64 = engine("state.reasons.Reason")
    side: I64 = engine("REQUESTER, RESPONDER, RECEIVE_QUEUE or SEND_QUEUE (queues/completion.py)")
    qpn: I64 = engine("number of the QP, RQ or SQ")
    index: I64 = engine("index of the WQE")
    opcode: I64 = engine("formats.wqe.WqeOpcode")
    key: I64 = engine("the key that was used")
    addr: I64 = engine("the virtual address")
    nbytes: I64 = engine("how many bytes")
    extra0: I64 = engine("what the Reason's text names `extra0`")
    extra1: I64 = engine("what the Reason's text names `extra1`")
    syndrome: I64 = engine("formats.cqe.Syndrome")


ERROR_RECORD = ErrorRecord.entry
