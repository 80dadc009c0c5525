"""Every doorbell of the CPU data path, bit for bit, against what data/golden_doorbells.txt has worked out by hand.

The rings, records and registers are plain memory, and what a device would write into completion queues, this test does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_device import CREATE_CQ, CREATE_QP, GID
from golden import dwords, tables
from gpunetio.enums import QpSendDbrMode, WrOpcode
from gpunetio.verbs import CQ, PD, QP, SRQ, UAR, Context, QpEndpoint, RecvWr, SendWr
from recorder import CREATE_RMP, Recorder

GOLDEN = tables("golden_doorbells.txt")
REQ, RESP_SEND = 0, 2  # opcodes of CQEs
RING = 0x8000  # the most that the device has in a ring: two of them are 2^16
ONE, TWO_BLOCKS = SendWr(opcode=WrOpcode.SEND), SendWr(opcode=WrOpcode.SEND, inline=bytes(100))
RECEIVE = RecvWr()


def cqes(cq: CQ) -> np.ndarray:
    """The entries of a CQ as bytes."""
    interface = {"shape": (cq.entries, 64), "typestr": "|u1", "data": (cq.ring_address, False), "version": 3}
    return np.asarray(type("Ring", (), {"__array_interface__": interface})())


def complete(cq: CQ, first: int, count: int, qpn: int, opcode: int, counters: Any = 0) -> None:
    """Be the device: write the CQEs with these indices: sop_drop_qpn, wqe_counter, op_own."""
    indices, found = np.arange(first, first + count), cqes(cq)
    rows = indices % cq.entries
    found[rows, 56:60] = np.frombuffer(qpn.to_bytes(4, "big"), np.uint8)
    found[rows, 60:62] = np.broadcast_to(counters, count).astype(">u2").view(np.uint8).reshape(count, 2)
    found[rows, 63] = opcode << 4 | indices // cq.entries & 1


def connected(ctx: Context, pd: PD | None = None, cq: CQ | None = None, **values: Any) -> QP:
    cq = cq or ctx.create_cq(4)
    made = (pd or ctx.create_pd()).create_qp(send_cq=cq, receive_cq=cq, **values)
    connect(made)
    return made


def connect(qp: QP) -> None:
    qp.connect(QpEndpoint(1, GID, 0, 1024))


# --- sends


def posted(*requests: SendWr, **values: Any) -> Callable[[Recorder, Context], UAR]:
    """The page whose register was rung."""

    def post(device: Recorder, ctx: Context) -> UAR:
        made = connected(ctx, sq_wr=16, max_inline_data=100, **values)
        made.post_send(*requests)
        return made.uar

    return post


def sent_altogether(count: int) -> Callable[[Recorder, Context], UAR]:
    """That many requests, through a ring that is as often full."""

    def post(device: Recorder, ctx: Context) -> UAR:
        cq = ctx.create_cq(4)
        made = connected(ctx, cq=cq, sq_wr=RING)
        for lap, start in enumerate(range(0, count, RING)):
            many = min(RING, count - start)
            made.post_send(*[ONE] * many)
            complete(cq, lap, 1, made.qpn, REQ, start + many - 1 & 0xFFFF)
            assert len(cq.poll()) == 1
        return made.uar

    return post


def sent_by_a_page_of_ones_own(device: Recorder, ctx: Context) -> UAR:
    return posted(ONE, external_uar=ctx.create_uar())(device, ctx)


def sent_after_a_reset(device: Recorder, ctx: Context) -> UAR:
    made = connected(ctx, sq_wr=16)
    made.post_send(*[ONE] * 7)
    made.reset()
    connect(made)
    made.post_send(ONE, ONE, ONE)
    return made.uar


SENDS = {
    "first":    posted(ONE),
    "blocks":   posted(TWO_BLOCKS, ONE, TWO_BLOCKS),
    "half":     sent_altogether(0x8000),
    "last":     sent_altogether(0xFFFF),
    "wraps":    sent_altogether(0x10000),
    "wrapped":  sent_altogether(0x10005),
    "no_dbr":   posted(ONE, ONE, send_dbr_mode=QpSendDbrMode.NO_DBR_EXT),
    "own_page": sent_by_a_page_of_ones_own,
    "reset":    sent_after_a_reset,
}


@pytest.mark.parametrize("name", SENDS)
def test_send(name):
    device = Recorder()
    with Context(device) as ctx:
        uar = SENDS[name](device, ctx)
        assert dwords(device.record(CREATE_QP)) == dwords(GOLDEN["SEND RECORD"].bytes_of[name])
        assert dwords(device.pages[uar.page_id].array.tobytes()) == dwords(GOLDEN["SEND REGISTER"].bytes_of[name])


# --- receives


def received(count: int, **values: Any) -> Callable[[Context], None]:
    def post(ctx: Context) -> None:
        connected(ctx, rq_wr=8, **values).post_recv(*[RECEIVE] * count)

    return post


def received_and_sent(ctx: Context) -> None:
    made = connected(ctx, rq_wr=8, sq_wr=8)
    made.post_recv(RECEIVE, RECEIVE)
    made.post_send(ONE)
    made.post_recv(RECEIVE, RECEIVE)


def received_altogether(count: int) -> Callable[[Context], None]:
    def post(ctx: Context) -> None:
        cq = ctx.create_cq(2 * RING)
        made = connected(ctx, cq=cq, rq_wr=RING)
        for start in range(0, count, RING):
            many = min(RING, count - start)
            made.post_recv(*[RECEIVE] * many)
            complete(cq, start, many, made.qpn, RESP_SEND)
            assert len(cq.poll(RING)) == many

    return post


def received_after_a_reset(ctx: Context) -> None:
    made = connected(ctx, rq_wr=8)
    made.post_recv(*[RECEIVE] * 5)
    made.reset()
    connect(made)
    made.post_recv(RECEIVE, RECEIVE)


RECEIVES = {
    "first":   received(1),
    "several": received(3),
    "wide":    received(2, receive_max_sges=5),
    "both":    received_and_sent,
    "last":    received_altogether(0xFFFF),
    "wraps":   received_altogether(0x10000),
    "wrapped": received_altogether(0x10005),
    "reset":   received_after_a_reset,
}


@pytest.mark.parametrize("name", RECEIVES)
def test_receive(name):
    device = Recorder()
    with Context(device) as ctx:
        RECEIVES[name](ctx)
        assert dwords(device.record(CREATE_QP)) == dwords(GOLDEN["RECEIVE RECORD"].bytes_of[name])


def shared(count: int, **values: Any) -> Callable[[Context], None]:
    def post(ctx: Context) -> None:
        ctx.create_pd().create_srq(8, **values).post_recv(*[RECEIVE] * count)

    return post


def shared_altogether(count: int, room: int) -> Callable[[Context], None]:
    """That many, each `room` of them after the last ones have completed in the order of the list."""

    def post(ctx: Context) -> None:
        pd, cq = ctx.create_pd(), ctx.create_cq(RING)
        srq: SRQ = pd.create_srq(room)
        made = connected(ctx, pd, cq, srq=srq)
        for start in range(0, count, room):
            many = min(room, count - start)
            srq.post_recv(*[RECEIVE] * many)
            complete(cq, start, many, made.qpn, RESP_SEND, np.arange(start, start + many) % srq.entries)
            assert len(cq.poll(many)) == many

    return post


SHARED = {
    "first":    shared(1),
    "several":  shared(3),
    "sges":     shared(2, receive_max_sges=4),
    "recycled": shared_altogether(5, room=3),
    "last":     shared_altogether(0xFFFF, room=0x7FFF),
    "wraps":    shared_altogether(0x10000, room=0x7FFF),
    "wrapped":  shared_altogether(0x10005, room=0x7FFF),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_receive(name):
    device = Recorder()
    with Context(device) as ctx:
        SHARED[name](ctx)
        assert dwords(device.record(CREATE_RMP)) == dwords(GOLDEN["SRQ RECORD"].bytes_of[name])


# --- completions, and events for them


def polled(*counts: int, from_index: int = 0, foreign: int = 0) -> Callable[[CQ, QP], None]:
    """A poll for each count of completions, the first `foreign` of which are of a queue pair that is unknown here."""

    def poll(cq: CQ, qp: QP) -> None:
        cq._consumer = index = from_index  # 2^24 completions would take a while
        for count in counts:
            complete(cq, index, count, qp.qpn, RESP_SEND)
            complete(cq, index, foreign, qp.qpn + 1, RESP_SEND)
            assert len(cq.poll(count)) == count - foreign
            index += count

    return poll


POLLS = {
    "one":        polled(1),
    "all":        polled(4),
    "twice":      polled(1, 2),
    "foreign":    polled(2, foreign=1),
    "second_lap": polled(4, 2),
    "last":       polled(3, from_index=0xFFFFFC),
    "wraps":      polled(2, from_index=0xFFFFFE),
    "wrapped":    polled(3, 2, from_index=0xFFFFFE),
}


@pytest.mark.parametrize("name", POLLS)
def test_poll(name):
    device = Recorder()
    with Context(device) as ctx:
        cq = ctx.create_cq(4)
        POLLS[name](cq, connected(ctx, cq=cq, rq_wr=8))
        assert dwords(device.record(CREATE_CQ)) == dwords(GOLDEN["CQ RECORD"].bytes_of[name])


def armed(*requests: bool, after: Callable[[CQ, QP], None] | None = None) -> Callable[[CQ, QP], None]:
    """Requests for events, each of solicited completions only or of any."""

    def arm(cq: CQ, qp: QP) -> None:
        if after:
            after(cq, qp)
        for solicited in requests:
            cq.req_notify(solicited)

    return arm


def told(times: int, then: Callable[[CQ, QP], None]) -> Callable[[CQ, QP], None]:
    """After so many events, each asked for with `req_notify`."""

    def tell(cq: CQ, qp: QP) -> None:
        for _ in range(times):
            cq.req_notify()
            cq.event_taken()
            cq.ack_events()
        then(cq, qp)

    return tell


ANY, SOLICITED = False, True
ARMS = {
    "any":        armed(ANY),
    "solicited":  armed(SOLICITED),
    "stands":     armed(ANY, SOLICITED),
    "polled":     armed(ANY, after=polled(1, 2)),
    "event":      told(1, armed(ANY, after=polled(2))),
    "asked_less": told(1, armed(SOLICITED)),
    "three":      told(2, armed(ANY)),
    "four":       told(3, armed(SOLICITED)),
    "wrapped":    armed(ANY, after=polled(3, from_index=0xFFFFFE)),
    "own_page":   armed(ANY),
}


@pytest.mark.parametrize("name", ARMS)
def test_arm(name):
    device = Recorder()
    with Context(device) as ctx:
        uar = ctx.create_uar() if name == "own_page" else None
        cq = ctx.create_cq(4, channel=ctx.create_comp_channel(), external_uar=uar)
        ARMS[name](cq, connected(ctx, cq=cq, rq_wr=8))
        assert dwords(device.record(CREATE_CQ)) == dwords(GOLDEN["ARM RECORD"].bytes_of[name])
        assert dwords(device.pages[cq.uar.page_id].array.tobytes()) == dwords(GOLDEN["ARM REGISTER"].bytes_of[name])


def test_every_column_has_its_configuration():
    assert {name: list(golden.bytes_of) for name, golden in GOLDEN.items()} == {
        "SEND RECORD": list(SENDS), "SEND REGISTER": list(SENDS), "RECEIVE RECORD": list(RECEIVES),
        "SRQ RECORD": list(SHARED), "CQ RECORD": list(POLLS), "ARM RECORD": list(ARMS), "ARM REGISTER": list(ARMS),
    }
