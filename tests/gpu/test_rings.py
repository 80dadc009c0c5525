"""Queues whose rings are in GPU memory: how a card is told of them, what happens where it is not, and who reads them.

CUDA and the card are played (card_rig.py). The CPU cannot touch that GPU memory: who loads or stores there dies.
"""

import gc
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from card_rig import REQ_ERR, RESP_SEND, Card, FakeCuda, complete, peek, poke
from fake_device import CREATE_CQ, CREATE_QP, ERR, RTS
from gpunetio import Gpu, MemRegType, MemType, NicHandler, QpState, RingMemory, SendDbrModeExt, verbs
from gpunetio.enums import QpSendDbrMode, SrqType
from gpunetio.errors import BadStateError, DeviceFatalError, DriverError, InvalidValueError, NotSupportedError
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP, DEV_RQ, DEV_SIDE
from gpunetio.gpu.host_backend import HostBackend
from gpunetio.memory import HostMemory
from repository import ROOT

AUTO, PROXY, DB, BF, NO_DBR = NicHandler
VALID, HW, EMULATED = SendDbrModeExt
HOST, DMABUF, PEERMEM, NAMELESS, _NEAR = RingMemory


@dataclass
class Stage:
    """A played card, a played GPU, and what is open of them."""

    card: Card
    cuda: FakeCuda
    gpu: Gpu
    pd: verbs.PD

    def refuse(self, *what: str | int) -> None:
        for each in what:
            (self.cuda if each in OF_CUDA else self.card).refused.add(each)  # type: ignore[arg-type]

    def allow_all(self) -> None:
        self.cuda.refused.clear()
        self.card.refused.clear()

    def held(self) -> dict[str, object]:
        """Everything that may leak, but for the page that queues of a context share."""
        gc.collect()  # what was raised knows the memory
        return {
            "card": {kind: len(numbers) for kind, numbers in self.card.live.items() if numbers and kind != "uar"},
            "memory": dict(+self.cuda.live),
            "known memory": len(self.gpu._memory),
            "mapped": dict(+self.cuda.mapped),
            "dmabufs": sum("memfd:dmabuf" in name for name in _descriptors()),
        }


def _descriptors() -> list[str]:
    """What the open descriptors of this process are."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


OF_CUDA = ("dmabuf", "register", "alloc GPU", "alloc CPU_GPU")


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What the compilers have left is looked through no more."""
    gc.freeze()


@pytest.fixture
def stage(monkeypatch) -> Iterator[Stage]:
    cuda, card = FakeCuda(), Card()
    monkeypatch.setattr(Gpu, "_open_backend", staticmethod(lambda which: HostBackend() if which == "host" else cuda))
    with Gpu("auto") as gpu, verbs.import_context(card) as ctx:
        gpu.watchdog.close()
        gpu.watchdog.patience = 0.02
        yield Stage(card, cuda, gpu, ctx.create_pd())
    assert dict(+cuda.live) == dict(+cuda.mapped) == {}
    assert card.left() == []


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "gpunetio.gpu")
    return caplog


def lines(log) -> list[str]:
    """What was logged, without the addresses."""
    found = [re.sub(r"at 0x\w+", "at 0x…", f"{record.levelname} {record.message}") for record in log.records]
    log.clear()
    return found


# --- how the card is told --------------------------------------------------------------------------------------------

NO_FD = "GPU fa:00.0 gives no dmabuf (CUDA_ERROR_NOT_SUPPORTED)"
NO_DMABUF_UMEM = "register a UMEM: refused reg_dmabuf_umem"
NO_UMEM = "register a UMEM: refused UMEM of GPU"
NOT_MAPPED = "the send CQ cannot be mapped"
OUT_OF_MEMORY = "cudaMalloc: out of memory (CUDA error 2)"


def no_dmabuf(why: str) -> str:
    return (
        f"WARNING Cannot map the send CQ for card0 on GPU fa:00.0 with dmabuf mode ({why}): trying with "
        "nvidia-peermem mode"
    )


def no_peermem(why: str) -> str:
    return (
        f"WARNING Cannot map the send CQ for card0 on GPU fa:00.0 with nvidia-peermem mode ({why}): trying in CPU_GPU "
        "memory"
    )


