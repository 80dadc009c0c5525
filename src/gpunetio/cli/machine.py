"""Options that select the machine to look at, and its GPU and NIC."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InvalidValueError
from .failures import UsageFailure, explained

if TYPE_CHECKING:
    from ..doctor import Machine, Wanted

FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--gpu", default="", metavar="GPU", help="Only this GPU: a number, GPU0, or a PCI address."),
    click.option("--nic", default="", metavar="NIC",
                 help="Only this NIC: an RDMA device, a network interface, or a PCI address."),
    click.option("--replay", metavar="FILE", type=FILE, help="Use a machine that `gpunetio doctor --record` recorded."),
    click.option("--root", metavar="DIR", help="Use a machine whose files are below DIR. No command is run."),
)


def terminal_width() -> int:
    """Return the columns of the terminal, or a default for files and pipes."""
    from ..doctor.report.text import WIDTH

    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def machine_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --gpu, --nic, --replay and --root."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def opened(replay: Path | None, root: str | None, wanted: Wanted) -> Machine:
    """Return the machine that these options name. Nothing is read yet."""
    from ..doctor import LiveHost, Machine, load

    if replay and root:
        raise UsageFailure("--replay and --root exclude each other")
    if root and not Path(root).is_dir():
        raise UsageFailure(f"--root {root}: no such folder")
    with options_at_fault():
        return Machine(load(replay) if replay else LiveHost(root or "/"), wanted)


@contextmanager
def options_at_fault() -> Iterator[None]:
    """Turn a machine that cannot be opened, or lacks what was asked for, into a usage error."""
    try:
        yield
    except (InvalidValueError, OSError) as error:
        raise UsageFailure(explained(error)) from error
