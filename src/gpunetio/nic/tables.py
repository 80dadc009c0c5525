"""The NIC's state: flat tables of 64-bit fields, which the engine reads by address and a person by name.

`nic.qps[qpn]` is a row of `QP_ROW`. Only the engine's thread writes rows that are in use; the command interpreter
prepares a row aside and posts it (engine.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.views import struct_view
from ..errors import NotFoundError
from ..formats.layout import Entry
from ..memory import HostMemory

# `setup` fields are written by commands, the rest, from `sq_ci` on, by the engine.
QP_ROW = Entry("qp_row", 384, """
    qpn            0  i64
    state          8  i64
    pdn           16  i64
    rights        24  i64
    sq_addr       32  i64
    sq_log        40  i64
    rq_addr       48  i64
    rq_log        56  i64
    rq_stride     64  i64
    dbrec         72  i64
    doorbell      80  i64
    send_cq       88  i64
    recv_cq       96  i64
    user_index   104  i64
    remote_qpn   112  i64
    remote_row   120  i64
    wire         128  i64
    rnr_retry    136  i64
    retry_cnt    144  i64
    timeout_ns   152  i64
    min_rnr      160  i64
    mtu          168  i64
    no_dbr       176  i64
    sq_psn       184  i64
    rq_psn       192  i64
    sq_ci        256  i64
    sq_next      264  i64
    sq_pi        272  i64
    db_seen      280  i64
    rq_ci        288  i64
    outstanding  296  i64
    send_psn     304  i64
    expect_psn   312  i64
    retry_at     320  i64
    retries      328  i64
    rnr_retries  336  i64
    failed       344  i64
    told         352  i64
""")
QP_SETUP_BYTES = QP_ROW.sq_ci  # the fields before belong to commands

CQ_ROW = Entry("cq_row", 128, """
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
""")

MKEY_ROW = Entry("mkey_row", 64, """
    key            0  i64
    pdn            8  i64
    access        16  i64
    iova          24  i64
    nbytes        32  i64
    delta         40  i64
    handle        48  i64
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

# Counter names are those of the kernel's mlx5 driver (hw_counters, counters).
COUNTERS = Entry("counters", 256, """
    rx_write_requests                  0  i64
    rx_read_requests                   8  i64
    rx_atomic_requests                16  i64
    out_of_buffer                     24  i64
    rnr_nak_retry_err                 32  i64
    local_ack_timeout_err             40  i64
    req_cqe_error                     48  i64
    req_cqe_flush_error               56  i64
    resp_cqe_error                    64  i64
    resp_cqe_flush_error              72  i64
    resp_local_length_error           80  i64
    resp_remote_access_errors         88  i64
    req_remote_access_errors          96  i64
    req_remote_invalid_request       104  i64
    req_transport_retries_exceeded   112  i64
    req_rnr_retries_exceeded         120  i64
    port_xmit_data                   128  i64
    port_rcv_data                    136  i64
    sq_wqes                          144  i64
    cqes                             152  i64
    lost_error_records               160  i64
""")

# What went wrong, for the log: filled by the engine, read by the service thread.
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

# What the engine is given: where everything is, and how it is spoken to.
NIC = Entry("nic", 512, """
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
    wqe_scratch    128  i64
    now            136  i64
    why_key        144  i64
    why_addr       152  i64
    why_nbytes     160  i64
    why_extra0     168  i64
    why_extra1     176  i64
    budget         184  i64
    hold           192  i64
    paused         200  i64
    pause_at       208  i64
    command_seq    256  i64
    command_op     264  i64
    command_row    272  i64
    command_src    280  i64
    command_bytes  288  i64
    command_state  296  i64
    command_done   320  i64
    command_result 328  i64
    stop           384  i64
    busy           392  i64
    kick_fd        400  i64
    spin_ns        408  i64
    sleep_ms       416  i64
    service_fd     456  i64
    pollfd         464  i64
""")

qp_row_at = struct_view(QP_ROW)
cq_row_at = struct_view(CQ_ROW)
mkey_row_at = struct_view(MKEY_ROW)
nic_at = struct_view(NIC)
error_record_at = struct_view(ERROR_RECORD)
counters_at = struct_view(COUNTERS)


class Table:
    """Rows of one `Entry`, looked up by number: the low bits are the row, and the row's first field must agree.

    A number is free when its row's first field is 0; row 0 is never used.
    """

    def __init__(self, name: str, entry: Entry, rows: int):
        self.name, self.entry = name, entry
        self.mask = rows - 1
        self._memory = HostMemory(rows * entry.size)
        self.rows = self._memory.view(entry.dtype, 0, rows)
        self.address = self._memory.address
        self._number = entry.dtype.names[0]  # type: ignore[index]

    def __len__(self) -> int:
        return int(np.count_nonzero(self.rows[self._number]))

    def __iter__(self):
        return iter(self.rows[np.flatnonzero(self.rows[self._number])])

    def __contains__(self, number: int) -> bool:
        return number > 0 and int(self.rows[self._slot(number)][self._number]) == number

    def __getitem__(self, number: int) -> Any:
        if number not in self:
            raise NotFoundError(f"no {self.name} {number:#x}; there are {[hex(r[self._number]) for r in self]}")
        return self.rows[self._slot(number)]

    def row_address(self, number: int) -> int:
        """Where the row of `number` lives."""
        return self.address + self._slot(number) * self.entry.size

    def free_slot(self, start: int = 1) -> int | None:
        """The first free row from `start` on, wrapping around; None when the table is full."""
        numbers = self.rows[self._number]
        for slots in (range(start, len(numbers)), range(1, start)):
            free = np.flatnonzero(numbers[slots.start : slots.stop] == 0)
            if len(free):
                return slots.start + int(free[0])
        return None

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _slot(self, number: int) -> int:
        return number & self.mask


class MkeyTable(Table):
    """Memory keys: the index is in the upper 24 bits of a key, the low 8 vary."""

    def _slot(self, number: int) -> int:
        return (number >> 8) & self.mask
