"""`gpunetio selftest`: what this machine does, where the device library relies on it."""

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
    help="product (what the device library has here), gpu, sys or none; may be given several times.  [default: all]",
)  # fmt: skip
@click.option(
    "--seconds", type=Seconds(0.01, 3600), default=2.0, show_default=True, help="How long for each fence."
)
@click.option(
    "-w", "--warps", type=click.IntRange(1, 128), help="Warps that post.  [default: 8 on a GPU, 1 on the host]"
)
@click.option("-g", "--gpu", "which", metavar="GPU", default="auto", help="PCI address, CUDA ordinal, or host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@guarded
def litmus(fences: tuple[str, ...], seconds: float, warps: int | None, which: str, as_json: bool) -> None:
    """Does a CPU that sees a doorbell see the WQE and the payload behind it, with each fence before the doorbell?

    Warps fill WQEs and payloads in pinned memory with stamps, and ring; threads of the host read them. The exit status
    is 1 when the device library's own fence lets one through that is torn or stale. On the host target a missing fence
    is not seen either where processors keep the order of stores.
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
                    "lets doorbells overtake what they announce")  # fmt: skip
    if none := by_fence.get("none"):
        said.append("without a fence nothing was seen here" if none.ordered else "without a fence the order is lost")
    return "; ".join(said) or "the library's own fence was not tested"
