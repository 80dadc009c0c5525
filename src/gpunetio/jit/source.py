"""The syntax tree of a function, and the meaning of its names."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import linecache
import os
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from .values import CompileError, Mistake


@functools.cache
def _lines(file: str) -> list[str]:
    return linecache.getlines(file)


# The state of files when the first function in them was decorated, by path: time of modification, and size.
_seen: dict[str, tuple[int, int] | None] = {}


def _status(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:  # a cell of a notebook, for example
        return None
    return found.st_mtime_ns, found.st_size


def note_file(fn: FunctionType) -> None:
    """Remember the state of a function's file while the file is being imported."""
    file = fn.__code__.co_filename
    if file not in _seen:
        _seen[file] = _status(file)


def tree_of(fn: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function, with the line numbers of its file.

    CompileError if the function has changed in the file meanwhile: the name of cached code stands for the function that
    Python has imported.
    """
    file, first = fn.__code__.co_filename, fn.__code__.co_firstlineno - 1
    if file in _seen and _seen[file] != _status(file):
        first = _line_now(fn)
    for again in (False, True):
        if again:  # the text may be older than this function: a cell of a notebook, for example
            linecache.checkcache(file)
            _lines.cache_clear()
        lines = _lines(file)
        if first < len(lines):
            tree = _parsed(_own_lines(lines, first), first) or _parsed(inspect.getblock(lines[first:]), first)
            if tree is not None and [*_parameters(tree)] == [*_names(fn)]:
                return tree
    place = f"{file}:{first + 1}: {fn.__qualname__}()"
    if not _lines(file):
        raise CompileError(
            f"{place} has no source: the compiler reads the file in which a function is written, and there is no {file}"
        )
    raise CompileError(f"{place} is not there as `def`: {_CURE}")


_CURE = "the file has changed since it was imported, or the function is a lambda; write it with def, and start again"


def _line_now(fn: FunctionType) -> int:
    """Return the line of an unchanged function in a file that has changed."""
    linecache.checkcache(fn.__code__.co_filename)
    _lines.cache_clear()
    with contextlib.suppress(SyntaxError, ValueError):
        text = "".join(_lines(fn.__code__.co_filename))
        todo = [compile(text, fn.__code__.co_filename, "exec", dont_inherit=True)]
        while todo:
            code = todo.pop()
            if code.co_qualname == fn.__qualname__ and _does(code) == _does(fn.__code__):
                return code.co_firstlineno - 1
            todo += _codes(code)
    raise CompileError(
        f"{fn.__code__.co_filename} has changed since {fn.__qualname__}() was imported, and it is another function "
        "now: start the program again"
    )


def _codes(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _does(code: CodeType) -> tuple[object, ...]:
    """Return what code does, independently of its lines."""
    constants = [one for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, constants, [*map(_does, _codes(code))]


def _own_lines(lines: list[str], first: int) -> list[str]:
    """Return the lines of the function that begins at `first`, up to the next line with the same or less indentation.

    `inspect.getblock` splits the lines into tokens, which takes longer than parsing them.
    """
    indent = len(lines[first]) - len(lines[first].lstrip())
    end, body = first, False
    while end < len(lines):
        line = lines[end]
        outside = line.strip() and len(line) - len(line.lstrip()) <= indent and line.lstrip()[0] not in "#)"
        if outside and body:
            break
        body = body or line.lstrip().startswith(("def ", "async "))
        end += 1
    return lines[first:end]


def _parsed(lines: list[str], first: int) -> ast.FunctionDef | None:
    """Return the function in these lines, with the line numbers of its file. None if there is none."""
    indented = lines[0][0].isspace()
    try:
        module = ast.parse(("if True:\n" if indented else "") + "".join(lines))
    except SyntaxError:  # a line of a string in it is indented less, or it is part of a larger statement
        return None
    body: list[ast.stmt] = getattr(module.body[0], "body", []) if indented else module.body
    tree = body[0] if len(body) == 1 else None
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - indented)
    return tree


def _parameters(tree: ast.FunctionDef) -> list[str]:
    taken = tree.args
    named = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *filter(None, (taken.vararg, taken.kwarg))]
    return [tree.name, *(argument.arg for argument in named)]


def _names(fn: FunctionType) -> list[str]:
    code = fn.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return [code.co_name, *code.co_varnames[:count]]


def meaning_of(fn: FunctionType, name: str) -> Any:
    """Return the object that a name stands for in a function that does not assign to it."""
    if name in fn.__code__.co_freevars and fn.__closure__:
        try:
            return fn.__closure__[fn.__code__.co_freevars.index(name)].cell_contents
        except ValueError:
            raise Mistake(f"{name} has no value yet in the function around this one") from None
    if name in fn.__globals__:
        return fn.__globals__[name]
    if hasattr(builtins, name):
        return getattr(builtins, name)
    raise Mistake(f"{name} is not defined")


def shown(fn: Callable[..., object], node: ast.AST) -> str:
    """Return the source line of a node, and a line that points at the node."""
    lines, number = _lines(fn.__code__.co_filename), getattr(node, "lineno", 0)
    if not 0 < number <= len(lines):
        return ""
    line = lines[number - 1].rstrip("\n")
    whole = line.encode()  # the parser counts bytes
    start = getattr(node, "col_offset", 0)
    end = getattr(node, "end_col_offset", start + 1) if getattr(node, "end_lineno", 0) == number else len(whole)
    indent = len(line) - len(line.lstrip())
    before, marked = len(whole[:start].decode(errors="ignore")), len(whole[start:end].decode(errors="ignore"))
    return f"    {line.strip()}\n    {' ' * (before - indent)}{'^' * max(1, marked)}"
