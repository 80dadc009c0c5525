"""Compile a program as one unit: each function is typed and lowered once, and LLVM sees all of them once, together.

Numba by itself makes a library of each function: it links in all that the function calls, directly or not, optimizes
that, and generates machine code, so a function that a hundred others reach is optimized a hundred times. Here only what
Python calls becomes machine code: a *root*. What a root calls, directly or not, are *parts*: LLVM IR, which is cached
on its own and linked into each root.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from llvmlite import binding as llvm
from numba.core import compiler, dispatcher, event, typed_passes, untyped_passes
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.environment import lookup_environment
from numba.core.typing.templates import make_concrete_template

from ..compiler import let_forks_wait, little_garbage_collection
from .cache import Cache, CacheImpl, LazyCache, keeps_nothing
from .frozen import Watch, check_foreign
from .stamps import is_ours
from .wrapping import let_wrap

Types = tuple[Any, ...]
_PREFIX = "gpunetio$"  # of the symbols of parts

let_forks_wait()

_FunctionCompiler: Any = dispatcher._FunctionCompiler  # type: ignore[attr-defined]


class Unit(JITCodeLibrary):
    """The IR of one function. Whoever finalizes it links in the parts that the function calls, directly or not."""

    _codegen: Any

    def __init__(self, codegen: Any, name: str):
        super().__init__(codegen, name)
        self.bitcode: bytes | None = None  # of the function alone, once that is complete
        self.symbol = ""  # of a part
        self.inlines = False  # of a root: a function that is called in one place is inlined there, whatever its size
        self.origin: tuple[Any, Types] | None = None  # of a part: its dispatcher, and its argument types
        self.calls: dict[tuple[Any, Types], Unit | None] = {}  # by origin; None: not looked up yet

    def add_ir_module(self, ir_module: Any) -> None:
        """Take the function's IR. Sums and products wrap."""
        let_wrap(ir_module)
        super().add_ir_module(ir_module)

    def add_linking_library(self, library: Any) -> None:
        """Remember what the function calls: parts stay apart. What Numba makes for its own functions is linked in."""
        if isinstance(library, Unit) and library.origin is not None:
            self.calls[library.origin] = library
        else:
            super().add_linking_library(library)

    def rename(self, symbol: str, to: str) -> None:
        """Rename a function of the module."""
        self._final_module.get_function(symbol).name = to

    def _link_what_numba_made(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)

    def part(self) -> bytes:
        """Return the function's own IR, to be linked into any number of roots."""
        if self.bitcode is None:
            self._raise_if_finalized()
            self._link_what_numba_made()
            for function in self._final_module.functions:
                if not function.is_declaration and function.name != self.symbol:
                    function.linkage = "linkonce_odr"
            self.bitcode = self._final_module.as_bitcode()
        return self.bitcode

    def all_calls(self) -> Iterator[Unit]:
        """Yield all parts that this function calls, directly or not, each once."""
        seen: set[tuple[Any, Types]] = set()
        todo: list[Unit] = [self]
        while todo:
            for origin, unit in todo.pop().calls.items():
                if origin not in seen:
                    seen.add(origin)
                    callee, types = origin
                    found = unit or callee.units.part(types).library
                    yield found
                    todo.append(found)

    def finalize(self) -> None:
        """Link all that is called, optimize, and generate machine code."""
        self._raise_if_finalized()
        if self.origin is not None:  # a part, for a caller that links whole libraries
            self._final_module = llvm.parse_bitcode(self.part())
        else:
            self._link_what_numba_made()
        units = list(self.all_calls())
        for unit in units:
            self._final_module.link_in(llvm.parse_bitcode(unit.part()))
        # Only now: the linker leaves out what may be left out and nobody has asked for yet. What is private has no
        # symbol, to which other roots would link theirs of the same name.
        linkage = "private" if self.inlines else "linkonce_odr"
        for unit in units:
            self._final_module.get_function(unit.symbol).linkage = linkage
        missing = [function.name for function in self._final_module.functions if _is_missing(function)]
        if missing:
            raise RuntimeError(f"{self.name} calls what was not linked: {', '.join(missing)}")
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()
        for variable in self._final_module.global_variables:
            environment = lookup_environment(variable.name)
            if environment is not None:
                self._codegen.set_env(variable.name, environment)


def _is_missing(function: Any) -> bool:
    """Whether a function of Python is only declared."""
    return function.is_declaration and function.name.startswith(("_ZN", _PREFIX))


class _PartImpl(CacheImpl):
    """What the cache keeps of a part: its IR, how to call it, and what it calls."""

    def check_cachable(self, cres: Any) -> bool:
        unit = cres.library
        return not unit._reload_init and all(map(_has_name, (unit.origin, *unit.calls)))

    def reduce(self, cres: Any) -> tuple[Any, ...]:
        fndesc = cres.fndesc
        fndesc.typemap = fndesc.calltypes = None
        calls = [(*_name(origin), origin[1]) for origin in cres.library.calls]
        return cres.library.name, cres.library.part(), calls, fndesc, cres.environment, cres.signature

    def rebuild(self, target_context: Any, payload: tuple[Any, ...]) -> Any:
        name, bitcode, calls, fndesc, environment, signature = payload
        unit = Unit(target_context.codegen(), name)
        unit.bitcode, unit.symbol = bitcode, fndesc.mangled_name
        unit.calls = {(_find(module, qualname), types): None for module, qualname, types in calls}
        return compiler.compile_result(
            library=unit, fndesc=fndesc, environment=environment, signature=signature, target_context=target_context,
        )  # fmt: skip


def _name(origin: tuple[Any, Types]) -> tuple[str, str]:
    function = origin[0].py_func
    return function.__module__, function.__qualname__


