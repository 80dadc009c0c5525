"""The configuration space of a PCI function: what its capabilities say of peer traffic and of the link.

Words of the PCI Express Base Specification. sysfs shows all 4096 bytes to root, and to others the 64 of the header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .host import Host, Reading
from .pci import FOLDER

ROOT = "needs root: sudo gpunetio doctor"  # said where the header alone is read
HEADER, CONVENTIONAL = 64, 256  # bytes; capabilities come behind, and extended ones
_STATUS, _CAPABILITY_LIST, _POINTER = 0x06, 1 << 4, 0x34  # 7.5.1.1
_EXTENDED = 0x100  # where extended capabilities begin, 7.6.3
_EXPRESS, _ACS, _SERIAL_NUMBER = 0x10, 0x000D, 0x0003
_SMALLEST = 128  # bytes that the code 0 of a payload or read request stands for, 7.5.3.4

ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")  # 7.7.11.3
# Those that send a peer's packets up to the root complex, or drop them (kernel drivers/pci/p2pdma.c takes these, too).
REDIRECTING = frozenset({"ReqRedir", "CmpltRedir", "EgressCtrl"})


@dataclass(frozen=True)
class Acs:
    """Access Control Services: which are in force."""

    control: int

    @property
    def on(self) -> tuple[str, ...]:
        """Names of the bits that are set, as lspci prints them."""
        return tuple(name for bit, name in enumerate(ACS_BITS) if self.control >> bit & 1)

    @property
    def redirects(self) -> bool:
        """Whether packets from one device to another leave the shortest way."""
        return not REDIRECTING.isdisjoint(self.on)

    def __str__(self) -> str:
        return "ACSCtl: " + " ".join(f"{name}{'-+'[self.control >> bit & 1]}" for bit, name in enumerate(ACS_BITS))


@dataclass(frozen=True)
class DeviceControl:
    """What a PCI Express function may send (Device Control register)."""

    max_payload: int  # bytes
    max_read_request: int  # bytes
    relaxed_ordering: bool


def read(host: Host, address: str) -> tuple[Reading, bytes]:
    """Of a function; no bytes when there is no such file."""
    reading = host.read(f"{FOLDER}/{address}/config")
    return reading, reading.value if isinstance(reading.value, bytes) else b""


def find_capability(config: bytes, number: int) -> int:
    """Offset of a capability; 0 when there is none, or it was not read."""
    if not _word(config, _STATUS) & _CAPABILITY_LIST:
        return 0
    seen: set[int] = set()
    at = _byte(config, _POINTER) & ~3
    while at >= HEADER and at not in seen:  # a broken device may have a circle
        if _byte(config, at) == number:
            return at
        seen.add(at)
        at = _byte(config, at + 1) & ~3
    return 0


def find_extended(config: bytes, number: int) -> int:
    """Offset of an extended capability; 0 when there is none, or it was not read."""
    seen: set[int] = set()
    at = _EXTENDED
    while at >= _EXTENDED and at not in seen:
        if _word(config, at) == number:
            return at
        seen.add(at)
        at = _word(config, at + 2) >> 4 & ~3
    return 0


def has_extended(config: bytes) -> bool:
    """Whether extended capabilities were read: not without root, nor of a function that is switched off (all ones)."""
    return len(config) >= _EXTENDED + 4 and config[:2] != b"\xff\xff"


def acs(config: bytes) -> Acs | None:
    """What is in force; None for a function without ACS."""
    at = find_extended(config, _ACS)
    return Acs(_word(config, at + 6)) if at and len(config) >= at + 8 else None


def device_control(config: bytes) -> DeviceControl | None:
    """The register; None for what is not PCI Express, or was not read."""
    at = find_capability(config, _EXPRESS)
    if not at or len(config) < at + 10:
        return None
    word = _word(config, at + 8)
    return DeviceControl(_SMALLEST << (word >> 5 & 7), _SMALLEST << (word >> 12 & 7), bool(word & 1 << 4))


def without_serial(config: bytes) -> bytes:
    """The same with a serial number of zeros: that of a NIC is made of its MAC address (7.9.3)."""
    at = find_extended(config, _SERIAL_NUMBER)
    return config[: at + 4] + bytes(len(config[at + 4 : at + 12])) + config[at + 12 :] if at else config


def parse_acs(text: str) -> list[Acs]:
    """All ACSCtl lines of `lspci -vvv`."""
    lines = re.findall(r"^\s*ACSCtl:(.*)$", text, re.MULTILINE)
    return [Acs(sum(1 << bit for bit, name in enumerate(ACS_BITS) if f"{name}+" in line.split())) for line in lines]


def _byte(config: bytes, at: int) -> int:
    return config[at] if at < len(config) else 0


def _word(config: bytes, at: int) -> int:
    return int.from_bytes(config[at : at + 2], "little")
