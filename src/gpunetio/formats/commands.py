"""mlx5 commands: opcodes, statuses and mailboxes, as DEVX carries them.

Every input starts with the opcode, every output with `status` (8 bits) and `syndrome` (32 bits). The mailboxes of
Ethernet queues are in `ethernet_queues`.
"""

from enum import IntEnum, IntFlag

from .contexts import CQC, HCA_VPORT_CONTEXT, LAGC, MKC, QPC, QPC_EXT, RMPC
from .layout import BitStruct


class Opcode(IntEnum):
    """Command opcodes (PRM, "Command Reference")."""

    QUERY_HCA_CAP      = 0x100
    CREATE_MKEY        = 0x200
    DESTROY_MKEY       = 0x202
    CREATE_CQ          = 0x400
    DESTROY_CQ         = 0x401
    MODIFY_CQ          = 0x403
    CREATE_QP          = 0x500
    DESTROY_QP         = 0x501
    RST2INIT_QP        = 0x502
    INIT2RTR_QP        = 0x503
    RTR2RTS_QP         = 0x504
    RTS2RTS_QP         = 0x505
    QP_2ERR            = 0x507
    RTS2SQD_QP         = 0x508
    QP_2RST            = 0x50A
    QUERY_QP           = 0x50B
    SQD2RTS_QP         = 0x50C
    INIT2INIT_QP       = 0x50E
    QUERY_NIC_VPORT_CONTEXT = 0x754
    QUERY_ROCE_ADDRESS = 0x760
    QUERY_HCA_VPORT_CONTEXT = 0x762
    ALLOC_Q_COUNTER    = 0x771
    DEALLOC_Q_COUNTER  = 0x772
    QUERY_Q_COUNTER    = 0x773
    ALLOC_TRANSPORT_DOMAIN   = 0x816
    DEALLOC_TRANSPORT_DOMAIN = 0x817
    QUERY_LAG          = 0x842
    CREATE_TIR         = 0x900
    MODIFY_TIR         = 0x901
    DESTROY_TIR        = 0x902
    QUERY_TIR          = 0x903
    CREATE_SQ          = 0x904
    MODIFY_SQ          = 0x905
    DESTROY_SQ         = 0x906
    QUERY_SQ           = 0x907
    CREATE_RQ          = 0x908
    MODIFY_RQ          = 0x909
    DESTROY_RQ         = 0x90A
    QUERY_RQ           = 0x90B
    CREATE_RMP         = 0x90C
    MODIFY_RMP         = 0x90D
    DESTROY_RMP        = 0x90E
    QUERY_RMP          = 0x90F
    CREATE_TIS         = 0x912
    MODIFY_TIS         = 0x913
    DESTROY_TIS        = 0x914
    QUERY_TIS          = 0x915
    CREATE_RQT         = 0x916
    MODIFY_RQT         = 0x917
    DESTROY_RQT        = 0x918
    QUERY_RQT          = 0x919
    SET_FLOW_TABLE_ROOT     = 0x92F
    CREATE_FLOW_TABLE       = 0x930
    DESTROY_FLOW_TABLE      = 0x931
    QUERY_FLOW_TABLE        = 0x932
    CREATE_FLOW_GROUP       = 0x933
    DESTROY_FLOW_GROUP      = 0x934
    QUERY_FLOW_GROUP        = 0x935
    SET_FLOW_TABLE_ENTRY    = 0x936
    QUERY_FLOW_TABLE_ENTRY  = 0x937
    DELETE_FLOW_TABLE_ENTRY = 0x938
    ALLOC_FLOW_COUNTER      = 0x939
    DEALLOC_FLOW_COUNTER    = 0x93A
    QUERY_FLOW_COUNTER      = 0x93B
    MODIFY_FLOW_TABLE       = 0x93C