def mapped(way: str) -> list[str]:
    parts = "the send CQ", "the queue pair"
    return [f"INFO Mapping {part} (4096 bytes at 0x…) for card0 on GPU fa:00.0 {way}" for part in parts]


def taken(text: str, handler: NicHandler = DB, why: str = "kernels ring the doorbell and keep its record") -> str:
    return f"INFO QP 0x… of card0 on GPU fa:00.0: NIC handler {handler.name}, {why}; rings in {text}"


@pytest.mark.parametrize(("refused", "lies_in", "told"), [
    ((), DMABUF, [*mapped("with dmabuf mode")]),
    (("dmabuf",), PEERMEM, [no_dmabuf(NO_FD), *mapped("with nvidia-peermem mode")]),
    (("reg_dmabuf_umem",), PEERMEM, [no_dmabuf(NO_DMABUF_UMEM), *mapped("with nvidia-peermem mode")]),
    (("dmabuf", "UMEM of GPU"), HOST, [no_dmabuf(NO_FD), no_peermem(NO_UMEM), *mapped("in CPU_GPU memory")]),
    (("reg_dmabuf_umem", "UMEM of GPU"), HOST,
     [no_dmabuf(NO_DMABUF_UMEM), no_peermem(NO_UMEM), *mapped("in CPU_GPU memory")]),
])
def test_which_way_is_taken(stage: Stage, log, refused, lies_in, told):
    """The log tells each way that failed, why, and the one taken; nothing of what failed is left."""
    others = stage.gpu.create_qp(stage.pd, 4)
    before = stage.held()
    log.clear()
    stage.refuse(*refused)
    with stage.gpu.create_qp(stage.pd, 4) as queue:
        assert queue.ring_memory is lies_in
        assert re.sub("QP 0x[0-9a-f]+", "QP 0x…", "\n".join(lines(log))).split("\n") == [*told, taken(lies_in.text)]
        assert repr(queue) == f"<{queue}, its rings in {lies_in.text}>"
        assert others.indices()["submitted"] == queue.indices()["submitted"] == 0
    assert stage.held() == before
    assert stage.card.dmabufs == [4096] * (4 if lies_in is DMABUF else 2)


def test_the_whole_chain_is_told_as_the_documents_say(stage: Stage, log):
    """docs/decisions/gpu-memory.md shows the log of a system where nothing works."""
    stage.refuse("dmabuf", "UMEM of GPU", "register")
    with stage.gpu.create_qp(stage.pd, 4) as queue:
        told = re.sub(f"{queue.qpn:#x}", "0x17", "\n".join(lines(log)))
    page = (ROOT / "docs" / "decisions" / "gpu-memory.md").read_text()
    assert f"```\n{told}\n```" in page


@pytest.mark.parametrize(("refused", "match"), [
    (("dmabuf", "UMEM of GPU", "UMEM of host"), f"{NOT_MAPPED} in CPU_GPU memory: register a UMEM: refused"),
    (("dmabuf", "UMEM of GPU", "alloc CPU_GPU"), f"{NOT_MAPPED} in CPU_GPU memory: cudaMalloc: out of memory"),
    (("alloc GPU", "alloc CPU_GPU"), f"{NOT_MAPPED} in CPU_GPU memory: cudaMalloc: out of memory"),
    ((CREATE_CQ,), "CREATE_CQ: refused 1024"),
    ((CREATE_QP,), "CREATE_QP: refused 1280"),
    (("doorbell_register",), "refused doorbell_register"),
    (("subscribe",), "refused subscribe"),
    (("dmabuf", "UMEM of GPU", CREATE_QP), "CREATE_QP: refused 1280"),
])
@pytest.mark.parametrize("create", ["create_qp", "create_qp_group"])
def test_what_fails_leaves_nothing_and_others_go_on(stage: Stage, create, refused, match):
    others = stage.gpu.create_qp(stage.pd, 4)
    before = stage.held()
    stage.refuse(*refused)
    for _ in range(2):
        with pytest.raises(DriverError, match=match):
            getattr(stage.gpu, create)(stage.pd, 4)
        assert stage.held() == before
    assert others.indices()["submitted"] == 0
    stage.allow_all()
    with getattr(stage.gpu, create)(stage.pd, 4):
        pass
    assert stage.held() == before


