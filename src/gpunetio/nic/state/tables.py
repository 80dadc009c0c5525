"""The NIC's state: flat tables of 64-bit fields, which the engine reads by address and Python code by name.

`nic.qps[qpn]` is a row of `QP_ROW`. Only the engine's thread writes rows that are in use. The command interpreter
prepares a new row elsewhere and posts it to the engine (engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...jit.struct_view import struct_view
from ...errors import NotFoundError
from ...formats.layout import Entry
from ...memory import HostMemory

# Commands write the setup fields. The engine writes the rest, from `sq_ci` on.
#
# Inside the engine, PSNs count packets in 64 bits and never wrap; a packet carries the low 24 bits (IBTA 9.7.2).
#
# una_psn               the oldest PSN not yet acknowledged
# tx_psn, high_psn      the next PSN to send, and what it was before it last went back
# end_psn               the next PSN that no WQE has yet
# gap_psn               1 + the PSN at which a missing response was last requested again
# sq_ci … sq_next       the WQEs in flight; those up to sq_sent have been started at least once
# flights               what became of the started WQEs
# ssn                   counts requests
# resources             the responder's last READs and atomics (IBTA 9.7.4.1.3)
# rx_wqe                the receive that was taken from the QP's SRQ for the incoming message
# rx_from               packets before this position on the wire are from before RTR
# life, peer_life       this QP's life as a requester, from RTS to its reset; that of the peer it hears (frames.py)
# mover, fence          if not 0, the mover that carries bytes for the QP, up to its position `fence` (movers.py)
# fence_psn             on a wire: the first packet of those bytes
# landing               inside a NIC: those bytes go to host memory, and the engine puts them there
# drain                 the state SQD is requested: sq_pi stays where WQEs were started
# late                  in SQD: 1 + the index that was announced since
# sq_drained            in SQD: all started WQEs have completed
# egress                what the QP's packets leave by (fabric/udp.py)
# events                one bit for each event type that `channel` receives
# rights                the remote rights of `Access`, and EXTENDED_ATOMICS if the atomic mode includes those
# missing               1 + the WQE that was announced before it came, at missing_since
QP_ROW = Entry("qp_row", 960, """
    qpn              0  i64
    state            8  i64
    service         16  i64
    pdn             24  i64
    rights          32  i64
    sq_addr         40  i64
    sq_log          48  i64
    rq_addr         56  i64
    rq_log          64  i64
    rq_stride       72  i64
    dbrec           80  i64
    doorbell        88  i64
    send_cq         96  i64
    recv_cq        104  i64
    user_index     112  i64
    remote_qpn     120  i64
    remote_row     128  i64
    wire           136  i64
    peer_high      144  i64
    peer_low       152  i64
    source         160  i64
    dlid           168  i64
    sl             176  i64
    grh            184  i64
    rnr_retry      192  i64
    retry_cnt      200  i64
    timeout_ns     208  i64
    min_rnr        216  i64
    min_rnr_code   224  i64
    mtu            232  i64
    max_rd         240  i64
    max_dest_rd    248  i64
    no_dbr         256  i64
    sq_psn         264  i64
    rq_psn         272  i64
    flights        280  i64
    resources      288  i64
    srq            296  i64
    channel        304  i64
    cookie         312  i64
    core_direct    320  i64
    watch          328  i64
    cs_res         336  i64
    msg_max        344  i64
    drain          352  i64
    egress         360  i64
    events         368  i64
    sq_ci          384  i64
    sq_next        392  i64
    sq_sent        400  i64
    sq_pi          408  i64
    db_seen        416  i64
    una_psn        424  i64
    tx_psn         432  i64
    end_psn        440  i64
    mover          448  i64
    retry_at       456  i64
    retries        464  i64
    rnr_retries    472  i64
    failed         480  i64
    told           488  i64
    reads_head     496  i64
    reads_tail     504  i64
    read_ends      512  i64[16]
    rq_ci          640  i64
    expect_psn     648  i64
    msn            656  i64
    rx_kind        664  i64
    rx_nbytes      672  i64
    rx_done        680  i64
    rx_addr        688  i64
    rx_key         696  i64
    nak_sent       704  i64
    due            712  i64
    due_ack        720  i64
    due_syndrome   728  i64
    due_psn        736  i64
    due_msn        744  i64
    res_head       752  i64
    res_todo       760  i64
    high_psn       768  i64
    gap_psn        776  i64
    hurry          784  i64
    held_back      792  i64
    rx_wqe         800  i64
    rx_index       808  i64
    drained        816  i64
    timer_at       824  i64
    fence          832  i64
    failures       840  i64
    fence_psn      848  i64
    landing        856  i64
    life           864  i64
    peer_life      872  i64
    rx_from        880  i64
    ssn            888  i64
    missing        896  i64
    missing_since  904  i64
    established    912  i64
    sq_drained     920  i64
    late           928  i64
