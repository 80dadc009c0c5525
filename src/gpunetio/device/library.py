"""The device library for CUDA C++: every public device function under a C name, and a header that declares them.

The functions are those that `gpunetio.device` exports. Arguments and results are `long long`.
"""

from __future__ import annotations

import contextlib
import functools
import graphlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher

from ..enums import CodeOpt, ExecScope, SharingMode, SyncScope
from ..errors import InvalidValueError, NotSupportedError, TimedOutError, UnexpectedError
from ..formats.eth_device import PACKET_ATTR, SemaphoreStatus
from ..formats.layout import Entry
from ..formats.wqe import CtrlFlags, WqeOpcode
from ..jit import ops
from . import status
from .rdma import RDMA_IMM
from ..jit.compile import device_function
from ..jit.launch import tell_observers

KINDS = ("ltoir", "ptx", "cubin")
STEM = "gpunetio_device"  # of the file names of the images and the header
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)")
_COMPILE_SECONDS = 300.0

# C prefix, values, and the parameter that takes them. A default of this parameter is written by name.
_ENUMS: tuple[tuple[str, type[IntEnum] | type[IntFlag], str], ...] = (
    ("SHARING", SharingMode, "sharing"),
    ("SYNC", SyncScope, "sync"),
    ("SCOPE", ExecScope, "scope"),
    ("CODE_OPT", CodeOpt, "code_opt"),
    ("OPCODE", WqeOpcode, "opcode"),
    ("CTRL", CtrlFlags, "flags"),
    ("SEM", SemaphoreStatus, "status"),
)


@device_function
def clock_ns():
    """Return the ns of the clock that deadlines use (`doca_gpu_dev_verbs_query_globaltimer`)."""
    return ops.clock_ns()

_WITH_SEVERAL_RESULTS = ("rdma_get_info", "rdma_recv_get_info")  # a C function has one


@dataclass(frozen=True)
class Function:
    """A device function as C sees it. `chapter` is its module; `defaults` belong to the last parameters."""

    name: str
    chapter: str
    python: Callable[..., object]
    parameters: tuple[str, ...]
    defaults: tuple[int, ...]

    @property
    def c_name(self) -> str:
        """Return the name in C: `gpunetio_put` for `put`."""
        return f"gpunetio_{self.name}"


@functools.cache
def functions() -> tuple[Function, ...]:
    """Return all public device functions with one result, and the clock, sorted by module and name."""
    from .. import device

    public = {name: getattr(device, name) for name in device.__all__ if name not in _WITH_SEVERAL_RESULTS}
    found = [_function(name, value.py_func) for name, value in public.items() if isinstance(value, Dispatcher)]
    found.append(_function("clock_ns", clock_ns.py_func, ops.__name__))
    return tuple(sorted(found, key=lambda one: (one.chapter, one.name)))


def _function(name: str, python: Callable[..., int], chapter: str | None = None) -> Function:
    parameters = inspect.signature(python).parameters
    defaults = tuple(int(p.default) for p in parameters.values() if p.default is not p.empty)
    return Function(name, chapter or python.__module__, python, tuple(parameters), defaults)


# --- the header ----------------------------------------------------------------------------------------------------

_PREFACE = """\
// gpunetio's device functions for CUDA C++, written by `gpunetio device-lib`. Link gpunetio_device.ltoir, .ptx or
// .cubin; docs/device-lib.md shows how.
//
// Arguments and results are 64-bit integers. `qp` is the device address of an exported queue pair, which is a
// struct doca_gpu_dev_verbs_qp. `txq`, `rxq` and `semaphore` are those of Ethernet queues and semaphores; a `txq` may
// also be passed as `qp`. Addresses are passed as integers, keys in host byte order, as `mr.rkey` gives them.
// A ticket is the index of the last WQE posted. A negative result is an error of enum gpunetio_status; a function
// without a result returns GPUNETIO_OK. No function waits longer than the timeout that the queue was exported with.
#ifndef GPUNETIO_DEVICE_CUH
#define GPUNETIO_DEVICE_CUH
"""


