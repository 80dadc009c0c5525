"""Ethernet queues: contexts and mailboxes of transport domains, TISs, TIRs, RQTs, SQs, RQs and Q counters.

A send queue (SQ) belongs to a transport interface send (TIS). Packets reach a receive queue (RQ) through a transport
interface receive (TIR), directly or by a hash and a receive queue table (RQT). TISs and TIRs share a transport domain.
"""

from collections.abc import Iterable
from enum import IntEnum, IntFlag

import numpy as np

from .contexts import WQ
from .layout import BitStruct, answer, request


class QueueState(IntEnum):
    """sqc.state and rqc.state."""

    RST = 0
    RDY = 1
    ERR = 3


class RqMemory(IntEnum):
    """rqc.mem_rq_type: whether the WQEs are in a ring of the queue, or in a receive memory pool."""

    INLINE = 0
    RMP    = 1


class TimestampFormat(IntEnum):
    """ts_format of a queue's context."""

    FREE_RUNNING = 0
    DEFAULT      = 1
    REAL_TIME    = 2


class TimestampFormats(IntEnum):
    """cmd_hca_cap.sq_ts_format and rq_ts_format: which formats a queue can have."""

    FREE_RUNNING = 0
    REAL_TIME    = 1
    BOTH         = 2


class InlineMode(IntEnum):
    """min_wqe_inline_mode: the headers that a WQE must contain."""

    NONE    = 0
    L2      = 1
    IP      = 2
    TCP_UDP = 3


class InlineModeCap(IntEnum):
    """per_protocol_networking_offload_caps.wqe_inline_mode: which headers the device needs inline."""

    L2            = 0
    VPORT_CONTEXT = 1
    NOT_REQUIRED  = 2


class DispType(IntEnum):
    """tirc.disp_type: where a TIR sends its packets, to an RQ or an RQT."""

    DIRECT   = 0
    INDIRECT = 1


class RxHashFn(IntEnum):
    """tirc.rx_hash_fn."""

    NONE          = 0
    INVERTED_XOR8 = 1
    TOEPLITZ      = 2


class SelfLbBlock(IntFlag):
    """tirc.self_lb_block: packets from SQs of the TIR's own transport domain that it drops."""

    UNICAST   = 1
    MULTICAST = 2


class L3Prot(IntEnum):
    """rx_hash_field_select.l3_prot_type."""

    IPV4 = 0
    IPV6 = 1


class L4Prot(IntEnum):
    """rx_hash_field_select.l4_prot_type."""

    TCP = 0
    UDP = 1


class HashField(IntFlag):
    """rx_hash_field_select.selected_fields: what is hashed."""

    SRC_IP    = 1 << 0
    DST_IP    = 1 << 1
    L4_SPORT  = 1 << 2
    L4_DPORT  = 1 << 3
    IPSEC_SPI = 1 << 4


class PacketMerge(IntFlag):
    """tirc.packet_merge_mask: large receive offload (LRO)."""

    LRO_IPV4 = 1
    LRO_IPV6 = 2


class ListQType(IntEnum):
    """rqtc.list_q_type."""

    RQ         = 0
    VIRTIO_NET = 1


class ModifySq(IntFlag):
    """modify_sq_in.modify_bitmask. A change of state needs no bit."""

    PACING_INDEX = 1 << 0


class ModifyRq(IntFlag):
    """modify_rq_in.modify_bitmask. A change of state needs no bit."""

    LWM            = 1 << 0
    VSD            = 1 << 1
    SCATTER_FCS    = 1 << 2
    COUNTER_SET_ID = 1 << 3


class ModifyTir(IntFlag):
    """modify_tir_in.bitmask."""

    PACKET_MERGE   = 1 << 0
    INDIRECT_TABLE = 1 << 1
    HASH           = 1 << 2
    SELF_LB_EN     = 1 << 4


class ModifyTis(IntFlag):
    """modify_tis_in.bitmask."""

    PRIO                 = 1 << 0
    STRICT_LAG           = 1 << 1
    LAG_TX_PORT_AFFINITY = 1 << 2


class ModifyRqt(IntFlag):
    """modify_rqt_in.bitmask."""

    RQN_LIST = 1 << 0


RQ_NUMBER_MASK = 0xFF_FFFF  # of an entry of an RQT


def rq_list(rqns: Iterable[int]) -> bytes:
    """Return the list `rq_num` of an RQT, of 4 bytes for each RQ."""
    return np.array(list(rqns), ">u4").tobytes()


def rqns_of(listed: bytes) -> list[int]:
    """Return the numbers of the RQs in a list `rq_num`."""
    return (np.frombuffer(listed, ">u4") & RQ_NUMBER_MASK).tolist()


# --- contexts

