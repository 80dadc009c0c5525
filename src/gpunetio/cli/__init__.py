"""The `gpunetio` command."""

from __future__ import annotations

import gc
import sys

import click

from .benchmarks import benchmark_commands
from .cm import rdma_client, rdma_server, rping
from .conformance import conformance
from .device_lib import device_lib
from .devices import devices
from .dma_samples import dma_local_copy, dma_memcpy
from .doctor import doctor
from .eth import eth
from .eth_samples import send_wait_time, simple_receive, simple_send
from .failures import INTERRUPTED, OneLineUsage
from .flow import flow
from .nccl_plugin import nccl_plugin
from .packet_processing import packet_processing
from .pingpong import pingpong
from .rdma import rdma
from .rdma_client_server_write import rdma_client_server_write
from .replay import replay
from .run import drop_in, run
from .samples import verbs_server_client, verbs_wait_cq_wr
from .selftest import selftest
from .show import show
from .stat import stat
from .topo import topo
from .verbs_dpa import verbs_dpa
from .version import version_option
from .warm import warm


@click.group(cls=OneLineUsage, context_settings={"help_option_names": ["-h", "--help"]})
@version_option("--version")
def app() -> None:
    """DOCA GPUNetIO in Python: kernels that drive a network card, with benchmarks and diagnostics."""


for _command in (
    *benchmark_commands(), conformance, device_lib, devices, dma_local_copy, dma_memcpy, doctor, drop_in, eth, flow,
    nccl_plugin, packet_processing, pingpong, rdma, rdma_client, rdma_client_server_write, rdma_server, replay, rping,
    run, selftest, send_wait_time, show, simple_receive, simple_send, stat, topo, verbs_dpa, verbs_server_client,
    verbs_wait_cq_wr, warm,
):
    app.add_command(_command)


def main() -> None:
    """Run the `gpunetio` script."""
    from .. import log

    log.configure()
    try:
        app(prog_name="gpunetio")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # otherwise the interpreter collects garbage at its end: a third of a second for 130,000 objects
