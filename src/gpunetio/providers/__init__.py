"""Devices behind the boundary of libibverbs + libmlx5: which exist, and how one is opened."""

from __future__ import annotations

from ..errors import NotFoundError
from . import soft
from .provider import DeviceInfo, Provider


def device_list() -> list[DeviceInfo]:
    """Every device that can be opened (`ibv_get_device_list`)."""
    return soft.device_list()


def open_device(name: str) -> Provider:
    """Open a device by name (`ibv_open_device`)."""
    devices = device_list()
    if name not in (device.name for device in devices):
        raise NotFoundError(f"no device {name!r}; there are: {', '.join(device.name for device in devices)}")
    return soft.open_device(name)
