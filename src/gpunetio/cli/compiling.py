"""A line on stderr when the user waits for the compiler."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

PATIENCE = 1.0  # seconds of compilation without a word


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say what the user waits for once compilation, which only a cold cache needs, has taken a second."""
    from ..gpu.cuda_backend import device_count

    message = f"compiling {what} (first run only, about half a minute) …"
    timer = threading.Timer(PATIENCE, functools.partial(click.echo, message, err=True))
    timer.daemon = True
    once = threading.Lock()
    with ExitStack() as stack:
        stack.callback(timer.cancel)
        for module in ("numba.core.event", "numba.cuda.core.event") if device_count() else ("numba.core.event",):
            event = importlib.import_module(module)
            listener = _listener(event, lambda: once.acquire(blocking=False) and timer.start())
            stack.enter_context(event.install_listener("numba:compile", listener))
        yield


def _listener(event: Any, started: Any) -> Any:
    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            started()

        def on_end(self, event: Any) -> None:
            pass

    return Listener()
