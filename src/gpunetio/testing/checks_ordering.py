"""The order in which requests are executed and complete, unsignalled requests, and WAITs."""

from __future__ import annotations

from ..enums import SendFlags, WcOpcode, WrOpcode
from ..verbs import SendWr, wait_cq_pi
from .kit import check
from .rig import Rig, same

_QUIET = SendFlags(0)
_LONG = 1 << 16
_WORD = 1 << 64


@check
def unsignalled_requests(rig: Rig) -> None:
    """An unsignalled request has no completion; it is done, and its slot free, when a later one completes.

    Source: IBTA 10.8.6; ibv_post_send(3) (IBV_SEND_SIGNALED).
    """
    a, b = rig.pair()
    for lap in range(4):
        for number in range(7):
            at = 64 * number + lap
            a.post(WrOpcode.RDMA_WRITE, a.memory.sge(at, 30), signaled=False, **b.memory.remote(at))
            b.memory.expect_copy(at, a.memory, at, 30)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(600, 1), wr_id=lap, **b.memory.remote(600))
        b.memory.expect_copy(600, a.memory, 600, 1)
        a.succeed(lap)
        b.memory.verify("unsignalled WRITEs")


@check
def all_requests_signalled(rig: Rig) -> None:
    """With sq_sig_all, every request has a completion.

    Source: ibv_create_qp(3); doca_verbs_qp_init_attr_set_sq_sig_all.
    """
    a, b = rig.pair(near={"sq_sig_all": True})
    for number in range(3):
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), signaled=False, wr_id=number, **b.memory.remote())
    a.succeed(0, 1, 2)


@check
def fence(rig: Rig) -> None:
    """A request with a fence starts after earlier READs and atomics, and sends the bytes that they returned.

    Source: IBTA 10.8.3 (ordering rules); ibv_post_send(3) (IBV_SEND_FENCE).
    """
    a, b = rig.pair()
    b.memory.set_word(30_000, 0x1122334455667788)
    for number in range(4):
        here, there = 1000 * number, 40_000 + 10_000 * number
        a.post(WrOpcode.RDMA_READ, a.memory.sge(here, 9000), signaled=False, **b.memory.remote(500))
        a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(100_000, 8), signaled=False, add=1,
               **b.memory.remote(30_000))
        parts = (a.memory.sge(here, 9000), a.memory.sge(100_000, 8))
        a.post(WrOpcode.RDMA_WRITE, *parts, flags=SendFlags.FENCE, wr_id=number, **b.memory.remote(there))
        a.succeed(number)
        a.memory.expect_copy(here, b.memory, 500, 9000)
        a.memory.expect_copy(100_000, b.memory, 30_000, 8)
        b.memory.expect_copy(there, a.memory, here, 9000)
        b.memory.expect_copy(there + 9000, a.memory, 100_000, 8)
        b.memory.expect_word(30_000, 0x1122334455667788 + number + 1)
        for side in (a, b):
            side.memory.verify("a fenced WRITE")


@check
def completion_order(rig: Rig) -> None:
    """The requests of a queue complete in the order of posting, whatever their kind and duration.

    Source: IBTA 9.5, 10.8.3 (completions in the order of the queue); ibv_poll_cq(3).
    """
    a, b = rig.pair(near={"sq_wr": 32})
    old = b.memory.word(200_000)
    for number in range(3):
        b.receive(b.memory.sge(100_000, _LONG), wr_id=number)
    for turn in range(3):
        first = 5 * turn
        a.post(WrOpcode.RDMA_READ, a.memory.sge(70_000, _LONG), wr_id=first, **b.memory.remote())
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 1), wr_id=first + 1, **b.memory.remote(210_000))
        a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(0, 8), add=1, wr_id=first + 2, **b.memory.remote(200_000))
        a.post(WrOpcode.SEND, a.memory.sge(0, 100), wr_id=first + 3)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(0, 10_000), wr_id=first + 4, **b.memory.remote(210_000))
    done = a.succeed(*range(15))
    kinds = [WcOpcode.RDMA_READ, WcOpcode.RDMA_WRITE, WcOpcode.FETCH_ADD, WcOpcode.SEND, WcOpcode.RDMA_WRITE]
    same("opcodes", [one.opcode for one in done], kinds * 3)
    b.arrive(0, 1, 2)
    same("the word", b.memory.word(200_000), (old + 3) % _WORD)


@check
def receives_complete_in_order(rig: Rig) -> None:
    """Messages use receives in the order of posting, and arrive in the order of sending.

    Source: IBTA 9.5, 10.8.3; ibv_post_recv(3).
    """
    a, b = rig.pair()
    for lap in range(3):
        for number in range(8):
            b.receive(b.memory.sge(8000 * number, 8000), wr_id=100 * lap + number)
        lengths = (8000, 0, 1, 4097, 7, 4096, 100, 8000)
        for number, nbytes in enumerate(lengths):
            a.post(WrOpcode.SEND_WITH_IMM, a.memory.sge(9000 * number, nbytes), imm=number, wr_id=number)
            b.memory.expect_copy(8000 * number, a.memory, 9000 * number, nbytes)
        a.succeed(*range(8))
        done = b.arrive(*(100 * lap + number for number in range(8)))
        same("lengths and immediate data", [(one.byte_len, one.imm) for one in done],
             [(nbytes, number) for number, nbytes in enumerate(lengths)])
        b.memory.verify("SENDs")


