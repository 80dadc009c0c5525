"""The CPU proxy: what kernels announce in memory reaches the NIC, by a thread or by hand."""

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunetio import CqOverrun, Gpu, MemType, NicHandler, ProxyService, SendDbrModeExt, device, kernel, verbs
from gpunetio.errors import BadStateError, DriverError, InvalidValueError, NotSupportedError
from gpunetio.formats.device_structs import DEV_QP
from gpunetio.gpu.proxy_loop import PROXY_ROW, forward
from gpunetio.gpu.structure import Place
from gpunetio.jit.launch import observers
from nic_rig import until
from pair import Pair, make_pair
from queue_kernels import puts, puts_in_turn

NBYTES = 64


@pytest.fixture
def proxied(gpu: Gpu) -> Iterator[Pair]:
    """A `Pair` whose first queue has a CPU proxy, by a service."""
    with verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu)
        pair.a.close()
        pair.b.qp.reset()
        pair.a = gpu.create_qp(pair.pd, 16, nic_handler=NicHandler.CPU_PROXY, timeout=10.0)
        pair.a.connect(pair.b)
        yield pair
        pair.a.close()
        pair.b.close()


def start(pair: Pair, queue, count: int, out) -> object:
    keys = (pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey)
    return puts[1, 1, pair.gpu](queue, *keys, NBYTES, count, 1, out)


def record_of(queue) -> int:
    """The send word of its doorbell record."""
    return int.from_bytes(bytes((ctypes.c_uint8 * 4).from_address(queue.qp.dbr_address + 4)), "big")


# --- one queue -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=5),
    st.integers(0, (1 << 24) - 1), st.booleans(), st.booleans(),
)
def test_what_is_forwarded(producers, qpn, early, recorded):
    """Record and register in the words of the PRM: big-endian, the index's 16 bits, the QPN shifted by 8."""
    word, register, record = np.zeros(1, np.int64), np.zeros(8, np.uint8), np.full(4, 0xEE, np.uint8)
    row = np.zeros(1, PROXY_ROW.dtype)
    row["word"], row["register"], row["qpn"] = word.ctypes.data, register.ctypes.data, qpn
    row["early"], row["record"] = early, record.ctypes.data if recorded else 0
    last = 0
    for producer in producers:
        register[:] = 0
        word[0] = producer
        assert bool(forward(int(row.ctypes.data))) == (producer != last)
        if producer != last and (early or recorded):
            assert register.tobytes() == ((producer & 0xFFFF) << 8).to_bytes(4, "big") + (qpn << 8).to_bytes(4, "big")
        else:
            assert not register.any()
        if producer != last and recorded:
            assert record.tobytes() == (producer & 0xFFFF).to_bytes(4, "big")
        last = producer
        assert row["last"][0] == producer
    if not recorded:
        assert (record == 0xEE).all()


def test_a_thread_of_the_handle_does_it_all(proxied: Pair):
    assert proxied.a.nic_handler is NicHandler.CPU_PROXY
    assert proxied.run(puts, NBYTES, 1000, 1)[0] == device.OK
    assert np.array_equal(proxied.there.array[: 1000 * NBYTES], proxied.here.array[: 1000 * NBYTES])
    assert proxied.a.indices()["forwarded"] == proxied.a.indices()["submitted"] == 1000
    assert record_of(proxied.a) == 1000


def test_the_exported_structure_of_a_proxied_queue(proxied: Pair):
    q = DEV_QP.at(proxied.a._place.read())
    assert q["nic_handler"] == NicHandler.CPU_PROXY
    word = proxied.a.forwarding
    assert q["sq_db"] == word.device_address != proxied.a.qp.doorbell_register
    assert word.announced == word.forwarded == 0


def test_without_a_record(proxied: Pair):
    """A NIC that needs no record gets none."""
    mode, handler = SendDbrModeExt.NO_DBR_HW, NicHandler.CPU_PROXY
    with proxied.gpu.create_qp(proxied.pd, 16, send_dbr_mode=mode, nic_handler=handler) as queue:
        queue.connect(queue)
        proxied.a, before = queue, proxied.a
        assert proxied.run(puts, NBYTES, 100, 1)[0] == device.OK
        proxied.a = before
        assert record_of(queue) == 0


@pytest.mark.host_memory
def test_an_emulated_record(proxied: Pair):
    """Kernels ring and leave the record alone: the CPU keeps it."""
    mode = SendDbrModeExt.NO_DBR_SW_EMULATED
    where = "cpu_gpu" if proxied.gpu.target == "cuda" else None  # where the CPU sees the indices
    handler = NicHandler.GPU_SM_DB if where else NicHandler.AUTO
    with proxied.gpu.create_qp(
        proxied.pd, 16, send_dbr_mode=mode, nic_handler=handler, queue_memory=where
    ) as queue:
        assert queue.nic_handler is NicHandler.GPU_SM_NO_DBR
        queue.connect(queue)
        proxied.a, before = queue, proxied.a
        assert proxied.run(puts, NBYTES, 100, 1)[0] == device.OK
        proxied.a = before
        until(lambda: record_of(queue) == queue.indices()["forwarded"] == 100, "the proxy")
        queue.qp.reset()
        queue.reset()
        assert record_of(queue) == queue.indices()["forwarded"] == 0


