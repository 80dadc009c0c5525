"""The options that all benchmarks share, and what they make of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .ports import MTU, nic_port, port_options, tcp_port

if TYPE_CHECKING:
    from ..bench.options import Benchmark, Options

# Two-letter words of the original tools, which are long options behind one dash.
_WORDS = {"-gid": "--gid-index", "-gpu": "--gpu"}


class BenchmarkCommand(click.Command):
    """A command that also takes the originals' -gid and -gpu."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell those as click can."""
        return super().parse_args(ctx, [_WORDS.get(word, word) for word in args])


_COMMON = (
    click.option("--loopback", is_flag=True, help="Run both ends in this process."),
    click.option(
        "-c", "--client", "server", metavar="HOST",
        help="Be the client of the server at HOST.  [default: be the server, unless --loopback]",
    ),
    tcp_port("--port"),
    click.option(
        "-d", "--device", "--ib-dev", metavar="NIC",
        help="The NIC; `gpunetio devices` names them.  [default: the first that no other process uses]",
    ),
    port_options,
    MTU,
    click.option(
        "-g", "--gpu", metavar="GPU",
        help="PCI address or number of a GPU, or host. Also -gpu.  [default: the first GPU, or the host]",
    ),
    click.option(
        "--target", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
        help="Where kernels run: on CPU threads or on a CUDA GPU.",
    ),
    click.option(
        "-s", "--size", "sizes", type=click.IntRange(1, 1 << 30), multiple=True,
        help="Message size in bytes; may be given several times.  [default: those of the original tool]",
    ),
    click.option("-a", "--all", "all_sizes", is_flag=True, help="All message sizes from 2 to 2^23."),
    click.option(
        "-i", "--iters", "iterations", type=click.IntRange(1), help="Messages of each size.  [default: 2048]"
    ),
    click.option(
        "-D", "--duration", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
        help="Measure each size for so long, instead of counting messages.",
    ),
    click.option(
        "--payload", type=click.Path(path_type=Path), metavar="FILE",
        help="Send the bytes of FILE, once, cut into messages of each size; compare SHA-256 at the receiver. With two "
        "processes the sender needs it: the client, or get_bw's server.",
    ),
    click.option(
        "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Draw the results: FILE.png, .svg or .pdf. Needs the extra 'plot'.",
    ),
    click.option(
        "-l", "-x", "--gid-index", type=click.IntRange(0), default=0, show_default=True,
        help="The NIC's address. Also -gid.",
    ),
    click.option(
        "-p", "-n", "--nic-handler", type=click.Choice(["0", "1", "2", "6"]), default="0", show_default=True,
        help="How kernels ring the NIC: 0 auto, 2 GPU doorbell. (1, CPU proxy, and 6, BlueFlame: in a later release.)",
    ),
    click.option(
        "-r", "--send-dbr", type=click.Choice(["0", "1", "2"]), default="0", show_default=True,
        help="0: the NIC keeps a doorbell record. 1: it needs none. (2, emulated: in a later release.)",
    ),
    click.option(
        "-e", "--exec-scope", "--exec-shared", type=click.Choice(["0", "1"]), default="0", show_default=True,
        help="Who posts together: 0, a thread for itself. (1, a warp: in a later release.)",
    ),
    click.option(
        "--tx-depth", "depth", type=click.IntRange(2, 1 << 15), default=1024, show_default=True,
        help="Slots of a send queue; rounded up to a power of two.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table."),
)  # fmt: skip
_BANDWIDTH = (
    click.option(
        "-q", "--qp", "qps", type=click.IntRange(1, 64),
        help="Queue pairs that the messages are spread over.  [default: 1]",
    ),
    click.option(
        "-t", "--thread", "--threads", "threads", type=click.IntRange(1, 1024),
        help="Kernel threads.  [default: 512 on a GPU; on the host, what suits the cores]",
    ),
    click.option(
        "--report_gbits", "--report-gbits", "gbits", is_flag=True, help="Bandwidth in Gb/sec instead of MiB/sec."
    ),
)  # fmt: skip


def benchmark_options(latency: bool) -> Callable[[Any], Any]:
    """Decorate a command with its options."""

    def decorate(command: Any) -> Any:
        for option in reversed(_COMMON if latency else _COMMON + _BANDWIDTH):
            command = option(command)
        return command

    return decorate


def make_options(benchmark: Benchmark, values: dict[str, Any]) -> Options:
    """`Options` from the values that click found."""
    from ..bench.options import ALL_SIZES, ITERATIONS, Options

    _check_combination(values, benchmark.latency)
    _refuse_what_comes_later(values)
    asked = {name: values.get(name) for name in ("iterations", "duration", "qps")}
    asked["sizes"] = values["sizes"] or values["all_sizes"]
    return Options(
        benchmark=benchmark,
        sizes=values["sizes"] or (ALL_SIZES if values["all_sizes"] else benchmark.sizes),
        device=values["device"],
        nic_port=nic_port(values),
        gpu=_gpu(values["gpu"], values["target"]),
        gid_index=values["gid_index"],
        nic_handler=int(values["nic_handler"]),
        no_dbr=values["send_dbr"] == "1",
        iterations=values["iterations"] or ITERATIONS,
        duration=values["duration"],
        qps=values.get("qps") or 1,
        depth=values["depth"],
        threads=values.get("threads"),
        payload=values["payload"],
        server=values["server"],
        tcp_port=values["tcp_port"],
        asked=frozenset(name for name, value in asked.items() if value),
    )


def _check_combination(values: dict[str, Any], latency: bool) -> None:
    if values["server"] == "":
        raise click.UsageError("--client needs the server's address")
    for what, first, second in (
        ("--loopback and --client", values["loopback"], values["server"]),
        ("--loopback, which sends no packets, and --pcap", values["loopback"], values["capture"]),
        ("--size and --all", values["sizes"], values["all_sizes"]),
        ("--duration and --iters", values["duration"], values["iterations"]),
        ("--duration and --payload, which sends a file once,", values["duration"], values["payload"]),
        ("--json and --report_gbits", values["as_json"], values.get("gbits")),
    ):
        if first and second:
            raise click.UsageError(f"{what} exclude each other")
    if latency and values["plot"] and not (values["loopback"] or values["server"]):
        raise click.UsageError("--plot of a latency test belongs to the client, which measures")


def _refuse_what_comes_later(values: dict[str, Any]) -> None:
    from ..errors import NotSupportedError

    if values["exec_scope"] == "1":
        raise NotSupportedError("-e 1: operations of a whole warp come later; use -e 0")
    if values["send_dbr"] == "2":
        raise NotSupportedError("-r 2: emulation of queues without a doorbell record comes later; use -r 0 or -r 1")


def _gpu(gpu: str | None, target: str) -> str:
    """What `Gpu` is to open."""
    if gpu is not None:
        if target != "auto" and (gpu == "host") != (target == "cpu"):
            raise click.UsageError(f"--gpu {gpu} contradicts --target {target}")
        return gpu
    if target != "cuda":
        return "host" if target == "cpu" else "auto"
    from ..errors import NotSupportedError
    from ..gpu import gpu_list

    if (first := gpu_list()[0]) == "host":
        raise NotSupportedError("--target cuda: this machine has no CUDA device; use --target cpu")
    return first
