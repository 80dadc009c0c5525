"""What QUERY_QP tells of a connection as it goes on, and the limits it was given: message length, READs in flight."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpunetio.enums import QpAttrMask, QpState, QpType
from gpunetio.nic.state.reasons import Reason
from gpunetio.verbs import QpAttr
from gpunetio.verbs.qp_state import transition
from nic_rig import (
    FA,
    LOCAL_LENGTH,
    READ,
    REMOTE_INVALID,
    SEND,
    SIZE,
    WRITE,
    WRITE_IMM,
    Ends,
    Queue,
    atomic,
    error_of,
    pause,
    until,
)

PSN = 0xFFFFFE  # wraps around soon
MTU = 256
PSNS = 1 << 24


@pytest.fixture(params=["inside", "auto", "udp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Two QPs in RST: in one NIC, or with a wire between them."""
    if request.param == "inside":
        opened = Ends.open("soft0")
        opened.a.reset()
        opened.b.reset()
    else:
        opened = Ends.apart(wire=request.param)
    yield opened
    opened.close()


def connect(ends: Ends, end: Queue, **attributes: Any) -> None:
    peer = ends.b if end is ends.a else ends.a
    end.qp.connect(replace(peer.qp.endpoint(psn=PSN), mtu=MTU), psn=PSN, **attributes)


def asked(queue: Queue) -> dict[str, Any]:
    """The context that QUERY_QP gives."""
    return queue.qp._query()  # type: ignore[attr-defined]


def post(ends: Ends, opcode: int, nbytes: int) -> None:
    local = (ends.here.at(0, nbytes),) if nbytes else ()
    headers = {SEND: (), FA: (ends.there.remote(), atomic(1))}
    ends.a.post(opcode, *headers.get(opcode, (ends.there.remote(),)), *local)


# --- QUERY_QP --------------------------------------------------------------------------------------------------------

REQUESTS = [(WRITE, 600, 3), (READ, 512, 2), (SEND, 10, 1), (FA, 8, 1), (WRITE_IMM, 257, 2), (WRITE, 0, 1)]


def test_sequence_numbers_advance(ends):
    """By packets of the path MTU (9.7.2; a READ takes as many as its response), inside a NIC, too."""
    blank = {name: asked(ends.a)[name] for name in ("next_send_psn", "next_rcv_psn", "last_acked_psn", "ssn", "rmsn")}
    assert set(blank.values()) == {0}
    for end in (ends.a, ends.b):
        connect(ends, end)
        assert {name: asked(end)[name] for name in blank} == {
            "next_send_psn": PSN, "next_rcv_psn": PSN, "last_acked_psn": PSN - 1, "ssn": 0, "rmsn": 0,
        }
    for _ in range(4):
        ends.b.receive(ends.there.at())
    sent = 0
    for count, (opcode, nbytes, packets) in enumerate(REQUESTS, 1):
        post(ends, opcode, nbytes)
        assert ends.a.done.next().opcode == 0
        sent += packets
        here, there = asked(ends.a), asked(ends.b)
        assert (here["next_send_psn"], here["last_acked_psn"]) == ((PSN + sent) % PSNS, (PSN + sent - 1) % PSNS)
        assert (here["ssn"], there["rmsn"], there["next_rcv_psn"]) == (count, count, (PSN + sent) % PSNS)
        assert (there["next_send_psn"], here["next_rcv_psn"]) == (PSN, PSN)
    assert (there["sw_rq_counter"], there["hw_rq_counter"]) == (4, 2)
    assert ends.a.qp.query()[0].sq_psn == ends.b.qp.query()[0].rq_psn == (PSN + sent) % PSNS
    ends.a.qp.to_error()
    assert asked(ends.a)["next_send_psn"] == (PSN + sent) % PSNS
    ends.a.reset()
    assert {name: asked(ends.a)[name] for name in blank} == blank


def test_what_is_not_acknowledged(ends):
    if not ends.wired:
        pytest.skip("a request inside a NIC is carried out at once")
    for end in (ends.a, ends.b):
        connect(ends, end, ack_timeout=20)
    pause(ends.b)
    post(ends, WRITE, 600)
    until(lambda: asked(ends.a)["next_send_psn"] == (PSN + 3) % PSNS, "three packets to be sent")
    assert asked(ends.a)["last_acked_psn"] == PSN - 1
    ends.b.nic.resume()
    assert ends.a.done.next().opcode == 0
    assert asked(ends.a)["last_acked_psn"] == (PSN + 2) % PSNS


