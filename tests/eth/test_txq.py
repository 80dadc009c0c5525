"""Send queues for kernels, as the host sees them: what the device is asked for, and what kernels are given."""

import ctypes
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpunetio import Gpu, eth, verbs
from gpunetio.enums import NicHandler
from gpunetio.errors import BadStateError, InvalidValueError, NotSupportedError
from gpunetio.formats.cqe import CQE64, CqeOpcode
from gpunetio.formats.device_structs import DEV_CQ, DEV_QP, DEV_SIDE
from gpunetio.formats.eth_device import DEV_ETH_TXQ
from gpunetio.formats.ethernet_queues import QueueState
from gpunetio.formats.wqe import CTRL_SEG, WQEBB
from usage import allocations


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu("host") as gpu:
        yield gpu


@pytest.fixture
def able(monkeypatch) -> eth.EthCaps:
    """A device that announces every offload."""
    with verbs.open("soft1") as ctx:
        caps = dataclasses.replace(eth.query_caps(ctx), checksum=True, wait_on_time=eth.WaitOnTime.NATIVE)
    monkeypatch.setattr("gpunetio.eth.sq.query_caps", lambda ctx: caps)
    return caps


def at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def parts(txq: eth.EthTxq) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What kernels find: the queue as a queue pair, its own part, its CQ, the side structure."""
    image = at(txq.device_address, DEV_ETH_TXQ.size)
    side = at(int(DEV_QP.at(image)["side"]), DEV_SIDE.size)
    return DEV_QP.at(image), DEV_ETH_TXQ.at(image), DEV_CQ.at(image, DEV_QP.cq_sq), DEV_SIDE.at(side)


@pytest.mark.parametrize("depth, blocks", [(1, 64), (64, 64), (100, 128), (8192, 8192), (32768, 32768)])
def test_the_structure_says_what_was_created(pd, gpu, depth, blocks):
    with eth.EthTxq(gpu, pd, depth, timeout=2.5) as txq:
        q, t, c, side = parts(txq)
        assert (txq.depth, txq.state, q["sq_wqe_num"], q["sq_wqe_mask"]) == (blocks, QueueState.RDY, blocks, blocks - 1)
        assert (q["sq_num"], q["sq_num_shift8"], q["nic_handler"]) == (txq.sqn, txq.sqn << 8, NicHandler.GPU_SM_DB)
        assert (q["sq_wqe_daddr"], q["sq_dbrec"], q["sq_db"]) == (
            txq.sq_address, txq.dbr_address + 4, txq.doorbell_register
        )
        assert (t["signal_mask"], t["cs_flags"], t["wait_mask"]) == (blocks // 4 - 1, 0, 0)
        assert t["max_lso"] == txq.caps.max_lso > 65535
        assert (c["cqe_daddr"], c["cqe_num"], c["cqe_mask"]) == (txq.cq.ring_address, blocks, blocks - 1)
        assert side["timeout_ns"] == 2_500_000_000
        assert txq.indices() == {"reserved": 0, "submitted": 0, "completed": 0, "notified": 0}
        assert txq.last_error() is None
        side["err_index"], side["err_syndrome"], side["err_vendor"] = 9, 4, 0
        assert "9 failed: LOCAL_PROT (syndrome 0x04" in str(txq.last_error())


@pytest.mark.parametrize("depth, options, error, words", [
    (0, {}, InvalidValueError, "depth = 0"),
    ((1 << 15) + 1, {}, NotSupportedError, "32768 basic blocks at most"),
    (64, {"nic_handler": NicHandler.GPU_SM_BF}, InvalidValueError, "AUTO, GPU_SM_DB, CPU_PROXY"),
    (64, {"nic_handler": 77}, InvalidValueError, "nic_handler = 77"),
    (64, {"timeout": 0}, InvalidValueError, "timeout = 0"),
    (64, {"timeout": float("nan")}, InvalidValueError, "timeout = nan"),
    (64, {"queue_memory": "moon"}, InvalidValueError, "queue_memory = 'moon'"),
])
def test_what_cannot_be_created(ctx, pd, gpu, depth, options, error, words):
    before = [one for one in ctx.users if "TRANSPORT_DOMAIN" not in str(one)]
    with pytest.raises(error, match=words):
        eth.EthTxq(gpu, pd, depth, **options)
    assert [one for one in ctx.users if one in before] == before
    assert not allocations(gpu)


@pytest.mark.parametrize("option, words", [("checksum", "computes no checksums"), ("wait_on_time", "mode NONE")])
def test_what_the_device_does_not_announce(pd, gpu, monkeypatch, option, words):
    none = dataclasses.replace(eth.query_caps(pd.ctx), checksum=False, wait_on_time=eth.WaitOnTime.NONE)
    monkeypatch.setattr("gpunetio.eth.sq.query_caps", lambda ctx: none)
    with pytest.raises(NotSupportedError, match=words):
        eth.EthTxq(gpu, pd, **{option: True})


def test_offloads(able, pd, gpu):
    with eth.EthTxq(gpu, pd, checksum=True, wait_on_time=True) as txq:
        assert parts(txq)[1]["cs_flags"] == 0xC0
        # 8 s of a clock, rounded up to whole bits.
        assert int(parts(txq)[1]["wait_mask"]) + 1 >= 8000 * able.clock_khz


def test_times_in_cycles(able, ctx, pd, gpu):
    with eth.EthTxq(gpu, pd, wait_on_time=True) as txq:
        txq.caps = dataclasses.replace(able, real_time_send=False)
        clock = ctx.query_clock()
        due = time.time_ns() + 1_000_000_000
        assert abs(clock.ns(txq.calculate_timestamp(due)) - due) < 10_000_000
        for wrong in (-1, 1 << 63, 0.5):
            with pytest.raises(InvalidValueError, match="utc_ns"):
                txq.calculate_timestamp(wrong)  # type: ignore[arg-type]
    with eth.EthTxq(gpu, pd) as txq, pytest.raises(BadStateError, match="wait_on_time=True"):
        txq.calculate_timestamp(due)


def test_times_in_seconds_and_nanoseconds(able, pd, gpu, monkeypatch):
    with eth.EthTxq(gpu, pd, wait_on_time=True) as txq:
        txq.caps = dataclasses.replace(able, real_time_send=True)
        assert txq.calculate_timestamp(1_700_000_000_123_456_789) == 1_700_000_000 << 32 | 123_456_789


@pytest.mark.parametrize("service", [True, False])
def test_the_cpu_proxy_rings(pd, gpu, service):
    with eth.EthTxq(gpu, pd, 64, nic_handler=NicHandler.CPU_PROXY, proxy_service=service) as txq:
        q = parts(txq)[0]
        word, record = at(int(q["sq_db"]), 8).view("<i8"), at(txq.dbr_address, 8).view(">u4")
        word[0] = 5
        if service:
            with pytest.raises(BadStateError, match="a service forwards"):
                txq.progress()
            deadline = time.monotonic() + 20
            while record[1] != 5 and time.monotonic() < deadline:
                time.sleep(1e-3)
        else:
            assert (txq.progress(), txq.progress()) == (True, False)
        assert record[1] == 5
    with eth.EthTxq(gpu, pd, 64) as txq, pytest.raises(NotSupportedError, match="needs no CPU"):
        txq.progress()


# --- completions on the CPU -------------------------------------------------------------------------------------------


def build(txq: eth.EthTxq, index: int, notify: bool) -> None:
    """Write a WQE's control segment, as kernels do."""
    wqe = at(txq.sq_address + (index % txq.depth) * WQEBB, CTRL_SEG.size)
    wqe[CTRL_SEG.imm] = notify


