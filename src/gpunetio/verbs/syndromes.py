"""The syndromes of error completions: the verbs status and the meaning of each."""

from __future__ import annotations

from typing import NamedTuple

from ..enums import WcStatus
from ..formats.cqe import Syndrome


class Meaning(NamedTuple):
    """The verbs status and the description of a syndrome."""

    status: WcStatus
    text: str


_S, _W = Syndrome, WcStatus
MEANINGS: dict[int, Meaning] = {
    _S.LOCAL_LENGTH:        Meaning(_W.LOC_LEN_ERR, "a message is longer than the device, or the receive, takes"),
    _S.LOCAL_QP_OP:         Meaning(_W.LOC_QP_OP_ERR, "the request is malformed, or not one for this queue pair"),
    _S.LOCAL_PROT:          Meaning(_W.LOC_PROT_ERR, "a local key is unknown, of another protection domain, or "
                                                     "does not cover the range"),
    _S.WR_FLUSH:            Meaning(_W.WR_FLUSH_ERR, "the queue pair was in ERR: an earlier error, or a modify"),
    _S.MW_BIND:             Meaning(_W.MW_BIND_ERR, "a memory window could not be bound"),
    _S.BAD_RESP:            Meaning(_W.BAD_RESP_ERR, "the peer's answer does not fit the request"),
    _S.LOCAL_ACCESS:        Meaning(_W.LOC_ACCESS_ERR, "a request of the peer met memory without the right here"),
    _S.REMOTE_INVAL_REQ:    Meaning(_W.REM_INV_REQ_ERR, "the peer refused the request: rights of its queue pair, "
                                                        "alignment, or a short receive"),
    _S.REMOTE_ACCESS:       Meaning(_W.REM_ACCESS_ERR, "the peer refused the remote key, its range or its rights"),
    _S.REMOTE_OP:           Meaning(_W.REM_OP_ERR, "the peer failed while it executed the request"),
    _S.TRANSPORT_RETRY_EXC: Meaning(_W.RETRY_EXC_ERR, "the peer did not answer through all retries"),
    _S.RNR_RETRY_EXC:       Meaning(_W.RNR_RETRY_EXC_ERR, "the peer had no receive posted through all retries"),
    _S.REMOTE_ABORTED:      Meaning(_W.REM_ABORT_ERR, "the peer aborted the request"),
}


def meaning_of(syndrome: int) -> str:
    """Describe a syndrome, even an undefined one."""
    known = MEANINGS.get(syndrome)
    return known.text if known else "a syndrome that the PRM does not define"
