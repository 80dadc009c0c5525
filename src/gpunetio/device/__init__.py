"""The device library: functions that kernels call, written once in Python and compiled for CPU threads and CUDA."""

from ..formats.core_device import DevBufArr
from ..formats.device_structs import VerbsCq, VerbsQp, VerbsRq
from ..formats.dma_device import DevDma
from ..formats.eth_device import DevSemaphore, EthRxq, EthTxq, PacketAttr
from ..formats.rdma_device import DevRdma, DevRdmaQueue
from ..jit import ops as ops  # primitives that few kernels need, as `device.ops`
from .buf import buf_addr, buf_get, buf_mkey, buf_nbytes
from ..jit.compile import device_function
from .counter import get_counter, p_counter, put_counter, put_signal_counter, signal_counter
from .cq import cq_of, cqe_address, poll, poll_at, poll_collapsed, poll_one, update_cq_record
from ..jit.launch import kernel
from ..jit.shared import shared_array
from .dma import dma_commit, dma_memcpy, dma_wait, dma_wait_all
from .eth_rxq import rxq_first, rxq_give_back, rxq_lkey, rxq_packet, rxq_recv
from .eth_txq import txq_poll, txq_reserve, txq_send, txq_send_headers, txq_wait, txq_wait_send
from .eth_wqe import (
    txq_headers_blocks, txq_multi_blocks, txq_prepare_headers, txq_prepare_multi, txq_prepare_send, txq_prepare_wait,
)
from .modes import (
    ASYNC_STORE_RELEASE, BLOCK, CPU_PROXY, CPU_PROXY_UPDATE_PI, CTA, DEFAULT, EXCLUSIVE, GPU, GPU_SM_BF, GPU_SM_DB,
    GPU_SM_NO_DBR, SKIP_AVAILABILITY_CHECK, SKIP_DB_RINGING, SYNC_CTA, SYNC_GPU, SYNC_SYS, SYNC_THREAD, THREAD,
    WARP,
)
from .onesided import fence, get, get_wait, mcst, p, p_signal, put, put_signal, signal, wait, wait_all, wait_word
from ..jit.ops import (
    be16, be32, be64, block_broadcast, block_dim, block_idx, block_slot, block_sync, clock_ns, copy,
    fence_acquire_sys, fence_release_sys, fetch_add_gpu64, fetch_add_sys64, global_id, grid_dim, lane_id, ld16,
    ld32, ld64, ld8, ld_acquire64, ld_relaxed64, ld_relaxed8, pause, st16, st32, st64, st8, st_relaxed64,
    st_release64, thread_idx, warp_broadcast, warp_size, warp_sync, yield_thread,
)
from .qp import mark_ready, reserve
from .rdma import (
    RDMA_IMM, rdma_commit_strong, rdma_commit_weak, rdma_get_info, rdma_read_strong, rdma_read_weak, rdma_send_strong,
    rdma_send_weak, rdma_wait_all, rdma_write_inline_strong, rdma_write_inline_weak, rdma_write_strong,
    rdma_write_value_strong, rdma_write_value_weak, rdma_write_weak,
)
from .rdma_recv import (
    rdma_get_recv, rdma_recv_commit_strong, rdma_recv_commit_weak, rdma_recv_get_info, rdma_recv_strong,
    rdma_recv_wait_all, rdma_recv_weak,
)
from .reduce import block_max, block_min, block_sum, warp_max, warp_min, warp_sum
from .scope import ALONE, group_of, post_own, reserve_own
from .semaphore import (
    SEM_DONE, SEM_FREE, SEM_READY, sem_first, sem_free, sem_info, sem_next, sem_packets, sem_set_packets,
    sem_set_status, sem_status, sem_take, sem_wait,
)
from .status import EAGAIN, EBUSY, EINVAL, EIO, ENOBUFS, ENOTRECOVERABLE, EOVERFLOW, ETIMEDOUT, OK
from .submit import (
    fence_release, post, ring_db, ring_proxy, submit, submit_bf, submit_bf_warp, submit_multi, update_dbr,
)
from .twosided import (
    recv, recv_bytes, recv_imm, recv_inline, recv_next, recv_poll, recv_slot, recv_wait, recv_wait_all, send,
    send_imm,
)
from .views import ATTR_BYTES, attr_at, cq_at, qp_at
from .waiting import nap, wake
from .wqe import (
    ATOMIC_CS, ATOMIC_FA, CQ_UPDATE, DUMP, NOP, RDMA_READ, RDMA_WRITE, RDMA_WRITE_IMM, SEND, SEND_IMM, WAIT,
    prepare_atomic, prepare_dump, prepare_masked_add, prepare_masked_swap32, prepare_masked_swap64, prepare_memcpy,
    prepare_nop, prepare_read, prepare_read2, prepare_send, prepare_wait, prepare_write, prepare_write2,
    prepare_write_inline, prepare_write_value, wqe_address,
)

