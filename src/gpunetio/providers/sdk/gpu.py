"""The DOCA SDK's handle of a GPU, beside our own."""

from __future__ import annotations

from collections.abc import Callable

from .libraries import sdk
from .signatures import GPU


def create_gpu(bus_id: str) -> Callable[[], None] | None:
    """`doca_gpu_create`, if the environment asks for the SDK, and it is there: what destroys the handle."""
    found = sdk()
    if found is None or not found.use(GPU):
        return None
    gpu = found.make("doca_gpu_create", bus_id.encode())
    return lambda: found.call("doca_gpu_destroy", gpu)
