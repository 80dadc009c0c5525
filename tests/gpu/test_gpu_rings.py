"""Kernels that drive rings in the memory of a real GPU; the test plays the NIC, by copies of CUDA's.

On threads of the host the same is done with rings in host memory.
"""

import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from card_rig import REQ_ERR, RESP_SEND, Card, complete, peek
from fake_device import ERR, RTS
from gpunetio import (
    ExportedQp,
    Gpu,
    MemRegType,
    MemType,
    NicHandler,
    QpState,
    RingMemory,
    SendDbrModeExt,
    device,
    verbs,
)
from gpunetio.errors import DriverError, NotSupportedError
from nic_rig import until
from queue_kernels import count_when_complete, puts, puts_in_turn, receive

pytestmark = pytest.mark.host_memory  # it looks at rings and records

RADDR, RKEY, LADDR, LKEY, NBYTES = 0x1234_5678_9ABC_0000, 0x00C0_FFEE, 0x7654_3210_0000, 0x0BAD_CAFE, 64
KEYS = (RADDR, RKEY, LADDR, LKEY)
DEFAULT, PEERMEM = MemRegType.DEFAULT, MemRegType.CUDA_PEERMEM


@dataclass
class Stage:
    """A GPU and a played card."""

    gpu: Gpu
    card: Card
    pd: verbs.PD

    def queue(self, depth: int = 4, how: MemRegType = DEFAULT, **options) -> ExportedQp:
        """A queue whose rings are in GPU memory where there is a GPU."""
        on_gpu = self.gpu.target == "cuda"
        made = self.gpu.create_qp(self.pd, depth, mem_reg_type=how if on_gpu else DEFAULT, timeout=10.0, **options)
        assert made.ring_memory.in_gpu == on_gpu
        assert made.cq.ring.lies_in.in_gpu == on_gpu
        self.card.set_state(made.qpn, RTS)
        return made

    def announced(self, queue: ExportedQp, producer: int, record: bool = True) -> None:
        """Wait until so many WQEs were announced: by the register, and by the record."""
        ring = struct.pack(">II", producer << 8 & 0xFFFF_FF00, queue.qpn << 8)
        until(lambda: peek(self.gpu, queue.qp.doorbell_register, 8) == ring, f"doorbell {producer}")
        if record:
            until(lambda: peek(self.gpu, queue.qp.dbr_address + 4, 4) == struct.pack(">I", producer), "the record")

    def wqe(self, queue: ExportedQp, index: int) -> bytes:
        """As it is in the ring."""
        return peek(self.gpu, queue.qp.sq_address + 64 * (index % queue.qp.sq_entries), 64)


@pytest.fixture
def stage(gpu: Gpu) -> Iterator[Stage]:
    gpu.watchdog.close()
    gpu.watchdog.patience = 0.02
    card = Card()
    with verbs.import_context(card) as ctx:
        yield Stage(gpu, card, ctx.create_pd())
    assert card.left() == []
    assert not gpu._memory


def write_wqe(qpn: int, index: int) -> bytes:
    """An RDMA WRITE as `puts` makes it: control, remote address and data segments (PRM, Send WQE format)."""
    at = index * NBYTES
    control = struct.pack(">IIBBBBI", (index & 0xFFFF) << 8 | 0x08, qpn << 8 | 3, 0, 0, 0, 0x08, 0)
    return control + struct.pack(">QII", RADDR + at, RKEY, 0) + struct.pack(">IIQ", NBYTES, LKEY, LADDR + at)


def result(memory) -> int:
    return int(memory.array.view(np.int64)[0])


@pytest.mark.parametrize("how", [DEFAULT, PEERMEM])
def test_a_kernel_posts_and_waits(stage: Stage, how):
    """Ten puts through a ring of four: WQEs, doorbells and CQEs, each in its place."""
    with stage.queue(4, how) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        out.array[:] = 0xEE
        launch = puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 10, 1, out)
        for index in range(10):
            stage.announced(queue, index + 1)
            assert stage.wqe(queue, index)[:48] == write_wqe(queue.qpn, index)
            assert not launch.done
            complete(stage.gpu, queue.cq, index)
        assert launch.wait(30)
        assert result(out) == device.OK
        assert queue.indices() == {"reserved": 10, "ready": 10, "submitted": 10, "completed": 10}
        assert queue.last_error() is None


