"""Register checks by name, run them, and report their results."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from ..errors import NotFoundError, NotSupportedError
from ..verbs import Context
from .rig import PATIENCE, Rig, Violation

_AREA_OF = "checks_"
_registered: dict[str, Check] = {}


class Outcome(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Check:
    """A function that raises unless a provider keeps the one promise in its docstring.

    `area` is the name of its module without `checks_`.
    """

    name: str
    area: str
    function: Callable[[Rig], None]

    @property
    def contract(self) -> str:
        """Return the promise, and the document that it comes from."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """Return the first line of the contract."""
        return self.contract.partition("\n")[0]


@dataclass(frozen=True)
class Result:
    """The result of one check. `message` says what was wrong, or what the provider does not have."""

    check: Check
    outcome: Outcome
    message: str
    seconds: float

    def line(self, width: int = 0) -> str:
        """Return a row of the report, with the name padded to `width`."""
        return f"{self.check.name:<{width}}  {self.outcome.value}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Report:
    """The results of all checks, in the order in which they ran. `str()` of it is a table."""

    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Return whether no check has failed. NotSupportedError from a provider is not a failure."""
        return not self.of(Outcome.FAILED)

    def of(self, outcome: Outcome) -> list[Result]:
        """Return the results with this outcome."""
        return [result for result in self.results if result.outcome is outcome]

    @property
    def summary(self) -> str:
        """Return the counts of each outcome in words."""
        counts = ", ".join(f"{len(self.of(outcome))} {outcome.value}" for outcome in Outcome)
        return f"{len(self.results)} checks: {counts}"

    def __str__(self) -> str:
        width = max((len(result.check.name) for result in self.results), default=0)
        return "\n".join([*(result.line(width) for result in self.results), self.summary])


def check(function: Callable[[Rig], None]) -> Callable[[Rig], None]:
    """Register a check under the function's name."""
    name = function.__name__
    if name in _registered:
        raise ValueError(f"there are two checks {name}")
    area = function.__module__.rpartition(".")[2].removeprefix(_AREA_OF)
    _registered[name] = Check(name, area, function)
    return function


def checks(only: Iterable[str] | None = None) -> list[Check]:
    """Return all checks, or those of these names and areas. NotFoundError for anything that is neither."""
    known = list(_registered.values())
    if only is None:
        return known
    wanted = list(only)
    words = {word for one in known for word in (one.name, one.area)}
    if unknown := [word for word in wanted if word not in words]:
        areas = ", ".join(dict.fromkeys(one.area for one in known))
        raise NotFoundError(f"no check or area {', '.join(map(repr, unknown))}; the areas are {areas}")
    return [one for one in known if one.name in wanted or one.area in wanted]


def run(
    factory: Callable[[], Context],
    peer: Callable[[], Context] | None = None,
    only: Iterable[str] | None = None,
    *,
    patience: float = PATIENCE,
    tell: Callable[[Result], None] | None = None,
) -> Report:
    """Run the checks, or those of the names and areas in `only`, and report.

    `factory` opens the device to check, `peer` the one at the other end, by default the same. Both are called for each
    check, which closes what they return. A check waits `patience` seconds for events that must happen. `tell` is called
    with each result as it comes.
    """
    chosen = checks(only)
    other = peer or factory
    results = []
    with ExitStack() as stack:
        for opener in (factory, other):  # reopening a device that is kept open is faster
            stack.enter_context(opener())
        for one in chosen:
            result = _run_one(one, factory, other, patience)
            results.append(result)
            if tell:
                tell(result)
    return Report(tuple(results))


def _run_one(one: Check, factory: Callable[[], Context], peer: Callable[[], Context], patience: float) -> Result:
    start = time.monotonic()
    outcome, message = Outcome.PASSED, ""
    try:
        with Rig(factory, peer, patience) as rig:
            one.function(rig)
    except NotSupportedError as error:
        outcome, message = Outcome.NOT_SUPPORTED, str(error)
    except Violation as error:
        outcome, message = Outcome.FAILED, str(error)
    except Exception as error:  # whatever a provider does wrong, the other checks run
        outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
    return Result(one, outcome, message, time.monotonic() - start)
