"""Put small mistakes into copies of the tree, and count those that a test notices (`make mutants`).

The patches of this folder are mistakes chosen by hand. Of each package, a seeded sample is taken from all mutants that
Cosmic Ray makes of its modules' syntax trees, those of compiled code included. Cosmic Ray only changes a source file:
tests run as always, with threads, subprocesses and a cache of compiled code, which is named after what it is made of.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packages import PACKAGE, PACKAGES, modules_of, tests_of
from patches import ROOT, read_all

PATCHES_GOAL, PACKAGE_GOAL = 1.0, 0.92
TESTS_S, TEST_S = 3600, 600  # all tests of a mutant, each test
PASSED, FAILED, NOT_COLLECTED, NOT_CONFIGURED = 0, 1, 2, 4  # exit statuses of pytest
OUTPUT = "mutants.log"  # in the copy
CAUGHT, SURVIVED, UNTRIED = "caught", "SURVIVED", "NOT TRIED"


@dataclass(frozen=True)
class Mutant:
    """One mistake: what it does to the text of a file, and the arguments of pytest that are to notice it."""

    name: str
    path: Path
    change: Callable[[str], str]
    tests: tuple[str, ...]


# --- running ---------------------------------------------------------------------------------------------------------


def run(tree: Path, limit: float, *arguments: str) -> int | None:
    """Run Python on a tree: its exit status, or None after `limit` seconds. `OUTPUT` has what it printed."""
    cache = tree.parent / "cache"  # not the user's, where what mutants compile would stay
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "GPUNETIO_CACHE_DIR": str(cache)}
    with (tree / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tree, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when we are interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and what its tests have started
            process.wait()


def run_tests(tree: Path, *arguments: str) -> int | None:
    """Run pytest. What a test compiles counts as its time, so it has more than usual."""
    return run(tree, TESTS_S, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"timeout={TEST_S}", *arguments)


def copy_of_the_tree(tree: Path) -> Path:
    """Make a new copy. The cache of compiled code is beside it: only what a mutant changes is compiled again."""
    if tree.exists():
        shutil.rmtree(tree)
    unwanted = shutil.ignore_patterns(".git", ".venv", "build", "dist", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=unwanted, symlinks=True)
    return tree


def failed_in(tree: Path) -> list[str]:
    """The tests that failed or could not be set up, from the summary of the last run."""
    summary = (tree / OUTPUT).read_text().rpartition(" short test summary info ")[2]
    lines = summary.splitlines()
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]


def try_out(mutant: Mutant, folder: Path) -> tuple[str, str]:
    """What becomes of a mutant, and why it was not tried.

    A test that fails without the mistake too says nothing about it: it is named, left out, and the others go on.
    """
    tree = copy_of_the_tree(folder / "mutant")
    file = tree / mutant.path
    try:
        file.write_text(mutant.change(file.read_text()))
    except ValueError as error:
        return UNTRIED, str(error)
    left_out: set[str] = set()
    while True:
        files = (test for test in mutant.tests if test not in left_out)  # one that cannot be collected is named whole
        status = run_tests(tree, "-x", *files, *(f"--deselect={test}" for test in sorted(left_out)))
        if status == PASSED:
            return SURVIVED, ""
        if status is None or status < 0:  # it hangs or crashes
            return CAUGHT, ""
        failed = sorted(set(failed_in(tree)) - left_out)
        if status == NOT_CONFIGURED:  # not even conftest.py could be imported
            again = ["--collect-only", *mutant.tests]
        elif status in (FAILED, NOT_COLLECTED) and failed:
            again = failed
        else:
            return UNTRIED, f"pytest ended with status {status}"
        without = folder / "without"
        if not without.exists():
            copy_of_the_tree(without)
        if run_tests(without, *again) == PASSED:
            return CAUGHT, again[0]
        if not failed:
            return UNTRIED, "the tests cannot be collected without a mistake either"
        print(f"left out, as it fails without a mistake: {', '.join(failed)}", flush=True)
        left_out.update(failed)


# --- mutants ---------------------------------------------------------------------------------------------------------


def patches(match: str) -> list[Mutant]:
    """The mistakes chosen by hand whose name contains `match`."""
    return [Mutant(one.name, Path(one.path), one.applied, one.tests) for one in read_all() if match in one.name]


def is_annotation(node) -> bool:
    """Whether a node of parso's belongs to an annotation, which no program looks at."""
    while node.parent is not None:
        parent = node.parent
        if parent.type in ("tfpdef", "annassign") and node is parent.children[-1 if parent.type == "tfpdef" else 1]:
            return True
        if parent.type == "funcdef" and node is parent.annotation:
            return True
        node = parent
    return False


