"""The watchdog says who owes what, and `last_error` what has failed."""

import logging
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gpunetio import Gpu, MemType, NicHandler, QpError, QpState, device, verbs
from gpunetio.enums import CqOverrun
from gpunetio.formats.cqe import Syndrome
from gpunetio.gpu import watchdog as watchdog_module
from gpunetio.gpu.completions import FailedWqe
from gpunetio.gpu.watchdog import Watchdog
from gpunetio.nic.state.reasons import Reason
from nic_rig import until
from pair import Pair, make_pair
from queue_kernels import puts, receive

PROXY = NicHandler.CPU_PROXY


@pytest.fixture
def quick(gpu: Gpu, caplog):
    """A pair whose device waits end soon, and a watchdog that looks when it is told."""
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    caplog.set_level(logging.INFO, "gpunetio.watchdog")
    gpu.watchdog.close()
    gpu.watchdog.patience = 0.02
    with verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu, 16, timeout=1.0)
        yield pair
        pair.nic.resume()
        pair.a.close()
        pair.b.close()


def replace(pair: Pair, **options) -> None:
    pair.a.close()
    pair.b.qp.reset()
    pair.b.reset()
    pair.a = pair.gpu.create_qp(pair.pd, 16, timeout=1.0, **options)
    pair.a.connect(pair.b)


def stalls(pair: Pair) -> list[str]:
    """What the watchdog tells of a queue that stands still."""
    watchdog = pair.gpu.watchdog
    watchdog.stalls.clear()
    for _ in range(2):
        watchdog.look()
        time.sleep(0.025)
    watchdog.look()
    return list(watchdog.stalls)


def test_a_queue_that_moves_or_rests_is_no_stall(quick: Pair):
    assert stalls(quick) == []
    assert quick.run(puts, 8, 20, 1)[0] == device.OK
    assert stalls(quick) == []
    assert quick.run(puts, 8, 5, 0)[0] == device.OK  # complete, but no kernel has looked
    until(lambda: int(quick.nic.cqs[quick.a.cq.cqn]["pi"]) == 25, "the NIC")
    assert stalls(quick) == []


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("resets", [0, 1, 2])
def test_what_the_nic_owes(quick: Pair, collapsed, resets):
    replace(quick, cq_collapsed=collapsed)
    for done in (3, 16)[:resets]:
        assert quick.run(puts, 8, done, 0)[0] == device.OK
        until(lambda done=done: int(quick.nic.qps[quick.a.qpn]["sq_ci"]) == done, "the NIC")
        for end in (quick.a, quick.b):
            end.qp.reset()
            end.reset()
        quick.a.connect(quick.b)
    quick.nic.pause()
    assert quick.run(puts, 8, 7, 0)[0] == device.OK
    (told,) = stalls(quick)
    assert f"QP {quick.a.qpn:#x} of soft0 makes no progress" in told
    assert "the NIC has not completed WQE 0 (reserved 7, ready 7, submitted 7); last CQE: none yet" in told
    assert told.endswith("the QP is in RTS")
    quick.nic.resume()
    until(lambda: int(quick.nic.qps[quick.a.qpn]["sq_ci"]) == 7, "the NIC")
    assert stalls(quick) == []


@pytest.mark.parametrize("took, pause", [(0.0, 0.005), (0.01, 0.2), (1.0, 0.5)])
def test_how_often_it_looks_while_a_kernel_may_lose_rings(took, pause, monkeypatch):
    """Every 5 ms, but for at most a twentieth of the time, and never less often than without."""
    exported = SimpleNamespace(timeout=30.0, may_lose_rings=True)
    watchdog = Watchdog(lambda: [exported])  # type: ignore[list-item]
    watchdog.close()
    watchdog._took = took
    monkeypatch.setattr(watchdog_module, "running", lambda: 0)
    assert watchdog._pause() == 0.5
    monkeypatch.setattr(watchdog_module, "running", lambda: 1)
    assert watchdog._pause() == pytest.approx(pause)
    exported.may_lose_rings = False
    assert watchdog._pause() == 0.5


def test_what_the_last_completion_was(quick: Pair):
    assert quick.run(puts, 8, 21, 1)[0] == device.OK
    quick.nic.pause()
    assert quick.run(puts, 8, 1, 1)[0] == device.ETIMEDOUT
    (told,) = stalls(quick)
    assert "the NIC has not completed WQE 21" in told
    assert "last CQE: REQ with wqe_counter 20 in slot 4" in told


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_batch_of_which_some_are_complete(quick: Pair, collapsed):
    """A kernel that waits for the last of them counts none as complete."""
    replace(quick, cq_collapsed=collapsed)
    quick.nic.pause(after=3)
    assert quick.run(puts, 8, 7, 0)[0] == device.OK
    until(lambda: int(quick.nic.qps[quick.a.qpn]["sq_ci"]) == 3, "the NIC")
    (told,) = stalls(quick)
    assert "the NIC has not completed WQE 3 (reserved 7, ready 7, submitted 7)" in told
    assert "last CQE: REQ with wqe_counter 2" in told


