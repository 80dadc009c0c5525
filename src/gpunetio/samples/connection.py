"""RST → INIT → RTR → RTS, step by step, as in DOCA's samples. `QP.connect` does all three in one call."""

from __future__ import annotations

import logging

from ..enums import Access, QpAttrMask, QpState
from ..verbs import QP, AhAttr, QpAttr, QpEndpoint

_M = QpAttrMask
_MTU = 1024  # bytes, as in the original
_log = logging.getLogger(__name__)


def connect(qp: QP, here: QpEndpoint, there: QpEndpoint, access: Access, gid_index: int) -> None:
    """Move the queue pair from RST to RTS. Its own address `here` is entry `gid_index` of the GID table."""
    # INIT: the port, and what the other end may do. Receives can be posted from now on.
    attr = QpAttr(next_state=QpState.INIT, port_num=1, pkey_index=0)
    attr.allow_remote_write = Access.REMOTE_WRITE in access
    attr.allow_remote_read = Access.REMOTE_READ in access
    qp.modify(attr, _M.NEXT_STATE | _M.PORT_NUM | _M.PKEY_INDEX | _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ)

    # RTR, ready to receive: the other end, and the path to it.
    path_mtu = min(_MTU, here.mtu, there.mtu)
    attr = QpAttr(next_state=QpState.RTR, dest_qp_num=there.qpn, rq_psn=there.psn, min_rnr_timer=1)
    attr.path_mtu = path_mtu
    attr.ah_attr = AhAttr(gid=there.gid, dlid=there.lid, sgid_index=gid_index)
    qp.modify(attr, _M.NEXT_STATE | _M.DEST_QP_NUM | _M.RQ_PSN | _M.MIN_RNR_TIMER | _M.PATH_MTU | _M.AH_ATTR)

    # RTS, ready to send: the first PSN, timeouts and retries. 4.096 µs × 2^14 is 67 ms.
    attr = QpAttr(next_state=QpState.RTS, sq_psn=here.psn, ack_timeout=14, retry_cnt=7, rnr_retry=7)
    qp.modify(attr, _M.NEXT_STATE | _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY)
    _log.debug("%s is connected to QP %#x, path MTU %d", qp, there.qpn, path_mtu)
