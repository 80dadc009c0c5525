"""DOCA's samples of DMA as commands: `dma_memcpy`, `dma_local_copy`."""

from __future__ import annotations

from typing import Any

import click

from .eth_samples import ends
from .failures import guarded
from .ports import nic_port, port_options
from .samples import common, messages

_TEXT, _MOST_BYTES = "This is a sample piece of text", 4096  # as in samples/dma_local_copy.py, which would load the NIC


@click.command("dma_memcpy", context_settings={"max_content_width": 120})
@ends
@common
@guarded
def dma_memcpy(**values: Any) -> None:
    """Copy a text from the CPU to a GPU by a task, and another one back by a kernel.

    Read the program in gpunetio/samples/dma_memcpy.py.
    """
    from ..samples.dma_memcpy import SampleOptions, run

    options = SampleOptions(gpu=values["gpu"], device=values["device"], nic_port=nic_port(values))
    with messages(values):
        run(options)


@click.command("dma_local_copy", context_settings={"max_content_width": 120})
@port_options
@click.option("-p", "--pci-addr", "device", required=True, metavar="NIC",
              help="The NIC; `gpunetio devices` names them.")
@click.option("-t", "--text", default=_TEXT, show_default=True, help=f"What to copy; {_MOST_BYTES} bytes at most.")
@common
@guarded
def dma_local_copy(**values: Any) -> None:
    """Copy a text from one place in host memory to another, and compare.

    Read the program in gpunetio/samples/dma_local_copy.py.
    """
    if not 1 <= len(values["text"].encode()) <= _MOST_BYTES:
        raise click.UsageError(f"--text has {len(values['text'].encode())} bytes: 1 to {_MOST_BYTES} are possible")
    from ..samples.dma_local_copy import SampleOptions, run

    options = SampleOptions(device=values["device"], text=values["text"], nic_port=nic_port(values))
    with messages(values):
        run(options)
