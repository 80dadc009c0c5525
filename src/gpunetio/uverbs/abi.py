"""The kernel's interface to RDMA devices: numbers and structures of <rdma/*.h>, version 6 of uverbs and 1 of mlx5.

Structures are in the byte order of the machine, except GUIDs. Names are those of the headers without their prefixes.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..formats.layout import Entry

DRIVER_MLX5 = 1  # enum rdma_driver_id
_DRIVER = 1 << 12  # UVERBS_ID_NS_SHIFT: objects, methods and attributes of the driver

UHW_IN, UHW_OUT = _DRIVER, _DRIVER + 1  # UVERBS_ATTR_UHW_*: the driver's structures in general calls
EXTENDED = 1 << 31  # IB_USER_VERBS_CMD_FLAG_EXTENDED

IP_BASED_GIDS = 1 << 26  # IB_UVERBS_PCF_IP_BASED_GIDS, a capability of a port
PHYSICALLY_DOWN, PHYSICALLY_UP = 3, 5  # IBTA 14.2.5.6, PortPhysicalState: Disabled, LinkUp


# --- objects and methods (ib_user_ioctl_cmds.h, mlx5_user_ioctl_cmds.h) --------------------------------------------


class Object(IntEnum):
    """enum uverbs_default_objects, enum mlx5_ib_objects."""

    DEVICE       = 0
    PD           = 1
    COMP_CHANNEL = 2
    CQ           = 3
    QP           = 4
    SRQ          = 5
    AH           = 6
    MR           = 7
    MW           = 8
    FLOW         = 9
    XRCD         = 10
    RWQ_IND_TBL  = 11
    WQ           = 12
    FLOW_ACTION  = 13
    DM           = 14
    COUNTERS     = 15
    ASYNC_EVENT  = 16
    DEVX         = _DRIVER
    DEVX_OBJ     = _DRIVER + 1
    DEVX_UMEM    = _DRIVER + 2
    DEVX_ASYNC_EVENT_FD = _DRIVER + 5
    UAR          = _DRIVER + 8


class Method(IntEnum):
    """The numbers of methods, which each object counts from 0."""

    INVOKE_WRITE      = 0  # of DEVICE
    QUERY_PORT        = 2
    GET_CONTEXT       = 3
    QUERY_GID_TABLE   = 5
    QUERY_GID_ENTRY   = 6


CREATE, DESTROY = 0, 1  # of CQ, QP, SRQ
DESTROY_ONLY = 0  # of PD, AH
DESTROY_MR, QUERY_MR, REG_DMABUF_MR, REG_MR_METHOD = 1, 3, 4, 5
ALLOC = 0  # of ASYNC_EVENT
UAR_ALLOC, UAR_DESTROY = _DRIVER, _DRIVER + 1
DEVX_OTHER, DEVX_QUERY_UAR, DEVX_QUERY_EQN, DEVX_SUBSCRIBE_EVENT = range(_DRIVER, _DRIVER + 4)
DEVX_EVENT_FD_ALLOC = _DRIVER
DEVX_OBJ_CREATE, DEVX_OBJ_DESTROY, DEVX_OBJ_MODIFY, DEVX_OBJ_QUERY = range(_DRIVER, _DRIVER + 4)
DEVX_UMEM_REG, DEVX_UMEM_DEREG = _DRIVER, _DRIVER + 1


class Write(IntEnum):
    """enum ib_uverbs_write_cmds: commands that used to be written to the device file, and now come by INVOKE_WRITE."""

    QUERY_DEVICE        = 1
    ALLOC_PD            = 3
    CREATE_AH           = 5
    REG_MR              = 9
    REREG_MR            = 11
    ALLOC_MW            = 14
    CREATE_COMP_CHANNEL = 17
    RESIZE_CQ           = 19
    CREATE_QP           = 24
    QUERY_QP            = 25
    MODIFY_QP           = 26
    ATTACH_MCAST        = 30
    MODIFY_SRQ          = 33
    QUERY_SRQ           = 34
    OPEN_XRCD           = 37
    CREATE_XSRQ         = 39
    OPEN_QP             = 40


class WriteExtended(IntEnum):
    """Commands that exist only with EXTENDED."""

    CREATE_FLOW         = 50
    CREATE_WQ           = 52
    CREATE_RWQ_IND_TBL  = 55
    MODIFY_CQ           = 57


class DeviceCap(IntFlag):
    """enum ibv_device_cap_flags."""

    BAD_PKEY_CNTR     = 1 << 1
    BAD_QKEY_CNTR     = 1 << 2
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID    = 1 << 11
    RC_RNR_NAK_GEN    = 1 << 12


# --- attributes ----------------------------------------------------------------------------------------------------


class Invoke(IntEnum):
    """enum uverbs_attrs_invoke_write_cmd_attr_ids."""

    IN  = 0
    OUT = 1
    CMD = 2


class GetContext(IntEnum):
    """enum uverbs_attrs_get_context_attr_ids."""

    NUM_COMP_VECTORS = 0
    CORE_SUPPORT     = 1


class QueryPort(IntEnum):
    """enum uverbs_attrs_query_port_cmd_attr_ids."""

    PORT_NUM = 0
    RESP     = 1


class GidTable(IntEnum):
    """enum uverbs_attrs_query_gid_table_cmd_attr_ids."""

    ENTRY_SIZE       = 0
    FLAGS            = 1
    RESP_ENTRIES     = 2
    RESP_NUM_ENTRIES = 3


class Gid(IntEnum):
    """enum uverbs_attrs_query_gid_entry_cmd_attr_ids."""

    PORT       = 0
    GID_INDEX  = 1
    FLAGS      = 2
    RESP_ENTRY = 3


class CreateCq(IntEnum):
    """enum uverbs_attrs_create_cq_cmd_attr_ids."""

    HANDLE       = 0
    CQE          = 1
    USER_HANDLE  = 2
    COMP_CHANNEL = 3
    COMP_VECTOR  = 4
    FLAGS        = 5
    RESP_CQE     = 6
    EVENT_FD     = 7


class CreateQp(IntEnum):
    """enum uverbs_attrs_create_qp_cmd_attr_ids."""

    HANDLE         = 0
    PD_HANDLE      = 2
    SRQ_HANDLE     = 3
    SEND_CQ_HANDLE = 4
    RECV_CQ_HANDLE = 5
    USER_HANDLE    = 7
    CAP            = 8
    TYPE           = 9
    FLAGS          = 10
    SOURCE_QPN     = 11
    EVENT_FD       = 12
    RESP_CAP       = 13
    RESP_QP_NUM    = 14


class CreateSrq(IntEnum):
    """enum uverbs_attrs_create_srq_cmd_attr_ids."""

    HANDLE       = 0
    PD_HANDLE    = 1
    USER_HANDLE  = 4
    MAX_WR       = 5
    MAX_SGE      = 6
    LIMIT        = 7
    TYPE         = 9
    EVENT_FD     = 10
    RESP_MAX_WR  = 11
    RESP_MAX_SGE = 12
    RESP_SRQ_NUM = 13


DESTROYED, DESTROY_RESP = 0, 1  # of every destroy method: the handle, and how many of its events were reported


class QueryMr(IntEnum):
    """enum uverbs_attrs_query_mr_cmd_attr_ids."""

    HANDLE      = 0
    RESP_LKEY   = 1
    RESP_RKEY   = 2
    RESP_LENGTH = 3
    RESP_IOVA   = 4


ASYNC_EVENT_FD = 0  # UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE


class Uar(IntEnum):
    """enum mlx5_ib_uar_alloc_attrs."""

    HANDLE      = _DRIVER
    TYPE        = _DRIVER + 1
    MMAP_OFFSET = _DRIVER + 2
    MMAP_LENGTH = _DRIVER + 3
    PAGE_ID     = _DRIVER + 4


class Devx(IntEnum):
    """enum mlx5_ib_devx_other_attrs."""

    IN  = _DRIVER
    OUT = _DRIVER + 1


EQN_VECTOR, EQN_OUT = _DRIVER, _DRIVER + 1  # enum mlx5_ib_devx_query_eqn_attrs
UAR_INDEX, UAR_PAGE = _DRIVER, _DRIVER + 1  # enum mlx5_ib_devx_query_uar_attrs


class EventFd(IntEnum):
    """enum mlx5_ib_devx_async_event_fd_alloc_attrs."""

    HANDLE = _DRIVER
    FLAGS  = _DRIVER + 1


OMIT_DATA = 1  # MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA


class Subscribe(IntEnum):
    """enum mlx5_ib_devx_subscribe_event_attrs."""

    FD_HANDLE     = _DRIVER
    OBJ_HANDLE    = _DRIVER + 1
    TYPE_NUM_LIST = _DRIVER + 2
    FD_NUM        = _DRIVER + 3
    COOKIE        = _DRIVER + 4


class DevxObject(IntEnum):
    """enum mlx5_ib_devx_obj_create_attrs, and those of the other methods."""

    HANDLE = _DRIVER
    IN     = _DRIVER + 1
    OUT    = _DRIVER + 2


class RegDmabufMr(IntEnum):
    """enum uverbs_attrs_reg_dmabuf_mr_cmd_attr_ids."""

    HANDLE       = 0
    PD_HANDLE    = 1
    OFFSET       = 2
    LENGTH       = 3
    IOVA         = 4
    FD           = 5
    ACCESS_FLAGS = 6
    RESP_LKEY    = 7
    RESP_RKEY    = 8


class Umem(IntEnum):
    """enum mlx5_ib_devx_umem_reg_attrs."""

    HANDLE      = _DRIVER
    ADDR        = _DRIVER + 1
    LEN         = _DRIVER + 2
    ACCESS      = _DRIVER + 3
    OUT_ID      = _DRIVER + 4
    PGSZ_BITMAP = _DRIVER + 5
    DMABUF_FD   = _DRIVER + 6


class UarType(IntEnum):
    """enum mlx5_ib_uapi_uar_alloc_type."""

    BLUEFLAME = 0
    NONCACHE  = 1


# --- structures of uverbs (ib_user_verbs.h) --------------------------------------------------------------------------

OPTIONAL_MR_ACCESS = 1  # IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS

DEVICE = Entry("ib_uverbs_ex_query_device_resp", 304, """
    fw_ver                  0  u64
    node_guid               8  be64
    sys_image_guid         16  be64
    max_mr_size            24  u64
    page_size_cap          32  u64
    vendor_id              40  u32
    vendor_part_id         44  u32
    hw_ver                 48  u32
    max_qp                 52  u32
    max_qp_wr              56  u32
    device_cap_flags       60  u32
    max_sge                64  u32
    max_sge_rd             68  u32
    max_cq                 72  u32
    max_cqe                76  u32
    max_mr                 80  u32
    max_pd                 84  u32
    max_qp_rd_atom         88  u32
    max_res_rd_atom        96  u32
    max_qp_init_rd_atom   100  u32
    atomic_cap            108  u32
    max_ah                144  u32
    max_srq               156  u32
    max_srq_wr            160  u32
    max_srq_sge           164  u32
    max_pkeys             168  u16
    local_ca_ack_delay    170  u8
    phys_port_cnt         171  u8
    comp_mask             176  u32
    response_length       180  u32
    timestamp_mask        208  u64
    hca_core_clock        216  u64
    device_cap_flags_ex   224  u64
