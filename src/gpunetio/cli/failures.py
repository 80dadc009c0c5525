"""How commands end when something is wrong: one line on stderr, and an exit status."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())  # which click 8.1 has not
INTERRUPTED = 130  # what a shell makes of SIGINT


class Failure(click.ClickException):
    """Exit status 1 after `gpunetio: error: …`."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        complain(self.message)


class UsageFailure(Failure):
    """The same for a wrong command line, with click's exit status for that."""

    exit_code = 2


class InterruptedFailure(Failure):
    """The same when somebody pressed Ctrl+C at the other end of a benchmark."""

    exit_code = INTERRUPTED


def complain(message: str) -> None:
    """One line on stderr."""
    click.echo(f"gpunetio: error: {' '.join(message.split())}", err=True)


def explained(error: Exception) -> str:
    """An error in one line, with the file that the operating system speaks of."""
    from ..errors import DocaError

    if isinstance(error, OSError) and not isinstance(error, DocaError) and error.strerror:
        from ..limits import cure

        text = cure(error) or error.strerror
        return f"{error.filename}: {text}" if error.filename else text
    return str(error) or type(error).__name__


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Around writing a file that was asked for: a `Failure` that names it. Half a file is taken away again."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and path.is_file():
            path.unlink()
        raise Failure(f"cannot write {what} {path}: {error.strerror or error}") from error


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what gpunetio and the operating system raise into a `Failure`, and Ctrl+C into a quiet end.

    Ctrl+C at the other end is said, and ends with the same status.
    """

    @functools.wraps(command)
    def guard(*args: Any, **kwargs: Any) -> Any:
        from ..errors import DocaError

        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever reads our output has had enough: click ends quietly
        except (DocaError, OSError) as error:
            kind = InterruptedFailure if getattr(error, "interrupted", False) else Failure
            raise kind(explained(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    return guard


class OneLineUsage(click.Group):
    """A group whose usage errors are one line too."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its arguments are parsed here."""
        with _one_line_usage():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The group's own arguments."""
        with _one_line_usage():
            return super().parse_args(ctx, args)


@contextmanager
def _one_line_usage() -> Iterator[None]:
    try:
        yield
    except _HELP:
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "gpunetio"
        raise UsageFailure(f"{error.format_message()} (See {path} --help)") from error
