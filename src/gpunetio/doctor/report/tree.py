"""Build the PCIe tree of a machine down to its GPUs and NICs, and print it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..machine.devices import Gpu, Machine, Nic
from ..machine.nics import model_of
from ..machine.pci import PciDevice, short
from ..machine.pci_link import MOST_LANES, link_of
from .text import WIDTH

Below = dict[str, "Below"]  # PCI functions by address, those behind a bridge below it
_CLASSES = {
    0x01: "storage", 0x02: "network", 0x03: "display", 0x04: "multimedia", 0x05: "memory", 0x06: "bridge",
    0x07: "communication", 0x08: "system peripheral", 0x0C: "serial bus", 0x12: "accelerator",
}  # PCI Code and ID Assignment Specification, base classes


@dataclass(frozen=True)
class Node:
    """A host bridge, a port of a switch, or a device."""

    address: str  # "b2:00.0", with the domain if that is not 0; "pci0000:b0" for a host bridge
    kind: str  # "host bridge", "root port", "switch", "port", "bridge", "GPU", "NIC" or "device"
    name: str  # "GPU0", "mlx5_0 (ens6f0)", "PCIe switch", …
    details: tuple[str, ...] = ()
    below: tuple[Node, ...] = ()

    @property
    def label(self) -> str:
        """The node's line in the tree."""
        return f"{self.address}  {self.name}".strip() + "".join(f", {detail}" for detail in self.details)


def build(machine: Machine, everything: bool = False) -> tuple[Node, ...]:
    """Return the host bridges with the branches to GPUs and NICs, or with all devices.

    Devices without a place in sysfs, such as software NICs, come last.
    """
    subjects: dict[str, list[Gpu | Nic]] = {}
    for one in (*machine.gpus, *machine.nics):
        subjects.setdefault(one.address if one.pci and one.pci.root else "", []).append(one)
    shown = machine.pci.values() if everything else filter(None, map(machine.pci.get, subjects))
    roots: Below = {}
    for device in shown:
        below = roots
        for step in filter(None, (device.root, *device.path)):
            below = below.setdefault(step, {})
    made = [_host_bridge(machine, subjects, root, below) for root, below in sorted(roots.items())]
    elsewhere = tuple(_subject(machine, [one], ()) for one in subjects.get("", ()))
    return (*made, *([Node("", "host bridge", "no place on a PCI bus", (), elsewhere)] if elsewhere else []))


def _host_bridge(machine: Machine, subjects: dict[str, list[Gpu | Nic]], root: str, below: Below) -> Node:
    numa = sorted({device.numa for device in map(machine.pci.get, _addresses(below)) if device and device.numa >= 0})
    where = f"NUMA node{'s' if len(numa) > 1 else ''} {', '.join(map(str, numa))}"
    nodes = _nodes(machine, subjects, below, 0)
    return Node(root, "host bridge", "host bridge", (where,) if numa else (), nodes)


def _addresses(below: Below) -> Iterator[str]:
    for address, deeper in below.items():
        yield address
        yield from _addresses(deeper)


def _nodes(
    machine: Machine, subjects: dict[str, list[Gpu | Nic]], below: Below, depth: int
) -> tuple[Node, ...]:
    made = []
    for address, deeper in sorted(below.items()):
        nodes = _nodes(machine, subjects, deeper, depth + 1)
        if found := subjects.get(address):
            made.append(_subject(machine, found, nodes))
        else:
            made.append(_between(machine, address, nodes, depth))
    return tuple(made)


def _subject(machine: Machine, ones: list[Gpu | Nic], below: tuple[Node, ...]) -> Node:
    """Return the node of a GPU or a NIC. A function may have several RDMA devices."""
    one = ones[0]
    link = _link(machine, one.pci) if one.pci else ()
    if isinstance(one, Gpu):
        return Node(short(one.address), "GPU", one.name, (*link, *filter(None, [plain(one.model)])), below)
    names = ", ".join(_nic_name(nic) for nic in ones if isinstance(nic, Nic))
    return Node(short(one.address), "NIC", plain(names), (*link, *_nic_model(machine, one)), below)


def _nic_name(nic: Nic) -> str:
    name = nic.name if nic.rdma else "NIC without RDMA device"
    return f"{name} ({', '.join(nic.interfaces)})" if nic.interfaces else name


def _nic_model(machine: Machine, nic: Nic) -> tuple[str, ...]:
    model = model_of(machine, nic.pci) if nic.pci else None
    return (model.name,) if model else (_numbers(nic.pci),) if nic.pci else ("software",) if not nic.address else ()


def _between(machine: Machine, address: str, below: tuple[Node, ...], depth: int) -> Node:
    """Return the node of a bridge. Below a root port, upstream and downstream ports of switches alternate."""
    device = machine.pci.get(address)
    if not below and device:
        return Node(short(address), "device", _CLASSES.get(device.base_class, "device"), (_numbers(device),))
    if depth % 2 == 0:
        return Node(short(address), *(("root port", "root port") if depth == 0 else ("port", "port")), (), below)
    link = _link(machine, device) if device else ()
    if any(node.kind == "port" for node in below):
        return Node(short(address), "switch", "PCIe switch", link, below)
    return Node(short(address), "bridge", "bridge", link, below)


def _numbers(device: PciDevice) -> str:
    """Return vendor and device in the notation of `lspci -n`."""
    return f"{device.vendor & 0xFFFF:04x}:{device.device & 0xFFFF:04x}"


def _link(machine: Machine, device: PciDevice) -> tuple[str, ...]:
    """Return width and speed of the link above a device, and their maximum if that is higher."""
    link = link_of(machine.host, device.address)
    now, most = _width_speed(link.width, link.speed), _width_speed(link.most, link.fastest)
    return () if not now else (now,) if now == most or not most else (f"{now} of {most}",)


def _width_speed(width: float, speed: float) -> str:
    return f"x{width:g} {speed:.1f} GT/s" if 0 < width <= MOST_LANES and speed else ""


def plain(text: str) -> str:
    """Replace characters that terminals and XML do not accept. A recording can contain any bytes."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def rows(nodes: Iterable[Node], above: str | None = None) -> Iterator[tuple[str, Node]]:
    """Yield each node with its branch in box-drawing characters."""
    nodes = tuple(nodes)
    for node in nodes:
        last = node is nodes[-1]
        yield "" if above is None else above + ("└─ " if last else "├─ "), node
        yield from rows(node.below, "" if above is None else above + ("   " if last else "│  "))


def table(matrix: dict[str, dict[str, str]], width: int = WIDTH) -> list[str]:
    """Return the lines of `topology.matrix`. A matrix that is too wide is split into parts."""
    columns = [(name, max(len(name), 4)) for name in next(iter(matrix.values()), {})]
    first = max(map(len, matrix), default=0)
    lines: list[str] = []
    while columns:
        fits = 1
        while fits < len(columns) and first + sum(size + 2 for _, size in columns[: fits + 1]) <= width:
            fits += 1
        part, columns = columns[:fits], columns[fits:]
        lines += [""] if lines else []
        lines.append(" " * first + "".join(f"  {plain(name):<{size}}" for name, size in part))
        for gpu, row in matrix.items():
            lines.append(f"{gpu:<{first}}" + "".join(f"  {row[name]:<{size}}" for name, size in part))
    return [line.rstrip() for line in lines]
