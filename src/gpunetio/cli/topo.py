"""`gpunetio topo`: how GPUs and NICs are connected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .failures import guarded, writing
from .machine import FILE, machine_options, opened, options_at_fault, terminal_width

if TYPE_CHECKING:
    from ..doctor import Finding, Machine
    from ..doctor.machine.devices import Gpu, Nic
    from ..doctor.report.tree import Node

_COLOURS = {"GPU": "green", "NIC": "cyan", "switch": "bright_blue"}
_EMPTY = "This machine has neither an NVIDIA GPU nor an RDMA NIC."


@click.command()
@click.option("--svg", type=FILE, metavar="FILE", help="Also draw it as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@click.option("--all", "everything", is_flag=True, help="Show all PCI devices, not only the paths to GPUs and NICs.")
@machine_options
@guarded
def topo(
    svg: Path | None, as_json: bool, everything: bool, gpu: str, nic: str, replay: Path | None, root: str | None
) -> None:
    """Show how GPUs and NICs are connected: the PCIe tree, all distances, and the best NIC for each GPU.

    Distances are those of `nvidia-smi topo -m`, computed from sysfs: PIX (at most one PCIe switch between them), PXB
    (several), PHB (their host bridge), NODE (two host bridges of a NUMA node), SYS (the link between NUMA nodes).
    """
    from ..doctor import Wanted
    from ..doctor.machine import topology
    from ..doctor.report import picture, tree
    from ..doctor.report.text import hanging

    machine = opened(replay, root, Wanted(gpu, nic))
    with options_at_fault():
        machine.require_wanted()
    nodes, matrix = tree.build(machine, everything), topology.matrix(machine)
    if svg and nodes:
        with writing("--svg", svg):
            svg.write_bytes(picture.draw(nodes, matrix))
    if as_json:
        click.echo(json.dumps(_document(machine, nodes, matrix), indent=1))
        return
    if not machine.gpus and not machine.nics:
        empty = _EMPTY + (f" {svg} was not written." if svg and not nodes else "")
        for line in hanging("", empty, terminal_width()):
            click.echo(line)
    for line in _lines(machine, nodes, matrix):
        click.echo(line)


def _lines(machine: Machine, nodes: tuple[Node, ...], matrix: dict[str, dict[str, str]]) -> Iterator[str]:
    """Return all lines to print. Click removes the colours if stdout is not a terminal."""
    from ..doctor.report.tree import rows, table

    width = terminal_width()
    for above, node in rows(nodes):
        room = max(width - len(above), 2)
        label = node.label if len(node.label) <= room else node.label[: room - 1] + "…"
        yield above + click.style(label, fg=_COLOURS.get(node.kind))
    for part in (table(matrix, width), _advice(machine, width), _agreement(machine, width)):
        if part:
            yield from ("", *part)


def _advice(machine: Machine, width: int) -> list[str]:
    """Return the best NIC for each GPU and why, and another NIC if the best one has no active port."""
    from ..doctor.machine import topology
    from ..doctor.report.text import hanging

    lines: list[str] = []
    for gpu in machine.gpus:
        nic = topology.best_nic(machine, gpu)
        said = f"best with {_why(machine, gpu, nic)}" if nic else "no NIC with an RDMA device"
        other = topology.next_active(machine, gpu)
        more = f"; next with an active port: {_why(machine, gpu, other)}" if other and other != nic else ""
        lines += hanging(f"{gpu.name}: ", said + more, width)
    return lines


def _why(machine: Machine, gpu: Gpu, nic: Nic) -> str:
    """Describe a NIC, its distance, and whether a port is active."""
    from ..doctor.checks.topology import BETWEEN
    from ..doctor.machine import topology

    apart = topology.apart(machine, gpu, nic)
    port = "port active" if topology.active(machine, nic) else "no active port"
    return f"{nic.name} ({f'{apart}: {BETWEEN[apart]}' if apart else 'distance unknown'}; {port})"


def _agreement(machine: Machine, width: int) -> list[str]:
    """Return what `nvidia-smi` says about the same distances."""
    from ..doctor.report.text import hanging

    if not machine.gpus:
        return []
    findings = _findings(machine)
    if all(finding.status == "OK" for finding in findings):
        return ["nvidia-smi topo -m agrees."]
    differ = [f"{f.gpu} {f.summary}" for f in findings if f.status == "WARN"]
    if not differ:
        return list(hanging("Not compared with nvidia-smi: ", findings[0].summary, width))
    return [line for one in differ for line in hanging("nvidia-smi topo -m differs: ", one, width)]


def _findings(machine: Machine) -> list[Finding]:
    from ..doctor.checks.topology import agrees

    return list(agrees.ask(machine))


def _document(machine: Machine, nodes: tuple[Node, ...], matrix: dict[str, dict[str, str]]) -> dict[str, object]:
    from ..doctor.machine import topology

    return {
        "gpus": [
            {
                "name": gpu.name, "address": gpu.address, "model": gpu.model, "numa": gpu.pci.numa if gpu.pci else None,
                "best_nic": best.name if (best := topology.best_nic(machine, gpu)) else None,
            }
            for gpu in machine.gpus
        ],
        "nics": [
            {
                "name": nic.name, "address": nic.address, "interfaces": nic.interfaces, "rdma": nic.rdma,
                "numa": nic.pci.numa if nic.pci else None, "active": topology.active(machine, nic),
            }
            for nic in machine.nics
        ],
        "matrix": matrix,
        "nvidia_smi": [{"gpu": f.gpu, "status": f.status, "summary": f.summary} for f in _findings(machine)],
        "tree": [dataclasses.asdict(node) for node in nodes],
    }
