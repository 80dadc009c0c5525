"""The structures that kernels have pointers to, byte for byte those of GPUNetIO's C headers (2.0.1, and 1.0 for NCCL).

A CUDA C++ kernel written for GPUNetIO takes a pointer to a `VerbsQp` as it is. Eight reserved bytes hold a pointer of
our own: `side`, at byte 88, points to a `VerbsSide`.
"""

from typing import Annotated

from .layout import I32, I64, U8, U16, U32, Entry, Record

_CQ = """
    cqe_daddr            0  i64
    cq_num               8  u32
    cqe_num             12  u32
    dbrec               16  i64
    cqe_ci              24  i64
    cqe_mask            32  u32
    cqe_size            36  u8
    cqe_rsvd            40  i64
    mem_type            48  u32
"""


class VerbsCq(Record, size=64):
    """A completion queue: GPUNetIO's `struct doca_gpu_dev_verbs_cq`."""

    cqe_daddr: I64 = 0
    cq_num: U32 = 8
    cqe_num: U32 = 12
    dbrec: I64 = 16
    cqe_ci: I64 = 24
    cqe_mask: U32 = 32
    cqe_size: U8 = 36
    cqe_rsvd: I64 = 40
    mem_type: U32 = 48


DEV_CQ = VerbsCq.entry


class VerbsQp(Record, size=296):
    """A queue pair: GPUNetIO's `struct doca_gpu_dev_verbs_qp`.

    `cq_sq` is the `VerbsCq` of the send queue.
    """

    sq_rsvd_index: I64 = 0
    sq_ready_index: I64 = 8
    sq_wqe_pi: I64 = 16
    sq_num: U32 = 24
    sq_num_shift8: U32 = 28
    sq_num_shift8_be: U32 = 32
    sq_num_shift8_be_1ds: U32 = 36
    sq_num_shift8_be_2ds: U32 = 40
    sq_num_shift8_be_3ds: U32 = 44
    sq_num_shift8_be_4ds: U32 = 48
    sq_num_shift8_be_5ds: U32 = 52
    sq_lock: I32 = 56
    sq_wqe_num: U16 = 60
    sq_wqe_mask: U16 = 62
    sq_wqe_daddr: I64 = 64
    sq_dbrec: I64 = 72
    sq_db: I64 = 80
    side: I64 = 88
    cq_sq: Annotated[int, "raw[64]"] = 160
    nic_handler: U32 = 288
    mem_type: U32 = 292


DEV_QP = VerbsQp.entry
MEM_TYPE_GPU = 2  # DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU, which debug builds of device code assert

# The structures of GPUNetIO 1.0, with which NCCL 2.28 and 2.29 were built. Each has the members of the newer one except
# `sq_num_shift8_be_5ds` and `side`; the bytes of `side` are reserved there as well.
DEV_CQ_1_0 = Entry("doca_gpu_dev_verbs_cq 1.0", 56, _CQ)

DEV_QP_1_0 = Entry("doca_gpu_dev_verbs_qp 1.0", 280, """
    sq_rsvd_index           0  i64
    sq_ready_index          8  i64
    sq_wqe_pi              16  i64
    sq_num                 24  u32
    sq_num_shift8          28  u32
    sq_num_shift8_be       32  u32
    sq_num_shift8_be_1ds   36  u32
    sq_num_shift8_be_2ds   40  u32
    sq_num_shift8_be_3ds   44  u32
    sq_num_shift8_be_4ds   48  u32
    sq_lock                52  i32
    sq_wqe_num             56  u16
    sq_wqe_mask            58  u16
    sq_wqe_daddr           64  i64
    sq_dbrec               72  i64
    sq_db                  80  i64
    cq_sq                 160  raw[56]
    nic_handler           272  u32
    mem_type              276  u32
""")


class VerbsSide(Record, size=256):
    """Members for which the C structure has no room.

    VerbsQp.side points to it, in the same memory. `submit` is the index that threads of a shared queue want to announce
    (device/submit.py). `rq` points to a VerbsRq, either `own_rq` or that of a shared receive queue, or is 0. `cq_rq` is
    a VerbsCq, whose doorbell record is updated if `tells_cq` is set. `arrivals` counts the messages that threads waited
    for. `counting` counts those whose receive in a shared queue a thread has given back, or is giving back. `near` is
    set if the NIC's engine runs on the GPU of the kernels.
    """

    timeout_ns: I64 = 0
    broken: I64 = 8
    err_index: I64 = 16
    err_syndrome: I64 = 24
    err_vendor: I64 = 32
    submit: I64 = 40
    rq: I64 = 48
    arrivals: I64 = 56
    tells_cq: I64 = 64
    counting: I64 = 72
    near: I64 = 80
    cq_rq: Annotated[int, "raw[64]"] = 128
    own_rq: Annotated[int, "raw[64]"] = 192


DEV_SIDE = VerbsSide.entry


class VerbsRq(Record, size=64):
    """A receive queue, or a contiguous shared one.

    For a shared queue, `done` points to one word per slot: 1 + the index of the receive that completed there last. Two
    indices count receives: those reserved (`rsvd`), and those announced to the NIC (`ready`).
    """

    wqe_daddr: I64 = 0
    dbrec: I64 = 8
    rsvd: I64 = 16
    ready: I64 = 24
    done: I64 = 32
    wqe_num: U32 = 40
    wqe_size: U32 = 44


DEV_RQ = VerbsRq.entry
