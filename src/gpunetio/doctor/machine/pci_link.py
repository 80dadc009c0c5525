"""PCI Express links in sysfs (kernel Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .host import Host, Reading
from .pci import FOLDER

MOST_LANES = 32  # PCI Express Base Specification: Link Capabilities Register; virtual machines show 0, 63 or 255


@dataclass(frozen=True)
class Link:
    """One end of a link. For a device or an upstream port this is the link above it, for other ports the link below."""

    width: float  # lanes
    most: float
    speed: float  # GT/s
    fastest: float
    read: tuple[Reading, ...]

    @property
    def known(self) -> bool:
        """Whether all values are plausible. Otherwise files are missing, or a virtual machine has made them up."""
        return 0 < self.width <= self.most <= MOST_LANES and 0 < self.speed <= self.fastest

    @property
    def lacks(self) -> str:
        """What is below the link's maximum; "" if it runs at full width and speed."""
        lanes = f"only {self.width:g} of {self.most:g} lanes" if self.width < self.most else ""
        return lanes or (f"slower than its {self.fastest:g} GT/s" if self.speed < self.fastest else "")

    def __str__(self) -> str:
        return f"x{self.width:g} at {self.speed:g} GT/s"


def link_of(host: Host, address: str) -> Link:
    """Return the link of a function. Zeros stand for values that cannot be read."""
    folder = f"{FOLDER}/{address}"
    widths = [host.read(f"{folder}/{which}_link_width") for which in ("current", "max")]
    speeds = [host.read(f"{folder}/{which}_link_speed") for which in ("current", "max")]
    width, most = (_number(r"(\d{1,2})", reading) for reading in widths)
    speed, fastest = (_number(r"(\d{1,3}(?:\.\d{1,2})?) GT/s.*", reading) for reading in speeds)
    return Link(width, most, speed, fastest, (*widths, *speeds))


def _number(pattern: str, reading: Reading) -> float:
    found = re.fullmatch(pattern, reading.text)
    return float(found[1]) if found else 0


def links_of_switches(host: Host, path: tuple[str, ...]) -> dict[str, Link]:
    """Return the known links of the switches above a device, by upstream port.

    Below a root port, upstream and downstream ports of switches alternate. The maximum of a link is what both of its
    ends support.
    """
    found = {}
    for above, port in zip(path[:-1:2], path[1:-1:2]):
        link, other = link_of(host, port), link_of(host, above)
        if link.known and other.known:
            link = replace(link, most=min(link.most, other.most), fastest=min(link.fastest, other.fastest))
        if link.known:
            found[port] = link
    return found
