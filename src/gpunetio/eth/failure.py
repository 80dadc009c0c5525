"""The error completions of Ethernet queues."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..formats.cqe import ERR_CQE64, Syndrome
from ..verbs import Context
from ..verbs.syndromes import meaning_of


@dataclass(frozen=True)
class QueueError:
    """An error completion of entry `index`. `cause` is the device's explanation or the syndrome's meaning."""

    index: int
    syndrome: int
    vendor_syndrome: int
    cause: str

    @classmethod
    def in_cqe(cls, ctx: Context, number: int, cqe: np.void, index: int | None = None) -> QueueError:
        """Return the error in a CQE of the queue with this number. By default, `index` is the CQE's WQE index."""
        error = ERR_CQE64.at(np.frombuffer(cqe.tobytes(), np.uint8))
        index = int(error["wqe_counter"]) if index is None else index
        return cls.of(ctx, number, index, int(error["syndrome"]), int(error["vendor_err_synd"]))

    @classmethod
    def of(cls, ctx: Context, number: int, index: int, syndrome: int, vendor: int) -> QueueError:
        """Return an error of the queue with this number, with its cause looked up."""
        cause = ctx.provider.explain(number, vendor) or meaning_of(syndrome)
        return cls(index, syndrome, vendor, cause)

    def __str__(self) -> str:
        name = Syndrome(self.syndrome).name if self.syndrome in list(Syndrome) else "unknown"
        return (
            f"{self.index} failed: {name} (syndrome {self.syndrome:#04x}, vendor {self.vendor_syndrome:#04x}): "
            f"{self.cause}"
        )
