"""A machine's GPUs and NICs, and which of them the user asks about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ...errors import InvalidValueError
from . import nvidia_smi, pci, topo_m
from .host import Host
from .pci import PciDevice

INFINIBAND = "/sys/class/infiniband"
SOFTWARE_NIC = re.compile(r"soft\d+")  # can be probed, although sysfs does not have it


@dataclass(frozen=True)
class Wanted:
    """What the user asks about; "" is any."""

    gpu: str = ""  # a number, "GPU0", or a PCI address
    nic: str = ""  # an RDMA device, a network interface, or a PCI address
    bar1_mib: int = 0  # GPU memory to map to the NIC


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, numbered as by nvidia-smi. GPUs that nvidia-smi does not show have higher numbers."""

    number: int
    address: str
    model: str  # "" if no driver reports it
    pci: PciDevice | None  # None if sysfs does not show it, as in some containers
    smi: dict[str, str]  # values of `nvidia-smi -q`, see `nvidia_smi.parse`

    @property
    def name(self) -> str:
        """Its name in `nvidia-smi topo -m`."""
        return f"GPU{self.number}"


@dataclass(frozen=True)
class Nic:
    """An RDMA device, or a Mellanox/NVIDIA card without one because no driver is loaded."""

    name: str  # the RDMA device, or the PCI address of a card without one
    address: str  # "" if it is not a PCI device
    pci: PciDevice | None
    interfaces: tuple[str, ...]  # network interfaces
    rdma: bool  # whether there is an RDMA device

    @property
    def folder(self) -> str:
        """The RDMA device's folder in sysfs."""
        return f"{INFINIBAND}/{self.name}"


class Machine:
    """A host's hardware, read on demand."""

    host: Host
    wanted: Wanted

    def __init__(self, host: Host, wanted: Wanted):
        self.host, self.wanted = host, wanted

    @cached_property
    def pci(self) -> dict[str, PciDevice]:
        """All PCI functions."""
        return pci.devices(self.host)

    @cached_property
    def all_gpus(self) -> tuple[Gpu, ...]:
        """All NVIDIA GPUs, with or without a driver.

        GPUs that nvidia-smi shows come first, because it numbers no others.
        """
        smi = nvidia_smi.parse(nvidia_smi.query(self.host).text)
        seen = [d.address for d in self.pci.values() if d.vendor == pci.NVIDIA and d.base_class == pci.DISPLAY]
        order = dict.fromkeys([*smi, *sorted(seen)])
        return tuple(self._gpu(number, at, smi.get(at, {})) for number, at in enumerate(order))

    def _gpu(self, number: int, address: str, smi: dict[str, str]) -> Gpu:
        told = self.host.read(f"/proc/driver/nvidia/gpus/{address}/information").text
        fields = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
        model = fields.get("Model", "").strip() or smi.get("Product Name", "")
        return Gpu(number, address, model, self.pci.get(address), smi)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the user asks about."""
        wanted = self.wanted.gpu
        names = {wanted, pci.address_of(wanted), f"GPU{wanted}"}
        return tuple(g for g in self.all_gpus if not wanted or g.name in names or g.address in names)

    @cached_property
    def all_nics(self) -> tuple[Nic, ...]:
        """RDMA devices of any vendor, then Mellanox/NVIDIA cards without one."""
        found = [self._nic(name) for name in sorted(self.host.names(INFINIBAND).names, key=natural)]
        known = {nic.address for nic in found}
        cards = (d for d in self.pci.values() if d.vendor == pci.MELLANOX and d.base_class == pci.NETWORK)
        bonds = {bond for nic in found for bond in self._bonds(nic)}
        # A virtual function without an RDMA device belongs to a guest.
        own = (card for card in cards if card.address not in known and not pci.is_virtual(self.host, card))
        others = map(self._card, own)
        return (*found, *(card for card in others if bonds.isdisjoint(self._bonds(card))))

    def _bonds(self, nic: Nic) -> set[str]:
        """Return the bonds of a NIC's interfaces. The RDMA device of one port stands for all ports of a bond."""
        folder = "/sys/class/net"
        return {self.host.follow(f"{folder}/{name}/master").text for name in nic.interfaces} - {""}

    def _nic(self, name: str) -> Nic:
        parent = self.host.read(f"{INFINIBAND}/{name}/parent").text
        if parent:  # a software device; older kernels show the underlying card as its device
            return Nic(name, "", None, (parent,), rdma=True)
        steps = self.host.follow(f"{INFINIBAND}/{name}/device").text.split("/")
        address = next(filter(None, map(pci.address_of, reversed(steps))), "")  # a sub-function is below its card
        return Nic(name, address, self.pci.get(address), self.host.names(f"{INFINIBAND}/{name}/device/net").names, True)

    def _card(self, card: PciDevice) -> Nic:
        return Nic(card.address, card.address, card, self.host.names(f"{card.folder}/net").names, rdma=False)

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        """The NICs that the user asks about."""
        wanted = self.wanted.nic
        names = {wanted, pci.address_of(wanted)} - {""}
        return tuple(n for n in self.all_nics if not wanted or names & {n.name, n.address, *n.interfaces})

    @cached_property
    def topo_m(self) -> dict[tuple[str, str], str]:
        """Distances by `nvidia-smi topo -m`, see `topo_m.parse`."""
        return topo_m.parse(topo_m.query(self.host).text)

    def require_wanted(self) -> None:
        """Raise InvalidValueError if the machine lacks the GPU or NIC that the user asks about."""
        for what, wanted in (("GPU", self.wanted.gpu), ("NIC", self.wanted.nic)):
            if not wanted or SOFTWARE_NIC.fullmatch(wanted):
                continue
            found, known = (self.gpus, self.all_gpus) if what == "GPU" else (self.nics, self.all_nics)
            if not found:
                there = ", ".join(f"{one.name} ({one.address})" if one.address else one.name for one in known)
                raise InvalidValueError(f"no {what} is {wanted!r}; there is {there or 'none'}")


def natural(name: str) -> list[str]:
    """Return a sort key with mlx5_2 before mlx5_10."""
    return [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