SQC = BitStruct("sqc", 240, """
    rlky                           0x000      1
    cd_master                      0x001      1
    fre                            0x002      1
    flush_in_error_en              0x003      1
    allow_multi_pkt_send_wqe       0x004      1
    min_wqe_inline_mode            0x005      3
    state                          0x008      4
    reg_umr                        0x00c      1
    allow_swp                      0x00d      1
    hairpin                        0x00e      1
    non_wire                       0x00f      1
    static_sq_wq                   0x010      1
    ts_format                      0x01a      2
    user_index                     0x028     24
    cqn                            0x048     24
    hairpin_peer_rq                0x068     24
    hairpin_peer_vhca              0x090     16
    ts_cqe_to_dest_cqn             0x0c8     24
    packet_pacing_rate_limit_index 0x0f0     16
    tis_lst_sz                     0x100     16
    qos_queue_group_id             0x110     16
    tis_num_0                      0x168     24
    wq                             0x180   1536  WQ
""", WQ=WQ)

RQC = BitStruct("rqc", 240, """
    rlky                        0x000      1
    delay_drop_en               0x001      1
    scatter_fcs                 0x002      1
    vsd                         0x003      1
    mem_rq_type                 0x004      4
    state                       0x008      4
    flush_in_error_en           0x00d      1
    hairpin                     0x00e      1
    ts_format                   0x01a      2
    user_index                  0x028     24
    cqn                         0x048     24
    counter_set_id              0x060      8
    rmpn                        0x088     24
    hairpin_peer_sq             0x0a8     24
    hairpin_peer_vhca           0x0d0     16
    reservation_timeout         0x130     16
    wq                          0x180   1536  WQ
""", WQ=WQ)

TISC = BitStruct("tisc", 160, """
    strict_lag_tx_port_affinity 0x000      1
    tls_en                      0x001      1
    lag_tx_port_affinity        0x004      4
    prio                        0x00c      4
    transport_domain            0x128     24
    underlay_qpn                0x148     24
    pd                          0x168     24
""")

RX_HASH_FIELD_SELECT = BitStruct("rx_hash_field_select", 4, """
    l3_prot_type                0x000      1
    l4_prot_type                0x001      1
    selected_fields             0x002     30
""")

TIRC = BitStruct("tirc", 240, """
    disp_type                    0x020      4
    tls_en                       0x024      1
    lro_timeout_period_usecs     0x084     16
    packet_merge_mask            0x094      4
    lro_max_ip_payload_size      0x098      8
    inline_rqn                   0x0e8     24
    rx_hash_symmetric            0x100      1
    tunneled_offload_en          0x102      1
    indirect_table               0x108     24
    rx_hash_fn                   0x120      4
    self_lb_block                0x126      2
    transport_domain             0x128     24
    rx_hash_toeplitz_key         0x140    320
    rx_hash_field_selector_outer 0x280     32  SELECT
    rx_hash_field_selector_inner 0x2a0     32  SELECT
""", SELECT=RX_HASH_FIELD_SELECT)

# A list of `allowed_list_size` addresses follows.
NIC_VPORT_CONTEXT = BitStruct("nic_vport_context", 256, """
    min_wqe_inline_mode         0x005      3
    roce_en                     0x01f      1
    mtu                         0x130     16
    port_guid                   0x180     64
    node_guid                   0x1c0     64
    promisc_uc                  0x780      1
    promisc_mc                  0x781      1
    promisc_all                 0x782      1
    allowed_list_size           0x794     12
    permanent_address           0x7a0     64
""")

# nic_vport_context.mtu counts whole frames, including the MAC header, a VLAN tag and the check sequence.
VPORT_FRAMING = 14 + 4 + 4

RQTC = BitStruct("rqtc", 240, """
    list_q_type                 0x0a5      3
    rqt_max_size                0x0b0     16
    rq_vhca_id_format           0x0c0      1
    rqt_actual_size             0x0d0     16
""")

# --- mailboxes

ALLOC_TRANSPORT_DOMAIN_IN = request("alloc_transport_domain_in", 16)

ALLOC_TRANSPORT_DOMAIN_OUT = answer("alloc_transport_domain_out", 16, """
    transport_domain            0x048     24
""")

DEALLOC_TRANSPORT_DOMAIN_IN = request("dealloc_transport_domain_in", 16, """
    transport_domain            0x048     24
""")

CREATE_TIS_IN = request("create_tis_in", 192, """
    ctx                         0x100   1280  TISC
""", TISC=TISC)

CREATE_TIS_OUT = answer("create_tis_out", 16, """
    tisn                        0x048     24
""")

MODIFY_TIS_IN = request("modify_tis_in", 192, """
    tisn                        0x048     24
    bitmask                     0x080     64
    ctx                         0x100   1280  TISC
""", TISC=TISC)

DESTROY_TIS_IN = request("destroy_tis_in", 16, """
    tisn                        0x048     24
""")

QUERY_TIS_IN = request("query_tis_in", 16, """
    tisn                        0x048     24
""")

QUERY_TIS_OUT = answer("query_tis_out", 176, """
    ctx                         0x080   1280  TISC
""", TISC=TISC)

CREATE_TIR_IN = request("create_tir_in", 272, """
    ctx                         0x100   1920  TIRC
""", TIRC=TIRC)

