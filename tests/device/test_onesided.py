"""One-sided operations from kernels, on host threads and on a GPU: bytes, tickets, statuses and deadlines."""

import logging
import time

import numpy as np
import pytest

from gpunetio import Gpu, MemType, SharingMode, device, kernel, verbs
from gpunetio.formats.cqe import Syndrome
from gpunetio.formats.device_structs import DEV_QP
from pair import NBYTES, Pair, make_pair


@kernel
def put_each(qp, raddr, rkey, laddr, lkey, nbytes, rounds, sharing, out):
    """Every thread puts its own pieces, one after another, and waits for each."""
    me = device.global_id()
    threads = device.grid_dim() * device.block_dim()
    status = 0
    for i in range(rounds):
        at = (i * threads + me) * nbytes
        status = device.wait(qp, device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, sharing), sharing)
        if status != 0:
            break
    device.st64(out + 8 * me, status)


@kernel
def put_burst(qp, raddr, rkey, laddr, lkey, nbytes, rounds, sharing, out):
    """Every thread puts all its pieces and waits for the last."""
    me = device.global_id()
    threads = device.grid_dim() * device.block_dim()
    ticket = 0
    for i in range(rounds):
        at = (i * threads + me) * nbytes
        ticket = device.put(qp, raddr + at, rkey, laddr + at, lkey, nbytes, sharing)
        if ticket < 0:
            break
    device.st64(out + 8 * me, device.wait(qp, ticket, sharing))


@pytest.mark.parametrize("body", [put_each, put_burst])
@pytest.mark.parametrize(
    ("sharing", "grid", "block"),
    [(SharingMode.EXCLUSIVE, 1, 1), (SharingMode.CTA, 1, 4), (SharingMode.GPU, 2, 2), (SharingMode.GPU, 1, 1)],
)
def test_put_moves_the_bytes_in_every_sharing_mode(pair: Pair, body, sharing, grid, block):
    rounds, nbytes = 50, 100
    statuses = pair.run(body, nbytes, rounds, int(sharing), grid=grid, block=block)
    total = rounds * nbytes * grid * block
    assert not statuses.any()
    assert np.array_equal(pair.there.array[:total], pair.here.array[:total])
    assert not pair.there.array[total:].any()
    done = grid * block * rounds
    assert pair.a.indices() == {"reserved": done, "ready": done, "submitted": done, "completed": done}


@kernel
def put_one(qp, raddr, rkey, laddr, lkey, nbytes, out):
    device.st64(out, device.wait(qp, device.put(qp, raddr, rkey, laddr, lkey, nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, NBYTES])
def test_put_of_any_size(pair: Pair, nbytes):
    assert pair.run(put_one, nbytes)[0] == device.OK
    assert np.array_equal(pair.there.array[:nbytes], pair.here.array[:nbytes])
    assert not pair.there.array[nbytes:].any()


def test_put_of_a_negative_size_is_refused_and_posts_nothing(pair: Pair):
    assert pair.run(put_one, -1)[0] == device.EINVAL
    assert pair.a.indices()["reserved"] == 0


@kernel
def get_one(qp, raddr, rkey, laddr, lkey, nbytes, out):
    device.st64(out, device.wait(qp, device.get(qp, raddr, rkey, laddr, lkey, nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 64, 5000, NBYTES])
def test_get_reads_the_bytes(pair: Pair, nbytes):
    pair.there.array[:] = 0x5A
    before = pair.here.array.copy()
    assert pair.run(get_one, nbytes)[0] == device.OK
    assert (pair.here.array[:nbytes] == 0x5A).all()
    assert np.array_equal(pair.here.array[nbytes:], before[nbytes:])


@pytest.mark.slow
@pytest.mark.parametrize("body", [put_one, get_one])
def test_more_than_a_gibibyte_takes_two_wqes(pair: Pair, body):
    nbytes = (1 << 30) + 5
    with pair.gpu.alloc(nbytes, MemType.CPU_GPU) as source, pair.gpu.alloc(nbytes, MemType.CPU_GPU) as target:
        source.array[-7:] = range(7)
        here, there = (source, target) if body is put_one else (target, source)
        here_mr, there_mr = pair.pd.register(here), pair.pd.register(there)
        with pair.gpu.alloc(8, MemType.CPU_GPU) as out:
            args = (pair.a, there.address, there_mr.rkey, here.address, here_mr.lkey, nbytes, out)
            assert body[1, 1, pair.gpu](*args).wait(60)
            assert out.array.view(np.int64)[0] == device.OK
        assert pair.a.indices()["reserved"] == 2
        assert target.array[-7:].tolist() == list(range(7))
        here_mr.close()
        there_mr.close()


@kernel
def write_value(qp, raddr, rkey, laddr, lkey, value, nbytes, out):
    device.st64(out, device.wait(qp, device.p(qp, raddr, rkey, value, nbytes)))


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 7, 8])
def test_p_writes_a_value_inline(pair: Pair, nbytes):
    assert pair.run(write_value, 0x0807060504030201, nbytes)[0] == device.OK
    assert pair.there.array[:9].tolist() == [*range(1, nbytes + 1), *[0] * (9 - nbytes)]


