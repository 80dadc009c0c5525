"""Work queue elements: control flags, opcodes and the 16-byte segments that WQEs are made of.

A WQE basic block (WQEBB) is 64 bytes; `ds` in the control segment counts segments of 16 bytes.
"""

from enum import IntEnum, IntFlag

from .layout import Entry

WQEBB = 64
WQEBB_SHIFT = 6
SEGMENT = 16
MAX_INLINE = 28  # largest inline write of the device library: the room in one WQEBB after ctrl and raddr
INLINE_SEG = 0x8000_0000
MAX_TRANSFER_SHIFT = 30
MAX_TRANSFER = 1 << MAX_TRANSFER_SHIFT  # most bytes that one WQE transfers
INVALID_LKEY = 0x100  # ends the scatter list of a receive WQE
DS_MASK = 0x3F  # of the control segment's second dword: the WQE's length in segments
# libmlx5 fills WQEs of 64 segments, as max_wqe_sz_sq 1024 allows, although the PRM's `ds` has 6 bits. `ds` is then 0.
MAX_DS = DS_MASK + 1
OPMOD_SHIFT = 24  # of its first dword
MIN_STRIDE_LOG, MIN_STRIDES_LOG = 6, 9  # log_wqe_stride_size and log_wqe_num_of_strides count from these logarithms
STRIDING_WQE = 32  # bytes of a receive WQE of a striding queue: a next segment and one data segment
MMO_DMA = 1  # opmod of an MMO that copies memory
MAX_MMO_SHIFT = 31
MAX_MMO = 1 << MAX_MMO_SHIFT  # most bytes that an MMO copies: a byte_count of 0
EXTENDED_ATOMIC_4, EXTENDED_ATOMIC_8 = 0x08, 0x09  # opmod of a masked atomic: log2 of its bytes - 2, and bit 3


class WqeOpcode(IntEnum):
    """Lowest byte of the control segment's first dword."""

    NOP              = 0x00
    SEND_INVAL       = 0x01
    RDMA_WRITE       = 0x08
    RDMA_WRITE_IMM   = 0x09
    SEND             = 0x0A
    SEND_IMM         = 0x0B
    TSO              = 0x0E
    WAIT             = 0x0F
    RDMA_READ        = 0x10
    ATOMIC_CS        = 0x11
    ATOMIC_FA        = 0x12
    ATOMIC_MASKED_CS = 0x14
    ATOMIC_MASKED_FA = 0x15
    SEND_EN          = 0x17
    FMR              = 0x19
    LOCAL_INVAL      = 0x1B
    CONFIG_CMD       = 0x1F
    SET_PSV          = 0x20
    DUMP             = 0x23
    UMR              = 0x25
    TAG_MATCHING     = 0x28
    ENHANCED_MPSW    = 0x29
    FLOW_TBL_ACCESS  = 0x2C
    MMO              = 0x2F


class WaitMode(IntEnum):
    """opmod of a WAIT: what the WAIT waits for."""

    CQ_PI = 0
    DATA  = 1
    TIME  = 2


class WaitOperation(IntFlag):
    """wait_value_seg.operation: the condition that ends a WAIT for data or time; with INVERT, its opposite does."""

    ALWAYS_TRUE    = 0
    EQUAL          = 1
    BIGGER         = 2
    SMALLER        = 3
    CYCLIC_BIGGER  = 4
    CYCLIC_SMALLER = 5
    INVERT         = 1 << 4


class EthChecksum(IntFlag):
    """eth_seg.cs_flags: the checksums that the device computes."""

    L3_INNER = 1 << 4
    L4_INNER = 1 << 5
    L3       = 1 << 6
    L4       = 1 << 7


class EthSoftwareParser(IntFlag):
    """eth_seg.swp_flags: the kinds of headers at the offsets of the software parser."""

    INNER_L3_IPV6 = 0x01
    INNER_L4_UDP  = 0x02
    OUTER_L3_IPV6 = 0x10
    OUTER_L4_UDP  = 0x20


class CompletionMode(IntEnum):
    """The CE field: when a WQE generates a CQE."""

    ON_ERROR       = 0
    ON_FIRST_ERROR = 1
    ALWAYS         = 2
    CQE_AND_EQE    = 3


class FenceMode(IntEnum):
    """The FM field: what a WQE waits for."""

    NO_FENCE                        = 0
    INITIATOR_SMALL_FENCE           = 1
    FENCE                           = 2
    STRONG_ORDERING                 = 3
    FENCE_AND_INITIATOR_SMALL_FENCE = 4


CE_SHIFT, FM_SHIFT = 2, 5


