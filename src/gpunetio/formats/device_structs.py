"""The structures that kernels have pointers to, byte for byte those of GPUNetIO's C headers (2.0.1, and 1.0 for NCCL).

A CUDA C++ kernel written for GPUNetIO takes a pointer to `DEV_QP` as it is. Eight reserved bytes hold a pointer of our
own: `side`, at byte 88, points to a `DEV_SIDE`.
"""

from .layout import Entry

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
DEV_CQ = Entry("doca_gpu_dev_verbs_cq", 64, _CQ)

DEV_QP = Entry("doca_gpu_dev_verbs_qp", 296, """
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
    sq_num_shift8_be_5ds   52  u32
    sq_lock                56  i32
    sq_wqe_num             60  u16
    sq_wqe_mask            62  u16
    sq_wqe_daddr           64  i64
    sq_dbrec               72  i64
    sq_db                  80  i64
    side                   88  i64
    cq_sq                 160  raw[64]
    nic_handler           288  u32
    mem_type              292  u32
""")

MEM_TYPE_GPU = 2  # DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU, which debug builds of device code assert

# The structures of GPUNetIO 1.0, with which NCCL 2.28 and 2.29 were built. Each has the members of the newer one but
# `sq_num_shift8_be_5ds`, and `side`, for which bytes are reserved there, too.
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

# What the C structure has no room for. DEV_QP.side points to it, in the same memory.
# `submit` is the index that threads of a shared queue want to announce (device/submit.py). `rq` points to a DEV_RQ,
# either `own_rq` or that of a shared receive queue, or is 0. `cq_rq` is a DEV_CQ. Its record is updated if `tells_cq`.
# `arrivals` counts the messages that threads waited for. `counting` counts those whose receive in a shared queue a
# thread has given back, or is giving back. `near`: the NIC makes its turns on the GPU of the kernels.
DEV_SIDE = Entry("dev_side", 256, """
    timeout_ns              0  i64
    broken                  8  i64
    err_index              16  i64
    err_syndrome           24  i64
    err_vendor             32  i64
    submit                 40  i64
    rq                     48  i64
    arrivals               56  i64
    tells_cq               64  i64
    counting               72  i64
    near                   80  i64
    cq_rq                 128  raw[64]
    own_rq                192  raw[64]
""")

# A receive queue, or a contiguous shared one. `done` of a shared one points to one word per slot: 1 + the index of the
# receive that completed there last. Two indices count receives: those reserved (`rsvd`), and those announced to the NIC
# (`ready`).
DEV_RQ = Entry("dev_rq", 64, """
    wqe_daddr               0  i64
    dbrec                   8  i64
    rsvd                   16  i64
    ready                  24  i64
    done                   32  i64
    wqe_num                40  u32
    wqe_size               44  u32
""")