@pytest.mark.parametrize("nbytes", [0, 9])
def test_p_refuses_other_sizes(pair: Pair, nbytes):
    assert pair.run(write_value, 1, nbytes)[0] == device.EINVAL


@kernel
def signal_many(qp, raddr, rkey, laddr, lkey, rounds, out):
    me = device.global_id()
    status = 0
    for _ in range(rounds):
        status = device.wait(qp, device.signal(qp, raddr, rkey, laddr + 8 * me, lkey, 3))
    device.st64(out + 8 * me, status)


def test_signal_adds_and_returns_the_old_value(pair: Pair):
    assert not pair.run(signal_many, 25, grid=2, block=2).any()
    assert pair.there.array[:8].view(np.int64)[0] == 3 * 100
    old = pair.here.array[:32].view(np.int64)
    assert old.max() == 3 * 99
    assert not (old % 3).any()


@kernel
def signal_at(qp, raddr, rkey, laddr, lkey, address, key, out):
    device.st64(out, device.wait(qp, device.signal(qp, address, key, laddr, lkey, 1)))


@pytest.mark.soft_nic
def test_an_atomic_needs_an_aligned_word_in_memory_too(pair: Pair, caplog):
    """A shifted region can make an address of the wire aligned whose bytes are not."""
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    shifted = pair.pd.register(pair.there, iova=4)
    assert pair.run(signal_at, 8, shifted.rkey)[0] == device.EIO
    error = pair.a.last_error()
    assert error is not None
    assert error.syndrome == Syndrome.REMOTE_INVAL_REQ
    assert not pair.there.array.any()


@kernel
def put_then_signal(qp, raddr, rkey, laddr, lkey, nbytes, out):
    ticket = device.put_signal(qp, raddr, rkey, laddr, lkey, nbytes, raddr + 4096, rkey, laddr + 8192, lkey, 1)
    device.st64(out, device.wait(qp, ticket))


def test_put_signal_writes_then_adds(pair: Pair):
    assert pair.run(put_then_signal, 4000)[0] == device.OK
    assert np.array_equal(pair.there.array[:4000], pair.here.array[:4000])
    assert pair.there.array[4096:4104].view(np.int64)[0] == 1


@kernel
def wait_for_all(qp, raddr, rkey, laddr, lkey, out):
    for i in range(10):
        device.put(qp, raddr + 8 * i, rkey, laddr + 8 * i, lkey, 8)
    device.st64(out, device.wait_all(qp))


def test_wait_all_waits_for_everything_reserved(pair: Pair):
    assert pair.run(wait_for_all)[0] == device.OK
    assert np.array_equal(pair.there.array[:80], pair.here.array[:80])


