"""Hatch's build hook: with GPUNETIO_PREBUILT, wheels contain compiled code, so that the first program starts at once.

    GPUNETIO_PREBUILT=1 python -m build                 for this architecture's usual baseline
    GPUNETIO_PREBUILT=x86-64-v2 python -m build         for another one
    GPUNETIO_PREBUILT_GPUS=9.0,10.0                     besides: for NICs on GPUs of these compute capabilities

Without the variable, and in editable installations, nothing is compiled and the wheel is pure Python.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE, GPUS = "GPUNETIO_PREBUILT", "GPUNETIO_PREBUILT_GPUS"
MINUTES = 60  # after which a compiler that hangs is given up; an emulated one may take a third of that


class Baseline(NamedTuple):
    """The processors that a wheel's code runs on. They have all that `cpu` has, and the features."""

    machine: str  # as `uname -m` names it
    cpu: str  # as LLVM names it
    features: tuple[str, ...] = ()  # as LLVM names them


# The levels of the psABI for x86-64. PCLMULQDQ, which packets are checksummed with, belongs to none of them. Almost all
# processors of level 2 and all of level 3 have it.
_V2 = "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3", "pclmul"
_V3 = "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"

# The first one of each machine is its usual one.
BASELINES = {
    "x86-64-v3": Baseline("x86_64", "x86-64", (*_V2, *_V3)),
    "x86-64-v2": Baseline("x86_64", "x86-64", _V2),
    "aarch64": Baseline("aarch64", "generic"),
}


def chosen(name: str, machine: str) -> str:
    """Return the name of the baseline that a value of GPUNETIO_PREBUILT asks for on a machine."""
    fitting = [known for known, baseline in BASELINES.items() if baseline.machine == machine]
    if not fitting:
        raise ValueError(f"{VARIABLE} is set, but no baseline is known for {machine}: build without it")
    if name == "1":
        return fitting[0]
    if name not in fitting:
        raise ValueError(f"{VARIABLE} is {name!r}; on {machine} it may be 1 or {', '.join(fitting)}")
    return name


class Prebuilt(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the package, and packs what its cache then has into `gpunetio/_prebuilt`."""

    _folder: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what the compiler needs, as the wheel does when it is installed."""
        if not os.environ.get(VARIABLE):
            return []
        extras = self.metadata.core.optional_dependencies
        cuda = [*extras["cuda"], *extras["cuda-compilers"]] if os.environ.get(GPUS) else []
        return [*self.metadata.core.dependencies, *(each for each in cuda if not each.startswith("gpunetio["))]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if that is asked for."""
        name = os.environ.get(VARIABLE)
        if not name or version == "editable":
            return
        name = chosen(name, platform.machine())
        self._folder = TemporaryDirectory(prefix="gpunetio-prebuilt-")
        made = Path(self._folder.name, "prebuilt")
        self.app.display_info(f"compiling for {name}")
        compile_for(name, Path(self.root, "src"), made)
        build_data["force_include"][str(made)] = "gpunetio/_prebuilt"
        build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was packed."""
        if self._folder:
            self._folder.cleanup()


def compile_for(name: str, source: Path, made: Path) -> None:
    """Compile the package below `source` with its own commands, and have code and description in the folder `made`."""
    from llvmlite.binding import get_host_cpu_features

    baseline = BASELINES[name]
    host = get_host_cpu_features()
    missing = [feature for feature in baseline.features if not host.get(feature)]
    if missing:  # the commands also run what they compile
        raise ValueError(f"this machine cannot run code for {name}: it lacks {', '.join(missing)}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GPUNETIO_CPU_NAME": baseline.cpu,
        "GPUNETIO_CPU_FEATURES": ",".join(f"+{feature}" for feature in baseline.features),
        "GPUNETIO_CACHE_DIR": str(made),
    }

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *arguments], env=environment, cwd=source, check=True, timeout=60 * MINUTES,
            stdout=subprocess.PIPE, text=True,
        ).stdout

    made.mkdir(exist_ok=True)
    run("gpunetio", "warm")
    if gpus := os.environ.get(GPUS):
        run("gpunetio.nic.gpu.slice_cubins", *gpus.split(","))
    (made / "target.json").write_text(run("gpunetio.jit.prebuilt", name))
