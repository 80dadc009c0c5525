"""The structures of Ethernet queues and semaphores that kernels have pointers to.

GPUNetIO's own are not public, so these are ours. All fields are in the byte order of the host. The host writes the
fields marked "host" when it exports the queue, and kernels only read them. Kernels write the fields marked "kernels",
which start at 0; the host reads them, and resets them to 0 when it restarts the queue.
"""

from enum import IntEnum
from typing import Annotated

from .device_structs import VerbsQp
from .layout import I64, U8, U16, U32, Record


class EthTxq(VerbsQp, size=384):
    """A send queue.

    The first 296 bytes are a VerbsQp (device_structs.py), so code that posts to a queue pair can also post to this
    queue: sq_num is the number of the SQ, sq_wqe_num its basic blocks (64 … 32768, a power of two), cq_sq its CQ, with
    at least as many entries as there are basic blocks, and `side` a VerbsSide.

    Not every WQE is signalled. Those with NOTIFY are. So that kernels learn when slots are free, so are those with a
    basic block whose index satisfies (index & signal_mask) == signal_mask.

        completed    kernels   WQEs below this index are complete, as far as a kernel has looked
        notified     kernels   completions of WQEs with NOTIFY that kernels have found
        taken        kernels   how many of them `txq_poll` has returned
        wait_mask    host      wait_value_seg.mask of a WAIT for a time: (8 << 32) - 1 in real time; 0: it cannot wait
        cs_flags     host      eth_seg.cs_flags of each packet: formats.wqe.EthChecksum
        signal_mask  host      a quarter of sq_wqe_num, less 1
        max_lso      host      most bytes of payload of a TSO; 0: the device has none
    """

    completed: I64 = 320
    notified: I64 = 328
    taken: I64 = 336
    wait_mask: I64 = 344
    cs_flags: U32 = 352
    signal_mask: U32 = 356
    max_lso: U32 = 360


DEV_ETH_TXQ = EthTxq.entry


class EthRxq(Record, size=256):
    """A receive queue on the GPU data path: a ring of packets in one buffer, which the NIC fills over and over.

    Packet i is at packet_address + ((i & packet_mask) << stride_shift). Before the queue goes to RDY, the host fills
    the ring of WQEs once, each with the next part of the buffer, and stores wqe_num to the doorbell record.

        next            kernels   index of the packet that arrives next, counted in strides
        first           kernels   index of the first packet of the last receive
        too_long        kernels   packets that were too long for the rest of their WQE; their strides are skipped
        given_back      kernels   WQEs that were given back to the NIC: the doorbell record is wqe_num + this
        err_…           kernels   the error completion that ended the queue: number of the CQE, syndromes
        quiet           kernels   how often threads of the host have looked since the last packet
        packet_address  host      address of the buffer for kernels
        dbrec           host      address of the word of the doorbell record that counts receives
        packet_mask     host      packets in the buffer, a power of two, less 1
        stride_shift    host      log2 of the bytes from one packet to the next
        strides_shift   host      log2 of the packets in the buffer of one WQE; 0 if the RQ is not striding
        wqe_num         host      WQEs in the ring, a power of two, at most 32768
        striding        host      not 0: CQEs count strides (formats.cqe.STRIDES_SHIFT)
        lkey            host      key of the buffer
        tells_cq        host      not 0: the CQ must not overrun, and kernels update its doorbell record
        real_time       host      not 0: timestamps are seconds << 32 | nanoseconds, otherwise nanoseconds
        mcst_qp         host      address of a VerbsQp that reads the buffer before kernels do, for GPUs before Hopper,
                                  or 0: kernels post DUMPs to it
        wakes           host      not 0: the NIC wakes a thread of the host that naps at the word `wakeup`
        cq              both      VerbsCq of its completions, with packet_mask + 1 entries or more. Kernels write
                                  cqe_ci
        wakeup          both      where a thread of the host naps (device/waiting.py)
    """

    next: I64 = 0
    first: I64 = 8
    too_long: I64 = 16
    given_back: I64 = 24
    err_index: I64 = 32
    err_syndrome: I64 = 40
    err_vendor: I64 = 48
    quiet: I64 = 56
    packet_address: I64 = 64
    dbrec: I64 = 72
    packet_mask: U32 = 80
    stride_shift: U32 = 84
    strides_shift: U32 = 88
    wqe_num: U32 = 92
    striding: U32 = 96
    lkey: U32 = 100
    tells_cq: U32 = 104
    real_time: U32 = 108
    mcst_qp: I64 = 112
    wakes: U32 = 120
    cq: Annotated[int, "raw[64]"] = 128
    wakeup: I64 = 192


DEV_ETH_RXQ = EthRxq.entry


class PacketAttr(Record, size=32):
    """The attributes that `rxq_recv` writes for each packet.

    `checks` are formats.cqe.RxChecksum, `headers` and `hash_type` the bytes l4_hdr_type_etc and rss_hash_type of
    the CQE; `vlan` is the TCI of a tag that was stripped (RxHeaders.VLAN_STRIPPED).
    """

    timestamp_ns: I64 = 0
    bytes: U32 = 8
    flow_tag: U32 = 12
    hash: U32 = 16
    metadata: U32 = 20
    checks: U8 = 24
    headers: U8 = 25
    vlan: U16 = 26
    hash_type: U8 = 28
    check_sum: U16 = 30


PACKET_ATTR = PacketAttr.entry


class SemaphoreStatus(IntEnum):
    """`DOCA_GPU_SEMAPHORE_STATUS_*`: DOCA has the first three. The numbers are ours."""

    FREE  = 0
    READY = 1
    DONE  = 2
    HOLD  = 3
    ERROR = 4
    EXIT  = 5


class DevSemaphore(Record, size=64):
    """A semaphore. The host writes all fields.

    `items` is the address of items_num SemaphoreItems, `info` that of as many pieces of info_bytes for the user, or 0,
    and `rings` that of rings_num SemaphoreRings, which divides items_num. These are addresses for kernels, and may be
    in different memory.
    """

    items: I64 = 0
    info: I64 = 8
    items_num: U32 = 16
    info_bytes: U32 = 20
    rings: I64 = 24
    rings_num: U32 = 32


DEV_SEMAPHORE = DevSemaphore.entry


class SemaphoreItem(Record, size=16):
    """An item of a semaphore.

    The producer stores the status last, after a release fence. The consumer loads it with acquire.
    """

    status: U32 = 0
    packets: U32 = 4
    first: I64 = 8


SEMAPHORE_ITEM = SemaphoreItem.entry


class SemaphoreRing(Record, size=256):
    """A ring of a semaphore: ring r has the items r, r + rings_num, r + 2 * rings_num …

    Items are taken and freed in this order. Each word has a cache line of its own, since different threads write them.

        taken   producers   items that were taken: the thread that raises this word owns the item
        freed   consumer    items that were freed; at most as many items as the ring has are taken and not freed
    """

    taken: I64 = 0
    freed: I64 = 128


SEMAPHORE_RING = SemaphoreRing.entry
