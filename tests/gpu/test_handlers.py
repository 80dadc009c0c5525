"""How doorbells reach the NIC: what is taken, what is refused, and where queues lie then."""

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gpunetio import (
    CqOverrun,
    ExportedQp,
    Gpu,
    MemType,
    NicHandler,
    SendDbrModeExt,
    WrOpcode,
    check_device_code_compatibility,
    check_host_code_compatibility,
    device,
    kernel,
    library_version,
)
from gpunetio.enums import QpSendDbrMode, QpState, SrqType, UarAllocationType
from gpunetio.errors import BadStateError, DriverError, InUseError, InvalidValueError, NotSupportedError, TimedOutError
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP
from gpunetio.gpu import export
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.gpu.srq import ExportedSrq
from gpunetio.verbs import SendWr, Sge
from nic_rig import until
from pair import Pair
from queue_kernels import puts

AUTO, PROXY, DB, BF, NO_DBR = NicHandler
VALID, HW, EMULATED = SendDbrModeExt


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "gpunetio.gpu")
    return caplog


class Running:
    """A kernel that ends when it is told."""

    ended = False


def queue_pair(pair: Pair, **attributes):
    cq = pair.ctx.create_cq(4, overrun=CqOverrun.ENABLE)
    return pair.pd.create_qp(sq_wr=4, send_cq=cq, external_datapath=True, **attributes)


NO_RECORD = {"send_dbr_mode": QpSendDbrMode.NO_DBR_EXT}
EMULATE = {"emulate_no_dbr_ext": True}


@pytest.mark.host_memory
@pytest.mark.parametrize(("attributes", "options", "taken", "why"), [
    ({}, {}, DB, "kernels ring the doorbell and keep its record"),
    (NO_RECORD, {}, NO_DBR, "the NIC needs no record"),
    (NO_RECORD, {"send_dbr_mode": HW}, NO_DBR, "the NIC needs no record"),
    (EMULATE, {"queue_memory": "gpu"}, NO_DBR, "the CPU keeps its record"),
    ({}, {"send_dbr_mode": EMULATED}, NO_DBR, "the CPU keeps its record"),
    (NO_RECORD, {"nic_handler": DB}, DB, "as asked"),
    (NO_RECORD, {"nic_handler": NO_DBR}, NO_DBR, "as asked"),
    ({}, {"nic_handler": BF}, BF, "as asked"),
    ({}, {"nic_handler": PROXY}, PROXY, "as asked"),
    ({}, {"queue_memory": "cpu_gpu"}, PROXY, "its queues are in CPU_GPU memory"),
    (EMULATE, {"queue_memory": "cpu_gpu"}, PROXY, "its queues are in CPU_GPU memory"),
    ({}, {"queue_memory": "cpu_gpu", "nic_handler": DB}, DB, "as asked"),
])
def test_what_is_taken(pair: Pair, log, attributes, options, taken, why):
    emulates = attributes == EMULATE or options.get("send_dbr_mode") is EMULATED
    if emulates and pair.gpu.target == "cuda" and options.get("queue_memory") != "cpu_gpu":
        with pytest.raises(InvalidValueError, match=r"without GDRCopy .* use queue_memory='cpu_gpu'"):
            pair.gpu.export_qp(queue_pair(pair, **attributes), **options)
        return
    log.clear()
    with pair.gpu.export_qp(queue_pair(pair, **attributes), **options) as exported:
        assert exported.nic_handler is taken
        assert DEV_QP.at(exported._place.read())["nic_handler"] == taken
        (record,) = log.records  # one line
        assert record.levelno == logging.INFO
        assert f"QP {exported.qpn:#x} of soft0 on GPU {pair.gpu.name}: NIC handler {taken.name}, " in record.message
        assert why in record.message


@pytest.mark.parametrize(("attributes", "options", "match"), [
    ({}, {"nic_handler": NO_DBR}, "GPU_SM_NO_DBR leaves the doorbell record alone, .* create it with send_dbr_mode"),
    ({}, {"send_dbr_mode": HW}, "send_dbr_mode NO_DBR_HW needs a queue pair with NO_DBR_EXT, but .* has DBR_VALID"),
    (NO_RECORD, {"send_dbr_mode": VALID}, "VALID_DBR needs a queue pair with DBR_VALID, but QP .* has NO_DBR_EXT"),
    (NO_RECORD, {"send_dbr_mode": EMULATED}, "NO_DBR_SW_EMULATED needs a queue pair with DBR_VALID"),
    ({}, {"send_dbr_mode": 3}, "send_dbr_mode = 3: it is one of VALID_DBR"),
    ({}, {"nic_handler": 3}, "nic_handler = 3: it is one of AUTO"),
    ({}, {"queue_memory": "host"}, "queue_memory = 'host': it is one of auto, gpu, cpu_gpu"),
])
def test_what_is_refused(pair: Pair, attributes, options, match):
    qp = queue_pair(pair, **attributes)
    with pytest.raises(InvalidValueError, match=match):
        pair.gpu.export_qp(qp, **options)


