"""Remove from recordings what identifies a machine or its owner.

Each value gets one substitute of the same shape everywhere, so that a replay still finds what belongs together. This
covers MAC addresses and GUIDs (replaced by locally administered ones), GIDs, IPv4 addresses (by RFC 2544's networks),
IPv6 addresses (by RFC 3849's), UUIDs, serial numbers, container ids, host names, home folders, names of processes and
users, and the values of kernel options that do not concern PCI or memory.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from ipaddress import AddressValueError, IPv6Address

from .dmabuf import asked_for, unpacked
from .host import Kind, Reading
from .pci_config import without_serial

_KEPT_OPTIONS = ("amd_iommu", "default_hugepagesz", "hugepages", "intel_iommu", "iommu", "nvidia", "pci")
_KEPT_OWNERS = ("root", "rdma", "video", "render")
_H = "[0-9a-fA-F]"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_GID = re.compile(rf"(?<![\w:]){_H}{{4}}(?::{_H}{{4}}){{7}}(?![\w:])")
_SHORT_IPV6 = re.compile(rf"(?<![\w:.])(?={_H}*:{_H}*:)[0-9a-fA-F:]*::[0-9a-fA-F:]*(?![\w:.])")
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff"
_LINK_LOCAL, _DOCUMENTATION = "fe80:0000:0000:0000", "2001:0db8:0000:0000"


def _guid(n: int) -> str:
    return f"0200:5eff:fe{n >> 16 & 0xFF:02x}:{n & 0xFFFF:04x}"


def _mac(n: int) -> str:
    return f"02:00:00:00:{n >> 8 & 0xFF:02x}:{n & 0xFF:02x}"


def _eui64(n: int) -> str:
    return f"02-00-00-ff-fe-00-{n >> 8 & 0xFF:02x}-{n & 0xFF:02x}"


def _ipv4(n: int) -> str:
    return f"198.18.{n >> 8 & 0xFF}.{n & 0xFF}"


# Kind, pattern (only the group is replaced, if there is one), and the substitute for a number.
_IDENTITIES: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("uuid",    rf"(?<![^\W_]){_H}{{8}}(?:[-_]{_H}{{4}}){{3}}[-_]{_H}{{12}}(?!\w)",
     "00000000-0000-0000-0000-{:012x}".format),
    ("id",      rf"(?<!\w){_H}{{64}}(?!\w)",                                      "{:064x}".format),
    ("serial",  rf"(?<![\w-]){_H}{{2}}(?:-{_H}{{2}}){{7}}(?![\w-])",              _eui64),
    ("serial",  r"(?i)serial(?: number)?\s*: *(?!N/A)(\S+)",                      "{:013d}".format),
    ("serial",  r"(?i)(?:PDI|GUID)\s*: *(0x[0-9a-f]+)",                           "0x{:016x}".format),
    ("process", r"(?m)^\s+Name\s*: (.+)$",                                        "process {}".format),
    ("guid",    rf"(?<![\w:]){_H}{{4}}(?::{_H}{{4}}){{3}}(?![\w:])",              _guid),
    ("mac",     rf"(?<![\w:]){_H}{{2}}(?::{_H}{{2}}){{5}}(?![\w:])",              _mac),
    ("mac",     rf"(?<=\benx){_H}{{12}}(?!\w)",                                   "02000000{:04x}".format),
    ("ipv4",    rf"(?<![\w.-])(?!127\.|0\.)(?:{_BYTE}\.){{3}}{_BYTE}(?![\w.])",   _ipv4),
    ("home",    r"(?<=/home/)[^/:\s]+",                                           "user{}".format),
)


def redact(readings: list[Reading]) -> list[Reading]:
    """Return the readings with substitutes."""
    masked = _Masked(_host_name(readings))
    return [
        replace(one, key=tuple(map(masked.text, one.key)), value=masked.value(one), error=masked.text(one.error))
        for one in readings
    ]


def _host_name(readings: Iterable[Reading]) -> str:
    """Return the host name without its domain; "" if the word is also another name, such as a driver's."""
    system = next((one.value for one in readings if one.key == ("system",)), None)
    name = str(system.get("nodename", "")).partition(".")[0] if isinstance(system, dict) else ""
    words = {word for one in readings for word in re.split(r"[/ ]", one.source)}
    return "" if len(name) < 2 or name in words else name


