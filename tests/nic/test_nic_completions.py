"""The software NIC's completions and doorbells: modes, owner bits, collapsed and full CQs, ways to ring."""

import time

import numpy as np
import pytest

from gpunetio.enums import CqOverrun, QpSendDbrMode, QpState
from gpunetio.formats.cqe import CQE64, INIT_OP_OWN, OPCODE_SHIFT
from gpunetio.nic.queues.completion import Completion, write_cqe
from gpunetio.nic.queues.wqes import PATIENCE_NS
from gpunetio.nic.state.reasons import Reason
from nic_rig import (
    ALWAYS,
    FLUSHED,
    LOCAL_QP_OP,
    NOP,
    ON_ERROR,
    ON_FIRST_ERROR,
    REMOTE_ACCESS,
    REQ,
    REQ_ERR,
    RESP_SEND,
    RINGS,
    SEND,
    WITH_EVENT,
    WRITE,
    Queue,
    connect,
    control,
    error_of,
    inline,
    raddr,
    reports_of,
    until,
    view,
)

INVALID = INIT_OP_OWN >> OPCODE_SHIFT

# --- completions -----------------------------------------------------------------------------------------------------


def test_completion_modes(ends):
    """ON_ERROR and ON_FIRST_ERROR are silent about success, WITH_EVENT also counts an event."""
    for ce in (ON_ERROR, ALWAYS, ON_FIRST_ERROR, WITH_EVENT, ON_ERROR):
        ends.write(ce=ce)
    ends.a.ring()
    assert [cqe.counter for cqe in ends.a.done.take(2)] == [1, 3]
    until(ends.a.idle, "the last write")
    assert ends.a.done.none_for()
    assert ends.a.nic.eqs[1]["pi"] == 1


def test_completion_modes_of_errors(ends):
    """Whatever the mode, the first error makes a CQE; of the flushed ones, those in mode ON_FIRST_ERROR do not."""
    for ce in (ON_FIRST_ERROR, ON_ERROR, ALWAYS, WITH_EVENT):
        ends.a.put(WRITE, raddr(0, 0xBAD), ends.here.at(), ce=ce)
        for follower in (ON_FIRST_ERROR, ON_ERROR, ALWAYS, WITH_EVENT):
            ends.a.put(NOP, ce=follower)
        ends.a.ring()
        cqes = ends.a.done.take(4)
        assert [cqe.counter for cqe in cqes] == [0, 2, 3, 4]
        assert [cqe.syndrome for cqe in cqes] == [REMOTE_ACCESS] + [FLUSHED] * 3
        assert ends.a.done.none_for(0.002)
        ends.again()