class Status(IntEnum):
    """The status in the first byte of an output mailbox (PRM, "Command status")."""

    OK            = 0x00
    INTERNAL_ERR  = 0x01
    BAD_OP        = 0x02
    BAD_PARAM     = 0x03
    BAD_SYS_STATE = 0x04
    BAD_RESOURCE  = 0x05
    RESOURCE_BUSY = 0x06
    EXCEED_LIM    = 0x08
    BAD_RES_STATE = 0x09
    BAD_INDEX     = 0x0A
    NO_RESOURCES  = 0x0F
    BAD_QP_STATE  = 0x10
    BAD_PKT       = 0x30
    BAD_OUTS_CQES = 0x40
    BAD_INPUT_LEN = 0x50
    BAD_OUTPUT_LEN = 0x51


class OptParam(IntFlag):
    """opt_param_mask: which optional fields of the QPC a transition carries."""

    RRE         = 1 << 1
    RAE         = 1 << 2
    RWE         = 1 << 3
    PKEY_INDEX  = 1 << 4
    Q_KEY       = 1 << 5
    MIN_RNR_NAK = 1 << 6
    PORT_NUM    = 1 << 16
    DSCP        = 1 << 17
    SGID_INDEX  = 1 << 23


class OptParam32(IntFlag):
    """opt_param_mask_95_32: the mask from bit 32 on."""

    UDP_SPORT = 1 << 2
    MMO       = 1 << 3


class QpState(IntEnum):
    """qpc.state."""

    RST       = 0
    INIT      = 1
    RTR       = 2
    RTS       = 3
    SQER      = 4
    SQDRAINED = 5
    ERR       = 6
    SQ_DRAINING = 7


class ServiceType(IntEnum):
    """qpc.st."""

    RC  = 0
    UC  = 1
    UD  = 2
    QP1 = 8


class PrmMtu(IntEnum):
    """qpc.mtu; the payload is 128 << code bytes."""

    MTU_256  = 1
    MTU_512  = 2
    MTU_1K   = 3
    MTU_2K   = 4
    MTU_4K   = 5
    RAW_ETH  = 7


# Path MTUs in bytes. Verbs (enum ibv_mtu) and the connection manager (PathPacketPayloadMTU) use the same codes.
MTU_OF_CODE: dict[int, int] = {int(code): 128 << code for code in PrmMtu if code != PrmMtu.RAW_ETH}
MTU_CODES: dict[int, int] = {mtu: code for code, mtu in MTU_OF_CODE.items()}


class RqType(IntEnum):
    """qpc.rq_type."""

    REGULAR   = 0
    SRQ_RMP   = 1
    ZERO_SIZE = 3


class ScatterToCqe(IntEnum):
    """qpc.cs_res: whether and how the payload of received SENDs goes into CQEs. The value is that of CqeFormat."""

    NONE    = 0x00
    DATA_32 = 0x01
    DATA_64 = 0x02


class ResponsesToCqe(IntEnum):
    """qpc.cs_req: the same for the data that READs and atomics return. CqeFormat is in both halves of the value."""

    NONE    = 0x00
    DATA_32 = 0x11
    DATA_64 = 0x22


SCATTER_FORMAT_MASK = 0x03  # of both


class WqType(IntEnum):
    """wq.wq_type."""

    LINKED_LIST          = 0
    CYCLIC               = 1
    LINKED_LIST_STRIDING = 2
    CYCLIC_STRIDING      = 3


class RmpState(IntEnum):
    """rmpc.state."""

    RST = 0
    RDY = 1
    ERR = 3


class CapClass(IntEnum):
    """QUERY_HCA_CAP: op_mod is `class << 1 | 1` for the current values."""

    GENERAL   = 0x00
    ETHERNET_OFFLOADS = 0x01
    ATOMIC    = 0x03
    ROCE      = 0x04
    FLOW_TABLE = 0x07
    GENERAL_2 = 0x20


class AtomicOperation(IntFlag):
    """atomic_caps.atomic_operations."""

    COMPARE_SWAP        = 1 << 0
    FETCH_ADD           = 1 << 1
    MASKED_COMPARE_SWAP = 1 << 2
    MASKED_FETCH_ADD    = 1 << 3


