"""Completion queue entries: the 64-byte CQE, the error CQE, opcodes and syndromes.

A 128-byte CQE is 64 bytes for payload, followed by a 64-byte CQE.
"""

from enum import IntEnum, IntFlag

from .layout import Entry

CQE_SIZE = 64
CQE_SHIFT = 6
WIDE_CQE_SIZE = 128
CQE_SIZES = (CQE_SIZE, WIDE_CQE_SIZE)  # by cqc.cqe_sz
OPCODE_SHIFT = 4
OWNER_MASK = 1
CI_MASK = 0xFF_FFFF
SL_SHIFT, GRH_SHIFT = 24, 28  # of flags_rqpn: service level, whether the datagram has a GRH; below them is the sender
CQE_ROCE_IPV6, CQE_ROCE_IPV4 = 1, 2  # in place of the service level, on Ethernet: which header the "GRH" is
FORMAT_SHIFT, FORMAT_MASK = 2, 0x0C  # of op_own; bit 1 is that of the solicited event
INLINE_32_BYTES, INLINE_64_BYTES = 32, 64  # the most payload with these formats (CqeFormat)
INIT_OP_OWN = 0xF1  # INVALID << 4 | owner 1: what a ring holds before the first lap, whose owner bit is 0


class CqeOpcode(IntEnum):
    """High nibble of op_own."""

    REQ           = 0
    RESP_WR_IMM   = 1
    RESP_SEND     = 2
    RESP_SEND_IMM = 3
    RESP_SEND_INV = 4
    RESIZE_CQ     = 5
    NO_PACKET     = 6
    SIG_ERR       = 12
    REQ_ERR       = 13
    RESP_ERR      = 14
    INVALID       = 15


class CqeFormat(IntEnum):
    """Bits 3:2 of op_own: whether the payload of a message is in the CQE, from its start, or in the 64 bytes before.

    qpc.cs_res and qpc.cs_req ask for it (commands.ScatterToCqe, commands.ResponsesToCqe).
    """

    NO_INLINE  = 0
    INLINE_32  = 1
    INLINE_64  = 2
    COMPRESSED = 3


class Syndrome(IntEnum):
    """err_cqe64.syndrome (PRM, "Completion with error syndromes")."""

    LOCAL_LENGTH          = 0x01
    LOCAL_QP_OP           = 0x02
    LOCAL_PROT            = 0x04
    WR_FLUSH              = 0x05
    MW_BIND               = 0x06
    BAD_RESP              = 0x10
    LOCAL_ACCESS          = 0x11
    REMOTE_INVAL_REQ      = 0x12
    REMOTE_ACCESS         = 0x13
    REMOTE_OP             = 0x14
    TRANSPORT_RETRY_EXC   = 0x15
    RNR_RETRY_EXC         = 0x16
    REMOTE_ABORTED        = 0x22


class RxChecksum(IntFlag):
    """cqe64.hds_ip_ext of an Ethernet packet: the checks that the packet passed."""

    L2_OK = 1
    L3_OK = 2
    L4_OK = 4


class RxHeaders(IntFlag):
    """cqe64.l4_hdr_type_etc of an Ethernet packet: the flags in addition to the two header types."""

    VLAN_STRIPPED = 1 << 0
    IP_OPTIONS    = 1 << 1
    FRAGMENT      = 1 << 7


class RxL3Type(IntEnum):
    """cqe64.l4_hdr_type_etc >> RX_L3_SHIFT & RX_L3_MASK."""

    NONE = 0
    IPV6 = 1
    IPV4 = 2


class RxL4Type(IntEnum):
    """cqe64.l4_hdr_type_etc >> RX_L4_SHIFT & RX_L4_MASK."""

    NONE         = 0
    TCP          = 1
    UDP          = 2
    TCP_PURE_ACK = 3
    TCP_ACK_DATA = 4


class RxHashIp(IntEnum):
    """cqe64.rss_hash_type >> RX_HASH_IP_SHIFT & RX_HASH_MASK: the addresses that were hashed."""

    NONE = 0
    IPV4 = 1
    IPV6 = 2


class RxHashL4(IntEnum):
    """cqe64.rss_hash_type >> RX_HASH_L4_SHIFT & RX_HASH_MASK: the ports that were hashed."""

    NONE      = 0
    TCP       = 1
    UDP       = 2
    IPSEC_SPI = 3


RX_L3_SHIFT, RX_L3_MASK, RX_L4_SHIFT, RX_L4_MASK = 2, 3, 4, 7
RX_HASH_IP_SHIFT, RX_HASH_L4_SHIFT, RX_HASH_MASK = 2, 6, 3
FLOW_TAG_MASK = 0xFF_FFFF  # of sop_drop_qpn, in the CQE of an Ethernet packet
STRIDES_SHIFT, STRIDES_MASK, FILLER = 16, 0x7FFF, 1 << 31  # of byte_cnt, in a striding queue; below is the length
STRIDING_LENGTH_MASK = 0xFFFF
LRO_SEGMENTS_SHIFT = 24  # of srqn_uidx

# For an Ethernet packet, imm_inval_pkey is the metadata that a flow rule has set, sop_drop_qpn has the flow tag, and in
# a striding queue wqe_id is the index of the WQE and wqe_counter that of the packet's first stride. Except for wqe_id,
# ml_path and slid, the fields before offset 24 exist only for Ethernet packets.
CQE64 = Entry("cqe64", 64, """
    tunneled            0  u8
    wqe_id              2  be16
    lro_flags           4  u8
    lro_min_ttl         5  u8
    lro_tcp_win         6  be16
    lro_ack_seq         8  be32
    rss_hash_result    12  be32
    rss_hash_type      16  u8
    ml_path            17  u8
    check_sum          20  be16
    slid               22  be16
    flags_rqpn         24  be32
    hds_ip_ext         28  u8
    l4_hdr_type_etc    29  u8
    vlan_info          30  be16
    srqn_uidx          32  be32
    imm_inval_pkey     36  be32
    app                40  u8
    app_op             41  u8
    app_info           42  be16
    byte_cnt           44  be32
    timestamp          48  be64
    sop_drop_qpn       56  be32
    wqe_counter        60  be16
    signature          62  u8
    op_own             63  u8
""")

ERR_CQE64 = Entry("err_cqe64", 64, """
    srqn               32  be32
    hw_err_synd        52  u8
    hw_synd_type       53  u8
    vendor_err_synd    54  u8
    syndrome           55  u8
    s_wqe_opcode_qpn   56  be32
    wqe_counter        60  be16
    signature          62  u8
    op_own             63  u8
""")
