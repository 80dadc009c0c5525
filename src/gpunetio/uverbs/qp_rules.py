"""The attributes that `ibv_modify_qp` takes in each transition: those that Linux takes (IBTA 11.2.5.2, table 91).

DOCA's rules, which `gpunetio.verbs` follows, require less: a program would pass here and fail on a card.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from ..enums import QpState, QpType
from .abi import QpMask
from .call import Refused

_NONE = QpMask(0)
_RIGHTS, _PKEY, _PORT, _QKEY = QpMask.ACCESS_FLAGS, QpMask.PKEY_INDEX, QpMask.PORT, QpMask.QKEY
_PATH = QpMask.AV | QpMask.PATH_MTU | QpMask.DEST_QPN | QpMask.RQ_PSN
_ANSWERS = QpMask.MAX_DEST_RD_ATOMIC | QpMask.MIN_RNR_TIMER
_RETRIES = QpMask.TIMEOUT | QpMask.RETRY_CNT | QpMask.RNR_RETRY | QpMask.MAX_QP_RD_ATOMIC
_ALTERNATE, _NOW = QpMask.ALT_PATH | QpMask.PATH_MIG_STATE, QpMask.CUR_STATE
_LATER = _NOW | _RIGHTS | _ALTERNATE


class Rule(NamedTuple):
    """The attributes that a transition must have, and those that it may have."""

    required: QpMask = _NONE
    optional: QpMask = _NONE


_INIT, _RTR, _RTS, _SQD = QpState.INIT, QpState.RTR, QpState.RTS, QpState.SQD
_RULES: dict[tuple[QpState, QpState], dict[QpType, Rule]] = {
    (QpState.RST, _INIT): {
        QpType.RC: Rule(_PKEY | _PORT | _RIGHTS),
        QpType.UC: Rule(_PKEY | _PORT | _RIGHTS),
        QpType.UD: Rule(_PKEY | _PORT | _QKEY),
    },
    (_INIT, _INIT): {
        QpType.RC: Rule(_NONE, _PKEY | _PORT | _RIGHTS),
        QpType.UC: Rule(_NONE, _PKEY | _PORT | _RIGHTS),
        QpType.UD: Rule(_NONE, _PKEY | _PORT | _QKEY),
    },
    (_INIT, _RTR): {
        QpType.RC: Rule(_PATH | _ANSWERS, QpMask.ALT_PATH | _RIGHTS | _PKEY),
        QpType.UC: Rule(_PATH, QpMask.ALT_PATH | _RIGHTS | _PKEY),
        QpType.UD: Rule(_NONE, _PKEY | _QKEY),
    },
    (_RTR, _RTS): {
        QpType.RC: Rule(QpMask.SQ_PSN | _RETRIES, _LATER | QpMask.MIN_RNR_TIMER),
        QpType.UC: Rule(QpMask.SQ_PSN, _LATER),
        QpType.UD: Rule(QpMask.SQ_PSN, _NOW | _QKEY),
    },
    (_RTS, _RTS): {
        QpType.RC: Rule(_NONE, _LATER | QpMask.MIN_RNR_TIMER),
        QpType.UC: Rule(_NONE, _LATER),
        QpType.UD: Rule(_NONE, _NOW | _QKEY),
    },
    (_RTS, _SQD): dict.fromkeys(QpType, Rule(_NONE, QpMask.EN_SQD_NOTIFY)),
    (_SQD, _RTS): {
        QpType.RC: Rule(_NONE, _LATER | QpMask.MIN_RNR_TIMER),
        QpType.UC: Rule(_NONE, _LATER),
        QpType.UD: Rule(_NONE, _NOW | _QKEY),
    },
}
_EVERYWHERE = Rule()  # to RST and ERR
_FROM_RST = {QpState.RST, QpState.INIT}


def check(current: QpState, following: QpState, qp_type: QpType, asked: QpMask) -> None:
    """Refuse a transition, or its attributes, with EINVAL if Linux does (`ib_modify_qp_is_ok`)."""
    way = f"{qp_type.name} from {current.name} to {following.name}"
    rule = rule_of(current, following, qp_type)
    if rule is None:
        raise Refused(errno.EINVAL, f"{way} is not a transition of queue pairs")
    if missing := rule.required & ~asked:
        raise Refused(errno.EINVAL, f"{way} needs {_names(missing)}: add to the mask")
    if extra := QpMask(int(asked) & ~int(rule.required | rule.optional | QpMask.STATE)):
        raise Refused(errno.EINVAL, f"{way} does not take {_names(extra)}: remove from the mask")


def rule_of(current: QpState, following: QpState, qp_type: QpType) -> Rule | None:
    """Return the rule of a transition, or None if there is no such transition."""
    if current is QpState.RST and following not in _FROM_RST:
        return None
    if following in (QpState.RST, QpState.ERR):
        return _EVERYWHERE
    return _RULES.get((current, following), {}).get(qp_type)


def _names(mask: QpMask) -> str:
    unknown = int(mask) & ~sum(QpMask)
    return ", ".join([f"IBV_QP_{bit.name}" for bit in mask] + ([f"bits {unknown:#x}"] if unknown else []))
