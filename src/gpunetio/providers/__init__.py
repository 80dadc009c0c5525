"""Devices behind the boundary of libibverbs + libmlx5: which exist, and how one is opened."""

from __future__ import annotations

from types import ModuleType

from .. import compiler
from ..errors import NotFoundError, NotSupportedError
from ..nic.port import PortConfig
from .provider import DeviceInfo, Provider

__all__ = ["DeviceInfo", "PortConfig", "Provider", "device_list", "open_device"]


def device_list() -> list[DeviceInfo]:
    """Every device that can be opened (`ibv_get_device_list`): without a compiler that is no software NIC."""
    try:
        return _software().device_list()
    except NotSupportedError:
        return []


def open_device(name: str | None = None, port: PortConfig | None = None) -> Provider:
    """Open a device by name (`ibv_open_device`); None is the first software NIC that no other process has.

    `port` says how a software NIC is attached.
    """
    software = _software()
    if name is None:
        return software.open_first(port)
    devices = device_list()
    if name not in (device.name for device in devices):
        raise NotFoundError(f"no device {name!r}; there are: {', '.join(device.name for device in devices)}")
    return software.open_device(name, port)


def _software() -> ModuleType:
    """The provider of software NICs, whose engine is compiled."""
    with compiler.needed_for("no software NIC can run"):
        from . import soft
    return soft
