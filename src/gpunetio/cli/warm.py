"""`gpunetio warm`: compile the host code of all commands, so that no command has to compile it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Protocol

import click

from .failures import guarded

REST_SECONDS = 600.0  # afterwards, this process compiles what is missing
MOST_PROCESSES = 6  # more would idle until the slowest function is compiled


class Names(Protocol):
    """A queue of names."""

    def get(self) -> str:
        """Return the next name, as soon as there is one."""
        ...


@click.command()
@guarded
def warm() -> None:
    """Compile for the host what the other commands run there: the NIC and their kernels.

    If the package came with compiled code, that code is for many processors; code compiled for this one is used from
    now on. Code compiled for a GPU is not kept: each run compiles it again.
    """
    from ..jit import prebuilt

    with prebuilt.ignored():
        _warm()


def _warm() -> None:
    start = time.monotonic()
    with _all_compiled_elsewhere():  # and meanwhile imported here
        from ..bench.litmus import Litmus
        from ..bench.loopback import Loopback
        from ..bench.measure import measure
        from ..bench.options import BENCHMARKS, Options
        from ..bench.pingpong import PingPong, PingPongOptions
        from ..dpa import Dpa
        from ..gpu import Gpu
        from ..samples import verbs_dpa
        from ..verbs import open as open_device
    for compile_one in _all_that_is_compiled().values():
        compile_one()  # the code is in the cache by now
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
    )
    click.echo(f"ready: {', '.join(('the NIC', *BENCHMARKS, *others))} ({time.monotonic() - start:.1f} s)")


@contextlib.contextmanager
def _all_compiled_elsewhere() -> Iterator[None]:
    """Compile in separate processes, one per core, because LLVM uses one. Wait for them at the end."""
    made = get_context("spawn")
    names = made.SimpleQueue()
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    others = [made.Process(target=_compile, args=(names,)) for _ in range(count)]
    try:
        for other in others:
            other.start()
        for name in (*_all_that_is_compiled(), *[""] * len(others)):
            names.put(name)
        yield
        end = time.monotonic() + REST_SECONDS
        for other in others:
            other.join(max(0.0, end - time.monotonic()))
    finally:
        for other in others:
            if other.pid is not None:
                other.kill()
                other.join()


def _compile(names: Names) -> None:
    """Compile the functions with these names, until an empty name."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl+C reaches all processes, and the parent reports it
    known = _all_that_is_compiled()
    while name := names.get():
        known[name]()


def _all_that_is_compiled() -> dict[str, Callable[[], object]]:
    """Return functions that compile the NIC and the kernels of benchmarks and samples, by name, the slowest first."""
    from ..bench.kernels.catalog import KERNELS
    from ..bench.kernels.pingpong import pingpong
    from ..bench.litmus import post_stamped
    from ..nic.host import helping
    from ..nic.host.engine import compile_engine
    from ..nic.state import extensions
    from ..packet_processing.http_server import serve_http
    from ..packet_processing.receive_icmp import receive_icmp
    from ..packet_processing.receive_tcp import receive_tcp
    from ..packet_processing.receive_udp import receive_udp
    from ..samples.rdma_client_server_write import send, serve
    from ..samples.send_wait_time import send_bursts
    from ..samples.simple_receive import receive
    from ..samples.simple_send import send_alone, send_shared
    from ..samples.verbs_dpa import write_and_wait
    from ..uverbs.pump_loop import compile_pump

    samples = pingpong, receive, serve, send, write_and_wait, send_shared, send_bursts, send_alone, post_stamped
    return {
        "engine": compile_engine, serve_http.name: serve_http.compile_for_the_host,
        **{extension.name: extension.load for extension in extensions.ALL}, "helping": helping.address,
        **{kernel.name: kernel.compile_for_the_host
           for kernel in (receive_icmp, *KERNELS.values(), receive_tcp, receive_udp, *samples)},
        "pump": compile_pump,
    }


def _post() -> None:
    """Compile the data path of the CPU by using it once, on a queue pair that is connected to itself."""
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
    """Compile the data path of Ethernet queues on the CPU by sending a packet to a queue of the same NIC."""
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
