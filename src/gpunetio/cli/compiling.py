"""A line on stderr when the user waits for the compiler."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

PATIENCE = 1.0  # seconds of compilation without a word


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say what the user waits for once compilation, which only a cold cache needs, has taken a second."""
    try:
        from numba.core import event
    except ModuleNotFoundError:  # nothing will be compiled
        yield
        return

    message = f"compiling {what} (first run only, about half a minute) …"
    timer = threading.Timer(PATIENCE, functools.partial(click.echo, message, err=True))
    timer.daemon = True
    once = threading.Lock()

    def started() -> None:
        if once.acquire(blocking=False):
            timer.start()

    with event.install_listener("numba:compile", _listener(event, started)):
        try:
            yield
        finally:
            timer.cancel()


def _listener(event: Any, started: Callable[[], None]) -> Any:
    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            started()

        def on_end(self, event: Any) -> None:
            pass

    return Listener()
