"""LLVM: its targets, the optimized code of a unit, and machine code in this process."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import binding as llvm

from ..compiler import has_compiled
from .processor import cpu_features, cpu_name
from .targets import Cuda, CudaLibrary, Host
from .unit import Unit
from .values import CompileError

# The largest size of a device function that LLVM inlines into a kernel for the host. With LLVM's own 325, a kernel that
# posts loses 7 % of its rate. With all functions inlined, it is no faster, and takes three times as long to compile.
_INLINED = 500
# Instructions without a branch between them. LLVM takes 12 s for this many of one kind, and code written by hand never
# has so many. Code for the host with more is compiled by FastISel, which takes no time but makes slow code.
_LONG = 5000


@functools.cache
def _host_target() -> Any:
    llvm.set_option("gpunetio", f"-inlinehint-threshold={_INLINED}")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple())


def _host_machine(opt: int = 3) -> Any:
    return _host_target().create_target_machine(
        cpu=cpu_name(), features=cpu_features(), opt=opt, reloc="default", codemodel="jitdefault", jit=True
    )


@functools.cache
def host() -> Host:
    """Return this machine as a target."""
    return Host(_host_machine())


@functools.cache
def _all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


_PTX_VERSIONS = {(8, 8): 90, (10, 3): 88, (11, 0): 90, (12, 1): 88}  # the oldest that supports these GPUs
_NEWEST = (12, 1)  # the newest that LLVM knows; newer GPUs run PTX for older ones


def _ptx_version(capability: tuple[int, int]) -> int:
    """Return a version of PTX that supports a GPU and all its instructions. CUDA 12.7 and 12.8 read 86 and 87."""
    return _PTX_VERSIONS.get(capability, 87 if capability >= (10, 0) else 86)


def _cuda_machine(capability: tuple[int, int]) -> Any:
    _all_targets()
    known = min(capability, _NEWEST)
    return llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(
        cpu="sm_{}{}".format(*known), features=f"+ptx{_ptx_version(known)}", opt=3
    )


def cuda(capability: tuple[int, int], threads: int = 0) -> Cuda:
    """Return GPUs of a compute capability as a target."""
    return Cuda(_cuda_machine(capability), capability, threads)


def cuda_library(capability: tuple[int, int]) -> CudaLibrary:
    """Return GPUs of a compute capability as a target for functions that other device code calls."""
    return CudaLibrary(_cuda_machine(capability), capability)


def optimized(unit: Unit, level: int = 3) -> Any:
    """Return the optimized LLVM module of a unit."""
    module = llvm.parse_assembly(unit.text())
    _link_library(unit, module)
    _run_passes(unit, module, level)
    if any(function.name.startswith("op.") and function.is_declaration for function in module.functions):
        module.link_in(llvm.parse_assembly(unit.late_text()))
        for function in module.functions:
            if function.name.startswith("op.") and not function.is_declaration:
                function.linkage = "internal"
        _run_passes(unit, module, 1)
    return module


def _run_passes(unit: Unit, module: Any, level: int) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = unit.target.vectorizes  # loops only: vectorizing straight code gains nothing
    options.loop_unrolling = unit.target.unrolls
    builder = llvm.create_pass_builder(unit.target.machine, options)
    builder.getModulePassManager().run(module, builder)


def _link_library(unit: Unit, module: Any) -> None:
    """Link the mathematical functions that the kernel calls, if they are not in the process."""
    if not unit.library or not isinstance(unit.target, Cuda):
        return
    from .libdevice import libdevice

    library = libdevice()
    wanted = set(unit.library)
    module.link_in(library)
    for function in module.functions:
        if function.name.startswith("__nv_") and not function.is_declaration:
            function.linkage = "internal"
    missing = [name for name in wanted if module.get_function(name).is_declaration]
    assert not missing, missing


def object_of(unit: Unit) -> bytes:
    """Return a unit for the host as an object file."""
    module = optimized(unit)
    image = (_host_machine(opt=0) if _is_long(unit, module) else unit.target.machine).emit_object(module)
    has_compiled()
    return image


def ptx_of(unit: Unit) -> str:
    """Return a unit for CUDA as PTX. CompileError if this would take very long."""
    module = optimized(unit)
    if _is_long(unit, module):
        raise CompileError(
            f"a kernel has more than {_LONG:,} instructions without a branch between them, with what it calls: LLVM "
            "would take many minutes; put parts of it into loops"
        )
    return unit.target.machine.emit_assembly(module)


def _is_long(unit: Unit, module: Any) -> bool:
    """Return whether LLVM's instruction selection (SelectionDAG), of quadratic complexity, would take very long."""
    if unit.longest < _LONG:  # quicker than counting
        return False
    return any(sum(1 for _ in block.instructions) > _LONG for one in module.functions for block in one.blocks)


@functools.cache
def _engine() -> Any:
    machine = _host_machine()  # the engine keeps it
    module = llvm.parse_assembly("")
    module.triple = llvm.get_process_triple()
    return llvm.create_mcjit_compiler(module, machine)


def load(image: bytes) -> None:
    """Load an object file into this process."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()


def address_of(symbol: str) -> int:
    """Return the address of a loaded function."""
    return _engine().get_function_address(symbol)
