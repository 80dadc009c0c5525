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
from .failures import INTERRUPTED
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
from .subjects import Subjects
from .topo import topo
from .verbs_dpa import verbs_dpa
from .version import version_option
from .warm import warm


@click.group(cls=Subjects, context_settings={"help_option_names": ["-h", "--help"]})
@version_option("--version")
def app() -> None:
    """DOCA GPUNetIO in Python: kernels that drive a network card, with benchmarks and diagnostics."""


# The README's tables have the same subjects. The texts fit 80 columns.
app.add_subject("Start here", {
    run: "Run a program of libibverbs on software NICs.",
    doctor: "Check if this machine is ready for GPU networking.",
})
app.add_subject("NICs", {
    devices: "Describe the NICs as ibv_devinfo does.",
    topo: "Show how GPUs and NICs are connected by PCIe.",
    stat: "Show the counters of running software NICs.",
    show: "List the objects of running software NICs.",
    flow: "Show the flow tables of running software NICs.",
})
app.add_subject("Benchmarks", dict.fromkeys(benchmark_commands()))
app.add_subject("Counterparts of rdma-core's programs", {
    pingpong: "Send back and forth, as ibv_rc_pingpong does.",
    rping: "Have a server read and write the client's memory.",
    rdma_client: "Connect to a server, and exchange a message.",
    rdma_server: "Wait for a client, and exchange a message.",
})
app.add_subject("Packets", {
    packet_processing: "Count packets, answer pings and serve HTTP.",
    replay: "Replay a pcap file to a software NIC.",
})
app.add_subject("Samples", {
    verbs_server_client: "SEND, WRITE or READ with DOCA Verbs on the CPU.",
    verbs_wait_cq_wr: "Hold a SEND back until another QP has completed.",
    verbs_dpa: "Exchange RDMA WRITEs between kernels on two DPAs.",
    rdma: "Read, write and send with DOCA RDMA on the CPU.",
    rdma_client_server_write: "Write and send with DOCA RDMA from kernels.",
    dma_memcpy: "Copy between CPU and GPU with DOCA DMA.",
    dma_local_copy: "Copy within host memory with DOCA DMA.",
    eth: "Send and receive Ethernet packets on the CPU.",
    simple_receive: "Receive UDP packets in a kernel, and count them.",
    simple_send: "Send UDP packets from a kernel, and count them.",
    send_wait_time: "Send packets at times that the NIC waits for.",
})
app.add_subject("Other launchers, libraries and compilers", {
    drop_in: "Print the environment that `gpunetio run` sets.",
    nccl_plugin: "Print the path of a plugin for NCCL's GIN.",
    device_lib: "Write the device functions for CUDA C++.",
})
app.add_subject("Checks and compilation", {
    conformance: "Check that a NIC does what DOCA Verbs promises.",
    selftest: "Test what the device library relies on.",
    warm: "Compile what the other commands run on the host.",
})


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
