"""How requests fail: the status at each end, which requests are flushed, and what stays unchanged."""

from __future__ import annotations

from ..enums import QpState, WcStatus, WrOpcode
from ..verbs import Sge
from .kit import check
from .rig import Remote, Rig, outcomes, same

_WRONG = 0xFF  # another tag of the same key


@check
def wrong_remote_key(rig: Rig) -> None:
    """A wrong rkey fails the request; later requests and the responder's receives are flushed; both ends are in ERR.

    Source: IBTA 9.7.5.2, 9.9.2, 9.9.3, 10.10; ibv_poll_cq(3) (IBV_WC_REM_ACCESS_ERR).
    """
    for opcode, nbytes in (
        (WrOpcode.RDMA_WRITE, 100), (WrOpcode.RDMA_READ, 100), (WrOpcode.ATOMIC_FETCH_AND_ADD, 8),
        (WrOpcode.ATOMIC_CMP_AND_SWP, 8),
    ):
        a, b = rig.pair()
        for number in range(2):
            b.receive(b.memory.sge(), wr_id=10 + number)
        to = {**b.memory.remote(), "rkey": b.memory.mr.rkey ^ _WRONG}
        for number in range(3):
            a.post(opcode, a.memory.sge(0, nbytes), wr_id=number, **to)
        a.fail(WcStatus.REM_ACCESS_ERR, 0, 1, 2)
        b.fail_receiving(WcStatus.WR_FLUSH_ERR, 10, 11)
        for side in (a, b):
            side.memory.verify(f"{opcode.name} under a wrong key")


@check
def wrong_local_key(rig: Rig) -> None:
    """A wrong lkey fails the request before it is sent: the responder stays in RTS, its memory unchanged.

    Source: IBTA 9.9.2, 10.10, 11.6.2; ibv_poll_cq(3) (IBV_WC_LOC_PROT_ERR).
    """
    for opcode in (WrOpcode.SEND, WrOpcode.RDMA_WRITE, WrOpcode.RDMA_READ):
        a, b = rig.pair()
        b.receive(b.memory.sge(0, 200))
        entry = Sge(a.memory.mr.address, 100, a.memory.mr.lkey ^ _WRONG)
        for number in range(3):
            a.post(opcode, entry, wr_id=number, **(Remote() if opcode == WrOpcode.SEND else b.memory.remote()))
        a.fail(WcStatus.LOC_PROT_ERR, 0, 1, 2)
        same("the responder's state", b.qp.state, QpState.RTS)
        same("its completions", b.received.poll(), [])
        for side in (a, b):
            side.memory.verify(f"{opcode.name} with a wrong local key")


@check
def wrong_key_of_a_receive(rig: Rig) -> None:
    """A wrong lkey in a receive fails the receive and its SEND.

    Source: IBTA 9.7.5.2, 9.9.3, 11.6.2; ibv_poll_cq(3) (IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR).
    """
    a, b = rig.pair()
    b.receive(Sge(b.memory.mr.address, 100, b.memory.mr.lkey ^ _WRONG), wr_id=10)
    b.receive(b.memory.sge(), wr_id=11)
    for number in range(2):
        a.post(WrOpcode.SEND, a.memory.sge(0, 100), wr_id=number)
    a.fail(WcStatus.REM_OP_ERR, 0, 1)
    b.fail_receiving(WcStatus.LOC_PROT_ERR, 10, 11)
    b.memory.verify("a receive with a wrong key")


@check
def receive_that_is_too_small(rig: Rig) -> None:
    """A message one byte longer than its receive fails at both ends.

    Source: IBTA 9.7.5.2, 9.9.3, 11.6.2; ibv_poll_cq(3) (IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR).
    """
    for nbytes in (1, 100, 10_000):
        a, b = rig.pair()
        for number in range(2):
            b.receive(b.memory.sge(0, nbytes - 1), wr_id=10 + number)
            a.post(WrOpcode.SEND, a.memory.sge(0, nbytes), wr_id=number)
        a.fail(WcStatus.REM_INV_REQ_ERR, 0, 1)
        b.fail_receiving(WcStatus.LOC_LEN_ERR, 10, 11)


@check
def receiver_not_ready(rig: Rig) -> None:
    """With rnr_retry 7, a SEND without a receive waits, and arrives when a receive is posted.

    Source: IBTA 9.7.5.2.8 (RNR NAK); ibv_modify_qp(3) (rnr_retry 7: without end).
    """
    a, b = rig.pair(rnr_retry=7)
    a.post(WrOpcode.SEND, a.memory.sge(0, 100), wr_id=1)
    a.post(WrOpcode.SEND, a.memory.sge(100, 100), wr_id=2)
    rig.quiet("completions of a SEND without a receive", a.sent.poll)
    for number in range(2):
        b.receive(b.memory.sge(1000 * number, 200), wr_id=10 + number)
        b.memory.expect_copy(1000 * number, a.memory, 100 * number, 100)
    a.succeed(1, 2)
    b.arrive(10, 11)
    b.memory.verify("late receives")


@check
def receiver_not_ready_for_too_long(rig: Rig) -> None:
    """When rnr_retry is exhausted, the SEND fails; the responder is unchanged.

    Source: IBTA 9.7.5.2.8, 9.9.2, 11.6.2; ibv_poll_cq(3) (IBV_WC_RNR_RETRY_EXC_ERR).
    """
    for retries in (0, 2):
        a, b = rig.pair(rnr_retry=retries)
        for number in range(3):
            a.post(WrOpcode.SEND, a.memory.sge(), wr_id=number)
        a.fail(WcStatus.RNR_RETRY_EXC_ERR, 0, 1, 2)
        same("the responder's state", b.qp.state, QpState.RTS)


