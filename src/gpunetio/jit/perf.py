"""Names and lines of compiled functions for perf(1). `GPUNETIO_PERF=1` writes them where perf looks for them.

    /tmp/perf-PID.map    addresses and names, for `perf report` (tools/perf/Documentation/jit-interface.txt in Linux)
    /tmp/jit-PID.dump    the code and its lines, for `perf inject --jit` (jitdump-specification.txt there)

Names are those of Python functions, with their modules. Code that LLVM has inlined counts for the function around it,
but has its own lines.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import NotSupportedError

SWITCH = "GPUNETIO_PERF"

# A jitdump's header: magic, version, size, e_machine, process, time, flags. The header of a record: kind, size, time.
# What follows in a record of code: process, thread, address twice, size, index; in a record of lines: address, number
# of lines; for each line: address, line, discriminator.
_HEADER, _RECORD = struct.Struct("<IIIIIIQQ"), struct.Struct("<IIQ")
_CODE, _LINES, _LINE = struct.Struct("<IIQQQQ"), struct.Struct("<QQ"), struct.Struct("<QII")
_E_MACHINE = struct.Struct("<18xH")  # ELF-64 Object File Format
_MAGIC, _VERSION = 0x4A695444, 1
_CODE_LOAD, _DEBUG_INFO = 0, 2


@dataclass(frozen=True)
class Function:
    """A function in an object file: its symbol, where it begins in which section, its size, and its lines.

    A line is an offset in the section, the name of a file, and a number.
    """

    symbol: str
    section: int
    offset: int
    size: int
    lines: tuple[tuple[int, str, int], ...]


def functions(image: bytes) -> Iterator[Function]:
    """Yield the functions of an object file. NotSupportedError without pyelftools."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise NotSupportedError(f"{SWITCH} needs pyelftools: install gpunetio[perf]") from None
    file: Any = ELFFile(io.BytesIO(image))
    lines = sorted(_lines(file.get_dwarf_info())) if file.has_dwarf_info() else []
    for symbol in file.get_section_by_name(".symtab").iter_symbols():
        if symbol["st_info"]["type"] != "STT_FUNC" or not symbol["st_size"]:
            continue
        start, size, section = symbol["st_value"], symbol["st_size"], symbol["st_shndx"]
        inside = tuple(line for line in lines if start <= line[0] < start + size)
        yield Function(symbol.name, section, start, size, inside)


def _lines(dwarf: Any) -> Iterator[tuple[int, str, int]]:
    """Yield the lines of an object file whose code is all in one section."""
    for unit in dwarf.iter_CUs():
        program = dwarf.line_program_for_CU(unit)
        files, folders = program["file_entry"], program["include_directory"]
        for entry in program.get_entries():
            state = entry.state
            if state is not None and not state.end_sequence and state.line:
                file = files[state.file - 1]
                folder = folders[file.dir_index - 1].decode() if file.dir_index else ""
                yield state.address, os.path.join(folder, file.name.decode(errors="replace")), state.line


def tell(image: bytes, symbol: str, address: int, name: str) -> None:
    """Report the functions of a loaded object file to perf, if the environment asks for that.

    The function with this symbol is at `address`, and is shown as `name`.
    """
    if not os.environ.get(SWITCH):
        return
    found = list(functions(image))
    entry = next(function for function in found if function.symbol == symbol)
    (machine,) = _E_MACHINE.unpack_from(image)
    dump = _dump_of(os.getpid(), machine)
    with Path(f"/tmp/perf-{os.getpid()}.map").open("a") as file:
        for function in found:
            if function.section == entry.section:
                shown = _shown(function.symbol, symbol, name)
                base = address - entry.offset
                file.write(f"{base + function.offset:x} {function.size:x} {shown}\n")
                dump.add(function, base, shown)


def _shown(symbol: str, root: str, name: str) -> str:
    """Return the name to show for a function. All symbols begin with `root`, whose function is shown as `name`."""
    rest = symbol.removeprefix(root)
    return rest[1:] if "." in rest[1:] else name + rest


class _Dump:
    """The file with code and lines. perf learns of the file because it is mapped."""

    def __init__(self, machine: int):
        self._lock, self._count = threading.Lock(), 0
        path = Path(f"/tmp/jit-{os.getpid()}.dump")
        self._file: BinaryIO = path.open("w+b", buffering=0)  # open as long as the process lives
        self._file.write(_HEADER.pack(_MAGIC, _VERSION, _HEADER.size, machine, 0, os.getpid(), time.monotonic_ns(), 0))
        self._mapped = mmap.mmap(self._file.fileno(), _HEADER.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)

    def add(self, function: Function, base: int, name: str) -> None:
        """Write a function, whose section is loaded at `base`."""
        start = base + function.offset
        lines = b"".join(
            _LINE.pack(base + offset, number, 0) + file.encode() + b"\0" for offset, file, number in function.lines
        )
        with self._lock:
            if lines:  # before the code
                self._write(_DEBUG_INFO, _LINES.pack(start, len(function.lines)) + lines)
            code = ctypes.string_at(start, function.size)
            head = _CODE.pack(os.getpid(), threading.get_native_id(), start, start, function.size, self._count)
            self._write(_CODE_LOAD, head + name.encode() + b"\0" + code)
            self._count += 1

    def _write(self, kind: int, body: bytes) -> None:
        self._file.write(_RECORD.pack(kind, _RECORD.size + len(body), time.monotonic_ns()) + body)


@functools.cache
def _dump_of(process: int, machine: int) -> _Dump:
    """Return the file of a process. A forked child is another process."""
    return _Dump(machine)
