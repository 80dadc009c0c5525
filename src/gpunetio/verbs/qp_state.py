"""States of a queue pair: the possible transitions, their attributes, and the QPC fields that hold them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from ..arguments import instance, member, whole, within
from ..enums import MtuSize, QpAtomicType, QpAttrMask, QpState, QpType
from ..errors import InvalidValueError, UnexpectedError
from ..formats import commands as c
from ..formats.commands import PM_STATE_MIGRATED, Opcode, OptParam, PrmMtu
from ..formats.contexts import ADS, QPC
from ..formats.layout import BitStruct, Fields
from .ah_attr import AhAttr
from .device_attr import DeviceAttributes

_log = logging.getLogger(__name__)
_M = QpAttrMask
_NONE = QpAttrMask(0)
_NO_OPT = OptParam(0)
_PSN_MASK = 0xFF_FFFF
_RW_RR_ATOMIC = _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ | _M.ATOMIC_MODE
_ALWAYS = _M.CURRENT_STATE | _M.NEXT_STATE
_OF_ACKNOWLEDGEMENTS = _M.MIN_RNR_TIMER | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY  # UC has none
_LOG_MSG_MAX = 30  # messages of up to 1 GiB, the most that a request can send
PATH = "primary_address_path"


@dataclass
class QpAttr:
    """Attributes of a queue pair, to set or as queried (`doca_verbs_qp_attr`). A mask selects the valid ones.

    `path_mtu` is in bytes, 256 to 4096, or an `MtuSize`. `ack_timeout` n means 4.096 µs × 2^n (0: no timeout).
    `min_rnr_timer` is the specification's code. 7 in `rnr_retry` means forever.

    `max_rd_atomic` limits the reads and atomics in flight from this end, `max_dest_rd_atomic` those from the peer: each
    is 0 to 16. Devices have only powers of two: the first is rounded down, the second up. With `max_dest_rd_atomic` 0,
    the peer's reads and atomics are refused. With `max_rd_atomic` 0, one is in flight at a time, because devices cannot
    express 0.

    Only queue pairs for datagrams have a `qkey`. UD queue pairs accept datagrams with this Q_Key, and send it if a
    request asks for it.

    After a query, `sq_draining` says whether sends are still in flight in SQD.
    """

    next_state: QpState = QpState.RST
    current_state: QpState = QpState.RST
    path_mtu: int = 1024
    rq_psn: int = 0
    sq_psn: int = 0
    dest_qp_num: int = 0
    allow_remote_write: bool = False
    allow_remote_read: bool = False
    allow_remote_atomic: QpAtomicType = QpAtomicType.NONE
    ah_attr: AhAttr | None = None
    pkey_index: int = 0
    port_num: int = 1
    ack_timeout: int = 14
    retry_cnt: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 1
    max_rd_atomic: int = 1
    max_dest_rd_atomic: int = 1
    qkey: int = 0
    sq_draining: bool = False


@dataclass(frozen=True)
class Transition:
    """A command, the attributes it requires and those it may carry, in addition to the states."""

    opcode: Opcode
    mailbox: BitStruct
    required: QpAttrMask = _NONE
    optional: QpAttrMask = _NONE
    fixed: dict[str, int] = field(default_factory=dict)  # qpc fields that the command always sets

    def check(self, mask: QpAttrMask, qp_type: QpType = QpType.RC) -> None:
        """Raise InvalidValueError unless the mask has all required attributes and only allowed ones."""
        missing = self.required & ~mask
        if qp_type == QpType.UC:
            missing &= ~_OF_ACKNOWLEDGEMENTS
        extra = QpAttrMask(int(mask) & ~int(self.required | self.optional | _ALWAYS))  # ~ of a flag loses unknown bits
        if missing:
            raise InvalidValueError(f"{self.opcode.name} needs {_names(missing)}: add to the mask")
        if extra:
            raise InvalidValueError(f"{self.opcode.name} does not take {_names(extra)}: remove from the mask")


_FROM_TO = {
    (QpState.RST, QpState.INIT): Transition(
        Opcode.RST2INIT_QP, c.RST2INIT_QP_IN,
        required=_M.PKEY_INDEX | _M.PORT_NUM | _M.ALLOW_REMOTE_WRITE | _M.ALLOW_REMOTE_READ,
        optional=_M.ATOMIC_MODE,
        fixed={"pm_state": PM_STATE_MIGRATED},
    ),
    (QpState.INIT, QpState.INIT): Transition(
        Opcode.INIT2INIT_QP, c.INIT2INIT_QP_IN,
        optional=_M.PKEY_INDEX | _M.PORT_NUM | _RW_RR_ATOMIC,
    ),
    (QpState.INIT, QpState.RTR): Transition(
        Opcode.INIT2RTR_QP, c.INIT2RTR_QP_IN,
        required=_M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER,
        optional=_M.PKEY_INDEX | _M.MAX_DEST_RD_ATOMIC | _RW_RR_ATOMIC,
        fixed={"log_msg_max": _LOG_MSG_MAX},
    ),
    (QpState.RTR, QpState.RTS): Transition(
        Opcode.RTR2RTS_QP, c.RTR2RTS_QP_IN,
        required=_M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY,
        optional=_M.MIN_RNR_TIMER | _M.ALLOW_REMOTE_WRITE | _M.ATOMIC_MODE | _M.MAX_QP_RD_ATOMIC,
        fixed={"log_ack_req_freq": 0},
    ),
    (QpState.RTS, QpState.RTS): Transition(
        Opcode.RTS2RTS_QP, c.RTS2RTS_QP_IN,
        optional=_M.MIN_RNR_TIMER | _M.AH_ATTR | _RW_RR_ATOMIC,
    ),
    (QpState.RTS, QpState.SQD): Transition(Opcode.RTS2SQD_QP, c.RTS2SQD_QP_IN),
    (QpState.SQD, QpState.RTS): Transition(
        Opcode.SQD2RTS_QP, c.SQD2RTS_QP_IN,
        optional=_M.MIN_RNR_TIMER | _RW_RR_ATOMIC,
    ),
}

FROM_ANY_TO = {
    QpState.RST: Transition(Opcode.QP_2RST, c.QP_2RST_IN),
    QpState.ERR: Transition(Opcode.QP_2ERR, c.QP_2ERR_IN),
}


# For datagrams, where a queue pair has no peer: what each transition requires, may carry and always sets.
_OF_DATAGRAMS: dict[tuple[QpState, QpState], tuple[QpAttrMask, QpAttrMask, dict[str, int]]] = {
    (QpState.RST, QpState.INIT):  (_M.PKEY_INDEX | _M.PORT_NUM | _M.QKEY, _NONE, {"pm_state": PM_STATE_MIGRATED}),
    (QpState.INIT, QpState.INIT): (_NONE, _M.PKEY_INDEX | _M.PORT_NUM | _M.QKEY, {}),
    (QpState.INIT, QpState.RTR):  (_NONE, _M.PKEY_INDEX | _M.QKEY, {"mtu": PrmMtu.MTU_4K, "log_msg_max": 12}),
    (QpState.RTR, QpState.RTS):   (_M.SQ_PSN, _M.QKEY, {}),
    (QpState.RTS, QpState.RTS):   (_NONE, _M.QKEY, {}),
    (QpState.SQD, QpState.RTS):   (_NONE, _M.QKEY, {}),
}


def transition(current: QpState, following: QpState, qp_type: QpType = QpType.RC) -> Transition:
    """Return the command that moves a queue pair from one state to another."""
    move = FROM_ANY_TO.get(following) or _FROM_TO.get((current, following))
    if move is None:
        raise InvalidValueError(
            f"no transition from {_state_name(current)} to {_state_name(following)}: "
            "the way is RST, INIT, RTR, RTS, and SQD and back; RST and ERR can be reached from everywhere"
        )
    if qp_type.datagrams:
        required, optional, fixed = _OF_DATAGRAMS.get((current, following), (_NONE, _NONE, {}))
        return replace(move, required=required, optional=optional, fixed=fixed)
    return move


_PRM_STATE: dict[int, QpState] = {
    c.QpState.RST: QpState.RST, c.QpState.INIT: QpState.INIT, c.QpState.RTR: QpState.RTR,
    c.QpState.RTS: QpState.RTS, c.QpState.ERR: QpState.ERR, c.QpState.SQDRAINED: QpState.SQD,
    c.QpState.SQ_DRAINING: QpState.SQD,
}

_PRM_MTU = {
    256: PrmMtu.MTU_256, 512: PrmMtu.MTU_512, 1024: PrmMtu.MTU_1K, 2048: PrmMtu.MTU_2K, 4096: PrmMtu.MTU_4K,
}
_MTU_OF_PRM = {code: mtu for mtu, code in _PRM_MTU.items()}


def mtu_bytes(name: str, value: object) -> int:
    """Convert an MTU, given in bytes or as an `MtuSize`, to bytes."""
    nbytes = value.nbytes if isinstance(value, MtuSize) else whole(name, value)
    if nbytes not in _PRM_MTU:
        raise InvalidValueError(f"{name} = {nbytes}: it must be {', '.join(map(str, _PRM_MTU))} bytes, or an MtuSize")
    return nbytes


def _log2_down(value: int) -> int:
    return max(value, 1).bit_length() - 1


def _log2_up(value: int) -> int:
    return (max(value, 1) - 1).bit_length()


def _psn(value: int) -> int:
    return value & _PSN_MASK


@dataclass(frozen=True)
class _Carrier:
    """Where a command carries an attribute: `field` of the QPC, or `path.field`, and the bit in opt_param_mask."""

    mask: QpAttrMask
    attr: str
    name: str
    opt: OptParam = _NO_OPT
    encode: Callable[[int], int] = int


_CARRIERS = (
    _Carrier(_M.PKEY_INDEX,         "pkey_index",          f"{PATH}.pkey_index",    OptParam.PKEY_INDEX),
    _Carrier(_M.PORT_NUM,           "port_num",            f"{PATH}.vhca_port_num", OptParam.PORT_NUM),
    _Carrier(_M.ALLOW_REMOTE_WRITE, "allow_remote_write",  "rwe",                   OptParam.RWE, bool),
    _Carrier(_M.ALLOW_REMOTE_READ,  "allow_remote_read",   "rre",                   OptParam.RRE, bool),
    _Carrier(_M.ATOMIC_MODE,        "allow_remote_atomic", "rae",                   OptParam.RAE, bool),
    _Carrier(_M.ATOMIC_MODE,        "allow_remote_atomic", "atomic_mode"),
    _Carrier(_M.QKEY,               "qkey",                "q_key",                 OptParam.Q_KEY),
    _Carrier(_M.MIN_RNR_TIMER,      "min_rnr_timer",       "min_rnr_nak",           OptParam.MIN_RNR_NAK),
    _Carrier(_M.RQ_PSN,             "rq_psn",              "next_rcv_psn",          encode=_psn),
    _Carrier(_M.SQ_PSN,             "sq_psn",              "next_send_psn",         encode=_psn),
    _Carrier(_M.DEST_QP_NUM,        "dest_qp_num",         "remote_qpn"),
    _Carrier(_M.PATH_MTU,           "path_mtu",            "mtu",                   encode=_PRM_MTU.__getitem__),
    _Carrier(_M.ACK_TIMEOUT,        "ack_timeout",         f"{PATH}.ack_timeout"),
    _Carrier(_M.RETRY_CNT,          "retry_cnt",           "retry_count"),
    _Carrier(_M.RNR_RETRY,          "rnr_retry",           "rnr_retry"),
    _Carrier(_M.MAX_QP_RD_ATOMIC,   "max_rd_atomic",       "log_sra_max",           encode=_log2_down),
    _Carrier(_M.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic",  "log_rra_max",           encode=_log2_up),
)


@cache
def _carried(mask: int) -> tuple[_Carrier, ...]:
    """Return the carriers of the attributes in a mask. The mask is a plain int, because flags are slow to combine."""
    return tuple(carrier for carrier in _CARRIERS if int(carrier.mask) & mask)


def check_values(attr: QpAttr, mask: QpAttrMask, device: DeviceAttributes) -> None:
    """Raise InvalidValueError for an attribute in the mask whose value the device does not support."""
    ranges = {
        _M.PKEY_INDEX: (0, device.max_pkeys - 1),
        _M.PORT_NUM: (1, device.phys_port_cnt),
        _M.PATH_MTU: (min(_PRM_MTU), max(_PRM_MTU)),
        _M.ATOMIC_MODE: (0, max(QpAtomicType)),
        _M.MAX_QP_RD_ATOMIC: (0, device.max_qp_init_rd_atom),
        _M.MAX_DEST_RD_ATOMIC: (0, device.max_qp_rd_atom),
    }
    for carrier in _carried(int(mask)):
        if carrier.encode is _psn:
            if _psn(value := whole(carrier.attr, getattr(attr, carrier.attr))) != value:
                _log.error("%s = %#x has more than 24 bits: %#x is used", carrier.attr, value, _psn(value))
        else:
            least, most = ranges.get(carrier.mask) or (0, (1 << _width(carrier.name)) - 1)
            within(carrier.attr, getattr(attr, carrier.attr), least, most)
    if _M.ATOMIC_MODE in mask:
        member("allow_remote_atomic", attr.allow_remote_atomic, QpAtomicType)
    if _M.AH_ATTR in mask:
        if attr.ah_attr is None:
            raise InvalidValueError("AH_ATTR is in the mask, and ah_attr is None: set ah_attr to an AhAttr")
        instance("ah_attr", attr.ah_attr, AhAttr).check(device)


@cache
def _width(name: str) -> int:
    path, _, inner = name.rpartition(".")
    return (ADS if path else QPC).fields[inner].width


def carry(attr: QpAttr, mask: QpAttrMask, move: Transition) -> tuple[Fields, OptParam]:
    """Return the QPC fields and opt_param_mask of a transition, without the address handle."""
    qpc: Fields = {PATH: {}, **move.fixed}
    opt = _NO_OPT
    for carrier in _carried(int(mask)):
        path, _, name = carrier.name.rpartition(".")
        (qpc[path] if path else qpc)[name] = int(carrier.encode(whole(carrier.attr, getattr(attr, carrier.attr))))
        # RST2INIT takes all its fields unconditionally, and has no opt_param_mask.
        if carrier.mask in move.optional and move.opcode != Opcode.RST2INIT_QP:
            opt |= carrier.opt
    return qpc, opt


def without_reads(attr: QpAttr, mask: QpAttrMask, move: Transition) -> tuple[QpAttr, QpAttrMask]:
    """Remove the peer's right to READs and atomics, to implement `max_dest_rd_atomic` 0.

    A QPC cannot express this 0. The kernel's driver does the same (`set_qpc_atomic_flags` of mlx5_ib).
    """
    if _M.MAX_DEST_RD_ATOMIC in mask:
        mask |= (_M.ALLOW_REMOTE_READ | _M.ATOMIC_MODE) & move.optional
    return replace(attr, allow_remote_read=False, allow_remote_atomic=QpAtomicType.NONE), mask


def state_of(number: int) -> QpState:
    """Convert the state number in a QPC to a QpState."""
    state = _PRM_STATE.get(number)
    if state is None:
        raise UnexpectedError(f"the device reports queue pair state {number}, which is unknown here")
    return state


def attributes_of(qpc: Fields) -> QpAttr:
    """Convert a QPC to QpAttr, without the address handle."""
    path = qpc[PATH]
    attr = QpAttr(
        next_state=state_of(qpc["state"]),
        current_state=state_of(qpc["state"]),
        rq_psn=qpc["next_rcv_psn"],
        sq_psn=qpc["next_send_psn"],
        dest_qp_num=qpc["remote_qpn"],
        allow_remote_write=bool(qpc["rwe"]),
        allow_remote_read=bool(qpc["rre"]),
        pkey_index=path["pkey_index"],
        port_num=path["vhca_port_num"],
        ack_timeout=path["ack_timeout"],
        retry_cnt=qpc["retry_count"],
        rnr_retry=qpc["rnr_retry"],
        min_rnr_timer=qpc["min_rnr_nak"],
        max_rd_atomic=1 << qpc["log_sra_max"],
        max_dest_rd_atomic=1 << qpc["log_rra_max"],
        qkey=qpc["q_key"],
        sq_draining=qpc["state"] == c.QpState.SQ_DRAINING,
    )
    if qpc["mtu"]:  # may be 0 before INIT2RTR sets it
        if qpc["mtu"] not in _MTU_OF_PRM:
            raise UnexpectedError(f"the device reports MTU code {qpc['mtu']}, which is unknown here")
        attr.path_mtu = _MTU_OF_PRM[qpc["mtu"]]
    if qpc["rae"]:
        if qpc["atomic_mode"] not in list(QpAtomicType):
            raise UnexpectedError(f"the device reports atomic mode {qpc['atomic_mode']}, which is unknown here")
        attr.allow_remote_atomic = QpAtomicType(qpc["atomic_mode"])
    return attr


ATTRIBUTES = {
    _M.NEXT_STATE: "next_state", _M.CURRENT_STATE: "current_state", _M.AH_ATTR: "ah_attr",
    **{carrier.mask: carrier.attr for carrier in _CARRIERS},
}


def _names(mask: QpAttrMask) -> str:
    unknown = int(mask) & ~sum(QpAttrMask)
    return ", ".join([str(bit.name) for bit in mask] + ([f"bits {unknown:#x}"] if unknown else []))


def _state_name(state: int) -> str:
    return QpState(state).name if state in list(QpState) else f"state {state}"
