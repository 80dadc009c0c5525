"""What went wrong on an exported queue: the error completion, its cause, and the state of the queue pair."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import QpState
from ..formats.cqe import Syndrome
from ..verbs import QP
from ..verbs.syndromes import meaning_of
from .completions import FailedWqe


@dataclass(frozen=True)
class QpError:
    """Why a queue pair has failed (`doca_gpu_verbs_qp_error_info`): the first error CQE, of a send or of a receive.

    `index` is None and both syndromes are 0 if there is no such CQE, for example on a responder that refused a request.
    If the queue pair is not connected, `index` is the first request that waits, and both syndromes are 0.
    `cause` is the device's explanation, or else the meaning of the syndrome.
    """

    index: int | None
    syndrome: int
    vendor_syndrome: int
    state: QpState
    cause: str

    @classmethod
    def of(cls, qp: QP, state: QpState, failed: FailedWqe | None) -> QpError:
        """Return the error of a queue pair, with the device's own explanation if it has one."""
        if failed is None:
            cause = qp.ctx.provider.explain(qp.qpn, None) or "no reason from the device; a modify to ERR does that, too"
            return cls(None, 0, 0, state, cause)
        cause = qp.ctx.provider.explain(qp.qpn, failed.vendor_syndrome)
        return cls(*failed, state, cause or meaning_of(failed.syndrome))

    @classmethod
    def unconnected(cls, qp: QP, state: QpState, index: int) -> QpError:
        """Return the error of requests in a state that sends nothing; `index` is the first of them."""
        return cls(index, 0, 0, state, f"{qp} is in {state.name} and sends nothing before RTS: connect() it")

    def __str__(self) -> str:
        if self.index is not None and self.syndrome == 0:
            return f"WQE {self.index} waits: {self.cause}"
        if self.index is None:
            return f"the QP is in {self.state.name} without an error completion: {self.cause}"
        name = Syndrome(self.syndrome).name if self.syndrome in list(Syndrome) else "unknown"
        return (
            f"WQE {self.index} failed: {name} (syndrome {self.syndrome:#04x}, vendor {self.vendor_syndrome:#04x}), "
            f"the QP is in {self.state.name}: {self.cause}"
        )
