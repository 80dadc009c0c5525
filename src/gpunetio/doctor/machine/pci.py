"""PCI devices in sysfs (kernel Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .host import Host

FOLDER = "/sys/bus/pci/devices"
NVIDIA, MELLANOX = 0x10DE, 0x15B3
DISPLAY, NETWORK = 0x03, 0x02  # base classes (PCI Code and ID Assignment Specification)
_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def address_of(text: str) -> str:
    """Return a PCI address in sysfs notation, "0000:ca:00.0", from any tool's notation; "" for anything else."""
    found = _ADDRESS.fullmatch(text.strip() if text.count(":") == 2 else f"0:{text.strip()}")
    if not found:
        return ""
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def short(address: str) -> str:
    """Return an address without its domain if that is 0, as lspci does."""
    return address.removeprefix("0000:")


@dataclass(frozen=True)
class PciDevice:
    """A PCI function and its place in the tree."""

    address: str
    vendor: int
    device: int
    base_class: int
    numa: int  # −1 if the firmware does not report it
    root: str  # the host bridge, such as "pci0000:b0"
    path: tuple[str, ...]  # addresses from the root port to the device itself

    @property
    def bridges(self) -> tuple[str, ...]:
        """Addresses of the bridges above it, the root port first."""
        return self.path[:-1]

    @property
    def folder(self) -> str:
        """Its folder in sysfs."""
        return f"{FOLDER}/{self.address}"


def is_virtual(host: Host, device: PciDevice) -> bool:
    """Return whether it is an SR-IOV virtual function."""
    return host.follow(f"{device.folder}/physfn").ok


def devices(host: Host) -> dict[str, PciDevice]:
    """Return the machine's PCI functions by address; {} if sysfs shows none."""
    return {name: device(host, name) for name in host.names(FOLDER).names if address_of(name) == name}


def device(host: Host, address: str) -> PciDevice:
    """Return a PCI function. −1 and "" stand for values that cannot be read."""
    folder = f"{FOLDER}/{address}"
    vendor, number, class_code, numa = (
        -1 if (value := host.read(f"{folder}/{name}").number) is None else value
        for name in ("vendor", "device", "class", "numa_node")
    )
    steps = host.follow(folder).text.split("/")
    root = next((step for step in steps if step.startswith("pci")), "")
    path = tuple(step for step in steps if step and address_of(step) == step) or (address,)
    return PciDevice(address, vendor, number, class_code >> 16 if class_code >= 0 else -1, numa, root, path)