@check
def writes_with_immediate_need_a_receive(rig: Rig) -> None:
    """A WRITE with immediate data waits for a receive, too; without immediate data it needs none.

    Source: IBTA 9.4.3, 9.7.5.2.8.
    """
    a, b = rig.pair(rnr_retry=1)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), wr_id=1, **b.memory.remote())
    a.succeed(1)
    a.post(WrOpcode.RDMA_WRITE_WITH_IMM, a.memory.sge(), wr_id=2, **b.memory.remote())
    a.fail(WcStatus.RNR_RETRY_EXC_ERR, 2)


@check
def peer_that_does_not_answer(rig: Rig) -> None:
    """Requests to a queue pair in ERR, and to a closed one, fail when retry_cnt is exhausted.

    Source: IBTA 9.7.6.1.3, 9.9.2, 11.6.2; ibv_poll_cq(3) (IBV_WC_RETRY_EXC_ERR).
    """
    for closing in (False, True):
        a, b = rig.pair(ack_timeout=8, retry_cnt=1)
        if closing:
            b.qp.close()
        else:
            b.qp.to_error()
        for number in range(2):
            a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), wr_id=number, **b.memory.remote())
        a.fail(WcStatus.RETRY_EXC_ERR, 0, 1)
        b.memory.verify("a WRITE to a queue pair that does not answer")


@check
def what_came_before_an_error(rig: Rig) -> None:
    """Requests before a failed one succeed; unsignalled ones stay silent, but a failed one has a completion.

    Source: IBTA 10.8.6, 10.10; ibv_post_send(3) (IBV_SEND_SIGNALED: errors always complete).
    """
    a, b = rig.pair()
    wrong = {**b.memory.remote(), "rkey": b.memory.mr.rkey ^ _WRONG}
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 100), wr_id=1, **b.memory.remote(0))
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 100), wr_id=2, signaled=False, **b.memory.remote(1000))
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 100), wr_id=3, signaled=False, **wrong)
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 100), wr_id=4, signaled=False, **b.memory.remote(2000))
    same("completions", outcomes(a.sends(3)),
         [(1, WcStatus.SUCCESS), (3, WcStatus.REM_ACCESS_ERR), (4, WcStatus.WR_FLUSH_ERR)])
    for at in (0, 1000):
        b.memory.expect_copy(at, a.memory, 0, 100)
    b.memory.verify("WRITEs before and behind one that fails")


@check
def requests_in_error(rig: Rig) -> None:
    """A move to ERR flushes the posted requests of both queues, and requests posted afterwards.

    Source: IBTA 10.3.1 (Error State), 10.10; ibv_poll_cq(3) (IBV_WC_WR_FLUSH_ERR).
    """
    a, b = rig.pair()
    for number in range(3):
        b.receive(b.memory.sge(), wr_id=number)
    b.qp.to_error()
    b.fail_receiving(WcStatus.WR_FLUSH_ERR, 0, 1, 2)
    b.receive(b.memory.sge(), wr_id=3)
    b.post(WrOpcode.RDMA_WRITE, b.memory.sge(), wr_id=4, signaled=False, **a.memory.remote())
    b.fail_receiving(WcStatus.WR_FLUSH_ERR, 3)
    b.fail(WcStatus.WR_FLUSH_ERR, 4)
    a.memory.verify("a WRITE in ERR")


@check
def errors_stay_where_they_are(rig: Rig) -> None:
    """A queue pair in ERR affects no other queue pair, even if they share PD and CQs.

    Source: IBTA 10.2.4, 10.10.
    """
    a, b = rig.pair()
    c, d = rig.pair(
        near={"pd": a.pd, "send_cq": a.sent, "receive_cq": a.received},
        far={"pd": b.pd, "send_cq": b.sent, "receive_cq": b.received},
    )
    a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), remote_addr=b.memory.mr.iova, rkey=b.memory.mr.rkey ^ _WRONG)
    a.fail(WcStatus.REM_ACCESS_ERR, 0)
    d.receive(d.memory.sge(), wr_id=7)
    c.post(WrOpcode.SEND, c.memory.sge(), wr_id=8)
    c.succeed(8)
    d.arrive(7)


@check
def life_after_an_error(rig: Rig) -> None:
    """Both ends of a failed connection can be reset and connected again, and then work.

    Source: IBTA 10.3.1; ibv_modify_qp(3).
    """
    a, b = rig.pair()
    for _ in range(2):
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), remote_addr=b.memory.mr.iova, rkey=b.memory.mr.rkey ^ _WRONG)
        a.fail(WcStatus.REM_ACCESS_ERR, 0)
        rig.state(b.qp, QpState.ERR)
        for side in (a, b):
            side.qp.reset()
        rig.connect(a, b)
        b.receive(b.memory.sge(0, 64), wr_id=1)
        a.post(WrOpcode.SEND, a.memory.sge(0, 64), wr_id=2)
        a.succeed(2)
        b.arrive(1)
        b.memory.expect_copy(0, a.memory, 0, 64)
        b.memory.verify("a SEND after an error")
