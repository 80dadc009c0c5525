"""DOCA GPUNetIO and DOCA Verbs in Python: GPU kernels that drive a network card themselves, with or without it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors, verbs
from .enums import (
    Access,
    CodeOpt,
    CqOverrun,
    LinkLayer,
    MemRegType,
    MemType,
    MtuSize,
    NicHandler,
    PortState,
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
)
from .errors import DocaError
from .fabric.faults import Faults
from .providers import PortConfig
from .verbs import Context, open, open_async

if TYPE_CHECKING:
    from . import cm, core, device, dma, eth, flow, rdma, rendezvous
    from .device import device_function, kernel
    from .dpa import Dpa, DpaCompletion
    from .gpu import (
        ExportedQp,
        ExportedQps,
        Gpu,
        GpuMemory,
        ProxyService,
        QpError,
        QpGroup,
        Semaphore,
        SemaphoreStatus,
        check_device_code_compatibility,
        check_host_code_compatibility,
        gpu_list,
        library_version,
    )
    from .rendezvous import mesh

__version__ = "0.1.0"

__all__ = [
    "Access", "CodeOpt", "Context", "CqOverrun", "DocaError", "Dpa", "DpaCompletion", "ExportedQp", "ExportedQps",
    "Faults", "Gpu", "GpuMemory", "LinkLayer", "MemRegType", "MemType", "MtuSize", "NicHandler", "PortConfig",
    "PortState", "ProxyService", "QpAttrMask", "QpError", "QpGroup", "QpState", "QpType", "RingMemory", "Semaphore",
    "SemaphoreStatus", "SendDbrModeExt", "SendFlags", "SharingMode", "SyncScope", "WcOpcode", "WcStatus",
    "WrOpcode", "__version__", "check_device_code_compatibility", "check_host_code_compatibility", "cm", "core",
    "device", "device_function", "dma", "errors", "eth", "flow", "gpu_list", "kernel", "library_version", "mesh",
    "open", "open_async", "rdma", "rendezvous", "verbs",
]

# Modules for kernels are loaded when they are first used: they need the compiler, and controlling a card does not.
_ON_DEMAND = {
    "cm": ("cm",),
    "core": ("core",),
    "device": ("device", "device_function", "kernel"),
    "dma": ("dma",),
    "dpa": ("Dpa", "DpaCompletion"),
    "eth": ("eth",),
    "flow": ("flow",),
    "gpu": (
        "ExportedQp", "ExportedQps", "Gpu", "GpuMemory", "ProxyService", "QpError", "QpGroup",
        "Semaphore", "SemaphoreStatus", "check_device_code_compatibility", "check_host_code_compatibility", "gpu_list",
        "library_version",
    ),
    "rdma": ("rdma",),
    "rendezvous": ("rendezvous", "mesh"),
}
_MODULE_OF = {name: module for module, names in _ON_DEMAND.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a name that is loaded on demand (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF[name]}", __name__)
    found = module if name == _MODULE_OF[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
