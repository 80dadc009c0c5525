"""Parse the configuration space of a PCI function: ACS and Device Control.

Terms and sections are those of the PCI Express Base Specification. sysfs shows all 4096 bytes to root, and only the 64
bytes of the header to other users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .host import Host, Reading
from .pci import FOLDER

ROOT = "needs root: sudo gpunetio doctor"  # for messages when only the header can be read
HEADER, CONVENTIONAL = 64, 256  # bytes before the capabilities, and before the extended capabilities
_STATUS, _CAPABILITY_LIST, _POINTER = 0x06, 1 << 4, 0x34  # 7.5.1.1
_EXTENDED = 0x100  # offset of the first extended capability, 7.6.3
_EXPRESS, _ACS, _SERIAL_NUMBER = 0x10, 0x000D, 0x0003
_SMALLEST = 128  # bytes of a payload or read request with code 0, 7.5.3.4

ACS_BITS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")  # 7.7.11.3
# Bits that redirect peer-to-peer packets to the root complex, or drop them, as in kernel drivers/pci/p2pdma.c.
REDIRECTING = frozenset({"ReqRedir", "CmpltRedir", "EgressCtrl"})


@dataclass(frozen=True)
class Acs:
    """The Access Control Services in force."""

    control: int

    @property
    def on(self) -> tuple[str, ...]:
        """The names of the set bits, as lspci prints them."""
        return tuple(name for bit, name in enumerate(ACS_BITS) if self.control >> bit & 1)

    @property
    def redirects(self) -> bool:
        """Whether packets between two devices leave the shortest path."""
        return not REDIRECTING.isdisjoint(self.on)

    def __str__(self) -> str:
        return "ACSCtl: " + " ".join(f"{name}{'-+'[self.control >> bit & 1]}" for bit, name in enumerate(ACS_BITS))


@dataclass(frozen=True)
class DeviceControl:
    """The Device Control register of a PCI Express function: what it may send."""

    max_payload: int  # bytes
    max_read_request: int  # bytes
    relaxed_ordering: bool


def read(host: Host, address: str) -> tuple[Reading, bytes]:
    """Read the configuration space of a function; b"" if there is no such file."""
    reading = host.read(f"{FOLDER}/{address}/config")
    return reading, reading.value if isinstance(reading.value, bytes) else b""


def find_capability(config: bytes, number: int) -> int:
    """Return the offset of a capability; 0 if it does not exist or was not read."""
    if not _word(config, _STATUS) & _CAPABILITY_LIST:
        return 0
    seen: set[int] = set()
    at = _byte(config, _POINTER) & ~3
    while at >= HEADER and at not in seen:  # the list of a broken device may be circular
        if _byte(config, at) == number:
            return at
        seen.add(at)
        at = _byte(config, at + 1) & ~3
    return 0


def find_extended(config: bytes, number: int) -> int:
    """Return the offset of an extended capability; 0 if it does not exist or was not read."""
    seen: set[int] = set()
    at = _EXTENDED
    while at >= _EXTENDED and at not in seen:
        if _word(config, at) == number:
            return at
        seen.add(at)
        at = _word(config, at + 2) >> 4 & ~3
    return 0


def has_extended(config: bytes) -> bool:
    """Return whether extended capabilities were read. This needs root, and a function that is on (not all ones)."""
    return len(config) >= _EXTENDED + 4 and config[:2] != b"\xff\xff"


def acs(config: bytes) -> Acs | None:
    """Return the ACS bits in force; None for a function without ACS."""
    at = find_extended(config, _ACS)
    return Acs(_word(config, at + 6)) if at and len(config) >= at + 8 else None


def device_control(config: bytes) -> DeviceControl | None:
    """Return the Device Control register; None without PCI Express, or if it was not read."""
    at = find_capability(config, _EXPRESS)
    if not at or len(config) < at + 10:
        return None
    word = _word(config, at + 8)
    return DeviceControl(_SMALLEST << (word >> 5 & 7), _SMALLEST << (word >> 12 & 7), bool(word & 1 << 4))


def without_serial(config: bytes) -> bytes:
    """Return the bytes with a serial number of zeros. A NIC's serial number contains its MAC address (7.9.3)."""
    at = find_extended(config, _SERIAL_NUMBER)
    return config[: at + 4] + bytes(len(config[at + 4 : at + 12])) + config[at + 12 :] if at else config


def parse_acs(text: str) -> list[Acs]:
    """Parse all ACSCtl lines of `lspci -vvv`."""
    lines = re.findall(r"^\s*ACSCtl:(.*)$", text, re.MULTILINE)
    return [Acs(sum(1 << bit for bit, name in enumerate(ACS_BITS) if f"{name}+" in line.split())) for line in lines]


def _byte(config: bytes, at: int) -> int:
    return config[at] if at < len(config) else 0


def _word(config: bytes, at: int) -> int:
    return int.from_bytes(config[at : at + 2], "little")
