"""Compute the distances between GPUs and NICs from sysfs, in the terms of `nvidia-smi topo -m` (topo_m.py)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import takewhile

from .devices import Gpu, Machine, Nic, natural
from .host import Reading
from .pci import PciDevice

UNKNOWN, SELF = "?", "X"
_ACTIVE = "4: ACTIVE"  # Documentation/ABI/stable/sysfs-class-infiniband


class Distance(StrEnum):
    """The distance between two PCI devices, the nearest first. Names are those of `nvidia-smi topo -m`.

    NVLinks between two GPUs are not a `Distance`, but a text such as "NV18" for 18 links, see `matrix`.
    """

    PIX = "PIX"  # at most one PCIe switch
    PXB = "PXB"  # several switches, but no host bridge
    PHB = "PHB"  # their host bridge
    NODE = "NODE"  # two host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes

    @property
    def rank(self) -> int:
        """0 for the nearest."""
        return tuple(Distance).index(self)


def distance(a: PciDevice | None, b: PciDevice | None) -> Distance | None:
    """Return the distance between two devices; None if sysfs does not show the place of one of them.

    Ports of switches are also bridges. Functions of one card have no bridge of their own below the last common bridge.
    Devices behind one switch share its upstream port, and each has one downstream port below it.
    """
    if a is None or b is None or not a.root or not b.root:
        return None
    if a.root != b.root:
        return Distance.NODE if a.numa == b.numa else Distance.SYS
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a.bridges, b.bridges))))
    below = max(len(a.bridges), len(b.bridges)) - common
    if common == 0 and not (below == 0 and _slot(a) == _slot(b)):
        return Distance.PHB
    return Distance.PIX if below <= 1 else Distance.PXB


def apart(machine: Machine, gpu: Gpu, other: Gpu | Nic) -> Distance | None:
    """Return the distance by sysfs, or else by `nvidia-smi`; None if unknown to both."""
    if found := distance(gpu.pci, other.pci):
        return found
    told = machine.topo_m.get((gpu.name, other.name), "")
    return Distance(told) if told in set(Distance) else None


def hidden(gpu: Gpu, nic: Nic) -> str:
    """Return why sysfs does not show the distance."""
    if not nic.address:
        return f"{nic.name} is not a PCI device"
    one = nic if gpu.pci and gpu.pci.root else gpu
    return f"sysfs does not show where {one.name} ({one.address}) is plugged in"


def _slot(device: PciDevice) -> str:
    """Return the address without the function."""
    return device.address.partition(".")[0]


def matrix(machine: Machine) -> dict[str, dict[str, str]]:
    """Return the distance of each GPU to every GPU and NIC: "X" to itself, "NV18", a `Distance`, or "?" if unknown."""
    found: dict[str, dict[str, str]] = {}
    for gpu in machine.gpus:
        row = found[gpu.name] = {
            other.name: apart(machine, gpu, other) or UNKNOWN for other in (*machine.gpus, *machine.nics)
        }
        row |= {name: cell for name in row if (cell := machine.topo_m.get((gpu.name, name), "")).startswith("NV")}
        row[gpu.name] = SELF
    return found


def nearest(machine: Machine, gpu: Gpu, nics: Iterable[Nic] | None = None) -> Nic | None:
    """Return the nearest of these NICs (default: those that the user asks about); None if there is none."""
    return min(machine.nics if nics is None else nics, key=lambda nic: closeness(machine, gpu, nic), default=None)


def best_nic(machine: Machine, gpu: Gpu) -> Nic | None:
    """Return the best RDMA device for a GPU, of those that the user asks about; None if there is none."""
    return nearest(machine, gpu, (nic for nic in machine.nics if nic.rdma))


def next_active(machine: Machine, gpu: Gpu) -> Nic | None:
    """Return the best RDMA device with an active port."""
    return nearest(machine, gpu, (nic for nic in machine.nics if nic.rdma and active(machine, nic)))


def closeness(machine: Machine, gpu: Gpu, nic: Nic) -> tuple[int, bool, bool, list[str]]:
    """Return a sort key for a GPU's NICs: by distance, then same NUMA node, active port, and name."""
    far = apart(machine, gpu, nic)
    numa = {one.pci.numa if one.pci else None for one in (gpu, nic)}
    return len(Distance) if far is None else far.rank, len(numa) > 1, not active(machine, nic), natural(nic.name)


def active(machine: Machine, nic: Nic) -> bool:
    """Return whether one of a NIC's ports is active."""
    ports = machine.host.names(f"{nic.folder}/ports").names
    return any(is_active(machine.host.read(f"{nic.folder}/ports/{port}/state")) for port in ports)


def is_active(state: Reading) -> bool:
    """Return whether a port's file `state` says ACTIVE."""
    return state.text == _ACTIVE


def pairs(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Return all pairs of a GPU and an RDMA device by name, the nearest first."""
    found = [(gpu, nic) for gpu in machine.gpus for nic in machine.nics if nic.rdma]
    found.sort(key=lambda pair: closeness(machine, *pair))
    return tuple((gpu.name, nic.name) for gpu, nic in found)
