"""Connect a queue pair with the attributes that Linux derives from CM messages (`cm_init_qp_*_attr`)."""

from __future__ import annotations

from ..arguments import instance
from ..enums import QpAttrMask, QpState, QpType
from ..errors import BadStateError, NotSupportedError
from ..verbs.ah_attr import AhAttr
from ..verbs.qp import QP
from ..verbs.qp_state import QpAttr
from .communication import Communication, Terms
from .parameters import Parameters
from .path import Path

_M = QpAttrMask
_TO_RTR = (
    _M.NEXT_STATE | _M.AH_ATTR | _M.PATH_MTU | _M.DEST_QP_NUM | _M.RQ_PSN | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
)
_TO_RTS = (
    _M.NEXT_STATE | _M.CURRENT_STATE | _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
)


def check(qp: QP) -> None:
    """Raise an error unless the queue pair can be connected."""
    if instance("qp", qp, QP).type != QpType.RC:
        raise NotSupportedError(f"{qp} is {qp.type.name}: the connection manager connects RC queue pairs")
    state = qp.state
    if state not in (QpState.RST, QpState.INIT):
        raise BadStateError(f"{qp} is in state {state.name}, but is connected from RST or INIT: reset() it first")


def to_init(qp: QP, port_num: int, terms: Terms, parameters: Parameters) -> None:
    """Move to INIT, where receives can be posted. Do nothing if the queue pair is already there."""
    if qp.asked_state == QpState.RST:
        qp.to_init(port=port_num, remote_access=parameters.rights(terms))


def attributes(communication: Communication, parameters: Parameters) -> QpAttr:
    """Return the attributes for RTR and RTS. BadStateError until the terms of both ends are known."""
    own, peer, path = communication.own, communication.peer, communication.data_path
    if own is None or peer is None or path is None:
        raise BadStateError(f"{communication}: the peer has not said how it connects")
    timeout = communication.ack_timeout if parameters.ack_timeout is None else parameters.ack_timeout
    return QpAttr(
        ah_attr=ah_of(path),
        path_mtu=min(own.mtu, peer.mtu),
        dest_qp_num=peer.qpn,
        rq_psn=own.psn if communication.psn is None else communication.psn,
        max_dest_rd_atomic=min(own.responder_resources, peer.initiator_depth),
        min_rnr_timer=parameters.min_rnr_timer,
        sq_psn=peer.psn,
        ack_timeout=timeout,
        retry_cnt=peer.retry_count,
        rnr_retry=peer.rnr_retry,
        max_rd_atomic=min(own.initiator_depth, peer.responder_resources),
    )


def to_rts(qp: QP, communication: Communication, parameters: Parameters) -> None:
    """Move from INIT to RTS. BadStateError until the terms of both ends are known."""
    attr = attributes(communication, parameters)
    attr.next_state = QpState.RTR
    qp.modify(attr, _TO_RTR)
    attr.current_state, attr.next_state = QpState.RTR, QpState.RTS
    qp.modify(attr, _TO_RTS)


def ah_of(path: Path) -> AhAttr:
    """Convert a path to the attributes of an address handle or queue pair."""
    return AhAttr(
        gid=path.gid, sgid_index=path.sgid_index, hop_limit=path.hop_limit, traffic_class=path.traffic_class,
        sl=path.sl, flow_label=path.flow_label,
    )
