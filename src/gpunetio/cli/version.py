"""The option that prints the version."""

from __future__ import annotations

from collections.abc import Callable

import click

from .click_types import Decorated


def version_option(*names: str) -> Callable[[Decorated], Decorated]:
    """Return the option that prints the version, under these names."""
    return click.option(
        *names, is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
    )


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"gpunetio {__version__}")
        ctx.exit()