__all__ = [
    "ALONE", "ASYNC_STORE_RELEASE", "ATOMIC_CS", "ATOMIC_FA", "ATTR_BYTES", "BLOCK", "CPU_PROXY",
    "CPU_PROXY_UPDATE_PI", "CQ_UPDATE", "CTA", "DEFAULT", "DUMP", "DevBufArr", "DevDma", "DevRdma", "DevRdmaQueue",
    "DevSemaphore", "EAGAIN", "EBUSY", "EINVAL", "EIO", "ENOBUFS", "ENOTRECOVERABLE", "EOVERFLOW", "ETIMEDOUT",
    "EXCLUSIVE", "EthRxq", "EthTxq", "GPU", "GPU_SM_BF", "GPU_SM_DB", "GPU_SM_NO_DBR", "NOP", "OK", "PacketAttr",
    "RDMA_IMM", "RDMA_READ", "RDMA_WRITE", "RDMA_WRITE_IMM", "SEM_DONE", "SEM_FREE", "SEM_READY", "SEND",
    "SEND_IMM", "SKIP_AVAILABILITY_CHECK", "SKIP_DB_RINGING", "SYNC_CTA", "SYNC_GPU", "SYNC_SYS", "SYNC_THREAD",
    "THREAD", "VerbsCq", "VerbsQp", "VerbsRq", "WAIT", "WARP", "attr_at", "be16", "be32", "be64", "block_broadcast",
    "block_dim", "block_idx", "block_max", "block_min", "block_slot", "block_sum", "block_sync", "buf_addr",
    "buf_get", "buf_mkey", "buf_nbytes", "clock_ns", "copy", "cq_at", "cq_of", "cqe_address", "device_function",
    "dma_commit", "dma_memcpy", "dma_wait", "dma_wait_all", "fence", "fence_acquire_sys", "fence_release",
    "fence_release_sys", "fetch_add_gpu64", "fetch_add_sys64", "get", "get_counter", "get_wait", "global_id",
    "grid_dim", "group_of", "kernel", "lane_id", "ld16", "ld32", "ld64", "ld8", "ld_acquire64", "ld_relaxed64",
    "ld_relaxed8", "mark_ready", "mcst", "nap", "p", "p_counter", "p_signal", "pause", "poll", "poll_at",
    "poll_collapsed", "poll_one", "post", "post_own", "prepare_atomic", "prepare_dump", "prepare_masked_add",
    "prepare_masked_swap32", "prepare_masked_swap64", "prepare_memcpy", "prepare_nop", "prepare_read",
    "prepare_read2", "prepare_send", "prepare_wait", "prepare_write", "prepare_write2", "prepare_write_inline",
    "prepare_write_value", "put", "put_counter", "put_signal", "put_signal_counter", "qp_at", "rdma_commit_strong",
    "rdma_commit_weak", "rdma_get_info", "rdma_get_recv", "rdma_read_strong", "rdma_read_weak",
    "rdma_recv_commit_strong", "rdma_recv_commit_weak", "rdma_recv_get_info", "rdma_recv_strong",
    "rdma_recv_wait_all", "rdma_recv_weak", "rdma_send_strong", "rdma_send_weak", "rdma_wait_all",
    "rdma_write_inline_strong", "rdma_write_inline_weak", "rdma_write_strong", "rdma_write_value_strong",
    "rdma_write_value_weak", "rdma_write_weak", "recv", "recv_bytes", "recv_imm", "recv_inline", "recv_next",
    "recv_poll", "recv_slot", "recv_wait", "recv_wait_all", "reserve", "reserve_own", "ring_db", "ring_proxy",
    "rxq_first", "rxq_give_back", "rxq_lkey", "rxq_packet", "rxq_recv", "sem_first", "sem_free", "sem_info",
    "sem_next", "sem_packets", "sem_set_packets", "sem_set_status", "sem_status", "sem_take", "sem_wait", "send",
    "send_imm", "shared_array", "signal", "signal_counter", "st16", "st32", "st64", "st8", "st_relaxed64",
    "st_release64", "submit", "submit_bf", "submit_bf_warp", "submit_multi", "thread_idx", "txq_headers_blocks",
    "txq_multi_blocks", "txq_poll", "txq_prepare_headers", "txq_prepare_multi", "txq_prepare_send",
    "txq_prepare_wait", "txq_reserve", "txq_send", "txq_send_headers", "txq_wait", "txq_wait_send",
    "update_cq_record", "update_dbr", "wait", "wait_all", "wait_word", "wake", "warp_broadcast", "warp_max",
    "warp_min", "warp_size", "warp_sum", "warp_sync", "wqe_address", "yield_thread",
]