""")
PORT = Entry("ib_uverbs_query_port_resp_ex", 48, """
    port_cap_flags   0  u32
    max_msg_sz       4  u32
    gid_tbl_len     16  u32
    pkey_tbl_len    20  u16
    lid             22  u16
    sm_lid          24  u16
    state           26  u8
    max_mtu         27  u8
    active_mtu      28  u8
    lmc             29  u8
    max_vl_num      30  u8
    active_width    34  u8
    active_speed    35  u8
    phys_state      36  u8
    link_layer      37  u8
    flags           38  u8
    port_cap_flags2 40  u16
""")
GID_ENTRY = Entry("ib_uverbs_gid_entry", 32, """
    gid           0  raw[16]
    gid_index    16  u32
    port_num     20  u32
    gid_type     24  u32
    netdev_index 28  u32
""")
REG_MR = Entry("ib_uverbs_reg_mr", 40, """
    start         8  u64
    length       16  u64
    hca_va       24  u64
    pd_handle    32  u32
    access_flags 36  u32
""")
REG_MR_RESP = Entry("ib_uverbs_reg_mr_resp", 12, """
    mr_handle 0  u32
    lkey      4  u32
    rkey      8  u32
""")
REREG_MR = Entry("ib_uverbs_rereg_mr", 48, """
    mr_handle     8  u32
    flags        12  u32
    start        16  u64
    length       24  u64
    hca_va       32  u64
    pd_handle    40  u32
    access_flags 44  u32