def test_a_companion_that_fails_takes_its_queue_along(stage: Stage, monkeypatch):
    before, created = stage.held(), []
    plain = stage.card.devx_obj_create

    def second_qp_fails(mailbox: bytes, out_size: int) -> tuple[int, bytes]:
        created.append(int.from_bytes(mailbox[:2], "big"))
        if created.count(CREATE_QP) == 2:
            raise DriverError("no more", 5, 0)
        return plain(mailbox, out_size)

    monkeypatch.setattr(stage.card, "devx_obj_create", second_qp_fails)
    with pytest.raises(DriverError, match="CREATE_QP: no more"):
        stage.gpu.create_qp_group(stage.pd, 4)
    assert created == [CREATE_CQ, CREATE_QP] * 2
    assert stage.held() == before


def test_memory_of_the_gpu_that_is_used_up_is_a_way_that_fails(stage: Stage, log):
    """The rings go to the host; the structure, which kernels count in, has no other place."""
    stage.refuse("alloc GPU")
    with pytest.raises(DriverError, match="out of memory"):
        stage.gpu.create_qp(stage.pd, 4)
    assert lines(log)[:4] == [
        no_dmabuf(OUT_OF_MEMORY), no_peermem(OUT_OF_MEMORY), *mapped("in CPU_GPU memory"),
    ]


def test_what_the_device_keeps_stays_allocated(stage: Stage):
    """A UMEM that cannot be given back is one that the device may still write to."""
    queue = stage.gpu.create_qp(stage.pd, 4, nic_handler=PROXY)
    stage.refuse("dereg_umem")
    with pytest.raises(DriverError, match="refused dereg_umem"):
        queue.close()
    assert queue.closed
    assert queue.qp.closed
    assert stage.cuda.live["GPU"] == 2  # rings and CQEs, not the structure
    stage.card.live["umem"].clear()


@pytest.mark.parametrize(("asked", "refused", "lies_in", "error"), [
    (MemRegType.CUDA_DMABUF, (), DMABUF, None),
    (MemRegType.CUDA_PEERMEM, (), PEERMEM, None),
    (MemRegType.CUDA_PEERMEM, ("dmabuf", "reg_dmabuf_umem"), PEERMEM, None),
    (MemRegType.CUDA_DMABUF, ("dmabuf",), None, f"{NOT_MAPPED} with dmabuf mode: {NO_FD}"),
    (MemRegType.CUDA_DMABUF, ("reg_dmabuf_umem",), None, f"{NOT_MAPPED} with dmabuf mode: {NO_DMABUF_UMEM}"),
    (MemRegType.CUDA_PEERMEM, ("UMEM of GPU",), None, f"{NOT_MAPPED} with nvidia-peermem mode: {NO_UMEM}"),
])
@pytest.mark.parametrize("create", ["create_qp", "create_qp_group"])
def test_a_way_that_was_asked_for_is_not_replaced(stage: Stage, log, create, asked, refused, lies_in, error):
    before = stage.held()
    stage.refuse(*refused)
    if error is None:
        with getattr(stage.gpu, create)(stage.pd, 4, mem_reg_type=asked) as made:
            assert (made if create == "create_qp" else made.companion).ring_memory is lies_in
    else:
        with pytest.raises(DriverError, match=f"^{re.escape(error)}; mem_reg_type DEFAULT also tries other ways$"):
            getattr(stage.gpu, create)(stage.pd, 4, mem_reg_type=int(asked))
        assert lines(log) == []
    assert stage.held() == before


