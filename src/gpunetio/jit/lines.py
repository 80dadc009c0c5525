"""Record which line of Python an instruction comes from, for gdb, perf and cuda-gdb (DWARF, as LLVM metadata).

Lines of this package may have moved since its compiled code was cached (frozen.py).
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import FunctionType

from .frozen import PACKAGE

_CALL_OF_OURS = re.compile(r'^.* call [^@\n]*@"[^\n]*$', re.MULTILINE)
_PYTHON = "DW_LANG_Python"
_UNIT, _FILE, _TYPE, _VERSION, _DWARF = range(5)  # numbers of metadata


class Lines:
    """The lines of a unit. With `whole`, as tables; without, as directives in PTX, from which ptxas makes tables."""

    def __init__(self, whole: bool):
        kind = "LineTablesOnly" if whole else "DebugDirectivesOnly"
        self._numbers = itertools.count(_DWARF + 1)
        self._files: dict[str, int] = {}
        self._locations: dict[tuple[int, int], str] = {}
        unit = (
            f"distinct !DICompileUnit(language: {_PYTHON}, file: !{_FILE}, producer: \"gpunetio\", isOptimized: true, "
            f"emissionKind: {kind})"
        )
        self._texts = [
            f"!llvm.dbg.cu = !{{!{_UNIT}}}",
            f"!llvm.module.flags = !{{!{_VERSION}, !{_DWARF}}}",
            f"!{_UNIT} = {unit}",
            f'!{_FILE} = !DIFile(filename: "gpunetio", directory: "")',
            f"!{_TYPE} = !DISubroutineType(types: !{{}})",
            f'!{_VERSION} = !{{i32 2, !"Debug Info Version", i32 3}}',
            f'!{_DWARF} = !{{i32 7, !"Dwarf Version", i32 4}}',
        ]

    def _add(self, text: str) -> int:
        number = next(self._numbers)
        self._texts.append(f"!{number} = {text}")
        return number

    def _file(self, path: str) -> int:
        """Return the metadata of a file. Files of the package have no folder, which differs from machine to machine."""
        if path not in self._files:
            file = Path(path)
            name = file.relative_to(PACKAGE.parent) if PACKAGE in file.parents else file
            self._files[path] = self._add(f'!DIFile(filename: "{_quoted(str(name))}", directory: "")')
        return self._files[path]

    def function(self, fn: FunctionType) -> int:
        """Return the number of a function's metadata."""
        code = fn.__code__
        return self._add(
            f'distinct !DISubprogram(name: "{_quoted(fn.__qualname__)}", scope: !{_FILE}, '
            f"file: !{self._file(code.co_filename)}, line: {code.co_firstlineno}, type: !{_TYPE}, "
            f"scopeLine: {code.co_firstlineno}, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !{_UNIT})"
        )

    def at(self, function: int, line: int) -> str:
        """Return the suffix that marks an instruction as part of a line."""
        key = function, line
        if key not in self._locations:
            self._locations[key] = f", !dbg !{self._add(f'!DILocation(line: {line}, scope: !{function})')}"
        return self._locations[key]

    def of_entry(self, text: str, fn: FunctionType) -> str:
        """Return the text of an entry's functions, with calls marked with the line of the function that they call.

        LLVM drops the lines of code that it inlines into a function without lines.
        """
        parts = re.split(r"^(?=define )", text, flags=re.MULTILINE)
        return "".join(self._of_define(part, fn) if part.startswith("define ") else part for part in parts)

    def _of_define(self, text: str, fn: FunctionType) -> str:
        function = self.function(fn)
        head, _, body = text.partition("{\n")
        at = self.at(function, fn.__code__.co_firstlineno)
        return f"{head}!dbg !{function} {{\n" + _CALL_OF_OURS.sub(lambda found: found[0] + at, body)

    def text(self) -> str:
        """Return the metadata."""
        return "\n".join(self._texts)


def _quoted(text: str) -> str:
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "".join(
        f"\\{byte:02X}" for byte in char.encode()
    ) for char in text)