def test_blueflame_needs_a_page_of_its_kind(pair: Pair):
    uar = pair.ctx.create_uar(UarAllocationType.NONCACHE)
    with pytest.raises(InvalidValueError, match=r"BlueFlame register, but .* has a NONCACHE page: give"):
        pair.gpu.export_qp(queue_pair(pair, external_uar=uar), BF)


@pytest.mark.parametrize(("create", "options", "match"), [
    ("create_qp", {"nic_handler": NO_DBR, "send_dbr_mode": HW}, "GPU_SM_DB and AUTO become GPU_SM_NO_DBR with"),
    ("create_qp_group", {"nic_handler": NO_DBR}, "GPU_SM_NO_DBR cannot drive these queues: use AUTO, "),
    ("create_qp_group", {"nic_handler": BF}, "GPU_SM_BF cannot drive these queues: use AUTO, CPU_PROXY, GPU_SM_DB$"),
    ("create_qp", {"depth": 0}, "0 slots is not possible"),
    ("create_qp", {"depth": 1 << 17}, "the device holds at most"),
    ("create_qp", {"depth": "many"}, "depth = 'many' is of type str"),
])
def test_queues_that_cannot_be_made(pair: Pair, create, options, match):
    before = len(pair.gpu._memory)
    with pytest.raises(InvalidValueError, match=match):
        getattr(pair.gpu, create)(pair.pd, **options)
    assert len(pair.gpu._memory) == before


@pytest.mark.parametrize(("options", "handler", "uar"), [
    ({}, DB, UarAllocationType.NONCACHE_DEDICATED),
    ({"send_dbr_mode": HW}, NO_DBR, UarAllocationType.NONCACHE_DEDICATED),
    ({"send_dbr_mode": QpSendDbrMode.NO_DBR_EXT}, NO_DBR, UarAllocationType.NONCACHE_DEDICATED),
    ({"send_dbr_mode": HW, "nic_handler": DB}, NO_DBR, UarAllocationType.NONCACHE_DEDICATED),
    ({"nic_handler": BF}, BF, UarAllocationType.BLUEFLAME),
])
def test_queues_that_are_made(pair: Pair, options, handler, uar):
    with pair.gpu.create_qp(pair.pd, 5, **options) as queue:
        assert (queue.nic_handler, queue.qp.uar.kind, queue.cq.uar) == (handler, uar, queue.qp.uar)
        assert (queue.qp.sq_entries, queue.cq.entries) == (8, 8)


def test_a_collapsed_ring_is_told_by_its_mask(pair: Pair):
    with pair.gpu.create_qp(pair.pd, 16, cq_collapsed=True) as queue:
        image = queue._place.read()
        cq = DEV_CQ.at(image, DEV_QP.cq_sq)
        assert (cq["cqe_mask"], cq["cqe_num"]) == (0, 16)


# --- registers that no GPU can map -----------------------------------------------------------------------------------


@pytest.fixture
def unmapped(pair: Pair, monkeypatch) -> Pair:
    """As on a system where CUDA cannot register a card's page."""
    plain = pair.gpu.backend.map

    def refuse(address: int, nbytes: int, io: bool = False) -> int:
        if io:
            raise DriverError("cudaHostRegister: operation not permitted")
        return plain(address, nbytes)

    monkeypatch.setattr(pair.gpu.backend, "map", refuse)
    return pair


@pytest.mark.host_memory
@pytest.mark.soft_nic
def test_auto_falls_back_to_the_proxy(unmapped: Pair, log):
    log.clear()
    with unmapped.gpu.create_qp(unmapped.pd, 4) as queue:
        assert queue.nic_handler is PROXY
        assert queue.service is not None
        (record,) = log.records
        assert record.levelno == logging.WARNING
        assert re.search("CPU_PROXY, as .* cannot be mapped .*not permitted.*: enabling CPU proxy mode", record.message)
    assert not unmapped.gpu.can_register_uar(unmapped.a.qp.doorbell_register + 4096 * 8)


