"""Shared receive queues: whose receives are used, in what order, and which events are reported."""

from __future__ import annotations

from dataclasses import dataclass

from ..enums import AsyncEventType, QpState, WcOpcode, WcStatus, WrOpcode
from ..errors import DocaErrorCode
from ..verbs import CQ, SRQ, BadWrError, RecvWr
from .kit import check
from .rig import Memory, Rig, Side, Violation, outcomes, same

_SLOT = 8192


@dataclass
class _Pool:
    """Senders with a receiver each. The receivers share an SRQ, a CQ and memory in slots."""

    rig: Rig
    senders: list[Side]
    receivers: list[Side]
    srq: SRQ
    received: CQ
    memory: Memory

    @classmethod
    def open(cls, rig: Rig, senders: int = 3) -> _Pool:
        pd, received = rig.far.create_pd(), rig.far.create_cq(64)
        srq = pd.create_srq(16, receive_max_sges=2)
        memory = rig.memory(pd, 32 * _SLOT)
        pairs = [
            rig.pair(near={"size": 16 * _SLOT}, far={"pd": pd, "srq": srq, "receive_cq": received, "size": 64})
            for _ in range(senders)
        ]
        return cls(rig, [a for a, _ in pairs], [b for _, b in pairs], srq, received, memory)

    def receive(self, *slots: int, nbytes: int = _SLOT) -> None:
        """Post a receive into each of these slots, whose number is its wr_id."""
        self.srq.post_recv(*(RecvWr(sges=[self.memory.sge(slot * _SLOT, nbytes)], wr_id=slot) for slot in slots))

    def arrive(self, *slots: int) -> None:
        """Take the receivers' next completions, and check that they are successes in these slots, in this order."""
        done = self.rig.take(self.received, len(slots))
        same("completions of receives", outcomes(done), [(slot, WcStatus.SUCCESS) for slot in slots])


@check
def srq_serves_many_queue_pairs(rig: Rig) -> None:
    """Every queue pair takes receives from its SRQ; each message is complete in the slot that its completion names.

    Source: IBTA 10.2.9; ibv_post_srq_recv(3).
    """
    pool = _Pool.open(rig)
    each = 5
    pool.receive(*range(3 * each))
    sent: dict[int, list[tuple[Memory, int, int]]] = {}
    for number in range(each):
        for a, b in zip(pool.senders, pool.receivers, strict=True):
            nbytes = 1 + 1500 * number
            a.post(WrOpcode.SEND, a.memory.sge(100 * number, nbytes), wr_id=number)
            sent.setdefault(b.qp.qpn, []).append((a.memory, 100 * number, nbytes))
    done = rig.take(pool.received, 3 * each)
    same("the receives", sorted(outcomes(done)), [(slot, WcStatus.SUCCESS) for slot in range(3 * each)])
    for one in done:
        source, at, nbytes = sent[one.qp_num].pop(0)  # the next message of this sender
        same("length of a message", one.byte_len, nbytes)
        pool.memory.expect_copy(one.wr_id * _SLOT, source, at, nbytes)
    pool.memory.verify("messages in an SRQ")


@check
def srq_order(rig: Rig) -> None:
    """The receives of an SRQ are used in the order of posting, over many laps.

    Source: IBTA 10.2.9; ibv_post_srq_recv(3).
    """
    pool = _Pool.open(rig, 1)
    for lap in range(5):
        slots = [(7 * lap + number) % 31 for number in range(11)]
        pool.receive(*slots)
        for number in range(11):
            pool.senders[0].post(WrOpcode.SEND, pool.senders[0].memory.sge(), wr_id=number)
        pool.arrive(*slots)
        pool.senders[0].succeed(*range(11))


@check
def srq_completes_out_of_order(rig: Rig) -> None:
    """Receives become free when their messages complete, in any order; none is lost or used twice.

    Source: IBTA 10.2.9 (completions of an SRQ's receives come in any order).
    """
    pool = _Pool.open(rig)
    for _ in range(6):
        slots = list(range(9))
        pool.receive(*slots)
        for a, nbytes in zip(pool.senders, (8000, 10, 3000), strict=True):
            for number in range(3):
                a.post(WrOpcode.SEND, a.memory.sge(0, nbytes), wr_id=number)
        done = rig.take(pool.received, 9)
        same("the receives", sorted(outcomes(done)), [(slot, WcStatus.SUCCESS) for slot in slots])
        for a in pool.senders:
            a.succeed(0, 1, 2)


