"""DOCA's sample of the RDMA library on a GPU as a command: `rdma_client_server_write`."""

from __future__ import annotations

import ipaddress
from typing import Any

import click

from .failures import guarded
from .ports import nic_port, port_options, tcp_port
from .samples import IP_VERSIONS, common, messages, server_address_type


@click.command("rdma_client_server_write", context_settings={"max_content_width": 120})
@click.option("-d", "--device", required=True, metavar="NIC", help="The NIC; `gpunetio devices` names them.")
@click.option("-gpu", "--gpu", "gpu", required=True, metavar="GPU", help="PCI address or number of a GPU, or host.")
@click.option("-gid", "--gid-index", type=click.IntRange(0), default=0, show_default=True,
              help="Index of the NIC's address.")
@click.option("-c", "--client", "server", metavar="IP",
              help="Be the client of the server at IP.  [default: be the server]")
@click.option("-cm", "--use-rdma-cm", "use_cm", is_flag=True, help="Connect by the connection manager.")
@click.option("-p", "--port", "cm_port", type=click.IntRange(1, 65535), default=13579, show_default=True,
              help="Port of the connection manager.")
@click.option("-sa", "--server-addr", metavar="ADDRESS", help="Address of the server's NIC: the client's, with -cm.")
@server_address_type("server_addr_type")
@tcp_port("--tcp-port")
@port_options
@common
@guarded
def rdma_client_server_write(**values: Any) -> None:
    """Write and send from kernels of one process to those of another, with the RDMA library.

    Start the server, then the client with -c. Both take -cm, or neither. Read the program in
    gpunetio/samples/rdma_client_server_write.py.
    """
    if values["server"] == "":
        raise click.UsageError("--client needs the server's address")
    _check_address(values)
    from ..samples.rdma_client_server_write import SampleOptions, run

    names = ("server", "tcp_port", "device", "gid_index", "gpu", "use_cm", "cm_port", "server_addr")
    options = SampleOptions(nic_port=nic_port(values), **{name: values[name] for name in names})
    with messages(values):
        run(options)


def _check_address(values: dict[str, Any]) -> None:
    """Raise a usage error unless the server's address is given if it is needed, and has the right form."""
    address, kind = values["server_addr"], values["server_addr_type"]
    if not values["use_cm"] or values["server"] is None:
        if address is not None:
            raise click.UsageError("--server-addr is for a client with --use-rdma-cm")
        return
    if address is None:
        raise click.UsageError("a client with --use-rdma-cm needs --server-addr")
    try:
        (ipaddress.IPv4Address if IP_VERSIONS[kind] == 4 else ipaddress.IPv6Address)(address)
    except ValueError:
        raise click.UsageError(f"--server-addr {address} is no {kind} address: --server-addr-type says which") from None
