"""The device library: what kernels call, written once in Python, compiled for CPU threads and for CUDA."""

from .compile import device_function
from .cq import poll_at, poll_one
from .launch import kernel
from .modes import (
    CTA, EXCLUSIVE, GPU, SKIP_AVAILABILITY_CHECK, SKIP_DB_RINGING, SYNC_CTA, SYNC_GPU, SYNC_SYS, SYNC_THREAD,
)  # fmt: skip
from .onesided import get, p, put, put_signal, signal, wait, wait_all
from .ops import (
    be16, be32, be64, block_dim, block_idx, block_sync, clock_ns, copy, fence_acquire_sys, fence_release_sys,
    fetch_add_gpu64, fetch_add_sys64, global_id, grid_dim, lane_id, ld8, ld16, ld32, ld64, ld_acquire64, ld_relaxed8,
    ld_relaxed64, pause, st8, st16, st32, st64, st_relaxed64, st_release64, thread_idx, warp_broadcast, warp_size,
    warp_sync, yield_thread,
)  # fmt: skip
from .qp import (
    ATOMIC_CS, ATOMIC_FA, CQ_UPDATE, NOP, RDMA_READ, RDMA_WRITE, RDMA_WRITE_IMM, SEND, SEND_IMM, mark_ready, post,
    prepare_atomic, prepare_nop, prepare_read, prepare_send, prepare_write, prepare_write2, prepare_write_inline,
    prepare_write_value, reserve, ring_db, submit, update_dbr, wqe_address,
)  # fmt: skip
from .status import EBUSY, EINVAL, EIO, ENOBUFS, ENOTRECOVERABLE, ETIMEDOUT, OK
from .twosided import recv, recv_wait, send
from .views import cq_at, qp_at

__all__ = [
    "ATOMIC_CS", "ATOMIC_FA", "CQ_UPDATE", "CTA", "EBUSY", "EINVAL", "EIO", "ENOBUFS", "ENOTRECOVERABLE",
    "ETIMEDOUT", "EXCLUSIVE", "GPU", "NOP", "OK", "RDMA_READ", "RDMA_WRITE", "RDMA_WRITE_IMM", "SEND", "SEND_IMM",
    "SKIP_AVAILABILITY_CHECK", "SKIP_DB_RINGING", "SYNC_CTA", "SYNC_GPU", "SYNC_SYS", "SYNC_THREAD", "be16", "be32",
    "be64", "block_dim", "block_idx", "block_sync", "clock_ns", "copy", "cq_at", "device_function",
    "fence_acquire_sys", "fence_release_sys", "fetch_add_gpu64", "fetch_add_sys64", "get", "global_id", "grid_dim",
    "kernel", "lane_id", "ld16", "ld32", "ld64", "ld8", "ld_acquire64", "ld_relaxed64", "ld_relaxed8", "mark_ready",
    "p", "pause", "poll_at", "poll_one", "post", "prepare_atomic", "prepare_nop", "prepare_read", "prepare_send",
    "prepare_write", "prepare_write2", "prepare_write_inline", "prepare_write_value", "put", "put_signal", "qp_at",
    "recv", "recv_wait", "reserve", "ring_db", "send", "signal", "st16", "st32", "st64", "st8", "st_relaxed64",
    "st_release64", "submit", "thread_idx", "update_dbr", "wait", "wait_all", "warp_broadcast", "warp_size",
    "warp_sync", "wqe_address", "yield_thread",
]  # fmt: skip