""")
QP_SETUP_BYTES = QP_ROW.sq_ci  # commands write the fields before this one
EXTENDED_ATOMICS = 1 << 8
MAX_RD_ATOMIC = 16  # READs and atomics in flight in one direction of a QP

# An entry of the engine's list of served QPs, which each turn reads (watch.py). `seen` is the doorbell's value when the
# QP was last served; with `awake`, the QP is served in any case.
WATCH = Entry("watch", 32, """
    row              0  i64
    doorbell         8  i64
    seen            16  i64
    awake           24  i64
""")

# A started WQE, at the slot of its first block: its packets, for acknowledgements and retransmissions. Inside a NIC,
# `fence` is where its copies end (moving.py).
FLIGHT = Entry("flight", 64, """
    first            0  i64
    packets          8  i64
    nbytes          16  i64
    opcode          24  i64
    ce              32  i64
    ds              40  i64
    blocks          48  i64
    fence           56  i64
""")

# A READ or atomic that the responder has accepted. `todo` packets of the response are left to send, from `next` on;
# `answered` says that all have been sent at least once; `serial` is unique to the QP.
RESOURCE = Entry("resource", 128, """
    opcode           0  i64
    first            8  i64
    packets         16  i64
    va              24  i64
    rkey            32  i64
    nbytes          40  i64
    next            48  i64
    todo            56  i64
    answered        64  i64
    serial          72  i64
""")

# A shared receive queue, which the PRM calls a receive memory pool. WQEs are taken first from `returned`, an array of
# those whose QP ended before it used them, and then at `next`.
SRQ_ROW = Entry("srq_row", 128, """
    srqn              0  i64
    pdn               8  i64
    addr             16  i64
    log              24  i64
    stride           32  i64
    dbrec            40  i64
    linked           48  i64
    returned         56  i64
    channel          64  i64
    cookie           72  i64
    limit            80  i64
    taken            88  i64
    next             96  i64
    returned_count  104  i64
""")

# `armed` for any completion or for solicited ones; `arm_seen` is the last arm request taken (see doorbell.py), and
# `solicited_pi` counts the CQEs up to the last solicited one. `addr` is the address of the first CQE's last 64 bytes,
# and `shift` the binary logarithm of a CQE's size.
CQ_ROW = Entry("cq_row", 192, """
    cqn            0  i64
    addr           8  i64
    log           16  i64
    dbrec         24  i64
    overrun       32  i64
    collapsed     40  i64
    eqn           48  i64
    uar_page      56  i64
    pi            64  i64
    error         72  i64
    channel       80  i64
    cookie        88  i64
    armed         96  i64
    arm_seen     104  i64
    solicited_pi 112  i64
    error_channel 120 i64
    error_cookie 128  i64
    shift        136  i64
""")

# `lent`, if the memory is lent to other processes (loans.py), turns an address into a reference when added to it.
MKEY_ROW = Entry("mkey_row", 64, """
    key            0  i64
    pdn            8  i64
    access        16  i64
    iova          24  i64
    nbytes        32  i64
    delta         40  i64
    handle        48  i64
    lent          56  i64
""")

PD_ROW = Entry("pd_row", 64, """
    pdn            0  i64
    users          8  i64
""")

UMEM_ROW = Entry("umem_row", 64, """
    umem_id        0  i64
    addr           8  i64
    nbytes        16  i64
    access        24  i64
    users         32  i64
""")

UAR_ROW = Entry("uar_row", 64, """
    page_id        0  i64
    addr           8  i64
    kind          16  i64
    users         24  i64
""")

EQ_ROW = Entry("eq_row", 64, """
    eqn            0  i64
    pi             8  i64
""")

GID_ROW = Entry("gid_row", 64, """
    index          0  i64
    gid            8  raw[16]
    version       24  i64
    mac           32  raw[8]
