"""What has gone wrong on an exported queue: the error completion, its cause, and the state of the queue pair."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import QpState
from ..formats.cqe import Syndrome
from ..verbs import QP
from .completions import FailedWqe

_CAUSES = {
    Syndrome.LOCAL_LENGTH: "a message is longer than the device, or the receive, takes",
    Syndrome.LOCAL_QP_OP: "the request is malformed, or not one for this queue pair",
    Syndrome.LOCAL_PROT: "a local key is unknown, of another protection domain, or does not cover the range",
    Syndrome.WR_FLUSH: "the queue pair was in ERR: an earlier error, or a modify",
    Syndrome.MW_BIND: "a memory window could not be bound",
    Syndrome.BAD_RESP: "the peer's answer does not fit the request",
    Syndrome.LOCAL_ACCESS: "a request of the peer met memory without the right here",
    Syndrome.REMOTE_INVAL_REQ: "the peer refused the request: rights of its queue pair, alignment, or a short receive",
    Syndrome.REMOTE_ACCESS: "the peer refused the remote key, its range or its rights",
    Syndrome.REMOTE_OP: "the peer failed while it executed the request",
    Syndrome.TRANSPORT_RETRY_EXC: "the peer did not answer through all retries",
    Syndrome.RNR_RETRY_EXC: "the peer had no receive posted through all retries",
    Syndrome.REMOTE_ABORTED: "the peer aborted the request",
}


@dataclass(frozen=True)
class QpError:
    """Why a queue pair has failed (`doca_gpu_verbs_qp_error_info`): the first error CQE, of a send or of a receive.

    Without such a CQE, as at an end that refused what its peer asked for, `index` is None and both syndromes are 0.
    `cause` is what the device says of it, or what the syndrome means.
    """

    index: int | None
    syndrome: int
    vendor_syndrome: int
    state: QpState
    cause: str

    @classmethod
    def of(cls, qp: QP, state: QpState, failed: FailedWqe | None) -> QpError:
        """The error of a queue pair, with the device's own explanation if it has one."""
        if failed is None:
            cause = qp.ctx.provider.explain(qp.qpn, None) or "the device does not say; a modify does that, too"
            return cls(None, 0, 0, state, cause)
        known = Syndrome(failed.syndrome) if failed.syndrome in list(Syndrome) else None
        cause = qp.ctx.provider.explain(qp.qpn, failed.vendor_syndrome)
        return cls(*failed, state, cause or (_CAUSES[known] if known else "a syndrome that the PRM does not define"))

    def __str__(self) -> str:
        if self.index is None:
            return f"the QP is in {self.state.name} without an error completion: {self.cause}"
        name = Syndrome(self.syndrome).name if self.syndrome in list(Syndrome) else "unknown"
        return (
            f"WQE {self.index} failed: {name} (syndrome {self.syndrome:#04x}, vendor {self.vendor_syndrome:#04x}), "
            f"the QP is in {self.state.name}: {self.cause}"
        )
