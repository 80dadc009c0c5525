"""The engine's record: where everything is, and the fields by which others communicate with the engine."""

from __future__ import annotations

from typing import Any

from ...jit.struct_view import struct_view
from .record import record

NIC = record("nic", """
    # tables
    qps            i64      nobody     address of the QP_ROWs
    qp_mask        i64      nobody     selects a row by number
    cqs            i64      nobody     address of the CQ_ROWs
    cq_mask        i64      nobody     selects a row by number
    mkeys          i64      nobody     address of the MKEY_ROWs
    mkey_mask      i64      nobody     selects a row by the upper 24 bits of a key
    eqs            i64      nobody     address of the EQ_ROWs
    gids           i64      nobody     address of the GID_ROWs
    counters       i64      nobody     address of COUNTERS
    syndromes      i64      nobody     address of a byte for each Reason: formats.cqe.Syndrome
    errors         i64      nobody     address of the RING of ERROR_RECORDs
    # set-up
    lid            i64      nobody     the port's LID, on InfiniBand
    budget         i64      nobody     WQEs of one QP before the next QP's turn
    min_timeout    i64      nobody     the shortest time until a retry, in ns
    spin_ns        i64      nobody     how long an idle engine spins before it sleeps, in ns
    sleep_ms       i64      nobody     how long it sleeps at most, in ms
    yield_every    i64      nobody     idle turns before it yields the core
    kick_fd        i64      nobody     descriptor that wakes this engine (fabric/notifier.py)
    service_fd     i64      nobody     eventfd that wakes the report thread
    capture        i64      nobody     address of the CAPTURE of packets (fabric/capture.py); 0 is none
    # what the engine serves
    uars           i64      nobody     address of a list of UAR pages
    uar_count      i64      host       pages in it
    wires          i64      nobody     address of a list of WIREs
    wire_count     i64      command    wires in it
    armable        i64      nobody     address of a list of CQ_ROWs with a channel
    armable_count  i64      host       CQs in it
    streams        i64      command    address of the DMA_STREAMs (dma/streams.py)
    stream_count   i64      command    DMA streams in it; 0 if all payload is in host memory
    slots          i64      command    address of the SLOTs for payload in device memory (dma/staging.py)
    pollfds        i64      nobody     address of what `poll` waits for
    pollfd_count   i64      command    descriptors in it. Written together with the next field
    event_count    i64      command    how many of them are bells; the rest are sockets
    # commands: what the command path posts (engine.py)
    command_seq    i64      host       commands that were posted
    command_op     i64      host       what to do (step.py)
    command_row    i64      host       address of the row
    command_src    i64      host       address of what was prepared for it
    command_bytes  i64      host       its size, in bytes
    command_state  i64      host       the state that the QP must still have
    # commands: what the engine answers, and whether it sleeps
    command_done   i64      engine     commands that were executed
    command_result i64      engine     step.DONE, WRONG_STATE or TOO_FULL
    holding        i64      engine     not 0: a command waits until no DMA stream is at work
    asleep         i64      engine     not 0: the engine sleeps, and wants to be woken
    # requests of the host
    stop           i64      host       not 0: the engine ends
    busy           i64      host       kernels that run; the engine spins while there are any
    link_down      i64      command    not 0: the port is down, and drops what arrives
    pause_at       i64      host       the engine pauses once so many WQEs were executed; -1 is never
    paused         i64      engine     not 0: the engine executes commands only. The host clears it
    virtual_time   i64      host       not 0: the host sets `now` (tests)
    # the engine's lists and clock
    now            i64      engine     the time of this turn, in ns
    active         i64      nobody     address of the WATCHes
    active_count   i64      engine     served QPs
    pending        i64      nobody     address of a list of QP_ROWs that owe their peer something
    pending_count  i64      engine     QPs in it
    ringing        i64      nobody     address of a list of CHANNELs with events from this turn
    ringing_count  i64      engine     channels in it
    served_first   i64      engine     random number that selects the QP with which a turn begins
    scan_at        i64      engine     the QP whose doorbell record is scanned next
    lives          i64      engine     lives of QPs that have begun
    error_event    i64      engine     not 0: the report thread is to be woken
    # the thread: the request at hand
    message        i64      nobody     address of its MESSAGE
    scratch        i64      nobody     address of room for a packet's headers
    payload        i64      engine     address of the payload of the packet at hand, if the packet refers to it
    payload_bytes  i64      engine     its size; 0 if the payload is in the packet
    touched        i64      dma        address of the DMA_STREAM with bytes of the request at hand; 0 is none
    failures       i64      dma        failures of that stream before the request
    landed         i64      dma        not 0: some of these bytes go to host memory
    context        i64      dma        CUDA context of the thread
    word           i64      engine     what a system call reads or writes
    # the thread: why a request is refused, for the ERROR_RECORD
    why_key        i64      engine     the key that was used
    why_addr       i64      engine     the virtual address
    why_nbytes     i64      engine     how many bytes
    why_extra0     i64      engine     what the Reason's text names `extra0`
    why_extra1     i64      engine     what the Reason's text names `extra1`
""")
nic_at: Any = struct_view(NIC)

# What went wrong. The report thread reads it (observe/reports.py).
ERROR_RECORD = record("error_record", """
    reason         i64      engine     observe.reasons.Reason
    side           i64      engine     REQUESTER or RESPONDER (queues/completion.py)
    qpn            i64      engine     number of the QP
    index          i64      engine     index of the WQE
    opcode         i64      engine     formats.wqe.WqeOpcode
    key            i64      engine     the key that was used
    addr           i64      engine     the virtual address
    nbytes         i64      engine     how many bytes
    extra0         i64      engine     what the Reason's text names `extra0`
    extra1         i64      engine     what the Reason's text names `extra1`
    syndrome       i64      engine     formats.cqe.Syndrome
""")
error_record_at: Any = struct_view(ERROR_RECORD)
