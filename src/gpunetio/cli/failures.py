"""How commands end when something is wrong: one line on stderr, and an exit status."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

INTERRUPTED = 130  # what a shell makes of SIGINT
PATIENCE = 1.0  # seconds of silence


class Failure(click.ClickException):
    """Exit status 1 after `gpunetio: error: …`."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        complain(self.message)


def complain(message: str) -> None:
    """One line on stderr."""
    click.echo(f"gpunetio: error: {' '.join(message.split())}", err=True)


def _explain(error: Exception) -> str:
    from ..errors import DocaError

    if isinstance(error, OSError) and not isinstance(error, DocaError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what gpunetio and the operating system raise into a `Failure`, and Ctrl+C into a quiet end."""

    @functools.wraps(command)
    def guard(*args: Any, **kwargs: Any) -> Any:
        from ..errors import DocaError

        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever reads our output has had enough: click ends quietly
        except (DocaError, OSError) as error:
            raise Failure(_explain(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    return guard


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say what the user waits for when a block takes longer than a second: the first run compiles."""
    message = f"compiling {what} (first run only, about half a minute) …"
    timer = threading.Timer(PATIENCE, functools.partial(click.echo, message, err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
