"""Compile one function: its statements, and where its variables have values.

A variable has the type of the last value assigned to it. Where two paths meet, it has a value only if it has a value of
the same type on both. So compiled code never reads a variable that Python would call unbound.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from . import arrays
from .annotations import Unfit, as_kind, fitting, hints_of
from .expressions import BROKEN, Expressions
from .kinds import FLOAT64, INT, NOTHING, in_words, llvm_of, words_of
from .numbers import int_text
from .source import shown, tree_of
from .values import Array, CompileError, Mistake, Several, Silent, from_texts, kind_of, thing_in_words

Env = dict[str, Any]
TOO_DEEP = (
    "this nests too deeply for the compiler, with the functions that it calls: write parts of it as statements or loops"
)


@dataclass
class _Loop:
    """A loop: the targets of `continue` and `break`, and the variables that have values there."""

    go_on: str
    after: str
    going_on: list[Env] = field(default_factory=list)
    leaving: list[Env] = field(default_factory=list)


class Lowering(Expressions):
    """A function that is compiled to text, for arguments of certain types."""

    def __init__(self, unit: Any, fn: FunctionType, kinds: tuple[Any, ...]):
        super().__init__(unit, fn)
        self.result: Any = None  # the type of the result; None: no return statement yet
        self._returns = hints_of(fn).get("return", Any)  # the annotation of the result
        self._returned_at = 0
        self._loops: list[_Loop] = []
        self._mistakes: list[str] = []
        tree = tree_of(fn)
        taken = tree.args
        several = [taken.vararg] if taken.vararg else []
        names = [argument.arg for argument in (*taken.posonlyargs, *taken.args, *several, *taken.kwonlyargs)]
        self.parameters: list[str] = []
        if self.scope:
            self.at = unit.lines.at(self.scope, tree.lineno)
        for name, kind in zip(names, kinds, strict=True):
            words = words_of(kind)
            texts = [f"%a{len(self.parameters) + i}" for i in range(len(words))]
            self.parameters += [f"{word} {text}" for word, text in zip(words, texts, strict=True)]
            self.assign_name(name, self.whole(from_texts(kind, texts)))
        self._statements(tree.body)
        if self.open:
            self._at_the_end(tree)
        if self.result is None:  # it never returns
            self.result = NOTHING
        if self._mistakes:
            raise CompileError("\n".join(self._mistakes))

    def text(self, symbol: str, head: str, attributes: str, first: str = "") -> str:
        """Return the function's IR. `first`: an instruction before all others."""
        scope = f"!dbg !{self.scope} " if self.scope else ""
        head = f'define {head} {llvm_of(self.result)} @"{symbol}"({", ".join(self.parameters)}) {attributes} {scope}{{'
        return "\n".join([head, "entry:", *self.allocas, first, *self.lines, "}\n"])

    def _at_the_end(self, tree: ast.FunctionDef) -> None:
        """Return nothing, as Python does after the last statement."""
        if self.result in (None, BROKEN):
            try:
                self._annotated(None)
            except Mistake as mistake:
                self._note(mistake, tree.body[-1])
        elif self.result is not NOTHING:
            self._note(Mistake(
                f"{self.fn.__qualname__}() returns {in_words(self.result)} in line {self._returned_at}, and nothing "
                "where it ends: return a value there, too"
            ), tree.body[-1])
        self._return(None)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _statements(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if not self.open:  # not reachable
                return
            try:
                self.dispatch(statement)
            except Mistake as mistake:
                self._note(mistake, statement)
                self._break(statement)
            except Silent:
                self._break(statement)
            except CompileError as error:  # in a function that the statement calls
                self._mistakes.append(str(error))
                self._break(statement)
            except RecursionError:  # this may occur again until an enclosing statement has enough stack to report it
                self._note(Mistake(TOO_DEEP), statement)
                self._break(statement)

    def _note(self, mistake: Mistake, statement: ast.stmt) -> None:
        node = getattr(mistake, "node", statement)
        place = f"{self.fn.__code__.co_filename}:{getattr(node, 'lineno', statement.lineno)}"
        self._mistakes.append(f"{place}: in {self.fn.__qualname__}(): {mistake}\n{shown(self.fn, node)}")

    def _break(self, statement: ast.stmt) -> None:
        """After a mistake in a statement, report nothing about variables that it assigns to, nor about its result."""
        self.open = not isinstance(statement, ast.Return)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.env[node.id] = BROKEN
            if isinstance(node, ast.Return):
                self.result = self.result or BROKEN

    def _Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def _Pass(self, node: ast.Pass) -> None:
        pass

    def _Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self._assign(node.target, self.value(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            new = self.binary(node.op, self.variable(target.id), self.value(node.value))
            self.assign_name(target.id, new)
        elif isinstance(target, ast.Attribute):
            base = self.value(target.value)
            new = self.binary(node.op, self.attribute(base, target.attr), self.value(node.value))
            self.set_attribute(base, target.attr, new)
        else:
            base = self._array(target)
            indices = self.indices(base, target.slice)
            new = self.binary(node.op, self.element(base, indices, target), self.value(node.value))
            arrays.set_element(self, base, indices, new, target)

    def _array(self, target: ast.Subscript) -> Array:
        base = self.value(target.value)
        if not isinstance(base, Array):
            raise Mistake(f"only elements of arrays can be changed, not those of {thing_in_words(base)}")
        return base

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.assign_name(target.id, value)
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.value(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript):
            base = self._array(target)
            arrays.set_element(self, base, self.indices(base, target.slice), value, target)
        elif isinstance(target, ast.Tuple):
            if not isinstance(value, Several) or len(value.values) != len(target.elts):
                raise Mistake(f"a tuple of {len(target.elts)} is needed here, not {thing_in_words(value)}")
            for one, part in zip(target.elts, value.values, strict=True):
                self._assign(one, part)
        else:
            raise Mistake("compiled code assigns to names, elements, and fields of structures")

    def _Return(self, node: ast.Return) -> None:
        value = self._annotated(None if node.value is None else self.value(node.value))
        kind = kind_of(value)
        if self.result is None or self.result == BROKEN:
            self._returned_at = node.lineno
        elif self.result != kind:
            raise Mistake(
                f"{self.fn.__qualname__}() returns {in_words(self.result)} in line {self._returned_at}, and "
                f"{in_words(kind)} here: return the same type everywhere"
            )
        self._return(value)

    def _annotated(self, value: Any) -> Any:
        """Return a result as the type of the function's annotation."""
        kind = kind_of(value)
        try:
            return as_kind(value, fitting(kind, self._returns))
        except Unfit as error:
            told = f"{self.fn.__qualname__}() returns {error}, as its annotation says"
            raise Mistake(f"{told}, not {in_words(kind)}") from None

    def _return(self, value: Any) -> None:
        self.result = kind_of(value) if self.result in (None, BROKEN) else self.result
        self.give_back(value)

    def _Raise(self, node: ast.Raise) -> None:
        if node.cause is not None or node.exc is None:
            raise Mistake("compiled code raises an exception with a constant message: raise ValueError('too long')")
        called = isinstance(node.exc, ast.Call)
        kind = self.value(node.exc.func if called else node.exc)  # type: ignore[union-attr]
        given = [self.value(one) for one in node.exc.args] if called else []  # type: ignore[union-attr]
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise Mistake(f"compiled code raises exceptions, not {thing_in_words(kind)}")
        if len(given) > 1 or not all(isinstance(one, str) for one in given):
            raise Mistake("the message of an exception must be a constant text")
        self.fail(kind.__name__, given[0] if given else "", node)

    def _Assert(self, node: ast.Assert) -> None:
        message = "" if node.msg is None else self.value(node.msg)
        if not isinstance(message, str):
            raise Mistake("the message of an assertion must be a constant text")
        wrong, right = self.label(), self.label()
        self.condition(node.test, right, wrong)
        self.begin(wrong)
        self.fail("AssertionError", message, node)
        self.begin(right)

    def fail(self, kind: str, message: str, node: ast.AST) -> None:
        """End the thread with an exception."""
        line = getattr(node, "lineno", 0)
        number = self.unit.failure(kind, message, self.fn, line)
        self.emit(f"call void @gpunetio.fail(i64 {number})")
        self.unreachable()

    # --- branches -----------------------------------------------------------------------------------------------------

    def _If(self, node: ast.If) -> None:
        known = self.known(node.test)
        if known is not None:
            self._statements(node.body if known else node.orelse)
            return
        yes, no, after = self.label(), self.label(), self.label()
        self.condition(node.test, yes, no if node.orelse else after)
        before, met = dict(self.env), []
        for label, body in ((yes, node.body), (no, node.orelse)):
            self.env = dict(before)
            if body:
                self.begin(label)
                self._statements(body)
            if self.open or not body:
                met.append(self.env)
                self.go(after)
        self._meet(met, "if")
        if met:
            self.begin(after)

    def _meet(self, ways: list[Env], where: str) -> None:
        """Continue where several paths meet, with the variables that have values of one type on all of them."""
        self.env = dict(ways[0]) if ways else {}
        for way in ways[1:]:
            for name in self.env.keys() | way.keys():
                one, other = self.env.get(name), way.get(name)
                if one == other:
                    continue
                self.env.pop(name, None)
                if BROKEN in (one, other):
                    self.env[name] = BROKEN
                elif one is None or other is None:
                    self.unsure[name] = (
                        f"{name} may have no value here: give it one before the {where} in which it is assigned to"
                    )
                else:
                    self.unsure[name] = (
                        f"{name} is {in_words(one)} or {in_words(other)} here, as the {where} before decides: give it "
                        f"one type{_float_cure(name, one, other)}"
                    )

    # --- loops --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _loop(self, node: ast.stmt, go_on: str, after: str) -> Iterator[_Loop]:
        """Compile the body of a loop. Each turn begins with the variables, and their types, that are there now."""
        loop, before, read = _Loop(go_on, after), dict(self.env), self.read
        self.read = set()
        self._loops.append(loop)
        try:
            yield loop
        finally:
            self._loops.pop()
            changed = self.read
            self.read = read | changed
        for again in loop.going_on:
            for name, kind in before.items():
                if again.get(name) not in (kind, BROKEN) and (name, kind) in changed and kind is not BROKEN:
                    other = again.get(name)
                    becomes = in_words(other) if other is not None else "something else"
                    raise Mistake(
                        f"{name} is {in_words(kind)} before this loop, and {becomes} when it is read again in the next "
                        f"turn: give it one type{_float_cure(name, kind, other)}"
                    )

    def _While(self, node: ast.While) -> None:
        head, body, after = self.label(), self.label(), self.label()
        before = dict(self.env)
        self.begin(head)
        with self._loop(node, head, after) as loop:
            self.condition(node.test, body, after)
            at_head = dict(self.env)
            self.begin(body)
            self._statements(node.body)
            if self.open:
                loop.going_on.append(self.env)
                self.go(head)
        if node.orelse:
            raise Mistake("compiled code has no else of loops")
        ways = list(loop.leaving)
        if not self.known(node.test):
            ways += [at_head, *({**one} for one in loop.going_on)] if loop.going_on else [at_head]
        self._after_loop(ways, before, after)

    def _after_loop(self, ways: list[Env], before: Env, after: str) -> None:
        self._meet(ways, "loop")
        if ways:
            self.begin(after)

    def _For(self, node: ast.For) -> None:
        if node.orelse:
            raise Mistake("compiled code has no else of loops")
        over = node.iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
            self._count(node, [self.value(one) for one in over.args])
            return
        values = self.value(over)
        if not isinstance(values, Several):
            raise Mistake(f"compiled code loops over range() and tuples only, not over {thing_in_words(values)}")
        self._unroll(node, values.values)

    def _unroll(self, node: ast.For, values: tuple[Any, ...]) -> None:
        """Compile the body once for each value of a tuple."""
        after, leaving = self.label(), []
        for value in values:
            if not self.open:
                break
            loop = _Loop(self.label(), after)
            self._loops.append(loop)
            try:
                self._assign(node.target, value)
                self._statements(node.body)
            finally:
                self._loops.pop()
            if self.open:
                loop.going_on.append(self.env)
                self.go(loop.go_on)
            leaving += loop.leaving
            if loop.going_on:
                self._meet(loop.going_on, "loop")
                self.begin(loop.go_on)
        if self.open:
            leaving.append(self.env)
            self.go(after)
        self._after_loop(leaving, {}, after)

    def _count(self, node: ast.For, given: list[Any]) -> None:
        if not 1 <= len(given) <= 3:
            raise Mistake(f"range() takes 1 to 3 integers, not {len(given)}")
        start, stop, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
        first, end, by = map(int_text, (start, stop, step))
        if step == 0:
            raise Mistake("the step of range() is not 0")
        (counter,) = self.slots(INT, "turn")
        body, go_on, after = self.label(), self.label(), self.label()
        self.emit(f"store i64 {first}, ptr {counter}")
        before = dict(self.env)
        enters, size = self._enters(first, end, by, step)
        self.branch(enters, body, after)
        self.begin(body)
        turn = self.let(f"load i64, ptr {counter}")
        with self._loop(node, go_on, after) as loop:
            self._assign(node.target, from_texts(INT, [turn]))
            self._statements(node.body)
            if self.open:
                loop.going_on.append(self.env)
        self.begin(go_on)
        now, again = self.let(f"load i64, ptr {counter}"), self.label()
        self.branch(self._goes_on(now, end, by, step, size), again, after)
        self.begin(again)
        self.emit(f"store i64 {self.let(f'add nsw i64 {now}, {by}')}, ptr {counter}")
        self.go(body)
        self._after_loop([before, *loop.going_on, *loop.leaving], before, after)

    def _enters(self, first: str, end: str, by: str, step: Any) -> tuple[str, str]:
        """Return whether a loop has a first turn, and the size of its step. With a step of 0 it has no turn."""
        if isinstance(step, int):
            return self.let(f"icmp {'slt' if step > 0 else 'sgt'} i64 {first}, {end}"), str(abs(step))
        positive, negative = self.let(f"icmp sgt i64 {by}, 0"), self.let(f"icmp slt i64 {by}, 0")
        up, down = self.let(f"icmp slt i64 {first}, {end}"), self.let(f"icmp sgt i64 {first}, {end}")
        goes_up, goes_down = self.let(f"and i1 {positive}, {up}"), self.let(f"and i1 {negative}, {down}")
        size = self.let(f"select i1 {positive}, i64 {by}, i64 {self.let(f'sub i64 0, {by}')}")
        return self.let(f"or i1 {goes_up}, {goes_down}"), size

    def _goes_on(self, now: str, end: str, by: str, step: Any, size: str) -> str:
        """Return whether there is another turn: the end is more than a step away, so the step cannot overflow."""
        up, down = f"sub i64 {end}, {now}", f"sub i64 {now}, {end}"
        if isinstance(step, int):
            left = self.let(up if step > 0 else down)
        else:
            positive = self.let(f"icmp sgt i64 {by}, 0")
            left = self.let(f"select i1 {positive}, i64 {self.let(up)}, i64 {self.let(down)}")
        return self.let(f"icmp ugt i64 {left}, {size}")

    def _Break(self, node: ast.Break) -> None:
        self._loops[-1].leaving.append(self.env)
        self.go(self._loops[-1].after)

    def _Continue(self, node: ast.Continue) -> None:
        self._loops[-1].going_on.append(self.env)
        self.go(self._loops[-1].go_on)


def _float_cure(name: str, one: Any, other: Any) -> str:
    return f", for example {name} = 0.0" if {one, other} == {INT, FLOAT64} else ""
