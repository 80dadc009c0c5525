"""PCI devices as sysfs shows them (kernel Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .host import Host

FOLDER = "/sys/bus/pci/devices"
NVIDIA, MELLANOX = 0x10DE, 0x15B3
DISPLAY, NETWORK = 0x03, 0x02  # base classes (PCI Code and ID Assignment Specification)
_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def address_of(text: str) -> str:
    """A PCI address as sysfs writes it, "0000:ca:00.0", from any way that tools write it; "" for anything else."""
    found = _ADDRESS.fullmatch(text.strip() if text.count(":") == 2 else f"0:{text.strip()}")
    if not found:
        return ""
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def short(address: str) -> str:
    """Without the domain if that is 0, as lspci writes addresses."""
    return address.removeprefix("0000:")


@dataclass(frozen=True)
class PciDevice:
    """A function, and where it is plugged in."""

    address: str
    vendor: int
    device: int
    base_class: int
    numa: int  # −1 when the firmware does not say
    root: str  # the host bridge, as "pci0000:b0"
    path: tuple[str, ...]  # addresses from the root port to the device itself

    @property
    def bridges(self) -> tuple[str, ...]:
        """Root port first."""
        return self.path[:-1]

    @property
    def folder(self) -> str:
        """Its folder in sysfs."""
        return f"{FOLDER}/{self.address}"


def is_virtual(host: Host, device: PciDevice) -> bool:
    """Whether it is a virtual function of SR-IOV."""
    return host.follow(f"{device.folder}/physfn").ok


def devices(host: Host) -> dict[str, PciDevice]:
    """All of the machine's, by address; none where sysfs shows none."""
    return {name: device(host, name) for name in host.names(FOLDER).names if address_of(name) == name}


def device(host: Host, address: str) -> PciDevice:
    """One of them; −1 and "" stand for what cannot be read."""
    folder = f"{FOLDER}/{address}"
    vendor, number, class_code, numa = (
        -1 if (value := host.read(f"{folder}/{name}").number) is None else value
        for name in ("vendor", "device", "class", "numa_node")
    )
    steps = host.follow(folder).text.split("/")
    root = next((step for step in steps if step.startswith("pci")), "")
    path = tuple(step for step in steps if step and address_of(step) == step) or (address,)
    return PciDevice(address, vendor, number, class_code >> 16 if class_code >= 0 else -1, numa, root, path)
