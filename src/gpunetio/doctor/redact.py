"""Recordings without what identifies a machine or its owner.

The same value becomes the same substitute everywhere, of the same shape, so that a replay still finds what belongs
together: MAC addresses (of the documentation range, RFC 7042), GUIDs and GIDs, UUIDs, IPv4 addresses (RFC 5737), host
names, home folders, serial numbers, and values of kernel options that have nothing to do with PCI or memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .host import Kind, Reading
from .pci_config import without_serial

CMDLINE = "/proc/cmdline"
_KEPT_OPTIONS = ("amd_iommu", "default_hugepagesz", "hugepages", "intel_iommu", "iommu", "nvidia", "pci")
_H = "[0-9a-fA-F]"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_GID = re.compile(rf"(?<![\w:]){_H}{{4}}(?::{_H}{{4}}){{7}}(?![\w:])")
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff"
_LINK_LOCAL, _DOCUMENTATION = "fe80:0000:0000:0000", "2001:0db8:0000:0000"
# Kind, what it looks like (the group, if there is one), and the substitute with a number.
_IDENTITIES: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("uuid",   rf"(?<!\w){_H}{{8}}(?:-{_H}{{4}}){{3}}-{_H}{{12}}(?!\w)",      "00000000-0000-0000-0000-{:012x}".format),
    ("serial", rf"(?<![\w-]){_H}{{2}}(?:-{_H}{{2}}){{7}}(?![\w-])",           "00-00-00-00-00-00-00-{:02x}".format),
    ("serial", r"(?i)serial(?: number)?\s*: *(?!N/A)(\S+)",                 "{:013d}".format),
    ("guid",   rf"(?<![\w:]){_H}{{4}}(?::{_H}{{4}}){{3}}(?![\w:])",           "0200:5eff:fe00:{:04x}".format),
    ("mac",    rf"(?<![\w:]){_H}{{2}}(?::{_H}{{2}}){{5}}(?![\w:])",           "00:00:5e:00:53:{:02x}".format),
    ("mac",    rf"(?<=\benx){_H}{{12}}(?!\w)",                               "00005e0053{:02x}".format),
    ("ipv4",   rf"(?<![\w.])(?!127\.|0\.)(?:{_BYTE}\.){{3}}{_BYTE}(?![\w.])", "192.0.2.{}".format),
    ("home",   r"(?<=/home/)[^/:\s]+",                                       "user{}".format),
)  # fmt: skip


def redact(readings: list[Reading]) -> list[Reading]:
    """The same readings, with substitutes."""
    system = next((one.value for one in readings if one.key == ("system",)), None)
    masked = _Masked(str(system.get("nodename", "")) if isinstance(system, dict) else "")
    return [
        replace(one, key=tuple(map(masked.text, one.key)), value=masked.value(one), error=masked.text(one.error))
        for one in readings
    ]


class _Masked:
    """Which substitute stands for what."""

    def __init__(self, host: str):
        self._host = re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])") if host else None
        self._given: dict[tuple[str, str], str] = {}

    def _replaced(self, kind: str, found: re.Match[str], make: Callable[[int], str]) -> str:
        word = found[found.lastindex or 0]
        return found[0].replace(word, self._substitute(kind, word, make))

    def _substitute(self, kind: str, word: str, make: Callable[[int], str]) -> str:
        number = 1 + sum(1 for known, _ in self._given if known == kind)
        return self._given.setdefault((kind, word.lower()), make(number & 0xFF))

    def _gid(self, gid: str) -> str:
        """GIDs keep what they are: an IPv4 address, link-local, or an address of any other prefix."""
        gid = gid.lower()
        if not gid.strip("0:"):
            return gid
        if gid.startswith(_IPV4_MAPPED):
            return f"{_IPV4_MAPPED}:" + self._substitute("ipv4 gid", gid, "c000:02{:02x}".format)
        prefix, number = gid[:19], self._substitute("guid", gid[20:], "0200:5eff:fe00:{:04x}".format)
        return f"{prefix if prefix == _LINK_LOCAL else _DOCUMENTATION}:{number}"

    def text(self, text: str) -> str:
        """With every identity replaced."""
        text = _GID.sub(lambda found: self._gid(found[0]), text)
        for kind, pattern, make in _IDENTITIES:
            text = re.sub(pattern, lambda found, kind=kind, make=make: self._replaced(kind, found, make), text)
        return self._host.sub("host", text) if self._host else text

    def value(self, reading: Reading) -> Any:
        """The reading's value with every identity replaced."""
        if reading.key == (CMDLINE,) and reading.kind is Kind.FILE and reading.ok:
            return " ".join(map(_option, reading.text.split())).encode()
        if reading.kind is Kind.FILE and reading.source.endswith("/config") and isinstance(reading.value, bytes):
            return without_serial(reading.value)  # of a PCI function
        return self._anything(reading.value)

    def _anything(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return self._bytes(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._anything(one) for one in value]
        if isinstance(value, dict):
            return {key: self._anything(one) for key, one in value.items()}
        return value

    def _bytes(self, value: bytes) -> bytes:
        try:
            return self.text(value.decode()).encode()
        except UnicodeDecodeError:
            return value


def _option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return option if not equals or name.startswith(_KEPT_OPTIONS) else f"{name}=…"