def test_what_fails_once_is_not_tried_again_for_the_same_queue(stage: Stage, log, monkeypatch):
    """Its rings lie together; the next queue is asked for anew."""
    plain, calls = stage.card.reg_dmabuf_umem, []

    def third_time(*args) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise DriverError("no room", 5, 0)
        return plain(*args)

    monkeypatch.setattr(stage.card, "reg_dmabuf_umem", third_time)
    first, second = (stage.gpu.create_qp(stage.pd, 4, receives=2) for _ in range(2))
    assert (first.cq.ring.lies_in, first.qp.receive_cq.ring.lies_in, first.ring_memory) == (DMABUF, PEERMEM, PEERMEM)
    assert second.ring_memory is DMABUF
    (warning,) = [line for line in lines(log) if "WARNING" in line]
    assert warning == no_dmabuf("register a UMEM: no room").replace("send", "receive")


# --- queues that are in host memory at once --------------------------------------------------------------------------


def test_a_device_that_does_not_reach_gpu_memory_is_not_asked(stage: Stage, log):
    stage.card.reaches_gpu_memory = False
    with stage.gpu.create_qp(stage.pd, 4) as queue:
        assert (queue.ring_memory, stage.cuda.live["GPU"], stage.card.dmabufs) == (HOST, 1, [])
    assert re.sub("QP 0x[0-9a-f]+", "QP 0x…", lines(log)[0]) == taken("host memory")
    for how in (MemRegType.CUDA_DMABUF, MemRegType.CUDA_PEERMEM):
        with pytest.raises(NotSupportedError, match=f"{how.name} .* card0 does not reach GPU memory: use DEFAULT"):
            stage.gpu.create_qp(stage.pd, 4, mem_reg_type=how)


def test_queues_of_a_system_without_gpudirect(stage: Stage, log):
    with stage.gpu.create_qp(stage.pd, 4, queue_memory="cpu_gpu") as queue:
        assert (queue.ring_memory, queue.nic_handler, stage.cuda.live["GPU"]) == (HOST, PROXY, 0)
    assert len(lines(log)) == 1
    with pytest.raises(NotSupportedError, match=r"CUDA_DMABUF .* its queues are in CPU_GPU memory: use DEFAULT"):
        stage.gpu.create_qp(stage.pd, 4, queue_memory="cpu_gpu", mem_reg_type=MemRegType.CUDA_DMABUF)
    with pytest.raises(InvalidValueError, match="mem_reg_type = 3: it is one of DEFAULT"):
        stage.gpu.create_qp(stage.pd, 4, mem_reg_type=3)  # type: ignore[arg-type]


@pytest.mark.host_memory
def test_threads_of_the_host_have_host_memory(log):
    with Gpu("host") as gpu, verbs.import_context(Card()) as ctx:
        pd = ctx.create_pd()
        with gpu.create_qp(pd, 4) as queue:
            assert queue.ring_memory is HOST
        assert len(lines(log)) == 1
        with pytest.raises(NotSupportedError, match="GPU host has host memory only: use DEFAULT"):
            gpu.create_qp(pd, 4, mem_reg_type=MemRegType.CUDA_PEERMEM)


# --- doorbells -------------------------------------------------------------------------------------------------------


def record_in(queue) -> RingMemory:
    return queue.qp.ring.dbr_lies_in


@pytest.mark.parametrize(("options", "handler", "record"), [
    ({}, DB, DMABUF),
    ({"nic_handler": DB}, DB, DMABUF),
    ({"nic_handler": BF}, BF, DMABUF),
    ({"send_dbr_mode": HW}, NO_DBR, DMABUF),
    ({"send_dbr_mode": QpSendDbrMode.NO_DBR_EXT}, NO_DBR, DMABUF),
    ({"nic_handler": PROXY}, PROXY, HOST),
])
def test_who_writes_the_record_decides_where_it_is(stage: Stage, options, handler, record):
    before = stage.held()
    with stage.gpu.create_qp(stage.pd, 4, **options) as queue:
        assert (queue.nic_handler, queue.ring_memory, record_in(queue)) == (handler, DMABUF, record)
        assert DEV_QP.at(queue._place.read())["sq_dbrec"] == queue.qp.dbr_address + 4
    assert stage.held() == before