def test_a_reset_of_a_proxied_queue(proxied: Pair):
    for count in (5, 37, 1, 100):
        assert proxied.run(puts, NBYTES, count, 1)[0] == device.OK
        for end in (proxied.a, proxied.b):
            end.qp.reset()
            end.reset()
        assert set(proxied.a.indices().values()) == {0}
        assert proxied.a.service is not None
        proxied.a.connect(proxied.b)


def test_a_reset_that_fails_leaves_the_queue_in_its_service(proxied: Pair, monkeypatch):
    def fails(*args: object) -> None:
        raise DriverError("no luck")

    queue, service = proxied.a, proxied.a.service
    assert service
    proxied.b.qp.reset()
    queue.qp.reset()
    with monkeypatch.context() as patch:
        patch.setattr(Place, "write", fails)
        with pytest.raises(DriverError, match="no luck"):
            queue.reset()
    assert queue.service is service
    queue.reset()
    proxied.b.reset()
    queue.connect(proxied.b)
    assert proxied.run(puts, NBYTES, 3, 1)[0] == device.OK


def test_by_hand(proxied: Pair):
    """`progress` does what a service does, and says whether there was anything to do."""
    with proxied.gpu.create_qp(
        proxied.pd, 16, nic_handler=NicHandler.CPU_PROXY, proxy_service=False
    ) as queue, proxied.gpu.alloc(64, MemType.CPU_GPU) as out:
        queue.connect(queue)
        assert queue.service is None
        assert not queue.progress()
        out.array[:] = 0xEE
        launch = start(proxied, queue, 20, out)
        progressed = 0
        end = time.monotonic() + 30
        while not launch.done and time.monotonic() < end:  # type: ignore[attr-defined]
            progressed += queue.progress()
        assert launch.wait(1)  # type: ignore[attr-defined]
        assert out.array.view(np.int64)[0] == device.OK
        assert progressed == 20  # each put waits for its completion
        assert not queue.progress()


def test_who_may_call_progress(proxied: Pair):
    with pytest.raises(BadStateError, match=r"a service forwards .*proxy_service=False"):
        proxied.a.progress()
    for call in (proxied.b.progress, lambda: proxied.gpu.own_service().monitor(proxied.b)):
        with pytest.raises(NotSupportedError, match=r"handler GPU_SM_DB, which needs no CPU: export it with CPU_PROXY"):
            call()


# --- services --------------------------------------------------------------------------------------------------------


def test_a_service_of_ones_own(proxied: Pair):
    own = proxied.a.service
    with proxied.gpu.create_service() as service:
        service.monitor(proxied.a)
        service.monitor(proxied.a)
        assert proxied.a.service is service is not own
        assert proxied.run(puts, NBYTES, 50, 1)[0] == device.OK
        service.forget(proxied.a)
        assert proxied.a.service is None
        with pytest.raises(InvalidValueError, match="is not monitored by this service"):
            service.forget(proxied.a)
        with proxied.gpu.alloc(64, MemType.CPU_GPU) as out:
            launch = start(proxied, proxied.a, 3, out)
            until(lambda: proxied.a.forwarding.announced == 51, "the kernel")
            time.sleep(0.02)
            assert proxied.a.indices()["forwarded"] == 50  # nobody does it
            service.monitor(proxied.a)
            assert launch.wait(30)  # type: ignore[attr-defined]
    assert proxied.a.service is None
    assert proxied.gpu.own_service() is own
    for call in (lambda: service.monitor(proxied.a), lambda: service.forget(proxied.a)):
        with pytest.raises(BadStateError, match="closed"):
            call()
    with pytest.raises(BadStateError, match="pickled"):
        pickle.dumps(service)


def test_closing_a_queue_takes_it_from_its_service(proxied: Pair):
    service = proxied.a.service
    assert service is not None
    first, second = (proxied.gpu.create_qp(proxied.pd, 4, nic_handler=NicHandler.CPU_PROXY) for _ in range(2))
    assert len(service._served) == 3
    first.close()
    assert len(service._served) == 2
    assert proxied.run(puts, NBYTES, 20, 1)[0] == device.OK
    second.close()
    assert [each.row_address for each in service._served] == [proxied.a.forwarding.row_address]
    assert service._rows[0] == proxied.a.forwarding.row_address


