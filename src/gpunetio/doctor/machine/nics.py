"""Models of NVIDIA's NICs by PCI device id, and helpers for checks of each NIC."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from ..finding import Finding, skip
from .devices import Machine, Nic
from .host import Reading
from .pci import MELLANOX, PciDevice, address_of, device
from .topology import is_active

_STATE = ("state", "phys_state", "link_layer", "rate")  # kernel Documentation/ABI/stable/sysfs-class-infiniband


class Grade(Enum):
    """What GPUNetIO can do with a model."""

    RECOMMENDED = "ConnectX-6 Dx or later"
    OLD = "mlx5, but older than what NVIDIA recommends"
    NONE = "not mlx5: no doorbells that a GPU could ring"
    UNKNOWN = "a virtual function does not show its model"


@dataclass(frozen=True)
class Model:
    """A NIC model."""

    name: str
    grade: Grade
    bluefield: bool = False

    @property
    def virtual(self) -> bool:
        """Whether it is an SR-IOV virtual function, which has no settings of its own."""
        return self.name.endswith("virtual function")


VIRTUAL = Model("ConnectX virtual function", Grade.UNKNOWN)
# Device ids of vendor 15b3: Linux, drivers/net/ethernet/mellanox/mlx5/core/main.c and …/mlx4/main.c.
MODELS = {
    0x1003: Model("ConnectX-3",                             Grade.NONE),
    0x1007: Model("ConnectX-3 Pro",                         Grade.NONE),
    0x1011: Model("Connect-IB",                             Grade.OLD),
    0x1013: Model("ConnectX-4",                             Grade.OLD),
    0x1014: Model("ConnectX-4 virtual function",            Grade.OLD),
    0x1015: Model("ConnectX-4 Lx",                          Grade.OLD),
    0x1016: Model("ConnectX-4 Lx virtual function",         Grade.OLD),
    0x1017: Model("ConnectX-5",                             Grade.OLD),
    0x1018: Model("ConnectX-5 virtual function",            Grade.OLD),
    0x1019: Model("ConnectX-5 Ex",                          Grade.OLD),
    0x101A: Model("ConnectX-5 Ex virtual function",         Grade.OLD),
    0x101B: Model("ConnectX-6",                             Grade.OLD),
    0x101C: Model("ConnectX-6 virtual function",            Grade.OLD),
    0x101D: Model("ConnectX-6 Dx",                          Grade.RECOMMENDED),
    0x101E: VIRTUAL,
    0x101F: Model("ConnectX-6 Lx",                          Grade.RECOMMENDED),
    0x1021: Model("ConnectX-7",                             Grade.RECOMMENDED),
    0x1023: Model("ConnectX-8",                             Grade.RECOMMENDED),
    0x1025: Model("ConnectX-9",                             Grade.RECOMMENDED),
    0xA2D2: Model("BlueField (ConnectX-5)",                 Grade.OLD, bluefield=True),
    0xA2D3: Model("BlueField (ConnectX-5) virtual function", Grade.OLD),
    0xA2D6: Model("BlueField-2 (ConnectX-6 Dx)",            Grade.RECOMMENDED, bluefield=True),
    0xA2DC: Model("BlueField-3 (ConnectX-7)",               Grade.RECOMMENDED, bluefield=True),
    0xA2DF: Model("BlueField-4 (ConnectX-8)",               Grade.RECOMMENDED, bluefield=True),
}


def is_nvidia(nic: Nic) -> bool:
    """Return whether it is a Mellanox/NVIDIA PCI card."""
    return nic.pci is not None and nic.pci.vendor == MELLANOX


def model_of(machine: Machine, card: PciDevice) -> Model | None:
    """Return the model of a Mellanox/NVIDIA card, for a virtual function by its physical function; None if unknown."""
    found = MODELS.get(card.device)
    if found is VIRTUAL:
        physical = address_of(machine.host.follow(f"{card.folder}/physfn").text.rpartition("/")[2])
        found = MODELS.get(device(machine.host, physical).device, VIRTUAL) if physical else VIRTUAL
    return found


def each_nic(judge: Callable[[Machine, Nic], Iterator[Finding]]) -> Callable[[Machine], Iterator[Finding]]:
    """Turn a judge of one NIC into a check of all NICs."""

    @functools.wraps(judge)
    def ask(machine: Machine) -> Iterator[Finding]:
        if not machine.nics:
            yield skip("no NIC")
        for nic in machine.nics:
            yield from (replace(finding, nic=nic.name) for finding in judge(machine, nic))

    return ask


def port_of(machine: Machine, nic: Nic) -> tuple[str, dict[str, Reading]]:
    """Return the folder and the state of a NIC's first active port, or of its first port; "" if it has no port."""
    folder = f"{nic.folder}/ports"
    ports = [f"{folder}/{name}" for name in machine.host.names(folder).names] if nic.rdma else []
    described = [(port, {name: machine.host.read(f"{port}/{name}") for name in _STATE}) for port in ports]
    active = [one for one in described if is_active(one[1]["state"])]
    return (active or described or [("", {})])[0]
