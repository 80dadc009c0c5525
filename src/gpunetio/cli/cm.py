"""Tools of librdmacm as commands: `rping`, `rdma_client`, `rdma_server`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .click_types import Decorated
from .failures import guarded
from .ports import nic_port, port_options


def _port(default: int) -> Callable[[Decorated], Decorated]:
    """Return the option for the port of the connection manager, which is not a TCP port."""
    return click.option(
        "-p", "--port", type=click.IntRange(1, 65535), default=default, show_default=True, metavar="PORT",
        help="RDMA port where the server listens.",
    )


_NIC = click.option("-n", "--nic", "device", metavar="NIC", help="The NIC.  [default: the first that is free]")


@click.command("rping", context_settings={"max_content_width": 120})
@click.option("-s", "--server", "server", is_flag=True, help="Be the server.")
@click.option("-c", "--client", "client", is_flag=True, help="Be the client.")
@click.option("-a", "--server-address", "address", metavar="IP", help="The server's address.")
@click.option("-I", "--source", metavar="IP", help="Which of the NIC's addresses the client uses.")
@_port(7174)
@click.option("-S", "--size", type=click.IntRange(23, 65536), default=64, show_default=True, help="Bytes of a ping.")
@click.option("-C", "--count", type=click.IntRange(0), default=0, help="Pings of the client.  [default: no end]")
@click.option("-V", "--validate", is_flag=True, help="Compare what comes back.")
@click.option("-v", "--verbose", is_flag=True, help="Print each ping.")
@click.option("-P", "--persistent", is_flag=True, help="Serve many clients, until Ctrl+C.")
@_NIC
@port_options
@guarded
def rping(server: bool, client: bool, verbose: bool, **values: Any) -> None:
    """Have a server read and write the client's memory, over a connection of the connection manager.

    The other end may be rdma-core's rping. Both need the same -S. Read the program in gpunetio/samples/rping.py.
    """
    if server == client:
        raise click.UsageError("choose one end: -s for the server, -c for the client")
    if client and values["address"] is None:
        raise click.UsageError("-c needs the server's address: -a IP")
    from ..samples.rping import RpingOptions, connect, serve

    names = ("address", "source", "device", "port", "size", "count", "validate", "persistent")
    options = RpingOptions(
        nic_port=nic_port(values), say=click.echo if verbose else None, **{name: values[name] for name in names}
    )
    (serve if server else connect)(options)


def _message(command: Decorated) -> Decorated:
    """Add the options that both ends of the message have."""
    return _NIC(port_options(_port(7471)(command)))


@click.command("rdma_client", context_settings={"max_content_width": 120})
@click.option("-s", "--server-address", "address", metavar="IP", default="127.0.0.1", show_default=True,
              help="The server's address.")
@_message
@guarded
def rdma_client(**values: Any) -> None:
    """Connect to a server by the connection manager, send it a message, and wait for the answer.

    The server may be rdma-core's rdma_server. Read the program in gpunetio/samples/rdma_message.py.
    """
    if values["address"] == "":
        raise click.UsageError("-s needs the server's address")
    _exchange("client", values)


@click.command("rdma_server", context_settings={"max_content_width": 120})
@click.option("-s", "--server-address", "address", metavar="IP",
              help="Where to listen.  [default: the NIC's first address]")
@_message
@guarded
def rdma_server(**values: Any) -> None:
    """Wait for a client of the connection manager and its message, and answer it.

    The client may be rdma-core's rdma_client. Read the program in gpunetio/samples/rdma_message.py.
    """
    _exchange("server", values)


def _exchange(end: str, values: dict[str, Any]) -> None:
    from ..samples import rdma_message

    names = ("address", "port", "device")
    options = rdma_message.MessageOptions(
        nic_port=nic_port(values), say=click.echo, **{name: values[name] for name in names}
    )
    getattr(rdma_message, end)(options)
