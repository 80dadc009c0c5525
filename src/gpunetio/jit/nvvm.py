"""Compile a unit for CUDA with CUDA's own compiler, libNVVM: to LTO-IR, which the linker inlines into callers, or PTX.

libNVVM reads two dialects of LLVM's intermediate representation (NVVM IR Specification, "Dialects"): up to sm_90 that
of LLVM 7, in which pointers have types, and from sm_100 on that of a newer LLVM. A unit is written for a still newer
LLVM. It is rewritten here, before any optimization adds constructs that the other dialects do not have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from llvmlite import binding as llvm

from ..compiler import compiling
from ..errors import NotSupportedError, UnexpectedError
from .libdevice import bitcode
from .targets import Cuda
from .unit import Unit

_MODERN = (10, 0)  # the first GPUs whose dialect has pointers without types
_CURE = "pip install 'gpunetio[cuda-compilers]'"

_HEAD = """\
target triple = "nvptx64-nvidia-cuda"
target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-\
v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
!nvvmir.version = !{!0}
!0 = !{i32 2, i32 0}
"""
# Intrinsics that LLVM 7 does not have.
_INSTEAD = {
    "llvm.smin.i64": ("i64 %a, i64 %b", "icmp slt i64 %a, %b", "%b"),
    "llvm.smax.i64": ("i64 %a, i64 %b", "icmp sgt i64 %a, %b", "%b"),
    "llvm.abs.i64": ("i64 %a, i1 %b", "icmp sge i64 %a, 0", "%minus"),
}
# Attributes of functions, as both dialects write them. All others are hints.
_KNOWN = {
    **{name: name for name in ("alwaysinline", "noinline", "nounwind", "convergent", "noreturn", "cold")},
    "memory(none)": "readnone", "memory(inaccessiblemem: readwrite)": "inaccessiblememonly",
}

_LATER = re.compile(r'^declare [^@]*@"?op\..*\n', re.MULTILINE)
_OTHERS = re.compile(r"^(?:;|source_filename|target ).*\n", re.MULTILINE)  # comments, and lines that the head replaces
_ATTRIBUTE = re.compile(r'"[^"]*"(?:="[^"]*")?|\w+(?:\([^)]*\))?')
_GLOBAL = re.compile(r"^(@[^ ]+) = .*?\b(?:global|constant) (\[[^\]]*\]|\w+)[ ,]")
_KERNEL = re.compile(r"^define ptx_kernel void (@[\w.$]+)\((.*?)\)", re.MULTILINE)
_POINTER = re.compile(r"\bptr\b( addrspace\(\d+\))?( @[\w.$\"-]+)?")
_NAME = r'%(?:"[^"]*"|[\w.$-]+)'
_ALIGN = re.compile(r", align \d+")
_TYPE = r"(?:\[[^\]]*\]|\w+)"
_ALLOCA = re.compile(rf"  ({_NAME}) = (alloca ({_TYPE}).*)")
_ACCESS = re.compile(
    rf"(?P<head>  (?:(?P<made>{_NAME}) = )?(?P<how>load|store|getelementptr|cmpxchg|atomicrmw)\b[\w ]*? "
    rf"(?:(?P<kind>{_TYPE})(?: [^ ,]+)?, )?)i8(?P<space> addrspace\(\d+\))?\* "
    rf"(?P<place>{_NAME}|bitcast \(.*? to i8[^*]*\*\))(?P<rest>(?:, (?P<next>\w+))?.*)"
)


def lto_ir(unit: Unit, capability: tuple[int, int]) -> bytes:
    """Return a unit for GPUs of a compute capability as LTO-IR.

    NotSupportedError without libNVVM, and UnexpectedError if it refuses the unit.
    """
    return _compile(unit, capability, "-gen-lto")


def ptx(unit: Unit, capability: tuple[int, int]) -> str:
    """Return a unit as PTX. Errors as in `lto_ir`."""
    return _compile(unit, capability).rstrip(b"\0").decode()


def _compile(unit: Unit, capability: tuple[int, int], *more: str) -> bytes:
    arch = "compute_{}{}".format(*capability)
    try:
        from cuda.bindings import nvvm  # type: ignore[attr-defined]

        program = nvvm.create_program()
    except (ImportError, RuntimeError) as error:  # no bindings; or no library, a class of cuda.pathfinder
        raise NotSupportedError(f"CUDA's libNVVM is not here ({error}): {_CURE}") from None
    with compiling():
        text = text_of(unit, typed=capability < _MODERN).encode()
    try:
        nvvm.add_module_to_program(program, text, len(text), "gpunetio")
        if unit.library:
            nvvm.lazy_add_module_to_program(program, library := bitcode(), len(library), "libdevice")
        try:
            options = [f"-arch={arch}", "-opt=3", *more]
            nvvm.compile_program(program, len(options), options)
        except nvvm.nvvmError as error:
            said = f"libNVVM does not compile for {arch}: {error} {_log(nvvm, program)}"
            raise UnexpectedError(said.strip()) from None
        made = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, made)
        return bytes(made)
    finally:
        nvvm.destroy_program(program)


def _log(nvvm: Any, program: int) -> str:
    log = bytearray(nvvm.get_program_log_size(program))
    nvvm.get_program_log(program, log)
    return log.rstrip(b"\0").decode(errors="replace")


def text_of(unit: Unit, typed: bool) -> str:
    """Return the IR of a unit in a dialect of libNVVM. `typed`: pointers have types."""
    late = _OTHERS.sub("", unit.late_text()).replace("define i64", "define internal i64")
    text = _LATER.sub("", unit.text()).replace("define linkonce_odr hidden", "define internal") + late
    for name in _INSTEAD:
        text = re.sub(rf"^declare .*@{re.escape(name)}\(.*\n", "", text, flags=re.MULTILINE)
        text = text.replace(f"@{name}(", f"@{name.replace('llvm', 'gpunetio')}(")
    text += "".join(itertools.starmap(_instead, _INSTEAD.items()))
    text = _OTHERS.sub("", str(llvm.parse_assembly(text)))  # LLVM writes it in one uniform way
    kernels = list(_kernels(unit, text, typed))
    text = text.replace("define ptx_kernel ", "define ")
    lines = [_attributes(line) if line.startswith("attributes #") else line for line in text.splitlines()]
    if typed:
        lines = list(_with_types(lines))
    return _HEAD + "\n".join([*lines, *kernels]).replace(" poison,", " undef,") + "\n"


def _kernels(unit: Unit, text: str, typed: bool) -> Iterator[str]:
    """Yield the lines that declare functions as kernels (NVVM IR Specification, "Global Property Annotation")."""
    assert isinstance(unit.target, Cuda)
    number = itertools.count(1)
    for name, parameters in _KERNEL.findall(text):
        kinds = ", ".join(parameter.split()[0] for parameter in parameters.split(", ") if parameter)
        limit = f', !"maxntidx", i32 {unit.target.threads}' if unit.target.threads else ""
        what = f"void ({kinds})* {name}" if typed else f"ptr {name}"
        yield f'!{(at := next(number))} = !{{{what}, !"kernel", i32 1{limit}}}\n!nvvm.annotations = !{{!{at}}}'


def _instead(name: str, how: tuple[str, str, str]) -> str:
    given, condition, other = how
    return (
        f"define internal i64 @{name.replace('llvm', 'gpunetio')}({given}) alwaysinline nounwind {{\n"
        f"  %minus = sub i64 0, %a\n  %first = {condition}\n"
        f"  %r = select i1 %first, i64 %a, i64 {other}\n  ret i64 %r\n}}\n"
    )


def _attributes(line: str) -> str:
    """Return a group of attributes without those that a dialect may not support."""
    head, _, rest = line.partition("{")
    words: list[str] = _ATTRIBUTE.findall(rest)
    known = [_KNOWN[word] for word in words if word in _KNOWN] or ["nounwind"]  # an empty group is an error
    return f"{head}{{ {' '.join(known)} }}"


def _with_types(lines: list[str]) -> Iterator[str]:
    """Yield the lines with pointers to bytes, and with a conversion before each access to something else."""
    kinds = {found[1]: found[2] for found in map(_GLOBAL.match, lines) if found}
    numbers = itertools.count()

    def pointer(found: re.Match[str]) -> str:
        space, name = found[1] or "", (found[2] or "").strip()
        if not name:
            return f"i8{space}*"
        return f"i8{space}* bitcast ({kinds[name]}{space}* {name} to i8{space}*)"

    for line in lines:
        if " asm " in line:  # of integers
            yield line
            continue
        line = _POINTER.sub(pointer, line)
        if slot := _ALLOCA.fullmatch(line):
            place = f"%as.{next(numbers)}"  # no variable has this name
            yield f"  {place} = {slot[2]}"
            yield f"  {slot[1]} = bitcast {slot[3]}* {place} to i8*"
        elif access := _ACCESS.fullmatch(line):
            kind, space, head = access["kind"] or access["next"], access["space"] or "", access["head"]
            place, moves, rest = f"%as.{next(numbers)}", access["how"] == "getelementptr", access["rest"]
            if access["how"] in ("cmpxchg", "atomicrmw"):  # these are aligned
                rest = _ALIGN.sub("", rest)
            yield f"  {place} = bitcast i8{space}* {access['place']} to {kind}{space}*"
            if moves:
                head = head.replace(access["made"], f"{place}.element", 1)
            yield f"{head}{kind}{space}* {place}{rest}"
            if moves:
                element = kind.rpartition(" ")[2].rstrip("]")
                yield f"  {access['made']} = bitcast {element}{space}* {place}.element to i8{space}*"
        else:
            yield line
