"""`gpunetio replay`: send the packets of a capture file to a software NIC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .failures import guarded
from .seconds import Seconds

if TYPE_CHECKING:
    from ..bench.replay import Result


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--address", metavar="IP|LID",
    help="Replay the packets to this address.  [default: the one with most requests]",
)
@click.option(
    "--frames", is_flag=True,
    help="Replay all Ethernet frames to a receive queue, instead of RDMA packets to queue pairs.",
)
@click.option("--fast", is_flag=True, help="Replay as fast as possible instead of at the packets' times.")
@click.option(
    "--timeout", type=Seconds(0, min_open=True), default=600.0, show_default=True, metavar="SECONDS",
    help="Give up if the replay takes longer.",
)
@click.option(
    "-d", "--device", "--ib-dev", "device", metavar="NIC", default="soft0", show_default=True,
    help="The software NIC to open.",
)
@click.option(
    "--pcap", "capture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write all packets that the NIC takes and sends to FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@guarded
def replay(
    file: Path, address: str | None, frames: bool, fast: bool, timeout: float, device: str, capture: Path | None,
    as_json: bool,
) -> None:
    """Replay the RoCE v2 or InfiniBand packets of a pcap file to a software NIC, or all its Ethernet frames.

    The NIC has the address, queue pairs and memory regions that the packets ask for. At the end, the command reports
    how many packets the NIC took, answered, and refused, and why.
    """
    from ..bench.replay import ReplayOptions, run

    if frames and address is not None:
        raise click.UsageError("--frames replays to all addresses: leave --address out")
    result = run(ReplayOptions(file, address, fast, timeout, device, capture, frames))
    if as_json:
        click.echo(json.dumps(result.document()))
        return
    for line in _lines(result):
        click.echo(line)


def _lines(result: Result) -> list[str]:
    from ..bench.replay import ALL, shown

    done = result.replayed
    rows = [
        ("records in the file", result.records),
        *((f"  {reason}", count) for reason, count in result.skipped.items()),
        *([] if result.address == ALL else [("  to other addresses", result.elsewhere)]),
        (f"replayed to {shown(result.address)}", done.packets),
        ("  accepted", done.accepted),
        *((f"  refused: {name}", count) for name, count in done.refused.items()),
        ("answers", done.answered),
    ]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label.ljust(width)}  {count}" for label, count in rows]
    queues = "a receive queue" if result.address == ALL else f"{result.queues} queue pairs"
    lines.append(f"{done.packets} packets in {done.seconds:.3f} s, {queues}")
    return lines + [f"why: {reason}" for reason in result.reasons]