class PhysicalState(IntEnum):
    """hca_vport_context.port_physical_state (IBTA 14.2.5.6, PortPhysicalState)."""

    POLLING = 2
    LINK_UP = 5


class CqResize(IntFlag):
    """modify_cq_in.resize_field_select."""

    LOG_CQ_SIZE   = 1 << 0
    PAGE_OFFSET   = 1 << 1
    LOG_PAGE_SIZE = 1 << 2


class MkeyAccessMode(IntEnum):
    """mkc.access_mode_1_0: what an access by a memory key leads to."""

    PA  = 0  # physical memory
    MTT = 1  # pages
    KLM = 2  # other memory keys
    KSM = 3  # the same, each of one size


PM_STATE_MIGRATED = 3
CQ_RESIZE = 1  # op_mod of MODIFY_CQ
ROCE_VERSION_2 = 2
PORT_TYPE_IB, PORT_TYPE_ETH = 0, 1

OUT = BitStruct("out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
""")

DESTROY_CQ_IN = BitStruct("destroy_cq_in", 16, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    cqn                         0x048     24
""")

DESTROY_QP_IN = BitStruct("destroy_qp_in", 16, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    qpn                         0x048     24
""")

CREATE_MKEY_IN = BitStruct("create_mkey_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    memory_key_mkey_entry       0x080    512  MKC
    translations_octword_actual_size 0x300 32
    klm_pas_mtt                 0x880      *
""", MKC=MKC)

CREATE_MKEY_OUT = BitStruct("create_mkey_out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
    mkey_index                  0x048     24
""")

DESTROY_MKEY_IN = BitStruct("destroy_mkey_in", 16, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    mkey_index                  0x048     24
""")

QUERY_HCA_CAP_IN = BitStruct("query_hca_cap_in", 16, """
    opcode                      0x000     16
    op_mod                      0x030     16
    other_function              0x040      1
    function_id                 0x050     16
""")

QUERY_HCA_CAP_OUT = BitStruct("query_hca_cap_out", 4112, """
    status                      0x000      8
    syndrome                    0x020     32
    capability                  0x080  32768
""")

CREATE_CQ_IN = BitStruct("create_cq_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    cq_context                  0x080    512  CQC
    cq_umem_offset              0x280     64
    cq_umem_id                  0x2c0     32
    cq_umem_valid               0x2e0      1
    pas                         0x880      *
""", CQC=CQC)

CREATE_CQ_OUT = BitStruct("create_cq_out", 16, """
    cqn                         0x048     24
""")

MODIFY_CQ_IN = BitStruct("modify_cq_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    cqn                         0x048     24
    resize_field_select         0x060     32
    cq_context                  0x080    512  CQC
    cq_umem_offset              0x280     64
    cq_umem_id                  0x2c0     32
    cq_umem_valid               0x2e0      1
    pas                         0x880      *
""", CQC=CQC)

# With qpc_ext, a QPC_EXT precedes the pages in `pas`.
CREATE_QP_IN = BitStruct("create_qp_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    qpc_ext                     0x040      1
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
    wq_umem_offset              0x800     64
    wq_umem_id                  0x840     32
    wq_umem_valid               0x860      1
    pas                         0x880      *
""", QPC=QPC)

CREATE_QP_OUT = BitStruct("create_qp_out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
    qpn                         0x048     24
""")

