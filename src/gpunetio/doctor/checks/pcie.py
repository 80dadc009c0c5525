"""Check PCI Express: the IOMMU, links, read requests and NUMA nodes of GPUs and NICs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ..finding import GUIDE, HARDWARE, Evidence, Finding, Subject, check, evidence, few, ok, skip, warn
from ..machine import pci_config
from ..machine.devices import Machine
from ..machine.host import Host, Kind, Reading, Trouble
from ..machine.pci import PciDevice, is_virtual, short
from ..machine.pci_link import Link, link_of, links_of_switches

AREA = "PCI Express"
_Subject = tuple[Subject, PciDevice]  # the fields of a finding that name a device, and the device


def _gpus(machine: Machine) -> Iterator[_Subject]:
    return (({"gpu": gpu.name}, gpu.pci) for gpu in machine.gpus if gpu.pci)


def _nics(machine: Machine) -> Iterator[_Subject]:
    return (({"nic": nic.name}, nic.pci) for nic in machine.nics if nic.pci)


# --- IOMMU ------------------------------------------------------------------------------------------------------------

_OFF = {"dmar": "intel_iommu=off", "ivhd": "amd_iommu=off"}  # by names of units in /sys/class/iommu
_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict", "pci")


@check(
    "iommu", "IOMMU",
    why="An IOMMU that translates addresses slows down writes between a GPU and a NIC. Some platforms block them.",
    cure='in /etc/default/grub: GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt <more options>" (or iommu=off), then '
         "sudo update-grub && sudo reboot; or BIOS: VT-d or IOMMU to Disabled",
    source=f"{GUIDE}: BlueField NIC; kernel Documentation/ABI/testing/sysfs-kernel-iommu_groups", uses=HARDWARE,
    reboot=True,
)
def iommu(machine: Machine) -> Iterator[Finding]:
    """Check whether the IOMMU is off, or in passthrough mode for GPUs and NICs."""
    host = machine.host
    units, cmdline = host.names("/sys/class/iommu"), host.read("/proc/cmdline")
    options = [word for word in cmdline.text.split() if word.partition("=")[0] in _OPTIONS]
    told = evidence(cmdline, " ".join(options) or "no option for the IOMMU")
    subjects = [*_gpus(machine), *_nics(machine)]
    if not units.ok and units.trouble is not Trouble.ABSENT:
        yield skip("whether there is an IOMMU is unknown", units, told)
    elif not units.names:
        yield ok("no IOMMU, or it is off", evidence(units, "nothing there"), told)
    elif not subjects:
        yield skip("there is an IOMMU, but no GPU and no NIC", units, told)
    else:
        yield _translation(host, units, told, subjects)


def _translation(host: Host, units: Reading, told: Evidence, subjects: list[_Subject]) -> Finding:
    types = {"".join(map(str, subject.values())): _domain(host, device) for subject, device in subjects}
    read = (evidence(units, ", ".join(units.names)), told, *few(list(map(_type, types.values()))))
    translated = [name for name, reading in types.items() if reading.text.startswith("DMA")]
    if translated:
        off = next((f" {_OFF[name[:4]]}" for name in units.names if name[:4] in _OFF), "")
        pass_through = "iommu.passthrough=1" if any(name.startswith("smmu") for name in units.names) else "iommu=pt"
        return warn(
            f"the IOMMU translates for {', '.join(translated[:4])}{', …' if len(translated) > 4 else ''}", *read,
            cure=f'in /etc/default/grub: GRUB_CMDLINE_LINUX_DEFAULT="{pass_through} <more options>"'
                 + (f', or "iommu=off{off} <more options>"' if off else "") + ", then sudo update-grub && sudo reboot",
        )
    if all(reading.text == "identity" for reading in types.values()):
        return ok("the IOMMU is in passthrough mode for GPUs and NICs", *read)
    return skip("there is an IOMMU; whether it translates is unknown", *read)


def _domain(host: Host, device: PciDevice) -> Reading:
    """Read the type of a function's IOMMU group: "identity", "DMA", "DMA-FQ"…; or why it has no group."""
    link = host.follow(f"{device.folder}/iommu_group")
    group = link.text.rpartition("/")[2]
    return host.read(f"/sys/kernel/iommu_groups/{group}/type") if group else replace(link, value=None)


def _type(domain: Reading) -> Evidence:
    none = domain.kind is Kind.LINK and domain.trouble in (Trouble.NONE, Trouble.ABSENT)
    return evidence(domain, "no IOMMU group" if none else None)


# --- Links ------------------------------------------------------------------------------------------------------------


@check(
    "pcie-link", "PCIe link",
    why="A link with fewer lanes or a lower speed than both ends support limits all traffic that passes it.",
    cure="put the card in a slot with enough lanes; BIOS: link speed Auto, bifurcation as the card needs it",
    source="kernel Documentation/ABI/testing/sysfs-bus-pci: current_link_speed, current_link_width", uses=HARDWARE,
)
def pcie_link(machine: Machine) -> Iterator[Finding]:
    """Check lanes and speed of the links of GPUs and NICs, and of the switches above them."""
    subjects = [*_gpus(machine), *_nics(machine)]
    if not subjects:
        yield skip("no GPU and no NIC")
    slow: dict[str, tuple[Link, list[str]]] = {}  # by upstream port, with the names of the devices below it
    for subject, device in subjects:
        switches = links_of_switches(machine.host, device.path)
        yield _own_link(link_of(machine.host, device.address), subject, switches)
        for port, link in switches.items():
            if link.lacks:
                slow.setdefault(port, (link, []))[1].extend(map(str, subject.values()))
    for port, (link, below) in slow.items():
        yield _link_of_switch(short(port), link, below)