@check
def writes_and_sends_in_order(rig: Rig) -> None:
    """When a SEND has arrived, the bytes of earlier WRITEs are there.

    Source: IBTA 9.5 (ordering of RDMA WRITE before SEND); 10.8.3.
    """
    a, b = rig.pair()
    for number in range(8):
        b.receive(wr_id=number)
        a.post(WrOpcode.RDMA_WRITE, a.memory.sge(number, _LONG), signaled=False, **b.memory.remote(0))
        a.post(WrOpcode.SEND, wr_id=number)
        b.arrive(number)
        b.memory.expect_copy(0, a.memory, number, _LONG)
        b.memory.verify("WRITEs before a SEND")
        a.succeed(number)


@check
def many_in_flight(rig: Rig) -> None:
    """A queue pair executes requests that were posted together, several times around its ring.

    Source: ibv_post_send(3).
    """
    a, b = rig.pair(near={"sq_wr": 64, "send_cq": rig.near.create_cq(256)})
    nbytes, places = 2000, 40
    for lap in range(6):
        requests = []
        for number in range(places):
            sges, to = [a.memory.sge((nbytes + lap) * number, nbytes)], b.memory.remote(nbytes * number)
            requests.append(SendWr(opcode=WrOpcode.RDMA_WRITE, sges=sges, wr_id=number, **to))
        a.qp.post_send(*requests)
        a.succeed(*range(places))
        for number in range(places):
            b.memory.expect_copy(nbytes * number, a.memory, (nbytes + lap) * number, nbytes)
        b.memory.verify(f"lap {lap}")


@check
def many_reads_in_flight(rig: Rig) -> None:
    """More READs and atomics than the responder keeps at a time are all executed, each once.

    Source: IBTA 9.4.4, 9.4.5; ibv_modify_qp(3) (max_rd_atomic, max_dest_rd_atomic).
    """
    for most in (1, 4):
        a, b = rig.pair(near={"sq_wr": 32}, max_rd_atomic=most)
        b.memory.set_word(0, 0)
        for number in range(12):
            a.post(WrOpcode.ATOMIC_FETCH_AND_ADD, a.memory.sge(8 * number, 8), add=1, wr_id=2 * number,
                   **b.memory.remote(0))
            at = 1000 + 6000 * number
            a.post(WrOpcode.RDMA_READ, a.memory.sge(at, 6000), wr_id=2 * number + 1, **b.memory.remote(at))
            a.memory.expect_word(8 * number, number)
            a.memory.expect_copy(at, b.memory, at, 6000)
        a.succeed(*range(24))
        a.memory.verify(f"{most} READs and atomics at a time")
        same("the sum", b.memory.word(0), 12)


@check
def wait_for_a_completion(rig: Rig) -> None:
    """A WAIT holds its queue until the CQ has that many completions; then the requests behind it start.

    Source: doca_verbs_bridge_set_wait_cq_pi_wr; PRM, Core-Direct (WAIT).
    """
    pd = rig.near.create_pd()
    a, b = rig.pair(near={"core_direct_master": True, "pd": pd})
    c, d = rig.pair(near={"pd": pd})
    a.qp.post_send(
        wait_cq_pi(c.sent, 1, wr_id=1),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[a.memory.sge(0, 64)], wr_id=2, **b.memory.remote(0)),
    )
    for number in range(2):
        rig.quiet(f"completions while {number} of 2 are there", a.sent.poll)
        b.memory.verify("a WRITE behind a WAIT")
        c.post(WrOpcode.RDMA_WRITE, c.memory.sge(), wr_id=number, **d.memory.remote())
        c.succeed(number)
    done = a.succeed(1, 2)
    same("opcodes", [one.opcode for one in done], [WcOpcode.WAIT_CQ_PI, WcOpcode.RDMA_WRITE])
    b.memory.expect_copy(0, a.memory, 0, 64)
    b.memory.verify("a WRITE behind a WAIT that is over")
    a.qp.post_send(wait_cq_pi(c.sent, 0, wr_id=3))
    a.succeed(3)


@check
def wait_for_a_receive(rig: Rig) -> None:
    """A WAIT for a receive forwards a message when it has arrived, without a program in between.

    Source: doca_verbs_bridge_set_wait_cq_pi_wr; PRM, Core-Direct (WAIT).
    """
    a, b = rig.pair(far={"core_direct_master": True})
    b.receive(b.memory.sge(0, 3000), wr_id=1)
    b.qp.post_send(
        wait_cq_pi(b.received, 0, flags=_QUIET),
        SendWr(opcode=WrOpcode.RDMA_WRITE, sges=[b.memory.sge(0, 3000)], wr_id=2, **a.memory.remote(100_000)),
    )
    a.post(WrOpcode.SEND, a.memory.sge(0, 3000))
    a.succeed(0)
    b.succeed(2)
    b.arrive(1)
    a.memory.expect_copy(100_000, a.memory, 0, 3000)
    a.memory.verify("a message that was passed back")