def test_first_error_after_a_failure_of_the_responder(ends):
    """A QP that a peer's request took to ERR has not told its own program yet."""
    ends.b.put(NOP, ce=ON_FIRST_ERROR)
    ends.b.put(NOP, ce=ON_FIRST_ERROR)
    ends.a.post(WRITE, raddr(0, 0xBAD), ends.here.at())
    ends.refused(ends.a.done.next(), REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
    ends.b.ring()
    cqe = ends.b.done.next()
    assert (cqe.counter, cqe.syndrome) == (0, FLUSHED)
    assert ends.b.done.none_for()


@pytest.mark.parametrize("kind, syndrome", [(RESP_SEND, 0), (REQ_ERR, LOCAL_QP_OP)])
def test_a_cqe_that_is_being_written_belongs_to_no_lap(one, kind, syndrome):
    """Meanwhile it is invalid, with the owner bit of the lap before.

    The payload comes from the second half of the CQE itself, so that the first half ends with what stood in its last
    word while it was written.
    """
    nic, cq = one.a.nic, one.a.qp.ctx.create_cq(4, overrun=CqOverrun.ENABLE)
    start = int(nic.cqs[cq.cqn]["addr"])
    row, entries = nic.cqs.row_address(cq.cqn), view(start, 4 * CQE64.size).reshape(4, CQE64.size)
    nic.pause()
    for index in range(3 * 4):
        lap, slot = divmod(index, 4)
        address = start + CQE64.size * slot
        said = Completion(kind, 1, 2, index, nbytes=32, form=1, head=address + 32, syndrome=syndrome)
        assert write_cqe(nic.control_address, row, said) == 0
        meanwhile, last = entries[slot, 31], entries[slot, 63]
        assert meanwhile & 1 == lap & 1 ^ 1
        assert meanwhile >> OPCODE_SHIFT == INVALID
        assert (last & 1, last >> OPCODE_SHIFT) == (lap & 1, kind)
    nic.resume()
    cq.close()


@pytest.mark.parametrize("entries", [1, 2, 8])
def test_owner_bits(ends, entries):
    """The owner bit is the parity of the lap, from the first entry on."""
    queue, peer = Queue(ends.a.qp.pd, send_cq=ends.a.qp.ctx.create_cq(entries)), Queue(ends.b.qp.pd)
    connect(queue, peer)
    for i in range(5 * entries):
        queue.post(NOP)
        cqe = queue.done.next()
        assert (cqe.owner, cqe.counter) == (i // entries % 2, i)


@pytest.mark.parametrize("before", [0, 0xFFFF_FFFF, 0x3000_0007], ids=hex)
def test_a_request_whose_register_was_overwritten_is_found_in_the_record(one, before):
    """What the record had when its queue was created is no request. Nor is 0, if nothing but 0 was ever there."""
    pd = one.a.qp.pd
    ctx = pd.ctx
    memory = np.zeros(8192, np.uint8)
    page = memory[-int(memory.ctypes.data) % 4096 :][:4096]
    ring, record = page[: 64 * 16], page[2048:2056].view(">u4")
    ring[63::64] = INIT_OP_OWN
    record[1] = before
    umem, channel = ctx.register_umem(page), ctx.create_comp_channel()
    cq = ctx.create_cq(16, channel=channel, external_umem=(umem, 0), external_dbr_umem=(umem, 2048))
    queue = Queue(pd, send_cq=cq)
    connect(queue, queue)
    queue.post(NOP)
    until(lambda: ring[63] == REQ << OPCODE_SHIFT, "a completion")
    assert channel.get_event(0.02) is None
    record[1] = 0  # the first request of libmlx5, for any completion behind index 0
    if before:
        assert channel.get_event(20.0) is cq
        cq.ack_events()
    assert channel.get_event(0.02) is None


def test_cq_shared_by_both_queues_of_both_qps(one):
    cq = one.a.qp.ctx.create_cq(64)
    a, b = (Queue(one.a.qp.pd, send_cq=cq, recv_cq=cq) for _ in range(2))
    connect(a, b)
    b.receive(one.there.at())
    a.post(SEND, one.here.at())
    cqes = a.done.take(2)
    assert {(cqe.opcode, cqe.qpn) for cqe in cqes} == {(RESP_SEND, b.qp.qpn), (REQ, a.qp.qpn)}


def test_collapsed_cq(ends):
    """Entry 0 is the only one; its counter says how far the queue is."""
    cq = ends.a.qp.ctx.create_cq(16, overrun=CqOverrun.ENABLE, collapsed=True)
    queue, peer = Queue(ends.a.qp.pd, send_cq=cq), Queue(ends.b.qp.pd)
    connect(queue, peer)
    before = queue.done.ring[1:].copy()
    last = view(cq.ring_address + 60, 4, ">u4")  # counter, signature, opcode
    for count in (1, 1, 5, 30):
        for _ in range(count):
            queue.put(WRITE, ends.there.remote(), ends.here.at())
        queue.ring()
        until(lambda: last[0] >> 16 == queue.index - 1 and last[0] >> 4 & 15 == REQ, f"WQE {queue.index - 1}")
    assert np.array_equal(queue.done.ring[1:], before)
    queue.post(WRITE, raddr(0, 0xBAD), ends.here.at())
    until(lambda: queue.done.ring[0, 63] >> 4 == REQ_ERR, "the error")
    assert np.array_equal(queue.done.ring[1:], before)


def test_cq_overrun_is_an_error(ends):
    cq = ends.a.qp.ctx.create_cq(4)
    queue, peer = Queue(ends.a.qp.pd, send_cq=cq), Queue(ends.b.qp.pd)
    connect(queue, peer)
    for _ in range(6):
        queue.put(NOP)
    queue.ring()
    until(lambda: queue.qp.state == QpState.ERR, "the QP to fail")
    assert [cqe.counter for cqe in queue.done.take(4)] == [0, 1, 2, 3]
    assert queue.done.none_for()
    (report,) = reports_of(queue.nic, queue.qp.qpn)
    assert (report.reason, report.index) == (Reason.CQ_OVERRUN, 4)
    assert hex(cq.cqn) in report.message
    # The CQ stays in error: a new QP on it fails with its first completion.
    other = Queue(ends.a.qp.pd, send_cq=cq)
    other.qp.connect(other.qp)
    other.post(NOP)
    until(lambda: other.qp.state == QpState.ERR, "the other QP to fail")


def test_cq_does_not_overrun_while_it_is_read(ends):
    queue, peer = Queue(ends.a.qp.pd, send_cq=ends.a.qp.ctx.create_cq(4)), Queue(ends.b.qp.pd)
    connect(queue, peer)
    for _ in range(10):
        for _ in range(4):
            queue.put(NOP)
        queue.ring()
        queue.done.take(4)
    assert queue.qp.state == QpState.RTS


def test_cq_overrun_enabled(ends):
    """Without the check, entries are written over and nothing fails."""
    cq = ends.a.qp.ctx.create_cq(4, overrun=CqOverrun.ENABLE)
    queue, peer = Queue(ends.a.qp.pd, send_cq=cq), Queue(ends.b.qp.pd)
    connect(queue, peer)
    for _ in range(11):
        queue.put(NOP)
    queue.ring()
    until(queue.idle, "all WQEs")
    counters = queue.done.ring[:, 60:62].copy().view(">u2").ravel()
    assert list(counters) == [8, 9, 10, 7]
    assert list(queue.done.ring[:, 63] & 1) == [0, 0, 0, 1]
    assert queue.qp.state == QpState.RTS


# --- doorbells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", RINGS)
def test_each_way_to_ring(ends, how):
    """The record alone is noticed, and so is each register alone; the same ring twice is one."""
    for _ in range(3):
        ends.there.bytes[:] = 0
        ends.write()
        ends.a.ring(how)
        ends.a.ring(how)
        assert ends.a.done.next().opcode == REQ
        assert ends.written()
        ends.a.ring(how)
        assert ends.a.done.none_for(0.005)
    if how.startswith("uar"):
        until(lambda: ends.a.uar[0] == 0, "the NIC to consume the ring")


@pytest.mark.parametrize("how", RINGS)
def test_ring_wakes_a_sleeping_engine(one, how):
    for _ in range(3):
        time.sleep(0.005)  # far longer than an idle engine spins
        one.a.post(NOP, how=how)
        assert one.a.done.next().opcode == REQ


def test_ring_for_some_of_the_wqes(ends):
    for _ in range(4):
        ends.a.put(NOP)
    ends.a.ring(index=3)
    assert [cqe.counter for cqe in ends.a.done.take(3)] == [0, 1, 2]
    assert ends.a.done.none_for(0.005)
    ends.a.ring(index=2)  # an old index
    assert ends.a.done.none_for(0.005)
    ends.a.ring()
    assert ends.a.done.next().counter == 3
    assert ends.a.qp.state == QpState.RTS


def test_shared_register_names_the_queue(one):
    """The register of a UAR page serves every queue: the ring says which one is meant. An unknown one is ignored."""
    first, second = one.a, Queue(one.a.qp.pd, external_uar=one.a.qp.uar)
    second.qp.connect(second.qp)
    assert second.uar.ctypes.data == first.uar.ctypes.data
    for queue in (first, second, first):
        queue.put(NOP)
        queue.ring("uar")
        assert queue.done.next().qpn == queue.qp.qpn
    first.put(NOP)
    first.uar[0] = first.doorbell() ^ 1 << 20  # another QP's number
    until(lambda: first.uar[0] == 0, "the NIC to take the ring")
    assert first.done.none_for()
    first.ring("uar")
    assert first.done.next().opcode == REQ


def test_blueflame_tells_the_end_of_its_wqe(ends):
    """The index written is the WQE's own, and those before it count too; of long ones the first 64 bytes are enough."""
    for how in ("blueflame", "uar blueflame"):
        for _ in range(2 * ends.a.qp.sq_entries // 6):
            ends.a.put(NOP)
            ends.a.put(WRITE, ends.there.remote(), ends.here.at(0, 8))
            ends.a.put(WRITE, ends.there.remote(), inline(bytes(range(200))))  # 4 blocks
            ends.a.ring(how)
            start = ends.a.index - 6
            assert [cqe.counter for cqe in ends.a.done.take(3)] == [start, start + 1, start + 2]
        assert ends.there.bytes[:200].tobytes() == bytes(range(200))
    assert ends.a.qp.state == QpState.RTS


def test_blueflame_of_a_nop_is_no_doorbell(ends):
    """It differs from the ring before it in ds alone, which says that the WQE at that index is there, too."""
    for how in ("register", "blueflame") * 3:
        ends.a.post(NOP, how=how)
        assert ends.a.done.next().counter == ends.a.index - 1


def test_blueflame_and_doorbells_mixed(ends):
    """As the device library does it: the WQE, the record, and the doorbell; or one of them at a time."""
    ways = [("blueflame", "record", "register"), ("uar blueflame", "uar"), ("blueflame",), ("both",)]
    for round_ in range(12):
        ends.a.put(WRITE, ends.there.remote(8 * round_), ends.here.at(8 * round_, 8))
        for how in ways[round_ % 4]:
            ends.a.ring(how)
        assert ends.a.done.next().counter == round_
    assert np.array_equal(ends.there.bytes[:96], ends.here.bytes[:96])
    assert ends.a.done.none_for(0.005)


def test_blueflame_of_a_wqe_that_is_not_in_the_ring(one):
    """The NIC reads the ring: a WQE that was only written to the register is not executed."""
    one.a.register[:] = np.frombuffer(control(NOP, 0, one.a.qp.qpn, 1).ljust(64, b"\0"), ">u8")
    assert error_of(one.a.done.next()) == (LOCAL_QP_OP, Reason.WQE_STALE)


def test_registers_are_cache_lines_of_their_own(one):
    """BlueFlame's 64 bytes are the queue's alone."""
    queues = [Queue(one.a.qp.pd, sq=1, rq=0) for _ in range(3)]
    registers = [queue.qp.doorbell_register for queue in queues]
    assert all(register % 64 == 0 for register in registers)
    assert len(set(registers)) == 3


def test_queue_without_a_record(one):
    """NO_DBR_EXT: the register is all there is, and the record is not read."""
    queue = Queue(one.a.qp.pd, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    queue.qp.connect(queue.qp)
    queue.put(NOP)
    queue.ring("record")
    assert queue.done.none_for()
    queue.ring("register")
    assert queue.done.next().opcode == REQ
    queue.put(NOP)
    view(queue.qp.uar.dbr_less_addr, 8, ">u8")[0] = queue.doorbell()
    assert queue.done.next().opcode == REQ


def test_doorbell_before_the_wqe(ends):
    ends.write()
    ends.a.ring(index=2)
    first, second = ends.a.done.take(2)
    assert first.opcode == REQ
    assert (*error_of(second), second.counter) == (LOCAL_QP_OP, Reason.WQE_STALE, 1)
    (report,) = reports_of(ends.a.nic, ends.a.qp.qpn)
    assert "before the WQE was written" in report.message


def stop_clock(queue: Queue) -> None:
    """The NIC's clock stands still from now on, and nothing is overdue."""
    queue.nic.records["virtual_time"] = 1


def ring_before_the_wqe(ends) -> int:
    """Announce a WQE whose slot holds that of the lap before; the NIC has looked there, and its clock stands still.

    What is returned is the index of the WQE, which is the depth of the ring.
    """
    depth = ends.a.qp.sq_entries
    for _ in range(depth):
        ends.write()
    ends.a.ring()
    ends.a.done.take(depth)
    ends.there.bytes[:] = 0
    stop_clock(ends.a)
    ends.a.ring(index=depth + 1)
    until(lambda: int(ends.a.row["missing"]) == depth + 1, "the NIC to look")
    return depth


def test_stale_wqe_that_looks_complete(ends):
    """A slot holds the WQE of the lap before until its store arrives: that is not executed, however long it takes."""
    depth = ring_before_the_wqe(ends)
    assert ends.a.done.none_for(0.005)
    assert not ends.there.bytes.any()
    ends.write()
    cqe = ends.a.done.next()
    assert (cqe.opcode, cqe.counter) == (REQ, depth)
    assert ends.written()


def test_stale_wqe_that_is_never_written(ends):
    """In the end the QP fails and says why, and what lay in the slot was not executed."""
    depth = ring_before_the_wqe(ends)
    ends.a.nic.records["now"] += PATIENCE_NS
    cqe = ends.a.done.next()
    assert (*error_of(cqe), cqe.counter) == (LOCAL_QP_OP, Reason.WQE_STALE, depth)
    assert not ends.there.bytes.any()


def test_other_queues_go_on_beside_one_whose_wqe_is_missing(one):
    """Who waits is the queue pair, not the engine."""
    other = Queue(one.a.qp.pd)
    other.qp.connect(other.qp)
    stop_clock(one.a)
    one.a.ring(index=1)
    until(lambda: int(one.a.row["missing"]) == 1, "the NIC to look")
    other.post(NOP)
    assert other.done.next().opcode == REQ
    one.a.put(NOP)
    assert one.a.done.next().opcode == REQ


@pytest.mark.parametrize("late", [1, 17, 1 << 15, 46_229])
def test_late_rings_of_a_queue_without_a_record(one, late):
    """Threads ring as they come: an index that others have left far behind is old, and does no harm."""
    queue = Queue(one.a.qp.pd, sq=16, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT)
    queue.qp.connect(queue.qp)
    while queue.index < late + 16:
        for _ in range(16):
            queue.put(NOP)
        queue.ring("register")
        queue.done.take(16)
    queue.ring("register", queue.index - late)
    assert queue.done.none_for(0.005)
    assert queue.qp.state is QpState.RTS
    queue.put(NOP)
    queue.ring("register")
    assert queue.done.next().opcode == REQ
    queue.ring("register", queue.index + 17)  # nor can one be told that is beyond the ring: 65,519 behind
    assert queue.done.none_for(0.005)
    assert queue.qp.state is QpState.RTS


def test_reset_forgets_doorbells(ends):
    """What was rung before a reset is not rung after it, although the old WQEs are still in the ring."""
    for how in RINGS * 3:
        for _ in range(3):
            ends.a.put(NOP)
        ends.a.ring(how)
        ends.a.done.take(3)
        ends.again()
        assert ends.a.done.none_for(0.002)
        assert (ends.a.row["sq_pi"], ends.a.row["sq_ci"]) == (0, 0)
    assert not ends.a.nic.reports


def test_reset_forgets_doorbells_of_a_paused_nic(ends):
    """In a pause the engine has no turn in RST, in which it would look at the register and ignore what is there."""
    for _ in range(3):
        ends.a.put(NOP)
    ends.a.ring("register")
    ends.a.done.take(3)
    ends.a.nic.pause()
    until(lambda: ends.a.nic.record["paused"], "the NIC to stand still")
    try:
        ends.again()
    finally:
        ends.a.nic.resume()
    assert ends.a.done.none_for(0.002)
    assert (ends.a.row["sq_pi"], ends.a.row["sq_ci"]) == (0, 0)
