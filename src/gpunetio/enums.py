"""Enumerations of the API, with the numeric values of the C headers (prefixes dropped)."""

from enum import IntEnum, IntFlag


class QpType(IntEnum):
    """DOCA_VERBS_QP_TYPE_*; the last two, IBV_QPT_UD of libibverbs and IB_QPT_GSI of the kernel, are not in DOCA."""

    RC  = 0
    UC  = 1
    UD  = 2  # unreliable datagrams
    GSI = 3  # queue pair 1 of a port, for general services: UD with its own Q_Key (IBTA 3.9.4)

    @property
    def datagrams(self) -> bool:
        """Return whether each request names its destination, and the queue pair is not connected."""
        return self in (QpType.UD, QpType.GSI)

    @property
    def service(self) -> str:
        """Return the name of its transport service (IBTA 9.8)."""
        return "UD" if self.datagrams else self.name


class QpState(IntEnum):
    """enum doca_verbs_qp_state."""

    RST  = 0
    INIT = 1
    RTR  = 2
    RTS  = 3
    ERR  = 4
    SQD  = 5  # the send queue is drained; libibverbs has this state, DOCA Verbs does not


class AddrType(IntEnum):
    """enum doca_verbs_addr_type."""

    IPv4      = 0
    IPv6      = 1
    IB_GRH    = 2
    IB_NO_GRH = 3


class MtuSize(IntEnum):
    """enum doca_verbs_mtu_size."""

    MTU_256      = 0
    MTU_512      = 1
    MTU_1K       = 2
    MTU_2K       = 3
    MTU_4K       = 4
    RAW_ETHERNET = 5

    @property
    def nbytes(self) -> int:
        """Return the payload bytes of a packet."""
        return 256 << self


class UarAllocationType(IntEnum):
    """enum doca_verbs_uar_allocation_type."""

    BLUEFLAME          = 0
    NONCACHE           = 1
    NONCACHE_DEDICATED = 2


class CqOverrun(IntEnum):
    """enum doca_verbs_cq_overrun."""

    DISABLE = 0
    ENABLE  = 1


class QpAtomicType(IntEnum):
    """enum doca_verbs_qp_atomic_type."""

    NONE          = 0
    IB_SPEC       = 1
    UP_TO_8BYTES  = 3


class QpSendDbrMode(IntEnum):
    """enum doca_verbs_qp_send_dbr_mode."""

    DBR_VALID  = 0
    NO_DBR_EXT = 1


class QpAttrMask(IntFlag):
    """DOCA_VERBS_QP_ATTR_*: which attributes a modify carries."""

    ALLOW_REMOTE_WRITE = 1 << 0
    ALLOW_REMOTE_READ  = 1 << 1
    PKEY_INDEX         = 1 << 2
    MIN_RNR_TIMER      = 1 << 3
    PORT_NUM           = 1 << 4
    NEXT_STATE         = 1 << 5
    CURRENT_STATE      = 1 << 6
    PATH_MTU           = 1 << 7
    RQ_PSN             = 1 << 8
    SQ_PSN             = 1 << 9
    DEST_QP_NUM        = 1 << 10
    ACK_TIMEOUT        = 1 << 11
    RETRY_CNT          = 1 << 12
    RNR_RETRY          = 1 << 13
    AH_ATTR            = 1 << 14
    ATOMIC_MODE        = 1 << 15
    MAX_QP_RD_ATOMIC   = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    QKEY               = 1 << 28  # for UD, which DOCA does not have: far from DOCA's bits


class GidType(IntEnum):
    """enum ibv_gid_type."""

    IB      = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class Access(IntFlag):
    """Rights of a memory region (enum ibv_access_flags). LOCAL_READ is always given."""

    LOCAL_READ    = 0
    LOCAL_WRITE   = 1 << 0
    REMOTE_WRITE  = 1 << 1
    REMOTE_READ   = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    RELAXED_ORDERING = 1 << 20  # the device may reorder its accesses to memory

    @classmethod
    def all(cls) -> "Access":
        """Return local write and every remote right."""
        return cls.LOCAL_WRITE | cls.REMOTE_WRITE | cls.REMOTE_READ | cls.REMOTE_ATOMIC


class MemType(IntEnum):
    """enum doca_gpu_mem_type."""

    GPU     = 0
    GPU_CPU = 1
    CPU_GPU = 2


class NicHandler(IntEnum):
    """enum doca_gpu_dev_verbs_nic_handler."""

    AUTO          = 0
    CPU_PROXY     = 1
    GPU_SM_DB     = 2
    GPU_SM_BF     = 6
    GPU_SM_NO_DBR = 10


class SendDbrModeExt(IntEnum):
    """enum doca_gpu_verbs_send_dbr_mode_ext: which side keeps the doorbell record of an exported send queue."""

    VALID_DBR          = 0  # the side that rings the doorbell
    NO_DBR_HW          = 1  # none: the device needs no record (QpSendDbrMode.NO_DBR_EXT)
    NO_DBR_SW_EMULATED = 2  # a CPU thread, after the kernels have rung


class MemRegType(IntEnum):
    """enum doca_gpu_verbs_mem_reg_type: how a queue in GPU memory is registered with a device."""

    DEFAULT      = 0  # by a dmabuf, else by its address; if both fail, the queue is in host memory
    CUDA_DMABUF  = 1
    CUDA_PEERMEM = 2  # by its address, which needs the kernel module nvidia-peermem