@pytest.mark.host_memory
@pytest.mark.soft_nic
@pytest.mark.parametrize("handler", [DB, BF])
def test_a_handler_that_was_asked_for_is_not_replaced(unmapped: Pair, handler):
    memory = len(unmapped.gpu._memory)
    with pytest.raises(DriverError, match=f"{handler.name}: the doorbell register of QP .* use AUTO or CPU_PROXY"):
        unmapped.gpu.create_qp(unmapped.pd, 4, nic_handler=handler)
    assert len(unmapped.gpu._memory) == memory


def test_registers_are_counted(pair: Pair):
    gpu, register = pair.gpu, pair.a.qp.doorbell_register
    assert gpu.can_register_uar(register)
    first = gpu.export_uar(register)
    assert gpu.export_uar(register) == first
    for queue in (pair.a, pair.b):  # were users more: the queue itself, and on a card the other one
        queue.close()
    assert gpu.can_register_uar(register)
    for _ in range(2):
        gpu.unexport_uar(first)
    for wrong in (first, 0):
        with pytest.raises(InvalidValueError, match=r"nothing is mapped at .*: give what export_uar"):
            gpu.unexport_uar(wrong)
    for wrong in (0, register + 1):
        with pytest.raises(InvalidValueError, match="is not a doorbell register"):
            gpu.export_uar(wrong)


# --- systems without GPUDirect ---------------------------------------------------------------------------------------


@pytest.mark.host_memory
def test_an_integrated_gpu_has_its_queues_in_pinned_memory(monkeypatch, log, pair: Pair):
    monkeypatch.setattr(HostBackend, "integrated", True)
    with Gpu("host") as gpu:
        assert gpu.queue_memory == "cpu_gpu"
        assert [r.message for r in log.records if "integrated" in r.message] == [
            "GPU host is integrated, without GPUDirect RDMA: queues are in CPU_GPU memory"
        ]
        with gpu.alloc(64) as memory, gpu.alloc(64, MemType.GPU) as beside:
            assert (memory.kind, beside.kind) == (MemType.CPU_GPU, MemType.GPU)
        queue = gpu.create_qp(pair.pd, 4)
        assert (queue.nic_handler, queue._place.memory.kind) == (PROXY, MemType.CPU_GPU)
    with Gpu("host", queue_memory="gpu") as gpu:
        assert gpu.create_qp(pair.pd, 4).nic_handler is DB
    with pytest.raises(InvalidValueError, match="queue_memory = 'here'"):
        Gpu("host", queue_memory="here")


def test_queue_memory_of_one_queue_and_of_all(pair: Pair):
    with pair.gpu.create_qp(pair.pd, 4, queue_memory="cpu_gpu") as queue:
        assert (queue.nic_handler, queue._place.memory.kind) == (PROXY, MemType.CPU_GPU)
    with pair.gpu.alloc(64) as memory:
        assert memory.kind is MemType.GPU
    with Gpu("host", queue_memory="cpu_gpu") as gpu:
        with gpu.alloc(64) as memory:
            assert memory.kind is MemType.CPU_GPU
        with gpu.create_qp(pair.pd, 4) as queue, gpu.create_qp(pair.pd, 4, queue_memory="gpu") as beside:
            assert (queue.nic_handler, beside.nic_handler) == (PROXY, DB)


# --- exported anew ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attributes", [{}, NO_RECORD])
def test_a_used_queue_is_reset_before_it_is_exported_again(pair: Pair, attributes):
    """Kernels count its WQEs from 0, and the NIC goes on."""
    qp = queue_pair(pair, **attributes)
    keys = (pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey)
    for count in (3, 5):
        for _ in range(2):  # the first time nobody uses it
            with pair.gpu.export_qp(qp, timeout=5.0) as queue, pair.gpu.alloc(64, MemType.CPU_GPU) as out:
                if qp.state is QpState.RST:
                    queue.connect(queue)
                    continue
                assert puts[1, 1, pair.gpu](queue, *keys, 8, count, 1, out).wait(60)
                assert out.array.view(np.int64)[0] == device.OK
        with pytest.raises(BadStateError, match=r"has been used, .*: reset\(\) and connect\(\) it first"):
            pair.gpu.export_qp(qp)
        qp.reset()


def test_a_queue_is_exported_once_at_a_time(pair: Pair):
    beside = Gpu(pair.gpu.name)
    for gpu in (pair.gpu, beside):
        with pytest.raises(InUseError, match=f"{pair.a.qp} is exported already: use {pair.a}, or close that first"):
            gpu.export_qp(pair.a.qp)
    qp = queue_pair(pair)
    pair.gpu.export_qp(qp).close()
    with beside, beside.export_qp(qp):
        pass


