"""DOCA's own libraries, in the folder that DOCA_SDK_LIB_PATH names: load them, call them, and log their use."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import DocaErrorCode, NotSupportedError, error_of
from ...trusted import load_library
from .signatures import COMMON, GPUNETIO, RESULTS, VERBS, Area, Types

VARIABLE = "DOCA_SDK_LIB_PATH"
_IN_ORDER = COMMON, VERBS, GPUNETIO  # each library needs those before it

logger: logging.Logger = logging.getLogger("gpunetio.sdk")


@functools.cache
def sdk() -> Sdk | None:
    """Return the libraries in the folder named by the environment variable, or None if it is not set.

    The variable is read only once.
    """
    folder = os.environ.get(VARIABLE)
    return Sdk(folder) if folder else None


def not_in_sdk_mode(what: str, why: str) -> NotSupportedError:
    """Return the error for a feature that the SDK does not provide to gpunetio."""
    return NotSupportedError(f"{what}: not in SDK mode, {why}; unset {VARIABLE} to use gpunetio's own control path")


class Sdk:
    """The libraries in one folder."""

    def __init__(self, folder: str):
        self.folder = folder
        self._libraries: dict[str, ctypes.CDLL | OSError] = {}
        self._areas: dict[Area, bool] = {}  # whether all functions of an area are bound
        self._functions: dict[str, Any] = {}
        self._makes: dict[str, str] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # --- loading -----------------------------------------------------------------------------------------------------

    def use(self, *areas: Area) -> bool:
        """Bind areas that are only useful together.

        Return whether all are available. If not, gpunetio does the work itself.
        """
        with self._lock:
            bound = [self._bind(area) for area in areas]
            if not all(bound):
                for what in (what for area in areas for what in area.makes.values()):
                    self._tell(what, ", but DOCA SDK libraries not found. DOCA SDK is not in use", "open")
        return all(bound)

    def _bind(self, area: Area) -> bool:
        if area not in self._areas:
            libraries = [self._library(name) for name in area.libraries]
            for name, found in zip(area.libraries, libraries, strict=True):
                if isinstance(found, OSError):
                    path = Path(self.folder, name)
                    why = f": {found}" if path.exists() else ""
                    logger.error("Failed to find %s library %s (%s=%s)%s", name, path, VARIABLE, self.folder, why)
                    break
            else:
                loaded = [found for found in libraries if not isinstance(found, OSError)]
                self._areas[area] = self._look_up(area.functions, loaded)
                self._look_up(area.optional, loaded, logging.DEBUG)
                self._makes |= area.makes
        return self._areas.setdefault(area, False)

    def _library(self, name: str) -> ctypes.CDLL | OSError:
        """Load a library. Return it, or the error that says why it cannot be loaded."""
        if name not in self._libraries:
            # The loader does not search this folder, but finds dependencies among libraries that are already loaded.
            for needed in _IN_ORDER[: _IN_ORDER.index(name)]:
                self._library(needed)
            try:
                library = load_library(str(Path(self.folder, name)), os.RTLD_NOW | os.RTLD_GLOBAL)
            except OSError as error:
                library = error
            self._libraries[name] = library
        return self._libraries[name]

    def _look_up(self, functions: Types, libraries: Sequence[ctypes.CDLL], level: int = logging.ERROR) -> bool:
        found = True
        for name, types in functions.items():
            function = next((function for library in libraries if (function := getattr(library, name, None))), None)
            if function is None:
                logger.log(level, "No function %s in %s", name, ", ".join(library._name for library in libraries))
                found = False
            else:
                function.argtypes, function.restype = types, RESULTS.get(name, ctypes.c_int)
                self._functions[name] = function
        return found

    def _tell(self, what: str, state: str, which: str) -> None:
        """Log, once per object type, whether the SDK or gpunetio creates such objects."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("Env var %s set to %s%s", VARIABLE, self.folder, state)
            logger.info("Use DOCA %s %s", what, which)

    # --- calls -------------------------------------------------------------------------------------------------------

    def get(self, name: str, *args: object) -> Any:
        """Call a function, and return its result. NotSupportedError if this release of the SDK lacks it."""
        if name not in self._functions:
            raise not_in_sdk_mode(name, f"as the libraries in {self.folder} do not have it")
        return self._functions[name](*args)

    def call(self, name: str, *args: object) -> None:
        """Call a function that returns a `doca_error_t`. Raise the error for any code but success."""
        if code := self.get(name, *args):
            known = f"DOCA_ERROR_{DocaErrorCode(code).name}" if code in list(DocaErrorCode) else "unknown"
            raise error_of(code, f"{name} of the DOCA SDK failed with {code} ({known})")

    def make(self, name: str, *args: object) -> int:
        """Call a function that creates an object. Return the pointer that it stores through its last argument."""
        made = ctypes.c_void_p()
        self.call(name, *args, ctypes.byref(made))
        if what := self._makes.get(name):
            with self._lock:
                self._tell(what, ". DOCA SDK is in use", "SDK")
        return made.value or 0

    @contextmanager
    def attributes(self, kind: str, *of: object, **attributes: object) -> Iterator[int]:
        """Create an attribute object for the block, with these values: `…_create`, `…_set_…`, `…_destroy`."""
        pointer = self.make(f"{kind}_create", *of)
        try:
            for name, value in attributes.items():
                self.call(f"{kind}_set_{name}", pointer, *(value if isinstance(value, tuple) else (value,)))
            yield pointer
        finally:
            self.call(f"{kind}_destroy", pointer)
