"""Why a peer has no receive for a SEND, as far as its sender's NIC can tell."""

from __future__ import annotations

from ..state.tables import Table

_TOO_LATE = "the peer posts its receives too late: post them before the sends, or raise rnr_retry (7 = forever)"
_NO_QUEUE = "has no receive queue: give it one (rq_wr of PD.create_qp, receives of Gpu.create_qp) or an SRQ"


def why_not_ready(qps: Table, qpn: int) -> str:
    """Return the likely cause, for the sending queue pair. A peer on another NIC only says that it is not ready."""
    if qpn not in qps or qps[qpn]["wire"] or int(qps[qpn]["remote_qpn"]) not in qps:
        return f"{_TOO_LATE}; or its queue pair {_NO_QUEUE}"
    peer = qps[int(qps[qpn]["remote_qpn"])]
    has_queue = peer["rq_addr"] or peer["srq"]
    return _TOO_LATE if has_queue else f"QP {int(peer['qpn']):#x}, the peer, {_NO_QUEUE}"