def test_a_ring_that_has_gone_round_is_complete(quick: Pair):
    """Nobody looks, and each completion that was owed is overwritten."""
    for _ in range(5):
        assert quick.run(puts, 8, 9, 0)[0] == device.OK
        until(lambda: int(quick.nic.cqs[quick.a.cq.cqn]["pi"]) == quick.a.indices()["submitted"], "the NIC")
        assert stalls(quick) == []


def test_a_collapsed_ring_may_have_fewer_entries_than_the_queue(quick: Pair):
    cq = quick.ctx.create_cq(2, collapsed=True, overrun=CqOverrun.ENABLE, external_datapath=True)
    own, qp = quick.a, quick.pd.create_qp(sq_wr=16, send_cq=cq, external_datapath=True)
    with quick.gpu.export_qp(qp, timeout=1.0) as quick.a:
        quick.a.connect(quick.a)
        assert quick.run(puts, 8, 10, 0)[0] == device.OK
        until(lambda: int(quick.nic.cqs[cq.cqn]["pi"]) == 10, "the NIC")
        assert stalls(quick) == []
    quick.a = own


def test_a_queue_with_a_short_timeout_is_told_before_that(gpu: Gpu, caplog):
    caplog.set_level(logging.CRITICAL, "gpunetio.nic")
    with verbs.open("soft0") as ctx:
        pair = make_pair(ctx, gpu, 16, timeout=1.0)
        pair.nic.pause()
        assert pair.run(puts, 8, 1, 1)[0] == device.ETIMEDOUT
        until(lambda: gpu.watchdog.stalls, "the watchdog")
        (told,) = gpu.watchdog.stalls
        seconds = re.search(r"makes no progress for ([0-9.]+) s: the NIC has not completed WQE 0", told)
        assert seconds
        assert 0.8 <= float(seconds[1]) < 4
        pair.nic.resume()


def test_what_the_proxy_owes(quick: Pair):
    replace(quick, nic_handler=PROXY, proxy_service=False)
    assert quick.run(puts, 8, 2, 1)[0] == device.ETIMEDOUT
    (told,) = stalls(quick)
    assert "the proxy has not forwarded WQE 0 (forwarded 0, no service forwards it: call ExportedQp.progress())" in told
    assert "submitted 1" in told
    assert quick.a.progress()
    until(lambda: int(quick.nic.qps[quick.a.qpn]["sq_ci"]) == 1, "the NIC")
    assert stalls(quick) == []


def test_what_the_nic_owes_behind_the_proxy(quick: Pair):
    replace(quick, nic_handler=PROXY)
    quick.nic.pause()
    assert quick.run(puts, 8, 2, 1)[0] == device.ETIMEDOUT
    (told,) = stalls(quick)
    assert "the NIC has not completed WQE 0" in told


def test_a_service_that_has_been_closed(quick: Pair):
    replace(quick, nic_handler=PROXY)
    assert quick.run(puts, 8, 2, 1)[0] == device.OK
    quick.gpu.own_service().close()
    assert quick.run(puts, 8, 2, 1)[0] == device.ETIMEDOUT
    (told,) = stalls(quick)
    assert "the proxy has not forwarded WQE 2 (forwarded 2, no service forwards it: call ExportedQp.progress()" in told


def test_a_receive_that_nobody_sends_to(quick: Pair, caplog):
    """While a kernel waits for it; no fault, unless the QP cannot receive any more."""
    pair = quick
    sends, receives = (pair.ctx.create_cq(4, overrun=CqOverrun.ENABLE) for _ in range(2))
    qp = pair.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=sends, receive_cq=receives, external_datapath=True)
    with pair.gpu.export_qp(qp, timeout=2.0) as queue, pair.gpu.alloc(64, MemType.CPU_GPU) as out:
        queue.connect(queue)
        assert set(queue.indices()) >= {"receives_posted", "receives_completed"}
        launch = receive[1, 1, pair.gpu](queue, pair.here.address, pair.here_mr.lkey, 64, out)
        until(lambda: queue.indices()["receives_posted"] == 1, "the kernel")
        (told,) = stalls(pair)
        assert "no message has come for receive 0 (posted 1); last CQE: none yet; the QP is in RTS" in told
        assert [record.levelno for record in caplog.records if told == record.message] == [logging.INFO]
        assert launch.wait(20)
        assert out.array.view(np.int64)[0] == device.ETIMEDOUT
        assert stalls(pair) == []  # posted still, but nobody waits
    qp.close()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.soft_nic
