"""The doctor's results: checks, their findings, and the uses that the machine is ready for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypedDict, Unpack

from .machine.devices import Machine
from .machine.host import Kind, Reading, Trouble

GUIDE = "DOCA GPUNetIO installation and set-up guide"  # the source of most checks
_SHOWN = 160  # characters of a value that evidence shows
_FEW = 4  # pieces of evidence shown when many devices have the same


class Status(StrEnum):
    """The result of a check."""

    OK = "OK"
    WARN = "WARN"  # works, but slower, or not for every user
    FAIL = "FAIL"  # does not work
    SKIP = "SKIP"  # the check was not possible, or there is nothing to check


class Use(StrEnum):
    """What a machine is used for."""

    ETHERNET = "ethernet"
    VERBS = "verbs"
    DMA = "dma"
    SOFTWARE = "software"


HARDWARE = frozenset({Use.ETHERNET, Use.VERBS, Use.DMA})
EVERY_USE = frozenset(Use)
USE_NAMES = {
    Use.ETHERNET: "Ethernet", Use.VERBS: "RDMA Verbs", Use.DMA: "DMA", Use.SOFTWARE: "software NIC",
}


@dataclass(frozen=True)
class Evidence:
    """A path or a command, and its content or output."""

    source: str
    value: str


def evidence(reading: Reading, value: object = None) -> Evidence:
    """Return a reading as evidence: `value` if only a part of it matters, else its error or its first line."""
    if value is not None:
        shown = str(value)
    elif reading.kind is Kind.FOLDER and reading.names:
        shown = ", ".join(reading.names)
    elif reading.ok:
        lines = reading.text.splitlines() or [str(reading.value) if reading.value not in (b"", "") else "(empty)"]
        shown = lines[0]
    else:
        shown = f"({reading.error})"
    return Evidence(reading.source, shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…")


def few(read: list[Evidence]) -> list[Evidence]:
    """Return the first pieces of evidence, and how many more there are."""
    more = len(read) - _FEW
    return read if more <= 0 else [*read[:_FEW], Evidence("…", f"and {more} more")]


@dataclass(frozen=True)
class Check:
    """A question about a machine. The set-up guide has the same texts."""

    id: str
    area: str  # the part of a report that it belongs to
    title: str
    why: str  # why it matters, in one or two sentences
    cure: str  # the command to type, or the BIOS setting; findings fill in <…>
    source: str  # the document that says so
    uses: frozenset[Use]
    reboot: bool  # whether the cure needs a reboot
    essential: bool  # without an answer, readiness is unknown
    settles: frozenset[str]  # ids of checks that only guess what this check finds out
    ask: Callable[[Machine], Iterator[Finding]] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Finding:
    """The answer for the machine, or for one GPU, one NIC, or one pair of them."""

    status: Status
    summary: str
    read: tuple[Evidence, ...] = ()
    gpu: str = ""  # such as "GPU0"
    nic: str = ""  # such as "mlx5_0"
    cure: str = ""  # if empty and something is wrong: the check's own
    reboot: bool | None = None  # None: the check's own
    needs_root: bool = False  # root would find out more
    brief: bool = False  # nothing is wrong, it just does not serve a use: one line, unless a use is asked about
    uses: frozenset[Use] | None = None  # None: the check's own
    check: Check = field(default=None, compare=False)  # type: ignore[assignment]  # `of` sets it

    @property
    def subject(self) -> str:
        """The device or the pair that the finding is about: "", "GPU0", "mlx5_0" or "GPU0 mlx5_0"."""
        return " ".join(filter(None, (self.gpu, self.nic)))

    def of(self, check: Check) -> Finding:
        """Return the finding completed with the check's texts."""
        wrong = self.status in (Status.WARN, Status.FAIL)
        return replace(
            self,
            check=check,
            cure=(self.cure or check.cure) if wrong else self.cure,
            reboot=(check.reboot if self.reboot is None else self.reboot) and wrong,
            uses=check.uses if self.uses is None else self.uses,
        )


