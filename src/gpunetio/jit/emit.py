"""Write a function as text in LLVM's intermediate representation.

Variables are allocas, which LLVM turns into registers (mem2reg).
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from .kinds import INT, Scalar, llvm_of, words_of
from .values import Array, Several, Word, from_texts, kind_of, texts_of, typed_texts

_NOT_IN_A_NAME = re.compile(r"\W", re.ASCII)


class Emitter:
    """Writes instructions into blocks."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.open: bool = True  # whether the current block has not ended
        self.at: str = ""  # marks instructions as those of a line (lines.py)
        self._numbers = itertools.count()

    def emit(self, text: str) -> None:
        """Emit an instruction without a result."""
        if self.open:
            self.lines.append(f"  {text}{self.at}")

    def let(self, text: str) -> str:
        """Emit an instruction, and return the name of its result."""
        name = f"%x.{next(self._numbers)}"
        self.emit(f"{name} = {text}")
        return name

    def word(self, kind: Scalar, text: str) -> Word:
        """Emit an instruction, and return its result."""
        return Word(kind, self.let(text))

    def label(self) -> str:
        """Return the name of a new block."""
        return f"L{next(self._numbers)}"

    def begin(self, label: str) -> None:
        """Begin a block. The block before continues with it."""
        self.go(label)
        self.lines.append(f"{label}:")
        self.open = True

    def go(self, label: str) -> None:
        """End the block with a branch to another one."""
        self.emit(f"br label %{label}")
        self.open = False

    def branch(self, condition: str, yes: str, no: str) -> None:
        """End the block with a branch to one of two."""
        self.emit(f"br i1 {condition}, label %{yes}, label %{no}")
        self.open = False

    def unreachable(self) -> None:
        """End the block, whose end is never reached."""
        self.emit("unreachable")
        self.open = False

    # --- variables ----------------------------------------------------------------------------------------------------

    def slots(self, kind: Any, name: str) -> list[str]:
        """Return memory for a value, one place for each of its words."""
        slots, name = [], _NOT_IN_A_NAME.sub("_", name)
        for word in words_of(kind):
            slots.append(f"%{name}.{next(self._numbers)}")
            self.allocas.append(f"  {slots[-1]} = alloca {word}")
        return slots

    def store(self, value: Any, slots: list[str]) -> None:
        """Store a value."""
        for text, slot in zip(typed_texts(value), slots, strict=True):
            self.emit(f"store {text}, ptr {slot}")

    def load(self, kind: Any, slots: list[str]) -> Any:
        """Load a value."""
        words = words_of(kind)
        return self.whole(from_texts(kind, [self.let(f"load {w}, ptr {s}") for w, s in zip(words, slots, strict=True)]))

    def whole(self, value: Any) -> Any:
        """Fill in the strides of arrays without gaps, which are not stored."""
        if isinstance(value, Several):
            return Several(tuple(map(self.whole, value.values)), value.names)
        if not isinstance(value, Array) or value.strides:
            return value
        strides: list[Any] = [value.kind.element.size]
        for length in reversed(value.shape[1:]):
            before = texts_of(strides[0])[0]
            strides.insert(0, self.word(INT, f"mul i64 {before}, {texts_of(length)[0]}"))
        return Array(value.kind, value.address, value.shape, tuple(strides))

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, symbol: str, given: list[Any], result: Any) -> Any:
        """Call a function of the unit with values, and return its result."""
        passed = ", ".join(text for value in given for text in typed_texts(value))
        words = words_of(result)
        if not words:
            self.emit(f'call void @"{symbol}"({passed})')
            return from_texts(result, [])
        made = self.let(f'call {llvm_of(result)} @"{symbol}"({passed})')
        if len(words) == 1:
            return from_texts(result, [made])
        parts = [self.let(f"extractvalue {llvm_of(result)} {made}, {i}") for i in range(len(words))]
        return self.whole(from_texts(result, parts))

    def give_back(self, value: Any) -> None:
        """Return a value from the function."""
        kind, texts = kind_of(value), texts_of(value)
        words = words_of(kind)
        if len(words) > 1:
            made = "poison"
            for i, (word, text) in enumerate(zip(words, texts, strict=True)):
                made = self.let(f"insertvalue {llvm_of(kind)} {made}, {word} {text}, {i}")
            texts = [made]
        self.emit(f"ret {llvm_of(kind)} {texts[0]}" if texts else "ret void")
        self.open = False
