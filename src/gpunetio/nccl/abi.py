"""NCCL's GIN interface: its structures and numbers, and the differences between its versions.

Offsets are in bytes, on x86-64. Names are those of NCCL's headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from ..formats.device_structs import DEV_CQ, DEV_CQ_1_0, DEV_QP, DEV_QP_1_0
from ..formats.layout import Entry


class Result(IntEnum):
    """ncclResult_t."""

    SUCCESS          = 0
    SYSTEM_ERROR     = 2
    INTERNAL_ERROR   = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE    = 5
    REMOTE_ERROR     = 6


class LogLevel(IntEnum):
    """ncclDebugLogLevel."""

    WARN = 2
    INFO = 3


class NetDevice(IntEnum):
    """ncclNetDeviceType, which also numbers the types of GIN."""

    HOST      = 0
    GIN_GDAKI = 3


class Pointer(IntFlag):
    """NCCL_PTR_*: kinds of memory."""

    HOST   = 1
    CUDA   = 2
    DMABUF = 4


FORCE_STRICT_ORDERING = 1  # NCCL_NET_MR_FLAG_FORCE_SO
UNDEFINED = (-1, -(1 << 31))  # a traffic class that nobody chose: NET's convention, and NCCL_CONFIG_UNDEF_INT
HANDLE_BYTES = 128  # NCCL_NET_HANDLE_MAXSIZE

# --- structures that the CPU reads and writes ------------------------------------------------------------------------

CONFIG_V13 = Entry("ncclGinConfig_v13_t", 20, """
    nSignals       0  i32
    nCounters      4  i32
    nContexts      8  i32
    queueDepth    12  i32
    trafficClass  16  i32
""")
CONFIG_V14 = Entry("ncclGinConfig_v14_t", 28, """
    nSignals        0  i32
    nCounters       4  i32
    nContexts       8  i32
    queueDepth     12  i32
    trafficClass   16  i32
    backendVersion 20  i32
    rankStride     24  i32
""")
GIN_PROPERTIES = Entry("ncclGinProperties_v14_t", 2, """
    supportsStrongSignals 0  u8
    supportsVASignals     1  u8
""")
DEVICE_HANDLE = Entry("ncclNetDeviceHandle_v11_t", 32, """
    netDeviceType       0  i32
    netDeviceVersion    4  i32
    handle              8  u64
    size               16  u64
    needsProxyProgress 24  i32
""")
# vProps is {int ndevs; int devs[]}, with 4 elements in v11 and 8 in v12. The structures are alike up to there.
_PROPERTIES = """
    name                  0  u64
    pciPath               8  u64
    guid                 16  u64
    ptrSupport           24  i32
    regIsGlobal          28  i32
    forceFlush           32  i32
    speed                36  i32
    port                 40  i32
    latency              44  raw[4]
    maxComms             48  i32
    maxRecvs             52  i32
    netDeviceType        56  i32
    netDeviceVersion     60  i32
    ndevs                64  i32
"""
PROPERTIES_V11 = Entry("ncclNetProperties_v11_t", 112, _PROPERTIES.rstrip() + """
    devs                 68  i32[4]
    maxP2pBytes          88  u64
    maxCollBytes         96  u64
    maxMultiRequestSize 104  i32
""")
PROPERTIES_V12 = Entry("ncclNetProperties_v12_t", 128, _PROPERTIES.rstrip() + """
    devs                 68  i32[8]
    maxP2pBytes         104  u64
    maxCollBytes        112  u64
    maxMultiRequestSize 120  i32
    railId              124  u16
    planeId             126  u16
""")

# --- structures that kernels read ------------------------------------------------------------------------------------

# Each table has a buffer, the keys of all ranks, a key for local use, and the index of this context's first word.
_CONTEXT = """
    gdqp                 0  u64
    companion_gdqp       8  u64
    counters_buffer     16  u64
    counters_rkeys      24  u64
    counters_lkey       32  be32
    counters_offset     36  u32
    signals_buffer      40  u64
    signals_rkeys       48  u64
    signals_lkey        56  be32
    signals_offset      60  u32
    sink_buffer_lkey    64  be32
"""
GPU_CONTEXT_72 = Entry("ncclGinGdakiGPUContext", 72, _CONTEXT)
GPU_CONTEXT_88 = Entry("ncclGinGdakiGPUContext (backend 2)", 88, _CONTEXT.rstrip() + """
    last_issued_get     72  u64
    last_visible_get    80  u64
""")
WINDOW_HANDLE = Entry("ncclGinGdakiMemHandle", 16, """
    rkeys 0  u64
    lkey  8  be32
""")

# --- versions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """A version of the interface.

    `properties`, `config`     structures of its calls
    `qp`, `cq`                 structures of a queue, as NCCL's kernels of that time read them
    `gpu_contexts`             by `backendVersion`; one that the version does not pass is 1
    `device_version`           NCCL_GIN_GDAKI_VERSION
    `always_companions`        kernels use companion queues also in contexts without counters
    """

    number: int
    properties: Entry
    config: Entry
    qp: Entry
    cq: Entry
    gpu_contexts: dict[int, Entry]
    device_version: int
    always_companions: bool = False


_ONE, _BOTH = {1: GPU_CONTEXT_72}, {1: GPU_CONTEXT_72, 2: GPU_CONTEXT_88}
VERSIONS = {version.number: version for version in (
    Version(11, PROPERTIES_V11, CONFIG_V13, DEV_QP_1_0, DEV_CQ_1_0, _ONE,  100, always_companions=True),
    Version(13, PROPERTIES_V12, CONFIG_V13, DEV_QP,     DEV_CQ,     _ONE,  200),
    Version(14, PROPERTIES_V12, CONFIG_V14, DEV_QP,     DEV_CQ,     _BOTH, 200),
)}
NET = 0  # plugin.c passes this in place of a version for calls of NCCL 2.28's NET plugin
