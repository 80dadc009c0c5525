"""`gpunetio selftest`: test the machine's properties that the device library relies on."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from .failures import guarded
from .seconds import Seconds

if TYPE_CHECKING:
    from ..bench.litmus import Outcome

FENCES = ("product", "gpu", "sys", "none")


@click.group()
def selftest() -> None:
    """Test what the device library relies on, on this machine."""


@selftest.command()
@click.option(
    "--fence", "fences", type=click.Choice(FENCES), multiple=True, metavar="FENCE",
    help="product (the device library's own fence), gpu, sys or none; may be given several times.  [default: all]",
)
@click.option(
    "--seconds", type=Seconds(0.01, 3600), default=2.0, show_default=True, help="Time for each fence."
)
@click.option(
    "-w", "--warps", type=click.IntRange(1, 128), help="Warps that post.  [default: 8 on a GPU, 1 on the host]"
)
@click.option("-g", "--gpu", "which", metavar="GPU", default="auto", help="PCI address, CUDA ordinal, or host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@guarded
def litmus(fences: tuple[str, ...], seconds: float, warps: int | None, which: str, as_json: bool) -> None:
    """Check whether a CPU that sees a doorbell also sees the WQE and the payload, with each fence before the doorbell.

    Warps fill WQEs and payloads in pinned memory with stamps, and ring; host threads read them. The exit status is 1 if
    a doorbell overtakes its WQE or payload despite the device library's own fence. On the host target, processors that
    keep the order of stores show no error without a fence either.
    """
    from ..bench.litmus import Litmus
    from ..gpu import Gpu

    with Gpu(which) as gpu:
        test = Litmus(gpu, warps or (8 if gpu.target == "cuda" else 1))
        if not as_json:
            click.echo(f"{test.warps} warp(s) of {gpu.warp} on {gpu.name}, {test.readers} reader(s)")
            click.echo(_row("fence", "posts", "torn", "stale", "posts/s"))
        outcomes = []
        for fence in dict.fromkeys(fences or FENCES):
            outcomes.append(test.run(fence, seconds))
            if not as_json:
                click.echo(_line(outcomes[-1]))
        where = {"gpu": gpu.name, "target": gpu.target, "warps": test.warps, "readers": test.readers}
    passed = all(one.ordered for one in outcomes if one.fence == "product")
    if as_json:
        click.echo(json.dumps({**where, "passed": passed, "fences": [dataclasses.asdict(one) for one in outcomes]}))
    else:
        click.echo(_verdict(outcomes))
    if not passed:
        raise click.exceptions.Exit(1)


def _row(fence: str, *numbers: str) -> str:
    return f"{fence:<10}" + "".join(f"{number:>16}" for number in numbers)


def _line(one: Outcome) -> str:
    return _row(one.fence, str(one.posts), str(one.torn), str(one.stale), f"{one.rate:.4g}")


def _verdict(outcomes: list[Outcome]) -> str:
    by_fence = {one.fence: one for one in outcomes}
    said = []
    if product := by_fence.get("product"):
        said.append("passed: the library's fence keeps the order" if product.ordered else "FAILED: the library's fence "
                    "lets doorbells overtake their WQEs")
    if none := by_fence.get("none"):
        said.append("without a fence, no error was seen" if none.ordered else "without a fence, the order is lost")
    return "; ".join(said) or "the library's own fence was not tested"
