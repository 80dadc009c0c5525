"""Copy the payload of a completion into the buffers of its receive."""

from __future__ import annotations

import ctypes

import numpy as np

from ..enums import WcStatus
from ..formats.wqe import DATA_SEG, INLINE_SEG, INVALID_LKEY
from .mr import region_of


def scatter(segments: bytes, payload: bytes, device: str, pdn: int) -> WcStatus:
    """Copy `payload` to the buffers that a receive's data segments name, checking each segment when it is reached.

    The device has not checked the segments; libmlx5 does the same. LOC_LEN_ERR if the payload is longer than the
    buffers, LOC_PROT_ERR if a key does not allow it or this process cannot write to the memory.
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
