"""Random functions in the language of kernels, for tests that compare ways to run them.

A variable keeps one type, which its name shows: i0 … are integers, f0 … floats, g0 … float32. Loops have few
iterations, and so has the program.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

INTS = ("+", "-", "*", "&", "|", "^", "<<", ">>", "//", "%")
FLOATS = ("+", "-", "*", "/")
COMPARE = ("==", "!=", "<", "<=", ">", ">=")
EDGES = (0, 1, 2, 3, -1, -2, 7, 63, 64, 65, 255, 256, 1 << 31, (1 << 32) - 1, 1 << 62, -(1 << 63), (1 << 63) - 1)
NARROW = ("np.int8", "np.uint8", "np.int16", "np.uint16", "np.int32", "np.uint32")


class Writer:
    """Writes functions. `floats`: with floating-point numbers; `helpers`: names of functions of two integers."""

    def __init__(self, seed: int, floats: bool = True, helpers: tuple[str, ...] = ()):
        self.random = random.Random(seed)
        self.floats, self.helpers = floats, helpers
        self.known: list[str] = []  # variables that have a value

    def function(self, name: str, statements: int = 8, decorator: str = "@device_function") -> str:
        """A function of two integers, and with floats of a float and a float32, that returns an integer."""
        self.known = ["i0", "i1", *(("f0", "g0") if self.floats else ())]
        given = ", ".join(self.known)
        lines = [decorator, f"def {name}({given}):"]
        lines += [f"    {line}" for line in self._block(statements, 2)]
        total = " ^ ".join(one for one in self.known if one[0] == "i")
        if self.floats:
            shares = [f"int({one} * 1024.0)" for one in self.known if one[0] != "i"]
            total = " ^ ".join([total, *shares])
        return "\n".join([*lines, f"    return {total}", ""])

    def _name(self, kind: str) -> str:
        return self.random.choice([one for one in self.known if one[0] == kind])

    def _new(self, kind: str) -> str:
        return f"{kind}{self.random.randrange(6)}"

    def _kind(self) -> str:
        return self.random.choice("iiifg") if self.floats else "i"

    def _block(self, count: int, depth: int) -> Iterator[str]:
        for _ in range(count):
            yield from self._statement(depth)

    def _statement(self, depth: int) -> Iterator[str]:
        chosen = self.random.randrange(10)
        if chosen < 5 or depth == 0:
            kind = self._kind()
            name, value = self._new(kind), self._value(kind, 3)
            yield f"{name} = {value}"
            if name not in self.known:
                self.known.append(name)
        elif chosen < 6:
            kind = self._kind()
            how = self.random.choice(INTS if kind == "i" else FLOATS)
            yield f"{self._name(kind)} {how}= {self._value(kind, 2)}"
        elif chosen < 8:
            yield f"if {self._condition(2)}:"
            yield from self._inside(depth)
            if self.random.random() < 0.5:
                yield "else:"
                yield from self._inside(depth)
        else:
            step = self.random.choice(["", ", 2", ", -1", ", 3"])
            first, last = self.random.randrange(4), self.random.randrange(5)
            over = f"range({first}, {last}{step})" if step else f"range({last})"
            if self.random.random() < 0.2:
                over = f"({', '.join(self._value('i', 1) for _ in range(3))})"
            yield f"for i9 in {over}:"
            self.known.append("i9")
            yield from self._inside(depth)
            if self.random.random() < 0.3:
                yield f"    if {self._condition(1)}:"
                yield f"        {self.random.choice(['break', 'continue'])}"
            self.known = [one for one in self.known if one != "i9"]

    def _inside(self, depth: int) -> Iterator[str]:
        """Statements in a block: a variable that is new there has no value behind it."""
        before = list(self.known)
        for line in self._block(self.random.randrange(1, 4), depth - 1):
            yield f"    {line}"
        self.known = before

    def _condition(self, depth: int) -> str:
        chosen = self.random.randrange(6)
        if depth and chosen == 0:
            return f"({self._condition(depth - 1)} {self.random.choice(['and', 'or'])} {self._condition(depth - 1)})"
        if depth and chosen == 1:
            return f"not {self._condition(depth - 1)}"
        kind = self._kind()
        one, other = self._value(kind, 1), self._value(kind, 1)
        if chosen == 2:
            return f"{one} < {self._value(kind, 1)} <= {other}"
        if chosen == 3 and kind == "i":
            return f"{one} in ({other}, {self._value('i', 0)}, 5)"
        return f"{one} {self.random.choice(COMPARE)} {other}"

    def _value(self, kind: str, depth: int) -> str:
        return self._int(depth) if kind == "i" else self._float(kind, depth)

    def _int(self, depth: int) -> str:
        chosen = self.random.randrange(12)
        if depth == 0 or chosen < 3:
            if self.random.random() < 0.4:
                number = self.random.choice(EDGES)
                return f"({number})" if number < 0 else str(number)
            return self._name("i")
        one, other = self._int(depth - 1), self._int(depth - 1)
        if chosen < 7:
            return f"({one} {self.random.choice(INTS)} {other})"
        if chosen == 7:
            return f"({one} if {self._condition(1)} else {other})"
        if chosen == 8:
            return f"{self.random.choice(['min', 'max'])}({one}, {other})"
        if chosen == 9:
            return self.random.choice([f"(-{one})", f"(~{one})", f"abs({one})", f"(not {one})", f"({one} < {other})"])
        if chosen == 10:
            return f"{self.random.choice(NARROW)}({one})"
        if self.helpers and self.random.random() < 0.5:
            return f"{self.random.choice(self.helpers)}({one}, {other})"
        return f"({one} {self.random.choice(['and', 'or'])} {other})"

    def _float(self, kind: str, depth: int) -> str:
        chosen = self.random.randrange(8)
        if depth == 0 or chosen < 3:
            if self.random.random() < 0.3:
                number = self.random.choice([0.0, 0.5, -1.25, 3.0, 1e3, 1e-3])
                return f"np.float32({number})" if kind == "g" else str(number)
            return self._name(kind)
        one, other = self._float(kind, depth - 1), self._float(kind, depth - 1)
        if chosen < 6:
            constant = self.random.choice(["0.5", "2", "1.5"]) if self.random.random() < 0.3 else other
            return f"({one} {self.random.choice(FLOATS)} {constant})"
        if chosen == 6:
            return f"({one} if {self._condition(1)} else {other})"
        how = self.random.choice(["abs({})", "min({}, {})", "max({}, {})", "(-{})"])
        return how.format(one, other)


def module(seed: int, count: int, floats: bool = True) -> str:
    """A module of `count` functions, each of which may call those before."""
    lines = ["import numpy as np", "from gpunetio.device import device_function", ""]
    names: list[str] = []
    for number in range(count):
        writer = Writer(seed + number, floats=floats and number % 2 == 1, helpers=tuple(names))
        name = f"r{number}"
        lines.append(writer.function(name))
        if number % 2 == 0 or not floats:
            names.append(name)
    return "\n".join(lines)
