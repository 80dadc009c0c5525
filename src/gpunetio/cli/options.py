"""The options that all benchmarks share, and their conversion to `Options`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .click_types import Decorated, Values
from .ports import MTU, nic_port, port_options, tcp_port
from .seconds import Seconds

if TYPE_CHECKING:
    from ..bench.options import Benchmark, Options

# Two-letter options of the original tools: long options with a single dash.
_WORDS = {"-gid": "--gid-index", "-gpu": "--gpu"}


class BenchmarkCommand(click.Command):
    """A command that also takes -gid and -gpu, as the original tools do."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell -gid and -gpu as click expects them."""
        return super().parse_args(ctx, [_WORDS.get(word, word) for word in args])


class _Sizes(click.ParamType):
    """Message sizes, separated by commas."""

    name = "sizes"
    _size = click.IntRange(1, 1 << 30)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the sizes."""
        return tuple(self._size.convert(size.strip(), param, ctx) for size in value.split(","))


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
        "-s", "--size", "sizes", type=_Sizes(), multiple=True, metavar="BYTES[,BYTES…]",
        help="Message sizes, 1 to 2^30; may be given several times.  [default: those of the original tool]",
    ),
    click.option("-a", "--all", "all_sizes", is_flag=True, help="Measure all powers of two from 2 to 2^23."),
    click.option(
        "-i", "--iters", "iterations", type=click.IntRange(1), help="Messages of each size.  [default: 2048]"
    ),
    click.option(
        "-D", "--duration", type=Seconds(0, min_open=True), metavar="SECONDS",
        help="Measure each size for this time instead of a number of messages.",
    ),
    click.option(
        "--payload", type=click.Path(path_type=Path), metavar="FILE",
        help="Send FILE once, in messages of each size, and compare its SHA-256 at the receiver. With two "
        "processes, give it to the sender: the client, or get_bw's server.",
    ),
    click.option(
        "--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Draw the results: FILE.png, .svg or .pdf. Needs the extra 'plot'.",
    ),
    click.option(
        "--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Record when operations begin, are posted and complete, which costs time. Write FILE in the "
        "Trace Event Format, for chrome://tracing and ui.perfetto.dev.",
    ),
    click.option(
        "--trace-plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Draw the trace: FILE.png, .svg or .pdf. Needs the extra 'plot'.",
    ),
    click.option(
        "--trace-ops", type=click.IntRange(1, 1 << 16), metavar="N",
        help="Record the first N operations of each thread and size.  [default: 1024 divided by the threads]",
    ),
    click.option(
        "-p", "-n", "--nic-handler", type=click.Choice(["0", "1", "2", "6"]), default="0", show_default=True,
        help="How kernels ring the NIC: 0 auto, 1 CPU proxy, 2 GPU doorbell, 6 BlueFlame (write_lat only).",
    ),
    click.option(
        "-r", "--send-dbr", type=click.Choice(["0", "1", "2"]), default="0", show_default=True,
        help="Who keeps the doorbell record: 0 the kernel; 1 nobody, as the NIC needs none; 2 a CPU thread.",
    ),
    click.option(
        "-e", "--exec-scope", "--exec-shared", type=click.Choice(["0", "1", "2"]), default="0", show_default=True,
        help="Who posts together: 0 each thread alone, 1 a warp, 2 a block (not write_bw and latencies).",
    ),
    click.option(
        "--queue-memory", type=click.Choice(["auto", "gpu", "cpu_gpu"]), default="auto", show_default=True,
        help="Where queues lie: cpu_gpu is for systems without GPUDirect RDMA.",
    ),
    click.option(
        "--payload-memory", type=click.Choice(["host", "gpu"]), default="host", show_default=True,
        help="Where the data lie: pinned host memory, or GPU memory.",
    ),
    click.option(
        "--tx-depth", "depth", type=click.IntRange(2, 1 << 15), default=2048, show_default=True,
        help="Slots of a send queue; rounded up to a power of two.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table."),
)
_BANDWIDTH = (
    click.option(
        "-q", "--qp", "qps", type=click.IntRange(1, 64),
        help="Queue pairs that the messages are spread over.  [default: 1]",
    ),
    click.option(
        "-t", "--thread", "--threads", "threads", type=click.IntRange(1, 1024),
        help="Kernel threads.  [default: 512 on a GPU; on the host, depends on the cores]",
    ),
    click.option(
        "--report_gbits", "--report-gbits", "gbits", is_flag=True, help="Bandwidth in Gb/sec instead of MiB/sec."
    ),
)
_GID_INDEX = {"type": click.IntRange(0), "default": 0, "show_default": True, "help": "Index of its address. Also -gid."}
_ONE_SIDED = (click.option("-l", "-x", "--gid-index", **_GID_INDEX),)  # type: ignore[arg-type]
_TWO_SIDED = (
    click.option("-l", "--gid-index", **_GID_INDEX),  # type: ignore[arg-type]
    click.option(
        "-x", "--inline", is_flag=True,
        help="Put data into the completions of receives: sizes of up to 32 bytes.  [default sizes: 1, 4, 8, … 30, 32]",
    ),
)


def benchmark_options(latency: bool, two_sided: bool) -> Callable[[Decorated], Decorated]:
    """Decorate a command with the options of its benchmark."""

    def decorate(command: Decorated) -> Decorated:
        options = _COMMON + (_TWO_SIDED if two_sided else _ONE_SIDED) + (() if latency else _BANDWIDTH)
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def make_options(benchmark: Benchmark, values: Values) -> Options:
    """Return `Options` from the values that click parsed."""
    from ..bench.options import ALL_SIZES, INLINE_SIZES, ITERATIONS, Options
    from ..enums import ExecScope, MemType, NicHandler, SendDbrModeExt

    _check_combination(values, benchmark)
    inline = values.get("inline", False)
    sizes = tuple(chain.from_iterable(values["sizes"]))
    chosen = sizes or (ALL_SIZES if values["all_sizes"] else INLINE_SIZES if inline else ())
    asked = {name: values.get(name) for name in ("iterations", "duration", "qps", "inline")}
    asked["sizes"] = chosen
    traced = values["trace_ops"] or 0 if values["trace"] or values["trace_plot"] else None
    options = Options(
        benchmark=benchmark,
        sizes=chosen or benchmark.sizes,
        device=values["device"],
        nic_port=nic_port(values),
        gpu=_gpu(values["gpu"], values["target"]),
        queue_memory=values["queue_memory"],
        payload_memory=MemType.GPU if values["payload_memory"] == "gpu" else MemType.CPU_GPU,
        gid_index=values["gid_index"],
        nic_handler=NicHandler(int(values["nic_handler"])),
        send_dbr_mode=SendDbrModeExt(int(values["send_dbr"])),
        scope=ExecScope(int(values["exec_scope"])),
        iterations=values["iterations"] or ITERATIONS,
        duration=values["duration"],
        qps=values.get("qps") or 1,
        depth=values["depth"],
        threads=values.get("threads"),
        inline=inline,
        payload=values["payload"],
        traced=traced,
        server=values["server"],
        tcp_port=values["tcp_port"],
        asked=frozenset(name for name, value in asked.items() if value),
    )
    options.check()
    return options


def _check_combination(values: Values, benchmark: Benchmark) -> None:
    if values["server"] == "":
        raise click.UsageError("--client needs the server's address")
    for what, first, second in (
        ("--loopback and --client", values["loopback"], values["server"]),
        ("--loopback, which sends no packets, and --pcap", values["loopback"], values["capture"]),
        ("--loopback, which sends no packets, and --faults", values["loopback"], values["faults"]),
        ("--loopback, which needs no wire, and --wire udp", values["loopback"], values["wire"] != "auto"),
        ("--size and --all", values["sizes"], values["all_sizes"]),
        ("--duration and --iters", values["duration"], values["iterations"]),
        ("--duration and --payload, which sends a file once,", values["duration"], values["payload"]),
        ("--inline and --all", values.get("inline"), values["all_sizes"]),
        ("--json and --report_gbits", values["as_json"], values.get("gbits")),
    ):
        if first and second:
            raise click.UsageError(f"{what} exclude each other")
    if values["loopback"] or values["server"]:
        return
    if benchmark.latency and values["plot"]:
        raise click.UsageError("--plot of a latency test belongs to the client, which measures")
    for option in ("trace", "trace_plot"):
        if values[option] and not benchmark.answers:
            raise click.UsageError(
                f"--{option.replace('_', '-')} belongs to the client: the server of {benchmark.name} runs no kernel"
            )


def _gpu(gpu: str | None, target: str) -> str:
    """Return the argument for `Gpu`."""
    if gpu is None and target != "cuda":
        return "host" if target == "cpu" else "auto"
    from ..errors import NotSupportedError
    from ..gpu.device import WITHOUT_CUDA, gpu_list

    if gpu is not None:
        if target != "auto" and (gpu in WITHOUT_CUDA) != (target == "cpu"):
            raise click.UsageError(f"--gpu {gpu} contradicts --target {target}")
        return gpu
    if (first := gpu_list()[0]) in WITHOUT_CUDA:
        raise NotSupportedError("--target cuda: this machine has no CUDA device; use --target cpu")
    return first
