"""The kernel's interface to the RDMA connection manager: numbers and structures of <rdma/rdma_user_cm.h>, version 4.

Structures are in the byte order of the machine, except GUIDs. Names are those of the header without their prefixes.
"""

from __future__ import annotations

from enum import IntEnum

from ..formats.layout import Entry

ABI_VERSION = 4  # RDMA_USER_CM_ABI_VERSION


class Command(IntEnum):
    """RDMA_USER_CM_CMD_*."""

    CREATE_ID     = 0
    DESTROY_ID    = 1
    BIND_IP       = 2
    RESOLVE_IP    = 3
    RESOLVE_ROUTE = 4
    QUERY_ROUTE   = 5
    CONNECT       = 6
    LISTEN        = 7
    ACCEPT        = 8
    REJECT        = 9
    DISCONNECT    = 10
    INIT_QP_ATTR  = 11
    GET_EVENT     = 12
    GET_OPTION    = 13
    SET_OPTION    = 14
    NOTIFY        = 15
    JOIN_IP_MCAST = 16
    LEAVE_MCAST   = 17
    MIGRATE_ID    = 18
    QUERY         = 19
    BIND          = 20
    RESOLVE_ADDR  = 21
    JOIN_MCAST    = 22


class Event(IntEnum):
    """enum rdma_cm_event_type of librdmacm, whose numbers are the kernel's."""

    ADDR_RESOLVED    = 0
    ADDR_ERROR       = 1
    ROUTE_RESOLVED   = 2
    CONNECT_REQUEST  = 4
    CONNECT_RESPONSE = 5
    UNREACHABLE      = 7
    REJECTED         = 8
    ESTABLISHED      = 9
    DISCONNECTED     = 10
    TIMEWAIT_EXIT    = 15


class Level(IntEnum):
    """Levels of options: RDMA_OPTION_*."""

    ID = 0
    IB = 1


class Option(IntEnum):
    """Options of level ID: RDMA_OPTION_ID_*."""

    TOS         = 0
    REUSEADDR   = 1
    AFONLY      = 2
    ACK_TIMEOUT = 3


COMMUNICATION_ESTABLISHED = 4  # IBV_EVENT_COMM_EST, the one event that NOTIFY takes