def complete(txq: eth.EthTxq, number: int, index: int, opcode: int = CqeOpcode.REQ, syndrome: int = 0) -> None:
    """Write CQE `number`, as the NIC does."""
    cqe = at(txq.cq.ring_address + (number % txq.cq.entries) * 64, 64)
    row = CQE64.at(cqe)
    row["timestamp"], row["wqe_counter"] = syndrome or 1000 + index, index & 0xFFFF
    row["op_own"] = opcode << 4 | number // txq.cq.entries & 1


def test_the_cpu_takes_completions_and_frees_slots(pd, gpu):
    with eth.EthTxq(gpu, pd, 64, completion_on_gpu=False) as txq:
        t, c = parts(txq)[1:3]
        assert at(int(c["cqe_daddr"]), 64)[63] == 0xF1  # nothing ever arrives where kernels look
        assert txq.events() == []
        assert txq.wait_events(0.01) == []
        for number in range(200):
            index = 16 * number + 15
            build(txq, index, notify=number % 3 == 0)
            complete(txq, number, index)
            events = [(index & 0xFFFF, 1000 + index, None)] if number % 3 == 0 else []
            assert txq.events() == events
            assert t["completed"] == index + 1
        complete(txq, 200, 3207, CqeOpcode.REQ_ERR, syndrome=4)
        (failed,) = txq.wait_events(10)
        assert (failed.position, failed.timestamp) == (3207, None)
        assert "LOCAL_PROT" in str(failed.error)
        assert t["completed"] == 3200
    with eth.EthTxq(gpu, pd, 64) as txq, pytest.raises(BadStateError, match="completion_on_gpu=False"):
        txq.events()


# --- life ------------------------------------------------------------------------------------------------------------


def test_closing_leaves_nothing(ctx, gpu):
    pd = ctx.create_pd()
    eth.EthTxq(gpu, pd, 64).close()
    before = len(ctx.users), len(ctx.provider.devx_objects())
    for handler in (NicHandler.AUTO, NicHandler.CPU_PROXY):
        with eth.EthTxq(gpu, pd, 64, nic_handler=handler) as txq:
            pass
        for use in (lambda q=txq: q.device_address, txq.indices, txq.check_launch, txq.events, txq.progress):
            with pytest.raises(BadStateError, match="closed"):
                use()
    assert (len(ctx.users), len(ctx.provider.devx_objects())) == before
    assert not allocations(gpu)
    assert not pd.users


@pytest.mark.parametrize("owner", ["gpu", "pd", "ctx"])
def test_owners_close_their_queues(owner):
    ctx, gpu = verbs.open("soft0"), Gpu("host")
    pd = ctx.create_pd()
    txq = eth.EthTxq(gpu, pd, nic_handler=NicHandler.CPU_PROXY)
    {"gpu": gpu, "pd": pd, "ctx": ctx}[owner].close()
    assert txq.closed
    gpu.close()
    ctx.close()


