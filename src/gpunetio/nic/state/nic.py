"""The NIC's record, which says where everything is, and the records of what the NIC has refused."""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .record import record

# What the workers of a NIC share: set up before they start, and the same in all of them. A WORKER begins with a copy.
NIC_FIELDS = """
    # tables
    qps            i64      nobody     address of the QP_ROWs
    qp_mask        i64      nobody     selects a row by number
    sqs            i64      nobody     address of the SQ_ROWs
    sq_mask        i64      nobody     selects a row by number
    cqs            i64      nobody     address of the CQ_ROWs
    cq_mask        i64      nobody     selects a row by number
    mkeys          i64      nobody     address of the MKEY_ROWs
    mkey_mask      i64      nobody     selects a row by the upper 24 bits of a key
    eqs            i64      nobody     address of the EQ_ROWs
    gids           i64      nobody     address of the GID_ROWs
    paths          i64      nobody     address of the PATHs (path.py)
    flow_tables    i64      nobody     address of the FLOW_TABLE_ROWs (flow.py)
    lookups        i64      nobody     address of the sets of LOOKUPs (flow.py)
    ways           i64      nobody     address of the FLOW_WAYs (flow.py)
    syndromes      i64      nobody     address of a byte for each Reason: formats.cqe.Syndrome
    errors         i64      nobody     address of the RING of ERROR_RECORDs, which workers fill in turn
    armable        i64      nobody     address of a list of CQ_ROWs with a channel: how many, then their addresses
    lives          i64      nobody     address of the count of lives of QPs that have begun
    # set-up
    lid            i64      nobody     the port's LID, on InfiniBand
    mac            i64      nobody     the port's MAC, a load of its 6 bytes
    wait_on_time   i64      nobody     not 0: SQs may wait for a time
    longest_frame  i64      nobody     bytes of the longest Ethernet frame that the port takes, without VLAN tags
    budget         i64      nobody     WQEs of one work queue before the next one's turn
    min_timeout    i64      nobody     the shortest time until a retry, in ns
    spin_ns        i64      nobody     how long an idle worker spins before it sleeps, in ns
    sleep_ms       i64      nobody     how long it sleeps at most, in ms
    yield_every    i64      nobody     idle turns before it yields the core
    nap_ns         i64      nobody     how long it naps instead, in ns, and other threads may make turns; 0: it yields
    twin           i64      nobody     address of the TWIN on which turns are made (jit/twin.py); 0: threads make them
    twin_slice     i64      nobody     address of the function of C that makes a slice of turns there (gpu/slices.py)
    slice_ns       i64      nobody     how long turns are made there at a time, in ns
    lines_away     i64      nobody     distance from QPs' doorbell lines in host memory to those on a GPU; 0 is none
    service_fd     i64      nobody     eventfd that wakes the report thread
    capture        i64      nobody     address of the CAPTURE of packets (fabric/capture.py); 0 is none
    lan            i64      nobody     address of the LAN (lan.py); 0 if the port's wire has none"""
NIC = record("nic", NIC_FIELDS)
nic_at: View = struct_view(NIC)

# What went wrong. The report thread reads it (observe/reports.py).
ERROR_RECORD = record("error_record", """
    reason         i64      engine     state.reasons.Reason
    side           i64      engine     REQUESTER, RESPONDER, RECEIVE_QUEUE or SEND_QUEUE (queues/completion.py)
    qpn            i64      engine     number of the QP, RQ or SQ
    index          i64      engine     index of the WQE
    opcode         i64      engine     formats.wqe.WqeOpcode
    key            i64      engine     the key that was used
    addr           i64      engine     the virtual address
    nbytes         i64      engine     how many bytes
    extra0         i64      engine     what the Reason's text names `extra0`
    extra1         i64      engine     what the Reason's text names `extra1`
    syndrome       i64      engine     formats.cqe.Syndrome
""")
error_record_at: View = struct_view(ERROR_RECORD)
