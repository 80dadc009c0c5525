"""The differences between targets: attributes of functions, fields of structures, entries, failures, mathematics."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from .kinds import FLOAT32, INT, NOTHING, FieldPlace, Scalar, StructType, in_words, llvm_of, words_of
from .values import At, Mistake, Several, Word, kind_of, plain, texts_of, thing_in_words

_NOT_IN_PTX = re.compile(r"\W", re.ASCII)
SHARED_SPACE = 3  # LLVM's address space of shared memory (NVPTX)


def pieces(field: FieldPlace) -> Iterator[tuple[int, int, int]]:
    """Yield offset, bits and shift of each load or store of a field: only one if its size is a power of two."""
    at = 0
    while at < field.size:
        size = 1 << (field.size - at).bit_length() - 1
        yield field.offset + at, 8 * size, 8 * (field.size - at - size if field.big_endian else at)
        at += size


def ptx_symbol(name: str) -> str:
    """Return a name in the letters of PTX (PTX ISA, "Identifiers")."""
    return _NOT_IN_PTX.sub("_", name)


class Target(ABC):
    """A target. `called` are the attributes of functions that are not inlined."""

    name: str
    attributes = "nounwind"
    called = ""
    first_of_called = ""  # an instruction
    vectorizes = unrolls = True  # loops

    def __init__(self, machine: Any):
        self.machine = machine

    # --- structures ---------------------------------------------------------------------------------------------------

    def place(self, e: Any, base: At, offset: int) -> str:
        """Return a pointer, with its type, to a field of a structure."""
        address = texts_of(base.address)[0]
        address = e.let(f"add i64 {address}, {offset}") if offset else address
        return f"ptr {e.let(f'inttoptr i64 {address} to ptr')}"

    def swap(self, e: Any, text: str, bits: int) -> str:
        """Swap the bytes of an operand."""
        return e.let(f"call i{bits} @llvm.bswap.i{bits}(i{bits} {text})")

    def read_field(self, e: Any, base: At, field: FieldPlace) -> Word:
        """Return a field of a structure."""
        total = ""
        for offset, bits, shift in pieces(field):
            align = min(bits // 8, base.kind.alignment)
            text = e.let(f"load i{bits}, {self.place(e, base, offset)}, align {align}")
            if field.big_endian and bits > 8:
                text = self.swap(e, text, bits)
            if bits < 64:
                text = e.let(f"{'sext' if field.signed else 'zext'} i{bits} {text} to i64")
            if shift:
                text = e.let(f"shl i64 {text}, {shift}")
            total = e.let(f"or i64 {total}, {text}") if total else text
        return Word(INT, total)

    def write_field(self, e: Any, base: At, field: FieldPlace, value: str) -> None:
        """Change a field of a structure."""
        for offset, bits, shift in pieces(field):
            text = e.let(f"lshr i64 {value}, {shift}") if shift else value
            if bits < 64:
                text = e.let(f"trunc i64 {text} to i{bits}")
            if field.big_endian and bits > 8:
                text = self.swap(e, text, bits)
            align = min(bits // 8, base.kind.alignment)
            e.emit(f"store i{bits} {text}, {self.place(e, base, offset)}, align {align}")

    # --- what else compiled code needs --------------------------------------------------------------------------------

    def symbol(self, name: str) -> str:
        """Return the symbol of a function, from its name."""
        return name

    @abstractmethod
    def math(self, name: str, kind: Scalar) -> str:
        """Return the symbol of a function of `calls.LIBRARY`."""

    @abstractmethod
    def print_values(self, e: Any, values: list[Any]) -> None:
        """Print strings and numbers on a line."""

    @abstractmethod
    def entry(self, symbol: str, inner: str, kinds: tuple[Any, ...], result: Any, fails: bool, widths: Any) -> str:
        """Return the text of a function that outside code calls, and that calls a function of the unit."""

    @abstractmethod
    def failing(self) -> str:
        """Return the text of the function that ends a thread with an exception, by its number."""


# A failure leaves all of a thread's compiled frames at once: none has anything to clean up. An entry that may fail has
# a record on its stack, for the number and for what setjmp() saves, which takes less than this (sys/setjmp.h: 200 bytes
# on x86-64, 312 on 64-bit Arm). The thread finds the record by a key of pthreads.
FAIL_KEY_SYMBOL = "gpunetio_fail_key"
_RECORD = "[64 x i64]"


class Host(Target):
    """Threads of this machine."""

    name = "cpu"

    def math(self, name: str, kind: Scalar) -> str:
        return name + ("f" if kind is FLOAT32 else "")

    def print_values(self, e: Any, values: list[Any]) -> None:
        """Print to standard output, through the C library."""
        shape, given = [], []
        for value in map(plain, values):
            if isinstance(value, str):
                if "\0" in value:
                    raise Mistake(f"print() cannot write the text {value!r}: in C, it ends at the first \\0")
                shape.append(value.replace("%", "%%"))
                continue
            if isinstance(value, Several) or value is None or not hasattr(kind_of(value), "llvm"):
                raise Mistake(f"print() takes texts and numbers, not {thing_in_words(value)}")
            (text,), kind = texts_of(value), kind_of(value)
            if kind is FLOAT32:
                text = e.let(f"fpext float {text} to double")
            shape.append("%lld" if kind is INT else "%g")
            given.append(f", {'i64' if kind is INT else 'double'} {text}")
        text = e.unit.text_constant(" ".join(shape) + "\n")
        e.emit(f"call i32 (i32, ptr, ...) @dprintf(i32 1, ptr {text}{''.join(given)})")

    def entry(self, symbol: str, inner: str, kinds: tuple[Any, ...], result: Any, fails: bool, widths: Any) -> str:
        words = [word for kind in kinds for word in words_of(kind)]
        widths = widths or [64] * len(words)
        results = words_of(result)
        head, body, passed = [], [], []
        if len(results) > 1:
            head.append("ptr %out")
        for i, (word, width) in enumerate(zip(words, widths, strict=True)):
            head.append(f"{word if width == 64 else f'i{width}'} %a{i}")
            if width < 64:  # the upper bits of the register are undefined
                body.append(f"  %w{i} = sext i{width} %a{i} to i64")
            passed.append(f"{word} %{'a' if width == 64 else 'w'}{i}")
        call = f'call {llvm_of(result)} @"{inner}"({", ".join(passed)})'
        returned = results[0] if len(results) == 1 else "i64"
        if not results:
            body += [f"  {call}", "  ret i64 0"]
        elif len(results) == 1:
            body += [f"  %r = {call}", f"  ret {returned} %r"]
        else:
            body += [f"  %r = {call}", f"  store {llvm_of(result)} %r, ptr %out", "  ret i64 0"]
        signature = f'define {returned} @"{symbol}"({", ".join(head)}) nounwind {{'
        plain = "\n".join([signature, *body, "}\n"])
        return plain + (self._guarded(symbol, head, returned) if fails else "")

    def _guarded(self, symbol: str, head: list[str], returned: str) -> str:
        """Return the text of an entry that stores at `failed` the number of the function's exception, or 0."""
        passed = ", ".join(head)
        return f"""
define {returned} @"{symbol}.guarded"({", ".join(["ptr %failed", *head])}) nounwind {{
  %record = alloca {_RECORD}, align 16
  %key = load i32, ptr @{FAIL_KEY_SYMBOL}
  %before = call ptr @pthread_getspecific(i32 %key)
  call i32 @pthread_setspecific(i32 %key, ptr %record)
  %buffer = getelementptr i64, ptr %record, i64 2
  %jumped = call i32 @_setjmp(ptr %buffer) returns_twice
  %first = icmp eq i32 %jumped, 0
  br i1 %first, label %run, label %fail
run:
  %r = call {returned} @"{symbol}"({passed})
  call i32 @pthread_setspecific(i32 %key, ptr %before)
  store i64 0, ptr %failed
  ret {returned} %r
fail:
  call i32 @pthread_setspecific(i32 %key, ptr %before)
  %number = load volatile i64, ptr %record
  store i64 %number, ptr %failed
  ret {returned} {"0.0" if returned in ("double", "float") else "0"}
}}
"""

    def failing(self) -> str:
        return f"""
@{FAIL_KEY_SYMBOL} = external global i32
declare i32 @pthread_setspecific(i32, ptr)
declare i32 @_setjmp(ptr) returns_twice
declare void @longjmp(ptr, i32) noreturn
define internal void @gpunetio.fail(i64 %number) noinline cold noreturn nounwind {{
  %key = load i32, ptr @{FAIL_KEY_SYMBOL}
  %record = call ptr @pthread_getspecific(i32 %key)
  store volatile i64 %number, ptr %record
  %buffer = getelementptr i64, ptr %record, i64 2
  call void @longjmp(ptr %buffer, i32 1)
  unreachable
}}
"""