def test_a_register_that_no_gpu_can_map(stage: Stage, log):
    """AUTO takes the proxy, which writes the record into a page of the host's; what was asked for by name fails."""
    before = stage.held()
    stage.refuse("register")
    with stage.gpu.create_qp(stage.pd, 4) as queue:
        assert (queue.nic_handler, queue.ring_memory, record_in(queue)) == (PROXY, DMABUF, HOST)
        assert lines(log) == [*mapped("with dmabuf mode"), proxy(queue, "GPU memory (dmabuf)")]
        forwarded_by_hand(stage, queue)
    with pytest.raises(DriverError, match=r"GPU_SM_DB: the doorbell register of QP .* use AUTO or CPU_PROXY"):
        stage.gpu.create_qp(stage.pd, 4, nic_handler=DB)
    assert not [memory for memory in stage.gpu._memory if memory.kind is MemType.GPU]
    stage.gpu.own_service().close()
    assert stage.held() == before


def test_a_record_that_a_thread_keeps_behind_kernels_is_in_host_memory(stage: Stage):
    """It sees their index in the structure, by GDRCopy."""
    stage.cuda.maps_memory = True
    before = stage.held()
    with stage.gpu.create_qp(stage.pd, 4, send_dbr_mode=EMULATED, proxy_service=False) as queue:
        assert (queue.nic_handler, queue.ring_memory, record_in(queue)) == (NO_DBR, DMABUF, HOST)
        set_index(stage, queue, sq_wqe_pi=2)
        assert queue.progress()
        assert peek(stage.gpu, queue.qp.dbr_address, 8) == bytes([0, 0, 0, 0, 0, 0, 0, 2])
    assert stage.held() == before


def proxy(queue, rings: str) -> str:
    return (
        f"WARNING QP {queue.qpn:#x} of card0 on GPU fa:00.0: NIC handler CPU_PROXY, as its doorbell register cannot be "
        "mapped (cudaHostRegister: operation not permitted (CUDA error 800)): enabling CPU proxy mode; rings in "
        + rings
    )


def forwarded_by_hand(stage: Stage, queue) -> None:
    """What a kernel leaves in the word reaches the record and the register."""
    queue.service.forget(queue)
    poke(stage.gpu, int(DEV_QP.at(queue._place.read())["sq_db"]), (3).to_bytes(8, "little"))
    assert queue.progress()
    assert peek(stage.gpu, queue.qp.dbr_address + 4, 4) == bytes([0, 0, 0, 3])
    ring = bytes([0, 0, 3, 0]) + (queue.qpn << 8).to_bytes(4, "big")
    assert peek(stage.gpu, queue.qp.uar.reg_addr, 8) == ring


def test_queues_share_the_register_of_a_page(stage: Stage):
    """A card has one register a page for any number of queues; it is mapped once."""
    queues = [stage.gpu.create_qp(stage.pd, 4) for _ in range(3)]
    assert {queue.qp.doorbell_register for queue in queues} == {queues[0].qp.uar.reg_addr}
    assert dict(+stage.cuda.mapped) == {queues[0].qp.uar.reg_addr: 1}
    assert queues[0].qp.uar.reg_addr % 4096 == 0x800
    queues[0].close()
    assert stage.cuda.mapped[queues[1].qp.uar.reg_addr] == 1
    with stage.gpu.create_qp(stage.pd, 4, send_dbr_mode=HW) as without:
        assert without.qp.doorbell_register == without.qp.uar.dbr_less_addr == queues[1].qp.uar.reg_addr - 0x200


@pytest.mark.parametrize("create", ["create_qp", "create_qp_group"])
def test_a_device_that_needs_records(stage: Stage, create):
    stage.card.no_dbr_ext = False
    for mode in (HW, QpSendDbrMode.NO_DBR_EXT):
        with pytest.raises(NotSupportedError, match="NO_DBR_HW: card0 needs doorbell records; use VALID_DBR or"):
            getattr(stage.gpu, create)(stage.pd, 4, send_dbr_mode=mode)
    assert (stage.card.sent(CREATE_CQ), stage.card.live["uar"], stage.card.live["umem"]) == ([], [], [])


