"""The device library for CUDA C++: every public device function under a C name, and a header that declares them.

The functions are those that `gpunetio.device` exports. Arguments and results are `long long`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

from ..compiler import compiling, little_garbage_collection
from ..enums import CodeOpt, ExecScope, SharingMode, SyncScope
from ..errors import InvalidValueError, NotSupportedError, TimedOutError, UnexpectedError
from ..formats.eth_device import PACKET_ATTR, SemaphoreStatus
from ..formats.layout import Entry
from ..formats.wqe import CtrlFlags, WqeOpcode
from ..jit import machine, nvvm, ops
from ..jit.compile import DeviceFunction, device_function
from ..jit.kinds import INT
from ..jit.launch import tell_observers
from ..jit.unit import Unit
from . import status
from .rdma import RDMA_IMM

KINDS = ("ltoir", "ptx", "cubin")
STEM = "gpunetio_device"  # of the file names of the images and the header
_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)")
_ASSEMBLE_SECONDS = 300.0

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
def clock_ns() -> int:
    """Return the time in ns, from the clock that deadlines use (`doca_gpu_dev_verbs_query_globaltimer`)."""
    return ops.clock_ns()


_WITH_SEVERAL_RESULTS = ("rdma_get_info", "rdma_recv_get_info")  # a C function returns one


@dataclass(frozen=True)
class Function:
    """A device function as C sees it. `chapter` is its module; `defaults` belong to the last parameters."""

    name: str
    chapter: str
    compiled: DeviceFunction
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
    found = [_function(name, value) for name, value in public.items() if isinstance(value, DeviceFunction)]
    found.append(_function("clock_ns", clock_ns, ops.__name__))
    return tuple(sorted(found, key=lambda one: (one.chapter, one.name)))


def _function(name: str, compiled: DeviceFunction, chapter: str | None = None) -> Function:
    parameters = compiled.signature.parameters
    defaults = tuple(int(p.default) for p in parameters.values() if p.default is not p.empty)
    return Function(name, chapter or compiled.py_func.__module__, compiled, tuple(parameters), defaults)


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
    return f"{_comment(inspect.getdoc(one.compiled.py_func) or '')}{start}{rest}\n"


def _in_c(one: Function, parameter: str, value: int) -> str:
    for prefix, values, taken_by in _ENUMS:
        others = values is CtrlFlags and one.name.startswith("rdma_")  # these take other flags
        if parameter == taken_by and value in values.__members__.values() and not others:
            return f"GPUNETIO_{prefix}_{values(value).name}"
    return str(value)


# --- the images ----------------------------------------------------------------------------------------------------


def build(arch: str, kinds: Sequence[str] = ("ltoir",)) -> dict[str, bytes]:
    """Compile the library for `arch`, and return an image for each kind. This needs no GPU.

    `arch` is "sm_90", for example, or "compute_90", which has no cubin. The linker inlines "ltoir" into its callers, so
    constant modes fold away; the functions of "ptx" and "cubin" are called, and take some seconds to compile.
    NotSupportedError if the tool that makes a kind is not installed.
    """
    capability = _capability(arch)
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidValueError(f"no format {kind!r}: there are {', '.join(KINDS)}")
    if "cubin" in kinds and not arch.startswith("sm_"):
        raise InvalidValueError(f"a cubin is for one architecture: sm_{arch.partition('_')[2]}, not {arch}")
    ptxas = _ptxas() if "cubin" in kinds else ""  # raises before the steps that take longer
    images: dict[str, bytes] = {}
    try:
        unit = unit_of(functions(), capability)
        if "ltoir" in kinds:
            images["ltoir"] = nvvm.lto_ir(unit, capability)
        if "ptx" in kinds or "cubin" in kinds:
            with compiling(), little_garbage_collection():
                images["ptx"] = machine.ptx_of(unit).encode()
        if "cubin" in kinds:
            images["cubin"] = _assembled(ptxas, images["ptx"], arch)
    except UnexpectedError as error:
        said = f"the device library does not compile for {arch} with this gpunetio[cuda]: {error}"
        raise UnexpectedError(said) from None
    return {kind: images[kind] for kind in kinds}


def _capability(arch: str) -> tuple[int, int]:
    match = _ARCH.fullmatch(arch)
    if not match:
        raise InvalidValueError(f"no architecture {arch!r}: name one as sm_90 or compute_90")
    return int(match[2]), int(match[3])


def unit_of(wanted: Iterable[Function], capability: tuple[int, int]) -> Unit:
    """Return a unit that has these functions under their names in C."""
    with compiling(), little_garbage_collection():
        unit = Unit(machine.cuda_library(capability))
        for one in wanted:
            unit.entry(one.compiled, one.c_name, (INT,) * len(one.parameters))
    return unit


def _ptxas() -> str:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility  # type: ignore[attr-defined]

        found = find_nvidia_binary_utility("ptxas")
    except ImportError:
        found = None
    found = found or shutil.which("ptxas")
    if found is None:
        raise NotSupportedError("a cubin is made by ptxas: pip install 'gpunetio[cuda-compilers]'")
    return found


def _assembled(ptxas: str, ptx: bytes, arch: str) -> bytes:
    """Assemble PTX, and return a linkable cubin."""
    with tempfile.TemporaryDirectory(prefix="gpunetio-") as folder:
        source, target = Path(folder, "ptx"), Path(folder, "cubin")
        source.write_bytes(ptx)
        command = [ptxas, "-c", f"-arch={arch}", str(source), "-o", str(target)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASSEMBLE_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimedOutError(f"ptxas took more than {_ASSEMBLE_SECONDS:g} s for {arch}") from None
        if ran.returncode != 0:
            said = (ran.stdout + ran.stderr).strip() or f"ptxas: exit status {ran.returncode}"
            raise UnexpectedError(said.splitlines()[0])
        return target.read_bytes()


# --- running ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def foreign_kernels() -> Iterator[None]:
    """Keep software NICs spinning, rather than sleeping, while kernels run that `@kernel` did not launch.

    A GPU cannot wake a thread, so a sleeping NIC finds a doorbell up to a millisecond late.
    """
    tell_observers(+1)
    try:
        yield
    finally:
        tell_observers(-1)