# PTX that swaps the bytes of a word, by its bits: a byte permutation takes half the instructions of llvm.bswap.
SWAP_PTX = {32: "prmt.b32 $0, $1, 0, 0x0123;", 64: (
    "{.reg .b32 l, h; mov.b64 {l, h}, $1; prmt.b32 l, l, 0, 0x0123; prmt.b32 h, h, 0, 0x0123; mov.b64 $0, {h, l};}"
)}
# To LLVM, inline PTX without `sideeffect` reads and writes any memory, unless it says so.
PURE_PTX = "nounwind willreturn memory(none)"
FAILED_SYMBOL = "gpunetio_failed"  # a word in a GPU's memory: the number of the first exception of a thread


class Cuda(Target):
    """An NVIDIA GPU. Blocks of its entries have at most `threads` threads; 0: not known."""

    name = "cuda"
    attributes = "nounwind convergent"
    called = "noinline"
    # LLVM removes `convergent` from functions in which nothing needs it. It then splits a call in two: one for lane 0,
    # which has work before and after the call, and one for the other lanes. The two run one after the other.
    first_of_called = '  call void asm sideeffect "", ""() nounwind convergent memory(inaccessiblemem: readwrite)'
    vectorizes = False
    capability: tuple[int, int]
    unrolls = False  # ptxas unrolls. Doing it twice makes kernels a fifth longer, and takes more registers

    def __init__(self, machine: Any, capability: tuple[int, int], threads: int = 0):
        super().__init__(machine)
        self.capability, self.threads = capability, threads

    def place(self, e: Any, base: At, offset: int) -> str:
        if not base.kind.shared:
            return super().place(e, base, offset)
        # Convert the base first, so that offsets become part of instructions.
        generic = e.let(f"inttoptr i64 {texts_of(base.address)[0]} to ptr")
        near = e.let(f"addrspacecast ptr {generic} to ptr addrspace({SHARED_SPACE})")
        at = e.let(f"getelementptr i8, ptr addrspace({SHARED_SPACE}) {near}, i64 {offset}")
        return f"ptr addrspace({SHARED_SPACE}) {at}"

    def swap(self, e: Any, text: str, bits: int) -> str:
        if bits == 16:
            return super().swap(e, text, bits)
        registers = "=r,r" if bits == 32 else "=&l,l"
        return e.let(f'call i{bits} asm "{SWAP_PTX[bits]}", "{registers}"(i{bits} {text}) {PURE_PTX}')

    def symbol(self, name: str) -> str:
        return ptx_symbol(name)

    def math(self, name: str, kind: Scalar) -> str:
        """Return the symbol in libdevice (libdevice User's Guide)."""
        return f"__nv_{name}" + ("f" if kind is FLOAT32 else "")

    def print_values(self, e: Any, values: list[Any]) -> None:
        raise Mistake("print() works on the host only: run the kernel there, or store what you want to see")

    def entry(self, symbol: str, inner: str, kinds: tuple[Any, ...], result: Any, fails: bool, widths: Any) -> str:
        if result is not NOTHING:
            raise Mistake(f"a kernel returns nothing, and this one {in_words(result)}")
        words = [word for kind in kinds for word in words_of(kind)]
        given = ", ".join(f"{word} %a{i}" for i, word in enumerate(words))
        limit = f' "nvvm.maxntid"="{self.threads}"' if self.threads else ""
        return (
            f'define ptx_kernel void @"{symbol}"({given}){limit} {{\n'
            f'  call void @"{inner}"({given})\n  ret void\n}}\n'
        )

    def failing(self) -> str:
        return f"""
@{FAILED_SYMBOL} = addrspace(1) global i64 0, align 8
define internal void @gpunetio.fail(i64 %number) noinline noreturn nounwind convergent {{
  %place = addrspacecast ptr addrspace(1) @{FAILED_SYMBOL} to ptr
  %old = cmpxchg ptr %place, i64 0, i64 %number monotonic monotonic
  call void asm sideeffect "exit;", ""() noreturn nounwind
  unreachable
}}
"""


class CudaLibrary(Cuda):
    """A GPU, for functions of integers that device code of other compilers calls. Their result is an integer.

    For a structure, it is the address.
    """

    def entry(self, symbol: str, inner: str, kinds: tuple[Any, ...], result: Any, fails: bool, widths: Any) -> str:
        if result not in (INT, NOTHING) and not isinstance(result, StructType):
            raise Mistake(f"a function of C returns an integer or nothing, and this one {in_words(result)}")
        given = ", ".join(f"i64 %a{i}" for i in range(len(kinds)))
        call = f'call {llvm_of(result)} @"{inner}"({given})'
        body = f"  %r = {call}\n  ret i64 %r" if result is not NOTHING else f"  {call}\n  ret i64 0"
        return f'define i64 @"{symbol}"({given}) {self.attributes} {{\n{body}\n}}\n'
