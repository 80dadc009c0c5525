"""Compiled code that comes with a wheel, so that the first program need not wait for the compiler.

`hatch_build.py` compiles it when it builds a wheel, for every processor with the features of a baseline, such as
x86-64-v3. The code is in the package's folder `_prebuilt`, with a description of its target and of the tools that made
it. Without the folder, or if the description does not fit, everything is compiled for this machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import llvmlite
from llvmlite import binding as llvm

from ..compiler import compiling
from .frozen import PACKAGE, compiler_stamp
from .processor import cpu_features, cpu_name

logger: logging.Logger = logging.getLogger("gpunetio.compile")

FOLDER = PACKAGE / "_prebuilt"
DESCRIPTION = "target.json"
IGNORED = "GPUNETIO_IGNORE_PREBUILT"  # if not empty


@dataclass(frozen=True)
class Target:
    """What code is compiled for and with."""

    triple: str  # architecture, operating system and C library, as LLVM names them
    cpu: str  # as LLVM names it
    features: str  # of the processor: "+avx,+avx2,…"; LLVM may use those with a plus
    versions: dict[str, str]  # of everything that determines the contents of a file of the cache
    baseline: str = ""  # a name of `cpu` and `features` together, for people
    compiler: str = ""  # the stamp of the compiler; names of files contain everything else that determines the code

    def why_not(self, here: Target) -> str:
        """Return why code for this target does not run here; "" if it does."""
        for name, version in self.versions.items():
            if version != here.versions.get(name):
                return f"it was compiled with {name} {version}, and this is {name} {here.versions.get(name)}"
        if self.triple != here.triple:
            return f"it was compiled for {self.triple}, and this is {here.triple}"
        missing = _names(self.features) - _names(here.features)
        return f"this processor lacks {', '.join(sorted(missing))}" if missing else ""

    def cure(self, here: Target) -> str:
        """Return how to install the compiler that the code was compiled with; "" if it is the one here."""
        other = [name for name in ("llvmlite",) if self.versions.get(name) != here.versions.get(name)]
        wanted = " ".join(f"{name}=={self.versions.get(name)}" for name in other)
        return f" (to use it: pip install {wanted})" if wanted else ""

    def key(self) -> tuple[str, str, str]:
        """Return the parts of the target that names of files contain."""
        return self.triple, self.cpu, self.features


def _names(features: str) -> set[str]:
    return {feature[1:] for feature in features.split(",") if feature.startswith("+")}


@functools.cache
def here() -> Target:
    """Return what this process compiles for and with."""
    with compiling():  # no fork meanwhile: this calls LLVM, which has locks
        return Target(
            triple=llvm.get_default_triple(), cpu=cpu_name(), features=cpu_features(),
            versions={"Python": str(sys.implementation.cache_tag), "llvmlite": llvmlite.__version__},
        )


@functools.cache
def found() -> Target | None:
    """Return the target of the wheel's code; None if there is no such code."""
    file = FOLDER / DESCRIPTION
    try:
        return Target(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read (%s): the wheel's compiled code is not used; install it again", file, error)
        return None


@functools.cache
def usable() -> Target | None:
    """Return the target of the wheel's code if it runs here, else None."""
    target = found()
    if target is None or os.environ.get(IGNORED):
        return None
    why_not = target.why_not(here())
    logger.debug("the wheel's compiled code is for %s; %s", target.baseline, why_not or "it is used")
    return None if why_not else target


@functools.cache  # log it once
def tell_why_not() -> None:
    """Log why the wheel's code is not used, now that something has to be compiled instead."""
    target = found()
    if target is None or os.environ.get(IGNORED):
        return
    if why_not := target.why_not(here()):  # otherwise the wheel's code is used, as far as it goes
        logger.warning(
            "the compiled code that came with gpunetio is not used: %s; it is compiled for this machine, once%s",
            why_not, target.cure(here()),
        )


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Compile everything for this machine, in this process and in those that it starts meanwhile."""
    usable.cache_clear()
    os.environ[IGNORED] = "1"
    try:
        yield
    finally:
        del os.environ[IGNORED]
        usable.cache_clear()


def report() -> tuple[str, str]:
    """Return the baseline of the wheel's code, and why the code is not used; each is "" if there is none."""
    target = found()
    if target is None:
        return "", ""
    changed = "" if target.compiler == compiler_stamp() else "the package was changed after it was installed"
    return target.baseline, target.why_not(here()) or changed


def main(arguments: Iterable[str]) -> None:
    """Print the description for the code that this process compiles, under the baseline's name."""
    (baseline,) = arguments
    print(json.dumps(asdict(here()) | {"baseline": baseline, "compiler": compiler_stamp()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
