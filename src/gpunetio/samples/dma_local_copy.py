"""dma_local_copy: the NIC copies a text from one place in host memory to another, as a task of the CPU.

    1. resources    device, two buffers of a page each, memory maps and an inventory, a DMA context
    2. data path    one task, and progress until it has ended
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..core import BufInventory, MemoryMap
from ..dma import Dma
from ..enums import Access
from ..errors import InvalidValueError, UnexpectedError
from ..memory import HostMemory
from ..nic.engine.port import PortConfig
from ..verbs import open as open_device

MOST_BYTES = 4096
TEXT = "This is a sample piece of text"
PATIENCE = 10.0  # seconds for the copy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """`text` is the text to copy, of at most `MOST_BYTES`."""

    device: str
    text: str = TEXT
    nic_port: PortConfig | None = None


def run(options: SampleOptions) -> None:
    """Copy the text, and compare. UnexpectedError if the bytes differ."""
    text = np.frombuffer(options.text.encode(), np.uint8)
    if not 1 <= len(text) <= MOST_BYTES:
        raise InvalidValueError(f"a text of {len(text)} bytes: 1 to {MOST_BYTES} are possible")
    _log.info("Starting the sample")
    with ExitStack() as stack:
        ctx = stack.enter_context(open_device(options.device, port=options.nic_port))
        pd = ctx.create_pd()
        source, target = (HostMemory(MOST_BYTES) for _ in range(2))
        stack.callback(source.close)
        stack.callback(target.close)
        source.array[: len(text)] = text
        here, there = MemoryMap(pd, source, Access.LOCAL_READ), MemoryMap(pd, target)
        dma = stack.enter_context(Dma(pd))
        bufs = BufInventory(2)
        dma.memcpy(bufs.buf(here, 0, len(text)), bufs.buf(there, 0, len(text))).submit().wait(PATIENCE)
        if not np.array_equal(target.array, source.array):
            raise UnexpectedError("the bytes that were copied differ from those of the source")
    _log.info("Success, memory copied and verified as correct")
    _log.info("Sample finished successfully")
