"""Outgoing packets: space in the wire's pipe, link headers, the base transport header (IBTA 7.7, 8.3, 9.2)."""

from __future__ import annotations

from ...fabric.capture import CaptureRing, capture
from ...fabric.frames import PACKET, Frame, PipeEnd, class_of, commit, hop_limit_of, label_of, reserve, traffic_of
from ...formats.commands import ServiceType
from ...formats.packet import (
    BTH, DEFAULT_PKEY, GRH, GRH_NEXT_HEADER, ICRC_SIZE, LNH_GLOBAL, LNH_LOCAL, LRH, PAD_SHIFT, SERVICE_SHIFT,
    SOLICITED,
)
from ...jit.compile import device_function, engine_function
from ...jit.ops import be16, be32, be64, ld32, ld64, st16, st32, st64, st8
from ..queues.psn import on_wire
from ..state.counters import CounterSet
from ..state.objects import GID_ROW
from ..state.qp import QpRow
from ..state.wire import WIRE, WireState
from ..state.worker import WorkerState

_MIGRATED = 0x40  # path migration is not used: the state is always "migrated" (IBTA 17.2.8)
_GRH_VERSION, _CLASS_SHIFT = 6 << 28, 20


@device_function
def packet_opcode(qp: QpRow, operation: int) -> int:
    """Return the BTH opcode: `operation`, the lower five bits, with this QP's service."""
    return (qp.service & ServiceType.UC) << SERVICE_SHIFT | operation


@engine_function
def _write_link_headers(worker: WorkerState, qp: QpRow, link: int, nbytes: int) -> int:
    """Write the LRH and, if the path has one, the GRH; return the address behind them.

    `nbytes` is the length of the packet without its ICRC.
    """
    st8(link + LRH.vl_lver, 0)
    st8(link + LRH.sl_lnh, qp.sl << 4 | (LNH_GLOBAL if qp.grh else LNH_LOCAL))
    st16(link + LRH.dlid, be16(qp.dlid))
    st16(link + LRH.length, be16((nbytes + ICRC_SIZE) >> 2))
    st16(link + LRH.slid, be16(worker.lid))
    if not qp.grh:
        return link + LRH.size
    grh = link + LRH.size
    gid = worker.gids + qp.source * GID_ROW.size + GID_ROW.gid
    first = _GRH_VERSION | class_of(qp.egress) << _CLASS_SHIFT | label_of(qp.egress)
    st32(grh + GRH.version_class_flow, be32(first))
    st16(grh + GRH.payload_length, be16(nbytes - LRH.size - GRH.size + ICRC_SIZE))
    st8(grh + GRH.next_header, GRH_NEXT_HEADER)
    st8(grh + GRH.hop_limit, hop_limit_of(qp.egress))
    st64(grh + GRH.sgid, ld64(gid))
    st64(grh + GRH.sgid + 8, ld64(gid + 8))
    st64(grh + GRH.dgid, qp.peer_high)
    st64(grh + GRH.dgid + 8, qp.peer_low)
    return grh + GRH.size


@device_function
def link_bytes(qp: QpRow) -> int:
    """Return the bytes of link headers before the BTH of the QP's packets."""
    if not WireState(qp.wire).infiniband:
        return 0
    return LRH.size + (GRH.size if qp.grh else 0)


@engine_function
def open_packet(worker: WorkerState, qp: QpRow, life: int, nbytes: int) -> int:
    """Reserve space for a packet of `nbytes` from its BTH on.

    Return the address of the BTH, or 0 if the pipe is full or the link is down. `life` is that of the requester: this
    QP's for a request, the peer's for a response.
    """
    if worker.link_down:
        return 0
    headers = link_bytes(qp)
    nbytes += headers
    frame = Frame(reserve(PipeEnd(qp.wire + WIRE.tx), nbytes))
    if frame == 0:
        return 0
    frame.nbytes, frame.peer_high, frame.peer_low = nbytes, qp.peer_high, qp.peer_low
    frame.source, frame.life = qp.egress, life
    if headers:
        return _write_link_headers(worker, qp, frame + PACKET, nbytes)
    return frame + PACKET


@device_function
def write_bth(qp: QpRow, bth: int, opcode: int, solicited: int, pad: int, ack_request: int, psn: int) -> None:
    """Write the base transport header (IBTA 9.2)."""
    flags = _MIGRATED | pad << PAD_SHIFT
    if solicited:
        flags |= SOLICITED
    st8(bth + BTH.opcode, opcode)
    st8(bth + BTH.se_m_pad_tver, flags)
    st16(bth + BTH.pkey, DEFAULT_PKEY)
    st32(bth + BTH.resv_dest_qp, be32(qp.remote_qpn))
    st32(bth + BTH.ack_psn, be32(ack_request << 31 | on_wire(psn)))


@engine_function
def close_packet(worker: WorkerState, qp: QpRow, bth: int, nbytes: int, payload: int) -> None:
    """Send a packet after it was filled: `nbytes` from its BTH on, of which `payload` are data."""
    counters = CounterSet(worker.counters)
    counters.rdma_tx_packets += 1
    counters.rdma_tx_bytes += payload
    if worker.capture != 0 and not WireState(qp.wire).whole_frames:
        link = link_bytes(qp)
        source = qp.source | traffic_of(qp.egress)
        ring = CaptureRing(worker.capture)
        capture(ring, bth - link, nbytes + link, qp.peer_high, qp.peer_low, source, 0, worker.now, 1)
    commit(PipeEnd(qp.wire + WIRE.tx))


@device_function
def put_be64(address: int, value: int) -> None:
    """Store a big-endian 64-bit field, which may be aligned to 4 bytes only: a GPU needs two stores for that."""
    swapped = be64(value)
    st32(address, swapped)
    st32(address + 4, swapped >> 32)


@device_function
def get_be64(address: int) -> int:
    """Load a big-endian 64-bit field, which may be aligned to 4 bytes only."""
    return be32(ld32(address)) << 32 | be32(ld32(address + 4))
