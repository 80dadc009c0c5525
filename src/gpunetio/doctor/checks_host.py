"""Checks of the operating system and of this process: kernel, limits, rights, containers, libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .finding import HARDWARE, Finding, check, ok, skip, warn
from .machine import Machine

AREA = "Operating system and process"
GUIDE = "DOCA GPUNetIO installation and set-up guide"


@check(
    "kernel", "Linux kernel",
    why="Memory of a GPU is shared with a NIC as a dmabuf from kernel 6.2 on; before that nvidia-peermem has to do it.",
    cure="install a kernel of at least 6.2, or load nvidia-peermem: sudo modprobe nvidia-peermem",
    source=f"{GUIDE}: GPU Memory Mapping", uses=HARDWARE, reboot=True,
)  # fmt: skip
def kernel(machine: Machine) -> Iterator[Finding]:
    """Its version."""
    reading = machine.host.read("/proc/sys/kernel/osrelease")
    found = re.match(r"(\d+)\.(\d+)", reading.text)
    if not found:
        yield skip("the kernel's version is unknown", reading)
    elif (int(found[1]), int(found[2])) >= (6, 2):
        yield ok(f"Linux {reading.text} can share GPU memory as dmabuf", reading)
    else:
        yield warn(f"Linux {reading.text} is older than 6.2: no dmabuf, nvidia-peermem is needed", reading)


CHECKS = (kernel,)
