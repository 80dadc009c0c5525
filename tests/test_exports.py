"""The public names: a name is added or taken away on purpose, here too."""

import importlib

import pytest

EXPORTS = {
    "gpunetio": """
        Access CodeOpt Context CqOverrun DocaError Dpa DpaCompletion ExportedQp Faults Gpu GpuMemory LinkLayer MemType
        MtuSize NicHandler PortConfig QpAttrMask QpError QpState QpType SendFlags SharingMode SyncScope WcOpcode
        WcStatus WrOpcode __version__ device device_function errors gpu_list kernel open verbs""",
    "gpunetio.device": """
        ATOMIC_CS ATOMIC_FA CQ_UPDATE CTA EBUSY EINVAL EIO ENOBUFS ENOTRECOVERABLE ETIMEDOUT EXCLUSIVE GPU NOP OK
        RDMA_READ RDMA_WRITE RDMA_WRITE_IMM SEND SEND_IMM SKIP_AVAILABILITY_CHECK SKIP_DB_RINGING SYNC_CTA SYNC_GPU
        SYNC_SYS SYNC_THREAD be16 be32 be64 block_dim block_idx block_sync clock_ns copy cq_at device_function
        fence_acquire_sys fence_release_sys fetch_add_gpu64 fetch_add_sys64 get global_id grid_dim kernel lane_id ld16
        ld32 ld64 ld8 ld_acquire64 ld_relaxed64 ld_relaxed8 mark_ready p pause poll_at poll_one post prepare_atomic
        prepare_nop prepare_read prepare_send prepare_write prepare_write2 prepare_write_inline prepare_write_value put
        put_signal qp_at recv recv_wait reserve ring_db send signal st16 st32 st64 st8 st_relaxed64 st_release64 submit
        thread_idx update_dbr wait wait_all warp_broadcast warp_size warp_sync wqe_address yield_thread""",
    "gpunetio.gpu": "ExportedQp Gpu GpuMemory QpError gpu_list",
    "gpunetio.testing": "Check Outcome Report Result Rig Violation checks run",
    "gpunetio.verbs": """
        AhAttr AsyncEvent BadWrError CQ CompChannel Completion Context DeviceAttributes DeviceInfo Handle MR PD QP
        QpAttr QpEndpoint QpInitAttr RecvWr SRQ SendWr Sge SrqAttr UAR UMEM device_list import_context open
        wait_cq_pi""",
}


@pytest.mark.parametrize("module", EXPORTS)
def test_exported_names(module):
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == sorted(EXPORTS[module].split())
    assert all(hasattr(imported, name) for name in imported.__all__)
