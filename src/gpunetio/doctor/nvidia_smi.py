"""`nvidia-smi -q` as a table for each GPU."""

from __future__ import annotations

import re

from .pci import address_of

COMMAND = ("nvidia-smi", "-q")
SOURCE = " ".join(COMMAND)
_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")


def parse(text: str) -> dict[str, dict[str, str]]:
    """By PCI address: values by "heading/name", or by "name" before the first heading.

    Headings are lines without " : "; how far lines are indented is not looked at, as people paste them without.
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
                values.setdefault(f"{heading}/{name}", value)
        elif name:
            heading = name
    return found