@functools.cache
def header() -> str:
    """Return `gpunetio_device.cuh`: constants, and prototypes with the docstrings of the Python functions."""
    statuses = {name: value for name, value in vars(status).items() if name.isupper() and isinstance(value, int)}
    parts = [_PREFACE, _enum("status", "", statuses)]
    parts += [_enum(prefix.lower(), f"{prefix}_", values.__members__) for prefix, values, _ in _ENUMS]
    parts.append(_enum("rdma_flags", "RDMA_", {"IMM": RDMA_IMM}))
    parts.append(_struct("packet_attr", PACKET_ATTR, "What gpunetio_rxq_recv writes at `attrs` for each packet."))
    chapter = ""
    for one in functions():
        if one.chapter != chapter:
            chapter = one.chapter
            parts.append(f"// --- {(inspect.getdoc(sys.modules[chapter]) or chapter).splitlines()[0]}\n")
        parts.append(_prototype(one))
    return "\n".join([*parts, "#endif\n"])


_COLUMNS = 120
_GLUE = re.compile("(?<!,) ")
_C_TYPES = {"<i8": "long long", "<u4": "unsigned int", "<u2": "unsigned short", "|u1": "unsigned char"}


def _enum(name: str, prefix: str, values: Mapping[str, int]) -> str:
    lines = [f"    GPUNETIO_{prefix}{member} = {int(value)}," for member, value in values.items()]
    return "\n".join([f"enum gpunetio_{name} {{", *lines, "};\n"])


def _struct(name: str, entry: Entry, what: str) -> str:
    """Return a structure whose fields have the offsets that C gives them."""
    fields = (entry.dtype.fields or {}).items()
    lines = [f"    {_C_TYPES[kind.str]} {field};" for field, (kind, *_) in fields]
    size = f'static_assert(sizeof(gpunetio_{name}) == {entry.size}, "");'
    return "\n".join([f"// {what}", f"struct gpunetio_{name} {{", *lines, "};", size, ""])


def _comment(text: str) -> str:
    fill = functools.partial(
        textwrap.fill, width=_COLUMNS, initial_indent="// ", subsequent_indent="// ", break_on_hyphens=False
    )
    return "\n//\n".join(fill(paragraph) for paragraph in text.split("\n\n")) + "\n"


def _prototype(one: Function) -> str:
    required = len(one.parameters) - len(one.defaults)
    declared = [f"long long {name}" for name in one.parameters[:required]]
    declared += [
        f"long long {name} = {_in_c(one, name, value)}"
        for name, value in zip(one.parameters[required:], one.defaults, strict=True)
    ]
    start, rest = f'extern "C" __device__ long long {one.c_name}(', f"{', '.join(declared)});"
    if len(start) + len(rest) > _COLUMNS:
        unbroken = _GLUE.sub("\0", rest)  # lines end only after commas
        rest = "\n" + textwrap.indent(textwrap.fill(unbroken, _COLUMNS - 4).replace("\0", " "), "    ")
    return f"{_comment(inspect.getdoc(one.python) or '')}{start}{rest}\n"


def _in_c(one: Function, parameter: str, value: int) -> str:
    for prefix, values, taken_by in _ENUMS:
        others = values is CtrlFlags and one.name.startswith("rdma_")  # flags of their own
        if parameter == taken_by and value in values.__members__.values() and not others:
            return f"GPUNETIO_{prefix}_{values(value).name}"
    return str(value)


# --- the images ----------------------------------------------------------------------------------------------------


def build(arch: str, kinds: Sequence[str] = ("ltoir",)) -> dict[str, bytes]:
    """Compile the library for `arch`, and return an image for each kind. This needs no GPU.

    `arch` is "sm_90", for example, or "compute_90", which has no cubin. The linker inlines "ltoir" into its callers, so
    constant modes fold away; the functions of "ptx" and "cubin" are called. A build takes some seconds. It runs in a
    process of its own, because Numba keeps one compilation of a function for all architectures. NotSupportedError if
    the CUDA compiler is not installed.
    """
    _capability(arch)
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidValueError(f"no format {kind!r}: there are {', '.join(KINDS)}")
    if "cubin" in kinds and not arch.startswith("sm_"):
        raise InvalidValueError(f"a cubin is for one architecture: sm_{arch.partition('_')[2]}, not {arch}")
    if importlib.util.find_spec("numba_cuda") is None:
        raise NotSupportedError("the device library is compiled by numba-cuda: pip install gpunetio[cuda]")
    with tempfile.TemporaryDirectory(prefix="gpunetio-") as folder:
        _in_a_process(folder, arch, kinds)
        return {kind: Path(folder, kind).read_bytes() for kind in kinds}


