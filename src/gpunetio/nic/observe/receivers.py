"""The likely cause why a peer has no receive for a SEND, from what the sender's NIC knows."""

from __future__ import annotations

from ...errors import NotFoundError
from ..state.tables import Table

_TOO_LATE = "the peer posts its receives too late: post them before the sends, or raise rnr_retry (7 = forever)"
_NO_QUEUE = "has no receive queue: give it one (rq_wr of PD.create_qp, receives of Gpu.create_qp) or an SRQ"


def why_not_ready(qps: Table, qpn: int) -> str:
    """Return the likely cause of RNR NAKs for a sending queue pair. A peer on another NIC only reports RNR.

    Another thread may destroy both queue pairs meanwhile.
    """
    unknown = f"{_TOO_LATE}; or its queue pair {_NO_QUEUE}"
    try:
        sender = qps.copy(qpn)
        peer = qps.copy(0 if sender["wire"] else int(sender["remote_qpn"]))
    except NotFoundError:
        return unknown
    if peer["qpn"] != sender["remote_qpn"]:
        return unknown
    has_queue = peer["rq_addr"] or peer["srq"]
    return _TOO_LATE if has_queue else f"QP {int(peer['qpn']):#x}, the peer, {_NO_QUEUE}"
