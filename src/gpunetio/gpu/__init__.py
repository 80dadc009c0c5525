"""GPUs and host threads as places where kernels run: memory, exported queues, the CPU proxy and the watchdog."""

from .array import ExportedQps
from .device import gpu_list
from .export import ExportedQp
from .gpu import Gpu
from .group import QpGroup
from .memory import GpuMemory
from .proxy import ProxyService
from .qp_error import QpError
from .semaphore import Semaphore, SemaphoreStatus
from .versions import check_device_code_compatibility, check_host_code_compatibility, library_version

__all__ = [
    "ExportedQp", "ExportedQps", "Gpu", "GpuMemory", "ProxyService", "QpError", "QpGroup", "Semaphore",
    "SemaphoreStatus", "check_device_code_compatibility", "check_host_code_compatibility", "gpu_list",
    "library_version",
]
