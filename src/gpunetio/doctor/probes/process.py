"""Probe a device and a GPU: `python -m gpunetio.doctor.probes.process DEVICE GPU` prints findings as lines of JSON.

Before each probe it prints `{"begin": ID}`. If a probe hangs, the parent process knows which.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ... import compiler
from ..finding import Finding
from . import loopback as probe_loopback
from . import memory as probe_memory
from .bench import Bench, open_device, open_gpu, tried
from .watch import MOST_SECONDS


def _by_kernel(bench: Bench) -> Iterator[Finding]:
    with compiler.needed_for("no kernel can run"):
        from . import kernel as probe_kernel
    yield from probe_kernel.gpu(bench)


TRIALS: dict[str, Callable[[Bench], Iterator[Finding]]] = {
    "probe-open": open_device,
    "probe-loopback-host": probe_loopback.host,
    "probe-gpu": open_gpu,
    "probe-uar": probe_memory.uar,
    "probe-dmabuf": probe_memory.dmabuf,
    "probe-umem": probe_memory.umem,
    "probe-loopback-gpu": _by_kernel,
}


def probe(bench: Bench, say: Callable[[dict[str, object]], None]) -> None:
    """Run all probes; stop if the device does not open."""
    for name, trial in TRIALS.items():
        say({"begin": name})
        for finding in tried(trial, bench):
            say(_line(name, finding))
        if not bench.is_open:
            return
    say({"begin": "close"})


def _line(name: str, finding: Finding) -> dict[str, object]:
    return {
        "probe": name, "status": finding.status, "summary": finding.summary,
        "read": [[one.source, one.value] for one in finding.read], "cure": finding.cure, "reboot": finding.reboot,
    }


def main() -> None:
    """Print the findings on standard output. Output of libraries goes to standard error instead."""
    device, gpu = sys.argv[1:]
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # even if the parent process has ended
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: dict[str, object]) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")

    with ExitStack() as opened:
        probe(Bench(device, gpu, opened), say)


if __name__ == "__main__":
    main()
