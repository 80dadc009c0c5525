"""What checks look at: a machine's GPUs and NICs, and those of them that the user wants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..errors import InvalidValueError
from . import nvidia_smi, pci, topology
from .host import Host
from .pci import PciDevice

INFINIBAND = "/sys/class/infiniband"
SOFTWARE_NIC = re.compile(r"soft\d+")  # can be probed, and is in no file


@dataclass(frozen=True)
class Wanted:
    """What the user asks about; "" is any."""

    gpu: str = ""  # a number, "GPU0", or a PCI address
    nic: str = ""  # an RDMA device, a network interface, or a PCI address
    bar1_mib: int = 0  # memory that is to be mapped to the NIC


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, numbered as nvidia-smi does; after its own come those that it does not show."""

    number: int
    address: str
    model: str  # "" when no driver tells
    pci: PciDevice | None  # None where sysfs does not show it, as in some containers
    smi: dict[str, str]  # `nvidia-smi -q`, see `nvidia_smi.parse`

    @property
    def name(self) -> str:
        """As in `nvidia-smi topo -m`."""
        return f"GPU{self.number}"


@dataclass(frozen=True)
class Nic:
    """An RDMA device, or a card of Mellanox/NVIDIA that has none because no driver is loaded."""

    name: str  # the RDMA device's, or the PCI address of a card without
    address: str  # "" for what is no PCI device
    pci: PciDevice | None
    interfaces: tuple[str, ...]  # network interfaces
    rdma: bool  # whether there is an RDMA device

    @property
    def folder(self) -> str:
        """Of the RDMA device in sysfs."""
        return f"{INFINIBAND}/{self.name}"


class Machine:
    """A host's hardware, read when it is asked for."""

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
        """Of vendor NVIDIA, whether a driver is loaded or not.

        Those that nvidia-smi shows come first, since it numbers no others.
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
        """Those that the user asks about."""
        wanted = self.wanted.gpu
        names = {wanted, pci.address_of(wanted), f"GPU{wanted}"}
        return tuple(g for g in self.all_gpus if not wanted or g.name in names or g.address in names)

    @cached_property
    def all_nics(self) -> tuple[Nic, ...]:
        """RDMA devices of any vendor, then cards of Mellanox/NVIDIA without one."""
        found = [self._nic(name) for name in sorted(self.host.names(INFINIBAND).names, key=topology.natural)]
        known = {nic.address for nic in found}
        cards = (d for d in self.pci.values() if d.vendor == pci.MELLANOX and d.base_class == pci.NETWORK)
        bonds = {bond for nic in found for bond in self._bonds(nic)}
        # A virtual function without an RDMA device is a guest's.
        own = (card for card in cards if card.address not in known and not pci.is_virtual(self.host, card))
        others = map(self._card, own)
        return (*found, *(card for card in others if bonds.isdisjoint(self._bonds(card))))

    def _bonds(self, nic: Nic) -> set[str]:
        """Bonds that its interfaces are in: the RDMA device of one port stands for all ports of a bond."""
        folder = "/sys/class/net"
        return {self.host.follow(f"{folder}/{name}/master").text for name in nic.interfaces} - {""}

    def _nic(self, name: str) -> Nic:
        parent = self.host.read(f"{INFINIBAND}/{name}/parent").text
        if parent:  # a software device; older kernels show the card below it as its device
            return Nic(name, "", None, (parent,), rdma=True)
        steps = self.host.follow(f"{INFINIBAND}/{name}/device").text.split("/")
        address = next(filter(None, map(pci.address_of, reversed(steps))), "")  # a sub-function is below its card
        return Nic(name, address, self.pci.get(address), self.host.names(f"{INFINIBAND}/{name}/device/net").names, True)

    def _card(self, card: PciDevice) -> Nic:
        return Nic(card.address, card.address, card, self.host.names(f"{card.folder}/net").names, rdma=False)

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        """Those that the user asks about."""
        wanted = self.wanted.nic
        names = {wanted, pci.address_of(wanted)} - {""}
        return tuple(n for n in self.all_nics if not wanted or names & {n.name, n.address, *n.interfaces})

    @cached_property
    def topo_m(self) -> dict[tuple[str, str], str]:
        """Distances as `nvidia-smi` tells them, see `topology.parse_topo_m`."""
        return topology.parse_topo_m(topology.said(self).text)

    def require_wanted(self) -> None:
        """InvalidValueError when there is no GPU or NIC as the user wants."""
        for what, wanted in (("GPU", self.wanted.gpu), ("NIC", self.wanted.nic)):
            if not wanted or SOFTWARE_NIC.fullmatch(wanted):
                continue
            found, known = (self.gpus, self.all_gpus) if what == "GPU" else (self.nics, self.all_nics)
            if not found:
                there = ", ".join(f"{one.name} ({one.address})" if one.address else one.name for one in known)
                raise InvalidValueError(f"no {what} is {wanted!r}; there is {there or 'none'}")

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of all GPUs with all RDMA devices, those that are nearest to each other first."""
        pairs = [(gpu, nic) for gpu in self.gpus for nic in self.nics if nic.rdma]
        pairs.sort(key=lambda pair: topology.closeness(self, *pair))
        return tuple((gpu.name, nic.name) for gpu, nic in pairs)