# --- arrays and groups -----------------------------------------------------------------------------------------------


def test_an_array_of_queues_of_many_kinds(pair: Pair):
    exported = pair.gpu.create_qp(pair.pd, 4)
    before = exported.device_address
    plain = queue_pair(pair)
    with pair.gpu.export_qps([plain, exported]) as array:
        assert len(array) == 2
        assert array.device_address % 65536 == 0
        assert array[1] is exported
        assert array[1].device_address == array.device_address + 296 != before
        assert [queue.qp.sq_entries for queue in array] == [4, 4]
        for queue in array:
            q = DEV_QP.at(queue._place.read())
            assert (q["sq_num"], q["side"] % 8) == (queue.qpn, 0)
        assert len({int(DEV_QP.at(queue._place.read())["side"]) for queue in array}) == 2
    array.close()
    assert exported.qp.closed
    assert not plain.closed
    with pytest.raises(BadStateError, match="closed"):
        _ = array.device_address


def test_arrays_that_cannot_be_made(pair: Pair):
    memory = len(pair.gpu._memory)
    qp = queue_pair(pair)
    for qps, match in (([], "at least one"), ([qp, qp], "is in the list twice"), ([qp, 5], r"qps\[1\] = 5 is of type")):
        with pytest.raises(InvalidValueError, match=match):
            pair.gpu.export_qps(qps)
    without = pair.pd.create_qp(rq_wr=1, receive_cq=qp.send_cq)
    with pytest.raises(InvalidValueError, match="no send queue"):
        pair.gpu.export_qps([qp, without])
    assert len(pair.gpu._memory) == memory
    pair.gpu.export_qp(qp).close()  # nothing was left half-made


def test_an_array_that_cannot_be_made_leaves_queues_where_they_were(pair: Pair):
    a, b, plain = pair.a, pair.gpu.create_qp(pair.pd, 4), queue_pair(pair)
    without = pair.pd.create_qp(rq_wr=1, receive_cq=plain.send_cq)
    memory = len(pair.gpu._memory)
    addresses = [queue.device_address for queue in (a, b)]
    b.used_by(Running())
    for qps in ([a, without], [a, plain, b]):
        with pytest.raises((InvalidValueError, InUseError)):
            pair.gpu.export_qps(qps)
        assert [queue.device_address for queue in (a, b)] == addresses
        assert len(pair.gpu._memory) == memory
    assert pair.run(puts, 8, 3, 1)[0] == device.OK
    pair.gpu.export_qp(plain).close()
    b._launches._launches[0].ended = True


def test_an_array_closes_as_one(pair: Pair, monkeypatch):
    """While a kernel runs that may use any of its queues, all of them stay."""
    monkeypatch.setattr(export, "LAUNCH_TIMEOUT", 0.01)
    array, launch = pair.gpu.export_qps([queue_pair(pair), queue_pair(pair)], timeout=0.01), Running()
    array[0].used_by(launch)
    with pytest.raises(TimedOutError, match=f"{array[0].qp} cannot be closed: .*Running object.* still uses it"):
        array.close()
    assert [array[i].device_address for i in (0, 1)] == [array.device_address, array.device_address + 296]
    launch.ended = True
    array.close()
    assert array[0].closed
    assert array[1].closed


def test_a_queue_does_not_move_under_a_kernel(pair: Pair):
    queue, launch = pair.gpu.create_qp(pair.pd, 4), Running()
    queue.used_by(launch)
    with pytest.raises(InUseError, match="cannot move into an array: a kernel still uses it"):
        pair.gpu.export_qps([queue])
    launch.ended = True
    with pair.gpu.export_qps([queue]) as array:
        array.used_by(launch)
        assert not queue.in_use


def test_a_group_shares_a_page_and_closes_as_one(pair: Pair):
    with pair.gpu.create_qp_group(pair.pd, 8) as group:
        assert group.main.qp.uar is group.companion.qp.uar is group.main.cq.uar is group.companion.cq.uar
        assert (group.main.qp.init_attr.core_direct_master, group.companion.qp.init_attr.core_direct_master) == (0, 1)
    group.close()
    assert group.main.qp.closed
    assert group.companion.cq.closed


# --- versions and dmabufs --------------------------------------------------------------------------------------------


