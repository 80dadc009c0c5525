"""DOCA DMA: the NIC copies memory of this machine, for CPU tasks or for kernels.

    with Dma(pd) as dma:
        dma.memcpy(source, destination).submit().wait(timeout=5)
"""

from .caps import DmaCaps, query_caps
from .dma import Dma
from .task import MemcpyTask

__all__ = ["Dma", "DmaCaps", "MemcpyTask", "query_caps"]
