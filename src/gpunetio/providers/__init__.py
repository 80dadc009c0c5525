"""Devices behind the boundary of libibverbs and libmlx5: list them, and open one."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import ModuleType

from .. import compiler
from ..enums import PortState
from ..errors import DocaError, InvalidValueError, NotFoundError, NotSupportedError
from ..nic.engine.port import PortConfig
from .mlx5.device import FoundDevice, found_devices
from .mlx5.libraries import libmlx5
from .provider import DeviceInfo, Provider

__all__ = [
    "DeviceInfo", "PortConfig", "Provider", "compile_for", "device_list", "no_hardware", "no_software", "open_device",
]

logger: logging.Logger = logging.getLogger("gpunetio.providers")


def device_list() -> list[DeviceInfo]:
    """Return all devices that can be opened (`ibv_get_device_list`): those of libibverbs, then the software NICs.

    Without llvmlite, there are no software NICs.
    """
    return [*(device.info for device in _hardware()), *_software_list()]


def no_hardware() -> str | None:
    """Return why there are only software NICs, or None if libibverbs lists devices."""
    try:
        return None if found_devices() else "libibverbs finds no devices: there is no card, or its driver is not loaded"
    except DocaError as error:
        return str(error)


def no_software() -> str | None:
    """Return why there are no software NICs, or None if there are some."""
    try:
        _software()
        return None
    except NotSupportedError as error:
        return str(error)


def open_device(name: str | None = None, port: PortConfig | None = None) -> Provider:
    """Open a device by name (`ibv_open_device`).

    With None, open the first card with an active port, or else the first software NIC that no other process has open;
    the log names it. `port` configures the port of a software NIC. With `port` and no name, open a software NIC.
    """
    if name is None:
        return (_open_card() if port is None else None) or _open_software(port)
    for device in _hardware():
        if device.name == name:
            if port is not None:
                raise InvalidValueError(f"port = {port}: {name} is not a software NIC: the system configures its ports")
            return _open(device)
    if not no_software() and _software().has(name):
        return _software().open_device(name, port)
    there = ", ".join(device.name for device in device_list()) or "none"
    whys = "; ".join(filter(None, (no_hardware(), no_software())))
    raise NotFoundError(f"no device {name!r}; there are: {there}" + (f" ({whys})" if whys else ""))


def compile_for(name: str | None, port: PortConfig | None) -> None:
    """Compile what a device needs, without opening it. The first time, this takes twenty seconds."""
    if (name is None and port is None and any(device.card for device in _hardware())) or no_software():
        return
    if name is None or _software().has(name):
        _software().compile_for(port)


def _hardware() -> list[FoundDevice]:
    """Return the devices that libibverbs lists, or none if it cannot be loaded."""
    try:
        return found_devices()
    except DocaError as error:
        logger.debug("no devices but software NICs: %s", error)
        return []


def _software() -> ModuleType:
    """Return the provider of software NICs, after compiling its engine."""
    with compiler.needed_for("no software NIC can run"):
        from . import soft
    return soft


def _software_list() -> list[DeviceInfo]:
    return [] if no_software() else _software().device_list()


def _open(device: FoundDevice) -> Provider:
    if not device.mlx5 and device.of_nvidia:
        libmlx5()  # raises an error that says why it cannot be loaded
    if not device.mlx5:
        from .plain import open_device as open_plain

        return open_plain(device.name)
    from .mlx5.provider import open_device as open_mlx5

    return open_mlx5(device.name)


def _open_card() -> Provider | None:
    """Open the first card with an active port. Return None if there is none."""
    for device in _hardware():
        if not device.card:
            continue
        try:
            with ExitStack() as undo:
                provider = _open(device)
                undo.callback(provider.close)
                ports = range(1, provider.query_device().phys_port_cnt + 1)
                if active := [port for port in ports if provider.query_port(port).state == PortState.ACTIVE]:
                    logger.info("device %s: its port %d is active", device.name, active[0])
                    undo.pop_all()
                    return provider
                logger.info("%s is skipped: none of its ports is active", device.name)
        except DocaError as error:
            logger.warning("%s is skipped: %s", device.name, error)
    return None


def _open_software(port: PortConfig | None) -> Provider:
    if why := no_software():
        there = ", ".join(device.name for device in device_list())
        raise NotSupportedError(f"{why}" + (f"; or name one of {there}" if there else ""))
    provider = _software().open_first(port)
    logger.info("device %s, a software NIC: no card has an active port", provider.name)
    return provider