@pytest.mark.parametrize("how", [DEFAULT, PEERMEM])
@pytest.mark.parametrize("collapsed", [False, True])
def test_an_error_and_a_new_life(stage: Stage, how, collapsed):
    """A kernel ends with EIO, the host tells why, and after a reset WQEs count from 0 while CQEs go on."""
    with stage.queue(4, how, cq_collapsed=collapsed) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        launch = puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 3, 1, out)
        stage.announced(queue, 1)
        complete(stage.gpu, queue.cq, 0)
        stage.announced(queue, 2)
        complete(stage.gpu, queue.cq, 1, opcode=REQ_ERR, syndrome=0x13, vendor=0x88)
        assert launch.wait(30)
        assert result(out) == device.EIO
        stage.card.set_state(queue.qpn, ERR)
        error = queue.last_error()
        assert error is not None
        assert (error.index, error.syndrome, error.vendor_syndrome, error.state) == (1, 0x13, 0x88, QpState.ERR)
        queue.qp.reset()
        queue.reset()
        assert (queue.last_error(), queue.cqe_offset()) == (None, 2)
        assert stage.wqe(queue, 0) == bytes(64)
        assert peek(stage.gpu, queue.qp.dbr_address, 8) == bytes(8)
        stage.card.set_state(queue.qpn, RTS)
        launch = puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 6, 1, out)
        for index in range(6):
            stage.announced(queue, index + 1)
            complete(stage.gpu, queue.cq, 2 + index, counter=index)
        assert launch.wait(30)
        assert result(out) == device.OK


def test_an_error_that_no_kernel_has_looked_at(stage: Stage):
    with stage.queue(8) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        assert puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 5, 0, out).wait(30)
        for index in range(3):
            complete(stage.gpu, queue.cq, index)
        complete(stage.gpu, queue.cq, 3, opcode=REQ_ERR, syndrome=0x15, vendor=0x81)
        stage.card.set_state(queue.qpn, ERR)
        error = queue.last_error()
        assert error is not None
        assert (error.index, error.syndrome, error.vendor_syndrome) == (3, 0x15, 0x81)
        queue.qp.reset()


def test_the_watchdog_tells_what_the_nic_owes(stage: Stage):
    watchdog = stage.gpu.watchdog
    with stage.queue(8) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        assert puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 7, 0, out).wait(30)
        for index in range(4):
            complete(stage.gpu, queue.cq, index)
        for _ in range(2):
            watchdog.look()
            time.sleep(0.025)
        watchdog.look()
        (told,) = watchdog.stalls
        assert "the NIC has not completed WQE 4 (reserved 7, ready 7, submitted 7)" in told
        assert "last CQE: REQ with wqe_counter 3 in slot 3" in told
        for index in range(4, 7):
            complete(stage.gpu, queue.cq, index)
        watchdog.stalls.clear()
        for _ in range(3):
            watchdog.look()
            time.sleep(0.025)
        assert watchdog.stalls == []


@pytest.mark.parametrize("how", [DEFAULT, PEERMEM])
def test_a_receive(stage: Stage, how):
    """Its WQE and its word of the record; the completion says how long the message is."""
    with stage.queue(4, how, receives=4) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        assert queue.receives is not None
        assert queue.receives.cq.ring.lies_in is queue.ring_memory
        for index in range(6):
            launch = receive[1, 1, stage.gpu](queue, LADDR, LKEY, 256, out)
            counted = struct.pack(">I", index + 1)
            until(lambda counted=counted: peek(stage.gpu, queue.qp.dbr_address, 4) == counted, "the record")
            wqe = peek(stage.gpu, queue.qp.rq_address + 16 * (index % 4), 16)
            assert wqe == struct.pack(">IIQ", 256, LKEY, LADDR)
            complete(stage.gpu, queue.receives.cq, index, opcode=RESP_SEND, nbytes=100 + index)
            assert launch.wait(30)
            assert result(out) == 100 + index
        assert queue.indices()["receives_completed"] == 6