class RingMemory(IntEnum):
    """The memory of a UMEM, and how it was registered with its device. DOCA has no such enumeration."""

    HOST         = 0  # the CPU accesses it, and so do kernels if it is registered with CUDA
    CUDA_DMABUF  = 1  # GPU memory, registered by a dmabuf
    CUDA_PEERMEM = 2  # GPU memory, registered by its address
    DMABUF       = 3  # a dmabuf whose address is not known here
    NEAR         = 4  # memory of the GPU on which the device's engine runs

    @property
    def in_gpu(self) -> bool:
        """Return whether this is GPU memory, which the CPU does not access."""
        return self in (RingMemory.CUDA_DMABUF, RingMemory.CUDA_PEERMEM, RingMemory.NEAR)

    @property
    def text(self) -> str:
        """Return the kind of memory in words."""
        return ("host memory", "GPU memory (dmabuf)", "GPU memory (nvidia-peermem)", "a dmabuf", "GPU memory")[self]


class SharingMode(IntEnum):
    """enum doca_gpu_dev_verbs_resource_sharing_mode: which threads share a queue."""

    EXCLUSIVE = 0
    CTA       = 1
    GPU       = 2


class ExecScope(IntEnum):
    """enum doca_gpu_dev_verbs_exec_scope. DOCA has no BLOCK."""

    THREAD = 0
    WARP   = 1
    BLOCK  = 2


class SyncScope(IntEnum):
    """enum doca_gpu_dev_verbs_sync_scope: scope of the fence before a doorbell."""

    SYS    = 0
    GPU    = 1
    CTA    = 2
    THREAD = 3


class CodeOpt(IntFlag):
    """enum doca_gpu_dev_verbs_gpu_code_opt."""

    DEFAULT                 = 0
    ASYNC_STORE_RELEASE     = 1
    SKIP_AVAILABILITY_CHECK = 2
    SKIP_DB_RINGING         = 4
    CPU_PROXY_UPDATE_PI     = 8


class SrqType(IntEnum):
    """enum doca_verbs_srq_type."""

    LINKED_LIST = 0
    CONTIGUOUS  = 1


class AsyncEventType(IntEnum):
    """`ibv_event_type`."""

    CQ_ERR              = 0
    QP_FATAL            = 1
    QP_REQ_ERR          = 2
    QP_ACCESS_ERR       = 3
    COMM_EST            = 4
    SQ_DRAINED          = 5
    PATH_MIG            = 6
    PATH_MIG_ERR        = 7
    DEVICE_FATAL        = 8
    PORT_ACTIVE         = 9
    PORT_ERR            = 10
    SRQ_ERR             = 14
    SRQ_LIMIT_REACHED   = 15
    QP_LAST_WQE_REACHED = 16


class PortState(IntEnum):
    """`ibv_port_state`."""

    NOP          = 0
    DOWN         = 1
    INIT         = 2
    ARMED        = 3
    ACTIVE       = 4
    ACTIVE_DEFER = 5

    @property
    def is_active(self) -> bool:
        """Return whether data can pass."""
        return self in (PortState.ACTIVE, PortState.ACTIVE_DEFER)


class LinkLayer(IntEnum):
    """IBV_LINK_LAYER_*."""

    INFINIBAND = 1
    ETHERNET   = 2


class WrOpcode(IntEnum):
    """`ibv_wr_opcode`."""

    RDMA_WRITE           = 0
    RDMA_WRITE_WITH_IMM  = 1
    SEND                 = 2
    SEND_WITH_IMM        = 3
    RDMA_READ            = 4
    ATOMIC_CMP_AND_SWP   = 5
    ATOMIC_FETCH_AND_ADD = 6
    WAIT_CQ_PI           = 11  # IBV_WR_DRIVER1
    MEMCPY               = 256  # libibverbs has a function in place of a number (mlx5dv_wr_memcpy)


class SendFlags(IntFlag):
    """`ibv_send_flags`."""

    FENCE     = 1
    SIGNALED  = 2
    SOLICITED = 4
    INLINE    = 8


class WcStatus(IntEnum):
    """`ibv_wc_status`."""

    SUCCESS           = 0
    LOC_LEN_ERR       = 1
    LOC_QP_OP_ERR     = 2
    LOC_PROT_ERR      = 4
    WR_FLUSH_ERR      = 5
    MW_BIND_ERR       = 6
    BAD_RESP_ERR      = 7
    LOC_ACCESS_ERR    = 8
    REM_INV_REQ_ERR   = 9
    REM_ACCESS_ERR    = 10
    REM_OP_ERR        = 11
    RETRY_EXC_ERR     = 12
    RNR_RETRY_EXC_ERR = 13
    REM_ABORT_ERR     = 16
    GENERAL_ERR       = 21


class WcOpcode(IntEnum):
    """`ibv_wc_opcode`."""

    SEND               = 0
    RDMA_WRITE         = 1
    RDMA_READ          = 2
    COMP_SWAP          = 3
    FETCH_ADD          = 4
    RECV               = 128
    RECV_RDMA_WITH_IMM = 129
    WAIT_CQ_PI         = 135  # IBV_WC_DRIVER1
    MEMCPY             = 137  # IBV_WC_DRIVER3


class WcFlags(IntFlag):
    """`ibv_wc_flags`."""

    GRH      = 1
    WITH_IMM = 2
