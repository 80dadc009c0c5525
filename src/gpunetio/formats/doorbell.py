"""Doorbells: the records in memory, and the registers of a UAR page."""

from .layout import Entry

PI_MASK = 0xFFFF  # a send or receive doorbell carries 16 bits of the producer index
WQE_IDX_SHIFT = 8  # registers and control segments hold the index from bit 8 on

UAR_PAGE = 4096
UAR_CQ_OFFSET = 0x20  # the register that arms a CQ
UAR_NO_DBR_OFFSET = 0x600  # the register for queues without a doorbell record
UAR_REG_OFFSET = 0x800  # the ordinary doorbell and BlueFlame register
UAR_REG_HALF = 0x100  # from one half of that register to the other; drivers may ring them in turn
REGISTER_BYTES = 64  # a doorbell writes 8 of them, BlueFlame all

QP_DBREC = Entry("qp_dbrec", 8, """
    rcv                 0  be32
    snd                 4  be32
""")

CQ_DBREC = Entry("cq_dbrec", 8, """
    set_ci              0  be32
    arm                 4  be32
""")

# The first 8 bytes of a control segment without opcode and ds: producer index << 8, then QPN << 8. BlueFlame writes a
# whole WQE instead, with the index of that WQE and a ds that is not 0.
SEND_DB = Entry("send_db", 8, """
    pi_shift8           0  be32
    qpn_shift8          4  be32
""")

# To arm a CQ, the same word is written to the record, as its second word, and to the register at UAR_CQ_OFFSET, as the
# first of two. The register's second word is the CQ's number. The sequence number counts the events that were taken, so
# that a repeated request has no effect.
CQ_ARM_SN_SHIFT, CQ_ARM_SN_MASK = 28, 3
CQ_ARM_SOLICITED = 1 << 24  # command: the next solicited or error completion; 0: the next one of any kind
