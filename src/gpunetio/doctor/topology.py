"""How far apart GPUs and NICs are, in the words of `nvidia-smi topo -m`, worked out from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from . import nvidia_smi
from .host import Reading
from .pci import PciDevice
from .text import STYLE

if TYPE_CHECKING:
    from .machine import Gpu, Machine, Nic

UNKNOWN, SELF = "?", "X"
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")
_CELL = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|NV\d+")
_ACTIVE = "4: ACTIVE"  # Documentation/ABI/stable/sysfs-class-infiniband


class Distance(StrEnum):
    """What lies between two PCI devices, the nearest first; names as in the legend of `nvidia-smi topo -m`.

    Two GPUs may also be joined by NVLinks: that is the text "NV18" for 18 of them, see `matrix`.
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
    """How far apart two devices are; None where sysfs does not show where one of them is plugged in.

    Ports of switches are bridges, too. Below the last bridge that both have in common there is nothing for functions of
    one card, and one downstream port for each device behind the same switch: its upstream port is what they share.
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
    """The same by sysfs, or else by what `nvidia-smi` says; None where neither tells."""
    if found := distance(gpu.pci, other.pci):
        return found
    told = machine.topo_m.get((gpu.name, other.name), "")
    return Distance(told) if told in set(Distance) else None


def hidden(gpu: Gpu, nic: Nic) -> str:
    """Why sysfs does not tell how far apart they are."""
    if not nic.address:
        return f"{nic.name} is no PCI device"
    one = nic if gpu.pci and gpu.pci.root else gpu
    return f"sysfs does not show where {one.name} ({one.address}) is plugged in"


def _slot(device: PciDevice) -> str:
    """Its address without the function."""
    return device.address.partition(".")[0]


def matrix(machine: Machine) -> dict[str, dict[str, str]]:
    """For each GPU, how far every GPU and NIC is: "X" for itself, "NV18", a `Distance`, or "?" where nobody knows."""
    found: dict[str, dict[str, str]] = {}
    for gpu in machine.gpus:
        row = found[gpu.name] = {
            other.name: apart(machine, gpu, other) or UNKNOWN for other in (*machine.gpus, *machine.nics)
        }
        row |= {name: cell for name in row if (cell := machine.topo_m.get((gpu.name, name), "")).startswith("NV")}
        row[gpu.name] = SELF
    return found


def nearest(machine: Machine, gpu: Gpu, nics: Iterable[Nic] | None = None) -> Nic | None:
    """Of these NICs, or of those that the user asks about; None if there is none."""
    return min(machine.nics if nics is None else nics, key=lambda nic: closeness(machine, gpu, nic), default=None)


def best_nic(machine: Machine, gpu: Gpu) -> Nic | None:
    """The RDMA device to use with a GPU, of those that the user asks about; None if there is none."""
    return nearest(machine, gpu, (nic for nic in machine.nics if nic.rdma))


def next_active(machine: Machine, gpu: Gpu) -> Nic | None:
    """The same of those with an active port."""
    return nearest(machine, gpu, (nic for nic in machine.nics if nic.rdma and active(machine, nic)))


def closeness(machine: Machine, gpu: Gpu, nic: Nic) -> tuple[Any, ...]:
    """Sorts NICs for a GPU: the nearest first, then those of its NUMA node, with an active port, by name."""
    far = apart(machine, gpu, nic)
    numa = {one.pci.numa if one.pci else None for one in (gpu, nic)}
    return len(Distance) if far is None else far.rank, len(numa) > 1, not active(machine, nic), natural(nic.name)


def active(machine: Machine, nic: Nic) -> bool:
    """Whether one of its ports is."""
    ports = machine.host.names(f"{nic.folder}/ports").names
    return any(is_active(machine.host.read(f"{nic.folder}/ports/{port}/state")) for port in ports)


def is_active(state: Reading) -> bool:
    """Whether a port's file `state` says so."""
    return state.text == _ACTIVE


def natural(name: str) -> list[str]:
    """Sorts mlx5_2 before mlx5_10."""
    return [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def said(machine: Machine) -> Reading:
    """The matrix of `nvidia-smi`."""
    return nvidia_smi.said(machine.host, "topo", "-m")


def parse_topo_m(text: str) -> dict[tuple[str, str], str]:
    """What `nvidia-smi topo -m` says of each row and column, as {("GPU0", "mlx5_0"): "PIX", …}.

    The legend's names stand for NIC0 and so on. Columns may be separated by tabs, or by blanks as people paste them: no
    cell has blanks in it. What is no known word is left out.
    """
    lines = STYLE.sub("", text).splitlines()
    legend = {found[1]: found[2] for line in lines if (found := _LEGEND.fullmatch(line))}
    columns: list[str] = []
    cells = {}
    for name, *row in filter(None, map(str.split, lines)):
        if not columns and _GPU.fullmatch(name):
            columns = list(takewhile(lambda word: word != "CPU", (name, *row)))  # up to "CPU Affinity"
        elif name in columns:
            cells |= {(name, column): cell for column, cell in zip(columns, row) if _CELL.fullmatch(cell)}
    return {(legend.get(a, a), legend.get(b, b)): cell for (a, b), cell in cells.items()}
