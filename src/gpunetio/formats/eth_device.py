"""The structures of Ethernet queues and semaphores that kernels have pointers to.

GPUNetIO's own are not public, so these are ours. All fields are in the byte order of the host. "host" writes a field
when it exports the queue, and kernels only read it. "kernels" write the others, which start at 0; the host reads them,
and sets them to 0 again when it restarts the queue.
"""

from enum import IntEnum

from .layout import Entry

# A send queue. The first 296 bytes are a DEV_QP (device_structs.py), so what posts to a queue pair also posts to this
# queue: sq_num is the number of the SQ, sq_wqe_num its basic blocks (64 … 32768, a power of two), cq_sq its CQ, with at
# least as many entries as there are basic blocks, and `side` a DEV_SIDE.
#
# Not every WQE is signalled: those with NOTIFY are, and so that kernels learn when slots are free, those with a basic
# block at an index of which (index & signal_mask) == signal_mask.
#
#     completed    kernels   WQEs below this index are complete, as far as a kernel has looked
#     notified     kernels   completions of WQEs with NOTIFY that kernels have found
#     taken        kernels   how many of them `txq_poll` has returned
#     wait_mask    host      wait_value_seg.mask of a WAIT for a time: (8 << 32) - 1 in real time; 0: it cannot wait
#     cs_flags     host      eth_seg.cs_flags of each packet: formats.wqe.EthChecksum
#     signal_mask  host      a quarter of sq_wqe_num, less 1
#     max_lso      host      most bytes of payload of a TSO; 0: the device has none
DEV_ETH_TXQ = Entry("dev_eth_txq", 384, """
    completed             320  i64
    notified              328  i64
    taken                 336  i64
    wait_mask             344  i64
    cs_flags              352  u32
    signal_mask           356  u32
    max_lso               360  u32
""")

# A receive queue on the GPU data path: a ring of packets in one buffer, which the NIC fills again and again. Packet i
# is at packet_address + ((i & packet_mask) << stride_shift). Before the queue goes to RDY, the host fills the ring of
# WQEs once, each with the next part of the buffer, and stores wqe_num to the doorbell record.
#
#     next            kernels   index of the packet that arrives next, counted in strides
#     first           kernels   index of the first packet of the last receive
#     too_long        kernels   packets that were too long for the rest of their WQE; their strides are skipped
#     given_back      kernels   WQEs that were given back to the NIC: the doorbell record is wqe_num + this
#     err_…           kernels   the error completion that ended the queue: number of the CQE, syndromes
#     quiet           kernels   looks since the last packet, of threads of the host
#     packet_address  host      address of the buffer for kernels
#     dbrec           host      address of the word of the doorbell record that counts receives
#     packet_mask     host      packets in the buffer, a power of two, less 1
#     stride_shift    host      log2 of the bytes from one packet to the next
#     strides_shift   host      log2 of the packets in the buffer of one WQE; 0 if the RQ is not striding
#     wqe_num         host      WQEs in the ring, a power of two, at most 32768
#     striding        host      not 0: CQEs count strides (formats.cqe.STRIDES_SHIFT)
#     lkey            host      key of the buffer
#     tells_cq        host      not 0: the CQ must not overrun, and kernels keep its doorbell record
#     real_time       host      not 0: timestamps are seconds << 32 | nanoseconds, otherwise nanoseconds
#     mcst_qp         host      address of a DEV_QP that reads the buffer before kernels do, for GPUs before Hopper, or
#                               0: kernels post DUMPs to it
#     wakes           host      not 0: the NIC wakes a thread of the host that naps at the word `wakeup`
#     cq              both      DEV_CQ of its completions, with packet_mask + 1 entries or more. Kernels write cqe_ci
#     wakeup          both      where a thread of the host naps (device/waiting.py)
DEV_ETH_RXQ = Entry("dev_eth_rxq", 256, """
    next                    0  i64
    first                   8  i64
    too_long               16  i64
    given_back             24  i64
    err_index              32  i64
    err_syndrome           40  i64
    err_vendor             48  i64
    quiet                  56  i64
    packet_address         64  i64
    dbrec                  72  i64
    packet_mask            80  u32
    stride_shift           84  u32
    strides_shift          88  u32
    wqe_num                92  u32
    striding               96  u32
    lkey                  100  u32
    tells_cq              104  u32
    real_time             108  u32
    mcst_qp               112  i64
    wakes                 120  u32
    cq                    128  raw[64]
    wakeup                192  i64
""")

# What `rxq_recv` writes for each packet. `checks` are formats.cqe.RxChecksum, `headers` and `hash_type` the bytes
# l4_hdr_type_etc and rss_hash_type of the CQE; `vlan` is the TCI of a tag that was stripped (RxHeaders.VLAN_STRIPPED).
PACKET_ATTR = Entry("packet_attr", 32, """
    timestamp_ns            0  i64
    bytes                   8  u32
    flow_tag               12  u32
    hash                   16  u32
    metadata               20  u32
    checks                 24  u8
    headers                25  u8
    vlan                   26  u16
    hash_type              28  u8
    check_sum              30  u16
""")


class SemaphoreStatus(IntEnum):
    """`DOCA_GPU_SEMAPHORE_STATUS_*`: DOCA has the first three. The numbers are ours."""

    FREE  = 0
    READY = 1
    DONE  = 2
    HOLD  = 3
    ERROR = 4
    EXIT  = 5


# A semaphore: `items` is the address of items_num SEMAPHORE_ITEMs, `info` that of as many pieces of info_bytes for the
# user, or 0, and `rings` that of rings_num SEMAPHORE_RINGs, which divides items_num. These are addresses for kernels,
# and may be in different memory. The host writes all fields.
DEV_SEMAPHORE = Entry("dev_semaphore", 64, """
    items                   0  i64
    info                    8  i64
    items_num              16  u32
    info_bytes             20  u32
    rings                  24  i64
    rings_num              32  u32
""")

# Whoever fills an item stores its status last, behind a release fence, and whoever waits for it loads it with acquire.
SEMAPHORE_ITEM = Entry("semaphore_item", 16, """
    status                  0  u32
    packets                 4  u32
    first                   8  i64
""")

# Ring r of a semaphore has the items r, r + rings_num, r + 2 * rings_num …, which are taken and freed in this order.
# Each word has a cache line of its own, since different threads write them.
#
#     taken   producers   items that were taken: who raises this word owns the item
#     freed   consumer    items that were freed; at most as many items as the ring has are taken and not freed
SEMAPHORE_RING = Entry("semaphore_ring", 256, """
    taken                   0  i64
    freed                 128  i64
""")
