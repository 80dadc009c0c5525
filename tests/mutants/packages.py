"""The packages that are mutated, and the test files that are to notice a mistake in each."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from patches import ROOT

PACKAGE = Path("src/gpunetio")
LOOSE = "gpunetio"  # the modules that lie in no folder

# Patterns below tests/, without "test_" and ".py". Files that name the mutated module run first.
PACKAGES = {
    LOOSE: ("unit/*", "gpu/dpa", "verbs/*", "nic/nic"),
    "bench": ("bench/*", "processes/*", "cli/cli"),
    "cli": ("cli/*", "bench/*", "wires/pcap", "doctor/doctor_cli", "doctor/doctor_at_once", "flow/*",
            "packet_processing/report", "processes/*"),
    "cm": ("cm/*",),
    "core": ("core/*", "rdma/*", "dma/*"),
    "device": ("device/*", "nic/nic_random", "eth/*", "rdma/*", "nccl/*", "cuda/*"),
    "dma": ("dma/*", "core/*"),
    "doctor": ("doctor/*",),
    "embed": ("embed/*", "uverbs/*", "nccl/*"),
    "eth": ("eth/*", "nic/eth_*", "device/eth_*"),
    "fabric": ("wires/*", "transport/*", "nic/*", "packet_processing/*"),
    "flow": ("flow/*", "nic/flow_commands", "nic/steering"),
    "formats": ("unit/*", "verbs/*", "nic/*", "cm/*"),
    "gpu": ("gpu/*", "cuda/cuda_stand_in", "unit/exports", "device/*"),
    "jit": ("jit/*", "unit/*", "docs/kernel_language", "device/*", "cuda/*"),
    "nccl": ("nccl/*",),
    "nic": ("nic/*", "transport/*", "wires/*", "device/*", "cli/*", "testing_plugin/*"),
    "packet_processing": ("packet_processing/*",),
    "providers": ("providers/*", "verbs/*"),
    "rdma": ("rdma/*",),
    "rendezvous": ("rendezvous/*", "processes/*"),
    "samples": ("docs/*", "cli/*", "gpu/dpa", "eth/*", "processes/*", "cm/cm_samples", "unit/sample_frames"),
    "testing": ("verbs/conformance", "testing_plugin/*", "cli/*"),
    "uverbs": ("uverbs/*", "testing_plugin/*"),
    "verbs": ("verbs/*", "gpu/*", "cm/*"),
}


def modules_of(package: str) -> list[Path]:
    """Return a package's modules, relative to the repository."""
    folder = ROOT / PACKAGE
    files = folder.glob("*.py") if package == LOOSE else (folder / package).rglob("*.py")
    return [file.relative_to(ROOT) for file in sorted(files)]


def files_of(pattern: str) -> list[Path]:
    """Return the test files that a pattern of `PACKAGES` stands for."""
    folder, _, name = pattern.partition("/")
    return sorted((ROOT / "tests" / folder).glob(f"test_{name}.py"))


@functools.cache
def _words_of(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", file.read_text()))


def tests_of(package: str, module: Path) -> tuple[str, ...]:
    """Return the test files for a module of a package, those that name the module first."""
    found = dict.fromkeys(file for pattern in PACKAGES[package] for file in files_of(pattern))
    files = sorted(found, key=lambda file: module.stem not in _words_of(file))
    return tuple(str(file.relative_to(ROOT)) for file in files)