def mutations_of(module: Path, tests: tuple[str, ...]) -> Iterator[Mutant]:
    """All that Cosmic Ray can do to a module."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast((ROOT / module).read_text())))
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments() or name == "core/NoOp":
            continue
        places = [node for node in nodes for _ in kind().mutation_positions(node)]
        for occurrence, node in enumerate(places):
            if is_annotation(node):
                continue

            def change(text: str, kind=kind, occurrence=occurrence) -> str:
                mutated = mutate_code(text, kind(), occurrence)
                if mutated is None:
                    raise ValueError("Cosmic Ray finds nothing to change")
                return mutated

            line, column = node.start_pos
            place = f"{module.relative_to(PACKAGE)}:{line}:{column} {name.removeprefix('core/')}"
            yield Mutant(place, module, change, tests)


def sample_of(package: str, size: int, seed: int, match: str) -> list[Mutant]:
    """A sample of all mutants of a package's modules whose path contains `match`."""
    modules = [module for module in modules_of(package) if match in str(module)]
    mutants = [mutant for module in modules for mutant in mutations_of(module, tests_of(package, module))]
    print(f"{package}: {len(mutants)} mutants in {len(modules)} modules", flush=True)
    return random.Random(f"{seed} {package}").sample(mutants, min(size, len(mutants)))


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """How many of a package's mutants were caught."""

    title: str
    tried: int
    caught: int
    goal: float

    @property
    def reached(self) -> bool:
        return self.caught >= self.goal * self.tried

    def __str__(self) -> str:
        part = f"{self.caught / self.tried:.1%}" if self.tried else "-"
        missed = "" if self.reached else f"  below {self.goal:.0%}"
        return f"{self.title:<18} {self.tried:>6} {self.caught:>7} {part:>7}{missed}"


def share_of(title: str, mutants: list[Mutant], goal: float) -> Share:
    """Try mutants out, and print what became of each."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpunetio-mutants-") as folder:
        for mutant in mutants:
            began = time.monotonic()
            outcome, why = try_out(mutant, Path(folder))
            outcomes.append(outcome)
            print(f"{outcome:9}  {time.monotonic() - began:5.0f} s  {mutant.name}  {why}".rstrip(), flush=True)
            if outcome == SURVIVED:
                source = (ROOT / mutant.path).read_text()
                lines = difflib.unified_diff(source.splitlines(), mutant.change(source).splitlines(), n=0, lineterm="")
                print("\n".join(f"    {line}" for line in list(lines)[2:]), flush=True)
    return Share(title, len(mutants), outcomes.count(CAUGHT), goal)


def part_of(text: str) -> tuple[int, int]:
    """Parse `2/16`: that part of the mutants whose index, divided by 16, leaves 1."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"{text} is no part: K/N with K from 1 to N")
    return part - 1, parts


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the mistakes that a test notices.")
    names = ("patches", *PACKAGES)
    parser.add_argument("--only", action="append", choices=names, metavar="PART", help=f"of {', '.join(names)}; again")
    parser.add_argument("--match", default="", help="only patches, or modules, whose name contains this")
    parser.add_argument("--sample", type=int, default=25, help="mutants of each package (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"), help="the day's date")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="K/N", help="the K-th of N parts, from 1")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no test outlives us
    part, parts = options.part
    print(f"seed {options.seed}", flush=True)
    shares = []
    for name in options.only or names:
        if name == "patches":
            mutants, goal = patches(options.match), PATCHES_GOAL
        else:
            mutants, goal = sample_of(name, options.sample, options.seed, options.match), PACKAGE_GOAL
        shares.append(share_of(name, mutants[part::parts], goal))
    print(f"{'part':<18} {'tried':>6} {'caught':>7} {'share':>7}", *shares, sep="\n", flush=True)
    return 0 if all(share.reached for share in shares) else 1


if __name__ == "__main__":
    sys.exit(main())