""")
RESIZE_CQ = Entry("ib_uverbs_resize_cq", 16, """
    cq_handle  8  u32
    cqe       12  u32
""")
AH_ATTR = Entry("ib_uverbs_ah_attr", 32, """
    dgid           0  raw[16]
    flow_label    16  u32
    sgid_index    20  u8
    hop_limit     21  u8
    traffic_class 22  u8
    dlid          24  u16
    sl            26  u8
    src_path_bits 27  u8
    static_rate   28  u8
    is_global     29  u8
    port_num      30  u8
""")
CREATE_AH = Entry("ib_uverbs_create_ah", 56, """
    user_handle  8  u64
    pd_handle   16  u32
    attr        24  raw[32]
""")
CREATE_QP = Entry("ib_uverbs_ex_create_qp", 64, """
    user_handle      0  u64
    pd_handle        8  u32
    send_cq_handle  12  u32
    recv_cq_handle  16  u32
    srq_handle      20  u32
    max_send_wr     24  u32
    max_recv_wr     28  u32
    max_send_sge    32  u32
    max_recv_sge    36  u32
    max_inline_data 40  u32
    sq_sig_all      44  u8
    qp_type         45  u8
    is_srq          46  u8
    create_flags    52  u32
""")
CREATE_QP_RESP = Entry("ib_uverbs_ex_create_qp_resp", 40, """
    qp_handle        0  u32
    qpn              4  u32
    max_send_wr      8  u32
    max_recv_wr     12  u32
    max_send_sge    16  u32
    max_recv_sge    20  u32
    max_inline_data 24  u32
    response_length 36  u32
