"""Fuzz the compiler: randomly broken programs must compile, or be refused with an explanation.

    python tests/rigs/fuzz_code.py COUNT [SEED]

A broken program is a random one (random_code.py) in whose syntax tree some nodes were exchanged, removed or replaced.
Each is compiled for the host and for CUDA as far as LLVM's verifier. Only a CompileError may be raised; any other
exception is a mistake of the compiler. LLVM's abort would end the process, and the newest file in the folder is then
the program.
"""

from __future__ import annotations

import ast
import collections
import copy
import importlib.util
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm

from gpunetio.jit import machine
from gpunetio.jit.compile import DeviceFunction
from gpunetio.jit.kinds import FLOAT32, FLOAT64, INT, NOTHING, ArrayType, TupleType
from gpunetio.jit.unit import Unit
from gpunetio.jit.values import CompileError
from random_code import Writer

HEAD = "import math\nimport numpy as np\nfrom gpunetio import device\nfrom gpunetio.device import device_function\n\n"
SNIPPETS = [ast.parse(text).body[0] for text in (
    "i0[1]", "i0.size", "len(i0)", "f0[i1]", "i1 = (i0, f0)", "i0, i1 = i1, i0", "raise ValueError('no')", "assert i0",
    "assert i0, 'text'", "return", "return f0", "return i0, 1", "pass", "while i0: i0 -= 1", "while True: break",
    "print('a', i0)", "x = [1]", "x = lambda: 1", "del i0", "i0 += 'a'", "i0 = None", "i0 = device.ld64(i1)",
    "device.put(i0)", "device.lane_id(1)", "math.sin(i0)", "math.floor(f0)", "i0 @ i1", "i0 is None", "i0 in i1",
    "i0 in (1, f0)", "x = i0 if i1 else f0", "i0 = 1 << 70", "i0 = 10 ** 30", "(i0 := 3)", "for q in i0: pass",
    "for q in (1, 2.5): i0 = int(q)", "with i0: pass", "f'{i0}'", "{}", "i0.x = 1", "i0[0] = 1", "global q", "q",
    "continue", "break", "min()", "max(i0, f0)", "range(3)", "int('3')", "divmod(i0, 0)", "1 / 0", "1 // 0", "i0 / i1",
    "i0 ** -1", "2.0 ** 5000", "float(i0) // 0.0", "~f0", "-None", "abs(None)", "device", "np.int8(f0)",
    "*i0, i1 = 1, 2", "x: int", "x: int = 1",
    "try:\n    pass\nexcept ValueError:\n    pass", "import os", "def g(): pass", "yield i0",
    "i0 = i1 = f0 = 5", "not None", "(1, 2)[5]", "(1, 2)[i0]", "(1, 2.5)[i0]", "(i0, i1)[i1]", "()[0]", "i0 < i1 < f0",
    "return i0 if i1 else None", "i0()", "(lambda: 1)()", "math", "math.pi", "math.pi + i0", "np.zeros(3)", "str(i0)",
)]
KINDS = (INT, INT, INT, FLOAT64, FLOAT32, NOTHING, ArrayType("float64", 2, True), ArrayType("uint8", 1, False),
         TupleType((INT, FLOAT64)))


class _Broken(ast.NodeTransformer):
    """Exchanges nodes of a function."""

    def __init__(self, chance: random.Random, rate: float):
        self._random, self._rate = chance, rate
        self._seen: list[ast.expr] = []

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            self._seen.append(copy.deepcopy(node))
            if self._random.random() < self._rate:
                return self._another()
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef) and self._random.random() < self._rate:
            return [node, copy.deepcopy(self._random.choice(SNIPPETS))]
        return node

    def _another(self) -> ast.expr:
        if self._random.random() < 0.5:
            chosen: Any = copy.deepcopy(self._random.choice(SNIPPETS))
            if isinstance(chosen, ast.Expr):
                return chosen.value
        return copy.deepcopy(self._random.choice(self._seen))


def broken(seed: int) -> str:
    """A function whose text was broken."""
    chance = random.Random(seed)
    tree = ast.parse(Writer(seed, floats=True).function("f", statements=chance.randrange(1, 6)))
    tree = _Broken(chance, chance.choice([0.01, 0.03, 0.1])).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def loaded(folder: Path, seeds: list[int]) -> Iterator[tuple[int, str, Any]]:
    """The functions of these seeds that Python itself takes, by modules of one each."""
    for seed in seeds:
        text = broken(seed)
        file = folder / f"f{seed}.py"
        file.write_text(HEAD + text + "\n")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(made)
        except Exception:  # Python itself does not accept it, or a default of a parameter makes no sense
            continue
        yield seed, text, made.f


def outcome(function: DeviceFunction, target: Any, kinds: tuple[Any, ...]) -> str:
    """What becomes of it: "compiled", "refused", or the traceback of a mistake."""
    try:
        unit = Unit(target, "fuzz.")
        try:
            unit.entry(function, "fuzz", kinds)
        except CompileError as error:
            return "refused" if str(error).strip() else "refused without words"
        module = llvm.parse_assembly(unit.text())
        module.verify()
        return "compiled"
    except Exception:
        return traceback.format_exc()


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found: collections.Counter[str] = collections.Counter()
    warnings.simplefilter("ignore")  # Python's warnings about code that makes no sense
    targets = machine.host(), machine.cuda((9, 0))
    chance = random.Random(first)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for seed, text, function in loaded(Path(folder), [*range(first, first + count)]):
            kinds = (INT, INT, FLOAT64, FLOAT32) if chance.random() < 0.7 else tuple(chance.choices(KINDS, k=4))
            for target in targets:
                said = outcome(function, target, kinds)
                if said not in ("compiled", "refused"):
                    line = said.strip().splitlines()[-1]
                    if found[line] == 0:
                        print(f"seed {seed}, {target.name}, {kinds}:\n{text}\n{said}", flush=True)
                    said = line
                found[said] += 1
    for said, times in found.most_common():
        print(f"{times:8} {said}")


if __name__ == "__main__":
    main()
