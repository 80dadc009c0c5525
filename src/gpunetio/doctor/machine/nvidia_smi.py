"""Run nvidia-smi where this changes nothing, and parse `nvidia-smi -q` into a table for each GPU."""

from __future__ import annotations

import re

from .host import Host, Kind, Reading, Trouble
from .pci import address_of

SOURCE = "nvidia-smi -q"
CONTROL, MEMORY = "/dev/nvidiactl", "/dev/nvidia-uvm"
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines even in a pipe
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")


def asleep(host: Host, *nodes: str) -> str:
    """Return why the driver must not be asked; "" if it may be.

    nvidia-smi and libcuda call nvidia-modprobe (setuid root), which loads missing modules and creates missing device
    nodes. Nodes outlive the module. A sandbox that has the nodes may show no modules at all.
    """
    modules = host.names("/sys/module")
    told = host.read("/proc/driver/nvidia/version").ok or host.names("/sys/module/nvidia").ok
    if not told and modules.names:
        return "this would load nvidia"
    missing = [node for node in (CONTROL, *nodes) if not host.follow(node).ok]
    return f"this would create {missing[0]}" if missing else ""


def said(host: Host, *arguments: str) -> Reading:
    """Run `nvidia-smi` with these arguments, unless the driver must not be asked."""
    if why := asleep(host):
        return Reading(Kind.COMMAND, ("nvidia-smi", *arguments), None, Trouble.FAILED, why)
    return host.run("nvidia-smi", *arguments)


def query(host: Host) -> Reading:
    """Run `nvidia-smi -q`."""
    return said(host, "-q")


def parse(text: str) -> dict[str, dict[str, str]]:
    """Parse `nvidia-smi -q` into values by PCI address, and then by "heading/name" and by "name" (the first one).

    Headings are lines without " : ". Indentation does not count, because people paste text without it. MIG devices
    have the same headings, above those of their GPU.
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