""")

# Counters with the names of the kernel's mlx5 driver (hw_counters), then our own: packets that were dropped, and why.
# Each packet that arrives counts in `rdma_rx_packets` and in exactly one of PACKET_FATES. The `rdma_*_bytes` count
# payload; observe.py derives `port_*_data`, in words of 4 bytes, from them.
COUNTERS = Entry("counters", 384, """
    rx_write_requests                   0  i64
    rx_read_requests                    8  i64
    rx_atomic_requests                 16  i64
    out_of_buffer                      24  i64
    out_of_sequence                    32  i64
    duplicate_request                  40  i64
    rnr_nak_retry_err                  48  i64
    packet_seq_err                     56  i64
    implied_nak_seq_err                64  i64
    local_ack_timeout_err              72  i64
    resp_local_length_error            80  i64
    resp_cqe_error                     88  i64
    req_cqe_error                      96  i64
    req_remote_invalid_request        104  i64
    req_remote_access_errors          112  i64
    resp_remote_access_errors         120  i64
    resp_cqe_flush_error              128  i64
    req_cqe_flush_error               136  i64
    req_transport_retries_exceeded    144  i64
    req_rnr_retries_exceeded          152  i64
    rx_icrc_encapsulated              160  i64
    rdma_tx_packets                   168  i64
    rdma_tx_bytes                     176  i64
    rdma_rx_packets                   184  i64
    rdma_rx_bytes                     192  i64
    rx_malformed                      200  i64
    rx_no_qp                          208  i64
    rx_wrong_peer                     216  i64
    rx_wrong_pkey                     224  i64
    rx_wrong_state                    232  i64
    rx_uc_dropped                     240  i64
    rx_weak_icrc                      248  i64
    tx_dropped                        256  i64
    sq_wqes                           264  i64
    cqes                              272  i64
    lost_error_records                280  i64
    rx_accepted                       288  i64
    rx_refused                        296  i64
    rx_unexpected                     304  i64
    rx_link_down                      312  i64
    rx_stale                          320  i64
""")
PACKET_FATES = (
    "rx_accepted", "rx_malformed", "rx_no_qp", "rx_wrong_peer", "rx_wrong_pkey", "rx_wrong_state", "out_of_sequence",
    "duplicate_request", "out_of_buffer", "rx_refused", "rx_uc_dropped", "rx_unexpected", "implied_nak_seq_err",
    "rx_link_down", "rx_stale",
)  # fmt: skip

# What went wrong, for the log: the engine writes it, the report thread reads it.
ERROR_RECORD = Entry("error_record", 128, """
    reason         0  i64
    side           8  i64
    qpn           16  i64
    index         24  i64
    opcode        32  i64
    key           40  i64
    addr          48  i64
    nbytes        56  i64
    extra0        64  i64
    extra1        72  i64
    syndrome      80  i64
""")

# The engine's record: where everything is, and the fields to communicate with it.
#
# payload          the payload of the packet at hand, if the packet refers to it; else `payload_bytes` is 0
# touched          the mover that carries bytes of the request at hand
# failures         the failures of that mover before the request
# landed           some of these bytes go to host memory
# holding          a command waits for the movers
# context          the CUDA context of the engine's thread
# lives            how many lives of QPs have begun
NIC = Entry("nic", 640, """
    qps              0  i64
    qp_mask          8  i64
    mkeys           16  i64
    mkey_mask       24  i64
    counters        32  i64
    syndromes       40  i64
    errors          48  i64
    error_event     56  i64
    active          64  i64
    active_count    72  i64
    uars            80  i64
    uar_count       88  i64
    wires           96  i64
    wire_count     104  i64
    eqs            112  i64
    message        120  i64
    virtual_time   128  i64
    now            136  i64
    why_key        144  i64
    why_addr       152  i64
    why_nbytes     160  i64
    why_extra0     168  i64
    why_extra1     176  i64
    budget         184  i64
    lid            192  i64
    paused         200  i64
    pause_at       208  i64
    due            216  i64
    due_count      224  i64
    capture        232  i64
    min_timeout    240  i64
    gids           248  i64
    command_seq    256  i64
    command_op     264  i64
    command_row    272  i64
    command_src    280  i64
    command_bytes  288  i64
    command_state  296  i64
    command_done   320  i64
    command_result 328  i64
    asleep         336  i64
    scan_at        344  i64
    stop           384  i64
    busy           392  i64
    kick_fd        400  i64
    spin_ns        408  i64
    sleep_ms       416  i64
    service_fd     424  i64
    pollfds        432  i64
    pollfd_count   440  i64
    event_count    448  i64
    word           456  i64
    yield_every    472  i64
    scratch        464  i64
    payload        480  i64
    payload_bytes  488  i64
    cqs            496  i64
    cq_mask        504  i64
    armable        512  i64
    armable_count  520  i64
    ringing        528  i64
    ringing_count  536  i64
    link_down      544  i64
    served_first   552  i64
    movers         560  i64
    mover_count    568  i64
    slots          576  i64
    touched        584  i64
    failures       592  i64
    landed         600  i64
    context        608  i64
    holding        616  i64
    lives          624  i64
""")

# Events on their way to a subscriber (PRM, event queues): a ring that the engine fills, and a descriptor that counts
# its events. `unheard` events are not counted there yet; `lost` events found the ring full.
CHANNEL = Entry("channel", 256, """
    fd             0  i64
    unheard        8  i64
    lost          16  i64
    ring          64  raw[192]
