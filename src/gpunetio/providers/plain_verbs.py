"""The interface to a device without DEVX: libibverbs' own completion queues, queue pairs and shared receive queues.

If a provider has this interface, `verbs` uses it instead of DEVX commands and rings. Handles are ints. Keys and
immediate data are in host byte order. Errors are `DocaError`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..enums import Access, QpAttrMask, QpState, QpType
from ..errors import DocaError

Entries = Sequence[tuple[int, int, int]]  # of a request: (address, length, lkey) as in `ibv_sge`


class QpCap(NamedTuple):
    """`ibv_qp_cap`."""

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


class QpInit(NamedTuple):
    """`ibv_qp_init_attr`. Both queues need a CQ, even if they have no slots."""

    qp_type: QpType
    send_cq: int
    recv_cq: int
    srq: int | None
    cap: QpCap


class NewCq(NamedTuple):
    """The result of `ibv_create_cq`: the handle, and the real number of entries."""

    handle: int
    cqe: int


class NewQp(NamedTuple):
    """The result of `ibv_create_qp`: the handle, the QPN, and the real capacity of the queues."""

    handle: int
    qpn: int
    cap: QpCap


class Route(NamedTuple):
    """`ibv_ah_attr`."""

    dgid: bytes
    dlid: int
    sl: int
    sgid_index: int
    static_rate: int
    hop_limit: int
    traffic_class: int
    is_global: bool
    flow_label: int


class QpValues(NamedTuple):
    """`ibv_qp_attr`. The MTU is in bytes, or 0 if not set."""

    state: QpState
    path_mtu: int = 0
    rq_psn: int = 0
    sq_psn: int = 0
    dest_qp_num: int = 0
    access: Access = Access.LOCAL_WRITE
    pkey_index: int = 0
    port_num: int = 0
    ack_timeout: int = 0
    retry_cnt: int = 0
    rnr_retry: int = 0
    min_rnr_timer: int = 0
    max_rd_atomic: int = 0
    max_dest_rd_atomic: int = 0
    route: Route | None = None
    qkey: int = 0


class Send(NamedTuple):
    """`ibv_send_wr` without wr_id. `inline` replaces the entries. `opcode` and `flags` have libibverbs' values."""

    opcode: int
    flags: int
    entries: Entries
    inline: bytes | None
    remote_addr: int
    rkey: int
    imm: int
    compare_add: int
    swap: int
    ah: int = 0  # for a datagram: the handle of its address handle
    remote_qpn: int = 0
    remote_qkey: int = 0


class Wc(NamedTuple):
    """`ibv_wc`. On failure, opcode, length and immediate data are undefined. The last four fields are for datagrams."""

    wr_id: int
    status: int
    opcode: int
    byte_len: int
    imm: int | None
    qp_num: int
    vendor_err: int
    src_qp: int = 0
    wc_flags: int = 0
    slid: int = 0
    sl: int = 0


class SrqValues(NamedTuple):
    """`ibv_srq_attr`."""

    max_wr: int
    max_sge: int
    srq_limit: int


class Refused(NamedTuple):
    """The first refused request of a post, and the reason. The requests before it were posted."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # it hides tuple.index
    error: DocaError


class PlainVerbs(Protocol):
    """Objects of libibverbs. The requests of a post get the wr_ids `first`, `first` + 1, …"""

    def create_comp_channel(self) -> int: ...

    def comp_channel_fd(self, channel: int) -> int: ...

    def get_cq_event(self, channel: int) -> int | None:
        """Acknowledge the oldest waiting event and return its CQ, or None (`ibv_get_cq_event`)."""
        ...

    def destroy_comp_channel(self, channel: int) -> None: ...

    def create_cq(self, cqe: int, channel: int | None, vector: int = 0) -> NewCq: ...

    def resize_cq(self, cq: int, cqe: int) -> int:
        """Resize a CQ, and return its new number of entries (`ibv_resize_cq`)."""
        ...

    def poll_cq(self, cq: int, most: int) -> list[Wc]: ...

    def req_notify_cq(self, cq: int, solicited_only: bool) -> None:
        """Request an event for the next completion, not for those already in the queue (`ibv_req_notify_cq`)."""
        ...

    def destroy_cq(self, cq: int) -> None: ...

    def create_qp(self, pdn: int, init: QpInit) -> NewQp: ...

    def modify_qp(self, qp: int, values: QpValues, mask: QpAttrMask) -> None:
        """Modify a queue pair (`ibv_modify_qp`). If the mask has one access right, all three are set."""
        ...

    def query_qp(self, qp: int) -> QpValues: ...

    def post_send(self, qp: int, requests: Sequence[Send], first: int) -> Refused | None: ...

    def post_recv(self, qp: int, requests: Sequence[Entries], first: int) -> Refused | None: ...

    def destroy_qp(self, qp: int) -> None: ...

    def create_srq(self, pdn: int, max_wr: int, max_sge: int) -> int: ...

    def post_srq_recv(self, srq: int, requests: Sequence[Entries], first: int) -> Refused | None: ...

    def query_srq(self, srq: int) -> SrqValues: ...

    def arm_srq(self, srq: int, srq_limit: int) -> None:
        """Set the limit of an SRQ (`ibv_modify_srq` with IBV_SRQ_LIMIT)."""
        ...

    def resize_srq(self, srq: int, max_wr: int) -> None:
        """Change the capacity of an SRQ (`ibv_modify_srq` with IBV_SRQ_MAX_WR)."""
        ...

    def destroy_srq(self, srq: int) -> None: ...
