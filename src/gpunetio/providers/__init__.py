"""Devices behind the boundary of libibverbs + libmlx5: which exist, and how one is opened."""

from __future__ import annotations

from ..errors import NotFoundError
from ..nic.port import PortConfig
from . import soft
from .provider import DeviceInfo, Provider

__all__ = ["DeviceInfo", "PortConfig", "Provider", "device_list", "open_device"]


def device_list() -> list[DeviceInfo]:
    """Every device that can be opened (`ibv_get_device_list`)."""
    return soft.device_list()


def open_device(name: str | None = None, port: PortConfig | None = None) -> Provider:
    """Open a device by name (`ibv_open_device`); None is the first software NIC that no other process has.

    `port` says how a software NIC is attached.
    """
    if name is None:
        return soft.open_first(port)
    devices = device_list()
    if name not in (device.name for device in devices):
        raise NotFoundError(f"no device {name!r}; there are: {', '.join(device.name for device in devices)}")
    return soft.open_device(name, port)
