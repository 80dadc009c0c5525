"""Arrays in compiled code: elements, shapes, and whole rows."""

from __future__ import annotations

import ast
from typing import Any

from .kinds import INT, ArrayType, in_words
from .numbers import converted, int_text, number
from .values import Array, Mistake, Several, Word, kind_of, texts_of, typed_texts

_ATTRIBUTES = ("shape", "strides", "size", "ndim", "itemsize")


def attribute(e: Any, array: Array, name: str) -> Any:
    """Return an attribute of an array, as NumPy defines it."""
    if name == "shape":
        return Several(array.shape)
    if name == "strides":
        return Several(array.strides)
    if name == "ndim":
        return array.kind.dims
    if name == "itemsize":
        return array.kind.element.size
    if name == "size":
        size: Any = 1
        for length in array.shape:
            size = e.binary(ast.Mult(), size, length)
        return size
    raise Mistake(f"an array has no attribute {name} in compiled code; it has {', '.join(_ATTRIBUTES)}")


def place_of(e: Any, index: Any, length: str, node: ast.AST) -> str:
    """Return the number of the element, of `length`, that an index stands for. Negative indices count from the end."""
    at = int_text(index)
    if not (isinstance(index, int) and index >= 0):
        negative = e.let(f"icmp slt i64 {at}, 0")
        at = e.let(f"select i1 {negative}, i64 {e.let(f'add i64 {at}, {length}')}, i64 {at}")
    if e.unit.checks_bounds:
        inside, outside = e.label(), e.label()
        e.branch(e.let(f"icmp ult i64 {at}, {length}"), inside, outside)
        e.begin(outside)
        e.fail("IndexError", "an index is outside of the array", node)
        e.begin(inside)
    return at


def _place(e: Any, array: Array, indices: list[Any], node: ast.AST) -> Any:
    """Return the address that indices stand for."""
    if len(indices) > array.kind.dims:
        raise Mistake(f"{in_words(array.kind)} with {array.kind.dims} dimensions takes no {len(indices)} indices")
    address = int_text(array.address)
    for index, length, stride in zip(indices, array.shape, array.strides, strict=False):
        at = place_of(e, index, texts_of(length)[0], node)
        address = e.let(f"add i64 {address}, {e.let(f'mul i64 {at}, {texts_of(stride)[0]}')}")
    return Word(INT, address)


def element(e: Any, array: Array, indices: list[Any], node: ast.AST) -> Any:
    """Return an element or, with fewer indices than the array has dimensions, a subarray."""
    address, count = _place(e, array, indices, node), len(indices)
    if count < array.kind.dims:
        kind = ArrayType(array.kind.dtype, array.kind.dims - count, array.kind.contiguous)
        return Array(kind, address, array.shape[count:], array.strides[count:])
    how = array.kind.element
    pointer = e.let(f"inttoptr i64 {address.text} to ptr")
    read = e.let(f"load {how.llvm}, ptr {pointer}, align {how.size}")
    if how.read_as is INT and how.size < 8:
        read = e.let(f"{'sext' if how.signed else 'zext'} {how.llvm} {read} to i64")
    return Word(how.read_as, read)


def set_element(e: Any, array: Array, indices: list[Any], value: Any, node: ast.AST) -> None:
    """Store a number as an element."""
    if len(indices) != array.kind.dims:
        raise Mistake(f"{in_words(array.kind)} with {array.kind.dims} dimensions takes {array.kind.dims} indices here")
    how = array.kind.element
    if how.read_as is INT and kind_of(number(value)) is not INT:
        raise Mistake(f"{in_words(array.kind)} takes integers, not {in_words(kind_of(value))}: convert it with int()")
    address = _place(e, array, indices, node)
    (text,) = typed_texts(converted(e, value, how.read_as))
    if array.kind.dtype == "bool":
        condition = e.let(f"icmp ne {text}, 0")
        text = f"i8 {e.let(f'zext i1 {condition} to i8')}"
    elif how.read_as is INT and how.size < 8:
        text = f"{how.llvm} {e.let(f'trunc {text} to {how.llvm}')}"
    e.emit(f"store {text}, ptr {e.let(f'inttoptr i64 {address.text} to ptr')}, align {how.size}")