@pytest.mark.parametrize("handler", [NicHandler.CPU_PROXY, NicHandler.AUTO])
def test_the_proxy_rings_for_rings_in_the_gpu(stage: Stage, handler, monkeypatch):
    """Also where AUTO finds that the register cannot be mapped: the record is then in host memory."""
    plain = stage.gpu.backend.map

    def no_registers(address: int, nbytes: int, io: bool = False) -> int:
        if io:
            raise DriverError("not this one")
        return plain(address, nbytes)

    monkeypatch.setattr(stage.gpu.backend, "map", no_registers)
    with stage.queue(4, nic_handler=handler) as queue, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        assert queue.nic_handler is NicHandler.CPU_PROXY
        assert queue.qp.ring.dbr_lies_in is RingMemory.HOST
        launch = puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 5, 1, out)
        for index in range(5):
            stage.announced(queue, index + 1)
            assert stage.wqe(queue, index)[:48] == write_wqe(queue.qpn, index)
            complete(stage.gpu, queue.cq, index)
        assert launch.wait(30)
        assert result(out) == device.OK
        assert queue.indices()["forwarded"] == 5


def test_a_device_that_needs_no_record(stage: Stage):
    with (
        stage.queue(4, send_dbr_mode=SendDbrModeExt.NO_DBR_HW) as queue,
        stage.gpu.alloc(64, MemType.CPU_GPU) as out,
    ):
        assert queue.nic_handler is NicHandler.GPU_SM_NO_DBR
        launch = puts[1, 1, stage.gpu](queue, *KEYS, NBYTES, 3, 1, out)
        for index in range(3):
            stage.announced(queue, index + 1, record=False)
            complete(stage.gpu, queue.cq, index)
        assert launch.wait(30)
        assert result(out) == device.OK
        assert peek(stage.gpu, queue.qp.dbr_address, 8) == bytes(8)


def test_a_companion_waits(stage: Stage):
    """A WAIT for the CQE of the main queue, and an atomic behind it."""
    with (
        stage.gpu.create_qp_group(stage.pd, 4, timeout=10.0) as group,
        stage.gpu.alloc(64, MemType.CPU_GPU) as out,
    ):
        main, companion = group.main, group.companion
        assert main.ring_memory is companion.ring_memory
        stage.card.set_state(companion.qpn, RTS)
        launch = count_when_complete[1, 1, stage.gpu](companion, main.cq.cqn, 7, *KEYS, out)
        stage.announced(companion, 2)
        wait = struct.pack(">IIBBBBI", 0x0F, companion.qpn << 8 | 2, 0, 0, 0, 0x08, 0)
        assert stage.wqe(companion, 0)[:16] == wait
        assert stage.wqe(companion, 0)[24:32] == struct.pack(">II", 7, main.cq.cqn)
        for index in range(2):
            complete(stage.gpu, companion.cq, index)
        assert launch.wait(30)
        assert result(out) == device.OK


def test_an_array_of_queues(stage: Stage):
    queues = [stage.queue(4) for _ in range(3)]
    with stage.gpu.export_qps(queues) as array, stage.gpu.alloc(64, MemType.CPU_GPU) as out:
        launch = puts_in_turn[1, 1, stage.gpu](array, array.STRIDE, 3, *KEYS, NBYTES, 9, out)
        for number in range(9):
            queue, index = array[number % 3], number // 3
            stage.announced(queue, index + 1)
            assert stage.wqe(queue, index)[16:24] == struct.pack(">Q", RADDR + number * NBYTES)
            complete(stage.gpu, queue.cq, index)
        assert launch.wait(30)
        assert result(out) == device.OK


# --- how the card is told --------------------------------------------------------------------------------------------


def gives_dmabufs(gpu: Gpu) -> bool:
    """Whether this GPU's driver exports dmabufs."""
    with gpu.alloc(4096, MemType.GPU) as memory:
        try:
            os.close(gpu.dmabuf_fd(memory))
        except NotSupportedError:
            return False
    return True