def _own_link(link: Link, subject: Subject, switches: dict[str, Link]) -> Finding:
    if not link.known:
        return skip("the link's width or speed is unknown", *link.read, **subject)
    if link.width < link.most or (link.lacks and "gpu" not in subject):
        return warn(f"{link}: {link.lacks}", *link.read, **subject)
    if link.lacks:
        return ok(f"{link} of {link.fastest:g}: an idle GPU slows its link down", *link.read, **subject)
    port, narrow = min(switches.items(), key=lambda one: one[1].width * one[1].speed, default=("", link))
    if narrow.width * narrow.speed < link.width * link.speed:
        return ok(f"{link}; {narrow} above {short(port)}", *link.read, *narrow.read, **subject)
    return ok(str(link), *link.read, **subject)


def _link_of_switch(port: str, link: Link, below: list[str]) -> Finding:
    names = ", ".join(below[:2]) + (", …" if len(below) > 2 else "")
    return warn(
        f"switch {port} above {names}: {link}: {link.lacks}", *link.read,
        cure=f"reseat the riser or the cable above the switch {port}; BIOS: link speed Auto, bifurcation off",
    )


_LEAST_READ, _GOOD_READ = 512, 4096  # bytes


@check(
    "pcie-read-request", "PCIe read requests of the NIC",
    why="A NIC with small read requests cannot fetch messages from GPU memory at the speed of its port.",
    cure="sudo setpci -s <nic> CAP_EXP+8.w=5000:7000, until the next reboot; or BIOS: Max Read Request Size = 4096",
    source="PCI Express Base Specification: Device Control Register, Max_Read_Request_Size", uses=HARDWARE,
)
def pcie_read_request(machine: Machine) -> Iterator[Finding]:
    """Check Max_Read_Request_Size of each NIC."""
    subjects = list(_nics(machine))
    if not subjects:
        yield skip("no NIC")
    for subject, device in subjects:
        reading, config = pci_config.read(machine.host, device.address)
        found = pci_config.device_control(config)
        if is_virtual(machine.host, device):
            yield skip("a virtual function has the physical function's", **subject)  # SR-IOV: the field is reserved
            continue
        if found is None:
            needs_root = len(config) <= pci_config.HEADER
            why = f"this {pci_config.ROOT}" if needs_root else "it has no such register"
            length = evidence(reading, f"{len(config)} bytes")
            yield skip(f"cannot read MaxReadReq; {why}", length, needs_root=needs_root, **subject)
            continue
        size = found.max_read_request
        value = f"MaxPayload {found.max_payload} bytes, MaxReadReq {size} bytes, RlxdOrd{'-+'[found.relaxed_ordering]}"
        if size < _LEAST_READ:
            cure = f"sudo setpci -s {short(device.address)} CAP_EXP+8.w=5000:7000"
            yield warn(f"MaxReadReq is {size} bytes", evidence(reading, value), cure=cure, **subject)
        else:
            more = "" if size >= _GOOD_READ else f"; {_GOOD_READ} may be faster"
            yield ok(f"MaxReadReq is {size} bytes{more}", evidence(reading, value), **subject)


_NODES = 1024  # the most NUMA nodes that a kernel can be configured for


@check(
    "numa", "Processors near GPU and NIC",
    why="A process on another NUMA node reaches queues and doorbells over the link between sockets.",
    cure="numactl --cpunodebind=<node> --membind=<node> <command>",
    source="kernel Documentation/ABI/testing/sysfs-bus-pci: numa_node, local_cpulist", uses=HARDWARE,
)
def numa(machine: Machine) -> Iterator[Finding]:
    """Check whether this process may run near each GPU and NIC."""
    subjects = [*_gpus(machine), *_nics(machine)]
    affinity = machine.host.ask("affinity")
    mine = [n for n in affinity.value if isinstance(n, int)] if isinstance(affinity.value, list) else []
    if not subjects:
        yield skip("no GPU and no NIC")
    for subject, device in subjects:
        reading = machine.host.read(f"{device.folder}/local_cpulist")
        ranges = re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", reading.text)
        near = sum(any(int(low) <= n <= int(high or low) for low, high in ranges) for n in mine)
        usable = evidence(affinity, f"{len(mine)} processors")
        node = f"node {device.numa}" if 0 <= device.numa < _NODES else "node unknown"
        if not mine or not ranges:
            yield skip("the processors near it are unknown", reading, usable, **subject)
        elif near:
            yield ok(f"{node}: {near} of this process's {len(mine)} processors are near", reading, usable, **subject)
        else:
            cure = f"taskset -c {reading.text[:200]} <command>"
            yield warn(f"{node}: this process may not run on its processors", reading, usable, cure=cure, **subject)


CHECKS = (iommu, pcie_link, pcie_read_request, numa)
