"""Copies the payload of a completion into the buffers of its receive."""

from __future__ import annotations

import ctypes

import numpy as np

from ..enums import WcStatus
from ..formats.wqe import DATA_SEG, INLINE_SEG, INVALID_LKEY
from .mr import region_of


def scatter(segments: bytes, payload: bytes, device: str, pdn: int) -> WcStatus:
    """Copy `payload` to the buffers that the data segments of a receive name, checking each one when it is reached.

    libmlx5 does the same; the device has not checked the segments. LOC_LEN_ERR if the payload is longer than the
    buffers, LOC_PROT_ERR for a key that does not allow it, or for memory that this process cannot write to.
    """
    for nbytes, lkey, address in np.frombuffer(segments, DATA_SEG.dtype).tolist():
        if not payload or lkey == INVALID_LKEY:
            break
        part, payload = payload[: nbytes or INLINE_SEG], payload[nbytes or INLINE_SEG :]
        region = region_of(device, lkey)
        place = region.writable_at(address, len(part), pdn) if region else None
        if place is None:
            return WcStatus.LOC_PROT_ERR
        ctypes.memmove(place, part, len(part))
    return WcStatus.LOC_LEN_ERR if payload else WcStatus.SUCCESS
