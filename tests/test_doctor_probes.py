"""Probes of the doctor: what is tried on NICs and GPUs that work and that do not, and processes that hang."""

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card_rig import Card, FakeCuda
from doctor_rig import READY, answer, changed
from gpunetio import Gpu, verbs
from gpunetio.doctor import Finding, LiveHost, Machine, Status, Trouble, Use, Wanted, probe_memory, probes
from gpunetio.doctor import probe_bench as rig
from gpunetio.doctor import probe_process as process
from gpunetio.doctor.host import Kind, Reading
from gpunetio.doctor.probe_explain import CUDA_ERRORS, LIKELY, SYNDROME_OF, completion_failed, cuda_error
from gpunetio.doctor.probe_watch import watch
from gpunetio.doctor.probes import PROBES, device_to_probe, run_probes
from gpunetio.enums import MemRegType, WcStatus
from gpunetio.formats.cqe import Syndrome
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.providers.mlx5.device import VerbsDevice
from nic_rig import until
from plain_soft import PlainSoft

OK, WARN, FAIL, SKIP = Status
IDS = [probe.id for probe in PROBES]
ON_CARD = "mlx5_0"


def bench(name: str = "soft0", gpu: str = "host", patience: float = 5.0) -> rig.Bench:
    return rig.Bench(name, gpu, ExitStack(), patience)


def probed(at: rig.Bench) -> dict[str, list[Finding]]:
    """What each probe finds that was begun, as the process tells it, and the doctor understands it."""
    said: list[dict] = []
    with at.opened:
        process.probe(at, lambda line: said.append(json.loads(json.dumps(line))))
    machine = Machine(changed(READY, answer("probe", at.name, "0000:ca:00.0", value={"said": said, "ended": ""})), Wanted())
    begun = [line["begin"] for line in said if "begin" in line]
    found = run_probes(machine, at.name)
    return {id: [each for each in found if each.check.id == id] for id in begun if id != "close"}


def statuses(found: dict[str, list[Finding]]) -> dict[str, list[Status]]:
    return {id: [finding.status for finding in findings] for id, findings in found.items()}


def text(finding: Finding) -> str:
    """All that a user can read of it."""
    return " | ".join([finding.summary, *(f"{e.source}: {e.value}" for e in finding.read), finding.cure])


HOST_ONLY = {"probe-gpu": [SKIP], "probe-uar": [SKIP], "probe-dmabuf": [SKIP], "probe-umem": [SKIP]}
ALL_WELL = {"probe-open": [OK], "probe-loopback-host": [OK], **HOST_ONLY, "probe-loopback-gpu": [OK, OK]}


# --- devices that work -----------------------------------------------------------------------------------------------


def test_a_software_nic_with_threads_of_the_host():
    found = probed(bench())
    assert statuses(found) == ALL_WELL
    proxy, own = found["probe-loopback-gpu"]
    assert "CPU threads" in proxy.summary
    assert "CPU proxy rings" in proxy.summary
    assert "kernel rings" in own.summary
    assert all("no GPU" in text(finding) for id in HOST_ONLY for finding in found[id])
    assert all(len(finding.summary) < 80 for findings in found.values() for finding in findings)


def test_a_card_with_threads_of_the_host(stand_in):
    found = probed(bench(ON_CARD))
    assert statuses(found) == ALL_WELL
    assert found["probe-loopback-host"][0].subject == ON_CARD
    assert found["probe-loopback-gpu"][0].subject == f"GPU0 {ON_CARD}"


def test_a_device_without_devx(monkeypatch):
    """As Soft-RoCE: the host's part works, and nothing of the rest is tried."""
    monkeypatch.setattr(rig, "open_context", lambda name: verbs.Context(PlainSoft("soft0")))
    found = probed(bench("plain-soft0"))
    assert statuses(found) == ALL_WELL | {"probe-loopback-gpu": [SKIP]}
    assert "no DEVX" in found["probe-loopback-gpu"][0].summary
