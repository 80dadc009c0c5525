"""Report errors of commands: one line on stderr, and an exit status."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

import click

_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())  # missing in click 8.1
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
INTERRUPTED = 130  # as a shell reports SIGINT


class Failure(click.ClickException):
    """Print `gpunetio: error: …` and exit with status 1."""

    def show(self, file: IO[str] | None = None) -> None:
        """Print the error in one line."""
        complain(self.message)


class UsageFailure(Failure):
    """A `Failure` for a wrong command line, with click's exit status for it."""

    exit_code = 2


class InterruptedFailure(Failure):
    """A `Failure` after Ctrl+C at the other end of a benchmark."""

    exit_code = INTERRUPTED


def complain(message: str) -> None:
    """Print one line on stderr."""
    click.echo(f"gpunetio: error: {' '.join(message.split())}", err=True)


def explained(error: Exception) -> str:
    """Return an error in one line, with the file that the operating system names."""
    from ..errors import DocaError

    if isinstance(error, OSError) and not isinstance(error, DocaError) and error.strerror:
        from ..limits import cure

        text = cure(error) or error.strerror
        return f"{error.filename}: {text}" if error.filename else text
    return str(error) or type(error).__name__


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def writing(what: str, path: Path, failure: type[Failure] = Failure) -> Iterator[None]:
    """Turn an error while a file is written into a `Failure` that names the file, and remove an incomplete file."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and path.is_file():
            path.unlink()
        raise failure(f"cannot write {what} {path}: {error.strerror or error}") from error


def guarded(command: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Turn errors of gpunetio and the operating system into a `Failure`, and Ctrl+C into a quiet end.

    Ctrl+C at the other end is reported, and ends with the same status.
    """

    @functools.wraps(command)
    def guard(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        from ..errors import DocaError

        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of our output has closed it: click exits quietly
        except (DocaError, OSError) as error:
            kind = InterruptedFailure if getattr(error, "interrupted", False) else Failure
            raise kind(explained(error)) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    return guard


class OneLineUsage(click.Group):
    """A group whose usage errors also take one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, whose arguments are parsed here."""
        with _one_line_usage():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's own arguments."""
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
