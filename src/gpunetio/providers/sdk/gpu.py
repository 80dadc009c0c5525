"""The DOCA SDK's GPU handle, in addition to gpunetio's own."""

from __future__ import annotations

from collections.abc import Callable

from .libraries import sdk
from .signatures import GPU


def create_gpu(bus_id: str) -> Callable[[], None] | None:
    """Create the SDK's handle (`doca_gpu_create`). Return the function that destroys it, or None without the SDK."""
    found = sdk()
    if found is None or not found.use(GPU):
        return None
    gpu = found.make("doca_gpu_create", bus_id.encode())
    return lambda: found.call("doca_gpu_destroy", gpu)
