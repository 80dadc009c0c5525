"""Errors of the software NIC: flushes, retries, and the explanation of each thing that can go wrong."""

import logging
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fake_gpu import LAUNCH_FAILURE, DeviceBuffer, FakeGpus
from gpunetio.enums import Access, QpAttrMask, QpState
from gpunetio.nic.state.reasons import EXPLAIN, Reason
from gpunetio.verbs import QpAttr
from gpunetio.verbs.qp_state import transition
from nic_rig import (
    FA,
    FLUSHED,
    LOCAL_LENGTH,
    LOCAL_QP_OP,
    MASKED_CS,
    NAKS,
    NOP,
    READ,
    REMOTE_ACCESS,
    REMOTE_INVALID,
    REQ,
    RETRY_EXCEEDED,
    RNR_EXCEEDED,
    SEND,
    SIZE,
    WRITE,
    Buffer,
    Ends,
    Queue,
    atomic,
    connect,
    control,
    data,
    error_of,
    inline,
    masked_cs,
    pause,
    raddr,
    reports_of,
    until,
)

GIB = 1 << 30
TO_INIT = (
    QpAttrMask.NEXT_STATE | QpAttrMask.PKEY_INDEX | QpAttrMask.PORT_NUM
    | QpAttrMask.ALLOW_REMOTE_WRITE | QpAttrMask.ALLOW_REMOTE_READ
)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_flush(ends):
    """After an error the rest completes in order with flush errors, receives too; so does what is posted later."""
    for _ in range(3):
        ends.a.receive(ends.here.at())
    ends.write()
    ends.a.put(WRITE, raddr(ends.there.address, 0xBAD), ends.here.at())
    ends.write()
    ends.a.put(SEND, inline(bytes(100)))  # 2 blocks
    ends.write()
    ends.a.ring()
    cqes = ends.a.done.take(5)
    assert [cqe.counter for cqe in cqes] == [0, 1, 2, 3, 5]
    assert [cqe.syndrome for cqe in cqes] == [0, REMOTE_ACCESS] + [FLUSHED] * 3
    assert [error_of(cqe) for cqe in ends.a.arrived.take(3)] == [(FLUSHED, Reason.FLUSH)] * 3
    assert [queue.qp.state for queue in (ends.a, ends.b)] == [QpState.ERR] * 2
    ends.a.post(NOP)
    ends.a.receive(ends.here.at())
    ends.b.receive(ends.there.at())
    assert error_of(ends.a.done.next()) == (FLUSHED, Reason.FLUSH)
    assert [q.arrived.next().counter for q in (ends.a, ends.b)] == [3, 0]


def test_to_error_flushes(ends):
    """2ERR: when it returns, everything posted has completed."""
    pause(ends.a)
    for _ in range(5):
        ends.write()
    ends.a.receive(ends.here.at())
    ends.a.ring("both")
    ends.a.qp.to_error()
    ends.a.nic.resume()
    assert [error_of(cqe) for cqe in ends.a.done.take(5)] == [(FLUSHED, Reason.FLUSH)] * 5
    assert error_of(ends.a.arrived.next()) == (FLUSHED, Reason.FLUSH)
    assert not ends.there.bytes.any()
    assert ends.b.qp.state == QpState.RTS


