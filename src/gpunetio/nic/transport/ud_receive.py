"""The receiver of unreliable datagrams (IBTA 9.6.1.4, 9.8.3). What the queue pair does not take is dropped in silence.

The first 40 bytes of a receive are for the GRH. On RoCE v2 these are the packet's IPv6 header or, in the last 20 bytes,
its IPv4 header (annex A17.4.5.1). Sockets do not show that header, so it is put together here; traffic class, flow
label and hop limit are not the packet's.
"""

from __future__ import annotations

from ...fabric.frames import HOP_LIMIT
from ...fabric.ip_headers import put_ipv4, put_ipv6
from ...fabric.udp_records import is_mapped
from ...formats.commands import ServiceType
from ...formats.cqe import CQE64, CQE_ROCE_IPV4, CQE_ROCE_IPV6, GRH_SHIFT, INLINE_32_BYTES, SL_SHIFT
from ...formats.packet import (
    BTH, DETH, GRH, ICRC_SIZE, IMM_DT, IPV4, LRH, OPERATION_MASK, PAD_SHIFT, QPN_MASK, SOLICITED, UDP,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be32, ld16, ld32, ld64, ld8, st16, st32, st64
from ..queues.completion import stage_payload
from ..queues.operations import has_imm, header_bytes, is_first, is_last, is_request, receive_cqe_of, wqe_opcode_of
from ..state.counters import CounterSet
from ..state.objects import GID_ROW
from ..state.qp import QpRow
from ..state.reasons import Reason
from ..state.wire import WireState
from ..state.worker import WorkerState
from .execution import complete_receive, fail_scatter, receive_scatter, receives_posted, return_shared

_IPV4_AT = GRH.size - IPV4.size


@device_function
def _put_ipv4(header: int, source: int, destination: int, nbytes: int) -> None:
    """Write an IPv4 header for `nbytes` into the last 20 bytes of a GRH's 40."""
    st64(header, 0)
    st64(header + 8, 0)
    st32(header + 16, 0)
    put_ipv4(header + _IPV4_AT, source, destination, nbytes, 0, HOP_LIMIT)


@engine_function
def _global_header(
    worker: WorkerState, wire: WireState, packet: int, link: int, nbytes: int, peer_high: int, peer_low: int
) -> int:
    """Return the address of the 40 bytes before the payload, or 0 if the packet, on InfiniBand, has no GRH.

    `nbytes` is the packet's length from its BTH on.
    """
    if wire.infiniband:
        return packet + LRH.size if link > LRH.size else 0
    high, low = wire.here_high, wire.here_low
    if worker.arrived_at >= 0:
        gid = worker.gids + worker.arrived_at * GID_ROW.size + GID_ROW.gid
        high, low = ld64(gid), ld64(gid + 8)
    header = worker.scratch
    length = UDP.size + nbytes + ICRC_SIZE
    if is_mapped(high, low):
        _put_ipv4(header, peer_low, low, length)
        return header
    put_ipv6(header, peer_high, peer_low, high, low, length, 0, HOP_LIMIT, 0)
    return header


@device_function
def _sender(worker: WorkerState, wire: WireState, packet: int, header: int, qpn: int) -> int:
    """Return the address of the first 32 bytes of the CQE, which say who has sent the datagram."""
    head = stage_payload(worker.message, INLINE_32_BYTES)
    if wire.infiniband:
        flags = (ld8(packet + LRH.sl_lnh) >> 4) << SL_SHIFT
        st16(head + CQE64.slid, ld16(packet + LRH.slid))
    else:
        flags = (CQE_ROCE_IPV4 if ld64(header) == 0 else CQE_ROCE_IPV6) << SL_SHIFT
    if header != 0:
        flags |= 1 << GRH_SHIFT
    st32(head + CQE64.flags_rqpn, be32(flags | qpn))
    return head


@engine_function
def take_datagram(
    worker: WorkerState, qp: QpRow, wire: WireState, packet: int, link: int, nbytes: int, peer_high: int,
    peer_low: int,
) -> None:
    """Take a datagram of `nbytes` from its BTH on, which begins behind `link` bytes of link headers."""
    counters = CounterSet(worker.counters)
    bth = packet + link
    operation = ld8(bth + BTH.opcode) & OPERATION_MASK
    flags = ld8(bth + BTH.se_m_pad_tver)
    size = nbytes - BTH.size - DETH.size - header_bytes(operation) - (flags >> PAD_SHIFT & 3)
    whole = is_request(operation, ServiceType.UD) and is_first(operation) and is_last(operation)
    if not whole or size < 0 or size > qp.mtu or worker.payload_bytes != 0:  # nobody lends the payload of a datagram
        counters.rx_malformed += 1
        return
    deth = bth + BTH.size
    if be32(ld32(deth + DETH.q_key)) != qp.q_key:
        counters.rx_wrong_qkey += 1
        return
    if receives_posted(qp) == 0:
        counters.out_of_buffer += 1
        return
    at = deth + DETH.size
    imm = 0
    if has_imm(operation):
        imm = be32(ld32(at + IMM_DT.imm))
        at += IMM_DT.size
    header = _global_header(worker, wire, packet, link, nbytes, peer_high, peer_low)
    total = GRH.size + size
    reason = receive_scatter(worker, qp, 0, total, header, GRH.size if header != 0 else 0)
    if reason == 0:
        reason = receive_scatter(worker, qp, GRH.size, total, at, size)
    if reason == Reason.RECV_TOO_SMALL:  # a stranger's fault: dropped in silence (IBTA 9.9.3, class D), as in rxe
        return_shared(qp)
        counters.resp_local_length_error += 1
        counters.rx_refused += 1
        return
    if reason != 0:
        fail_scatter(worker, qp, reason)
        counters.rx_refused += 1
        return
    head = _sender(worker, wire, packet, header, be32(ld32(deth + DETH.resv_src_qp)) & QPN_MASK)
    kind, opcode = receive_cqe_of(operation), wqe_opcode_of(operation)
    if complete_receive(worker, qp, kind, total, imm, opcode, flags & SOLICITED, head) != 0:
        counters.rx_refused += 1
        return
    counters.rx_accepted += 1
    counters.rdma_rx_bytes += size
