"""Machine code as a built-in function of Python, which takes a fifth of the time of a call through ctypes.

The code has an entry with the ABI of built-in functions (Python/C API Reference Manual, METH_FASTCALL). The entry lets
other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import binding as llvm

from .kinds import NOTHING, TupleType, words_of

_API = {
    "PyErr_BadArgument": "i32 ()", "PyErr_Occurred": "ptr ()", "PyEval_RestoreThread": "void (ptr)",
    "PyEval_SaveThread": "ptr ()", "PyFloat_AsDouble": "double (ptr)", "PyLong_AsLongLong": "i64 (ptr)",
    "Py_BuildValue": "ptr (ptr, ...)",
}
# By the type of a word: the function that converts an object, and the result that may mean an error.
_CONVERTED = {
    "i64": ("i64", "PyLong_AsLongLong", "icmp eq i64 {}, -1"),
    "double": ("double", "PyFloat_AsDouble", "fcmp oeq double {}, -1.0"),
    "float": ("double", "PyFloat_AsDouble", "fcmp oeq double {}, -1.0"),
}
_LETTERS = {"i64": "L", "double": "d", "float": "d"}  # for Py_BuildValue(), which takes floats as doubles
_METH_FASTCALL = 0x80  # methodobject.h


class _PyMethodDef(ctypes.Structure):
    _fields_ = [
        ("ml_name", ctypes.c_char_p), ("ml_meth", ctypes.c_void_p), ("ml_flags", ctypes.c_int),
        ("ml_doc", ctypes.c_char_p),
    ]


def entry(symbol: str, parameters: list[str], result: Any, fails: bool) -> str:
    """Return the text of `symbol`.python, the entry for Python to a function that takes words and returns a type.

    The entry returns the Python object for the result. If the function `fails`, the entry returns a pair: the number of
    its exception or 0, and the result. The entry raises TypeError for other arguments, and OverflowError for an integer
    that does not fit into 64 bits, signed.
    """
    results = words_of(result)
    body = [f"  %fits = icmp eq i64 %count, {len(parameters)}", "  br i1 %fits, label %a0, label %wrong"]
    for i, word in enumerate(parameters):
        kind, convert, doubtful = _CONVERTED[word]
        body += [
            f"a{i}:",
            f"  %place{i} = getelementptr ptr, ptr %given, i64 {i}",
            f"  %object{i} = load ptr, ptr %place{i}",
            f"  %made{i} = call {kind} @{convert}(ptr %object{i})",
            *([f"  %narrow{i} = fptrunc double %made{i} to float"] if word == "float" else []),
            f"  %in_doubt{i} = {doubtful.format(f'%made{i}')}",
            f"  br i1 %in_doubt{i}, label %doubt{i}, label %a{i + 1}",
            f"doubt{i}:",
            f"  %error{i} = call ptr @PyErr_Occurred()",
            f"  %good{i} = icmp eq ptr %error{i}, null",
            f"  br i1 %good{i}, label %a{i + 1}, label %refused",
        ]
    given = [f"{word} %{'narrow' if word == 'float' else 'made'}{i}" for i, word in enumerate(parameters)]
    several = f"{{ {', '.join(results)} }}"
    if len(results) > 1:
        given.insert(0, "ptr %out")
        body.insert(0, f"  %out = alloca {several}")
    if fails:
        given.insert(0, "ptr %failed")
        body.insert(0, "  %failed = alloca i64")
    called, returned = f"{symbol}.guarded" if fails else symbol, results[0] if len(results) == 1 else "i64"
    body += [
        f"a{len(parameters)}:",
        "  %thread = call ptr @PyEval_SaveThread()",
        f'  %returned = call {returned} @"{called}"({", ".join(given)})',
        "  call void @PyEval_RestoreThread(ptr %thread)",
    ]
    words = []
    if len(results) > 1:
        body.append(f"  %all = load {several}, ptr %out")
    for i, word in enumerate(results):
        name = f"%result{i}" if len(results) > 1 else "%returned"
        if len(results) > 1:
            body.append(f"  {name} = extractvalue {several} %all, {i}")
        if word == "float":
            body.append(f"  %wide{i} = fpext float {name} to double")
            name, word = f"%wide{i}", "double"
        words.append(f"{word} {name}")
    shape, made = _built(result, iter(words))
    if fails:
        body.append("  %number = load i64, ptr %failed")
        shape, made = f"(L{shape})", ["i64 %number", *made]
    body += [
        f'  %object = call ptr (ptr, ...) @Py_BuildValue({", ".join(["ptr @python.shape", *made])})',
        "  ret ptr %object",
        "wrong:",
        "  call i32 @PyErr_BadArgument()",
        "  br label %refused",
        "refused:",
        "  ret ptr null",
    ]
    declared = [f"declare {kind.replace('(', f'@{name}(', 1)}" for name, kind in _API.items()]
    text = f'@python.shape = private constant [{len(shape) + 1} x i8] c"{shape}\\00"'
    head = f'define ptr @"{symbol}.python"(ptr %self, ptr %given, i64 %count) nounwind {{'
    return "\n".join([*declared, text, head, *body, "}\n"])


def _built(kind: Any, words: Iterator[str]) -> tuple[str, list[str]]:
    """Return the format of Py_BuildValue() for a value, and the words that it takes. An `s` with a null is None."""
    if kind is NOTHING:
        return "s", ["ptr null"]
    if isinstance(kind, TupleType):
        parts = [_built(part, words) for part in kind.kinds]
        return f"({''.join(shape for shape, _ in parts)})", [text for _, texts in parts for text in texts]
    own = words_of(kind)
    letters = "".join(_LETTERS[word] for word in own)
    return f"({letters})" if len(own) > 1 else letters, list(itertools.islice(words, len(own)))


def function(name: str, address: int) -> Callable[..., Any]:
    """Return the Python function whose entry is loaded at an address."""
    method = ctypes.py_object(_PyMethodDef(name.encode(), address, _METH_FASTCALL, None))
    ctypes.pythonapi.Py_IncRef(method)  # never released: the function still reads it when it is freed
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p), ctypes.py_object
    return make(ctypes.addressof(method.value), None, None)


for _name in _API:
    llvm.add_symbol(_name, ctypes.cast(getattr(ctypes.pythonapi, _name), ctypes.c_void_p).value)
