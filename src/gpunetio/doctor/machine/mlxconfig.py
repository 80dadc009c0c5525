"""Read firmware settings with NVIDIA's tools: `mlxconfig -d <device> -e q`, and devices of `mst status -v`."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..finding import Evidence, evidence
from .devices import Machine, Nic
from .host import Reading, Trouble
from .nics import MODELS, is_nvidia
from .pci import address_of

_NEEDS_ROOT = "mlxconfig needs root: sudo gpunetio doctor"
COLD_REBOOT = "a cold reboot: ipmitool power cycle"
_MFT, _MSTFLINT = "mlxconfig", "mstconfig"  # the same program in NVIDIA's MFT and in the free mstflint
_AT_ONCE = 8  # cards; each takes most of a second to answer
_MST = re.compile(r"(/dev/mst/\S+)\s+((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?!\S)", re.IGNORECASE)
# "*" marks settings that differ from the default. Blanks are before it and between the columns.
_SETTING = re.compile(r"[* \t]*([A-Z][A-Z0-9_]*(?:\[[0-9.]+\])?)[ \t]+(\S+)(?:[ \t]+(\S+)[ \t]+(\S+))?[ \t]*")
_NUMBER = re.compile(r"(?:[^()]*\()?([0-9]{1,18})\)?")


@dataclass(frozen=True)
class Setting:
    """A parameter of a card's firmware, such as "ETH(2)", "True(1)" or "16"."""

    next: str  # in force after a cold reboot
    current: str = ""  # in force now; "" if the output has only the column "Next Boot"

    def is_now(self, number: int) -> bool:
        """Return whether it has this value now, as far as the output shows."""
        now = number_of(self.current)
        return (number_of(self.next) if now is None else now) == number

    def will_be(self, number: int) -> bool:
        """Return whether it has this value after a cold reboot."""
        return number_of(self.next) == number


def number_of(value: str) -> int | None:
    """Return the number of a value: 2 for "ETH(2)", 16 for "16", None for anything else."""
    found = _NUMBER.fullmatch(value)
    return int(found[1]) if found else None


def parse(text: str) -> dict[str, Setting]:
    """Parse settings by name from a table with one column (next boot) or three (default, current, next boot)."""
    found: dict[str, Setting] = {}
    for line in text.splitlines():
        if match := _SETTING.fullmatch(line):
            name, first, current, after = match.groups()
            found.setdefault(name, Setting(after, current) if after else Setting(first))
    return found


def parse_mst(text: str) -> dict[str, str]:
    """Parse MST devices, such as "/dev/mst/mt4125_pciconf0", by PCI address."""
    return {address_of(address): device for device, address in _MST.findall(text)}


@dataclass(frozen=True)
class Firmware:
    """The settings of a card's firmware."""

    card: str  # PCI address of the card's first function; "" if it has no settings
    tool: str
    read: tuple[Reading, ...]
    settings: dict[str, Setting]
    trouble: str  # why there are no settings; "" if there are

    @property
    def needs_root(self) -> bool:
        """Whether root could read the settings."""
        return self.trouble == _NEEDS_ROOT

    def having(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return the wanted settings that the card has."""
        return {name: number for name, number in wanted.items() if name in self.settings}

    def wrong(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return the wanted settings that have other values after a cold reboot."""
        return {n: number for n, number in self.having(wanted).items() if not self.settings[n].will_be(number)}

    def pending(self, wanted: dict[str, int]) -> bool:
        """Return whether a setting takes effect only after a cold reboot."""
        return any(not self.settings[name].is_now(number) for name, number in self.having(wanted).items())

    def shown(self, wanted: dict[str, int]) -> Evidence:
        """Return their values as evidence: those now, and those next if they differ."""
        found = {name: self.settings[name] for name in self.having(wanted)}
        values = (f"{n}={s.current}, next {s.next}" if s.current not in ("", s.next) else f"{n}={s.next}"
                  for n, s in found.items())
        return evidence(self.read[0], " ".join(values))


def ask(machine: Machine, nic: Nic) -> Firmware:
    """Return the settings of a NIC's card. All functions of a card share the answer of the first."""
    kind = MODELS.get(nic.pci.device) if nic.pci else None
    if not is_nvidia(nic) or (kind and kind.virtual):
        none = "a virtual function has no settings of its own" if is_nvidia(nic) else "not an NVIDIA card"
        return Firmware("", _MFT, (), {}, none)
    first = f"{nic.address[:-1]}0"
    card = first if first in machine.pci else nic.address
    tool, reading = _query(machine, card)
    settings = parse(reading.text)
    return Firmware(card, tool, (reading,), settings, "" if settings else _why_not(machine, reading))


def _query(machine: Machine, card: str) -> tuple[str, Reading]:
    reading = machine.host.run(_MFT, "-d", card, "-e", "q")
    if reading.trouble is Trouble.ABSENT:
        other = machine.host.run(_MSTFLINT, "-d", card, "-e", "q")
        if other.value is not None:
            return _MSTFLINT, other
    return _MFT, reading


def ask_all(machine: Machine) -> None:
    """Ask all cards at the same time. Later questions find their answers ready."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor-mlxconfig") as pool:
        list(pool.map(lambda nic: ask(machine, nic), machine.nics))


def set_command(machine: Machine, firmware: Firmware, values: dict[str, int]) -> str:
    """Return the command that changes settings. It names the MST device after `mst start`, else the PCI address."""
    device = firmware.card
    if firmware.tool == _MFT and machine.host.names("/dev/mst").names:
        device = parse_mst(machine.host.run("mst", "status", "-v").text).get(device, device)
    assignments = " ".join(f"{name}={number}" for name, number in values.items())
    return f"sudo {firmware.tool} -d {device} --yes set {assignments}"


def _why_not(machine: Machine, reading: Reading) -> str:
    user = machine.host.ask("user").value
    if reading.trouble is Trouble.ABSENT:
        return "mlxconfig is not installed (MFT or mstflint has it)"
    if reading.trouble in (Trouble.TIMEOUT, Trouble.UNRECORDED):
        return f"mlxconfig: {reading.error}"
    if isinstance(user, dict) and user.get("uid", 0) != 0:
        return _NEEDS_ROOT
    return "mlxconfig shows no settings of this card"
