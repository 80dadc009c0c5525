"""NVIDIA's driver, asked only where that changes nothing, and `nvidia-smi -q` as a table for each GPU."""

from __future__ import annotations

import re

from .host import Host, Kind, Reading, Trouble
from .pci import address_of

SOURCE = "nvidia-smi -q"
CONTROL, MEMORY = "/dev/nvidiactl", "/dev/nvidia-uvm"
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")


def asleep(host: Host, *nodes: str) -> str:
    """Why the driver is not to be asked; "" when it may be.

    nvidia-smi and libcuda have nvidia-modprobe, which is setuid root, load modules and make device nodes that are
    missing. Nodes outlive the module; sandboxes that have the nodes may show no module at all, nor any other.
    """
    modules = host.names("/sys/module")
    told = host.read("/proc/driver/nvidia/version").ok or host.names("/sys/module/nvidia").ok
    if not told and modules.names:
        return "it would first load nvidia"
    missing = [node for node in (CONTROL, *nodes) if not host.follow(node).ok]
    return f"it would first make {missing[0]}" if missing else ""


def said(host: Host, *arguments: str) -> Reading:
    """What `nvidia-smi` prints with these arguments; nothing where the driver is not to be asked."""
    if why := asleep(host):
        return Reading(Kind.COMMAND, ("nvidia-smi", *arguments), None, Trouble.FAILED, why)
    return host.run("nvidia-smi", *arguments)


def query(host: Host) -> Reading:
    """All that it knows of each GPU."""
    return said(host, "-q")


def parse(text: str) -> dict[str, dict[str, str]]:
    """By PCI address: values by "heading/name", and by "name" as it comes first.

    Headings are lines without " : "; how far lines are indented is not looked at, as people paste them without. MIG
    devices have headings of the same names, above those of their GPU.
    """
    found: dict[str, dict[str, str]] = {}
    values: dict[str, str] | None = None
    heading = ""
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(" : "))
        if not colon and (gpu := _GPU.fullmatch(name)):
            values, heading = found.setdefault(address_of(gpu[1]), {}), ""
        elif values is not None and colon:
            values.setdefault(name, value)
            if heading:
                values[f"{heading}/{name}"] = value
        elif name:
            heading = name
    return found
