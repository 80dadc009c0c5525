"""Completion queues: shared, lapped, overrun and collapsed."""

from __future__ import annotations

import ctypes

from ..enums import AsyncEventType, CqOverrun, QpState, WrOpcode
from ..errors import BadStateError
from ..formats.cqe import CQE64, CQE_SIZE
from ..verbs import CQ, SendWr
from .kit import check
from .rig import Rig, refused, same, true


@check
def one_cq_for_all(rig: Rig) -> None:
    """Both queues of several queue pairs complete into one CQ, and each completion names its queue pair.

    Source: IBTA 10.2.6; ibv_poll_cq(3) (qp_num).
    """
    cq = rig.near.create_cq(64)
    shared = {"send_cq": cq, "receive_cq": cq, "pd": rig.near.create_pd()}
    sides = [rig.side(rig.near, **shared) for _ in range(4)]
    for one, other in ((0, 1), (2, 3)):
        rig.connect(sides[one], sides[other])
    for number, side in enumerate(sides):
        side.receive(side.memory.sge(), wr_id=100 + number)
    for number, side in enumerate(sides):
        side.post(WrOpcode.SEND, side.memory.sge(), wr_id=number)
    done = [(one.qp_num, one.wr_id) for one in rig.take(cq, 8)]
    wanted = [(side.qp.qpn, wr_id) for n, side in enumerate(sides) for wr_id in (n, 100 + n)]
    same("completions", sorted(done), sorted(wanted))


@check
def polling_in_parts(rig: Rig) -> None:
    """A poll returns at most the requested number of completions, oldest first, over many laps of a small CQ.

    Source: ibv_poll_cq(3).
    """
    a, b = rig.pair(near={"send_cq": rig.near.create_cq(8)})
    for lap in range(5):
        for number in range(7):
            a.post(WrOpcode.RDMA_WRITE, a.memory.sge(), wr_id=10 * lap + number, **b.memory.remote())
        found: list[int] = []

        def poll(found: list[int] = found) -> bool:
            part = a.sent.poll(3)
            true(f"a poll for 3 gives {len(part)} at most", len(part) <= 3)
            found += [one.wr_id for one in part]
            return len(found) >= 7

        rig.until("7 completions", poll)
        same("order of completions", found, [10 * lap + number for number in range(7)])
    same("the consumer index", a.sent.consumer_index, 35)


@check
def cq_overrun(rig: Rig) -> None:
    """Completions beyond a CQ's room are an error of the CQ; the queue pair that caused them goes to ERR.

    Source: IBTA 10.2.6, 11.6.3 (CQ overrun is a CQ error); ibv_get_async_event(3) (IBV_EVENT_CQ_ERR).
    """
    a, b = rig.pair(near={"send_cq": rig.near.create_cq(2)})
    a.qp.post_send(*(SendWr(opcode=WrOpcode.RDMA_WRITE, **b.memory.remote()) for _ in range(8)))
    wanted, found = (AsyncEventType.CQ_ERR.name, str(a.sent)), []
    while wanted not in found and (event := rig.near.get_async_event(rig.patience)):  # also the queue pair's
        event.ack()
        found.append((event.type.name, str(event.element)))
    true(f"CQ_ERR of {a.sent} is among the events {found}", wanted in found)
    rig.state(a.qp, QpState.ERR)


@check
def cq_overrun_allowed(rig: Rig) -> None:
    """A CQ with overrun accepts completions beyond its room, and no object goes to an error state.

    Source: doca_verbs_cq_attr_set_cq_overrun; PRM, cq_context.oi.
    """
    a, b = rig.pair(near={"send_cq": rig.near.create_cq(2, overrun=CqOverrun.ENABLE)})
    b.memory.set_word(0, 0)
    for _ in range(3):
        a.qp.post_send(*(
            SendWr(opcode=WrOpcode.ATOMIC_FETCH_AND_ADD, sges=[a.memory.sge()], add=1, **b.memory.remote(0))
            for _ in range(4)
        ))
    rig.until("12 atomics", lambda: b.memory.word(0) == 12)
    rig.no_event(rig.near)
    same("state of the queue pair", a.qp.state, QpState.RTS)


@check
def collapsed_cq(rig: Rig) -> None:
    """A collapsed CQ keeps the newest completion in its first entry; it cannot be polled.

    Source: doca_verbs_cq_attr_set_cq_collapsed; PRM, cq_context.cc.
    """
    cq = rig.near.create_cq(4, collapsed=True, overrun=CqOverrun.ENABLE)
    a, b = rig.pair(near={"send_cq": cq, "sq_wr": 16, "send_max_sges": 1})
    refused("polling a collapsed CQ", BadStateError, cq.poll)
    for _ in range(6):
        a.qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE, **b.memory.remote()))
    rig.until("the sixth completion in the first entry", lambda: _counter(cq) == 5)
    rig.no_event(rig.near)


def _counter(cq: CQ) -> int:
    """Return the wqe_counter of the first entry."""
    entry = (ctypes.c_char * CQE_SIZE).from_address(cq.ring_address).raw
    return int.from_bytes(entry[CQE64.wqe_counter : CQE64.wqe_counter + 2], "big")


@check
def cq_of_an_external_data_path(rig: Rig) -> None:
    """The CPU cannot use a CQ or queue pair with an external data path.

    Source: doca_verbs_cq_attr_set_external_datapath_en; doca_verbs_qp_init_attr_set_external_datapath_en.
    """
    cq = rig.near.create_cq(4, external_datapath=True)
    refused("polling an external CQ", BadStateError, cq.poll)
    qp = rig.near.create_pd().create_qp(sq_wr=4, send_cq=cq, external_datapath=True)
    qp.connect(qp)
    refused("posting to an external queue pair", BadStateError,
            lambda: qp.post_send(SendWr(opcode=WrOpcode.RDMA_WRITE)))
