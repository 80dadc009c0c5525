"""Defer Ctrl+C while an object is made, changed or closed, so that none is left half-made.

Python raises KeyboardInterrupt in the main thread between any two steps: even between making an object and storing it,
or halfway through taking a lock. No `try` can catch this everywhere. So `deferred()` only records SIGINT, and delivers
it at its end. Everything that runs inside has its own deadline.
"""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from inspect import Signature

# The functions below `signal`. Those of `signal` take twenty times as long, because they convert to enumerations.
_c: Any = import_module("_signal")
_getsignal, _signal = _c.getsignal, _c.signal

_SIGINT, _SIGTERM = int(signal.SIGINT), int(signal.SIGTERM)


class deferred(ContextDecorator):
    """A context that records SIGINT, and delivers it at the end; also a decorator.

    In threads other than the main one it does nothing, because Python never interrupts them. `came` says whether an
    interrupt was recorded. Contexts may be nested: the outermost one delivers.
    """

    def __init__(self):
        self._handler: Any = None
        self.came = False

    def _recreate_cm(self) -> deferred:
        return deferred()  # a new one for each call of the decorated function

    def __enter__(self) -> deferred:
        if threading.current_thread() is threading.main_thread():
            handler = _getsignal(_SIGINT)
            # Without a handler in Python, nothing is raised. If the handler is `_note` of an outer context, that one
            # delivers.
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), deferred):
                self._handler = handler
                _signal(_SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.came = True

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            _signal(_SIGINT, self._handler)
            if self.came:
                self._handler(_SIGINT, sys._getframe())


class allowed:
    """A context within `deferred()` that can be interrupted, because it takes long and leaves nothing half-made."""

    def __init__(self):
        self._outer: deferred | None = None

    def __enter__(self) -> None:
        outer = getattr(_getsignal(_SIGINT), "__self__", None)
        if isinstance(outer, deferred) and threading.current_thread() is threading.main_thread():
            self._outer = outer
            came, outer.came = outer.came, False
            _signal(_SIGINT, outer._handler)
            if came:
                outer._handler(_SIGINT, sys._getframe())

    def __exit__(self, *exc: object) -> None:
        if self._outer is not None:
            _signal(_SIGINT, self._outer._note)


class Closable(Protocol):
    """An object that `uninterrupted` makes."""

    def close(self) -> None:
        """Release the object."""


Made = TypeVar("Made", bound=Closable)
Given = ParamSpec("Given")


def uninterrupted(make: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
    """Call `make` with interrupts deferred. If one came, close the new object, because the caller will not get it."""
    with deferred() as interrupts:
        made = make(*args, **kwargs)
        if interrupts.came:
            made.close()
    return made


class Whole(ABCMeta):
    """The metaclass of classes with `close()` whose instances an interrupt must not leave half-made."""

    if not TYPE_CHECKING:  # the type of an instance is that of its class

        def __call__(cls, *args: object, **kwargs: object) -> object:
            return uninterrupted(super().__call__, *args, **kwargs)

        @property
        def __signature__(cls) -> Signature:
            """Return the arguments of `__init__`, for `help()`. Those of `__call__` say nothing."""
            from inspect import signature

            _, *others = (whole := signature(cls.__init__)).parameters.values()
            return whole.replace(parameters=others)


@contextmanager
def until_terminated() -> Iterator[None]:
    """Let SIGTERM do what Ctrl+C does, so that a program that is terminated cleans up.

    In threads other than the main one this does nothing, because Python handles signals only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _signal(_SIGTERM, _terminate)
    try:
        yield
    finally:
        _signal(_SIGTERM, signal.SIG_DFL if before is None else before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    handler = _getsignal(_SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt  # a job in the background of a shell ignores Ctrl+C, but not SIGTERM
    handler(_SIGINT, frame)