def check(
    id: str, title: str, *, why: str, cure: str, source: str, uses: frozenset[Use], reboot: bool = False,
    essential: bool = False, settles: frozenset[str] = frozenset(),
) -> Callable[[Callable[[Machine], Iterator[Finding]]], Check]:
    """Turn a function that yields findings into a check. Its area is `AREA` of the function's module."""

    def make(ask: Callable[[Machine], Iterator[Finding]]) -> Check:
        area = sys.modules[ask.__module__].AREA
        return Check(id, area, title, why, cure, source, uses, reboot, essential, settles, ask)

    return make


def says_reboot(cure: str) -> bool:
    """Return whether the text of a cure already mentions the reboot."""
    return re.search(r"(?<!until the next )\breboot", cure) is not None


class Subject(TypedDict, total=False):
    """Fields of a `Finding` that name a device, or a pair."""

    gpu: str
    nic: str


class Details(Subject, total=False):
    """Fields of a `Finding` that most findings leave out."""

    cure: str
    reboot: bool | None
    needs_root: bool
    brief: bool
    uses: frozenset[Use] | None


class Maker(Protocol):
    """Makes findings of one status."""

    def __call__(self, summary: str, *read: Reading | Evidence, **more: Unpack[Details]) -> Finding:
        """Return a finding."""
        ...


def _maker(status: Status) -> Maker:
    def make(summary: str, *read: Reading | Evidence, **more: Unpack[Details]) -> Finding:
        shown = tuple(evidence(one) if isinstance(one, Reading) else one for one in read)
        denied = any(isinstance(one, Reading) and one.trouble is Trouble.DENIED for one in read)
        more.setdefault("needs_root", status is Status.SKIP and denied)
        return Finding(status, summary, shown, **more)

    make.__doc__ = f"Return a finding with status {status}. `more` are fields of `Finding`."
    return make


ok: Maker = _maker(Status.OK)
warn: Maker = _maker(Status.WARN)
fail: Maker = _maker(Status.FAIL)
skip: Maker = _maker(Status.SKIP)


class Readiness(StrEnum):
    """Whether a machine is ready. The values are exit statuses."""

    READY = "0"
    NOT_READY = "1"
    UNKNOWN = "2"


@dataclass(frozen=True)
class Verdict:
    """Whether the machine is ready for a use, and why."""

    readiness: Readiness
    why: str


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks, and the possible pairs of GPU and NIC."""

    findings: tuple[Finding, ...]
    pairs: tuple[tuple[str, str], ...]  # the best first
    cards: tuple[str, ...] = ()  # Mellanox/NVIDIA cards, with or without a driver

    def best_pair(self, use: Use) -> tuple[str, str] | None:
        """Return the pair of a GPU and a NIC with the fewest problems, the nearest first; None without pairs."""
        return min(self.pairs, key=lambda pair: tuple(map(len, self._against(use, pair))), default=None)

    def ready(self, use: Use) -> Verdict:
        """Return whether the machine is ready: it and at least one pair of a GPU and a NIC have no problem.

        If it is not ready, `why` names the problems of the pair that has the fewest.
        """
        pair = ("", "") if use is Use.SOFTWARE else self.best_pair(use)
        wrong, unknown = self._against(use, pair)
        if wrong:
            return Verdict(Readiness.NOT_READY, _names(wrong))
        if unknown:
            return Verdict(Readiness.UNKNOWN, _names(unknown))
        if pair is None:
            return Verdict(Readiness.NOT_READY, "no pair of a GPU and a NIC")
        return Verdict(Readiness.READY, " with ".join(pair) if any(pair) else "")

    def _against(self, use: Use, pair: tuple[str, str] | None) -> tuple[list[Finding], list[Finding]]:
        """Return the problems and the open questions of a pair, or of all pairs. A probe overrides what it settles."""
        about = [f for f in self.findings if f.uses and use in f.uses and _concerns(f, pair)]
        settled = {id for f in about if f.status in (Status.OK, Status.FAIL) for id in f.check.settles}
        about = [f for f in about if f.check.id not in settled]
        fails = [f for f in about if f.status is Status.FAIL]
        return fails, [f for f in about if f.status is Status.SKIP and f.check.essential]


def _concerns(finding: Finding, pair: tuple[str, str] | None) -> bool:
    return pair is None or (finding.gpu in ("", pair[0]) and finding.nic in ("", pair[1]))


def _names(findings: list[Finding]) -> str:
    names = (f"{f.check.id} ({f.subject})" if f.subject else f.check.id for f in findings)
    return ", ".join(dict.fromkeys(names))