def test_works_again_after_reset(ends):
    for _ in range(3):
        ends.a.post(WRITE, raddr(0, 0xBAD), ends.here.at())
        ends.refused(ends.a.done.next(), REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
        ends.again(psn=0xFFFFFF)
        ends.there.bytes[:] = 0
        for _ in range(3):
            ends.write()
        ends.a.ring()
        assert [cqe.counter for cqe in ends.a.done.take(3)] == [0, 1, 2]
        assert ends.written()


def test_receive_after_the_message(ends):
    """RNR: the sender tries again, and the message arrives when a receive is there; what follows it waits."""
    ends.again(rnr_retry=7, min_rnr_timer=1)
    ends.a.put(SEND, ends.here.at(0, 100))
    ends.a.put(WRITE, ends.there.remote(200), ends.here.at(200, 10))
    ends.a.put(SEND, ends.here.at(300, 50))
    ends.a.ring()
    until(lambda: ends.a.nic.counters["rnr_nak_retry_err"] >= 3, "retries")
    assert ends.a.done.poll() is None
    assert not ends.there.bytes.any()
    ends.b.receive(ends.there.at(0, 100))
    assert [cqe.wqe_opcode for cqe in ends.a.done.take(2)] == [SEND, WRITE]
    ends.b.receive(ends.there.at(300, 50))
    assert ends.a.done.next().counter == 2
    assert [cqe.byte_cnt for cqe in ends.b.arrived.take(2)] == [100, 50]
    for part in (slice(0, 100), slice(200, 210), slice(300, 350)):
        assert np.array_equal(ends.here.bytes[part], ends.there.bytes[part])
    assert ends.a.qp.state == QpState.RTS


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_rnr_retries_exceeded(ends, retries):
    ends.again(rnr_retry=retries)
    before = int(ends.a.nic.counters["rnr_nak_retry_err"])
    ends.a.post(SEND, ends.here.at())
    assert error_of(ends.a.done.next()) == (RNR_EXCEEDED, Reason.RNR)
    assert ends.a.nic.counters["rnr_nak_retry_err"] - before == retries + 1
    assert [queue.qp.state for queue in (ends.a, ends.b)] == [QpState.ERR, QpState.RTS]


def test_rnr_timer(ends):
    """The responder's timer is waited for: code 12 is 0.64 ms."""
    ends.again(rnr_retry=5, min_rnr_timer=12)
    start = time.monotonic()
    ends.a.post(SEND, ends.here.at())
    assert error_of(ends.a.done.next()) == (RNR_EXCEEDED, Reason.RNR)
    assert 5 * 0.64e-3 <= time.monotonic() - start < 10


def test_peer_that_is_not_there(ends):
    """No answer from a QP that was reset, closed, or connected to another one: the retries are exceeded."""
    ends.b.reset()
    ends.write()
    ends.a.ring()
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    ends.again()
    ends.b.reset()
    ends.b.qp.connect(ends.b.qp)  # to itself
    ends.write()
    ends.a.ring()
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    ends.again()
    ends.b.qp.close()
    ends.write()
    ends.a.ring()
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    assert not ends.there.bytes.any()


def test_peer_that_comes_late(ends):
    """A request waits for its peer as long as there are retries."""
    ends.again(ack_timeout=8, retry_cnt=7)  # 1 ms each
    endpoint = ends.a.qp.endpoint()
    ends.b.reset()
    ends.write()
    ends.a.ring()
    until(lambda: ends.a.nic.counters["local_ack_timeout_err"] >= 1, "a retry")
    ends.b.qp.connect(endpoint, ack_timeout=8)
    cqe = ends.a.done.next()
    if cqe.opcode == REQ:
        assert ends.written()
    else:  # this thread was held up
        assert error_of(cqe) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_ack_timeout_and_retry_count(ends, retries):
    """The first try and each retry have their time (IBTA 9.7.6.1.3)."""
    ends.again(ack_timeout=9, retry_cnt=retries)  # 2.1 ms
    ends.b.reset()
    start = time.monotonic()
    ends.write()
    ends.a.ring()
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    assert (retries + 1) * 4.096e-6 * 2**9 <= time.monotonic() - start < 10


def test_no_retry_is_no_retry(ends):
    """A peer that is ready before the only timeout is over has still missed the request."""
    ends.again(ack_timeout=16, retry_cnt=0)  # 0.27 s
    endpoint = ends.a.qp.endpoint()
    ends.b.reset()
    ends.write()
    ends.a.ring()
    until(lambda: ends.a.nic.counters["local_ack_timeout_err"] >= 1, "the request to be lost")
    ends.b.qp.connect(endpoint, ack_timeout=16)
    assert error_of(ends.a.done.next()) == (RETRY_EXCEEDED, Reason.NO_RESPONSE)
    assert not ends.there.bytes.any()


def test_receive_list_ends_at_lkey_0x100(ends):
    """What follows it is not looked at; a full list needs no end."""
    ends.b.receive(ends.there.at(0, 8))  # its slot has room for 4 segments
    ends.a.post(SEND, ends.here.at(0, 9))
    ends.refused(ends.a.done.next(), REMOTE_INVALID, Reason.RECV_TOO_SMALL)
    assert error_of(ends.b.arrived.next()) == (LOCAL_LENGTH, Reason.RECV_TOO_SMALL)
    told = [report.message for report in reports_of(ends.b.nic, ends.b.qp.qpn)]
    assert "(responder), receive at index 0: a message of 9 bytes arrived for a receive of 8 bytes" in told[-1]
    ends.again()
    ends.b.receive(*(ends.there.at(100 * i, 4) for i in range(4)))
    ends.a.post(SEND, ends.here.at(0, 16))
    assert ends.b.arrived.next().byte_cnt == 16
    assert np.array_equal(ends.there.bytes[300:304], ends.here.bytes[12:16])


def test_impossible_producer_index(ends):
    """A doorbell far beyond the ring fails the QP; what is posted completes once all the same."""
    ends.a.ring("register", 1000)
    assert error_of(ends.a.done.next()) == (LOCAL_QP_OP, Reason.DOORBELL_RANGE)
    assert ends.a.done.none_for(0.005)
    ends.again(rnr_retry=7)
    ends.a.put(SEND, ends.here.at())  # waits for a receive
    ends.a.put(NOP)
    ends.a.ring()
    until(lambda: ends.a.row["sq_pi"] == 2, "the NIC to see both")
    ends.a.ring("register", 1000)
    cqes = ends.a.done.take(2)
    assert [(cqe.counter, error_of(cqe)) for cqe in cqes] == [(i, (FLUSHED, Reason.FLUSH)) for i in range(2)]
    assert ends.a.done.none_for(0.005)
    assert Reason.DOORBELL_RANGE in [report.reason for report in reports_of(ends.a.nic, ends.a.qp.qpn)]


def test_other_qps_go_on(one):
    """An error is its queue's alone."""
    pd = one.a.qp.pd
    others = [(Queue(pd), Queue(pd)) for _ in range(3)]
    for pair in others:
        connect(*pair)
    one.a.post(WRITE, raddr(0, 0xBAD), one.here.at())
    for queue, _ in others:
        queue.post(WRITE, one.there.remote(), one.here.at())
    assert all(queue.done.next().opcode == REQ for queue, _ in others)
    assert error_of(one.a.done.next()) == (REMOTE_ACCESS, Reason.RKEY_UNKNOWN)
    assert {queue.qp.state for pair in others for queue in pair} == {QpState.RTS}


# --- every reason ----------------------------------------------------------------------------------------------------

Case = Callable[[Ends], tuple[Queue, list[Any]]]
LOOPBACK, WIRE = ("soft0",), ("soft0", "soft1")
CASES: dict[tuple[Reason, tuple[str, ...]], Case] = {}
OF_RESPONDER = {
    Reason.RKEY_UNKNOWN, Reason.RKEY_PD, Reason.RKEY_RIGHTS, Reason.RKEY_BOUNDS, Reason.QP_RIGHTS,
    Reason.ATOMIC_ALIGNMENT, Reason.ATOMIC_FAR, Reason.RECV_TOO_SMALL, Reason.RECV_LKEY,
}


def produces(reason: Reason, *where: tuple[str, ...]) -> Callable[[Case], Case]:
    """The function makes the NIC refuse something for `reason`, and returns which queue's report names which values.

    `where` is where that can happen: inside one NIC, across a wire, or without it both.
    """

    def add(case: Case) -> Case:
        for names in where or (LOOPBACK, WIRE):
            CASES[reason, names] = case
        return case

    return add


@produces(Reason.WQE_STALE)
def _stale(ends):
    ends.a.write_wqe(control(NOP, 7, ends.a.qp.qpn, 1))
    ends.a.ring()
    return ends.a, ["the slot of WQE 0 holds", "index 7"]


@produces(Reason.WQE_QPN)
def _wrong_qpn(ends):
    ends.a.write_wqe(control(NOP, 0, ends.b.qp.qpn ^ 0x800000, 1))
    ends.a.ring()
    return ends.a, [hex(ends.b.qp.qpn ^ 0x800000)]


@produces(Reason.WQE_MALFORMED)
def _malformed(ends):
    ends.a.write_wqe(control(WRITE, 0, ends.a.qp.qpn, 1))
    ends.a.ring()
    return ends.a, ["ds = 1", "0x08"]


@produces(Reason.WQE_OPCODE)
def _opcode(ends):
    ends.a.post(0x7F)
    return ends.a, ["0x7f"]


@produces(Reason.LENGTH)
def _length(ends):
    ends.a.post(WRITE, ends.there.remote(), ends.here.at(0, GIB + 1))
    return ends.a, [GIB + 1]


@produces(Reason.LKEY_UNKNOWN)
def _lkey(ends):
    ends.a.post(WRITE, ends.there.remote(), data(ends.here.address, 0x123456, 8))
    return ends.a, ["0x123456", "deregistered"]


@produces(Reason.LKEY_PD)
def _lkey_pd(ends):
    pd = ends.a.qp.ctx.create_pd()
    foreign = Buffer(pd, 64)
    ends.a.post(WRITE, ends.there.remote(), foreign.at())
    return ends.a, [hex(foreign.key), f"PD {pd.pdn:#x}", f"PD {ends.a.qp.pd.pdn:#x}"]


@produces(Reason.LKEY_RIGHTS)
def _lkey_rights(ends):
    locked = Buffer(ends.a.qp.pd, 64, access=Access.REMOTE_READ)
    ends.a.post(READ, ends.there.remote(), locked.at())
    return ends.a, [hex(locked.key), "grants 0x4", "needs 0x1"]


@produces(Reason.LKEY_BOUNDS)
def _lkey_bounds(ends):
    here = ends.here
    ends.a.post(WRITE, ends.there.remote(), here.at(1, SIZE))
    return ends.a, [hex(here.key), f"[{here.address + 1:#x}, +{SIZE})", f"[{here.address:#x}, +{SIZE})"]


@produces(Reason.RKEY_UNKNOWN)
def _rkey(ends):
    swapped = int.from_bytes(ends.there.key.to_bytes(4, "little"), "big")
    ends.a.post(WRITE, raddr(ends.there.address, swapped), ends.here.at())
    return ends.b, [hex(swapped), f"key {ends.there.key:#x} with its bytes swapped"]


@produces(Reason.RKEY_PD)
def _rkey_pd(ends):
    pd = ends.b.qp.ctx.create_pd()
    foreign = Buffer(pd, 64)
    ends.a.post(READ, foreign.remote(), ends.here.at(0, 8))
    return ends.b, [hex(foreign.key), f"PD {pd.pdn:#x}", f"PD {ends.b.qp.pd.pdn:#x}"]


@produces(Reason.RKEY_RIGHTS)
def _rkey_rights(ends):
    locked = Buffer(ends.b.qp.pd, 64, access=Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    ends.a.post(FA, locked.remote(), atomic(1), ends.here.at(0, 8))
    return ends.b, [hex(locked.key), "grants 0x3", "needs 0x8"]


@produces(Reason.RKEY_BOUNDS)
def _rkey_bounds(ends):
    there = ends.there
    ends.a.post(WRITE, there.remote(-1), ends.here.at(0, 10))
    return ends.b, [hex(there.key), f"[{there.address - 1:#x}, +10)", f"[{there.address:#x}, +{SIZE})"]


@produces(Reason.QP_RIGHTS)
def _qp_rights(ends):
    ends.again(remote_access=Access.REMOTE_READ)
    ends.a.post(WRITE, ends.there.remote(), ends.here.at())
    return ends.b, ["allows 0x4", "needs 0x2"]


@produces(Reason.ATOMIC_ALIGNMENT)
def _alignment(ends):
    ends.a.post(FA, ends.there.remote(4), atomic(1), ends.here.at(0, 8))
    return ends.b, [hex(ends.there.address + 4)]


@produces(Reason.ATOMIC_FAR)
def _atomic_in_device_memory(ends):
    gpus = FakeGpus()
    gpus.serve(ends.b.qp.ctx)
    far = DeviceBuffer(gpus, ends.b.qp.pd, 64)
    ends.a.post(FA, far.remote(8), atomic(1), ends.here.at(0, 8))
    return ends.b, [hex(far.address + 8)]


@produces(Reason.COPY_FAILED)
def _copy_failed(ends):
    gpus = FakeGpus()
    gpus.serve(ends.a.qp.ctx)
    far = DeviceBuffer(gpus, ends.a.qp.pd, 64)
    gpus.streams[0].row["copy_error"] = LAUNCH_FAILURE
    ends.a.post(WRITE, ends.there.remote(), far.at())
    return ends.a, ["CUDA_ERROR_LAUNCH_FAILED", "719"]


@produces(Reason.ATOMIC_LENGTH)
def _atomic_length(ends):
    ends.a.post(FA, ends.there.remote(), atomic(1), ends.here.at(0, 12))
    return ends.a, ["returns 8 bytes into 12 bytes"]


@produces(Reason.RECV_TOO_SMALL)
def _too_small(ends):
    ends.b.receive(ends.there.at(0, 60), ends.there.at(0, 3))
    ends.a.post(SEND, ends.here.at(0, 64))
    return ends.b, ["message of 64 bytes", "receive of 63 bytes"]


@produces(Reason.MESSAGE_TOO_LONG)
def _message_too_long(ends):
    ends.a.reset()
    ends.b.reset()
    with patch.dict(transition(QpState.INIT, QpState.RTR).fixed, log_msg_max=5):
        ends.b.qp.connect(ends.a.qp.endpoint())
    ends.a.qp.connect(ends.b.qp.endpoint())
    ends.a.post(WRITE, ends.there.remote(), ends.here.at(0, 33))
    return ends.b, ["message has 33 bytes", "takes 32 at most"]


@produces(Reason.RECV_LKEY)
def _receive_key(ends):
    ends.b.receive(data(ends.there.address, 0x777777, 64))
    ends.a.post(SEND, ends.here.at(0, 64))
    return ends.b, ["0x777777", f"[{ends.there.address:#x}, +64)"]


@produces(Reason.RNR)
def _rnr(ends):
    ends.a.post(SEND, ends.here.at())
    return ends.a, ["all 1 retries"]


@produces(Reason.NO_RESPONSE)
def _no_response(ends):
    ends.b.reset()
    ends.a.post(WRITE, ends.there.remote(), ends.here.at())
    return ends.a, [f"QP {ends.b.qp.qpn:#x}", "all 1 retries"]


@produces(Reason.CQ_OVERRUN)
def _overrun(ends):
    queue = Queue(ends.a.qp.pd, send_cq=ends.a.qp.ctx.create_cq(2))
    queue.qp.connect(queue.qp)
    for _ in range(3):
        queue.put(NOP)
    queue.ring()
    return queue, [f"CQ {queue.send_cq.cqn:#x}", "2 completions"]


@produces(Reason.FLUSH)
def _flush(ends):
    ends.a.qp.to_error()
    ends.a.post(NOP)
    return ends.a, ["in ERR"]


@produces(Reason.DOORBELL_RANGE)
def _range(ends):
    ends.a.ring("register", 1000)
    return ends.a, ["index 1000", "is at 0", f"{ends.a.qp.sq_entries} slots"]


@produces(Reason.QP_STATE)
def _state(ends):
    queue = Queue(ends.a.qp.pd)
    queue.qp.modify(QpAttr(next_state=QpState.INIT), TO_INIT)
    queue.post(NOP)
    return queue, ["state 1"]


def overrun_of_the_peer(ends: Ends) -> Queue:
    """The peer's CQ runs over while it executes requests of a's."""
    queue = Queue(ends.b.qp.pd, recv_cq=ends.b.qp.ctx.create_cq(1))
    ends.a.reset()
    connect(ends.a, queue)
    for _ in range(2):
        queue.receive(ends.there.at())
        ends.a.put(SEND, ends.here.at(0, 1))
    ends.a.ring()
    return queue


@produces(Reason.REMOTE_ABORT, LOOPBACK)
def _abort(ends):
    overrun_of_the_peer(ends)
    return ends.a, ["went to ERR"]


@produces(Reason.NAK_REMOTE_OPERATION, WIRE)
def _operation(ends):
    queue = overrun_of_the_peer(ends)
    return ends.a, [f"QP {queue.qp.qpn:#x}", "while it executed"]


@produces(Reason.NAK_INVALID_REQUEST, WIRE)
def _invalid(ends):
    ends.a.post(FA, ends.there.remote(4), atomic(1), ends.here.at(0, 8))
    return ends.a, [f"QP {ends.b.qp.qpn:#x}", "invalid request"]


@produces(Reason.NAK_REMOTE_ACCESS, WIRE)
def _access(ends):
    ends.a.post(WRITE, ends.there.remote(-1), ends.here.at(0, 10))
    return ends.a, [f"QP {ends.b.qp.qpn:#x}", "remote key or its range"]


def connect_with_mtus(ends: Ends, here: int, there: int) -> None:
    """Connect anew with a path MTU that the ends do not agree on."""
    for queue in (ends.a, ends.b):
        queue.reset()
    endpoints = [replace(queue.qp.endpoint(), mtu=mtu) for queue, mtu in ((ends.a, there), (ends.b, here))]
    ends.a.qp.connect(endpoints[1])
    ends.b.qp.connect(endpoints[0])


@produces(Reason.BAD_REQUEST, WIRE)
def _bad_request(ends):
    connect_with_mtus(ends, here=1024, there=512)
    ends.a.post(WRITE, ends.there.remote(), ends.here.at(0, 2000))
    return ends.b, ["1052 bytes", "0 bytes taken"]  # BTH, RETH and 1024 bytes


@produces(Reason.BAD_RESPONSE, WIRE)
def _bad_response(ends):
    connect_with_mtus(ends, here=512, there=1024)
    ends.a.post(READ, ends.there.remote(), ends.here.at(0, 2000))
    return ends.a, [f"QP {ends.b.qp.qpn:#x}", "1024 bytes"]


@produces(Reason.WQE_OPMOD)
def _opmod(ends):
    ends.a.post(MASKED_CS, ends.there.remote(), masked_cs(1, 2, 3, 4, 4), ends.here.at(0, 4), opmod=0x0A)
    return ends.a, ["opmod 0x0a", "opcode 0x14"]


@produces(Reason.WAIT_FAILED)
def _wait_failed(ends):
    waiting = Queue(ends.a.qp.pd, core_direct_master=True)
    waiting.qp.connect(waiting.qp)
    ends.a.post(WRITE, ends.there.remote(-1), ends.here.at(0, 10))
    waiting.post(0x0F, struct.pack(">8xII", 0, ends.a.send_cq.cqn))
    return waiting, [f"CQ {ends.a.send_cq.cqn:#x}", "completion 0"]


def test_every_reason_has_a_case():
    of_ethernet = {  # test_eth_send.py, test_eth_send_offloads.py
        Reason.FRAME_LENGTH, Reason.INLINE_HEADERS, Reason.CHECKSUM_FLAGS, Reason.WAIT_MODE, Reason.WAIT_TOO_FAR,
        Reason.TSO_HEADERS,
    }
    assert {reason for reason, _ in CASES} == set(Reason) - {Reason.OK} - of_ethernet


@pytest.mark.parametrize(
    ("reason", "ends"), CASES, indirect=["ends"],
    ids=[f"{reason.name}-{'wire' if names == WIRE else 'loopback'}" for reason, names in CASES],
)
def test_reason(ends, reason, caplog):
    """Each mistake is made: the log names the queue and the values that matter, and the QP is in ERR."""
    caplog.set_level(logging.DEBUG, "gpunetio.nic")
    queue, values = CASES[reason, WIRE if ends.wired else LOOPBACK](ends)
    queues = {queue}
    if reason in OF_RESPONDER and not ends.wired:  # both ends know
        queues = {ends.a, ends.b}
    for queue in queues:
        report = until(
            lambda queue=queue: next((r for r in reports_of(queue.nic, queue.qp.qpn) if r.reason == reason), None),
            reason.name,
        )
        for value in (hex(queue.qp.qpn), reason.name, *values):
            assert str(value) in report.message
        until(lambda report=report: report.message in caplog.messages, "the log")
        if reason is not Reason.QP_STATE:
            assert queue.qp.state == QpState.ERR
    if reason in OF_RESPONDER:
        assert error_of(ends.a.done.next())[1] == (NAKS[EXPLAIN[reason].requester] if ends.wired else reason)


def test_report_fields(ends):
    """A report in numbers, on both sides of the wire. A packet does not say which WQE it came from."""
    ends.write()
    ends.a.put(WRITE, raddr(0x1234, 0xBAD00), ends.here.at(0, 99))
    ends.a.ring()
    ends.a.done.take(2)
    for queue, responder in ((ends.a, False), (ends.b, True)):
        (report,) = reports_of(queue.nic, queue.qp.qpn)
        assert (report.nic, report.responder) == (queue.qp.ctx.name, responder)
        assert (report.syndrome, report.opcode) == (REMOTE_ACCESS, WRITE)
        assert report.index == (0 if responder and ends.wired else 1)
        if ends.wired and not responder:
            assert (report.reason, report.key, report.address) == (Reason.NAK_REMOTE_ACCESS, 0, 0)
        else:
            assert report.reason == Reason.RKEY_UNKNOWN
            assert (report.key, report.address, report.nbytes) == (0xBAD00, 0x1234, 99)


def test_work_before_rts_is_reported_once(one):
    """A doorbell in INIT is a mistake worth one line; the WQEs stay posted and run in RTS."""
    queue = Queue(one.a.qp.pd)
    queue.qp.modify(QpAttr(next_state=QpState.INIT), TO_INIT)
    queue.post(NOP)
    queue.post(NOP)
    until(lambda: list(reports_of(queue.nic, queue.qp.qpn)), "a report")
    assert queue.done.none_for(0.05)
    assert len(list(reports_of(queue.nic, queue.qp.qpn))) <= 2
    assert queue.nic.counters["lost_error_records"] == 0