@pytest.mark.parametrize("kind", ["inside", "auto", "udp"])
def test_lost_messages_count(kind):
    """UC: the sender goes on, and the receiver follows it (9.8.2.2)."""
    both = Ends.open("soft0") if kind == "inside" else Ends.apart(wire=kind)
    a, b = (Queue(queue.qp.pd, qp_type=QpType.UC) for queue in (both.a, both.b))
    ends = Ends(a, b, both.here, both.there)
    for end in (a, b):
        connect(ends, end)
    a.post(WRITE, both.there.remote(SIZE), both.here.at(0, 600))  # behind the region
    post(ends, WRITE, 600)
    assert [cqe.opcode for cqe in a.done.take(2)] == [0, 0]
    until(lambda: both.there.bytes[:600].any(), "the second one")
    assert asked(a)["next_send_psn"] == (PSN + 6) % PSNS
    until(lambda: asked(b)["next_rcv_psn"] == (PSN + 6) % PSNS, "its end")
    both.close()


# --- log_msg_max -----------------------------------------------------------------------------------------------------

LOG = 9  # 512 bytes


def limited(ends: Ends, end: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect both, `end` with messages of up to 512 bytes."""
    for queue in (ends.a, ends.b):
        queue.reset()
        with monkeypatch.context() as patch:
            if queue is end:
                patch.setitem(transition(QpState.INIT, QpState.RTR).fixed, "log_msg_max", LOG)
            connect(ends, queue)
    ends.b.receive(ends.there.at())
    ends.b.receive(ends.there.at())


@pytest.mark.parametrize("opcode", [WRITE, WRITE_IMM, SEND, READ])
def test_messages_longer_than_this_end_sends(ends, opcode, monkeypatch):
    limited(ends, ends.a, monkeypatch)
    post(ends, opcode, 1 << LOG)
    assert ends.a.done.next().opcode == 0
    post(ends, opcode, (1 << LOG) + 1)
    assert error_of(ends.a.done.next()) == (LOCAL_LENGTH, Reason.LENGTH)
    assert ends.b.qp.state == QpState.RTS


@pytest.mark.parametrize("opcode", [WRITE, WRITE_IMM, SEND, READ])
def test_messages_longer_than_the_peer_takes(ends, opcode, monkeypatch):
    limited(ends, ends.b, monkeypatch)
    post(ends, opcode, 1 << LOG)
    assert ends.a.done.next().opcode == 0
    ends.there.bytes[:] = 0
    post(ends, opcode, (1 << LOG) + 1)
    ends.refused(ends.a.done.next(), REMOTE_INVALID, Reason.MESSAGE_TOO_LONG)
    assert ends.b.qp.state == QpState.ERR
    if opcode in (WRITE, WRITE_IMM):
        assert not ends.there.bytes.any()


# --- READs and atomics in flight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", range(17))
def test_reads_in_flight(ends, most):
    """No more are sent than asked for, and as many are taken; no READ is allowed where none may be in flight."""
    for end in (ends.a, ends.b):
        connect(ends, end, max_rd_atomic=most)
    attr = ends.b.qp.query()[0]
    assert attr.max_rd_atomic <= max(most, 1) <= attr.max_dest_rd_atomic
    assert attr.allow_remote_read == (most > 0)
    post(ends, WRITE, 64)
    assert ends.a.done.next().opcode == 0
    for _ in range(20 if most else 1):
        post(ends, READ if most % 2 == 0 else FA, 8)
    if most:
        assert {cqe.opcode for cqe in ends.a.done.take(20)} == {0}
    else:
        ends.refused(ends.a.done.next(), REMOTE_INVALID, Reason.QP_RIGHTS)


def test_no_reads_however_often_they_are_allowed():
    """`max_dest_rd_atomic` 0 lasts until the queue pair is reset."""
    ends = Ends.open("soft0")
    ends.again(max_rd_atomic=0)
    allowing = QpAttr(allow_remote_read=True, allow_remote_atomic=1)  # type: ignore[arg-type]
    ends.b.qp.modify(allowing, QpAttrMask.ALLOW_REMOTE_READ | QpAttrMask.ATOMIC_MODE)
    attr = ends.b.qp.query()[0]
    assert (attr.allow_remote_read, attr.allow_remote_atomic) == (False, 0)
    ends.again()
    assert ends.b.qp.query()[0].allow_remote_read
    ends.close()