""")
QP_CAP = Entry("ib_uverbs_qp_cap", 20, """
    max_send_wr      0  u32
    max_recv_wr      4  u32
    max_send_sge     8  u32
    max_recv_sge    12  u32
    max_inline_data 16  u32
""")
QP_DEST = Entry("ib_uverbs_qp_dest", 32, """
    dgid           0  raw[16]
    flow_label    16  u32
    dlid          20  u16
    sgid_index    24  u8
    hop_limit     25  u8
    traffic_class 26  u8
    sl            27  u8
    src_path_bits 28  u8
    static_rate   29  u8
    is_global     30  u8
    port_num      31  u8
""")
QUERY_QP = Entry("ib_uverbs_query_qp", 16, """
    qp_handle  8  u32
    attr_mask 12  u32
""")
QUERY_QP_RESP = Entry("ib_uverbs_query_qp_resp", 128, """
    dest                 0  raw[32]
    alt_dest            32  raw[32]
    max_send_wr         64  u32
    max_recv_wr         68  u32
    max_send_sge        72  u32
    max_recv_sge        76  u32
    max_inline_data     80  u32
    qkey                84  u32
    rq_psn              88  u32
    sq_psn              92  u32
    dest_qp_num         96  u32
    qp_access_flags    100  u32
    pkey_index         104  u16
    qp_state           108  u8
    cur_qp_state       109  u8
    path_mtu           110  u8
    path_mig_state     111  u8
    sq_draining        112  u8
    max_rd_atomic      113  u8
    max_dest_rd_atomic 114  u8
    min_rnr_timer      115  u8
    port_num           116  u8
    timeout            117  u8
    retry_cnt          118  u8
    rnr_retry          119  u8
    sq_sig_all         122  u8
""")
MODIFY_QP = Entry("ib_uverbs_modify_qp", 112, """
    dest                 0  raw[32]
    alt_dest            32  raw[32]
    qp_handle           64  u32
    attr_mask           68  u32
    qkey                72  u32
    rq_psn              76  u32
    sq_psn              80  u32
    dest_qp_num         84  u32
    qp_access_flags     88  u32
    pkey_index          92  u16
    qp_state            96  u8
    cur_qp_state        97  u8
    path_mtu            98  u8
    path_mig_state      99  u8
    max_rd_atomic      101  u8
    max_dest_rd_atomic 102  u8
    min_rnr_timer      103  u8
    port_num           104  u8
    timeout            105  u8
    retry_cnt          106  u8
    rnr_retry          107  u8
""")
MODIFY_SRQ = Entry("ib_uverbs_modify_srq", 16, """
    srq_handle 0  u32
    attr_mask  4  u32
    max_wr     8  u32
    srq_limit 12  u32
""")
QUERY_SRQ = Entry("ib_uverbs_query_srq", 16, """
    srq_handle 8  u32
""")
QUERY_SRQ_RESP = Entry("ib_uverbs_query_srq_resp", 16, """
    max_wr    0  u32
    max_sge   4  u32
    srq_limit 8  u32