def test_the_cpu_keeps_no_record_in_gpu_memory(stage: Stage):
    """Of a queue pair with memory of the user's; nothing is left of the export."""
    ctx, memory = stage.pd.ctx, stage.gpu.alloc(8192, MemType.GPU)
    umem = ctx.register_umem(memory)
    cq = ctx.create_cq(4, external_datapath=True)
    qp = stage.pd.create_qp(sq_wr=4, send_cq=cq, external_umem=(umem, 0), external_dbr_umem=(umem, 4096))
    before = stage.held()
    for refused, handler in (((), PROXY), (("register",), AUTO)):
        stage.refuse(*refused)
        match = "CPU_PROXY and send_dbr_mode VALID_DBR the CPU keeps the doorbell record of QP .* in GPU memory: give"
        with pytest.raises(InvalidValueError, match=match):
            stage.gpu.export_qp(qp, handler)
        assert stage.held() == before


# --- what lies where -------------------------------------------------------------------------------------------------


def test_kernels_get_the_addresses_in_the_gpu(stage: Stage):
    """GPU memory is not registered with CUDA once more, and commands name places in the UMEMs."""
    with stage.gpu.create_qp(stage.pd, 5, receives=3) as queue:
        qp, cq, receive_cq = queue.qp, queue.cq, queue.qp.receive_cq
        image, side = queue._place.read(), queue._place.read_side()
        q, c, r = (DEV_QP.at(image), DEV_CQ.at(image, DEV_QP.cq_sq), DEV_CQ.at(side, DEV_SIDE.cq_rq))
        rq = DEV_RQ.at(side, DEV_SIDE.own_rq)
        assert (qp.sq_entries, cq.entries, qp.rq_entries, receive_cq.entries) == (8, 8, 4, 4)
        assert (q["sq_wqe_daddr"], q["sq_dbrec"]) == (qp.sq_address, qp.dbr_address + 4)
        assert (c["cqe_daddr"], c["dbrec"], c["cqe_rsvd"]) == (cq.ring_address, cq.dbr_address, 0)
        assert (r["cqe_daddr"], r["dbrec"]) == (receive_cq.ring_address, receive_cq.dbr_address)
        assert (rq["wqe_daddr"], rq["dbrec"], rq["wqe_num"]) == (qp.rq_address, qp.dbr_address, 4)
        assert qp.sq_address == qp.rq_address + 64
        assert qp.dbr_address == qp.sq_address + 8 * 64
        assert cq.dbr_address == cq.ring_address + 8 * 64
        assert list(+stage.cuda.mapped) == [qp.doorbell_register]
        for ring, entries in ((cq, 8), (receive_cq, 4)):
            cqes = np.frombuffer(peek(stage.gpu, ring.ring_address, 64 * entries), np.uint8).reshape(-1, 64)
            assert (cqes[:, 63] == 0xF1).all()
            assert not cqes[:, :63].any()
            assert peek(stage.gpu, ring.dbr_address, 8) == bytes(8)


def test_a_collapsed_ring_is_made_and_forgotten(stage: Stage):
    with stage.gpu.create_qp(stage.pd, 4, cq_collapsed=True) as queue:
        complete(stage.gpu, queue.cq, 2)
        assert queue.sends.produced(0, 0) == 3
        queue.reset()
        assert queue.sends.produced(0, 0) == 0
        assert peek(stage.gpu, queue.cq.ring_address + 63, 1) == b"\xf1"


# --- what the host reads and writes ----------------------------------------------------------------------------------


def set_index(stage: Stage, queue, **indices: int) -> None:
    """What a kernel has counted."""
    image = queue._place.read()
    for name, value in indices.items():
        (DEV_CQ.at(image, DEV_QP.cq_sq) if name == "cqe_ci" else DEV_QP.at(image))[name] = value
    queue._place.memory.write(image, queue._place.qp)


def test_a_reset_clears_rings_in_the_gpu(stage: Stage):
    with stage.gpu.create_qp(stage.pd, 4, receives=4) as queue:
        poke(stage.gpu, queue.qp.sq_address, b"\x77" * 256)
        poke(stage.gpu, queue.qp.dbr_address, b"\x77" * 8)
        for number in range(6):
            complete(stage.gpu, queue.cq, number)
        set_index(stage, queue, sq_rsvd_index=6, sq_ready_index=6, sq_wqe_pi=6, cqe_ci=5)
        assert queue.indices()["submitted"] == 6
        queue.reset()
        assert peek(stage.gpu, queue.qp.sq_address, 256) == bytes(256)
        assert peek(stage.gpu, queue.qp.dbr_address, 8) == bytes(8)
        assert set(queue.indices().values()) == {0}
        assert queue.cqe_offset() == 6


