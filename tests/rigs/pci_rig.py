"""Configuration spaces for tests, and trees of PCI devices."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from itertools import zip_longest

from doctor_rig import file, link
from gpunetio.doctor import Reading

_STATUS_CAPABILITIES = 1 << 4
Capabilities = dict[int, tuple[int, bytes]]  # offset → number, and what follows the head


def config(capabilities: Capabilities, extended: Capabilities) -> bytes:
    """4096 bytes with these lists of capabilities, in the order given; the extended ones begin at 0x100."""
    space = bytearray(4096)
    space[0x06:0x08] = struct.pack("<H", _STATUS_CAPABILITIES if capabilities else 0)
    places = list(capabilities)
    space[0x34] = places[0] if places else 0
    for at, following in zip_longest(places, places[1:], fillvalue=0):
        number, body = capabilities[at]
        space[at : at + 2 + len(body)] = bytes([number, following]) + body
    places = list(extended)
    for at, following in zip_longest(places, places[1:], fillvalue=0):
        number, body = extended[at]
        space[at : at + 4 + len(body)] = struct.pack("<HH", number, following << 4 | 1) + body
    return bytes(space)


@dataclass(frozen=True)
class Function:
    """A PCI function in a tree."""

    path: tuple[str, ...]  # addresses from the root port to itself
    name: str  # what lspci prints after the address; "" for bridges

    def readings(self) -> list[Reading]:
        """What sysfs shows of it."""
        at = f"/sys/bus/pci/devices/{self.path[-1]}"
        domain_and_bus = self.path[0][:7]
        vendor, kind = next((v for word, v in _VENDORS.items() if word in self.name), ("0x8086", "0x060400"))
        return [
            link(at, "/".join((f"/sys/devices/pci{domain_and_bus}", *self.path))),
            file(f"{at}/vendor", vendor), file(f"{at}/class", kind),
        ]


_VENDORS = {
    "SoC Management": ("0x15b3", "0x080100"), "Mellanox": ("0x15b3", "0x020000"), "NVIDIA": ("0x10de", "0x030200"),
}
_ROOT = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{2})]")
_STEP = re.compile(r"([0-9a-f]{2}\.[0-7])(?:-\[([0-9a-f]{2})(?:-[0-9a-f]{2})?])?")


def from_lspci(text: str) -> list[Function]:
    """The functions that `lspci -tv` draws.

    Of several children of a bus all but the last stand behind "+-", the last behind "\\-": so a line belongs to the
    bus that was last begun and not ended, however far the line is indented.
    """
    found: list[Function] = []
    open_buses: list[tuple[str, tuple[str, ...]]] = []  # "0000:b0", and the bridges above it
    for line in text.splitlines():
        if root := _ROOT.search(line):
            open_buses = []
            bus, above = f"{root[1]}:{root[2]}", ()
            line = line[root.end() :]
        elif open_buses and (start := re.match(r"[ |]*([+\\])-", line)):
            bus, above = open_buses[-1] if start[1] == "+" else open_buses.pop()
            line = line[start.end() :]
        else:
            continue
        drawing = re.match(r"(?:[-+\\]|\[[^]]*]|[0-9a-f]{2}\.[0-7])*", line)
        assert drawing
        for step in _STEP.finditer(drawing[0]):
            if drawing[0][: step.start()].endswith("+-") and (bus, above) not in open_buses:
                open_buses.append((bus, above))
            above = (*above, f"{bus}:{step[1]}")
            if step[2]:
                found.append(Function(above, ""))
                bus = f"{bus[:4]}:{step[2]}"
        name = line[drawing.end() :].strip()
        found.append(Function(above, name)) if name else None
    return found


def bridge(address: str, control: int) -> Reading:
    """A bridge whose ACS control register has this value."""
    access_control = {0x100: (0x000D, struct.pack("<HH", 0x5F, control))}
    return file(f"/sys/bus/pci/devices/0000:{address}/config", config({}, access_control))
