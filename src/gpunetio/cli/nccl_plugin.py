"""`gpunetio nccl-plugin`: the library that lets NCCL's kernels use software NICs."""

from __future__ import annotations

import click

from .failures import guarded


@click.command("nccl-plugin")
@guarded
def nccl_plugin() -> None:
    """Print the path of the plugin that lets NCCL's kernels use a software NIC (GIN, type GDAKI).

    \b
        export NCCL_GIN_PLUGIN=$(gpunetio nccl-plugin) NCCL_GIN_TYPE=3

    The first call compiles the plugin with the machine's C compiler and keeps it in ~/.cache/gpunetio. docs/nccl.md has
    the other variables that NCCL needs, and what works.
    """
    from ..nccl import plugin

    click.echo(plugin())
