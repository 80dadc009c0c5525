"""A SEND to a peer without a receive is told while the NIC repeats it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gpunetio import verbs
from gpunetio.enums import WrOpcode
from gpunetio.nic.nic import SoftNic
from gpunetio.nic.observe.receivers import why_not_ready
from gpunetio.nic.state.qp import QP_ROW
from gpunetio.nic.state.tables import Table
from gpunetio.verbs import QP, Context, RecvWr, SendWr
from nic_rig import until

SEND = SendWr(opcode=WrOpcode.SEND, inline=b"")


def open_qp(ctx: Context) -> QP:
    cq = ctx.create_cq(16)
    return ctx.create_pd().create_qp(sq_wr=8, rq_wr=8, send_cq=cq, receive_cq=cq)


@pytest.fixture(params=["soft0", "soft1"], ids=["one NIC", "a wire"])
def ends(request) -> Iterator[tuple[QP, QP]]:
    """Two ends that are not connected, and a service thread that looks when a test says so."""
    with verbs.open("soft0") as ctx, verbs.open(request.param) as other:
        nic(ctx)._service._every_second = lambda: None
        yield open_qp(ctx), open_qp(other)


def nic(ctx: Context) -> SoftNic:
    return ctx.provider.nic  # type: ignore[attr-defined]


def look(qp: QP) -> None:
    """Look when the peer has refused once more."""
    counters = nic(qp.ctx).counters
    before = int(counters["rnr_nak_retry_err"])
    until(lambda: int(counters["rnr_nak_retry_err"]) != before, "another refusal")
    nic(qp.ctx).starved.check()


def done(qp: QP) -> int:
    """How many requests have completed."""
    return int(nic(qp.ctx).qps[qp.qpn]["sq_ci"])


def told(caplog, qp: QP) -> list[str]:
    return [text for text in caplog.messages if f"QP {qp.qpn:#x} (requester), WQE " in text and " waits: " in text]


def test_a_send_that_waits_is_told_once(ends, caplog):
    a, b = ends
    a.connect(b)
    a.post_send(SEND)
    look(a)
    assert told(caplog, a) == []
    for _ in range(4):
        look(a)
    (text,) = told(caplog, a)
    assert text.startswith(f"soft0: QP {a.qpn:#x} (requester), WQE 0 waits: QP {b.qpn:#x} of the peer has no receive ")
    cause = "the peer posts its receives too late: post them before the sends, or raise rnr_retry (7 = forever)"
    assert f"and goes on forever (rnr_retry 7). Likely cause: {cause}" in text
    assert ("or its queue pair has no receive queue" in text) == (a.ctx.name != b.ctx.name)
    b.post_recv(RecvWr(), RecvWr())
    a.post_send(SEND)
    until(lambda: done(a) == 2, "both messages")
    a.post_send(SEND)
    look(a)
    look(a)
    assert "WQE 2 waits" in told(caplog, a)[1]


def test_a_peer_without_a_receive_queue_is_told(caplog):
    """No receive of it can come too late."""
    with verbs.open("soft0") as ctx:
        nic(ctx)._service._every_second = lambda: None
        cq = ctx.create_cq(16)
        a, b = (ctx.create_pd().create_qp(sq_wr=8, send_cq=cq) for _ in range(2))
        a.connect(b)
        a.post_send(SEND)
        for _ in range(2):
            look(a)
        assert f"Likely cause: QP {b.qpn:#x}, the peer, has no receive queue: give it one" in told(caplog, a)[0]
        c, d = (ctx.create_pd().create_qp(sq_wr=8, send_cq=cq) for _ in range(2))
        c.connect(d, rnr_retry=0)
        c.post_send(SEND)
        until(lambda: [report for report in nic(ctx).reports if report.qpn == c.qpn], "the report")
        (report,) = (report for report in nic(ctx).reports if report.qpn == c.qpn)
        assert f"Likely cause: QP {d.qpn:#x}, the peer, has no receive queue: give it one" in report.message


def test_who_gives_up_is_told_how_often_it_tries(ends, caplog):
    a, b = ends
    a.connect(b, rnr_retry=6, min_rnr_timer=26)  # 81.92 ms
    a.post_send(SEND)
    look(a)
    look(a)
    assert "and goes on up to 6 times." in told(caplog, a)[0]


def test_nobody_waits_in_vain(ends, caplog):
    """A request that waited at one look and has been received at the next is not told."""
    a, b = ends
    a.connect(b)
    a.post_send(SEND)
    look(a)
    b.post_recv(RecvWr())
    until(lambda: done(a) == 1, "the message")
    for _ in range(3):
        nic(a.ctx).starved.check()
    assert told(caplog, a) == []


class Vanishing(Table):
    """A table whose row of one number is gone after a first look at it: another thread has destroyed the object."""

    gone = 0

    def __contains__(self, number: int) -> bool:
        found = super().__contains__(number)
        if number == self.gone:
            self.rows[self._slot(number)] = np.zeros((), self.entry.dtype)
        return found


@pytest.mark.parametrize("gone", [2, 3], ids=["sender", "peer"])
def test_a_queue_pair_that_goes_meanwhile(gone):
    """The thread that reports goes on."""
    qps = Vanishing("QP", QP_ROW, 16)
    for number in 2, 3:
        row = qps.rows[number]
        row["qpn"], row["remote_qpn"], row["rq_addr"] = number, 5 - number, 4096
    assert "or its queue pair has no receive queue" not in why_not_ready(qps, 2)
    qps.gone = gone
    assert "or its queue pair has no receive queue" in why_not_ready(qps, 2)
