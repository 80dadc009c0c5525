"""DOCA Core, the base of the RDMA and DMA libraries: memory maps, buffers, contexts, tasks and progress engines.

A library's context is started, runs tasks, and is stopped. A progress engine completes the tasks:

    with gn.open() as ctx, Dma(ctx.create_pd()) as dma:
        dma.memcpy(source, destination).submit().wait(timeout=5)
"""

from .buf import Buf, BufInventory
from .buf_array import BufArray
from .context import ContextState, CoreContext
from .engine import ProgressEngine
from .memory_map import MemoryMap
from .remote_memory import RemoteMemory
from .task import Task, TaskState

__all__ = [
    "Buf", "BufArray", "BufInventory", "ContextState", "CoreContext", "MemoryMap", "ProgressEngine", "RemoteMemory",
    "Task", "TaskState",
]