@check
def srq_scatter_and_immediate(rig: Rig) -> None:
    """A receive of an SRQ scatters; a WRITE with immediate data uses one up without touching its memory.

    Source: IBTA 9.4.3, 10.2.9; ibv_post_srq_recv(3).
    """
    pool = _Pool.open(rig, 1)
    (a,) = pool.senders
    pool.srq.post_recv(RecvWr(sges=[pool.memory.sge(5, 3), pool.memory.sge(1000, 100)], wr_id=1))
    pool.receive(2, 3)
    a.post(WrOpcode.SEND, a.memory.sge(0, 50), wr_id=0)
    target = pool.memory.remote(20 * _SLOT)
    a.post(WrOpcode.RDMA_WRITE_WITH_IMM, a.memory.sge(100, 20), imm=77, wr_id=1, **target)
    a.post(WrOpcode.SEND, a.memory.sge(200, 4), wr_id=2)
    a.succeed(0, 1, 2)
    done = rig.take(pool.received, 3)
    wanted = [(1, WcOpcode.RECV, 50, None), (2, WcOpcode.RECV_RDMA_WITH_IMM, 20, 77), (3, WcOpcode.RECV, 4, None)]
    same("completions", [(one.wr_id, one.opcode, one.byte_len, one.imm) for one in done], wanted)
    pool.memory.expect_copy(5, a.memory, 0, 3)
    pool.memory.expect_copy(1000, a.memory, 3, 47)
    pool.memory.expect_copy(20 * _SLOT, a.memory, 100, 20)
    pool.memory.expect_copy(3 * _SLOT, a.memory, 200, 4)
    pool.memory.verify("messages in an SRQ")


@check
def srq_empty(rig: Rig) -> None:
    """Senders wait while the SRQ is empty, and all of them are served later.

    Source: IBTA 9.7.5.2.8, 10.2.9.
    """
    pool = _Pool.open(rig)
    for a in pool.senders:
        a.post(WrOpcode.SEND, a.memory.sge())
    rig.quiet("completions while the SRQ is empty", pool.received.poll)
    for slot in range(3):
        pool.receive(slot)
        pool.arrive(slot)
    for a in pool.senders:
        a.succeed(0)


@check
def srq_receive_that_is_too_small(rig: Rig) -> None:
    """A message longer than its receive moves its own queue pair to ERR, and no other.

    Source: IBTA 10.2.9, 11.6.2; ibv_poll_cq(3) (IBV_WC_LOC_LEN_ERR).
    """
    pool = _Pool.open(rig, 2)
    (a, c), (b, _) = pool.senders, pool.receivers
    pool.receive(0, nbytes=10)
    pool.receive(1)
    a.post(WrOpcode.SEND, a.memory.sge(0, 11))
    (failed,) = rig.take(pool.received, 1)
    same("completion", (failed.qp_num, failed.wr_id, failed.status), (b.qp.qpn, 0, WcStatus.LOC_LEN_ERR))
    a.fail(WcStatus.REM_INV_REQ_ERR, 0)
    rig.state(b.qp, QpState.ERR)
    c.post(WrOpcode.SEND, c.memory.sge(0, 11))
    pool.arrive(1)
    c.succeed(0)


@check
def srq_full(rig: Rig) -> None:
    """An SRQ accepts as many receives as a query says; the next is refused, and the error names it.

    Source: ibv_post_srq_recv(3) (bad_wr); DOCA_ERROR_FULL.
    """
    pool = _Pool.open(rig, 1)
    most = pool.srq.query().max_wr
    pool.srq.post_recv(*(RecvWr(wr_id=number) for number in range(most - 1)))
    try:
        pool.srq.post_recv(RecvWr(wr_id=1), RecvWr(wr_id=2))
    except BadWrError as error:
        same("the receive that was named", (error.index, error.code), (1, DocaErrorCode.FULL))
    else:
        raise Violation(f"receive {most + 1} of an SRQ for {most} was not refused")


@check
def srq_limit(rig: Rig) -> None:
    """One event comes when fewer receives are left than the limit; this disarms the limit, which can be armed again.

    Source: IBTA 10.2.9, 11.6.3 (SRQ limit reached); ibv_modify_srq(3), ibv_get_async_event(3).
    """
    pool = _Pool.open(rig, 1)
    (a,) = pool.senders
    pool.receive(*range(6))
    pool.srq.modify(srq_limit=5)
    same("the limit", pool.srq.query().srq_limit, 5)
    for left in (5, 4, 3):
        a.post(WrOpcode.SEND, a.memory.sge())
        pool.arrive(5 - left)
        a.succeed(0)
        if left == 4:
            rig.event(rig.far, AsyncEventType.SRQ_LIMIT_REACHED, pool.srq)
            same("the limit after its event", pool.srq.query().srq_limit, 0)
        else:
            rig.no_event(rig.far)
    pool.srq.modify(srq_limit=3)
    a.post(WrOpcode.SEND, a.memory.sge())
    pool.arrive(3)
    rig.event(rig.far, AsyncEventType.SRQ_LIMIT_REACHED, pool.srq)


@check
def srq_last_wqe(rig: Rig) -> None:
    """A queue pair with an SRQ that goes to ERR flushes no receives, and reports when it uses no more of them.

    Source: IBTA 10.2.9, 11.6.3 (last WQE reached); ibv_get_async_event(3) (IBV_EVENT_QP_LAST_WQE_REACHED).
    """
    pool = _Pool.open(rig, 2)
    pool.receive(0, 1)
    pool.receivers[0].qp.to_error()
    rig.event(rig.far, AsyncEventType.QP_LAST_WQE_REACHED, pool.receivers[0].qp)
    same("completions", pool.received.poll(), [])
    pool.senders[1].post(WrOpcode.SEND, pool.senders[1].memory.sge())
    pool.arrive(0)