CREATE_TIR_OUT = answer("create_tir_out", 16, """
    icm_address_63_40           0x008     24
    icm_address_39_32           0x040      8
    tirn                        0x048     24
    icm_address_31_0            0x060     32
""")

MODIFY_TIR_IN = request("modify_tir_in", 272, """
    tirn                        0x048     24
    bitmask                     0x080     64
    ctx                         0x100   1920  TIRC
""", TIRC=TIRC)

DESTROY_TIR_IN = request("destroy_tir_in", 16, """
    tirn                        0x048     24
""")

QUERY_TIR_IN = request("query_tir_in", 16, """
    tirn                        0x048     24
""")

QUERY_TIR_OUT = answer("query_tir_out", 272, """
    ctx                         0x100   1920  TIRC
""", TIRC=TIRC)

# rq_num is an array with 4 bytes for each of rqt_actual_size RQs; the low 24 bits are the number.
CREATE_RQT_IN = request("create_rqt_in", 272, """
    ctx                         0x100   1920  RQTC
    rq_num                      0x880      *
""", RQTC=RQTC)

CREATE_RQT_OUT = answer("create_rqt_out", 16, """
    rqtn                        0x048     24
""")

MODIFY_RQT_IN = request("modify_rqt_in", 272, """
    rqtn                        0x048     24
    bitmask                     0x080     64
    ctx                         0x100   1920  RQTC
    rq_num                      0x880      *
""", RQTC=RQTC)

DESTROY_RQT_IN = request("destroy_rqt_in", 16, """
    rqtn                        0x048     24
""")

QUERY_RQT_IN = request("query_rqt_in", 16, """
    rqtn                        0x048     24
""")

QUERY_RQT_OUT = answer("query_rqt_out", 272, """
    ctx                         0x100   1920  RQTC
    rq_num                      0x880      *
""", RQTC=RQTC)

CREATE_SQ_IN = request("create_sq_in", 272, """
    ctx                         0x100   1920  SQC
""", SQC=SQC)

CREATE_SQ_OUT = answer("create_sq_out", 16, """
    sqn                         0x048     24
""")

MODIFY_SQ_IN = request("modify_sq_in", 272, """
    sq_state                    0x040      4
    sqn                         0x048     24
    modify_bitmask              0x080     64
    ctx                         0x100   1920  SQC
""", SQC=SQC)

DESTROY_SQ_IN = request("destroy_sq_in", 16, """
    sqn                         0x048     24
""")

QUERY_SQ_IN = request("query_sq_in", 16, """
    sqn                         0x048     24
""")

QUERY_SQ_OUT = answer("query_sq_out", 272, """
    ctx                         0x100   1920  SQC
""", SQC=SQC)

CREATE_RQ_IN = request("create_rq_in", 272, """
    ctx                         0x100   1920  RQC
""", RQC=RQC)

CREATE_RQ_OUT = answer("create_rq_out", 16, """
    rqn                         0x048     24
""")

MODIFY_RQ_IN = request("modify_rq_in", 272, """
    rq_state                    0x040      4
    rqn                         0x048     24
    modify_bitmask              0x080     64
    ctx                         0x100   1920  RQC
""", RQC=RQC)

DESTROY_RQ_IN = request("destroy_rq_in", 16, """
    rqn                         0x048     24
""")

QUERY_RQ_IN = request("query_rq_in", 16, """
    rqn                         0x048     24
""")

QUERY_RQ_OUT = answer("query_rq_out", 272, """
    ctx                         0x100   1920  RQC
""", RQC=RQC)

QUERY_NIC_VPORT_CONTEXT_IN = request("query_nic_vport_context_in", 16, """
    other_vport                 0x040      1
    vport_number                0x050     16
    allowed_list_type           0x065      3
""")

QUERY_NIC_VPORT_CONTEXT_OUT = answer("query_nic_vport_context_out", 272, """
    nic_vport_context           0x080   2048  CONTEXT
""", CONTEXT=NIC_VPORT_CONTEXT)

ALLOC_Q_COUNTER_IN = request("alloc_q_counter_in", 16)

ALLOC_Q_COUNTER_OUT = answer("alloc_q_counter_out", 16, """
    counter_set_id              0x058      8
""")

DEALLOC_Q_COUNTER_IN = request("dealloc_q_counter_in", 16, """
    counter_set_id              0x058      8
""")

QUERY_Q_COUNTER_IN = request("query_q_counter_in", 32, """
    clear                       0x0c0      1
    counter_set_id              0x0f8      8
""")

QUERY_Q_COUNTER_OUT = answer("query_q_counter_out", 256, """
    rx_write_requests           0x080     32
    rx_read_requests            0x0c0     32
    rx_atomic_requests          0x100     32
    out_of_buffer               0x180     32
    out_of_sequence             0x1c0     32
    local_ack_timeout_err       0x300     32
    cq_overflow                 0x5c0     32
""")
