"""A worker: a thread that serves queues of a NIC, and all that belongs to it.

Compiled functions take the address of a worker's record as `nic`. The record begins with a copy of NIC: `nic_at(nic)`
is the NIC with its tables, which all workers share, and `worker_at(nic)` is the worker that runs the function.
"""

from __future__ import annotations


from ...jit.struct_view import View, struct_view
from .nic import NIC_FIELDS
from .record import record

WORKER = record("worker", NIC_FIELDS + """
    # what the worker serves
    counters       i64      nobody     address of its COUNTERS
    next           i64      nobody     address of the NIC's next WORKER; 0 in the last
    kick_fd        i64      nobody     descriptor that wakes this worker (fabric/notifier.py)
    uars           i64      nobody     address of a list of UAR pages; 0 except in the first worker, which serves all
    uar_count      i64      host       pages in it
    wires          i64      nobody     address of a list of WIREs. The first worker serves all
    wire_count     i64      command    wires in it
    streams        i64      command    address of the DMA_STREAMs (memory/streams.py). The first worker has all
    stream_count   i64      command    DMA streams in it; 0 if all payload is in host memory
    slots          i64      command    address of the SLOTs for payload in device memory (memory/staging.py)
    slices         i64      nobody     address of its SLICES, in which a GPU makes its turns; 0: none does
    board          i64      nobody     address of the BOARD for blocks that only copy; 0: there are none
    near           i64      nobody     address of the NEAR of its slices; on a GPU, which has its own, just not 0
    near_bytes     i64      nobody     its size, with the room behind it; on a GPU, how large it may be
    pollfds        i64      nobody     address of what `poll` waits for
    pollfd_count   i64      command    descriptors in it. Written together with the next field
    event_count    i64      command    how many of them are bells; the rest are sockets
    # commands: what the command path posts (host/engine.py)
    command_seq    i64      host       commands that were posted
    command_op     i64      host       EngineCommand (turn/commands.py)
    command_row    i64      host       address of the row
    command_src    i64      host       address of what was prepared for it
    command_bytes  i64      host       its size, in bytes
    command_state  i64      host       the state that the QP must still have
    awaited        i64      host       not 0: the poster sleeps (a futex, at command_done). Who wakes it sets 0
    # commands: what the worker answers, and whether it sleeps
    command_done   i64      engine     commands that were executed
    command_result i64      engine     its Result
    holding        i64      engine     not 0: a command waits until no DMA stream is at work
    asleep         i64      engine     not 0: the worker sleeps, and wants to be woken
    # requests of the host
    stop           i64      host       not 0: the worker ends
    cq_count       i64      host       CQs that it serves
    hold           i64      host       not 0: the worker executes commands only, while the first one changes tables
    busy           i64      host       kernels that run; the worker spins while there are any
    link_down      i64      command    not 0: the port is down, and drops what arrives
    pause_at       i64      host       the worker pauses once so many WQEs were executed; -1 is never
    paused         i64      engine     not 0: the worker executes commands only. The host clears it
    virtual_time   i64      host       not 0: the host sets `now` (tests)
    utc_offset     i64      host       what to add to `now` for the time of day, in ns since 1970
    # turns that threads of the program make in the worker's place (host/helping.py)
    taken          i64      engine     not 0: a thread makes a turn. It was taken by an exchange
    helper         i64      engine     pthread_self() of a thread of the program that makes it, or else 0
    helped_at      i64      engine     when such a thread last made one, in ns
    trust          i64      engine     how long after that the worker's thread leaves turns to others, in ns
    # requests of the first worker
    arms_rung      i64      engine     registers that were rung to arm CQs of other workers (queues/events.py)
    # lists and clock
    now            i64      engine     the time of this turn, in ns
    idle           i64      engine     turns in a row in which nothing was done
    idle_since     i64      engine     when that had lasted for some turns, in ns; 0 before
    active         i64      nobody     address of the WORK_QUEUEs
    active_count   i64      engine     served work queues
    pending        i64      nobody     address of a list of QP_ROWs that owe their peer something
    pending_count  i64      engine     QPs in it
    ringing        i64      nobody     address of a list of CHANNELs with events from this turn
    ringing_count  i64      engine     channels in it
    waking         i64      engine     the first CQ_ROW whose thread is woken at the end of the turn; 0 if there is none
    served_first   i64      engine     random number that selects the work queue with which a turn begins
    scan_at        i64      engine     the work queue whose doorbell record is scanned next
    arms_seen      i64      engine     how many of `arms_rung` were dealt with
    lull           i64      engine     until when QPs that reach their peers start no packets (gpu/slices.py), or 0
    lull_after     i64      engine     the time before which no other lull begins
    lull_rest      i64      engine     how long that was after the last lull in vain, in ns
    error_event    i64      engine     not 0: the report thread is to be woken
    # the request at hand
    message        i64      nobody     address of its MESSAGE
    scratch        i64      nobody     address of room for a packet's headers
    packets        i64      nobody     address of the PACKETs of frames that have arrived together (flow.py)
    arrived        i64      nobody     address of ARRIVED records of frames that were taken from a pipe together
    packet         i64      engine     address of the PACKET of the frame at hand
    luck           i64      engine     how often packets find their ways (steering/ways.py); below 0, none looks
    frame          i64      nobody     address of room for an Ethernet frame; only the first worker has it
    arrived_at     i64      engine     index of the own GID that the packet at hand was sent to; -1: the wire's
    payload        i64      engine     address of the payload of the packet at hand, if the packet refers to it
    payload_bytes  i64      engine     its size; 0 if the payload is in the packet
    touched        i64      dma        address of the DMA_STREAM with bytes of the request at hand; 0 is none
    failures       i64      dma        failures of that stream before the request
    landed         i64      dma        not 0: some of these bytes go to host memory
    context        i64      dma        CUDA context of the thread
    word           i64      engine     what a system call reads or writes
    # why a request is refused, for the ERROR_RECORD
    why_key        i64      engine     the key that was used
    why_addr       i64      engine     the virtual address
    why_nbytes     i64      engine     how many bytes
    why_extra0     i64      engine     what the Reason's text names `extra0`
    why_extra1     i64      engine     what the Reason's text names `extra1`
""")
worker_at: View = struct_view(WORKER)
