"""`gpunetio pingpong`: speaks the protocol of ibv_rc_pingpong, ibv_uc_pingpong and ibv_ud_pingpong."""

from __future__ import annotations

from typing import Any

import click

from ..enums import QpType
from .click_types import Values
from .failures import complain, guarded
from .ports import nic_port, port_options, tcp_port

_MESSAGE, _DATAGRAM = 4096, 2048  # bytes, by default


@click.command(context_settings={"max_content_width": 120})
@click.argument("host", required=False)
@tcp_port("-p", "--port")
@click.option("-d", "--ib-dev", "--device", "device", metavar="NIC", help="The NIC.  [default: the first that is free]")
@click.option("-i", "--ib-port", type=click.IntRange(1), default=1, show_default=True, help="Port of the NIC.")
@click.option(
    "--qp-type", type=click.Choice(["RC", "UC", "UD"], case_sensitive=False), default="RC", show_default=True,
    help="Service of the queue pair, as of ibv_rc_pingpong, ibv_uc_pingpong or ibv_ud_pingpong. UD implies --cpu.",
)
@click.option(
    "-s", "--size", type=click.IntRange(1, 1 << 30), help="Message bytes.  [default: 4096; 2048 for UD, one packet]"
)
@click.option(
    "-m", "--mtu", "path_mtu", type=click.Choice(["256", "512", "1024", "2048", "4096"]), default="1024",
    show_default=True, help="Path MTU; not for UD.",
)
@click.option(
    "-r", "--rx-depth", type=click.IntRange(1, 1 << 14), default=500, show_default=True,
    help="Receives posted at a time.",
)
@click.option(
    "-n", "--iters", "iterations", type=click.IntRange(1), default=1000, show_default=True, help="Exchanges."
)
@click.option("-l", "--sl", type=click.IntRange(0, 15), default=0, show_default=True, help="Service level.")
@click.option("-e", "--events", is_flag=True, help="Sleep on completion events instead of polling; implies --cpu.")
@click.option("--cpu", is_flag=True, help="Post and poll on the CPU. Implied where no kernel can do it.")
@click.option(
    "-g", "--gid-idx", "gid_index", type=click.IntRange(0),
    help="Index of the NIC's address.  [default: 0 on Ethernet, none on InfiniBand]",
)
@click.option("-c", "--chk", "validate", is_flag=True, help="Validate the contents of every message.")
@port_options
@guarded
def pingpong(host: str | None, **values: Any) -> None:
    """Send messages back and forth with the server at HOST or, without HOST, with one client that connects."""
    valid = _play(host, values)
    if not valid:
        raise click.exceptions.Exit(1)


def _play(host: str | None, values: Values) -> bool:
    from ..bench.pingpong import PingPong, PingPongOptions, show_address

    qp_type = QpType[values["qp_type"].upper()]
    size = values["size"] or (_DATAGRAM if qp_type.datagrams else _MESSAGE)
    names = ("device", "tcp_port", "rx_depth", "iterations", "sl", "gid_index", "validate", "events", "cpu")
    options = PingPongOptions(
        server=host, nic_port=nic_port(values), port=values["ib_port"], mtu=int(values["path_mtu"]),
        qp_type=qp_type, size=size,
        **{name: values[name] for name in names},
    )
    with PingPong(options) as end:
        click.echo(show_address("local", end.own))
        click.echo(show_address("remote", end.meet()))
        played = end.play()
    for line in played.lines():
        click.echo(line)
    if played.problem is not None:
        complain(f"validation failed: {played.problem}")
    return played.problem is None