def is_dmabuf(fd: int | str) -> bool:
    """Whether the kernel says so of a descriptor."""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            return "exp_name:" in info.read()
    except FileNotFoundError:  # that of the list of them
        return False


def open_dmabufs() -> int:
    return sum(map(is_dmabuf, os.listdir("/proc/self/fd")))


@pytest.mark.gpu
def test_rings_are_exported_as_dmabufs(caplog):
    """Where the driver gives them; otherwise the card is given addresses. No descriptor stays open."""
    caplog.set_level(logging.INFO, "gpunetio.gpu")
    card = Card()
    with Gpu("auto") as gpu, verbs.import_context(card) as ctx:
        pd, expected = ctx.create_pd(), gives_dmabufs(gpu)
        with gpu.create_qp(pd, 1024) as queue:
            assert queue.ring_memory is (RingMemory.CUDA_DMABUF if expected else RingMemory.CUDA_PEERMEM)
            assert card.dmabufs == ([1024 * 64 + 4096] * 2 if expected else [])
            assert open_dmabufs() == 0
            way = "with dmabuf mode" if expected else "with nvidia-peermem mode"
            assert sum(way in record.message and record.levelno == logging.INFO for record in caplog.records) == 2
            assert any(record.levelno == logging.WARNING for record in caplog.records) != expected
        card.refused.add("reg_dmabuf_umem")
        with gpu.create_qp(pd, 1024) as queue:
            assert queue.ring_memory is RingMemory.CUDA_PEERMEM
            assert open_dmabufs() == 0
        card.refused.add("UMEM of GPU")
        with gpu.create_qp(pd, 1024) as queue:
            assert queue.ring_memory is RingMemory.HOST
            assert open_dmabufs() == 0
        assert not gpu._memory


@pytest.mark.gpu
def test_a_dmabuf_of_ring_memory_is_one():
    """What the driver gives for memory as `create_qp` allocates it is a dmabuf of whole pages."""
    with Gpu("auto") as gpu, gpu.alloc(3 * 4096, MemType.GPU) as memory:
        if not gives_dmabufs(gpu):
            pytest.skip("this GPU's driver exports no dmabufs")
        fd = gpu.dmabuf_fd(memory)
        try:
            assert is_dmabuf(fd)
            assert open_dmabufs() == 1
            assert os.lseek(fd, 0, os.SEEK_END) >= 3 * 4096
        finally:
            os.close(fd)


@pytest.mark.gpu
def test_kernels_drive_rings_in_pinned_memory():
    """The last step of the chain works, too."""
    card = Card()
    card.refused |= {"reg_dmabuf_umem", "UMEM of GPU"}
    with Gpu("auto") as gpu, verbs.import_context(card) as ctx:
        stage = Stage(gpu, card, ctx.create_pd())
        with gpu.create_qp(stage.pd, 4, timeout=10.0) as queue, gpu.alloc(64, MemType.CPU_GPU) as out:
            assert queue.ring_memory is RingMemory.HOST
            card.set_state(queue.qpn, RTS)
            launch = puts[1, 1, gpu](queue, *KEYS, NBYTES, 6, 1, out)
            for index in range(6):
                stage.announced(queue, index + 1)
                assert stage.wqe(queue, index)[:48] == write_wqe(queue.qpn, index)
                complete(gpu, queue.cq, index)
            assert launch.wait(30)
            assert result(out) == device.OK


@pytest.mark.host_memory
@pytest.mark.gpu
@pytest.mark.soft_nic
def test_a_software_nic_has_its_rings_in_host_memory(caplog):
    """At once, and without a word of warning."""
    caplog.set_level(logging.INFO, "gpunetio.gpu")
    with Gpu("auto") as gpu, verbs.open("soft0") as ctx, gpu.create_qp(ctx.create_pd(), 64) as queue:
        assert queue.ring_memory is RingMemory.HOST
        (record,) = [record for record in caplog.records if "NIC handler" in record.message]
        assert record.levelno == logging.INFO
        assert record.message.endswith("rings in host memory")
        assert not [each for each in caplog.records if "Mapping" in each.message or each.levelno > logging.INFO]
