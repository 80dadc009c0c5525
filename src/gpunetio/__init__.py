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
    MemRegType,
    MemType,
    MtuSize,
    NicHandler,
    QpAttrMask,
    QpState,
    QpType,
    RingMemory,
    SendDbrModeExt,
    SendFlags,
    SharingMode,
    SyncScope,
    WcOpcode,
    WcStatus,
    WrOpcode,
)  # fmt: skip
from .errors import DocaError
from .fabric.faults import Faults
from .gpu import (
    ExportedQp,
    ExportedQps,
    Gpu,
    GpuMemory,
    ProxyService,
    QpError,
    QpGroup,
    check_device_code_compatibility,
    check_host_code_compatibility,
    gpu_list,
    library_version,
)  # fmt: skip
from .providers import PortConfig
from .verbs import Context, open

__version__ = "0.1.0"

__all__ = [
    "Access", "CodeOpt", "Context", "CqOverrun", "DocaError", "Dpa", "DpaCompletion", "ExportedQp", "ExportedQps",
    "Faults", "Gpu", "GpuMemory", "LinkLayer", "MemRegType", "MemType", "MtuSize", "NicHandler", "PortConfig",
    "ProxyService", "QpAttrMask", "QpError", "QpGroup", "QpState", "QpType", "RingMemory", "SendDbrModeExt",
    "SendFlags", "SharingMode", "SyncScope", "WcOpcode", "WcStatus", "WrOpcode", "__version__",
    "check_device_code_compatibility",
    "check_host_code_compatibility", "device", "device_function", "errors", "gpu_list", "kernel", "library_version",
    "open", "verbs",
]  # fmt: skip