def _capability(arch: str) -> tuple[int, int]:
    match = _ARCH.fullmatch(arch)
    if not match:
        raise InvalidValueError(f"no architecture {arch!r}: name one as sm_90 or compute_90")
    return int(match[2]), int(match[3])


def _in_a_process(folder: str, arch: str, kinds: Sequence[str]) -> None:
    code = "import sys; from gpunetio.device import library; library.compile_into(*sys.argv[1:])"
    fixed = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}  # the same bytes each time
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code, folder, arch, *kinds], capture_output=True, text=True, check=False,
            env={**os.environ, **fixed}, timeout=_COMPILE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimedOutError(f"the device library did not compile for {arch} within {_COMPILE_SECONDS:g} s") from None
    if ran.returncode != 0:
        said = re.search(r"^\S*Error: .*", ran.stderr, re.MULTILINE | re.DOTALL)
        reason = said[0].strip() if said else f"exit status {ran.returncode}"
        raise UnexpectedError(f"the device library does not compile for {arch} with this gpunetio[cuda]: {reason}")


def compile_into(folder: str, arch: str, *kinds: str) -> None:
    """Write the images to `folder`, each to a file named after its kind. `build` runs this in a process of its own."""
    from numba.cuda.cudadrv import nvvm

    capability = _capability(arch)
    modules = _callers_first(_modules(functions(), capability))
    for kind in kinds:
        options: dict[str, Any] = {"gen-lto": None} if kind == "ltoir" else {}
        image: Any = nvvm.compile_ir(modules, arch="compute_{}{}".format(*capability), opt=3, **options)
        target = Path(folder, kind)
        target.write_bytes(image if kind == "ltoir" else image.rstrip(b"\0"))
        if kind == "cubin":
            _assemble(target, arch)


def _modules(wanted: Iterable[Function], capability: tuple[int, int]) -> list[str]:
    """Return the LLVM modules of the functions and of everything that they call, each once."""
    from numba import int64, types
    from numba.cuda.compiler import compile_cuda

    from ..jit.launch import offline

    found: set[str] = set()
    with offline(capability):
        for one in wanted:
            compiled = functools.partial(
                compile_cuda, one.python, args=(int64,) * len(one.parameters), cc=capability, forceinline=True,
                nvvm_options={"opt": 3, "fastmath": False}, abi="c", abi_info={"abi_name": one.c_name},
            )  # fmt: skip
            result = compiled(return_type=None)
            if result.signature.return_type not in (int64, types.none):  # None is 0 in Numba's C ABI
                result = compiled(return_type=int64)
            found.update(result.library.llvm_strs)
    return sorted(found)


_DEFINED = re.compile(r'^define [^@]*@"([^"]+)"', re.MULTILINE)
_NAMED = re.compile(r'@"([^"]+)"')
# Numba's environments, which functions with C ABI do not use.
_ENVIRONMENT = re.compile(r'^@"_ZN08NumbaEnv.*\n', re.MULTILINE)


def _callers_first(modules: Sequence[str]) -> list[str]:
    """Return the modules in linking order: the linker drops an inline function that no earlier module calls."""
    owner = {name: index for index, text in enumerate(modules) for name in _DEFINED.findall(text)}
    callers: dict[int, set[int]] = {index: set() for index in range(len(modules))}
    for index, text in enumerate(modules):
        for name in _NAMED.findall(text):
            if owner.get(name, index) != index:
                callers[owner[name]].add(index)
    return [_ENVIRONMENT.sub("", modules[index]) for index in graphlib.TopologicalSorter(callers).static_order()]


def _assemble(ptx: Path, arch: str) -> None:
    """Assemble a file of PTX into a linkable cubin, in place."""
    from cuda.pathfinder import find_nvidia_binary_utility  # type: ignore[attr-defined]

    ptxas = find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    if ptxas is None:
        raise NotSupportedError("a cubin is made by ptxas: pip install gpunetio[cuda]")
    command = [ptxas, "-c", f"-arch={arch}", str(ptx), "-o", str(ptx)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=_COMPILE_SECONDS)


# --- running ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def foreign_kernels() -> Iterator[None]:
    """Keep software NICs awake while kernels run that `@kernel` did not launch. The NICs spin and do not sleep.

    A GPU cannot wake a thread, so a sleeping NIC finds a doorbell up to a millisecond late.
    """
    tell_observers(+1)
    try:
        yield
    finally:
        tell_observers(-1)