@kernel
def low_level(qp, raddr, rkey, laddr, lkey, out):
    """Six kinds of WQE, filled by hand, marked ready and submitted together."""
    first = device.reserve(qp, 6)
    device.prepare_nop(qp, first)
    device.prepare_write2(qp, first + 1, raddr, rkey, laddr, lkey, 10, laddr + 100, lkey, 20)
    device.prepare_write_inline(qp, first + 2, raddr + 30, rkey, laddr + 200, 28)
    device.prepare_atomic(qp, first + 3, device.ATOMIC_CS, raddr + 4096, rkey, laddr + 4096, lkey, 0, 42)
    device.prepare_read(qp, first + 4, raddr, rkey, laddr + 8192, lkey, 58)
    device.prepare_write(qp, first + 5, raddr + 64, rkey, laddr + 64, lkey, 64)
    device.mark_ready(qp, first, first + 5)
    device.submit(qp, first + 6)
    device.st64(out, device.poll_at(qp, first + 5))


def test_low_level_builders(pair: Pair):
    here = pair.here.array.copy()
    assert pair.run(low_level)[0] == device.OK
    expected = np.concatenate([here[:10], here[100:120], here[200:228]])
    assert np.array_equal(pair.there.array[:58], expected)
    assert np.array_equal(pair.here.array[8192 : 8192 + 58], expected)
    assert pair.there.array[4096:4104].view(np.int64)[0] == 42
    assert pair.here.array[4096:4104].view(np.int64)[0] == 0
    assert np.array_equal(pair.there.array[64:128], here[64:128])


@kernel
def inline_too_long(qp, raddr, rkey, laddr, lkey, out):
    device.st64(out, device.prepare_write_inline(qp, 0, raddr, rkey, laddr, 29))


def test_inline_write_is_limited_to_28_bytes(pair: Pair):
    assert pair.run(inline_too_long)[0] == device.EINVAL


@kernel
def poll_without_waiting(qp, raddr, rkey, laddr, lkey, out):
    device.st64(out, device.poll_one(qp, 0))
    device.put(qp, raddr, rkey, laddr, lkey, 8)
    device.poll_at(qp, 0)
    device.st64(out + 8, device.poll_one(qp, 0))
    device.st64(out + 16, device.poll_one(qp, 1))
    device.st64(out + 24, device.poll_one(qp, 1000))


def test_poll_one_tells_busy_from_done(pair: Pair):
    with pair.gpu.alloc(64) as out:
        launch = poll_without_waiting[1, 1, pair.gpu](
            pair.a, pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey, out
        )
        assert launch.wait(20)
        statuses = out.read().view(np.int64)[:4].tolist()
    assert statuses == [device.EBUSY, device.OK, device.EBUSY, device.EBUSY]


def test_an_error_completion_is_returned_with_its_syndrome(pair: Pair, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    pair.there_mr.close()
    assert pair.run(put_burst, 8, 5, int(SharingMode.GPU))[0] == device.EIO
    error = pair.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome) == (0, Syndrome.REMOTE_ACCESS)
    assert "REMOTE_ACCESS" in str(error)
    assert not pair.there.array.any()
    assert pair.a.qp.state.name == "ERR"


@kernel
def read_fields(qp, raddr, rkey, laddr, lkey, out):
    queue, cq = device.qp_at(qp), device.cq_at(qp + DEV_QP.cq_sq)
    device.st64(out, queue.sq_num)
    device.st64(out + 8, queue.sq_wqe_num)
    device.st64(out + 16, cq.cq_num)
    device.st64(out + 24, cq.cqe_mask)


def test_a_kernel_reads_the_queues_by_field_name(pair: Pair):
    with pair.gpu.alloc(64) as out:
        assert read_fields[1, 1, pair.gpu](pair.a, 0, 0, 0, 0, out).wait(20)
        fields = out.read().view(np.int64)[:4].tolist()
    assert fields == [pair.a.qpn, 64, pair.a.cq.cqn, 63]