class _Masked:
    """The substitutes given so far."""

    def __init__(self, host: str):
        self._host = re.compile(rf"(?<![\w.-]){re.escape(host)}(?:\.[\w.-]*\w)?(?![\w-])") if host else None
        self._given: dict[tuple[str, str], str] = {}

    def _replaced(self, kind: str, found: re.Match[str], make: Callable[[int], str]) -> str:
        word = found[found.lastindex or 0]
        return found[0].replace(word, self._substitute(kind, word, make))

    def _substitute(self, kind: str, word: str, make: Callable[[int], str]) -> str:
        number = 1 + sum(1 for known, _ in self._given if known == kind)
        return self._given.setdefault((kind, word.lower()), make(number))

    def _gid(self, gid: str) -> str:
        """Replace a GID by one of the same kind: IPv4-mapped, link-local, or any other."""
        gid = gid.lower()
        if not gid.strip("0:"):
            return gid
        if gid.startswith(_IPV4_MAPPED):
            return f"{_IPV4_MAPPED}:" + self._substitute("ipv4 gid", gid, "c612:{:04x}".format)
        prefix, number = gid[:19], self._substitute("guid", gid[20:], _guid)
        return f"{prefix if prefix == _LINK_LOCAL else _DOCUMENTATION}:{number}"

    def _short_ipv6(self, text: str) -> str:
        try:
            address = IPv6Address(text)
        except AddressValueError:
            return text
        if address.is_loopback or address.is_unspecified:
            return text
        return IPv6Address(self._gid(address.exploded)).compressed

    def text(self, text: str) -> str:
        """Replace everything that identifies the machine, except the host name."""
        text = _GID.sub(lambda found: self._gid(found[0]), text)
        text = _SHORT_IPV6.sub(lambda found: self._short_ipv6(found[0]), text)
        for kind, pattern, make in _IDENTITIES:
            text = re.sub(pattern, lambda found, kind=kind, make=make: self._replaced(kind, found, make), text)
        return text

    def value(self, reading: Reading) -> object:
        """Return the reading's value with substitutes."""
        value = reading.value
        if reading.kind is Kind.FILE and isinstance(value, bytes):
            value = _reduced(reading.key[0], value)
            if reading.key[0].startswith("/sys/bus/pci/"):
                return without_serial(value)
        if reading.kind is Kind.QUESTION and reading.key[0] == "permissions" and isinstance(value, dict):
            value = {name: who if name == "mode" or who in _KEPT_OWNERS else "someone" for name, who in value.items()}
        return self._anything(value, reading.kind not in (Kind.FOLDER, Kind.LINK))

    def _with_host(self, text: str, with_host: bool) -> str:
        text = self.text(text)
        return self._host.sub("host", text) if with_host and self._host else text

    def _anything(self, value: object, with_host: bool) -> object:
        if isinstance(value, bytes):
            text = self._with_host(value.decode(errors="surrogateescape"), with_host)
            return text.encode(errors="surrogateescape")
        if isinstance(value, str):
            return self._with_host(value, with_host)
        if isinstance(value, list):
            return [self._anything(one, with_host) for one in value]
        if isinstance(value, dict):
            return {key: self._anything(one, with_host) for key, one in value.items()}
        return value


def _options(text: str) -> str:
    return " ".join(map(_option, text.split()))


def _option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return option if not equals or name.startswith(_KEPT_OPTIONS) else f"{name}=…"


def _capabilities(text: str) -> str:
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith("Cap"))


def _reduced(path: str, value: bytes) -> bytes:
    """Reduce some files to the parts that checks read."""
    text = value.decode(errors="replace")
    match path.split("/")[1:]:
        case ["proc", "cmdline"]:
            return _options(text).encode()
        case ["proc", "self", "status"]:
            return _capabilities(text).encode()
        case ["proc", "config.gz"]:
            return gzip.compress(asked_for(unpacked(value)).encode(), mtime=0)
        case ["boot", _] | ["lib", "modules", _, "config"]:
            return asked_for(text).encode()
    return value