class CtrlFlags(IntFlag):
    """The byte fm_ce_se: fence mode << 5 | completion mode << 2 | solicited << 1."""

    CQ_ERROR_UPDATE       = 0
    SOLICITED             = 2
    CQ_FIRST_CQE_ERROR    = 4
    CQ_UPDATE             = 8
    INITIATOR_SMALL_FENCE = 32
    FENCE                 = 64
    CQ_UPDATE_FENCE       = 72
    STRONG_ORDERING       = 96


CTRL_SEG = Entry("ctrl_seg", 16, """
    opmod_idx_opcode   0  be32
    qpn_ds             4  be32
    signature          8  u8
    dci_stream         9  be16
    fm_ce_se          11  u8
    imm               12  be32
""")

RADDR_SEG = Entry("raddr_seg", 16, """
    raddr              0  be64
    rkey               8  be32
    reserved          12  be32
""")

# The address vector after the control segment of a UD queue pair's WQE. One without EXTENDED_AV has only the first 16
# bytes, without a GID. `rlid` is the UDP source port on RoCE v2; grh_gid_fl = GRH << 30 | source GID index << 20 | flow
# label.
AV_SEG = Entry("av_seg", 48, """
    q_key              0  be32
    dqp_dct            8  be32
    stat_rate_sl      12  u8
    fl_mlid           13  u8
    rlid              14  be16
    rmac              20  raw[6]
    tclass            26  u8
    hop_limit         27  u8
    grh_gid_fl        28  be32
    rgid              32  raw[16]
""")
BASE_AV_BYTES, EXTENDED_AV = 16, 1 << 31
AV_GRH, AV_SGID_SHIFT, AV_SGID_MASK = 1 << 30, 20, 0xFF  # of grh_gid_fl

DATA_SEG = Entry("data_seg", 16, """
    byte_count         0  be32
    lkey               4  be32
    addr               8  be64
""")

INLINE_HEADER = Entry("inline_header", 4, """
    byte_count         0  be32
""")

ATOMIC_SEG = Entry("atomic_seg", 16, """
    swap_add           0  be64
    compare            8  be64
""")

# A masked atomic has one segment. Only a compare-and-swap of 8 bytes has two: first the values, then the masks.
MASKED_FA32_SEG = Entry("masked_fa32_seg", 16, """
    add_data           0  be32
    field_boundary     4  be32
    reserved           8  be64
""")

MASKED_FA64_SEG = Entry("masked_fa64_seg", 16, """
    add_data           0  be64
    field_boundary     8  be64
""")

MASKED_CS32_SEG = Entry("masked_cs32_seg", 16, """
    swap_data          0  be32
    compare_data       4  be32
    swap_mask          8  be32
    compare_mask      12  be32
""")

MASKED_CS64_SEG = Entry("masked_cs64_seg", 16, """
    swap               0  be64
    compare            8  be64
""")

WAIT_SEG = Entry("wait_seg", 16, """
    reserved           0  u32[2]
    max_index          8  be32
    qpn_cqn           12  be32
""")

# A WAIT for a word in memory, or for a time, has this segment of 32 bytes.
WAIT_VALUE_SEG = Entry("wait_value_seg", 32, """
    operation          0  be32
    lkey               4  be32
    va_high            8  be32
    va_low            12  be32
    value             16  be64
    mask              24  be64
""")

# The bits of a time that a WAIT compares: 8 seconds and their nanoseconds, or as many cycles of a clock of 1 GHz.
REAL_TIME_MASK, WAIT_MASK = (8 << 32) - 1, (1 << 33) - 1

# Follows the control segment of a packet. The offsets are of the software parser, in units of 2 bytes. Inline headers
# begin in `inline_hdr_start` and continue after the segment, up to a multiple of 16 bytes.
ETH_SEG = Entry("eth_seg", 16, """
    swp_outer_l4_offset  0  u8
    swp_outer_l3_offset  1  u8
    swp_inner_l4_offset  2  u8
    swp_inner_l3_offset  3  u8
    cs_flags             4  u8
    swp_flags            5  u8
    mss                  6  be16
    flow_table_metadata  8  be32
    inline_hdr_sz       12  be16
    inline_hdr_start    14  raw[2]
""")

# The end of the same segment, in a WQE without inline headers whose packet gets a VLAN tag.
ETH_VLAN = Entry("eth_vlan", 16, """
    insert              12  be16
    tci                 14  be16
""")
ETH_INSERT_VLAN, ETH_INSERT_SVLAN = 1 << 15, 1  # of `insert`

# DMA between local memories. The opaque buffer is for the device's own use: OPAQUE_BYTES of registered memory.
OPAQUE_BYTES = 64
MMO_SEG = Entry("mmo_seg", 16, """
    mmo_control        0  be32
    opaque_lkey        4  be32
    opaque_addr        8  be64
""")

SRQ_NEXT_SEG = Entry("srq_next_seg", 16, """
    next_wqe_index     2  be16
    signature          4  u8
""")
