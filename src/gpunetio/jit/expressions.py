"""Compile expressions: from the syntax tree to values (values.py), emitting what is calculated at run time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

from . import arrays, numbers
from .calls import BUILTINS
from .emit import Emitter
from .kinds import INT, NOTHING, in_words
from .numbers import as_int, compared, int_text, truth
from .source import meaning_of
from .values import Array, At, Mistake, Several, Silent, Word, is_number, kind_of, of_python, plain, thing_in_words

BROKEN = "broken"  # in place of a variable's type, after a mistake that was reported
_MISSING = object()
_MOST_VALUES = 1000  # of a tuple, including those in nested tuples


class Expressions(Emitter):
    """Compiles the expressions of a function. `unit` has everything that the function calls."""

    unit: Any
    fn: Any  # a FunctionType, which pyright would take for a method
    scope: int  # of its lines; 0 without lines
    local: set[str]
    env: dict[str, Any]  # the types of the variables that have a value here
    read: set[tuple[str, Any]]  # variables that were read, with their types

    def __init__(self, unit: Any, fn: FunctionType):
        super().__init__()
        self.unit, self.fn = unit, fn
        self.scope = unit.lines.function(fn) if unit.lines else 0
        self.local = set(fn.__code__.co_varnames) | set(fn.__code__.co_cellvars)
        self.env = {}
        self.unsure: dict[str, str] = {}  # why a variable has no value here, by name
        self.read = set()
        self._slots_of: dict[tuple[str, Any], list[str]] = {}

    def math(self, name: str, kind: Any) -> str:
        """Return the symbol of a mathematical function."""
        return self.unit.math(name, kind)

    # --- variables ----------------------------------------------------------------------------------------------------

    def assign_name(self, name: str, value: Any) -> None:
        """Assign to a variable. If its type changes, it is another variable from here on."""
        kind = kind_of(value)
        if (name, kind) not in self._slots_of:
            self._slots_of[name, kind] = self.slots(kind, name)
        self.env[name] = kind
        self.store(value, self._slots_of[name, kind])

    def variable(self, name: str) -> Any:
        """Return the value of a name."""
        kind = self.env.get(name, _MISSING)
        if kind is BROKEN:
            raise Silent
        if kind is not _MISSING:
            self.read.add((name, kind))
            return self.load(kind, self._slots_of[name, kind])
        if name in self.local:
            raise Mistake(self.unsure.get(name) or f"{name} is used before something is assigned to it")
        return of_python(meaning_of(self.fn, name))

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """Compile an expression, and return its value."""
        return self.dispatch(node)

    def dispatch(self, node: ast.AST) -> Any:
        """Compile a node. A Mistake names the innermost node."""
        how, before = getattr(self, f"_{type(node).__name__}", None), self.at
        if self.scope and (line := getattr(node, "lineno", 0)):
            self.at = self.unit.lines.at(self.scope, line)
        try:
            if how is None:
                raise Mistake(_NOT_IN.get(type(node), f"compiled code cannot contain this ({type(node).__name__})"))
            return how(node)
        except Mistake as mistake:
            if not hasattr(mistake, "node"):
                mistake.node = node  # type: ignore[attr-defined]
            raise
        finally:
            self.at = before

    # --- atoms --------------------------------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, (int, float, str)) or node.value is None:
            return of_python(node.value)
        raise Mistake(f"compiled code has numbers only, not {node.value!r}")

    def _Name(self, node: ast.Name) -> Any:
        return self.variable(node.id)

    def _Tuple(self, node: ast.Tuple) -> Several:
        values: list[Any] = []
        for one in node.elts:
            if isinstance(one, ast.Starred):
                more = self.value(one.value)
                if not isinstance(more, Several):
                    raise Mistake(f"* takes a tuple apart, not {thing_in_words(more)}")
                values += more.values
            else:
                values.append(self.value(one))
        return _tuple_of(values)

    def _NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign_name(node.target.id, value)
        return value

    # --- attributes and elements --------------------------------------------------------------------------------------

    def _Attribute(self, node: ast.Attribute) -> Any:
        return self.attribute(self.value(node.value), node.attr)

    def attribute(self, base: Any, name: str) -> Any:
        """Return an attribute of a value."""
        if isinstance(base, At):
            return self.unit.target.read_field(self, base, self.field(base, name))
        if isinstance(base, Array):
            return arrays.attribute(self, base, name)
        if isinstance(base, Several) and name in base.names:
            return base.values[base.names.index(name)]
        if is_number(base) or isinstance(base, Several) or not hasattr(base, name):
            raise Mistake(f"{thing_in_words(base)} has no attribute {name}")
        return of_python(getattr(base, name))

    def field(self, base: At, name: str) -> Any:
        """Return the place of a field in a structure."""
        if name not in base.kind.fields:
            raise Mistake(f"the structure {base.kind.name} has no field {name}; it has {', '.join(base.kind.fields)}")
        return base.kind.fields[name]

    def set_attribute(self, base: Any, name: str, value: Any) -> None:
        """Change a field of a structure."""
        if not isinstance(base, At):
            raise Mistake(f"only fields of structures can be changed, not those of {thing_in_words(base)}")
        self.unit.target.write_field(self, base, self.field(base, name), int_text(value))

    def _Subscript(self, node: ast.Subscript) -> Any:
        base = self.value(node.value)
        return self.element(base, self.indices(base, node.slice), node)

    def indices(self, base: Any, node: ast.expr) -> list[Any]:
        """Return the indices in brackets."""
        if isinstance(node, ast.Slice):
            raise Mistake("compiled code has no slices: pass where the part begins, and how long it is")
        index = self.value(node)
        return list(index.values) if isinstance(index, Several) and isinstance(base, Array) else [index]

    def element(self, base: Any, indices: list[Any], node: ast.AST) -> Any:
        """Return an element of an array or a tuple."""
        if isinstance(base, Array):
            return arrays.element(self, base, indices, node)
        (index,) = indices
        if not isinstance(base, Several):
            table = getattr(base, "tolist", None)
            if table is None or base.ndim != 1:
                raise Mistake(f"{thing_in_words(base)} cannot be indexed")
            base = Several(tuple(map(of_python, table())))
        if isinstance(index, int):
            if not -len(base.values) <= index < len(base.values):
                raise Mistake(f"a tuple of {len(base.values)} has no element {index}")
            return base.values[index]
        return self._chosen(base.values, index, node)

    def _chosen(self, values: tuple[Any, ...], index: Any, node: ast.AST) -> Any:
        """Return the element of a tuple that is chosen at run time."""
        if not values:
            raise Mistake("an empty tuple has no element")
        at = arrays.place_of(self, index, str(len(values)), node)
        if all(isinstance(one, int) for one in values):
            place = f"getelementptr [{len(values)} x i64], ptr {self.unit.table(values)}, i64 0, i64 {at}"
            return self.word(INT, f"load i64, ptr {self.let(place)}")
        kinds = {kind_of(one) for one in values}
        if len(kinds) != 1:
            raise Mistake("the index of a tuple with elements of several types must be a constant")
        (kind,) = kinds
        ways = [(self.label(), one) for one in values]
        last, after = self.label(), self.label()
        cases = " ".join(f"i64 {n}, label %{label}" for n, (label, _) in enumerate(ways))
        self.emit(f"switch i64 {at}, label %{last} [{cases}]")
        self.open = False
        slots = self.slots(kind, "chosen")
        for label, one in (*ways, (last, values[-1])):
            self.begin(label)
            self.store(one, slots)
            self.go(after)
        self.begin(after)
        return self.load(kind, slots)

    # --- operators ----------------------------------------------------------------------------------------------------

    def _BinOp(self, node: ast.BinOp) -> Any:
        return self.binary(node.op, self.value(node.left), self.value(node.right))

    def binary(self, how: ast.operator, left: Any, right: Any) -> Any:
        """Return `left how right`."""
        if isinstance(how, ast.Add) and isinstance(left, Several) and isinstance(right, Several):
            return _tuple_of([*left.values, *right.values])
        return numbers.binary(self, how, left, right)

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self._truth(node)
        return numbers.unary(self, node.op, self.value(node.operand))

    def _Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) > 1 or isinstance(node.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
            return self._truth(node)
        left, right = self.value(node.left), self.value(node.comparators[0])
        return as_int(self, compared(self, node.ops[0], left, right))

    def _BoolOp(self, node: ast.BoolOp) -> Any:
        if self.known(node) is not None:
            ends = isinstance(node.op, ast.Or)
            return self.value(next((one for one in node.values if self.known(one) == ends), node.values[-1]))
        if _is_truth(node):
            return self._truth(node)
        return self._one_of_values(node)

    def _one_of_values(self, node: ast.BoolOp) -> Any:
        """Return the value that decides `and` or `or`, as Python does."""
        first = self.value(node.values[0])
        kind, after = kind_of(first if isinstance(first, At) else numbers.number(first)), self.label()
        slots = self.slots(kind, "either")
        self.store(first, slots)
        before = dict(self.env)
        for one in node.values[1:]:
            condition, more = self._condition_of(truth(self, self.load(kind, slots))), self.label()
            self.branch(condition, *((more, after) if isinstance(node.op, ast.And) else (after, more)))
            self.begin(more)
            value = self.value(one)
            value = plain(value) if kind is INT else value
            if kind_of(value) is not kind:
                raise Mistake(f"both sides must be of one type, not {in_words(kind)} and {thing_in_words(value)}")
            self.store(value, slots)
        self.begin(after)
        self._forget_new(before)
        return self.load(kind, slots)

    def _IfExp(self, node: ast.IfExp) -> Any:
        known = self.known(node.test)
        if known is not None:
            return self.value(node.body if known else node.orelse)
        yes, no = self.label(), self.label()
        self.condition(node.test, yes, no)
        return self._joined([(yes, lambda: self.value(node.body)), (no, lambda: self.value(node.orelse))])

    def _joined(self, ways: Sequence[tuple[str, Callable[[], Any]]]) -> Any:
        """Return the value of whichever of several blocks runs. Each block has its label."""
        after, kind, slots = self.label(), None, []
        before = dict(self.env)
        for label, value_of in ways:
            self.begin(label)
            value = value_of()
            if kind is None:
                kind = kind_of(value)
                slots = self.slots(kind, "either")
            if kind_of(value) != kind:
                raise Mistake(f"both values must be of one type, not {in_words(kind)} and {thing_in_words(value)}")
            self.store(value, slots)
            self.go(after)
        self.begin(after)
        self._forget_new(before)
        return self.load(kind, slots)

    def _forget_new(self, before: dict[str, Any]) -> None:
        """Forget variables that only one branch of an expression has assigned to (`:=`)."""
        for name in self.env.keys() - before.keys():
            self.unsure[name] = f"{name} may have no value here: it is assigned to in one of two cases only"
        self.env = {name: kind for name, kind in self.env.items() if before.get(name) == kind}

    # --- conditions ---------------------------------------------------------------------------------------------------

    def known(self, node: ast.expr) -> bool | None:
        """Return a condition that is known at compile time, else None. The other branch is then not compiled."""
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            for one in node.values:
                known = self.known(one)
                if known is None or known == ends:
                    return known
            return not ends
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known = self.known(node.operand)
            return None if known is None else not known
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and self._constant(node.comparators[0]) is None:
                if (nothing := self._is_nothing(node.left)) is not None:
                    return nothing == isinstance(node.ops[0], ast.Is)
            left, right = self._constant(node.left), self._constant(node.comparators[0])
            if left is _MISSING or right is _MISSING:
                return None
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                return (left is right) == isinstance(node.ops[0], ast.Is)
            if left is None or right is None or type(node.ops[0]) not in numbers.COMPARE_INT:
                return None
            return bool(compared(self, node.ops[0], left, right))
        value = self._constant(node)
        return None if value is _MISSING else bool(value)

    def _is_nothing(self, node: ast.expr) -> bool | None:
        """Return whether a variable is None according to its type. None for other expressions."""
        kind = self.env.get(node.id) if isinstance(node, ast.Name) else None
        if kind is None or kind is BROKEN:
            return None
        self.read.add((node.id, kind))  # type: ignore[attr-defined]
        return kind is NOTHING

    def _constant(self, node: ast.expr) -> Any:
        """Return a number or None that is known at compile time. Emit nothing."""
        if isinstance(node, ast.Constant):
            value = node.value
        elif isinstance(node, ast.Name) and node.id not in self.local:
            value = of_python(meaning_of(self.fn, node.id))
        elif isinstance(node, ast.Attribute):
            owner = self._object(node.value)
            value = of_python(getattr(owner, node.attr, _MISSING)) if owner is not _MISSING else _MISSING
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            value = self.unit.constant(self._object(node.func))
        else:
            return _MISSING
        return value if isinstance(value, (int, float)) or value is None else _MISSING

    def _object(self, node: ast.expr) -> Any:
        """Return the Python object that a name, or an attribute of one, stands for."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            return meaning_of(self.fn, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._object(node.value)
            return getattr(owner, node.attr, _MISSING) if owner is not _MISSING else _MISSING
        return _MISSING

    def condition(self, node: ast.expr, yes: str, no: str) -> None:
        """Branch to `yes` or `no`."""
        known = self.known(node)
        if known is not None:
            self.go(yes if known else no)
        elif isinstance(node, ast.BoolOp):
            for one in node.values[:-1]:
                more = self.label()
                self.condition(one, *((more, no) if isinstance(node.op, ast.And) else (yes, more)))
                self.begin(more)
            self.condition(node.values[-1], yes, no)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.condition(node.operand, no, yes)
        elif isinstance(node, ast.Compare):
            self._compare_all(node, yes, no)
        else:
            self.branch(self._condition_of(truth(self, self.value(node))), yes, no)

    def _condition_of(self, known: bool | str) -> str:
        return str(known).lower() if isinstance(known, bool) else known

    def _compare_all(self, node: ast.Compare, yes: str, no: str) -> None:
        """Compare a chain, `a < b < c`, and calculate each side once."""
        left = self.value(node.left)
        for i, (how, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right, last = self.value(right_node), i == len(node.ops) - 1
            more = yes if last else self.label()
            if isinstance(how, (ast.In, ast.NotIn)):
                self._one_of(left, right, *((more, no) if isinstance(how, ast.In) else (no, more)))
            elif isinstance(how, (ast.Is, ast.IsNot)):
                if left is not None and right is not None:
                    raise Mistake("compiled code knows `is` of None only: compare with ==")
                self.go(more if (left is right) == isinstance(how, ast.Is) else no)
            else:
                self.branch(self._condition_of(compared(self, how, left, right)), more, no)
            if not last:
                self.begin(more)
            left = right

    def _one_of(self, left: Any, right: Any, yes: str, no: str) -> None:
        """Branch to `yes` if a value is in a tuple, else to `no`."""
        if not isinstance(right, Several):
            raise Mistake(f"compiled code knows `in` of tuples only, not of {thing_in_words(right)}")
        for one in right.values:
            more = self.label()
            self.branch(self._condition_of(compared(self, ast.Eq(), left, one)), yes, more)
            self.begin(more)
        self.go(no)

    def _truth(self, node: ast.expr) -> Any:
        known = self.known(node)
        if known is not None:
            return int(known)
        yes, no = self.label(), self.label()
        self.condition(node, yes, no)
        return self._joined([(yes, lambda: 1), (no, lambda: 0)])

    # --- calls --------------------------------------------------------------------------------------------------------

    def _Call(self, node: ast.Call) -> Any:
        callee = self.value(node.func)
        if isinstance(callee, MethodType):
            raise Mistake(f"compiled code calls functions, not methods ({callee.__qualname__})")
        if any(isinstance(one, ast.Starred) for one in node.args):
            given = list(self._Tuple(ast.Tuple(node.args)).values)
        else:
            given = [self.value(one) for one in node.args]
        named: dict[str, Any] = {}
        for one in node.keywords:
            if one.arg is None:
                raise Mistake("compiled code has no **: name each argument")
            named[one.arg] = self.value(one.value)
        how = BUILTINS.get(callee) if _hashable(callee) else None
        if how is None:
            return self.unit.call(self, callee, given, named)
        if named:
            raise Mistake(f"{thing_in_words(callee)} takes no named arguments in compiled code")
        return how(self, given)


def _is_truth(node: ast.expr) -> bool:
    """Return whether the value of an expression is 0 or 1."""
    if isinstance(node, ast.BoolOp):
        return all(map(_is_truth, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _hashable(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, (Word, At, Array, Several)) and thing.__hash__ is not None


_WRITE_LOOP = "compiled code has no {}: write a loop"
_NOT_IN: dict[type, str] = {
    ast.Lambda: "compiled code has no lambda: write a function with def",
    ast.FunctionDef: "compiled code has no functions inside functions: write it outside, and decorate it",
    ast.ListComp: _WRITE_LOOP.format("list comprehensions"),
    ast.GeneratorExp: _WRITE_LOOP.format("generators"),
    ast.SetComp: _WRITE_LOOP.format("set comprehensions"),
    ast.DictComp: _WRITE_LOOP.format("dict comprehensions"),
    ast.List: "compiled code has no lists: use a tuple, or an array that the kernel gets as an argument",
    ast.Dict: "compiled code has no dicts",
    ast.Set: "compiled code has no sets: use a tuple",
    ast.JoinedStr: "compiled code has no f-strings: print() takes texts and numbers apart",
    ast.Try: "compiled code cannot catch exceptions: return a status",
    ast.With: "compiled code has no with",
    ast.Match: "compiled code has no match: write if and elif",
    ast.Delete: "compiled code has no del",
    ast.Global: "compiled code cannot change globals: store to memory whose address is an argument",
    ast.Nonlocal: "compiled code cannot change variables of another function",
    ast.Import: "compiled code cannot import: do that at the top of the file",
    ast.ImportFrom: "compiled code cannot import: do that at the top of the file",
    ast.Yield: "compiled code has no generators",
    ast.Await: "compiled code has no await",
    ast.ClassDef: "compiled code has no classes",
}


def _tuple_of(values: list[Any]) -> Several:
    """Return a tuple. Raise a Mistake if it is so big that compiling would take forever."""
    made = Several(tuple(values))
    if (count := _values_in(made)) > _MOST_VALUES:
        raise Mistake(f"a tuple with {count:,} values in it: {_MOST_VALUES:,} are the most")
    return made


def _values_in(value: Any) -> int:
    """Return how many values a tuple has, including those in nested tuples; 1 for other values."""
    return sum(map(_values_in, value.values)) if isinstance(value, Several) else 1
