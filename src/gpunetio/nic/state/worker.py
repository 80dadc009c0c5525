"""A worker: a thread that serves queues of a NIC, and all that belongs to it.

A worker's record begins with a copy of the NIC's, so it leads to the tables that all workers share.
"""

from __future__ import annotations

from ...formats.layout import I64
from .nic import NicState
from .record import command, dma, engine, host, nobody


class WorkerState(NicState):
    """A worker: a thread that serves queues of a NIC, and all that belongs to it."""

    # what the worker serves
    counters: I64 = nobody("address of its COUNTERS", line=True)
    next: I64 = nobody("address of the NIC's next WORKER; 0 in the last")
    kick_fd: I64 = nobody("descriptor that wakes this worker (fabric/notifier.py)")
    uars: I64 = nobody("address of a list of UAR pages; 0 except in the first worker, which serves all")
    uar_count: I64 = host("pages in it")
    wires: I64 = nobody("address of a list of WIREs. The first worker serves all")
    wire_count: I64 = command("wires in it")
    streams: I64 = command("address of the DMA_STREAMs (memory/streams.py). The first worker has all")
    stream_count: I64 = command("DMA streams in it; 0 if all payload is in host memory")
    slots: I64 = command("address of the SLOTs for payload in device memory (memory/staging.py)")
    slices: I64 = nobody("address of its SLICES, if a GPU makes its turns; else 0")
    board: I64 = nobody("address of the BOARD for blocks that only copy; 0 if there are none")
    shared: I64 = nobody("address of the SLICE_SHARED of its slices; on a GPU, which has shared memory, only not 0")
    shared_bytes: I64 = nobody("its size, with the room for rows; on a GPU, its largest size")
    pollfds: I64 = nobody("address of the descriptors that `poll` waits for")
    pollfd_count: I64 = command("descriptors in it. Written together with the next field")
    event_count: I64 = command("how many of them are bells; the rest are sockets")
    # commands: what the command path posts (host/engine.py)
    command_seq: I64 = host("commands that were posted", line=True)
    command_op: I64 = host("EngineCommand (turn/commands.py)")
    command_row: I64 = host("address of the row")
    command_src: I64 = host("address of what was prepared for it")
    command_bytes: I64 = host("its size, in bytes")
    command_state: I64 = host("the state that the QP must still have")
    awaited: I64 = host("not 0: the poster sleeps (on a futex at command_done). The waker sets it to 0")
    # commands: what the worker answers, and whether it sleeps
    command_done: I64 = engine("commands that were executed", line=True)
    command_result: I64 = engine("its Result")
    holding: I64 = engine("not 0: a command waits until no DMA stream is at work")
    asleep: I64 = engine("not 0: the worker sleeps and must be woken")
    # requests of the host
    stop: I64 = host("not 0: the worker ends", line=True)
    cq_count: I64 = host("CQs that it serves")
    hold: I64 = host("not 0: the worker executes commands only, while the first one changes tables")
    busy: I64 = host("kernels that run; the worker spins while there are any")
    link_down: I64 = command("not 0: the port is down, and drops what arrives")
    pause_at: I64 = host("the worker pauses once so many WQEs were executed; -1 is never")
    paused: I64 = engine("not 0: the worker executes commands only. The host clears it")
    virtual_time: I64 = host("not 0: the host sets `now` (tests)")
    utc_offset: I64 = host("what to add to `now` for the time of day, in ns since 1970")
    # turns that threads of the program make for the worker (host/helping.py)
    taken: I64 = engine("a lock, taken by an exchange. Not 0: a thread makes a turn", line=True)
    helper: I64 = engine("pthread_self() of the program's thread that makes a turn, or 0")
    helped_at: I64 = engine("when such a thread last made one, in ns")
    trust: I64 = engine("how long the worker's thread leaves turns to such threads afterwards, in ns")
    # requests of the first worker
    arms_rung: I64 = engine("registers that were rung to arm CQs of other workers (queues/events.py)", line=True)
    # lists and clock
    now: I64 = engine("the time of this turn, in ns", line=True)
    idle: I64 = engine("turns in a row in which nothing was done")
    idle_since: I64 = engine("when that had lasted for some turns, in ns; 0 before")
    active: I64 = nobody("address of the WORK_QUEUEs")
    active_count: I64 = engine("served work queues")
    pending: I64 = nobody("address of a list of QP_ROWs that have an acknowledgement or responses to send")
    pending_count: I64 = engine("QPs in it")
    ringing: I64 = nobody("address of a list of CHANNELs with events from this turn")
    ringing_count: I64 = engine("channels in it")
    waking: I64 = engine("the first CQ_ROW whose thread is woken at the end of the turn; 0 if there is none")
    served_first: I64 = engine("random number that selects the work queue with which a turn begins")
    scan_at: I64 = engine("the work queue whose doorbell record is scanned next")
    arms_seen: I64 = engine("how many of `arms_rung` were served")
    quiesce_until: I64 = engine("until when QPs that reach their peers start no packets (gpu/slices.py), or 0")
    next_quiesce_at: I64 = engine("the earliest time at which it quiesces again")
    quiesce_backoff: I64 = engine("the delay after it last quiesced in vain, in ns")
    error_event: I64 = engine("not 0: the report thread is to be woken")
    # the request at hand
    message: I64 = nobody("address of its MESSAGE", line=True)
    scratch: I64 = nobody("address of room for a packet's headers")
    packets: I64 = nobody("address of the PACKETs of frames that have arrived together (flow.py)")
    arrived: I64 = nobody("address of ARRIVED records of a burst of frames from a pipe")
    packet: I64 = engine("address of the PACKET of the frame at hand")
    hit_score: I64 = engine("flow-cache hit score (steering/flow_cache.py); while negative, lookups are skipped")
    frame: I64 = nobody("address of room for an Ethernet frame; only the first worker has it")
    arrived_at: I64 = engine("index of the own GID that the packet at hand was sent to; -1: the wire's")
    payload: I64 = engine("address of the payload of the packet at hand, if the packet refers to it")
    payload_bytes: I64 = engine("its size; 0 if the payload is in the packet")
    touched: I64 = dma("address of the DMA_STREAM with bytes of the request at hand; 0 is none")
    failures: I64 = dma("failures of that stream before the request")
    landed: I64 = dma("not 0: some of these bytes go to host memory")
    context: I64 = dma("CUDA context of the thread")
    word: I64 = engine("buffer of a system call")
    # why a request is refused, for the ERROR_RECORD
    why_key: I64 = engine("the key that was used", line=True)
    why_addr: I64 = engine("the virtual address")
    why_nbytes: I64 = engine("how many bytes")
    why_extra0: I64 = engine("what the Reason's text names `extra0`")
    why_extra1: I64 = engine("what the Reason's text names `extra1`")


WORKER = WorkerState.entry
