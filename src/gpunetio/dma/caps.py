"""The limits of a device's copies (`doca_dma_cap_task_memcpy_*`)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import NotSupportedError
from ..verbs import Context

MAX_BUF_LIST_LEN = 64


@dataclass(frozen=True, kw_only=True)
class DmaCaps:
    """Limits of copies.

    `max_buf_size`      maximum bytes of a buffer, or of a kernel's copy (`doca_dma_cap_…_get_max_buf_size`)
    `max_buf_list_len`  maximum number of buffers in a list (`doca_dma_cap_…_get_max_buf_list_len`)
    """

    max_buf_size: int
    max_buf_list_len: int


def query_caps(ctx: Context) -> DmaCaps:
    """Query the limits of a device. NotSupportedError if it has no DMA (`doca_dma_cap_task_memcpy_is_supported`)."""
    longest = ctx.query_device().max_wr_memcpy_length
    if not longest:
        why = "only libibverbs drives it" if not ctx.has_devx else "its queue pairs do not copy memory (dma_mmo_qp)"
        raise NotSupportedError(f"{ctx.name} has no DMA: {why}; use a card that has it, or a software NIC")
    return DmaCaps(max_buf_size=longest, max_buf_list_len=MAX_BUF_LIST_LEN)