""")
EVENT = Entry("event", 32, """
    cookie         0  i64
    type           8  i64
    number        16  i64
    syndrome      24  i64
""")

# A wire of the NIC. Pipes lead to a NIC of this host. UDP leads to all others, in datagrams that the engine receives
# before each turn. `window` limits the packets that a QP has in flight. On InfiniBand, packets begin with an LRH.
# `loans` are LOANS rows of LOAN, on a wire to another process that takes part in lending.
WIRE = Entry("wire", 320, """
    kind           0  i64
    broken         8  i64
    window        16  i64
    infiniband    24  i64
    faults        32  i64
    udp           40  i64
    wake_fd       48  i64
    woken         56  i64
    loans         96  i64
    here_high     64  i64
    here_low      72  i64
    peer_high     80  i64
    peer_low      88  i64
    tx           128  raw[64]
    rx           192  raw[64]
""")
PIPES, UDP = 1, 2  # WIRE.kind

# A row of a wire's loans: memory that the peer has lent us, and in `granted` the number of a loan of ours that the peer
# has mapped. The low bits of a loan's number select its row.
LOAN = Entry("loan", 32, """
    number         0  i64
    address        8  i64
    nbytes        16  i64
    granted       24  i64
""")
LOANS = 256

qp_row_at: Any = struct_view(QP_ROW)
cq_row_at: Any = struct_view(CQ_ROW)
srq_row_at: Any = struct_view(SRQ_ROW)
channel_at: Any = struct_view(CHANNEL)
event_at: Any = struct_view(EVENT)
mkey_row_at: Any = struct_view(MKEY_ROW)
nic_at: Any = struct_view(NIC)
watch_at: Any = struct_view(WATCH)
flight_at: Any = struct_view(FLIGHT)
resource_at: Any = struct_view(RESOURCE)
wire_at: Any = struct_view(WIRE)
loan_at: Any = struct_view(LOAN)
error_record_at: Any = struct_view(ERROR_RECORD)
counters_at: Any = struct_view(COUNTERS)


class Table:
    """Rows of one `Entry`, looked up by number: its low bits select the row, whose first field must hold the number.

    A row is free if its first field is 0. Row 0 is never used.
    """

    name: str
    entry: Entry
    mask: int
    memory: HostMemory
    rows: np.ndarray
    address: int

    def __init__(self, name: str, entry: Entry, rows: int):
        self.name, self.entry = name, entry
        self.mask = rows - 1
        self.memory = HostMemory(rows * entry.size, shared=True)
        self.rows = self.memory.view(entry.dtype, 0, rows)
        self.address = self.memory.address
        self._number = entry.dtype.names[0]  # type: ignore[index]
        self._last = self._highest = 0

    @property
    def given(self) -> np.ndarray:
        """Return the rows up to the highest that `free_slot` has given: reading others would allocate their pages."""
        return self.rows[: self._highest + 1]

    def __len__(self) -> int:
        return int(np.count_nonzero(self.rows[self._number]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows[np.flatnonzero(self.rows[self._number])])

    def __contains__(self, number: int) -> bool:
        return number > 0 and int(self.rows[self._slot(number)][self._number]) == number

    def __getitem__(self, number: int) -> Any:
        if number not in self:
            raise NotFoundError(f"no {self.name} {number:#x}; there are {[hex(r[self._number]) for r in self]}")
        return self.rows[self._slot(number)]

    def row_address(self, number: int) -> int:
        """Return the address of the row of `number`."""
        return self.address + self._slot(number) * self.entry.size

    def free_slot(self, start: int | None = None) -> int | None:
        """Return the first free row from `start` on, wrapping around, or None if the table is full.

        By default, `start` is the row behind the last one given. That row is mostly free, and numbers are not reused at
        once.
        """
        slot = self._free_from(self._last % self.mask + 1 if start is None else start)
        if slot is not None:
            self._highest = max(self._highest, slot)
            self._last = slot if start is None else self._last
        return slot

    def _free_from(self, start: int) -> int | None:
        numbers = self.rows[self._number]
        if numbers[start] == 0:
            return start
        for slots in (range(start, len(numbers)), range(1, start)):
            free = np.flatnonzero(numbers[slots.start : slots.stop] == 0)
            if len(free):
                return slots.start + int(free[0])
        return None

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()

    def _slot(self, number: int) -> int:
        return number & self.mask


class MkeyTable(Table):
    """Memory keys: the upper 24 bits of a key are its index, the low 8 bits vary."""

    def _slot(self, number: int) -> int:
        return (number >> 8) & self.mask
