"""`gpunetio pingpong`: speaks ibv_rc_pingpong's protocol, so either end may be that tool."""

from __future__ import annotations

from typing import Any

import click

from .failures import complain, guarded
from .ports import nic_port, port_options, tcp_port


@click.command(context_settings={"max_content_width": 120})
@click.argument("host", required=False)
@tcp_port("-p", "--port")
@click.option("-d", "--ib-dev", "--device", "device", metavar="NIC", help="The NIC.  [default: the first that is free]")
@click.option("-i", "--ib-port", type=click.IntRange(1), default=1, show_default=True, help="Port of the NIC.")
@click.option("-s", "--size", type=click.IntRange(1, 1 << 30), default=4096, show_default=True, help="Message bytes.")
@click.option(
    "-m", "--mtu", "path_mtu", type=click.Choice(["256", "512", "1024", "2048", "4096"]), default="1024",
    show_default=True, help="Path MTU.",
)  # fmt: skip
@click.option(
    "-r", "--rx-depth", type=click.IntRange(1, 1 << 14), default=500, show_default=True,
    help="Receives posted at a time.",
)  # fmt: skip
@click.option(
    "-n", "--iters", "iterations", type=click.IntRange(1), default=1000, show_default=True, help="Exchanges."
)
@click.option("-l", "--sl", type=click.IntRange(0, 15), default=0, show_default=True, help="Service level.")
@click.option("-e", "--events", is_flag=True, help="Sleep on completion events instead of polling; implies --cpu.")
@click.option("--cpu", is_flag=True, help="Post and poll on the CPU. Implied where no kernel can do it.")
@click.option(
    "-g", "--gid-idx", "gid_index", type=click.IntRange(0),
    help="Index of the NIC's address.  [default: 0 on Ethernet, none on InfiniBand]",
)  # fmt: skip
@click.option("-c", "--chk", "validate", is_flag=True, help="Validate the contents of every message.")
@port_options
@guarded
def pingpong(host: str | None, **values: Any) -> None:
    """Send messages back and forth with the server at HOST or, without HOST, with one client that connects."""
    valid = _play(host, values)
    if not valid:
        raise click.exceptions.Exit(1)


def _play(host: str | None, values: dict[str, Any]) -> bool:
    from ..bench.pingpong import PingPong, PingPongOptions, show_address

    names = ("device", "tcp_port", "size", "rx_depth", "iterations", "sl", "gid_index", "validate", "events", "cpu")
    options = PingPongOptions(
        server=host, nic_port=nic_port(values), port=values["ib_port"], mtu=int(values["path_mtu"]),
        **{name: values[name] for name in names},
    )  # fmt: skip
    with PingPong(options) as end:
        click.echo(show_address("local", end.own))
        click.echo(show_address("remote", end.meet()))
        played = end.play()
    for line in played.lines():
        click.echo(line)
    if played.problem is not None:
        complain(f"validation failed: {played.problem}")
    return played.problem is None
