"""`gpunetio warm`: compile for the host what the commands need, so that no command has to."""

from __future__ import annotations

import time

import click

from .failures import guarded


@click.command()
@guarded
def warm() -> None:
    """Compile for the host what the other commands run there: the NIC and their kernels.

    Code compiled for a GPU is not kept: each run compiles it again.
    """
    start = time.monotonic()
    from ..bench.litmus import Litmus
    from ..bench.loopback import Loopback
    from ..bench.measure import measure
    from ..bench.options import BENCHMARKS, Options
    from ..bench.pingpong import PingPong, PingPongOptions
    from ..dpa import Dpa
    from ..gpu import Gpu
    from ..samples import verbs_dpa
    from ..verbs import open as open_device

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
    others = "pingpong", "selftest litmus", "verbs_dpa", "verbs_server_client", "verbs_wait_cq_wr"
    click.echo(f"ready: {', '.join(('the NIC', *BENCHMARKS, *others))} ({time.monotonic() - start:.1f} s)")


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
