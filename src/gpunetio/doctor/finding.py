"""What the doctor says: checks, what they find, and for which uses the machine is ready."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .host import Kind, Reading, Trouble

if TYPE_CHECKING:
    from .machine import Machine

GUIDE = "DOCA GPUNetIO installation and set-up guide"  # what most checks go back to
_SHOWN = 160  # characters of a value that evidence shows
_FEW = 4  # pieces of evidence that say the same of many devices


class Status(StrEnum):
    """How a check ended."""

    OK = "OK"
    WARN = "WARN"  # works, but slower, or not for everybody
    FAIL = "FAIL"  # does not work
    SKIP = "SKIP"  # could not be looked at, or there is nothing to look at


class Use(StrEnum):
    """What a machine is wanted for."""

    ETHERNET = "ethernet"
    VERBS = "verbs"
    DMA = "dma"
    SOFTWARE = "software"


HARDWARE = frozenset({Use.ETHERNET, Use.VERBS, Use.DMA})
EVERY_USE = frozenset(Use)
USE_NAMES = {
    Use.ETHERNET: "Ethernet", Use.VERBS: "RDMA Verbs", Use.DMA: "DMA", Use.SOFTWARE: "software NIC",
}  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """A path or a command, and what it gave."""

    source: str
    value: str


def evidence(reading: Reading, value: Any = None) -> Evidence:
    """What a reading gave: `value` when only a part of it matters, else the error, or its first line."""
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
    """The first of them, and how many more there are."""
    more = len(read) - _FEW
    return read if more <= 0 else [*read[:_FEW], Evidence("…", f"and {more} more")]


@dataclass(frozen=True)
class Check:
    """One question to a machine. Its texts are also the set-up guide's."""

    id: str
    area: str  # which part of a report it is in
    title: str
    why: str  # why it matters, in one sentence
    cure: str  # the command to type, or what to set in the BIOS; <…> stands for what a finding knows
    source: str  # where this is said
    uses: frozenset[Use]
    reboot: bool  # whether the cure needs one
    essential: bool  # without an answer nobody can say whether the machine is ready
    settles: frozenset[str]  # ids of checks that only guess at what this one finds out
    ask: Callable[[Machine], Iterator[Finding]] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Finding:
    """The answer for the machine, or for one GPU, one NIC, or one pair of them."""

    status: Status
    summary: str
    read: tuple[Evidence, ...] = ()
    gpu: str = ""  # as "GPU0"
    nic: str = ""  # as "mlx5_0"
    cure: str = ""  # the check's own when empty and something is wrong
    reboot: bool | None = None  # the check's own when None
    needs_root: bool = False  # root would know more
    uses: frozenset[Use] | None = None  # the check's own when None
    check: Check = field(default=None, compare=False)  # type: ignore[assignment]  # `Check`'s runner sets it

    @property
    def subject(self) -> str:
        """What it is about: "", "GPU0", "mlx5_0" or "GPU0 mlx5_0"."""
        return " ".join(filter(None, (self.gpu, self.nic)))

    def of(self, check: Check) -> Finding:
        """The same with the check's texts where it has none of its own."""
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
) -> Callable[[Callable[[Machine], Iterator[Finding]]], Check]:  # fmt: skip
    """Make a check of a function that yields what it finds. Its area is what the function's module calls `AREA`."""

    def make(ask: Callable[[Machine], Iterator[Finding]]) -> Check:
        area = sys.modules[ask.__module__].AREA
        return Check(id, area, title, why, cure, source, uses, reboot, essential, settles, ask)

    return make


def says_reboot(cure: str) -> bool:
    """Whether a cure itself tells to reboot, so that nothing needs to be added where one is needed."""
    return re.search(r"(?<!until the next )\breboot", cure) is not None


def _maker(status: Status) -> Callable[..., Finding]:
    def make(summary: str, *read: Reading | Evidence, **more: Any) -> Finding:
        shown = tuple(evidence(one) if isinstance(one, Reading) else one for one in read)
        denied = any(isinstance(one, Reading) and one.trouble is Trouble.DENIED for one in read)
        more.setdefault("needs_root", status is Status.SKIP and denied)
        return Finding(status, summary, shown, **more)

    make.__doc__ = f"A finding that is {status}; `more` are fields of `Finding`."
    return make


ok: Callable[..., Finding] = _maker(Status.OK)
warn: Callable[..., Finding] = _maker(Status.WARN)
fail: Callable[..., Finding] = _maker(Status.FAIL)
skip: Callable[..., Finding] = _maker(Status.SKIP)


class Readiness(StrEnum):
    """Whether a machine can be used; the values are exit statuses."""

    READY = "0"
    NOT_READY = "1"
    UNKNOWN = "2"


@dataclass(frozen=True)
class Verdict:
    """Whether the machine is ready for a use, and in which words."""

    readiness: Readiness
    why: str


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks, and the pairs of GPU and NIC that could be used."""

    findings: tuple[Finding, ...]
    pairs: tuple[tuple[str, str], ...]  # the best first
    cards: tuple[str, ...] = ()  # cards of Mellanox/NVIDIA, with and without a driver

    def best_pair(self, use: Use) -> tuple[str, str] | None:
        """The pair of a GPU and a NIC with the least wrong, of those the nearest; None when there is none."""
        return min(self.pairs, key=lambda pair: tuple(map(len, self._against(use, pair))), default=None)

    def ready(self, use: Use) -> Verdict:
        """A machine is ready when nothing is wrong with it and with some pair of a GPU and a NIC.

        If not, `why` names what is wrong with the pair that has the least wrong with it.
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
        """What speaks against a pair, or all pairs, and what would have to be known; what probes settled is settled."""
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
