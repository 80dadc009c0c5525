"""The state SQD, in which a send queue ends what it has begun; and the event of a first message."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from gpunetio import verbs
from gpunetio.enums import AsyncEventType, QpAttrMask, QpState, WcStatus, WrOpcode
from gpunetio.errors import DriverError, InvalidValueError
from gpunetio.formats.commands import Status
from gpunetio.formats.events import EventType
from gpunetio.verbs import CQ, QP, QpAttr, RecvWr, SendWr, Sge
from nic_rig import Buffer, until

PATIENCE = 20.0
BOTH = pytest.mark.parametrize("names", [("soft0", "soft0"), ("soft0", "soft1")], ids=["loopback", "wire"])
_M = QpAttrMask


@dataclass
class Pair:
    """A sender and a receiver, and memory of both."""

    a: QP
    b: QP
    cq: CQ
    source: Buffer
    target: Buffer

    def write(self, count: int = 1, wr_id: int = 0) -> None:
        sge = Sge(self.source.address, 8, self.source.key)
        write = {"remote_addr": self.target.address, "rkey": self.target.mr.rkey}
        for number in range(count):
            self.a.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[sge], wr_id=wr_id + number, **write))

    def statuses(self, count: int) -> list[WcStatus]:
        found: list[verbs.Completion] = []
        until(lambda: found.extend(self.cq.poll()) or len(found) >= count, "completions")
        assert [done.wr_id for done in found] == list(range(count))
        return [done.status for done in found]

    def nic(self, qp: QP):
        return qp.ctx.provider.nic  # type: ignore[attr-defined]


@pytest.fixture
def pair(names: tuple[str, str]) -> Iterator[Pair]:
    with ExitStack() as stack:
        here, there = (stack.enter_context(verbs.open(name)) for name in names)
        near, far = here.create_pd(), there.create_pd()
        cq = here.create_cq(64)
        a = near.create_qp(sq_wr=32, send_cq=cq)
        b = far.create_qp(rq_wr=32, receive_cq=there.create_cq(64))
        yield Pair(a, b, cq, Buffer(near, 4096), Buffer(far, 4096))


def move(qp: QP, state: QpState) -> None:
    qp.modify(QpAttr(next_state=state), _M.NEXT_STATE)


def event_of(qp: QP, kind: AsyncEventType) -> None:
    event = qp.ctx.get_async_event(PATIENCE)
    assert event is not None
    event.ack()
    assert (event.type, event.element) == (kind, qp)


@BOTH
def test_an_idle_queue_is_drained_at_once(pair):
    pair.a.connect(pair.b)
    move(pair.a, QpState.SQD)
    event_of(pair.a, AsyncEventType.SQ_DRAINED)
    assert pair.a.state == QpState.SQD
    assert not pair.a.query()[0].sq_draining


@BOTH
def test_what_is_posted_meanwhile_waits_for_rts(pair):
    pair.a.connect(pair.b)
    pair.write(3)
    assert pair.statuses(3) == [WcStatus.SUCCESS] * 3
    move(pair.a, QpState.SQD)
    event_of(pair.a, AsyncEventType.SQ_DRAINED)
    pair.write(5)
    row = pair.nic(pair.a).qps[pair.a.qpn]
    until(lambda: int(row["late"]) == 9, "the doorbell")  # 8 are announced, and 1
    assert pair.cq.poll() == []
    move(pair.a, QpState.RTS)
    assert pair.statuses(5) == [WcStatus.SUCCESS] * 5
    assert pair.a.state == QpState.RTS


@pytest.mark.parametrize("names", [("soft0", "soft1")], ids=["wire"])
def test_what_has_begun_ends_before_the_event(pair):
    """The peer stands still, so that requests stay on their way."""
    pair.a.connect(pair.b, ack_timeout=20)
    peer, row = pair.nic(pair.b), pair.nic(pair.a).qps[pair.a.qpn]
    peer.pause()
    pair.write(4)
    until(lambda: int(row["sq_sent"]) == 4, "four requests on their way")
    move(pair.a, QpState.SQD)
    assert pair.a.query()[0].sq_draining
    pair.write(2, wr_id=4)
    assert pair.a.ctx.get_async_event(0.05) is None
    with pytest.raises(DriverError, match="SQ_DRAINING") as caught:
        move(pair.a, QpState.RTS)
    assert caught.value.status == Status.BAD_QP_STATE
    peer.resume()
    event_of(pair.a, AsyncEventType.SQ_DRAINED)
    assert int(row["sq_ci"]) == 4
    move(pair.a, QpState.RTS)
    assert pair.statuses(6) == [WcStatus.SUCCESS] * 6


@BOTH
def test_an_error_flushes_what_waits(pair):
    pair.a.connect(pair.b)
    move(pair.a, QpState.SQD)
    event_of(pair.a, AsyncEventType.SQ_DRAINED)
    pair.write(3)
    pair.a.to_error()
    assert pair.statuses(3) == [WcStatus.WR_FLUSH_ERR] * 3
    assert pair.a.state == QpState.ERR


@BOTH
def test_a_reset_ends_it(pair):
    pair.a.connect(pair.b)
    move(pair.a, QpState.SQD)
    event_of(pair.a, AsyncEventType.SQ_DRAINED)
    pair.a.reset()
    pair.b.reset()
    pair.a.connect(pair.b)
    pair.write(1)
    assert pair.statuses(1) == [WcStatus.SUCCESS]


@pytest.mark.parametrize("names", [("soft0", "soft0")], ids=["loopback"])
@pytest.mark.parametrize("state", [QpState.INIT, QpState.RTR])
def test_no_other_state_leads_there(pair, state):
    pair.a.connect(pair.b)
    with pytest.raises(InvalidValueError, match="no transition"):
        pair.a.modify(QpAttr(current_state=state, next_state=QpState.SQD), _M.CURRENT_STATE | _M.NEXT_STATE)


# --- the first message -----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("opcode", [WrOpcode.RDMA_WRITE, WrOpcode.SEND])
def test_the_first_message_in_rtr_is_an_event(pair, opcode):
    """Once: not of the second message, nor in RTS."""
    for qp, peer in ((pair.b, pair.a), (pair.a, pair.b)):
        qp.to_init()
        attr = QpAttr(
            next_state=QpState.RTR, rq_psn=1, dest_qp_num=peer.qpn, min_rnr_timer=1,
            ah_attr=verbs.AhAttr(gid=peer.ctx.query_gid(), hop_limit=64),
        )
        qp.modify(attr, _M.NEXT_STATE | _M.RQ_PSN | _M.DEST_QP_NUM | _M.PATH_MTU | _M.AH_ATTR | _M.MIN_RNR_TIMER)
    rts = _M.NEXT_STATE | _M.SQ_PSN | _M.ACK_TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY
    pair.a.modify(QpAttr(next_state=QpState.RTS, sq_psn=1), rts)
    pair.b.post_recv(*(RecvWr(sges=[Sge(pair.target.address, 64, pair.target.key)]) for _ in range(2)))
    for number in range(2):
        sge = Sge(pair.source.address, 8, pair.source.key)
        more = {"remote_addr": pair.target.address, "rkey": pair.target.mr.rkey} if opcode != WrOpcode.SEND else {}
        pair.a.post_send(SendWr(opcode=opcode, sges=[sge], wr_id=number, **more))
    assert pair.statuses(2) == [WcStatus.SUCCESS] * 2
    event_of(pair.b, AsyncEventType.COMM_EST)
    assert pair.b.ctx.get_async_event(0) is None
    pair.b.modify(QpAttr(next_state=QpState.RTS, sq_psn=1), rts)


@pytest.mark.parametrize("names", [("soft0", "soft0")], ids=["loopback"])
def test_a_channel_hears_of_the_types_it_has_asked_for(pair):
    """The context asks for all; here is one that asks for errors only, and takes its place."""
    pair.a.connect(pair.b)
    provider = pair.a.ctx.provider
    channel = provider.create_event_channel()
    provider.subscribe(channel, pair.a.devx_handle, [EventType.WQ_CATAS_ERROR], 7)
    move(pair.a, QpState.SQD)
    until(lambda: not pair.a.query()[0].sq_draining, "the queue to be drained")
    assert provider.get_event(channel) is None