HEADER = Entry("rdma_ucm_cmd_hdr", 8, """
    cmd 0  u32
    in  4  u16
    out 6  u16
""")
CREATE_ID = Entry("rdma_ucm_create_id", 24, """
    uid       0  u64
    response  8  u64
    ps       16  u16
    qp_type  18  u8
""")
CREATE_ID_RESP = Entry("rdma_ucm_create_id_resp", 4, """
    id 0  u32
""")
DESTROY_ID = Entry("rdma_ucm_destroy_id", 16, """
    response 0  u64
    id       8  u32
""")
DESTROY_ID_RESP = Entry("rdma_ucm_destroy_id_resp", 4, """
    events_reported 0  u32
""")
BIND_IP = Entry("rdma_ucm_bind_ip", 40, """
    addr  8  raw[28]
    id   36  u32
""")
BIND = Entry("rdma_ucm_bind", 136, """
    id        0  u32
    addr_size 4  u16
    reserved  6  u16
    addr      8  raw[128]
""")
RESOLVE_IP = Entry("rdma_ucm_resolve_ip", 64, """
    src_addr    0  raw[28]
    dst_addr   28  raw[28]
    id         56  u32
    timeout_ms 60  u32
""")
RESOLVE_ADDR = Entry("rdma_ucm_resolve_addr", 272, """
    id           0  u32
    timeout_ms   4  u32
    src_size     8  u16
    dst_size    10  u16
    reserved    12  u32
    src_addr    16  raw[128]
    dst_addr   144  raw[128]
""")
RESOLVE_ROUTE = Entry("rdma_ucm_resolve_route", 8, """
    id         0  u32
    timeout_ms 4  u32
""")
QUERY = Entry("rdma_ucm_query", 16, """
    response  0  u64
    id        8  u32
    option   12  u32
""")
PATH_REC = Entry("ib_user_path_rec", 64, """
    dgid                       0  raw[16]
    sgid                      16  raw[16]
    flow_label                40  be32
    reversible                44  u32
    mtu                       48  u32
    pkey                      52  be16
    hop_limit                 54  u8
    traffic_class             55  u8
    numb_path                 56  u8
    sl                        57  u8
    mtu_selector              58  u8
    rate_selector             59  u8
    rate                      60  u8
    packet_life_time_selector 61  u8
    packet_life_time          62  u8
    preference                63  u8
""")
QUERY_ROUTE_RESP = Entry("rdma_ucm_query_route_resp", 208, """
    node_guid     0  raw[8]
    ib_route      8  raw[128]
    src_addr    136  raw[28]
    dst_addr    164  raw[28]
    num_paths   192  u32
    port_num    196  u8
    ibdev_index 200  u32
""")
CONN_PARAM = Entry("rdma_ucm_conn_param", 272, """
    qp_num                0  u32
    qkey                  4  u32
    private_data          8  raw[256]
    private_data_len    264  u8
    srq                 265  u8
    responder_resources 266  u8
    initiator_depth     267  u8
    flow_control        268  u8
    retry_count         269  u8
    rnr_retry_count     270  u8
    valid               271  u8
""")
UD_PARAM = Entry("rdma_ucm_ud_param", 304, """
    qp_num             0  u32
    qkey               4  u32
    ah_attr            8  raw[32]
    private_data      40  raw[256]
    private_data_len 296  u8
""")
CONNECT = Entry("rdma_ucm_connect", 288, """
    conn_param   0  raw[272]
    id         272  u32
    ece        280  raw[8]
""")
LISTEN = Entry("rdma_ucm_listen", 8, """
    id      0  u32
    backlog 4  u32
""")
ACCEPT = Entry("rdma_ucm_accept", 296, """
    uid          0  u64
    conn_param   8  raw[272]
    id         280  u32
    ece        288  raw[8]
""")
REJECT = Entry("rdma_ucm_reject", 264, """
    id               0  u32
    private_data_len 4  u8
    reason           5  u8
    private_data     8  raw[256]
""")
DISCONNECT = Entry("rdma_ucm_disconnect", 4, """
    id 0  u32
""")
INIT_QP_ATTR = Entry("rdma_ucm_init_qp_attr", 16, """
    response  0  u64
    id        8  u32
    qp_state 12  u32
""")
QP_ATTR = Entry("ib_uverbs_qp_attr", 144, """
    qp_attr_mask         0  u32
    qp_state             4  u32
    cur_qp_state         8  u32
    path_mtu            12  u32
    path_mig_state      16  u32
    qkey                20  u32
    rq_psn              24  u32
    sq_psn              28  u32
    dest_qp_num         32  u32
    qp_access_flags     36  u32
    ah_attr             40  raw[32]
    pkey_index         124  u16
    max_rd_atomic      130  u8
    max_dest_rd_atomic 131  u8
    min_rnr_timer      132  u8
    port_num           133  u8
    timeout            134  u8
    retry_cnt          135  u8
    rnr_retry          136  u8
""")
NOTIFY = Entry("rdma_ucm_notify", 8, """
    id    0  u32
    event 4  u32
""")
GET_EVENT = Entry("rdma_ucm_get_event", 8, """
    response 0  u64
""")
EVENT_RESP = Entry("rdma_ucm_event_resp", 336, """
    uid        0  u64
    id         8  u32
    event     12  u32
    status    16  u32
    param     20  raw[304]
    reserved 324  u32
    ece      328  raw[8]
""")
SET_OPTION = Entry("rdma_ucm_set_option", 24, """
    optval   0  u64
    id       8  u32
    level   12  u32
    optname 16  u32
    optlen  20  u32
""")
MIGRATE_ID = Entry("rdma_ucm_migrate_id", 16, """
    response  0  u64
    id        8  u32
    fd       12  u32
""")
MIGRATE_RESP = Entry("rdma_ucm_migrate_resp", 4, """
    events_reported 0  u32
""")
