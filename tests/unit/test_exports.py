"""The public names: a name is added or taken away on purpose, here too."""

import importlib

import pytest

EXPORTS = {
    "gpunetio": """
        Access CodeOpt Context CqOverrun DocaError Dpa DpaCompletion ExportedQp ExportedQps Faults Gpu
        GpuMemory LinkLayer MemRegType MemType MtuSize NicHandler PortConfig PortState ProxyService
        QpAttrMask QpError QpGroup QpState QpType RingMemory Semaphore SemaphoreStatus SendDbrModeExt
        SendFlags SharingMode SyncScope WcOpcode WcStatus WrOpcode __version__
        check_device_code_compatibility check_host_code_compatibility cm core device device_function dma
        errors eth flow gpu_list kernel library_version mesh open open_async rdma rendezvous verbs""",
    "gpunetio.cm": """
        Connection ConnectionRejectedError ConnectionState DatagramListener DatagramRequest Destination Event
        EventType Listener Parameters RejectReason Request SidrStatus Times connect connect_async listen
        listen_datagrams resolve resolve_async start_connecting""",
    "gpunetio.core": """
        Buf BufArray BufInventory ContextState CoreContext MemoryMap ProgressEngine RemoteMemory Task TaskState""",
    "gpunetio.device": """
        ALONE ASYNC_STORE_RELEASE ATOMIC_CS ATOMIC_FA ATTR_BYTES BLOCK CPU_PROXY CPU_PROXY_UPDATE_PI CQ_UPDATE
        CTA DEFAULT DUMP DevBufArr DevDma DevRdma DevRdmaQueue DevSemaphore EAGAIN EBUSY EINVAL EIO ENOBUFS
        ENOTRECOVERABLE EOVERFLOW ETIMEDOUT EXCLUSIVE EthRxq EthTxq GPU GPU_SM_BF GPU_SM_DB GPU_SM_NO_DBR NOP OK
        PacketAttr RDMA_IMM RDMA_READ RDMA_WRITE RDMA_WRITE_IMM SEM_DONE SEM_FREE SEM_READY SEND SEND_IMM
        SKIP_AVAILABILITY_CHECK SKIP_DB_RINGING SYNC_CTA SYNC_GPU SYNC_SYS SYNC_THREAD THREAD VerbsCq VerbsQp
        VerbsRq WAIT WARP attr_at be16 be32 be64 block_broadcast block_dim block_idx block_max block_min
        block_slot block_sum block_sync buf_addr buf_get buf_mkey buf_nbytes clock_ns copy cq_at cq_of
        cqe_address device_function dma_commit dma_memcpy dma_wait dma_wait_all fence fence_acquire_sys
        fence_release fence_release_sys fetch_add_gpu64 fetch_add_sys64 get get_counter get_wait global_id
        grid_dim group_of kernel lane_id ld16 ld32 ld64 ld8 ld_acquire64 ld_relaxed64 ld_relaxed8 mark_ready
        mcst nap p p_counter p_signal pause poll poll_at poll_collapsed poll_one post post_own prepare_atomic
        prepare_dump prepare_masked_add prepare_masked_swap32 prepare_masked_swap64 prepare_memcpy prepare_nop
        prepare_read prepare_read2 prepare_send prepare_wait prepare_write prepare_write2 prepare_write_inline
        prepare_write_value put put_counter put_signal put_signal_counter qp_at rdma_commit_strong
        rdma_commit_weak rdma_get_info rdma_get_recv rdma_read_strong rdma_read_weak rdma_recv_commit_strong
        rdma_recv_commit_weak rdma_recv_get_info rdma_recv_strong rdma_recv_wait_all rdma_recv_weak
        rdma_send_strong rdma_send_weak rdma_wait_all rdma_write_inline_strong rdma_write_inline_weak
        rdma_write_strong rdma_write_value_strong rdma_write_value_weak rdma_write_weak recv recv_bytes recv_imm
        recv_inline recv_next recv_poll recv_slot recv_wait recv_wait_all reserve reserve_own ring_db ring_proxy
        rxq_first rxq_give_back rxq_lkey rxq_packet rxq_recv sem_first sem_free sem_info sem_next sem_packets
        sem_set_packets sem_set_status sem_status sem_take sem_wait send send_imm shared_array signal signal_counter
        st16
        st32 st64 st8 st_relaxed64 st_release64 submit submit_bf submit_bf_warp submit_multi thread_idx
        txq_headers_blocks txq_multi_blocks txq_poll txq_prepare_headers txq_prepare_multi txq_prepare_send
        txq_prepare_wait txq_reserve txq_send txq_send_headers txq_wait txq_wait_send update_cq_record
        update_dbr wait wait_all wait_word wake warp_broadcast warp_max warp_min warp_size warp_sum warp_sync
        wqe_address yield_thread""",
    "gpunetio.gpu": """
        ExportedQp ExportedQps Gpu GpuMemory ProxyService QpError QpGroup Semaphore SemaphoreStatus
        check_device_code_compatibility check_host_code_compatibility gpu_list library_version""",
    "gpunetio.rdma": """
        CompareSwap ConnectionState FetchAdd Rdma RdmaConnection Read Receive ReceiveOpcode Send SyncEvent
        SyncEventGet SyncEventSet Write""",
    "gpunetio.testing": "Check Outcome Report Result Rig Violation checks run",
    "gpunetio.verbs": """
        AddressHandle AhAttr AsyncEvent BadWrError CQ CompChannel Completion Context CqAttr DeviceAttributes
        DeviceInfo Devx DevxObject Handle MR PD QP QpAttr QpEndpoint QpInitAttr RecvWr RingLayout SRQ SendWr
        Sender Sge SrqAttr UAR UMEM device_list import_context memcpy open open_async wait_cq_pi""",
}


@pytest.mark.parametrize("module", EXPORTS)
def test_exported_names(module):
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == sorted(EXPORTS[module].split())
    assert all(hasattr(imported, name) for name in imported.__all__)


def test_dir_names_the_public_api_and_nothing_else():
    import gpunetio as gn
    import gpunetio.verbs.devx.qp  # what has been imported meanwhile does not count

    assert dir(gn) == sorted(EXPORTS["gpunetio"].split())
