"""`gpunetio verbs_dpa`: kernels on the DPAs of two NICs write into each other's memory."""

from __future__ import annotations

from typing import Any

import click

from .failures import guarded
from .ports import MTU, nic_port, port_options, tcp_port


@click.command("verbs_dpa", context_settings={"max_content_width": 120})
@click.option(
    "-c", "--client", "server", metavar="HOST", help="Be the client of the server at HOST.  [default: be the server]"
)
@tcp_port("--port")
@click.option(
    "-d", "--device", "--ib-dev", metavar="NIC",
    help="The NIC; `gpunetio devices` names them.  [default: the first that no other process uses]",
)
@click.option(
    "-g", "--gid-index", type=click.IntRange(0), default=0, show_default=True, help="Index of the NIC's address."
)
@click.option(
    "-s", "--size", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Bytes per message."
)
@click.option(
    "-i", "--iters", "iterations", type=click.IntRange(1, 1 << 20), default=1, show_default=True,
    help="Messages in each direction.",
)
@port_options
@MTU
@guarded
def verbs_dpa(**values: Any) -> None:
    """Exchange RDMA WRITEs between kernels on the DPAs of two NICs.

    Each kernel polls its memory for the peer's messages. The server waits for the client, which has -c. Give both the
    same -s and -i. Read the program in gpunetio/samples/verbs_dpa.py.
    """
    if values["server"] == "":
        raise click.UsageError("--client needs the server's address")
    from ..samples.verbs_dpa import SampleOptions, run

    names = ("server", "tcp_port", "device", "gid_index", "size", "iterations")
    run(SampleOptions(nic_port=nic_port(values), **{name: values[name] for name in names}), click.echo)