@kernel
def reserve_too_many(qp, raddr, rkey, laddr, lkey, count, out):
    device.st64(out, device.reserve(qp, count))


@pytest.mark.parametrize("count", [0, -1, 65, 1 << 40])
def test_reserve_refuses_what_the_ring_cannot_hold(pair: Pair, count):
    assert pair.run(reserve_too_many, count)[0] == device.EINVAL
    assert pair.a.indices()["reserved"] == 0


@pytest.fixture
def impatient(gpu: Gpu):
    """A pair whose device waits end after a second."""
    with verbs.open("soft0") as ctx:
        opened = make_pair(ctx, gpu, depth=16, timeout=1.0)
        yield opened
        opened.a.close()
        opened.b.close()


@pytest.mark.parametrize("sharing", list(SharingMode))
def test_a_stalled_engine_ends_waits_by_their_deadline(impatient: Pair, sharing, caplog):
    """The engine stands still in the middle of a transfer: the kernel ends, and the watchdog says where it stood."""
    nic, watchdog = impatient.nic, impatient.gpu.watchdog
    watchdog.patience = 0.1
    nic.record["budget"] = 1
    nic.pause(after=7)
    with caplog.at_level(logging.WARNING, "gpunetio.watchdog"):
        started = time.monotonic()
        status = impatient.run(put_burst, 64, 40, int(sharing))[0]
        assert time.monotonic() - started < 10
        assert status == device.ETIMEDOUT
        end = time.monotonic() + 10
        while not watchdog.stalls and time.monotonic() < end:
            watchdog.look()
            time.sleep(0.05)
    assert len(watchdog.stalls) == 1
    assert f"QP {impatient.a.qpn:#x} of soft0" in watchdog.stalls[0]
    assert "last CQE" in watchdog.stalls[0]
    assert watchdog.stalls[0] in caplog.text
    assert np.array_equal(impatient.there.array[: 7 * 64], impatient.here.array[: 7 * 64])
    assert not impatient.there.array[8 * 64 :].any()
    nic.resume()
    # Nothing is lost: what was posted completes, and the queue goes on.
    assert impatient.run(wait_for_all)[0] == device.OK


def test_a_timed_out_reservation_of_a_shared_queue_never_hangs_the_others(impatient: Pair, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio.watchdog")
    impatient.nic.pause()
    statuses = impatient.run(put_burst, 64, 40, int(SharingMode.GPU), grid=1, block=4)
    assert set(statuses.tolist()) <= {device.ETIMEDOUT, device.ENOTRECOVERABLE}
    impatient.nic.resume()


@kernel
def slow(qp, raddr, rkey, laddr, lkey, nanoseconds, out):
    start = device.clock_ns()
    while device.clock_ns() - start < nanoseconds:
        device.yield_thread()
    device.st64(out, device.wait(qp, device.put(qp, raddr, rkey, laddr, lkey, 8)))


def test_closing_what_a_kernel_uses_waits_for_the_kernel(pair: Pair):
    out = pair.gpu.alloc(8, MemType.CPU_GPU)
    view = out.array.view(np.int64)
    view[:] = -1
    args = (pair.a, pair.there.address, pair.there_mr.rkey, pair.here.address, pair.here_mr.lkey, 1_000_000_000, out)
    launch = slow[1, 1, pair.gpu](*args)
    assert not launch.done
    pair.a.close()
    assert launch.done
    assert view[0] == device.OK
    assert np.array_equal(pair.there.array[:8], pair.here.array[:8])


@kernel
def send_one(qp, raddr, rkey, laddr, lkey, nbytes, out):
    index = device.reserve(qp, 1)
    device.prepare_send(qp, index, laddr, lkey, nbytes)
    device.st64(out, device.wait(qp, device.post(qp, index, index)))


def test_send_without_a_receive_reports_rnr(pair: Pair, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    assert pair.run(send_one, 8)[0] == device.EIO
    error = pair.a.last_error()
    assert error is not None
    assert error.syndrome == Syndrome.RNR_RETRY_EXC