def test_versions():
    assert library_version() == 0x020000
    for check in (check_device_code_compatibility, check_host_code_compatibility):
        check(library_version())
        for version in (0x020001, 0x01FFFF, 0x000200, 0):
            with pytest.raises(NotSupportedError, match=r"is not compatible: use 2\.0\.0 \(0x020000\) to 2\.0\.0"):
                check(version)


def test_a_host_has_no_dmabufs():
    with Gpu("host") as gpu:
        memory = gpu.alloc(8192)
        with pytest.raises(NotSupportedError, match="no dmabuf: register the memory itself"):
            gpu.dmabuf_fd(memory)
        for nbytes in (0, 100, 16384):
            with pytest.raises(InvalidValueError, match="must be multiples of 4096, and the range must lie in"):
                gpu.dmabuf_fd(memory, nbytes)


@pytest.mark.gpu
def test_a_dmabuf_of_gpu_memory():
    import os

    with Gpu("auto") as gpu:
        fd = gpu.dmabuf_fd(gpu.alloc(1 << 21, MemType.GPU, alignment=1 << 16))
        try:
            with open(f"/proc/self/fdinfo/{fd}") as info:
                assert "exp_name:" in info.read()
        finally:
            os.close(fd)


# --- shared receives -------------------------------------------------------------------------------------------------


@kernel
def receive_next(qp, laddr, lkey, out):
    """Post a receive and wait for the queue's next message."""
    device.st64(out, device.recv(qp, laddr, lkey, 64))
    device.st64(out + 8, device.recv_bytes(qp, device.recv_next(qp)))


def fails(*args: object) -> None:
    raise DriverError("no luck")


def test_a_shared_receive_queue_goes_on_when_its_queues_are_exported_anew(pair: Pair, monkeypatch):
    """Also after an export that failed."""
    memory = pair.here
    srq = pair.pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
    sends, receives, cq = (pair.ctx.create_cq(8, overrun=CqOverrun.ENABLE) for _ in range(3))
    qp = pair.pd.create_qp(sq_wr=4, send_cq=sends, receive_cq=receives, srq=srq, external_datapath=True)
    peer = pair.pd.create_qp(sq_wr=4, send_cq=cq)
    qp.connect(peer)
    for i in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(pair.gpu, "alloc", fails)
            with pytest.raises(DriverError, match="no luck"):
                pair.gpu.export_qp(qp)
        with pair.gpu.export_qp(qp, timeout=5.0) as queue, pair.gpu.alloc(64, MemType.CPU_GPU) as out:
            launch = receive_next[1, 1, pair.gpu](queue, memory, pair.here_mr.lkey, out)
            until(lambda queue=queue, i=i: queue.indices()["receives_posted"] == i + 1, "the kernel")
            peer.post_send(SendWr(opcode=WrOpcode.SEND, sges=[Sge(pair.there.address, 10 + i, pair.there_mr.lkey)]))
            assert launch.wait(30)
            assert out.array.view(np.int64)[:2].tolist() == [i, 10 + i]
    assert not pair.gpu._srqs
    qp.close()


def test_queues_that_share_receives_are_exported_at_once(pair: Pair, monkeypatch):
    """Kernels count the receives in one structure."""
    srq = pair.pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
    qps = [queue_pair(pair, receive_cq=pair.ctx.create_cq(8), srq=srq) for _ in range(4)]
    make = ExportedSrq.__init__

    def slowly(*args: Any) -> None:
        make(*args)
        time.sleep(0.1)

    monkeypatch.setattr(ExportedSrq, "__init__", slowly)
    with ThreadPoolExecutor(len(qps)) as pool:
        queues = list(pool.map(pair.gpu.export_qp, qps))
        assert len({queue._srq for queue in queues}) == 1
        assert list(pair.gpu._srqs) == [srq]
        list(pool.map(ExportedQp.close, queues))
    assert not pair.gpu._srqs


def test_a_shared_receive_queue_that_cannot_be_read_is_given_back(pair: Pair, monkeypatch):
    srq = pair.pd.create_srq(4, srq_type=SrqType.CONTIGUOUS, external_datapath=True)
    qp = queue_pair(pair, receive_cq=pair.ctx.create_cq(8), srq=srq)
    memory = len(pair.gpu._memory)
    queue = pair.gpu.export_qp(qp)
    monkeypatch.setattr(queue._srq, "read_all", fails)
    with pytest.raises(DriverError, match="no luck"):
        queue.close()
    assert queue.closed
    assert len(pair.gpu._memory) == memory
    assert not pair.gpu._srqs
