"""The `gpunetio` command."""

from __future__ import annotations

import sys

import click

from .benchmarks import benchmark_commands
from .devices import devices
from .failures import INTERRUPTED, OneLineUsage
from .pingpong import pingpong
from .show import show
from .stat import stat
from .verbs_dpa import verbs_dpa
from .warm import warm


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"gpunetio {__version__}")
        ctx.exit()


@click.group(cls=OneLineUsage, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
def app() -> None:
    """DOCA GPUNetIO in Python: kernels that drive a network card, measured and looked at."""


for _command in (*benchmark_commands(), devices, pingpong, show, stat, verbs_dpa, warm):
    app.add_command(_command)


def main() -> None:
    """Entry point of the `gpunetio` script."""
    from .. import log

    log.configure()
    try:
        app(prog_name="gpunetio")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
