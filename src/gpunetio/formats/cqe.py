"""Completion queue entries: the 64-byte CQE, the error CQE, opcodes and syndromes.

A 128-byte CQE is 64 bytes for payload, followed by a 64-byte CQE.
"""

from enum import IntEnum

from .layout import Entry

CQE_SIZE = 64
CQE_SHIFT = 6
CQE_SIZES = (64, 128)  # by cqc.cqe_sz
OPCODE_SHIFT = 4
OWNER_MASK = 1
CI_MASK = 0xFF_FFFF
SL_SHIFT, GRH_SHIFT = 24, 28  # of flags_rqpn: service level, whether the datagram has a GRH; below them is the sender
CQE_ROCE_IPV6, CQE_ROCE_IPV4 = 1, 2  # in place of the service level, on Ethernet: which header the "GRH" is
FORMAT_SHIFT, FORMAT_MASK = 2, 0x0C  # of op_own; bit 1 is that of the solicited event
INLINE_BYTES = 32  # the most payload that an INLINE_32 CQE holds, from its start
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
    """Bits 3:2 of op_own: whether the payload of the message is in the CQE, or in the 64 bytes before it."""

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


CQE64 = Entry("cqe64", 64, """
    wqe_id              2  be16
    ml_path            17  u8
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
