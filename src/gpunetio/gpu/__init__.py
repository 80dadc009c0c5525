"""GPUs and host threads as places where kernels run: memory, exported queues, and the watchdog over them."""

from .export import ExportedQp, QpError
from .gpu import Gpu, gpu_list
from .memory import GpuMemory

__all__ = ["ExportedQp", "Gpu", "GpuMemory", "QpError", "gpu_list"]