def test_the_first_error_is_found_in_the_gpu(stage: Stage):
    with stage.gpu.create_qp(stage.pd, 8, receives=4) as queue:
        for number in range(3):
            complete(stage.gpu, queue.cq, number)
        complete(stage.gpu, queue.cq, 3, opcode=REQ_ERR, syndrome=0x13, vendor=0x77)
        set_index(stage, queue, sq_wqe_pi=4, cqe_ci=2)
        stage.card.set_state(queue.qpn, RTS)
        assert queue.last_error() is None
        stage.card.set_state(queue.qpn, ERR)
        error = queue.last_error()
        assert error is not None
        assert (error.index, error.syndrome, error.vendor_syndrome, error.state) == (3, 0x13, 0x77, QpState.ERR)
        queue.qp.reset()


def test_the_watchdog_reads_rings_in_the_gpu(stage: Stage):
    watchdog = stage.gpu.watchdog
    with stage.gpu.create_qp(stage.pd, 4) as queue:
        for number in range(6):
            complete(stage.gpu, queue.cq, number)
        set_index(stage, queue, sq_rsvd_index=8, sq_ready_index=8, sq_wqe_pi=8, cqe_ci=5)
        for _ in range(2):
            watchdog.look()
            time.sleep(0.025)
        watchdog.look()
        (told,) = watchdog.stalls
        assert f"QP {queue.qpn:#x} of card0 makes no progress" in told
        assert "has not completed WQE 6 (reserved 8, ready 8, submitted 8)" in told
        assert "last CQE: REQ with wqe_counter 5 in slot 1" in told


def test_a_resting_queue_costs_the_watchdog_no_look_at_its_ring(stage: Stage, monkeypatch):
    queue = stage.gpu.create_qp(stage.pd, 4)
    set_index(stage, queue, sq_wqe_pi=3, cqe_ci=3)
    monkeypatch.setattr(queue.sends, "cqes", lambda: pytest.fail("the ring was read"))
    stage.gpu.watchdog.look()
    assert stage.gpu.watchdog._seen[id(queue)].indices["sent"] == 3


def test_a_record_in_the_gpu_tells_that_a_queue_was_used(stage: Stage):
    """Also when the card has not counted anything yet."""
    ctx, memory = stage.pd.ctx, stage.gpu.alloc(8192, MemType.GPU)
    umem = ctx.register_umem(memory)
    qp = stage.pd.create_qp(
        sq_wr=4, send_cq=ctx.create_cq(4), external_umem=(umem, 0), external_dbr_umem=(umem, 4096)
    )
    stage.card.set_state(qp.qpn, RTS)
    stage.gpu.export_qp(qp).close()
    memory.write(b"\x01", 4096 + 7)
    with pytest.raises(BadStateError, match="has been used"):
        stage.gpu.export_qp(qp)


def test_an_array_of_queues_in_the_gpu(stage: Stage):
    before = stage.held()
    with stage.gpu.export_qps([stage.gpu.create_qp(stage.pd, 4) for _ in range(3)]) as array:
        for i, queue in enumerate(array):
            image = np.frombuffer(peek(stage.gpu, array.device_address + 296 * i, 296), np.uint8)
            assert DEV_QP.at(image)["sq_wqe_daddr"] == queue.qp.sq_address
    assert stage.held() == before


# --- queues in memory of the user's ----------------------------------------------------------------------------------