def _find(module: str, qualname: str) -> Any:
    """Return the dispatcher of that name, None if there is none: functions in functions have no name of their own."""
    try:
        found = operator.attrgetter(qualname)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
    found = getattr(found, "body", found)  # of a kernel
    return found if hasattr(found, "units") else None


def _has_name(origin: tuple[Any, Types]) -> bool:
    """Whether every process finds the function by its name."""
    return _find(*_name(origin)) is origin[0]


class _PartCache(Cache):
    _impl_class = _PartImpl
    _takes_turns = False  # who compiles the root has the turn

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return ("part", *super()._index_key(sig, codegen))


# Passes for what this package's device code does without: closures, comprehensions, contexts, array expressions,
# literal unrolling, inlining before LLVM. Each costs a walk through the code.
_UNNEEDED = (
    untyped_passes.WithLifting, untyped_passes.InlineClosureLikes, untyped_passes.InlineInlinables,
    untyped_passes.FindLiterallyCalls, untyped_passes.LiteralUnroll, untyped_passes.LiteralPropagationSubPipelinePass,
    typed_passes.InlineOverloads, typed_passes.NopythonRewrites,
)  # fmt: skip


class PlainCode(compiler.CompilerBase):
    """Numba's pipeline for the device code of this package."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes of Numba's own pipeline that plain code needs."""
        passes: Any = PassManager("plain")
        for made, description in compiler.DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
            if made not in _UNNEEDED:
                passes.add_pass(made, description)
        passes.finalize()
        return [passes]


class UnitCompiler(_FunctionCompiler):
    """Compiles a function as a root when Python asks for it, and as a part when a caller is typed."""

    def __init__(self, function: Any, watch: Watch):
        by = function._compiler
        super().__init__(by.py_func, by.targetdescr, by.targetoptions, by.locals, by.pipeline_class)
        self._dispatcher, self.watch = function, watch
        self.parts: dict[Types, Any] = {}
        self._parts_of = ""  # the digest of what they have frozen

    @functools.cached_property
    def _cache(self) -> Any:
        """The cache of the parts. Most programs need none: they load roots."""
        none = keeps_nothing(self._dispatcher._cache)
        return NullCache() if none else LazyCache(self.py_func, self.watch, _PartCache)

    def _compile_core(self, args: Types, return_type: Any, part: bool = False) -> Any:
        flags: Any = compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags.no_compile = flags.no_cpython_wrapper = part
        context = self.targetdescr.target_context
        function = self._labelled()
        unit = Unit(context.codegen(), function.__qualname__)
        # Ethernet frames take a tenth less time with it, and RDMA, in the root of all other services, a tenth more.
        unit.inlines = hasattr(self._dispatcher, "extension")
        unit.enable_object_caching()
        with little_garbage_collection():
            return compiler.compile_extra(
                self.targetdescr.typing_context, context, function, args, return_type, flags, self.locals, unit,
                self.pipeline_class,
            )  # fmt: skip

    def _labelled(self) -> Any:
        """Return the function by a name that contains what it freezes. Symbols of the machine code contain that name.

        Code that was compiled with other values, perhaps by another process, would otherwise have the same symbols.
        """
        function = self.py_func
        if is_ours(function.__code__.co_filename):
            return function
        frozen = self.watch.now()
        check_foreign(frozen)
        labelled = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        labelled.__kwdefaults__, labelled.__module__ = function.__kwdefaults__, function.__module__
        labelled.__qualname__ = f"_{frozen.digest[:16]}.{function.__qualname__}"
        return labelled

    @property
    def done(self) -> bool:
        """Whether the function is compiled, for some types, in this process."""
        return bool(self.parts or self._dispatcher.overloads)

    def _follow_changes(self) -> None:
        """Forget what was compiled with other values than those of now."""
        digest = self.watch.now().digest
        if digest != self._parts_of:
            self.parts.clear()
            self.pysig = inspect.signature(self.py_func)  # with its defaults
            self._parts_of = digest

    @global_compiler_lock
    def part(self, args: Types) -> Any:
        """Return the function as a part, for arguments of these types."""
        self._follow_changes()
        found = self.parts.get(args)
        if found is None:
            context = self.targetdescr.target_context
            found = self._cache.load_overload(args, context)
            if found is None:
                with event.trigger_event("numba:compile", data={"dispatcher": self._dispatcher}):
                    found = self._compile_core(args, None, part=True)
                found.library.origin = self._dispatcher, args
                self._name_symbol(found)
                self._cache.save_overload(args, found)
            found.library.origin = self._dispatcher, args
            context.insert_user_function(found.library, found.fndesc, [found.library])
            self.parts[args] = found
        return found

    def _name_symbol(self, part: Any) -> None:
        """Name the symbol of a part after the function, if that has a name.

        Numba's symbols contain a number that differs from process to process, and a caller and a callee in the cache
        may come from different ones.
        """
        unit, fndesc = part.library, part.fndesc
        unit.symbol = fndesc.mangled_name
        if _has_name(unit.origin):
            name = f"{unit.origin[0].py_func.__module__}.{unit.name}"
            unit.symbol = f"{_PREFIX}{name}({', '.join(map(str, unit.origin[1]))})"
            unit.rename(fndesc.mangled_name, unit.symbol)
            fndesc.mangled_name = unit.symbol

    def call_template(self, args: Types, kws: dict[str, Any]) -> tuple[Any, ...]:
        """Return what types a call: as a dispatcher's `get_call_template`, but of the part."""
        self._follow_changes()
        pysig, args = self.fold_argument_types(args, kws)
        name = self.py_func.__name__
        template = make_concrete_template(
            f"CallTemplate({name})", key=name, signatures=[self.part(tuple(args)).signature]
        )
        return template, pysig, args, {}