RST2INIT_QP_IN = BitStruct("rst2init_qp_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

INIT2INIT_QP_IN = BitStruct("init2init_qp_in", 464, """
    opcode                      0x000     16
    qpc_ext                     0x040      1
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
    opt_param_mask_95_32        0x840     64
    qpc_data_ext                0x880   1536  QPC_EXT
""", QPC=QPC, QPC_EXT=QPC_EXT)

INIT2RTR_QP_IN = BitStruct("init2rtr_qp_in", 272, """
    opcode                      0x000     16
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

RTR2RTS_QP_IN = BitStruct("rtr2rts_qp_in", 272, """
    opcode                      0x000     16
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

RTS2RTS_QP_IN = BitStruct("rts2rts_qp_in", 464, """
    opcode                      0x000     16
    qpc_ext                     0x040      1
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
    opt_param_mask_95_32        0x840     64
""", QPC=QPC)

RTS2SQD_QP_IN = BitStruct("rts2sqd_qp_in", 272, """
    opcode                      0x000     16
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

SQD2RTS_QP_IN = BitStruct("sqd2rts_qp_in", 272, """
    opcode                      0x000     16
    qpn                         0x048     24
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

QP_2ERR_IN = BitStruct("qp_2err_in", 16, """
    opcode                      0x000     16
    vhca_tunnel_id              0x020     16
    op_mod                      0x030     16
    qpn                         0x048     24
""")

QP_2RST_IN = BitStruct("qp_2rst_in", 16, """
    opcode                      0x000     16
    qpn                         0x048     24
""")

QUERY_QP_IN = BitStruct("query_qp_in", 16, """
    opcode                      0x000     16
    op_mod                      0x030     16
    qpn                         0x048     24
""")

QUERY_QP_OUT = BitStruct("query_qp_out", 272, """
    status                      0x000      8
    syndrome                    0x020     32
    opt_param_mask              0x080     32
    qpc                         0x0c0   1856  QPC
""", QPC=QPC)

CREATE_RMP_IN = BitStruct("create_rmp_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    ctx                         0x100   1920  RMPC
""", RMPC=RMPC)

CREATE_RMP_OUT = BitStruct("create_rmp_out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
    rmpn                        0x048     24
""")

# The PRM has only modify_lwm. modify_size, for a larger ring in another UMEM, is an extension of the software NIC.
MODIFY_RMP_IN = BitStruct("modify_rmp_in", 272, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    rmp_state                   0x040      4
    rmpn                        0x048     24
    modify_size                 0x0be      1
    modify_lwm                  0x0bf      1
    ctx                         0x100   1920  RMPC
""", RMPC=RMPC)

DESTROY_RMP_IN = BitStruct("destroy_rmp_in", 16, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    rmpn                        0x048     24
""")

QUERY_RMP_IN = BitStruct("query_rmp_in", 16, """
    opcode                      0x000     16
    uid                         0x010     16
    op_mod                      0x030     16
    rmpn                        0x048     24
""")

QUERY_RMP_OUT = BitStruct("query_rmp_out", 272, """
    status                      0x000      8
    syndrome                    0x020     32
    ctx                         0x100   1920  RMPC
""", RMPC=RMPC)

QUERY_ROCE_ADDRESS_IN = BitStruct("query_roce_address_in", 16, """
    opcode                      0x000     16
    op_mod                      0x030     16
    roce_address_index          0x040     16
    vhca_port_num               0x05c      4
""")

QUERY_ROCE_ADDRESS_OUT = BitStruct("query_roce_address_out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
    roce_address_num            0x060     16
    roce_address                0x080      *
""")

QUERY_LAG_IN = BitStruct("query_lag_in", 16, """
    opcode                      0x000     16
    op_mod                      0x030     16
""")

QUERY_LAG_OUT = BitStruct("query_lag_out", 16, """
    status                      0x000      8
    syndrome                    0x020     32
    ctx                         0x040     64  LAGC
""", LAGC=LAGC)

QUERY_HCA_VPORT_CONTEXT_IN = BitStruct("query_hca_vport_context_in", 16, """
    opcode                      0x000     16
    op_mod                      0x030     16
    other_vport                 0x040      1
    port_num                    0x04c      4
    vport_number                0x050     16
""")

QUERY_HCA_VPORT_CONTEXT_OUT = BitStruct("query_hca_vport_context_out", 528, """
    status                      0x000      8
    syndrome                    0x020     32
    hca_vport_context           0x080   4096  HCA_VPORT_CONTEXT
""", HCA_VPORT_CONTEXT=HCA_VPORT_CONTEXT)