def test_a_dmabuf_with_its_memory_has_an_address(stage: Stage):
    ctx, memory = stage.pd.ctx, stage.gpu.alloc(8192, MemType.GPU)
    fd = stage.gpu.dmabuf_fd(memory)
    try:
        umem = ctx.register_dmabuf_umem(fd, 8192, memory=memory)
        nameless = ctx.register_dmabuf_umem(fd, 4096)
        with pytest.raises(InvalidValueError, match="16384 bytes of a dmabuf, whose memory here has 8192 only"):
            ctx.register_dmabuf_umem(fd, 16384, memory=memory)
    finally:
        os.close(fd)
    assert (umem.address, umem.nbytes, umem.lies_in) == (memory.address, 8192, DMABUF)
    assert (nameless.address, nameless.nbytes, nameless.lies_in) == (0, 4096, NAMELESS)
    cq = ctx.create_cq(4)
    qps = [
        stage.pd.create_qp(sq_wr=4, send_cq=cq, external_umem=(place, 0), external_dbr_umem=(place, 2048))
        for place in (umem, nameless)
    ]
    with stage.gpu.export_qp(qps[0]) as queue:
        assert DEV_QP.at(queue._place.read())["sq_wqe_daddr"] == memory.address
    with pytest.raises(InvalidValueError, match=r"lies in a dmabuf .* give memory= to register_dmabuf_umem"):
        stage.gpu.export_qp(qps[1])
    match = "lies in GPU memory, which host threads do not reach"
    with Gpu("host") as host, pytest.raises(InvalidValueError, match=match):
        host.export_qp(qps[0])


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_of_the_user_is_mapped(stage: Stage, pinned):
    memory = stage.gpu.alloc(8192, MemType.CPU_GPU) if pinned else HostMemory(8192)
    umem = stage.pd.ctx.register_umem(memory)
    assert umem.lies_in is HOST
    qp = stage.pd.create_qp(
        sq_wr=4, send_cq=stage.pd.ctx.create_cq(4), external_umem=(umem, 0), external_dbr_umem=(umem, 4096)
    )
    with stage.gpu.export_qp(qp):
        assert stage.cuda.mapped[memory.address] == 1


def test_a_shared_receive_queue_in_the_gpu(stage: Stage):
    """Receives whose messages nobody has taken are free again when the queue goes: the CQ's ring says which."""
    ctx, memory = stage.pd.ctx, stage.gpu.alloc(8192, MemType.GPU)
    umem = ctx.register_umem(memory)
    srq = stage.pd.create_srq(
        4, srq_type=SrqType.CONTIGUOUS, external_umem=(umem, 0), external_dbr_umem=(umem, 4096)
    )
    cqes = ctx.register_umem(completions := stage.gpu.alloc(8192, MemType.GPU))
    completions.write(b"\xf1" * 8192)
    receive_cq = ctx.create_cq(4, external_umem=(cqes, 0), external_dbr_umem=(cqes, 4096))
    qp = stage.pd.create_qp(sq_wr=4, send_cq=ctx.create_cq(4), receive_cq=receive_cq, srq=srq, external_datapath=True)
    before = stage.held()
    queue = stage.gpu.export_qp(qp)
    shared = queue._srq
    assert shared is not None
    assert (shared.read()["wqe_daddr"], shared.read()["dbrec"]) == (srq.ring_address, srq.dbr_address)
    image = shared.read_all()
    DEV_RQ.at(image)["rsvd"] = DEV_RQ.at(image)["ready"] = 3
    shared._memory.write(image)
    for number, slot in enumerate((1, 0)):
        complete(stage.gpu, receive_cq, number, counter=slot, opcode=RESP_SEND, nbytes=8)
    queue.close()
    given_up = stage.gpu._srqs_before[srq][DEV_RQ.size :].view("<i8")
    assert given_up.tolist() == [1, 2, 0, 0]
    assert stage.held() == before


@pytest.mark.parametrize("error", [RuntimeError("a bug"), DeviceFatalError("the device is gone")])
def test_what_no_other_way_helps_against(stage: Stage, log, monkeypatch, error):
    """Only refusals make the next way be tried."""
    def fails(*args) -> int:
        raise type(error)(*error.args)

    before = stage.held()
    monkeypatch.setattr(stage.card, "reg_dmabuf_umem", fails)
    with pytest.raises(type(error), match=error.args[0]):
        stage.gpu.create_qp(stage.pd, 4)
    assert stage.held() == before
    assert lines(log) == []
