"""All checks, and how they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..finding import Check, Finding, Report, Use, skip
from ..machine import nvidia_driver, nvidia_smi, topo_m
from ..machine.devices import Machine, Wanted
from ..machine.host import Host
from ..machine.nics import is_nvidia
from ..machine.topology import pairs
from ..probes.trying import run_probes

_log = logging.getLogger("gpunetio.doctor")
_AT_ONCE = 8  # checks; they mostly wait for commands

# The slowest questions, for which most checks wait. They start first and run at the same time.
_SLOW: tuple[Callable[[Machine], object], ...] = (
    lambda machine: nvidia_smi.query(machine.host), lambda machine: topo_m.query(machine.host), nvidia_driver.cuda,
)


def all_checks() -> tuple[Check, ...]:
    """Return every check, in the order of reports and of the set-up guide."""
    from . import (
        acs,
        cuda,
        gpu,
        host,
        memory,
        nic,
        nic_settings,
        pcie,
        port,
        rdma,
        software,
        topology,
    )

    modules = (
        gpu, cuda, memory, nic, nic_settings, rdma, port,
        topology, acs, pcie, host, software,
    )
    return tuple(one for module in modules for one in module.CHECKS)


def examine(host: Host, wanted: Wanted | None = None, probing: bool = False) -> Report:
    """Run all checks, several at once, and with `probing` also probe the best pair of a GPU and a NIC.

    Raises InvalidValueError if the machine does not have the GPU or the NIC that `wanted` names.
    """
    machine = Machine(host, wanted or Wanted())
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor") as pool:
        for ask in _SLOW:
            pool.submit(ask, machine)
        machine.require_wanted()
        found = pool.map(lambda one: _ask(one, machine), all_checks())
        findings = [finding for some in found for finding in some]
    cards = tuple(nic.name for nic in machine.nics if is_nvidia(nic))
    report = Report(tuple(findings), pairs(machine), cards)
    if probing:
        gpu, nic = report.best_pair(Use.VERBS) or ("", "")
        report = replace(report, findings=(*report.findings, *run_probes(machine, nic, gpu)))
    return report


def _ask(one: Check, machine: Machine) -> list[Finding]:
    """Run a check. An exception in one check must not take the other findings from the user."""
    try:
        return [finding.of(one) for finding in one.ask(machine)]
    except Exception as error:
        _log.exception("the check %s failed", one.id)
        return [skip(f"a bug in this check: {error!r}").of(one)]
