"""DOCA GPUNetIO and DOCA Verbs in Python: GPU kernels that drive a network card themselves, with or without it."""

from . import device, errors, verbs
from .device.compile import device_function
from .device.launch import kernel
from .dpa import Dpa, DpaCompletion
from .enums import (
    Access,
    CodeOpt,
    CqOverrun,
    LinkLayer,
    MemType,
    MtuSize,
    NicHandler,
    QpAttrMask,
    QpState,
    QpType,
    SendFlags,
    SharingMode,
    SyncScope,
    WcOpcode,
    WcStatus,
    WrOpcode,
)  # fmt: skip
from .errors import DocaError
from .fabric.faults import Faults
from .gpu import ExportedQp, Gpu, GpuMemory, QpError, gpu_list
from .providers import PortConfig
from .verbs import Context, open

__version__ = "0.1.0"

__all__ = [
    "Access", "CodeOpt", "Context", "CqOverrun", "DocaError", "Dpa", "DpaCompletion", "ExportedQp", "Faults", "Gpu",
    "GpuMemory", "LinkLayer", "MemType", "MtuSize", "NicHandler", "PortConfig", "QpAttrMask", "QpError", "QpState",
    "QpType", "SendFlags", "SharingMode", "SyncScope", "WcOpcode", "WcStatus", "WrOpcode", "__version__", "device",
    "device_function", "errors", "gpu_list", "kernel", "open", "verbs",
]  # fmt: skip
