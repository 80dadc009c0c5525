"""Checks of PCI Express: what slows a GPU or a NIC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from . import pci_config
from .finding import GUIDE, HARDWARE, Evidence, Finding, check, evidence, few, ok, skip, warn
from .host import Host, Kind, Reading, Trouble
from .machine import Machine
from .pci import PciDevice, short

AREA = "PCI Express"
_Subject = tuple[dict[str, str], PciDevice]  # fields of a finding, and whom it is about


def _gpus(machine: Machine) -> Iterator[_Subject]:
    return (({"gpu": gpu.name}, gpu.pci) for gpu in machine.gpus if gpu.pci)


def _nics(machine: Machine) -> Iterator[_Subject]:
    return (({"nic": nic.name}, nic.pci) for nic in machine.nics if nic.pci)


# --- IOMMU ------------------------------------------------------------------------------------------------------------

_OFF = {"dmar": "intel_iommu=off", "ivhd": "amd_iommu=off"}  # by names of units in /sys/class/iommu
_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict", "pci")


@check(
    "iommu", "IOMMU",
    why="An IOMMU that translates addresses slows writes between a GPU and a NIC, and on some platforms stops them.",
    cure='in /etc/default/grub: GRUB_CMDLINE_LINUX_DEFAULT="iommu=pt <more options>" (or iommu=off), then '
         "sudo update-grub && sudo reboot; or BIOS: VT-d or IOMMU to Disabled",
    source=f"{GUIDE}: BlueField NIC; kernel Documentation/ABI/testing/sysfs-kernel-iommu_groups", uses=HARDWARE,
    reboot=True,
)  # fmt: skip
def iommu(machine: Machine) -> Iterator[Finding]:
    """Whether it is off, or lets addresses of GPUs and NICs pass."""
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
    types = {"".join(subject.values()): _domain(host, device) for subject, device in subjects}
    read = (evidence(units, ", ".join(units.names)), told, *few(list(map(_type, types.values()))))
    translated = [name for name, reading in types.items() if reading.text.startswith("DMA")]
    if translated:
        off = next((f" {_OFF[name[:4]]}" for name in units.names if name[:4] in _OFF), "")
        pass_through = "iommu.passthrough=1" if any(name.startswith("smmu") for name in units.names) else "iommu=pt"
        return warn(
            f"the IOMMU translates for {', '.join(translated[:4])}{', …' if len(translated) > 4 else ''}", *read,
            cure=f'in /etc/default/grub: GRUB_CMDLINE_LINUX_DEFAULT="{pass_through} <more options>"'
                 + (f', or "iommu=off{off} <more options>"' if off else "") + ", then sudo update-grub && sudo reboot",
        )  # fmt: skip
    if all(reading.text == "identity" for reading in types.values()):
        return ok("the IOMMU lets addresses of GPUs and NICs pass", *read)
    return skip("there is an IOMMU; whether it translates is unknown", *read)


def _domain(host: Host, device: PciDevice) -> Reading:
    """How addresses of a function's group are handled: "identity", "DMA", "DMA-FQ"…; else why it has no group."""
    link = host.follow(f"{device.folder}/iommu_group")
    group = link.text.rpartition("/")[2]
    return host.read(f"/sys/kernel/iommu_groups/{group}/type") if group else replace(link, value=None)


def _type(domain: Reading) -> Evidence:
    none = domain.kind is Kind.LINK and domain.trouble in (Trouble.NONE, Trouble.ABSENT)
    return evidence(domain, "no IOMMU group" if none else None)


# --- Links ------------------------------------------------------------------------------------------------------------


@check(
    "pcie-link", "PCIe link",
    why="A link that runs with fewer lanes or slower than both ends could is a ceiling on all that passes it.",
    cure="seat the card in a slot with all its lanes; BIOS: link speed Auto, bifurcation as the card needs it",
    source="kernel Documentation/ABI/testing/sysfs-bus-pci: current_link_speed, current_link_width", uses=HARDWARE,
)  # fmt: skip
def pcie_link(machine: Machine) -> Iterator[Finding]:
    """Lanes and speed of each GPU's and NIC's own link."""
    subjects = [*_gpus(machine), *_nics(machine)]
    if not subjects:
        yield skip("no GPU and no NIC")
    for subject, device in subjects:
        yield _link(machine.host, subject, device)


