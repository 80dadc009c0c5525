"""Random programs do the same as compiled code and as plain Python."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gpunetio.jit.values import CompileError
from random_code import EDGES, module

COUNT = 12  # functions of a module


def written(folder: Path, text: str, name: str = "random_program") -> ModuleType:
    """The module of a text: the compiler reads source files."""
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def arguments(floats: bool) -> list[tuple[Any, ...]]:
    pairs = [*itertools.product(EDGES[::3], EDGES[1::4]), (12345678901234567, -987654321), (5, -1 << 63)]
    if not floats:
        return pairs
    return [(*pair, value, np.float32(other)) for pair, (value, other) in zip(
        pairs, itertools.cycle([(0.0, 1.5), (-2.75, 3.0), (1e300, -1e30), (math.inf, 0.1), (math.nan, -0.0)])
    )]


def disagreements(made: ModuleType) -> list[str]:
    found = []
    for number in range(COUNT):
        function = getattr(made, f"r{number}")
        try:
            for given in arguments(len(function.signature.parameters) == 4):
                compiled, plain = function(*given), function.interpret(*given)
                if compiled != plain:
                    found.append(f"r{number}{given}: {compiled} compiled, {plain} in Python")
                    break
        except CompileError as error:  # what is constant is divided now, and Python has no quotient either
            if "division by zero" not in str(error):
                raise
    return found


@pytest.mark.parametrize(
    "seed", [0, 1000, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2000, 6000, 1000))]
)
def test_compiled_code_does_what_python_does(tmp_path: Path, seed: int) -> None:
    made = written(tmp_path, module(seed, COUNT), f"random_program_{seed}")
    assert not disagreements(made), Path(made.__file__ or "").read_text()
