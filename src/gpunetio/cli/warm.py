"""`gpunetio warm`: compile for the host what the commands need, so that no command has to."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context

import click

from .failures import guarded

REST_SECONDS = 600.0  # what is not compiled by then, this process compiles


@click.command()
@guarded
def warm() -> None:
    """Compile for the host what the other commands run there: the NIC and their kernels.

    If the package came with compiled code, that code is for many processors, and this one's is used from now on. Code
    compiled for a GPU is not kept: each run compiles it again.
    """
    from ..jit import prebuilt

    with prebuilt.ignored():
        _warm()


def _warm() -> None:
    start = time.monotonic()
    from ..bench.litmus import Litmus
    from ..bench.loopback import Loopback
    from ..bench.measure import measure
    from ..bench.options import BENCHMARKS, Options
    from ..bench.pingpong import PingPong, PingPongOptions
    from ..dpa import Dpa
    from ..gpu import Gpu
    from ..nic import helping
    from ..nic.engine import compile_engine, compile_extensions
    from ..samples import verbs_dpa
    from ..uverbs.pump_loop import compile_pump
    from ..verbs import open as open_device

    with _kernels_compiled_elsewhere():  # the NIC here, beside them
        compile_engine()
        compile_extensions()
        compile_pump()
        helping.address()
    for benchmark in BENCHMARKS.values():
        with Loopback(Options(benchmark=benchmark, sizes=(64,), gpu="host", iterations=8)) as run:
            measure(run, 0, 64)
    with PingPong(PingPongOptions()) as end:
        end.compile()
    with Gpu("host") as gpu:
        Litmus(gpu, 1).run("product", 0.01)
    with open_device() as ctx, Dpa(ctx) as dpa, dpa.alloc(16) as out:
        verbs_dpa.write_and_wait[1, 1, dpa](*[0] * 11, out).wait(verbs_dpa.KERNEL_SECONDS)
    _post()
    _send_and_receive()
    others = (
        "pingpong", "selftest litmus", "verbs_dpa", "verbs_server_client", "verbs_wait_cq_wr", "simple_receive",
        "simple_send", "send_wait_time", "eth", "packet_processing", "rdma_client_server_write",
    )  # fmt: skip
    click.echo(f"ready: {', '.join(('the NIC', *BENCHMARKS, *others))} ({time.monotonic() - start:.1f} s)")


@contextlib.contextmanager
def _kernels_compiled_elsewhere() -> Iterator[None]:
    """Compile the kernels in a process of its own, on another core; wait for it at the end."""
    other = get_context("spawn").Process(target=_compile_kernels)
    other.start()
    try:
        yield
        other.join(REST_SECONDS)
    finally:
        other.kill()
        other.join()


def _compile_kernels() -> None:
    """Compile the kernels of the benchmarks and the samples."""
    from ..bench.kernels.catalog import KERNELS
    from ..packet_processing.http_server import serve_http
    from ..packet_processing.receive_icmp import receive_icmp
    from ..packet_processing.receive_tcp import receive_tcp
    from ..packet_processing.receive_udp import receive_udp
    from ..samples.rdma_client_server_write import send, serve
    from ..samples.send_wait_time import send_bursts
    from ..samples.simple_receive import receive
    from ..samples.simple_send import send_alone, send_shared

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the terminal interrupts both, and one of them tells
    samples = receive, send_alone, send_shared, send_bursts, send, serve
    for kernel in (*KERNELS.values(), *samples, receive_udp, receive_tcp, receive_icmp, serve_http):
        kernel.compile_for_the_host()


def _post() -> None:
    """Compile the CPU data path: use it once, with a queue pair that is connected to itself."""
    from .. import verbs
    from ..enums import WrOpcode

    with verbs.open() as ctx:
        cq = ctx.create_cq(2)
        qp = ctx.create_pd().create_qp(sq_wr=1, rq_wr=1, send_cq=cq, receive_cq=cq)
        qp.connect(qp)
        qp.post_recv(verbs.RecvWr())
        qp.post_send(verbs.SendWr(opcode=WrOpcode.SEND))
        cq.poll()


def _send_and_receive() -> None:
    """Compile what queues of Ethernet packets on the CPU run: send a packet to a queue of the same NIC."""
    from ..eth import CpuTxq, ManagedRxq
    from ..flow import FlowPort, match
    from ..memory import HostMemory
    from ..verbs import open as open_device

    with open_device() as ctx, ManagedRxq(ctx.create_pd(), 1, 64) as rxq, FlowPort(ctx) as port:
        port.steer(match.everything(), to=rxq)
        region = rxq.pd.register(HostMemory(64))
        with CpuTxq(rxq.pd, 1) as txq:
            txq.send(region)
            txq.completions(timeout=1)
        rxq.receive(timeout=0)