def _link(host: Host, subject: dict[str, str], device: PciDevice) -> Finding:
    widths = [host.read(f"{device.folder}/{which}_link_width") for which in ("current", "max")]
    speeds = [host.read(f"{device.folder}/{which}_link_speed") for which in ("current", "max")]
    width, most = (_number(r"(\d{1,2})", reading) for reading in widths)
    speed, fastest = (_number(r"(\d{1,3}(?:\.\d{1,2})?) GT/s.*", reading) for reading in speeds)
    read = (*widths, *speeds)
    if not (0 < width <= most <= 32 and 0 < speed <= fastest):  # virtual machines show 0 or 255 lanes, or "Unknown"
        return skip("the link's width or speed is unknown", *read, **subject)
    link = f"x{width:g} at {speed:g} GT/s"
    if width < most:
        return warn(f"{link}: only {width:g} of {most:g} lanes", *read, **subject)
    if speed == fastest:
        return ok(link, *read, **subject)
    if "gpu" in subject:
        return ok(f"{link} of {fastest:g}: a GPU at rest slows its link down", *read, **subject)
    return warn(f"{link}: slower than its {fastest:g} GT/s", *read, **subject)


def _number(pattern: str, reading: Reading) -> float:
    found = re.fullmatch(pattern, reading.text)
    return float(found[1]) if found else 0


_LEAST_READ, _GOOD_READ = 512, 4096  # bytes


@check(
    "pcie-read-request", "PCIe read requests of the NIC",
    why="A NIC that may ask for few bytes at a time cannot fetch messages from GPU memory at the speed of its port.",
    cure="sudo setpci -s <nic> CAP_EXP+8.w=5000:7000, until the next reboot; or BIOS: Max Read Request Size = 4096",
    source="PCI Express Base Specification: Device Control Register, Max_Read_Request_Size", uses=HARDWARE,
)  # fmt: skip
def pcie_read_request(machine: Machine) -> Iterator[Finding]:
    """Of each NIC."""
    subjects = list(_nics(machine))
    if not subjects:
        yield skip("no NIC")
    for subject, device in subjects:
        reading, config = pci_config.read(machine.host, device.address)
        found = pci_config.device_control(config)
        if found is None:
            length = evidence(reading, f"{len(config)} bytes")
            yield skip(f"MaxReadReq cannot be read; it {pci_config.ROOT}", length, **subject)
            continue
        size = found.max_read_request
        value = f"MaxPayload {found.max_payload} bytes, MaxReadReq {size} bytes, RlxdOrd{'-+'[found.relaxed_ordering]}"
        if size < _LEAST_READ:
            cure = f"sudo setpci -s {short(device.address)} CAP_EXP+8.w=5000:7000"
            yield warn(f"MaxReadReq is {size} bytes", evidence(reading, value), cure=cure, **subject)
        else:
            more = "" if size >= _GOOD_READ else f"; {_GOOD_READ} may be faster"
            yield ok(f"MaxReadReq is {size} bytes{more}", evidence(reading, value), **subject)


_NODES = 1024  # the most that a kernel can be configured for


@check(
    "numa", "Processors near GPU and NIC",
    why="A process on another NUMA node reaches rings and doorbells over the link between sockets.",
    cure="numactl --cpunodebind=<node> --membind=<node> <command>",
    source="kernel Documentation/ABI/testing/sysfs-bus-pci: numa_node, local_cpulist", uses=HARDWARE,
)  # fmt: skip
def numa(machine: Machine) -> Iterator[Finding]:
    """Whether this process may run near each GPU and NIC."""
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
            yield skip("which processors are near is unknown", reading, usable, **subject)
        elif near:
            yield ok(f"{node}: {near} of this process's {len(mine)} processors are near", reading, usable, **subject)
        else:
            cure = f"taskset -c {reading.text[:200]} <command>"
            yield warn(f"{node}: this process may not run there", reading, usable, cure=cure, **subject)


CHECKS = (iommu, pcie_link, pcie_read_request, numa)