""")
ASYNC_EVENT = Entry("ib_uverbs_async_event_desc", 16, """
    element    0  u64
    event_type 8  u32
""")


class QpMask(IntFlag):
    """enum ibv_qp_attr_mask."""

    STATE              = 1 << 0
    CUR_STATE          = 1 << 1
    EN_SQD_NOTIFY      = 1 << 2
    ACCESS_FLAGS       = 1 << 3
    PKEY_INDEX         = 1 << 4
    PORT               = 1 << 5
    QKEY               = 1 << 6
    AV                 = 1 << 7
    PATH_MTU           = 1 << 8
    TIMEOUT            = 1 << 9
    RETRY_CNT          = 1 << 10
    RNR_RETRY          = 1 << 11
    RQ_PSN             = 1 << 12
    MAX_QP_RD_ATOMIC   = 1 << 13
    ALT_PATH           = 1 << 14
    MIN_RNR_TIMER      = 1 << 15
    SQ_PSN             = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE     = 1 << 18
    CAP                = 1 << 19
    DEST_QPN           = 1 << 20


class QpKind(IntEnum):
    """enum ib_uverbs_qp_type."""

    RC = 2
    UC = 3
    UD = 4


class SrqMask(IntFlag):
    """enum ibv_srq_attr_mask."""

    MAX_WR = 1
    LIMIT  = 2


class Rereg(IntFlag):
    """enum ibv_rereg_mr_flags."""

    TRANSLATION = 1
    PD          = 2
    ACCESS      = 4


# --- structures of mlx5 (mlx5-abi.h) ---------------------------------------------------------------------------------

CONTEXT = Entry("mlx5_ib_alloc_ucontext_req_v2", 32, """
    total_num_bfregs        0  u32
    num_low_latency_bfregs  4  u32
    flags                   8  u32
    max_cqe_version        16  u8
    lib_caps               24  u64
""")
CONTEXT_RESP = Entry("mlx5_ib_alloc_ucontext_resp", 72, """
    qp_tab_size         0  u32
    bf_reg_size         4  u32
    tot_bfregs          8  u32
    cache_line_size    12  u32
    max_sq_desc_sz     16  u16
    max_rq_desc_sz     18  u16
    max_send_wqebb     20  u32
    max_recv_wr        24  u32
    max_srq_recv_wr    28  u32
    num_ports          32  u16
    comp_mask          36  u32
    response_length    40  u32
    cqe_version        44  u8
    cmds_supp_uhw      45  u8
    eth_min_inline     46  u8
    log_uar_size       56  u32
    num_uars_per_page  60  u32
    num_dyn_bfregs     64  u32
""")
UHW_QUERY_DEVICE, UHW_CREATE_AH = 1, 2  # MLX5_USER_CMDS_SUPP_UHW_*
INLINE_NONE = 1  # MLX5_USER_INLINE_MODE_NONE
MLX5_CREATE_CQ = Entry("mlx5_ib_create_cq", 32, """
    buf_addr       0  u64
    db_addr        8  u64
    cqe_size      16  u32
    cqe_comp_en   20  u8
    flags         22  u16
    uar_page_index 24 u16
""")
CQ_UAR_PAGE_INDEX = 2  # MLX5_IB_CREATE_CQ_FLAGS_*
MLX5_RESIZE_CQ = Entry("mlx5_ib_resize_cq", 16, """
    buf_addr 0  u64
    cqe_size 8  u16
""")
MLX5_CREATE_QP = Entry("mlx5_ib_create_qp", 56, """
    buf_addr      0  u64
    db_addr       8  u64
    sq_wqe_count 16  u32
    rq_wqe_count 20  u32
    rq_wqe_shift 24  u32
    flags        28  u32
    uidx         32  u32
    bfreg_index  36  u32
""")
# MLX5_QP_FLAG_*
QP_SCATTER_CQE, QP_ALLOW_SCATTER_CQE, QP_PACKET_BASED_CREDIT, QP_UAR_PAGE_INDEX = 1 << 1, 1 << 8, 1 << 9, 1 << 10
MLX5_CREATE_SRQ = Entry("mlx5_ib_create_srq", 32, """
    buf_addr  0  u64
    db_addr   8  u64
    flags    16  u32
    uidx     24  u32
""")
CREATE_AH_RESP = Entry("mlx5_ib_create_ah_resp", 16, """
    response_length 0  u32
    dmac            4  raw[6]
""")