def test_many_queues_of_an_array(proxied: Pair):
    """Element i is i × 296 bytes behind the first, and one thread forwards for all."""
    qps, count, gpu = [], 24, proxied.gpu
    for _ in range(count):
        cq = proxied.ctx.create_cq(8, overrun=CqOverrun.ENABLE)
        qps.append(proxied.pd.create_qp(sq_wr=8, send_cq=cq, external_datapath=True))
    with gpu.export_qps(qps, NicHandler.CPU_PROXY) as array, gpu.alloc(64, MemType.CPU_GPU) as out:
        for queue in array:
            queue.connect(queue)
        assert [queue.device_address - array.device_address for queue in array] == [296 * i for i in range(count)]
        keys = (proxied.there.address, proxied.there_mr.rkey, proxied.here.address, proxied.here_mr.lkey)
        messages = 10 * count
        assert puts_in_turn[1, 1, gpu](array, array.STRIDE, count, *keys, NBYTES, messages, out).wait(60)
        assert out.array.view(np.int64)[0] == device.OK
        assert np.array_equal(proxied.there.array[: messages * NBYTES], proxied.here.array[: messages * NBYTES])
        assert {queue.indices()["forwarded"] for queue in array} == {10}
    assert not any(qp.closed for qp in qps)


@pytest.mark.host_memory
def test_emulated_records_of_an_array(proxied: Pair):
    """The index that kernels raise is read in each element."""
    mode, count, gpu = SendDbrModeExt.NO_DBR_SW_EMULATED, 4, proxied.gpu
    qps = [
        proxied.pd.create_qp(
            sq_wr=8, send_cq=proxied.ctx.create_cq(8, overrun=CqOverrun.ENABLE), external_datapath=True,
            emulate_no_dbr_ext=True,
        )
        for _ in range(count)
    ]
    where = "cpu_gpu" if gpu.target == "cuda" else None  # where the CPU sees the indices
    handler = NicHandler.GPU_SM_DB if where else NicHandler.AUTO
    with (
        gpu.export_qps(qps, handler, send_dbr_mode=mode, queue_memory=where) as array,
        gpu.alloc(64, MemType.CPU_GPU) as out,
    ):
        for queue in array:
            queue.connect(queue)
        keys = (proxied.there.address, proxied.there_mr.rkey, proxied.here.address, proxied.here_mr.lkey)
        assert puts_in_turn[1, 1, gpu](array, array.STRIDE, count, *keys, NBYTES, 5 * count, out).wait(60)
        assert out.array.view(np.int64)[0] == device.OK
        until(lambda: [record_of(queue) for queue in array] == [5] * count, "the proxy")
        if not where:  # else the kernel rings, and the proxy writes only the records
            assert {queue.indices()["forwarded"] for queue in array} == {5}


def on_cpu(thread_id: int) -> int:
    """Nanoseconds that a thread has been on a core."""
    with open(f"/proc/self/task/{thread_id}/schedstat") as file:
        return int(file.read().split()[0])


def test_a_service_that_has_nothing_to_do_sleeps(proxied: Pair):
    service = proxied.a.service
    assert service is not None
    assert proxied.run(puts, NBYTES, 20, 1)[0] == device.OK
    thread_id = service._thread.native_id
    assert thread_id is not None
    time.sleep(0.05)
    before = on_cpu(thread_id)
    time.sleep(0.3)
    assert on_cpu(thread_id) - before < 100e6
    assert proxied.run(puts, NBYTES, 20, 1)[0] == device.OK


def naps_of(thread_id: int) -> int:
    """How often a thread has gone to sleep (proc_pid_status(5))."""
    status = Path(f"/proc/self/task/{thread_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_service_stays_awake_for_a_while_after_a_doorbell(proxied: Pair):
    service = proxied.a.service
    assert service is not None
    service._proxy["spin_ns"] = 60_000_000_000
    assert proxied.run(puts, NBYTES, 20, 1)[0] == device.OK
    thread_id = service._thread.native_id
    assert thread_id is not None
    before = naps_of(thread_id)
    time.sleep(0.3)
    assert naps_of(thread_id) - before < 10, "asleep, it looks every millisecond"


def test_a_service_leaves_nothing_behind():
    threads, told, fds = threading.active_count(), len(observers), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with ProxyService() as service:
            assert service.running
        service.close()
        assert service.closed
    assert (threading.active_count(), len(observers), len(os.listdir("/proc/self/fd"))) == (threads, told, fds)


@kernel
def announce_and_end(qp, raddr, rkey, laddr, lkey, out):
    """A kernel that does not wait for what it has posted."""
    index = device.reserve(qp, 1, device.EXCLUSIVE)
    device.prepare_write(qp, index, raddr, rkey, laddr, lkey, 8)
    device.mark_ready(qp, index, index, device.EXCLUSIVE)
    device.fence_release_sys()
    device.st_relaxed64(device.ld64(qp + DEV_QP.sq_db), index + 1)
    device.st64(out, index)


def test_what_is_announced_before_a_service_begins_is_not_lost(proxied: Pair):
    service = proxied.a.service
    assert service is not None
    service.forget(proxied.a)
    assert proxied.run(announce_and_end)[0] == 0
    service.monitor(proxied.a)
    until(lambda: np.array_equal(proxied.there.array[:8], proxied.here.array[:8]), "the message")
    assert proxied.a.indices()["submitted"] == 1  # though kernels leave the index alone