def test_an_error_that_a_kernel_has_seen(quick: Pair):
    quick.there_mr.close()
    assert quick.run(puts, 8, 3, 1)[0] == device.EIO
    error = quick.a.last_error()
    assert error is not None
    assert (error.index, error.syndrome, error.vendor_syndrome, error.state) == (
        0, Syndrome.REMOTE_ACCESS, Reason.RKEY_UNKNOWN, QpState.ERR,
    )
    assert "no memory region of the peer" in error.cause or "rkey" in error.cause
    assert "Likely cause" in error.cause
    assert str(error).startswith("WQE 0 failed: REMOTE_ACCESS (syndrome 0x13, vendor 0x0a), the QP is in ERR: soft0: ")


@pytest.mark.parametrize("collapsed", [False, True])
def test_an_error_that_no_kernel_has_looked_at(quick: Pair, collapsed):
    replace(quick, cq_collapsed=collapsed)
    cq = quick.nic.cqs[quick.a.cq.cqn]
    sent = 5 if collapsed else 20
    assert quick.run(puts, 8, sent, int(not collapsed))[0] == device.OK
    until(lambda: int(cq["pi"]) == sent, "the NIC")
    quick.there_mr.close()
    assert quick.run(puts, 8, 3, 0)[0] == device.OK
    until(lambda: int(cq["pi"]) == sent + 3, "the error")
    error = quick.a.last_error()
    assert error is not None
    if collapsed:  # only the last completion is there
        assert (error.index, error.syndrome) == (7, Syndrome.WR_FLUSH)
    else:
        assert (error.index, error.syndrome) == (20, Syndrome.REMOTE_ACCESS)
    for end in (quick.a, quick.b):
        end.qp.reset()
        end.reset()
    assert quick.a.last_error() is None


@pytest.mark.soft_nic
def test_an_end_that_refused_a_request(quick: Pair):
    """It goes to ERR without a completion of its own; the NIC knows why."""
    quick.there_mr.close()
    assert quick.run(puts, 8, 1, 1)[0] == device.EIO
    until(lambda: quick.b.qp.state is QpState.ERR, "the other end")
    error = quick.b.last_error()
    assert error is not None
    assert (error.index, error.syndrome, error.state) == (None, 0, QpState.ERR)
    assert "rkey" in error.cause
    assert "without an error completion" in str(error)


def test_a_queue_that_was_moved_to_err(quick: Pair):
    assert quick.a.last_error() is None
    quick.a.qp.to_error()
    error = quick.a.last_error()
    assert error is not None
    assert (error.index, error.state) == (None, QpState.ERR)
    assert error.cause == "no reason from the device; a modify to ERR does that, too"


def test_a_failed_receive(quick: Pair):
    pair = quick
    cqs = [pair.ctx.create_cq(4, overrun=CqOverrun.ENABLE) for _ in range(2)]
    qp = pair.pd.create_qp(sq_wr=4, rq_wr=4, send_cq=cqs[0], receive_cq=cqs[1], external_datapath=True)
    with pair.gpu.export_qp(qp, timeout=2.0) as queue, pair.gpu.alloc(64, MemType.CPU_GPU) as out:
        queue.connect(queue)
        launch = receive[1, 1, pair.gpu](queue, pair.here.address, 0, 64, out)  # a key that nothing has
        until(lambda: queue.indices()["receives_posted"] == 1, "the kernel")
        qp.to_error()
        assert launch.wait(20)
        error = queue.last_error()
        assert error is not None
        assert (error.index, error.syndrome) == (0, Syndrome.WR_FLUSH)
    qp.close()


def test_every_syndrome_has_a_meaning(monkeypatch, pair: Pair):
    """Where the device does not explain itself."""
    monkeypatch.setattr(type(pair.ctx.provider), "explain", lambda self, qpn, vendor: None)
    errors = [QpError.of(pair.a.qp, QpState.ERR, FailedWqe(3, syndrome, 0x77)) for syndrome in Syndrome]
    assert all(f"failed: {syndrome.name} (" in str(error) for syndrome, error in zip(Syndrome, errors, strict=True))
    assert len({error.cause for error in errors}) == len(Syndrome)
    unknown = QpError.of(pair.a.qp, QpState.ERR, FailedWqe(3, 0x7F, 0))
    assert "unknown (syndrome 0x7f" in str(unknown)
